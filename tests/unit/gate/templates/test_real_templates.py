"""Conversations rendered by the images as they are locked; needs a store with their wheels."""

from __future__ import annotations

from typing import NoReturn

import pytest

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.templates.judge import open_template_gate, run_template_gate
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.parsers.test_real_parsers import STORE
from tests.unit.support import ROOT

pytestmark = pytest.mark.big
# What the images are known to render otherwise; docs/gates.md says what is behind each.
KNOWN = {
    "sglang-k2": {"tool", "tools-and-system", "tool-result", "two-calls-and-their-results",
                  "turns-after-a-tool-result"},
    "sglang": set[str](),
    "vllm": {"picture", "late-system-turn"},
}  # fmt: skip


@pytest.mark.parametrize("image", KNOWN)
def test_an_image_renders_as_the_models_templates_do(image: str) -> None:
    def missing() -> NoReturn:
        pytest.skip(
            f"{STORE} lacks its wheels: `sm120 gate run {image} --only templates` fetches them."
        )

    if not (STORE / "store.json").is_file():
        missing()
    context = GateContext(Checkout(ROOT), open_store(STORE), host_platform(), missing, missing)
    plan = plan_image(context.checkout, image, "linux/amd64")
    result = run_template_gate(open_template_gate(context, plan, {}))
    assert len(result.cases) > 30
    failed = {case.name.partition("/")[2] for case in result.cases if case.verdict == "failed"}
    assert failed == KNOWN[image]
    assert {case.verdict for case in result.cases} <= {"passed", "accepted", "failed"}

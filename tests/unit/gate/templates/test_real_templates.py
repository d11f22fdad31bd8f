"""Conversations rendered by the images as they are locked; needs a store with their wheels."""

from __future__ import annotations

from typing import NoReturn

import pytest

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.patches import TEMPLATES, judge_chat_patch
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.templates.judge import (
    TemplateGate,
    open_template_gate,
    run_template_gate,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec
from tests.unit.gate.parsers.test_real_parsers import STORE
from tests.unit.support import ROOT

pytestmark = pytest.mark.big
# What the images are known to render otherwise; docs/gates.md says what is behind each.
KNOWN: dict[str, set[str]] = {
    "sglang-k2": set(),
    "sglang": set(),
    "vllm": {"kimi-k2.5/picture", "deepseek-v4/late-system-turn"},
}
PATCHES = [
    (image, spec)
    for image in KNOWN
    for spec in Checkout(ROOT).series(Checkout(ROOT).spec(image).on("linux/amd64")).patches
    if (spec.gate or "").startswith(TEMPLATES)
]


def opened(image: str, only: str | None = None) -> TemplateGate:
    def missing() -> NoReturn:
        pytest.skip(
            f"{STORE} lacks its wheels: `sm120 gate run {image} --only templates` fetches them."
        )

    if not (STORE / "store.json").is_file():
        missing()
    context = GateContext(Checkout(ROOT), open_store(STORE), host_platform(), missing, missing)
    return open_template_gate(context, plan_image(context.checkout, image, "linux/amd64"), {}, only)


@pytest.mark.parametrize("image", KNOWN)
def test_an_image_renders_as_the_models_templates_do(image: str) -> None:
    result = run_template_gate(opened(image))
    assert len(result.cases) > 30
    assert {case.name for case in result.cases if case.verdict == "failed"} == KNOWN[image]
    assert {case.verdict for case in result.cases} <= {"passed", "accepted", "failed"}


@pytest.mark.parametrize(("image", "spec"), PATCHES, ids=lambda x: getattr(x, "file", x))
def test_a_patch_of_rendering_is_needed(image: str, spec: PatchSpec) -> None:
    gate = opened(image).opened
    verdict = judge_chat_patch(gate, gate.tree, spec)
    assert (verdict.state, verdict.with_patch) == ("needed", {})
    assert len(verdict.without) >= 5

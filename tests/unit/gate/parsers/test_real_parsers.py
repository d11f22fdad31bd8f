"""The parsers of the images as they are locked; needs a store that holds what they import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.parsers.judge import ParserGate, open_parser_gate, run_parser_gate
from pipeline.images.gate.patches import PARSERS, judge_chat_patch
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec
from tests.unit.support import ROOT

# Read now: each test has an empty store, and no network.
STORE = Path(os.environ.get("SM120_STORE") or Path.home() / ".cache" / "sm120")
IMAGES = ("sglang-k2", "sglang", "vllm")
PATCHES = [
    (image, spec)
    for image in IMAGES
    for spec in Checkout(ROOT).series(Checkout(ROOT).spec(image)).patches
    if (spec.gate or "").startswith(PARSERS)
]

pytestmark = pytest.mark.big


def opened(image: str) -> ParserGate:
    def missing() -> NoReturn:
        pytest.skip(
            f"{STORE} lacks its wheels: `sm120 gate run {image} --only parsers` fetches them."
        )

    if not (STORE / "store.json").is_file():
        missing()
    context = GateContext(Checkout(ROOT), open_store(STORE), host_platform(), missing, missing)
    return open_parser_gate(context, plan_image(context.checkout, image, "linux/amd64"))


@pytest.mark.parametrize("image", IMAGES)
def test_no_answer_gets_lost_in_an_image_with_its_patches(image: str) -> None:
    result = run_parser_gate(opened(image))
    assert result.verdict in ("passed", "accepted")
    assert sum(case.streams for case in result.cases) > 10_000


@pytest.mark.parametrize(("image", "spec"), PATCHES, ids=lambda x: getattr(x, "file", x))
def test_a_patch_of_a_parser_is_needed(image: str, spec: PatchSpec) -> None:
    gate = opened(image)
    verdict = judge_chat_patch(gate, gate.tree, spec)
    assert (verdict.state, verdict.with_patch) == ("needed", {})
    assert verdict.without

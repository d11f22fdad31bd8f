"""The parsers of the images as they are locked; needs a store that holds what they import."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import open_store
from pipeline.core.model import sha256_of
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


# Defects planted in vLLM's own code for gpt-oss: a file, what stands there, what replaces it, and a
# case that shows it.
_PARSER, _SERVING = "parser/harmony.py", "entrypoints/openai/responses/serving.py"
HARMONY = {
    "one call for each tool": (
        *(_PARSER, "                prev_recipient = None\n                continue"),
        *("                continue", "two-calls"),
    ),
    "a preamble is lost": (
        *(_PARSER, '(channel == "commentary" and recipient is None)', "False", "content-call"),
    ),
    "a thought is lost": (_PARSER, 'channel == "analysis":', 'channel == "thought":', "think"),
    "calls are not counted": (
        *(_PARSER, "self._next_tool_call_index += 1", "pass", "three-kinds"),
    ),
    "the name keeps its prefix": (
        *("entrypoints/openai/parser/harmony_utils.py", 'recipient.removeprefix("functions.")'),
        *("recipient", "hyphen-name"),
    ),
    "a token for each character": (
        *(_PARSER, 'self._harmony_parser.last_content_delta or ""'),
        *("get_encoding().decode([token_id])", "unicode"),
    ),
    "the name in every step": (
        *(_PARSER, "if prev_recipient != segment.recipient:", "if True:", "call-no-think"),
    ),
    "items run together": (_SERVING, "state.reset_for_new_item()", "pass", "two-calls/responses"),
}


@pytest.mark.parametrize("defect", HARMONY)
def test_a_defect_in_the_engine_s_own_reading_of_gpt_oss_is_caught(
    tmp_path: Path, defect: str
) -> None:
    file, old, new, truth = HARMONY[defect]
    gate = opened("vllm")
    tree = gate.patched()
    folder = shutil.copytree(tree.folder, tmp_path / "engine")
    path = folder / "vllm" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    digest = sha256_of(f"{tree.digest} {defect}".encode())
    cases = gate.gates.chosen(f"gpt-oss*/{truth}")
    results = gate.judge(replace(tree, folder=folder, digest=digest), cases)
    assert [result.verdict for result in results] == ["failed", "failed"]

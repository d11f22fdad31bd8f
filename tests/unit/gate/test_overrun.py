"""From a line of a log to image, patch and case."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.images.gate.evidence import Evidence, EvidenceRow, keep_evidence
from pipeline.images.gate.smem.cases import read_gates
from pipeline.images.gate.tracebacks import (
    Frame,
    KnownKernel,
    Overrun,
    TracebackReader,
    known_kernels,
)
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import ROOT

CHECKOUT = Checkout(ROOT)
SITE = "/opt/venv/lib/python3.11/site-packages"
LINE = "triton.runtime.errors.OutOfResources: shared memory, Required: {}, Hardware limit: 101376"


def frame_line(path: str, function: str) -> str:
    return f'(EngineCore pid=7)   File "{path}", line 371, in {function}\n'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def read(*lines: str) -> list[Overrun]:
    reader = TracebackReader()
    assert list(reader.watch(lines)) == [*lines]
    return reader.overruns


def known(store: Store, *lines: str) -> list[KnownKernel]:
    [overrun] = read(*lines)
    return known_kernels(CHECKOUT, store, overrun)


@pytest.mark.parametrize(
    ("required", "image", "patch", "kernel"),
    [
        (106496, "sglang-k2", "0001-extend-attention-sm120-blocks.patch", "_fwd_kernel"),
        (163840, "sglang", "0001-prefill-attention-sm120-block.patch", "_fwd_kernel"),
        (102400, "vllm", "0001-mla-decode-stages-sm120.patch", "_fwd_grouped_kernel_stage1"),
    ],
)
def test_bytes_alone_name_the_image_whose_patch_is_about_them(
    store: Store, required: int, image: str, patch: str, kernel: str
) -> None:
    first = known(store, LINE.format(required))[0]
    assert (first.image, first.patch, first.kernels[0]) == (image, patch, kernel)
    assert first.same_bytes
    assert not first.in_traceback
    assert first.commands[0] == f"sm120 build {image} && sm120 load {image}"


def test_a_case_pattern_that_is_to_be_run_fits_cases(store: Store) -> None:
    first = known(store, LINE.format(106496))[0]
    start = first.case.removesuffix("*")
    cases = [c.name for c in read_gates(CHECKOUT, first.image).cases(first.gate)]
    assert cases
    assert all(name.startswith(start) for name in cases)


def test_a_kernel_that_is_accepted_as_too_large_is_named_with_the_reason(store: Store) -> None:
    [k2] = [k for k in known(store, LINE.format(147456)) if k.image == "sglang-k2"]
    assert k2.patch is None
    assert "chunked-prefill-size" in (k2.accepted or "")
    assert k2.commands == [f"sm120 gate run sglang-k2 --only smem --case '{k2.case}'"]


@pytest.mark.parametrize("required", [106497, 101376, 71680])
def test_bytes_that_nothing_has_name_nothing(store: Store, required: int) -> None:
    if required != 106497:
        # a patch's reason names them, too: the limit, and what the patched kernel needs
        assert str(required) in CHECKOUT.series(CHECKOUT.spec("sglang-k2")).patches[0].why
    assert not [k for k in known(store, LINE.format(required)) if k.image == "sglang-k2"]


def test_a_traceback_is_surer_than_bytes_that_kernels_share(store: Store) -> None:
    # 114688 bytes are of sglang's extend attention and of vLLM's prefix prefill
    alone = {k.engine for k in known(store, LINE.format(114688))}
    assert alone == {"sglang", "vllm"}
    module = f"{SITE}/sglang/srt/layers/attention/triton_ops/extend_attention.py"
    lines = [frame_line(module, "extend_attention_fwd"), "    _fwd_kernel[grid](\n"]
    named = known(store, *lines, LINE.format(114688))
    assert {(k.image, k.gate) for k in named} == {("sglang-k2", "smem-extend-attention")}
    assert named[0].in_traceback
    assert named[0].same_bytes


@pytest.mark.parametrize(
    ("path", "function"),
    [
        (f"{SITE}/sglang/srt/elsewhere/extend_attention.py", "other"),
        (f"{SITE}/my_extend_attention.py", "extend_attention_fwd"),
        (f"{SITE}/extend_attention.py/graph.py", "extend_attention_fwd"),
    ],
)
def test_a_frame_of_another_function_or_file_is_not_that_of_a_case(
    store: Store, path: str, function: str
) -> None:
    assert known(store, frame_line(path, function), LINE.format(106498)) == []


@pytest.mark.parametrize(
    ("path", "same_path"),
    [
        (f"{SITE}/sglang/srt/layers/attention/triton_ops/extend_attention.py", True),
        ("/src/sglang/python/sglang/srt/layers/attention/triton_ops/extend_attention.py", True),
        # an engine moves its files, and others copy them
        (f"{SITE}/sglang/srt/elsewhere/extend_attention.py", False),
        (f"{SITE}/fork/extend_attention.py", False),
    ],
)
def test_a_function_in_a_file_that_was_moved_is_found_and_said_to_be_elsewhere(
    store: Store, path: str, same_path: bool
) -> None:
    found = known(store, frame_line(path, "extend_attention_fwd"), LINE.format(106496))
    assert {(k.image, k.gate) for k in found} == {("sglang-k2", "smem-extend-attention")}
    assert (found[0].in_traceback, found[0].same_path) == (True, same_path)


def test_a_recorded_result_with_the_same_bytes_names_its_case(store: Store) -> None:
    record = {"kernel": "_fwd_kernel", "module": "m", "shared_bytes": 123456}
    facts = {"kernels": [{"record": record, "verdict": "over"}]}
    row = EvidenceRow(name="extend-mla-576-512", verdict="failed", facts=facts)
    evidence = Evidence(
        gate="smem", arch="sm_120", verdict="failed", inputs={}, made_by={}, rows=[row]
    )
    keep_evidence(store, "sglang-k2", "linux/amd64", f"sha256:{'0' * 64}", [evidence])
    [kernel] = known(store, LINE.format(123456))
    assert (kernel.image, kernel.case) == ("sglang-k2", "extend-mla-576-512")
    assert known(store, LINE.format(123457)) == []


def test_an_overrun_is_kept_once_and_with_its_traceback() -> None:
    line, frame = LINE.format(106496), frame_line("/a/b.py", "f")
    [overrun] = read(line, frame, line, frame_line("/c/d.py", "g"), line)
    assert overrun.traceback.frames == (Frame(path="/a/b.py", function="f"),)


def test_a_traceback_belongs_to_the_next_overrun_alone() -> None:
    lines = [frame_line("/a/b.py", "f"), LINE.format(1), LINE.format(2)]
    assert [len(o.traceback.frames) for o in read(*lines)] == [1, 0]


@pytest.mark.parametrize(
    "line",
    ["Required: many, Hardware limit: 101376", "Hardware limit: 101376", "Required: 106496"],
)
def test_other_lines_are_no_overruns(line: str) -> None:
    assert read(line) == []

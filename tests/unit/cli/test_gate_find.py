"""`sm120 gate find`, over the cases of this checkout."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.unit.gate.smem.test_lookup import CRASH
from tests.unit.support import ROOT, Command

FIND = ("--checkout", ROOT, "gate", "find")
SGLANG = CRASH.replace("/engine/", "/sglang/")


def test_a_traceback_leads_to_its_case_and_to_the_command_that_judges_it(
    sm120: Command, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    log.write_text(SGLANG)
    done = sm120(*FIND, "--traceback", log, "--image", "sglang-k2")
    assert done.code == 0
    assert "extend-mla-576-512 " in done.out
    assert "Next: sm120 gate run sglang-k2 --only smem --case '" in done.out


def test_a_log_may_come_through_a_pipe(sm120: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SGLANG.encode() + b"\xff")))
    found = sm120(*FIND, "--traceback", "-", "--image", "sglang-k2", "--json").json
    assert "extend-mla-576-512" in [case["case"] for case in found]
    assert {case["function"].partition(":")[2] for case in found} == {"extend_attention_fwd"}


def test_the_cases_of_all_images_are_found_by_a_kernels_name(sm120: Command) -> None:
    found = sm120(*FIND, "_fwd_grouped_kernel_stage1", "--json").json
    assert {"sglang", "sglang-k2", "vllm"} <= {case["image"] for case in found}
    assert {tuple(case["found_by"]) for case in found} == {("_fwd_grouped_kernel_stage1",)}


def test_a_kernel_without_a_case_is_an_error_that_says_how_to_go_on(sm120: Command) -> None:
    ended = sm120(*FIND, "_no_such_kernel", "--image", "vllm")
    assert (ended.error, ended.code) == ("CaseNotFound", 51)
    assert "_no_such_kernel: no case of vllm judges it" in ended.err
    assert "--discover" in ended.err


def test_a_kernel_that_triton_does_not_compile_says_what_it_is(sm120: Command) -> None:
    ended = sm120(*FIND, "fp8_attention_host")
    assert ended.error == "CaseNotFound"
    assert "CuTe DSL (kernels/ops/attention/fp8_fa_sm120/kernel.py)" in ended.err
    assert "CuTe" not in sm120(*FIND, "_no_such_kernel").err


def test_what_was_found_is_shown_although_another_name_was_not(sm120: Command) -> None:
    ended = sm120(*FIND, "_fwd_grouped_kernel_stage1", "_no_such_kernel")
    assert ended.error == "CaseNotFound"
    assert "_fwd_grouped_kernel_stage1" in ended.out


def test_a_log_without_a_traceback_is_not_an_empty_answer(sm120: Command, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("INFO: all is well\n")
    ended = sm120(*FIND, "--traceback", log)
    assert ended.error == "CaseNotFound"
    assert "holds no Python traceback" in ended.err


def test_neither_a_name_nor_a_log_is_refused(sm120: Command) -> None:
    assert "name a kernel, or a log with --traceback FILE" in sm120(*FIND).err


def test_an_image_without_cases_or_of_no_spec_is_refused(sm120: Command) -> None:
    assert sm120(*FIND, "x", "--image", "llama-cpp-cpu").error == "GateInvalid"
    assert sm120(*FIND, "x", "--image", "nope").error == "UnknownImage"


def test_a_part_of_a_name_or_a_misspelled_one_leads_to_the_whole_name(sm120: Command) -> None:
    whole = "_tiled_sparse_decode_kernel"
    for typed in ("tiled_sparse", whole.replace("tiled", "tlied")):
        ended = sm120(*FIND, typed, "--image", "sglang")
        assert (ended.error, ended.code) == ("CaseNotFound", 51)
        assert f"Did you mean {whole}?" in ended.err
        assert "--discover" in ended.err
    assert "Did you mean" not in sm120(*FIND, "zzzzzzzz", "--image", "sglang").err


def test_an_empty_name_is_refused(sm120: Command) -> None:
    ended = sm120(*FIND, "")
    assert (ended.code, "name a kernel" in ended.err) == (2, True)


def test_the_engine_that_crashed_comes_before_others_that_share_the_kernel(
    sm120: Command, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    for engine, image in (("vllm", "vllm"), ("sglang", "sglang")):
        log.write_text(
            "Traceback (most recent call last):\n"
            f'  File "/venv/site-packages/{engine}/moved/elsewhere.py", line 6, in some_function\n'
            "    _fwd_grouped_kernel_stage1[grid](\n"
        )
        found = sm120(*FIND, "--traceback", log)
        assert found.code == 0
        assert f"Next: sm120 gate run {image} " in found.out

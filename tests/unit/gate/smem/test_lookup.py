"""From a kernel's name or a traceback to the cases that judge it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from pipeline.app import gate as app_gate
from pipeline.app.workspace import Workspace
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.smem.cases import GateFile, Gates
from pipeline.images.gate.tracebacks import (
    FoundCase,
    Traceback,
    TracebackReader,
    find_by_name,
    find_by_traceback,
)

CRASH = """\
[2026-01-20 03:11:09 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/venv/site-packages/engine/srt/layers/triton_backend.py", line 801, in forward
    self.extend_attention_fwd(
  File "/venv/site-packages/engine/srt/triton_ops/extend_attention.py", line 512, in \
extend_attention_fwd
    _fwd_kernel[grid](
  File "/venv/site-packages/triton/runtime/jit.py", line 419, in <lambda>
    return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)
triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware \
limit: 101376. Reducing block sizes or `num_stages` may help.
"""


def case(name: str, function: str, *kernels: str) -> dict[str, Any]:
    return {
        **{"name": name, "stands_for": ["Kimi K2"], "function": [function]},
        "kernels": list(kernels),
    }


def gates(*cases: dict[str, Any], not_judged: dict[str, str] | None = None) -> dict[str, Gates]:
    file = GateFile.model_validate(
        {"engine": "engine", "why": "to look cases up by name", "cases": list(cases)}
    )
    setup = EngineSetup(package="engine", not_judged=not_judged or {})
    return {"tiny": Gates(setup=setup, gates={"smem-all": file})}


EXTEND = case("extend", "engine.kernels.extend_attention:extend_attention_fwd", "_fwd_kernel")
PREFILL = case("prefill", "engine.ops.prefill_attention:context_fwd", "_fwd_kernel")
DECODE = case("decode", "engine.ops.decode:decode_fwd", "_stage1", "_stage2")
ALL = gates(EXTEND, PREFILL, DECODE)


def read_tracebacks(text: str) -> list[Traceback]:
    reader = TracebackReader()
    assert list(reader.watch(text.splitlines())) == text.splitlines()
    return reader.tracebacks


def names(found: list[FoundCase]) -> list[str]:
    return [each.case for each in found]


@pytest.mark.parametrize(
    ("pattern", "cases"),
    [
        ("_fwd_kernel", ["extend", "prefill"]),
        ("_stage2", ["decode"]),
        ("decode_fwd", ["decode"]),
        ("_stage*", ["decode"]),
        ("_fwd", []),
        ("_STAGE2", []),
        ("engine.ops.decode", []),
    ],
)
def test_a_name_finds_the_cases_of_a_kernel_or_of_the_function_that_launches_it(
    pattern: str, cases: list[str]
) -> None:
    assert names(find_by_name(ALL, pattern)) == cases


def test_a_traceback_finds_the_case_of_its_function_among_kernels_of_one_name() -> None:
    (traceback,) = read_tracebacks(CRASH)
    (found,) = find_by_traceback(ALL, traceback)
    # the engine's file lies elsewhere in this version than in the case
    assert (found.image, found.gate, found.case) == ("tiny", "smem-all", "extend")
    assert found.found_by == ["extend_attention_fwd", "_fwd_kernel"]


def test_a_function_that_no_case_calls_leaves_all_cases_of_its_kernel() -> None:
    (traceback,) = read_tracebacks(CRASH.replace("in extend_attention_fwd", "in another_fwd"))
    assert names(find_by_traceback(ALL, traceback)) == ["extend", "prefill"]


@pytest.mark.parametrize(
    "text",
    [
        CRASH.replace("_fwd_kernel[grid](", "_other[grid](").replace("extend_attention_fwd", "f"),
        # a function of the same name in another file is another function
        CRASH.replace("_fwd_kernel[grid](", "launch(").replace("extend_attention.py", "graph.py"),
    ],
)
def test_a_traceback_through_other_code_finds_nothing(text: str) -> None:
    (traceback,) = read_tracebacks(text)
    assert find_by_traceback(ALL, traceback) == []


def test_each_traceback_of_a_log_is_looked_up_for_itself() -> None:
    tracebacks = read_tracebacks(CRASH + CRASH.replace("_fwd_kernel", "_stage1"))
    assert [names(find_by_traceback(ALL, each)) for each in tracebacks] == [
        ["extend"],
        ["extend", "decode"],
    ]


@pytest.mark.parametrize(
    ("path", "cases"),
    [
        # of a wheel, of a checkout, and moved to another folder
        ("/venv/lib/site-packages/engine/ops/attention.py", ["one"]),
        ("/src/engine/ops/attention.py", ["one"]),
        ("python/engine/other/attention.py", ["other"]),
        ("/venv/site-packages/engine/v1/ops/attention.py", ["one"]),
        # only the name of the file is the same: all that it may be
        ("/venv/site-packages/engine/new/attention.py", ["one", "other"]),
        ("attention.py", ["one", "other"]),
        ("/venv/site-packages/engine/ops/my_attention.py", []),
    ],
)
def test_a_frame_is_of_the_case_whose_file_is_nearest(path: str, cases: list[str]) -> None:
    two = gates(
        case("one", "engine.ops.attention:fwd", "_one"),
        case("other", "engine.other.attention:fwd", "_other"),
    )
    (traceback,) = read_tracebacks(f'  File "{path}", line 1, in fwd\n')
    assert names(find_by_traceback(two, traceback)) == cases


def test_lines_before_the_first_traceback_are_no_clue() -> None:
    (traceback,) = read_tracebacks("INFO: _stage1[grid](x)\n" + CRASH)
    assert names(find_by_traceback(ALL, traceback)) == ["extend"]


def test_lines_of_source_alone_are_a_clue() -> None:
    (traceback,) = read_tracebacks("    _stage1[(batch, heads)](\n")
    assert names(find_by_traceback(ALL, traceback)) == ["decode"]


@pytest.mark.parametrize("text", ["", "INFO: Started server process [1]\n", "Required: 106496"])
def test_a_log_without_a_traceback_holds_no_clue(text: str) -> None:
    assert read_tracebacks(text) == []


def test_what_no_case_can_judge_says_why() -> None:
    reason = "CUDA C++, compiled when it is first called; no Triton to ask"
    (judged,) = gates(EXTEND, not_judged={"flash_mla_*": reason}).values()
    checkout = SimpleNamespace(spec=lambda image: None)
    workspace = cast(Workspace, SimpleNamespace(checkout=lambda: checkout))
    with mock.patch.object(app_gate, "read_gates", return_value=judged):
        found = {
            name: app_gate.find_cases(workspace, [name], image="tiny")[1]
            for name in ("flash_mla_sm120", "_other_kernel", "my_flash_mla_sm120")
        }
    assert [name for name, error in found.items() if reason in str(error)] == ["flash_mla_sm120"]
    assert all("no case of tiny judges it" in str(error) for error in found.values())

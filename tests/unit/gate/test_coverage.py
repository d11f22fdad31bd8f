"""Kernels found by reading code."""

from __future__ import annotations

from pathlib import Path

from pipeline.gate.coverage import coverage, find_kernels

CODE = """
import triton
import triton.language as tl

@triton.jit
def _helper(x):
    return x + 1

@triton.jit
def _kernel(x, BLOCK: tl.constexpr):
    _helper(x)

@triton.autotune(configs=[], key=[])
@triton.jit(do_not_specialize=["n"])
def _tuned(x, n):
    pass

def launch(x):
    _kernel[(1,)](x, BLOCK=16)

def plain(x):
    return x
"""


def test_kernels_are_those_that_are_launched_and_helpers_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "ops.py").write_text(CODE)
    (folder / "broken.py").write_text("@triton.jit\ndef (:\n")
    (folder / "other.py").write_text("def plain(): pass\n")
    found = find_kernels(tmp_path, "engine")
    assert [k.name for k in found] == ["_kernel", "_tuned"]
    assert found[0].launched_by == ["launch"]
    assert found[0].module == "engine.ops"


def test_the_rest_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "ops.py").write_text(CODE)
    found = coverage(find_kernels(tmp_path, "engine"), {("engine.ops", "_kernel")})
    assert (found.kernels, found.reached) == (2, 1)
    assert [k.name for k in found.rest] == ["_tuned"]

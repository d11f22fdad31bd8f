"""Kernels found by reading code."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.gate.smem.coverage import EngineKernels, coverage, engine_kernels
from pipeline.images.gate.smem.engine import EngineTree

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

@triton.jit
def _idle(x):
    pass

def launch(x):
    _kernel[(1,)](x, BLOCK=16)

class Layer:
    def forward(self, x):
        chosen = _tuned if x else None
        chosen[(1,)](x)

def plain(x):
    return x
"""


def find(root: Path, **files: str) -> EngineKernels:
    for name, text in files.items():
        path = root / "engine" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tree = EngineTree(root, "engine", "1", f"sha256:{'0' * 64}")
    # a store for each, so that nothing is found from before
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder, "store"))
        found = engine_kernels(store, tree)
        assert engine_kernels(store, tree) == found, "the store keeps it"
    return found


def names(engine: EngineKernels) -> list[str]:
    return [kernel.name for kernel in engine.kernels]


def test_kernels_are_those_that_host_code_launches_or_hands_on(tmp_path: Path) -> None:
    broken, other = "@triton.jit\ndef (:\n", "def plain(): pass\n"
    result = find(tmp_path, ops=CODE, broken=broken, other=other)
    assert names(result) == ["_kernel", "_tuned"]
    assert [k.launched_by for k in result.kernels] == [["launch"], ["Layer.forward"]]
    assert result.kernels[0].module == "engine.ops"


def test_helpers_and_idle_functions_are_counted_apart(tmp_path: Path) -> None:
    result = find(tmp_path, ops=CODE)
    assert result.helpers == [("engine.ops", "_helper")]
    assert result.idle == [("engine.ops", "_idle")]


@pytest.mark.parametrize(
    "text",
    [
        "import cutlass.cute as cute\n@cute.jit\ndef _kernel(x): pass\ndef f(x): _kernel(x)\n",
        "from numba import jit\n@jit\ndef _kernel(x): pass\ndef f(x): _kernel(x)\n",
        "import torch\n@torch.jit\ndef _kernel(x): pass\ndef f(x): _kernel(x)\n",
        "'''\n@triton.jit\ndef _kernel(x): pass\n'''\n",
    ],
)
def test_what_other_compilers_compile_is_not_triton_s(tmp_path: Path, text: str) -> None:
    result = find(tmp_path, ops=text)
    assert (result.kernels, result.helpers, result.idle) == ([], [], [])


@pytest.mark.parametrize(
    "head", ["from triton import jit\n@jit\n", "from .utils import triton\n@triton.jit(debug=1)\n"]
)
def test_triton_s_jit_is_known_by_where_it_comes_from(tmp_path: Path, head: str) -> None:
    code = "def _kernel(x): pass\ndef f(x): _kernel[(1,)](x)\n"
    assert names(find(tmp_path, ops=head + code)) == ["_kernel"]


def test_a_launch_from_another_file_is_seen_through_the_files_that_pass_the_name_on(
    tmp_path: Path,
) -> None:
    result = find(
        tmp_path,
        **{
            "ops/deep": "import triton\n@triton.jit\ndef _kernel(x): pass\n",
            "ops/__init__": "from .deep import _kernel\n",
            "layer": "from engine import ops\ndef run(x): ops._kernel[(1,)](x)\n",
        },
    )
    assert names(result) == ["_kernel"]
    assert result.kernels[0].launched_by == ["engine.layer:run"]


def test_a_name_that_two_files_use_is_told_apart(tmp_path: Path) -> None:
    code = "import triton\n@triton.jit\ndef _kernel(x): pass\n"
    result = find(tmp_path, a=code + "def run(x): _kernel[(1,)](x)\n", b=code)
    assert [k.module for k in result.kernels] == ["engine.a"]
    assert result.idle == [("engine.b", "_kernel")]


def test_a_kernel_in_a_class_is_launched_by_its_base(tmp_path: Path) -> None:
    head = "import triton\nclass Op(Base):\n    @staticmethod\n"
    code = head + "    @triton.jit\n    def kernel(x): pass\n"
    assert find(tmp_path, ops=code).kernels[0].launched_by == ["Op"]


def test_kernels_for_other_makers_cards_and_tests_are_counted_apart(tmp_path: Path) -> None:
    names = ("amd/ops", "rocm_ops", "test/ops", "hipster")
    result = find(tmp_path, **dict.fromkeys(names, CODE))
    assert {k.module for k in result.kernels} == {"engine.hipster"}
    assert len(result.elsewhere) == 6


def test_the_rest_is_named(tmp_path: Path) -> None:
    result = coverage(find(tmp_path, ops=CODE), {("engine.ops", "_kernel")})
    assert (result.kernels, result.reached) == (2, 1)
    assert (result.helpers, result.idle, result.elsewhere) == (1, 1, 0)
    assert [k.name for k in result.rest] == ["_tuned"]

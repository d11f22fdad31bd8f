"""The worker's parts that need neither torch nor Triton."""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.gate.worker.arguments import build
from pipeline.images.gate.worker.calling import attempt, call
from pipeline.images.gate.worker.engines import find, settle
from pipeline.images.gate.worker.errors import FunctionGone, Stopped
from pipeline.images.gate.worker.recorder import KeptKernels, compiler_faults, means_used, placeless
from pipeline.images.gate.worker.stand_ins import BarePackages, StandIns


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports or puts on the path is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    ops = tmp_path / "tinyengine" / "ops"
    ops.mkdir(parents=True)
    (tmp_path / "tinyengine" / "__init__.py").write_text("raise RuntimeError('starts a server')\n")
    (ops / "__init__.py").write_text("")
    (ops / "decode.py").write_text(
        "import os\nfrom os import system\ndef decode(q, scale, new=None):\n    return q\n"
    )
    sys.path.insert(0, str(tmp_path))
    sys.meta_path.insert(0, BarePackages(str(tmp_path), ["tinyengine"]))
    return tmp_path


def test_a_bare_package_does_not_run_its_init(engine: Path) -> None:
    assert importlib.import_module("tinyengine.ops.decode").decode(1, 2) == 1


def test_what_only_a_passed_over_init_defines_is_a_stand_in_and_is_noted(engine: Path) -> None:
    package: Any = importlib.import_module("tinyengine")
    assert not package.get_config()
    assert package.ops.__name__ == "tinyengine.ops"
    bare = sys.meta_path[0]
    assert isinstance(bare, BarePackages)
    assert bare.used == {"tinyengine.get_config"}


def test_of_several_values_that_a_function_returns_one_is_the_argument(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # only tensors are made with it
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    (engine / "tinyengine" / "ops" / "pack.py").write_text("def pack():\n    return 'w', 's'\n")
    call = {"function": ["tinyengine.ops.pack:pack"], "arguments": {}}
    assert build({"call": call}, {}, "tinyengine") == ("w", "s")
    assert build({"call": {**call, "item": 1}}, {}, "tinyengine") == "s"
    with pytest.raises(IndexError):
        build({"call": {**call, "item": 2}}, {}, "tinyengine")


def test_an_object_is_made_of_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    made = build({"fields": {"page": {"value": 64}, "rest": {"items": []}}}, {}, "tinyengine")
    assert (made.page, made.rest) == (64, [])
    with pytest.raises(AttributeError):
        _ = made.other


def test_a_function_is_found_under_the_first_name_that_exists(engine: Path) -> None:
    names = ["tinyengine.old.decode:decode", "tinyengine.ops.decode:decode"]
    assert find(names, "tinyengine").__name__ == "decode"


@pytest.mark.parametrize(
    "name",
    [
        "tinyengine:decode",
        "tinyengine.ops.decode:gone",
        "tinyengine.moved:decode",
        "tinyengine.ops.x.y:decode",
    ],
)
def test_a_function_that_is_gone_is_said_to_be_gone(engine: Path, name: str) -> None:
    with pytest.raises(FunctionGone, match=name):
        find([name], "tinyengine")


@pytest.mark.parametrize(
    "name", ["os:system", "tinyengine.ops.decode:system", "tinyengine.ops.decode:os"]
)
def test_what_the_engine_merely_imports_is_not_the_engines(engine: Path, name: str) -> None:
    with pytest.raises(Stopped, match="is not a function of tinyengine"):
        find([name], "tinyengine")


def test_a_package_that_is_absent_gets_a_stand_in_and_is_named() -> None:
    finder = StandIns(["absent_kernels"])
    sys.meta_path.append(finder)
    module: Any = importlib.import_module("absent_kernels.deep.inside")

    def function() -> int:
        return 3

    assert module.registered("x")(function) is function

    class Child(module.Base):  # type: ignore[misc]
        pass

    assert module.plain(Child) is Child
    assert not module.anything
    assert finder.used == {"absent_kernels"}


def test_an_import_that_fails_is_no_error_of_the_kernel(engine: Path) -> None:
    ops = engine / "tinyengine" / "ops"
    (ops / "wire.py").write_text("import never_heard_of\ndef send(): ...\n")
    (ops / "raises.py").write_text("def send():\n    raise ValueError('no such block')\n")
    ends = {}
    for name in ("wire", "raises"):
        case: dict[str, Any] = {"name": name, "function": [f"tinyengine.ops.{name}:send"]}
        case |= {"arguments": {}, "optional": []}
        ends[name] = attempt(case, lambda case=case: call(case, "tinyengine"))  # type: ignore[misc]
    assert ends["wire"]["ended"] == "not imported"
    assert "No module named 'never_heard_of'" in ends["wire"]["message"]
    assert ends["raises"]["ended"] == "raised"


def test_a_real_package_gets_no_invented_submodules(engine: Path) -> None:
    sys.meta_path.append(StandIns(["tinyengine", "json"]))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("json.faster")


def test_a_package_that_the_image_does_not_have_stays_missing() -> None:
    sys.meta_path.append(StandIns(["absent_kernels"]))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("never_heard_of")


FOUND = {"shared_bytes": 1000, "num_warps": 4, "num_stages": 1, "registers": 32, "spill_bytes": 0}


def test_a_kernel_is_kept_under_its_key_and_read_back(tmp_path: Path) -> None:
    kept = KeptKernels(str(tmp_path))
    kept.write("abc", FOUND)
    assert kept.read("abc") == FOUND
    assert [p.name for p in tmp_path.iterdir()] == ["abc"]


def test_two_workers_may_keep_the_same_kernel_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, others = os.replace, [KeptKernels(str(tmp_path))]

    def replace(before: Path, after: Path) -> None:
        if others:
            # both have written by now, and the other one is done first
            others.pop().write("abc", FOUND)
        real(before, after)

    monkeypatch.setattr(os, "replace", replace)
    kept = KeptKernels(str(tmp_path))
    kept.write("abc", FOUND)
    assert kept.read("abc") == FOUND
    assert [p.name for p in tmp_path.iterdir()] == ["abc"]


def test_a_kernel_that_is_read_counts_as_used(tmp_path: Path) -> None:
    kept = KeptKernels(str(tmp_path))
    kept.write("abc", FOUND)
    os.utime(tmp_path / "abc", (0, 0))
    assert kept.read("abc") == FOUND
    assert (tmp_path / "abc").stat().st_mtime > 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps(FOUND),
        json.dumps({**FOUND, "key": "other"}),
        json.dumps({"key": "abc"}),
        json.dumps({**FOUND, "key": "abc", "shared_bytes": "1000"}),
    ],
)
def test_a_kernel_written_halfway_or_for_another_key_is_compiled_again(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "abc").write_text(text)
    assert KeptKernels(str(tmp_path)).read("abc") is None


def test_a_worker_without_a_cache_keeps_nothing(tmp_path: Path) -> None:
    kept = KeptKernels(None)
    kept.write("abc", FOUND)
    assert kept.read("abc") is None


def test_the_settings_of_a_server_that_is_not_there_are_all_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("sglang.srt.server_args")
    module._global_server_args = None
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", module)
    settle()
    assert not module._global_server_args.enable_deterministic_inference


def test_buffers_that_functions_keep_are_real_although_there_is_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("sglang.srt.runtime_context")
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    settle()
    module._CONTEXT.resources.buffers["pages"] = 64
    assert module._CONTEXT.resources.buffers.get("pages") == 64
    assert module._CONTEXT.resources.buffers.get("other") is None
    assert not module._CONTEXT.resources.streams


def test_the_same_options_in_another_folder_are_the_same() -> None:
    one, two = (
        placeless({"num_warps": 4, "extern_libs": (("libdevice", f"{root}/site/triton/lib/x.bc"),)})
        for root in ("/a/b", "/store/gate/environments/0123")
    )
    assert one == two
    assert "triton/lib/x.bc" in one
    assert placeless({"num_warps": 8}) != placeless({"num_warps": 4})


MN_PACKED = """
    %9 = tt.dot_scaled %1 scale %2, %3 scale %4, %5 lhs = e2m1 rhs = e2m1
""".strip().replace("\n", "")
PEER = "mapa.shared::cluster.u32 %r1, %r2, 0;\nld.shared::cluster.b32 %r3, [%r1];\n{}ret;\n"
WAIT = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


@pytest.mark.parametrize(
    ("ttir", "ptx", "version", "arch", "fault"),
    [
        (f"{MN_PACKED} {{rhs_k_pack = false}}", "ret;", "3.8.0", "sm_120", "triton#11733"),
        (f"{MN_PACKED} {{lhs_k_pack = false}}", "ret;", "3.8.0", "sm_121", "triton#11733"),
        ("", PEER.format(""), "3.8.0", "sm_120", "triton#11730"),
        (f"{MN_PACKED} {{fastMath = false}}", "ret;", "3.8.0", "sm_120", ""),
        (f"{MN_PACKED} {{rhs_k_pack = false}}", "ret;", "3.7.1", "sm_120", ""),
        (f"{MN_PACKED} {{rhs_k_pack = false}}", "ret;", "3.8.0", "sm_100", ""),
        ("", PEER.format(WAIT), "3.8.0", "sm_120", ""),
        ("", PEER.format(""), "3.5.1", "sm_120", ""),
    ],
)
def test_what_a_version_of_triton_compiles_wrong_is_found_in_its_own_output(
    ttir: str, ptx: str, version: str, arch: str, fault: str
) -> None:
    faults = compiler_faults(ttir, ptx, version, arch)
    assert [fault in text for text in faults] == ([True] if fault else [])


# lines of what Triton 3.5.1 and 3.8.0 make of small kernels for sm_120
PID = "    %0 = tt.get_program_id x : i32 loc(#loc5)\n"
OVER_TILES = "    scf.for %t = %0 to %2 step %c188_i32  : i32 {\n"
WIDENED = (
    "    %2 = arith.extsi %0 : i32 to i64 loc(#loc4)\n    scf.for %t = %2 to %n step %3  : i64 {\n"
)
COUNTED = "    %1 = tt.get_num_programs x : i32 loc(#loc3)\n    %2 = arith.extsi %1 : i32 to i64\n"
LOAD_351 = (
    "@%p22 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r30]"
)
LOAD_380 = "@%p5 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r19]"


@pytest.mark.parametrize(
    ("ttir", "ptx", "used"),
    [
        (PID + OVER_TILES, LOAD_351, ["persistent", "TMA"]),
        (PID + WIDENED, "ret;", ["persistent"]),
        (PID, LOAD_380, ["TMA"]),
        # a loop over its own tile, one from another number, and one from the number of programs
        (PID + "    scf.for %t = %c0_i32 to %n step %c1_i32  : i32 {\n", "ret;", []),
        (PID.replace("%0", "%10") + OVER_TILES, "ret;", []),
        (COUNTED + "    scf.for %t = %2 to %n step %3  : i64 {\n", "ret;", []),
        # the program's number as the end or the step of a loop
        (PID + "    scf.for %t = %c0_i32 to %0 step %c1_i32  : i32 {\n", "ret;", []),
        # copies that are not of tensors, and asynchronous ones without TMA
        (PID, "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2]", []),
        (PID, "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10;", []),
    ],
)
def test_a_kernel_that_is_persistent_or_uses_tma_is_told_by_what_triton_compiled(
    ttir: str, ptx: str, used: list[str]
) -> None:
    assert means_used(ttir, ptx) == used

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import OutputWrong
from pipeline.images.assemble.plan import TreePlan, plan_tree
from pipeline.images.source.compiled import compile_tree, read_tree
from pipeline.images.source.outputs import declared_outputs
from pipeline.images.spec.image import CompiledSpec
from pipeline.images.spec.source import OutputSpec
from tests.compiled import CopyingBackend, compiled_checkout, compiler_in, source_spec
from tests.makers import AMD64
from tests.unit.binary.arch_files import DATA

HOPPER, PLAIN = (DATA / "hopper.so").read_bytes(), (DATA / "plain.so").read_bytes()
SSE, AVX2 = "0f 58 c1 \taddps  xmm0,xmm1", "c5 f5 fe c2 \tvpaddd ymm0,ymm1,ymm2"
AVX512, LZCNT = "62 f1 74 48 58 c2 \tvaddps zmm0,zmm1,zmm2", "f3 0f bd c3 \tlzcnt  eax,ebx"
REASON = "only after cpuid was asked"


def listing(code: Sequence[str], *files: str) -> str:
    """What objdump prints for each file."""
    rows = [f"  {at:x}:\t{each}\n" for at, each in enumerate(code)]
    return "".join(f"\n{name}:     file format elf64-x86-64\n\n{''.join(rows)}" for name in files)


def made(place: Path, backend: CopyingBackend, **build: Any) -> tuple[Store, TreePlan]:
    """Compile the small source with a backend that leaves certain files."""
    spec = source_spec()
    spec["builds"]["plain"].update(build)
    checkout, store = compiled_checkout(place, **spec), open_store(place / "store")
    plan = plan_tree(checkout, CompiledSpec(source="hello", build="plain"), AMD64)
    try:
        compile_tree(compiler_in(checkout, store, place / "mirror", backend), plan)
    except OutputWrong:
        assert store.layer(plan.key) is None, "what is wrong must not be kept"
        with pytest.raises(Exception, match="is not compiled"):
            read_tree(store, plan)
        raise
    return store, plan


def backend_of(program: bytes, *code: str, **changes: Any) -> CopyingBackend:
    files = {"hello": program, "notes": b"some notes\n"}
    return CopyingBackend(lambda _: files, shown=listing(code or [SSE], "hello"), **changes)


def test_what_a_tree_holds_is_remembered(tmp_path: Path) -> None:
    backend = backend_of(HOPPER, SSE, AVX2, AVX2, LZCNT)
    allowed = {"architectures": ["sm_90a"], "cpu": ["avx", "avx2"], "cpu_checked": {"abm": REASON}}
    store, plan = made(tmp_path, backend, **allowed)
    code = read_tree(store, plan).code
    assert list(code.gpu) == ["sm_90a"]
    assert code.cpu == {"abm": 1, "avx2": 2}
    assert [command[-1] for command in backend.asked] == ["hello"], "notes are no object"


def test_a_program_of_every_processor_without_gpu_code_promises_nothing(tmp_path: Path) -> None:
    store, plan = made(tmp_path, backend_of(PLAIN))
    assert read_tree(store, plan).code.model_dump() == {"gpu": {}, "cpu": {}}


def test_what_needs_a_check_at_run_time_does_not_change_the_tree(tmp_path: Path) -> None:
    _, one = made(tmp_path / "1", backend_of(PLAIN))
    _, two = made(tmp_path / "2", backend_of(PLAIN), cpu_checked={"abm": REASON})
    assert one.key == two.key


@pytest.mark.parametrize(
    ("architectures", "program", "message"),
    [
        (["sm_120"], HOPPER, "hello holds sm_90a where exactly sm_120 was promised"),
        (["sm_90"], HOPPER, "hello holds sm_90a where exactly sm_90 was promised"),
        (["sm_90a", "sm_120"], HOPPER, "hello holds sm_90a where exactly sm_120, sm_90a"),
        ([], HOPPER, "hello holds sm_90a where exactly no GPU code was promised"),
        (["sm_120"], PLAIN, "holds no GPU code where sm_120 is promised"),
        (["sm_90a"], HOPPER[:-200], "hello: its section headers lie outside the file"),
    ],
)
def test_other_gpu_code_than_promised_is_not_kept(
    tmp_path: Path, architectures: list[str], program: bytes, message: str
) -> None:
    with pytest.raises(OutputWrong, match=message):
        made(tmp_path, backend_of(program), architectures=architectures)


@pytest.mark.parametrize(
    ("cpu", "code", "message"),
    [
        ([], [AVX2], "hello: 0: vpaddd ymm0,ymm1,ymm2 is of avx2, which `cpu` does not name"),
        (["avx2"], [AVX2, AVX512], "hello: 1: vaddps zmm0,zmm1,zmm2 is of avx512f"),
        (["avx2"], [AVX2, LZCNT], "lzcnt eax,ebx is of abm"),
        (["avx2", "avx512f"], [AVX2], "names avx512f, and no instruction is of it"),
        (["avx2"], [SSE], "names avx2, and no instruction is of it"),
        (["avx2", "avx3"], [AVX2], "names avx3, which no check can find"),
        (["asimddp"], [AVX2], "names asimddp, which no check can find"),
    ],
)
def test_other_instructions_than_promised_are_not_kept(
    tmp_path: Path, cpu: list[str], code: list[str], message: str
) -> None:
    with pytest.raises(OutputWrong, match=message):
        made(tmp_path, backend_of(PLAIN, *code), cpu=cpu)


@pytest.mark.parametrize(
    "changes",
    [
        {"code": 1},
        {"shown": ""},
        {"shown": listing([], "hello")},
        {"shown": listing([SSE], "hello", "another")},
    ],
)
def test_a_disassembler_that_says_nothing_proves_nothing(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    backend = backend_of(PLAIN)
    for name, value in changes.items():
        setattr(backend, name, value)
    with pytest.raises(OutputWrong, match="cannot be disassembled"):
        made(tmp_path, backend)


def with_machine(number: int) -> bytes:
    return PLAIN[:18] + struct.pack("<H", number) + PLAIN[20:]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (with_machine(183), "hello is for another processor than linux/amd64"),
        (with_machine(190), "hello is for another processor than linux/amd64"),
        (PLAIN[:4] + b"\x01" + PLAIN[5:], "hello is for another processor|hello: "),
        (b"!<arch>\n" + bytes(60), "hello is a static library"),
        (PLAIN[:40], "the ELF header is cut off"),
    ],
)
def test_a_file_for_another_processor_or_none_at_all_is_not_kept(
    tmp_path: Path, program: bytes, message: str
) -> None:
    with pytest.raises(OutputWrong, match=message):
        made(tmp_path, backend_of(program))


def test_a_missing_output_stops_before_anything_is_judged(tmp_path: Path) -> None:
    backend = backend_of(PLAIN)
    backend.make = lambda _: {"hello": PLAIN}
    with pytest.raises(OutputWrong, match="left no file notes"):
        made(tmp_path, backend)
    assert not backend.asked


def test_an_output_below_a_link_is_no_output(tmp_path: Path) -> None:
    outputs = (OutputSpec.model_validate({"from": "bin/tool", "to": "tool"}),)
    plan = cast(TreePlan, SimpleNamespace(outputs=outputs, title="small (plain)"))
    build, secrets = tmp_path / "build", tmp_path / "secrets"
    build.mkdir()
    secrets.mkdir()
    (secrets / "tool").write_bytes(b"a file of this machine")
    (build / "bin").symlink_to(secrets)
    with pytest.raises(OutputWrong, match=r"left no file bin/tool"):
        declared_outputs(plan, build)

"""Judges what a build left, before any of it is kept: its processor, GPU code, instruction sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline import log
from pipeline.assemble.plan import TreePlan
from pipeline.binary import elf
from pipeline.binary.instructions import (
    InstructionReader,
    disassembler,
    known_features,
    with_implied,
)
from pipeline.binary.modules import Module, broken_promise, read_modules
from pipeline.errors import OutputWrong
from pipeline.model import Frozen
from pipeline.source.box import Box, Way, run_step

_CHUNK_BYTES = 1 << 20
_STATIC_LIBRARY = b"!<arch>\n"
_MACHINES = {"linux/amd64": 62, "linux/arm64": 183}  # e_machine: EM_X86_64, EM_AARCH64


class MachineCode(Frozen):
    """What the objects of a compiled tree hold."""

    gpu: dict[str, int] = {}  # modules by what each was compiled for
    cpu: dict[str, int] = {}  # instructions by the set that they belong to


def declared_outputs(plan: TreePlan, build: Path) -> dict[str, Path]:
    """The files that the spec names, by their path below the build's folder; all must be there."""
    files = {output.source: build / output.source for output in plan.outputs}
    for name, path in files.items():
        # a link on its path, which a step may have made, leads to files of this machine
        links = any(x.is_symlink() for x in (path, *path.parents) if x.is_relative_to(build))
        if links or not path.is_file():
            raise OutputWrong(f"{plan.title}: left no file {name}")
    return files


def judge_outputs(way: Way, box: Box, plan: TreePlan, files: Mapping[str, Path]) -> MachineCode:
    """What the outputs hold, if that is what the build promises; else the first that is wrong."""
    objects = {name: path for name, path in files.items() if _is_object(plan, name, path)}
    with log.step(f"Judging {log.count(len(objects), 'object')} of {plan.title}"):
        return MachineCode(gpu=_gpu(plan, objects), cpu=_cpu(way, box, plan, list(objects)))


def _is_object(plan: TreePlan, name: str, path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(elf.HEAD_BYTES)
    if head.startswith(_STATIC_LIBRARY):
        raise OutputWrong(f"{plan.title}: {name} is a static library, whose code is not judged")
    if not head.startswith(elf.MAGIC):
        return False
    try:
        machine = elf.read_header(head, path.stat().st_size).machine
    except elf.Unreadable as error:
        raise OutputWrong(f"{plan.title}: {name}: {error}") from error
    if not head.startswith(elf.MAGIC64) or machine != _MACHINES[plan.platform]:
        raise OutputWrong(f"{plan.title}: {name} is for another processor than {plan.platform}")
    return True


def _gpu(plan: TreePlan, objects: Mapping[str, Path]) -> dict[str, int]:
    """Every module must hold machine code for exactly the promised cards."""
    promised, counts = plan.build.architectures, Counter[str]()
    for name, path in objects.items():
        modules = _modules(plan, name, path)
        if problem := broken_promise(modules, promised):
            raise OutputWrong(f"{plan.title}: {name} {problem}")
        counts.update({", ".join(map(str, each)): times for each, times in modules.items()})
    if promised and not counts:
        raise OutputWrong(
            f"{plan.title}: holds no GPU code where {', '.join(promised)} is promised"
        )
    return dict(sorted(counts.items()))


def _modules(plan: TreePlan, name: str, path: Path) -> Counter[Module]:
    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    try:
        return read_modules(pieces, path.stat().st_size)
    except elf.Unreadable as error:
        raise OutputWrong(f"{plan.title}: {name}: {error}") from error


def _cpu(way: Way, box: Box, plan: TreePlan, objects: list[str]) -> dict[str, int]:
    """The instruction sets that the code uses, by the toolchain's own disassembler."""
    if not objects:
        return {}
    reader, last = InstructionReader(plan.platform), [""]

    def see(line: str) -> None:
        reader.see(line)
        last[0] = line

    code = run_step(way, box, [*disassembler(plan.platform), *objects], see)
    if code or len(reader.files) != len(objects) or not reader.instructions:
        raise OutputWrong(f"{plan.title}: cannot be disassembled, {code}: {last[0].strip()[:200]}")
    require_features(plan, reader)
    return dict(sorted(reader.used.items()))


def require_features(plan: TreePlan, reader: InstructionReader) -> None:
    """Nothing beyond what the spec names, and something of everything that it names."""
    promised, checked = plan.build.cpu, plan.build.cpu_checked
    if unknown := [x for x in promised if x not in known_features(plan.platform)]:
        known = ", ".join(sorted(known_features(plan.platform)))
        raise OutputWrong(
            f"{plan.title}: `cpu` names {unknown[0]}, which nobody can look for", f"Known: {known}."
        )
    allowed = with_implied([*promised, *checked])
    for name, use in sorted(reader.first.items()):
        if name not in allowed:
            raise OutputWrong(f"{plan.title}: {use} is of {name}, which `cpu` does not name")
    needed = with_implied(reader.used)
    for name in promised:
        if name not in needed:
            raise OutputWrong(f"{plan.title}: `cpu` names {name}, and no instruction is of it")

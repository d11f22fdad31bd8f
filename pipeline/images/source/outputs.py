"""Judges what a build made, before the store keeps it: processor, GPU code, instruction sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from pipeline.artifacts.binary import elf, instructions
from pipeline.artifacts.binary.modules import broken_promise, read_modules
from pipeline.artifacts.containers.backend import SandboxBackend, StepContainer, run_step
from pipeline.core import log
from pipeline.core.errors import OutputWrong
from pipeline.core.model import Frozen
from pipeline.images.assemble.plan import TreePlan

_CHUNK_BYTES = 1 << 20
_STATIC_LIBRARY = b"!<arch>\n"
_MACHINES = {"linux/amd64": 62, "linux/arm64": 183}  # e_machine: EM_X86_64, EM_AARCH64


class MachineCode(Frozen):
    """What the objects of a compiled tree hold."""

    gpu: dict[str, int] = {}  # modules by what each was compiled for
    cpu: dict[str, int] = {}  # instructions by the set that they belong to


def declared_outputs(plan: TreePlan, build: Path) -> dict[str, Path]:
    """Finds all files that the spec names, by their path below the build's folder."""
    files = {output.source: build / output.source for output in plan.outputs}
    for name, path in files.items():
        # a link on its path, which a step may have made, leads to files of this machine
        links = any(x.is_symlink() for x in (path, *path.parents) if x.is_relative_to(build))
        if links or not path.is_file():
            raise OutputWrong(f"{plan.title}: left no file {name}")
    return files


def judge_outputs(
    backend: SandboxBackend, container: StepContainer, plan: TreePlan, files: Mapping[str, Path]
) -> MachineCode:
    """Reads the outputs; raises an error for the first that breaks a promise of the build."""
    promised, counts, objects = plan.build.architectures, Counter[str](), list[str]()
    with log.step(f"Judging {log.count(len(files), 'output')} of {plan.title}"):
        for name, path in files.items():
            what, size = f"{plan.title}: {name}", path.stat().st_size
            with path.open("rb") as file:
                head = file.read(elf.HEAD_BYTES)
            if head.startswith(_STATIC_LIBRARY):
                raise OutputWrong(f"{what} is a static library, whose code is not judged")
            if not head.startswith(elf.MAGIC):
                continue
            objects.append(name)
            try:
                machine = elf.read_header(head, size).machine
                if not head.startswith(elf.MAGIC64) or machine != _MACHINES[plan.platform]:
                    raise OutputWrong(f"{what} is for another processor than {plan.platform}")
                # every module must hold machine code for exactly the promised cards
                modules = read_modules(partial(_pieces, path), size)
            except elf.Unreadable as error:
                raise OutputWrong(f"{what}: {error}") from error
            if problem := broken_promise(modules, promised):
                raise OutputWrong(f"{what} {problem}")
            counts.update({", ".join(map(str, each)): times for each, times in modules.items()})
        if promised and not counts:
            archs = ", ".join(promised)
            raise OutputWrong(f"{plan.title}: holds no GPU code where {archs} is promised")
        gpu = dict(sorted(counts.items()))
        if not objects:
            return MachineCode(gpu=gpu, cpu={})
        # counts instructions by their set, with the toolchain's own disassembler
        reader, last = instructions.InstructionReader(plan.platform), [""]

        def see(line: str) -> None:
            reader.see(line)
            last[0] = line

        code = run_step(
            backend, container, [*instructions.disassembler(plan.platform), *objects], see
        )
        if code or len(reader.files) != len(objects) or not reader.instructions:
            shown = last[0].strip()[:200]
            raise OutputWrong(f"{plan.title}: cannot be disassembled, {code}: {shown}")
        # the code may use nothing beyond what the spec names, and must use all that it names
        named, known = plan.build.cpu, instructions.known_features(plan.platform)
        if unknown := [x for x in named if x not in known]:
            raise OutputWrong(
                f"{plan.title}: `cpu` names {unknown[0]}, which no check can find",
                f"Known: {', '.join(sorted(known))}.",
            )
        allowed = instructions.with_implied([*named, *plan.build.cpu_checked])
        for name, use in sorted(reader.first.items()):
            if name not in allowed:
                raise OutputWrong(f"{plan.title}: {use} is of {name}, which `cpu` does not name")
        needed = instructions.with_implied(reader.used)
        for name in named:
            if name not in needed:
                raise OutputWrong(f"{plan.title}: `cpu` names {name}, and no instruction is of it")
        return MachineCode(gpu=gpu, cpu=dict(sorted(reader.used.items())))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk

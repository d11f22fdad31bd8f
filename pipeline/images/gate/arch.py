"""The architecture gate: does every object of a built image hold code that the card can run?

In: a built image's layers and gates/arch.yaml. Out: an `ArchReport` for a card. Needs none of
NVIDIA's tools: artifacts/binary reads what a file holds, and the store keeps that by the file's
hash. The rules are those of the CUDA C++ Programming Guide, "Binary Compatibility" and "PTX
Compatibility":
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#binary-compatibility
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints, ValidationError

from pipeline.artifacts.binary import elf, fatbin, modules
from pipeline.artifacts.binary.fatbin import CUBIN, PTX, CodeTarget
from pipeline.artifacts.binary.modules import broken_promise
from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import GateUnknown, Interrupted
from pipeline.core.files import write_bytes
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import read_pieces
from pipeline.images.gate.files import gate_files
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import Architecture

# A path in the image with `*` and `?`; not so short that it swallows everything.
Glob = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+@/*?-]{6,200}$")]
Reason = Annotated[str, StringConstraints(min_length=20, max_length=400)]
# Every card that CUDA 12 and 13 compile for.
ARCHITECTURES = (
    *(50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90),
    *(100, 101, 103, 110, 120, 121),
)
_NAME = re.compile(r"sm_(\d{2,3})([af]?)")
# Names that promise an object, and names that only might: the gate reads the first bytes of those.
_OBJECT = re.compile(r"\.so(\.\d+)*$|\.(cubin|fatbin)$")
_PERHAPS = re.compile(r"\.so\.|\.o$")


# `gates/arch.yaml`, or `arch.<processor>.yaml` where the wheels of a processor hold other code. A
# file of its own: it decides no byte of the image, so it may move no digest.
class ArchSpec(Frozen):
    """Objects without code for the card, each with the reason, and objects that need a variant."""

    schema_name: ClassVar[str] = "arch"

    accepted: dict[Glob, Reason] = {}
    demands: dict[Glob, Architecture] = {}

    def demanded(self, path: str) -> Architecture | None:
        """The variant that a path must hold."""
        return next((arch for glob, arch in self.demands.items() if fnmatchcase(path, glob)), None)


def read_arch_spec(checkout: Checkout, name: str, platform: str) -> ArchSpec:
    """Reads the image's file for a platform; without one nothing is accepted or demanded."""
    files = gate_files(checkout, name, "arch", platform)
    return next((read_yaml(path, ArchSpec) for path in files.values()), ArchSpec())


class ModuleFacts(Frozen):
    """Modules that were compiled for the same targets, and how many of them there are."""

    targets: tuple[CodeTarget, ...]
    times: int = Field(ge=1)


class Facts(Frozen):
    """The CUDA code of a file, or why it cannot be read."""

    reader: str
    problem: str = ""
    modules: list[ModuleFacts] = []

    @property
    def targets(self) -> set[CodeTarget]:
        return {target for module in self.modules for target in module.targets}


@cache
def reader_digest() -> str:
    """The digest of the reader's own code: files that an older reader read are read again."""
    # without this module: another rule judges the same facts
    sources = [Path(m.__file__ or "") for m in (modules, elf, fatbin)]
    return sha256_of(b"".join(path.read_bytes() for path in sources))


def read_binary_facts(open_file: modules.Opener, file_bytes: int) -> Facts:
    """Reads a file; that it cannot be read is a fact, too."""
    try:
        counted = modules.read_modules(open_file, file_bytes)
    except elf.Unreadable as error:
        return Facts(reader=reader_digest(), problem=str(error))
    found = [ModuleFacts(targets=module, times=times) for module, times in counted.items()]
    # one order, so that a note's bytes do not depend on the order of the linker
    return Facts(reader=reader_digest(), modules=sorted(found, key=lambda m: str(m.targets)))


class ObjectVerdict(Enum):
    """Whether a card can run an object, the worst first."""

    UNREADABLE = "unreadable"
    NO_KERNEL_IMAGE = "no kernel image"
    WRONG_VARIANT = "wrong variant"
    # It starts, but late: the driver compiles every kernel at first, and needs to be as new as the
    # toolkit that wrote the PTX (https://github.com/NVIDIA/nvbandwidth/issues/61).
    JIT = "jit"
    RUNS = "runs"
    NO_CUDA_CODE = "no CUDA code"


# A wrong variant cannot be accepted: arch.yaml itself demands the right one.
_FORGIVABLE = (ObjectVerdict.UNREADABLE, ObjectVerdict.NO_KERNEL_IMAGE)
_FAILING = (*_FORGIVABLE, ObjectVerdict.WRONG_VARIANT)


@dataclass(frozen=True)
class Judgement:
    """A verdict on an object, and how many of its modules have code for the card."""

    verdict: ObjectVerdict
    message: str
    running: int = 0
    jitted: int = 0
    modules: int = 0


def runs_on(target: CodeTarget, card: int) -> bool:
    """Whether machine code loads: same major, minor not above; `a` exactly, `f` in its family.

    Where the suffix is unknown only the exact card is sure: all three variants load there.
    """
    if target.suffix in ("a", None):
        return target.kind == CUBIN and target.arch == card
    return target.kind == CUBIN and target.arch // 10 == card // 10 and target.arch <= card


def jits_on(target: CodeTarget, card: int) -> bool:
    """Whether the driver can compile PTX: any older target; `a` exactly, `f` in its family."""
    if target.kind != PTX or target.arch > card:
        return False
    if target.suffix == "f":
        return target.arch // 10 == card // 10
    return target.suffix != "a" or target.arch == card


def judge_object(
    facts: Facts, arch: str, demanded: str | None = None, exactly: Collection[str] | None = None
) -> Judgement:
    """The verdict on an object for a card such as `sm_120`.

    `exactly` is what every module of an object that was compiled here must hold. A demand counts
    for every card that runs what it asks for: `sm_120f` for sm_121, too, `sm_120a` not.
    """
    if facts.problem:
        return Judgement(ObjectVerdict.UNREADABLE, f"unreadable: {facts.problem}")
    card, lacking = target_of(arch).arch, ""
    running = jitted = total = 0
    for module in facts.modules:
        total += module.times
        # the driver takes PTX only where a module has no machine code that loads
        if any(runs_on(target, card) for target in module.targets):
            running += module.times
        elif any(jits_on(target, card) for target in module.targets):
            jitted += module.times
    needed = target_of(demanded) if demanded else None
    if needed and runs_on(needed, card):
        # `f` asks for the family's features, which `a` has too; `a` asks for exactly itself
        wanted = {"a": ("a",), "f": ("f", "a")}.get(needed.suffix or "", ("", "f", "a", None))
        # PTX is no answer: a demand is for machine code that was compiled as this variant
        loads = [target for target in facts.targets if runs_on(target, card)]
        if not any(target.suffix in wanted for target in loads):
            have = ", ".join(sorted(map(str, loads))) or "nothing for this card"
            lacking = f"{have} where {demanded} is needed"
    if exactly is not None:
        lacking = broken_promise((module.targets for module in facts.modules), exactly) or lacking
    if lacking and not total:
        verdict, message = ObjectVerdict.WRONG_VARIANT, f"no CUDA code where {demanded} is needed"
    elif not total:
        verdict, message = ObjectVerdict.NO_CUDA_CODE, "no CUDA code"
    elif not running and not jitted:
        verdict, message = ObjectVerdict.NO_KERNEL_IMAGE, "no kernel image"
    elif lacking:
        verdict, message = ObjectVerdict.WRONG_VARIANT, lacking
    elif not running:
        verdict, message = ObjectVerdict.JIT, "jit, if the driver is new enough for its PTX"
    else:
        verdict, message = ObjectVerdict.RUNS, "runs"
    return Judgement(verdict, message, running, jitted, total)


def judge_bytes(data: bytes, arch: str) -> Judgement:
    """A verdict on an object in memory."""
    return judge_object(read_binary_facts(partial(iter, [data]), len(data)), arch)


def target_of(arch: str) -> CodeTarget:
    """The machine code that a name such as `sm_120a` asks for."""
    match = _NAME.fullmatch(arch)
    if match is None:
        raise ValueError(f"{arch!r} is not an architecture")
    return CodeTarget(CUBIN, int(match[1]), match[2])


@dataclass(frozen=True)
class LayerFile:
    """A file of an image: its path, and the layer with its bytes."""

    path: str
    layer: str
    row: FileRow


@dataclass(frozen=True)
class JudgedObject:
    """An object, what it holds and whether the card can run it."""

    path: str
    sha256: str
    facts: Facts
    judgement: Judgement
    accepted: str | None = None  # the glob that forgives it

    @property
    def failed(self) -> bool:
        return self.judgement.verdict in _FAILING and self.accepted is None


@dataclass(frozen=True)
class ArchReport:
    """All objects of an image against one card."""

    arch: str
    objects: tuple[JudgedObject, ...]
    unused: tuple[str, ...] = ()  # globs that forgive nothing any more
    unmatched: tuple[str, ...] = ()  # demands that no object answers

    @property
    def failures(self) -> list[JudgedObject]:
        return [x for x in self.objects if x.failed]

    @property
    def passed(self) -> bool:
        return not self.failures and not self.unmatched

    @property
    def summary(self) -> dict[str, int]:
        counts = Counter(x.judgement.verdict for x in self.objects)
        return {verdict.value: counts[verdict] for verdict in ObjectVerdict}


def read_image(store: Store, built: Built) -> list[tuple[LayerFile, Facts]]:
    """Reads what every object of an image holds, from notes of the store where it has some."""
    if any(layer.record.is_foreign for layer in built.layers):
        raise GateUnknown(
            f"{built.name}: stands on a foreign base image, whose objects are not read",
            "The gate judges images whose base is assembled here (`debian` in image.yaml).",
        )
    # a container sees what the last layer with a path has there
    visible: dict[str, LayerFile] = {}
    for layer in built.layers:
        rows = {row.path: row for row in store.contents(layer.record)}
        for path, row in rows.items():
            # a hard link is the file it names, in the same layer
            source = rows.get(row.target, row) if row.kind == Kind.HARDLINK else row
            visible[path] = LayerFile(path, layer.record.digest, source)
    files, compiled = list[LayerFile](), tuple(promised_code(built))
    for path, file in sorted(visible.items()):
        name, is_file = path.rpartition("/")[2], file.row.kind == Kind.FILE
        is_object = is_file and bool(_OBJECT.search(name))
        may_be = _PERHAPS.search(name) or file.row.mode & 0o111 or path.startswith(compiled)
        if is_file and not is_object and may_be:
            # small steps: the rest of the file is never inflated
            pieces = read_pieces(store.blob_path(file.layer), file.row, step_bytes=4096)
            is_object = next(pieces, b"").startswith(elf.MAGIC)
        files += [file] if is_object else []
    notes, stop = store.root / "gates" / "arch", threading.Event()
    known: dict[str, Facts] = {}
    for sha256 in {f.row.sha256 for f in files}:
        # a damaged note counts as none, and so does one of an older reader
        with suppress(FileNotFoundError, ValidationError):
            facts = Facts.model_validate_json((notes / f"{sha256}.json").read_bytes())
            known |= {sha256: facts} if facts.reader == reader_digest() else {}

    def read(file: LayerFile) -> None:
        def watched() -> Iterator[bytes]:
            for piece in read_pieces(store.blob_path(file.layer), file.row):
                if stop.is_set():
                    raise Interrupted("stopped")
                yield piece

        facts = known[file.row.sha256] = read_binary_facts(watched, file.row.size_bytes)
        write_bytes(notes / f"{file.row.sha256}.json", canonical_json(facts.model_dump()))
        bar.advance(file.row.size_bytes)

    missing = {f.row.sha256: f for f in files if f.row.sha256 not in known}.values()
    total = sum(f.row.size_bytes for f in missing)
    if missing:
        title = f"Reading {log.count(len(missing), 'object')}, {log.size(total)}"
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        with log.step(title), log.progress("read", total) as bar, pool:
            try:
                # the largest first, so that no core waits for one at the end
                list(pool.map(read, sorted(missing, key=lambda f: -f.row.size_bytes)))
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    return [(f, known[f.row.sha256]) for f in files]


def promised_code(built: Built) -> dict[str, list[str]]:
    """The folders of an image that hold what was compiled here, with the GPU code of each."""
    trees = built.plan.all_trees()
    return {f"{tree.build.to.strip('/')}/": tree.build.architectures for tree in trees}


def judge_image(
    objects: list[tuple[LayerFile, Facts]],
    spec: ArchSpec,
    arch: str,
    *,
    promised: bool = True,
    compiled: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> ArchReport:
    """Judges every object for a card; the spec accepts objects for the promised card only.

    What was compiled here, by folder, must hold exactly the code that its build promises.
    """
    spec = spec if promised else ArchSpec()
    judged = []
    for file, facts in objects:
        folder = next((each for each in compiled if file.path.startswith(each)), None)
        exactly = None if folder is None else compiled[folder]
        judgement = judge_object(facts, arch, spec.demanded(file.path), exactly)
        globs = spec.accepted if judgement.verdict in _FORGIVABLE else {}
        accepted = next((glob for glob in globs if fnmatchcase(file.path, glob)), None)
        judged.append(JudgedObject(file.path, file.row.sha256, facts, judgement, accepted))
    used = {x.accepted for x in judged}
    # a demand for another card says nothing about this one
    card = target_of(arch).arch
    asked = [glob for glob, want in spec.demands.items() if runs_on(target_of(want), card)]
    unmatched = [g for g in asked if not any(fnmatchcase(x.path, g) for x in judged)]
    carrying = [x.path for x in judged if x.facts.modules]
    # a tree that lost all of its GPU code has no object that could fail
    for folder, archs in compiled.items():
        if archs and not any(path.startswith(folder) for path in carrying):
            unmatched.append(f"{folder}*")
    return ArchReport(
        arch=arch,
        objects=tuple(judged),
        unused=tuple(glob for glob in spec.accepted if glob not in used),
        unmatched=tuple(unmatched),
    )

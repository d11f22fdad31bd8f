"""The architecture gate: every object of an image against the card it is for."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.assemble.layer import read_pieces
from pipeline.binary.elf import MAGIC
from pipeline.errors import GateUnknown, Interrupted
from pipeline.gate.arch.facts import Facts, keep_facts, kept_facts, read_facts
from pipeline.gate.arch.spec import ArchSpec
from pipeline.gate.arch.verdict import Judgement, ObjectVerdict, answers, card_of, judge
from pipeline.oci.record import FileRow, Kind
from pipeline.store.store import Store

# Names that promise an object, and names that only might: those are asked for their first bytes.
_OBJECT = re.compile(r"\.so(\.\d+)*$|\.(cubin|fatbin)$")
_PERHAPS = re.compile(r"\.so\.|\.o$")
# A wrong variant cannot be accepted: arch.yaml itself demands the right one.
_FAILING = (ObjectVerdict.UNREADABLE, ObjectVerdict.NO_KERNEL_IMAGE, ObjectVerdict.WRONG_VARIANT)
_FORGIVABLE = (ObjectVerdict.UNREADABLE, ObjectVerdict.NO_KERNEL_IMAGE)


@dataclass(frozen=True)
class ImageFile:
    """A file of an image: its path there, and where its bytes are."""

    path: str
    layer: str
    row: FileRow


@dataclass(frozen=True)
class JudgedObject:
    """An object, what it holds and how it stands to the card."""

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


def read_image(store: Store, built: Built) -> list[tuple[ImageFile, Facts]]:
    """What every object of an image holds, read on all cores, from notes where there are some."""
    if any(layer.record.is_foreign for layer in built.layers):
        raise GateUnknown(
            f"{built.name}: stands on a foreign base image, whose objects are not read",
            "The gate judges images whose base is assembled here (`debian` in image.yaml).",
        )
    files = sorted(_objects(store, built), key=lambda f: f.path)
    known = {sha: kept_facts(store, sha) for sha in {f.row.sha256 for f in files}}
    missing = {f.row.sha256: f for f in files if known[f.row.sha256] is None}
    if missing:
        known |= _read_all(store, list(missing.values()))
    return [(f, facts) for f in files if (facts := known[f.row.sha256]) is not None]


def promised_code(built: Built) -> dict[str, list[str]]:
    """The folders of an image that hold what was compiled here, with the GPU code of each."""
    trees = built.plan.all_trees()
    return {f"{tree.build.to.strip('/')}/": tree.build.architectures for tree in trees}


def _objects(store: Store, built: Built) -> Iterator[ImageFile]:
    compiled = tuple(promised_code(built))
    for file in _visible(store, built):
        name = file.path.rpartition("/")[2]
        perhaps = _PERHAPS.search(name) or file.row.mode & 0o111 or file.path.startswith(compiled)
        if _OBJECT.search(name) or (perhaps and _is_elf(store, file)):
            yield file


def _visible(store: Store, built: Built) -> list[ImageFile]:
    """The files as a container sees them: the last layer that has a path decides what it is."""
    tree: dict[str, ImageFile] = {}
    for layer in built.layers:
        digest = layer.record.digest
        rows = {row.path: row for row in store.contents(layer.record)}
        for path, row in rows.items():
            # a hard link is the file it names, in the same layer
            source = rows.get(row.target, row) if row.kind == Kind.HARDLINK else row
            tree[path] = ImageFile(path, digest, source)
    return [file for file in tree.values() if file.row.kind == Kind.FILE]


def _is_elf(store: Store, file: ImageFile) -> bool:
    # small steps: only the first bytes are asked for, and the rest is never inflated
    pieces = read_pieces(store.blob_path(file.layer), file.row, step_bytes=4096)
    return next(pieces, b"").startswith(MAGIC)


def _read_all(store: Store, files: list[ImageFile]) -> dict[str, Facts | None]:
    """Read the largest first, so that no core is left with one at the end."""
    files.sort(key=lambda f: f.row.size_bytes, reverse=True)
    total = sum(f.row.size_bytes for f in files)
    stop = threading.Event()
    with (
        log.step(f"Reading {log.count(len(files), 'object')}, {log.size(total)}"),
        log.progress("read", total) as bar,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        try:
            facts = pool.map(lambda f: _read_one(store, f, bar, stop), files)
            return {f.row.sha256: x for f, x in zip(files, facts, strict=True)}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _read_one(store: Store, file: ImageFile, bar: log.Bar, stop: threading.Event) -> Facts:
    def pieces() -> Iterator[bytes]:
        for piece in read_pieces(store.blob_path(file.layer), file.row):
            if stop.is_set():
                raise Interrupted("stopped")
            yield piece

    facts = read_facts(pieces, file.row.size_bytes)
    keep_facts(store, file.row.sha256, facts)
    bar.advance(file.row.size_bytes)
    return facts


def judge_image(
    objects: list[tuple[ImageFile, Facts]],
    spec: ArchSpec,
    arch: str,
    *,
    promised: bool = True,
    compiled: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> ArchReport:
    """Every object against a card; what is accepted is accepted for the promised card only.

    What was compiled here, by folder, must hold exactly the code that its build promises.
    """
    spec = spec if promised else ArchSpec()
    judged = []
    for file, facts in objects:
        folder = next((each for each in compiled if file.path.startswith(each)), None)
        exactly = None if folder is None else compiled[folder]
        judgement = judge(facts, arch, spec.demanded(file.path), exactly)
        forgiven = judgement.verdict in _FORGIVABLE
        accepted = spec.accepting(file.path) if forgiven else None
        judged.append(JudgedObject(file.path, file.row.sha256, facts, judgement, accepted))
    used = {x.accepted for x in judged}
    paths = [file.path for file, _ in objects]
    # a demand for another card says nothing about this one
    here = [glob for glob, want in spec.demands.items() if answers(want, card_of(arch))]
    unmatched = [g for g in here if not any(fnmatchcase(p, g) for p in paths)]
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

"""An engine's own files, as published or with patches, in a folder that workers import from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pipeline.artifacts.oci.record import FileRow
from pipeline.core.errors import PatchConflict
from pipeline.core.files import os_errors_explained
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.assemble import patch
from pipeline.images.assemble.plan import ImagePlan, Work
from pipeline.images.gate.smem.context import GateContext, layer_of, locked_wheel, mark_used, unpack
from pipeline.images.lock.model import WheelPin
from pipeline.images.spec.image import PatchSpec

# Part of every tree's key: raised when the same wheel is unpacked differently.
FORMAT = 1
# What importing and choosing block sizes reads: code, tables of tuned configurations, and sources
# of kernels that are compiled at run time, whose folders some modules look for.
_KEPT_SUFFIXES = (
    *(".py", ".json", ".yaml", ".yml", ".toml", ".txt", "METADATA"),
    *(".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc"),
)
_LARGEST_BYTES = 4 << 20  # larger ones are bundled data


@dataclass(frozen=True)
class EngineTree:
    """A folder that holds one version of an engine."""

    folder: Path
    project: str
    version: str
    digest: str  # of the wheel and of what patches made of it
    is_locked: bool = True  # the image's lock names the wheel; other versions are not vouched for

    @property
    def package(self) -> str:
        return self.project.replace("-", "_")


def engine_pin(
    context: GateContext, plan: ImagePlan, project: str, version: str | None
) -> WheelPin:
    """Finds the locked wheel of the engine, or another version's in the index."""
    locked = locked_wheel(plan, project)
    if version is None or version == locked.version:
        return locked
    return context.make_finder().find(project, version, plan.venv.version, plan.platform)


def engine_tree(context: GateContext, plan: ImagePlan, pin: WheelPin) -> EngineTree:
    """Unpacks the engine's code as its wheel has it."""
    folder = _folder(context, pin)

    def place(row: FileRow) -> str | None:
        path = row.path.removeprefix(f"{plan.venv.site}/")
        if row.owner != pin.name or path == row.path or row.size_bytes > _LARGEST_BYTES:
            return None
        return path if path.endswith(_KEPT_SUFFIXES) else None

    with context.store.locked(f"gate-{folder.name}"):
        if not folder.is_dir():
            layers = context.layers([layer_of(plan, pin, plan.architecture)])
            with context.store.scratch() as scratch, os_errors_explained(folder):
                unpack(context.store, layers, place, scratch / "engine")
                folder.parent.mkdir(parents=True, exist_ok=True)
                os.replace(scratch / "engine", folder)
    mark_used(folder)
    is_locked = pin in plan.lock.wheels
    return EngineTree(folder, pin.name, pin.version, f"sha256:{pin.sha256}", is_locked)


def engine_work(context: GateContext, plan: ImagePlan, pin: WheelPin) -> Work:
    """What unpacking the engine would fetch."""
    is_there = _folder(context, pin).is_dir()
    return context.work([] if is_there else [layer_of(plan, pin, plan.architecture)])


def _folder(context: GateContext, pin: WheelPin) -> Path:
    key = sha256_of(canonical_json([FORMAT, pin.sha256])).removeprefix("sha256:")[:32]
    return context.store.root / "gate" / "engines" / key


def patched(
    tree: EngineTree, patches: Sequence[PatchSpec], folder: Path, context: GateContext
) -> EngineTree:
    """Applies patches to a tree; each must fit exactly, but the version may be another."""
    changed: dict[str, bytes] = {}
    for spec in patches:
        for change in patch.parse(read_patch(folder / spec.file), spec.file):
            before = changed.get(change.path) or _read(tree.folder, change.path, spec.file)
            changed[change.path] = patch.apply(change, before, spec.file)
    return with_files(tree, changed, context)


def with_files(tree: EngineTree, changed: Mapping[str, bytes], context: GateContext) -> EngineTree:
    """Replaces some files of a tree; the rest are links to the same files."""
    if not changed:
        return tree
    sums = {path: sha256_of(data) for path, data in changed.items()}
    digest = sha256_of(canonical_json([FORMAT, tree.digest, sums]))
    folder = tree.folder.with_name(digest.removeprefix("sha256:")[:32])
    with context.store.locked(f"gate-{folder.name}"):
        if not folder.is_dir():
            with context.store.scratch() as scratch, os_errors_explained(folder):
                copy = scratch / "engine"
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(tree.folder, copy, copy_function=os.link, ignore=ignore)
                for path, data in changed.items():
                    # a link shares its bytes with the published tree: replace it, never write to it
                    (copy / path).unlink()
                    (copy / path).write_bytes(data)
                os.replace(copy, folder)
    mark_used(folder)
    return replace(tree, folder=folder, digest=digest)


def is_applied(tree: EngineTree, spec: PatchSpec, folder: Path) -> bool:
    """Whether the engine already holds a patch's own lines."""
    for change in patch.parse(read_patch(folder / spec.file), spec.file):
        try:
            text = _read(tree.folder, change.path, spec.file).decode()
        except PatchConflict:
            return False
        # upstream's lines may stand elsewhere in the file than the patch's
        if not all("".join(hunk.after) in text for hunk in change.hunks):
            return False
    return True


def compiler_requirements(tree: EngineTree) -> list[str]:
    """Lists what a version of an engine itself requires of torch and Triton."""
    requirements: set[str] = set()
    for path in tree.folder.glob("*.dist-info/METADATA"):
        head = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        for line in head.splitlines():
            name, _, value = line.partition(":")
            if name != "Requires-Dist":
                continue
            with suppress(InvalidRequirement):
                wanted = Requirement(value.strip())
                is_compiler = canonicalize_name(wanted.name) in ("torch", "triton")
                if is_compiler and "extra" not in str(wanted.marker or ""):
                    requirements.add(str(wanted))
    return sorted(requirements)


def modules_defining(tree: EngineTree, names: Sequence[str]) -> list[str]:
    """Finds the modules of an engine that define a function of one of these names."""
    begins = re.compile(rf"^\s*(?:async )?def (?:{'|'.join(map(re.escape, names))})\b", re.M)
    return [
        ".".join(path.relative_to(tree.folder).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((tree.folder / tree.package).rglob("*.py"))
        if begins.search(path.read_text(encoding="utf-8", errors="replace"))
    ]


def read_patch(path: Path) -> str:
    """A patch's text, line ends as they are."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PatchConflict(
            f"{path.name}: cannot be read ({error})",
            "`file` in series.yaml names a file of text beside it.",
        ) from error


def _read(folder: Path, path: str, name: str) -> bytes:
    place = (folder / path).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.is_file():
        raise PatchConflict(f"{name}: {path} is not in this version")
    return place.read_bytes()

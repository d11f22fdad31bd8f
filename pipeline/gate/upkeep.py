"""Looking after what gates leave in the store: what the locks still lead to, and what they do not.

gate/environments/   interpreters with torch and Triton, unpacked: gigabytes
gate/engines/        engines' own files, as published and patched
gate/answers/        workers' answers to cases
gate/kernels/        what single kernels need, by Triton and ptxas, for any version
gate/kernels-unlocked/  the same of engines that no lock names, each for itself
gate/kernels-of/     which kernels an engine's code has
gates/arch/          which machine code an object holds
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.assemble.plan import ImagePlan, plan_image
from pipeline.errors import PatchConflict, PipelineError
from pipeline.files import files_below, os_errors_explained, remove_tree
from pipeline.gate.numerics.cases import read_numeric_cases
from pipeline.gate.smem.cases import Gates, read_gates
from pipeline.gate.smem.coverage import kernels_key
from pipeline.gate.smem.engine import EngineTree, engine_key, patched_tree
from pipeline.gate.smem.environment import Environment, EnvironmentFacts, known_facts
from pipeline.gate.smem.limits import CARDS
from pipeline.gate.smem.run import GateTarget
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, read_image_record
from pipeline.store.upkeep import StoreSection

# Kernels are kept by their content, so no lock leads to them: they go by their age.
_KERNEL_AGE_S = 90 * 24 * 3600
_PARTS = {
    "gate environments": "gate/environments",
    "gate engines": "gate/engines",
    "gate answers": "gate/answers",
    "gate kernels": "gate/kernels",
    "gate kernels of other versions": "gate/kernels-unlocked",
    "gate notes on engines": "gate/kernels-of",
    "gate notes on objects": "gates/arch",
}


@dataclass
class _Kept:
    """Names in each folder that something still leads to."""

    environments: set[str] = field(default_factory=set)
    engines: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)


def gate_sections(store: Store) -> list[StoreSection]:
    """How much of what gates left."""
    sections = []
    for name, place in _PARTS.items():
        sizes = {(s.st_dev, s.st_ino): s.st_size for s in _stats(store.root / place)}
        sections.append(StoreSection(name=name, files=len(sizes), size_bytes=sum(sizes.values())))
    return sections


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Of every file below; trees share files, so the caller counts each only once."""
    for entry in files_below(path):
        with suppress(FileNotFoundError):
            yield entry.stat(follow_symlinks=False)


def gate_leftovers(store: Store, checkout: Checkout) -> list[Path]:
    """Folders and files that no lock of the checkout leads to any more."""
    kept = _Kept()
    for name in checkout.images():
        for platform in checkout.spec(name).platforms:
            try:
                _keep(store, checkout, plan_image(checkout, name, platform), kept)
            except PipelineError:
                # an image without gates, or whose lock is not made yet, keeps nothing
                continue
    root, old = store.root / "gate", time.time() - _KERNEL_AGE_S
    objects = _objects(store)
    return [
        *(p for p in _entries(root / "environments") if p.name not in kept.environments),
        *(p for p in _entries(root / "engines") if p.name not in kept.engines),
        *(p for p in _entries(root / "answers") if p.stem not in kept.answers),
        *(p for p in _entries(root / "kernels-of") if p.stem not in kept.notes),
        *(p for p in _entries(root / "kernels") if p.lstat().st_mtime < old),
        *(p for p in _entries(root / "kernels-unlocked") if p.lstat().st_mtime < old),
        *(p for p in _entries(store.root / "gates" / "arch") if p.stem not in objects),
    ]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder of the store; a link leads elsewhere and is not looked into."""
    is_own = folder.is_dir() and not folder.is_symlink()
    return sorted(folder.iterdir()) if is_own else []


def _keep(store: Store, checkout: Checkout, plan: ImagePlan, kept: _Kept) -> None:
    gates = read_gates(checkout, plan.spec.name)
    environments = [
        Environment(path, facts, ())
        for path in _entries(store.root / "gate" / "environments")
        if (facts := known_facts(path)) and _is_from(facts, plan)
    ]
    kept.environments |= {e.key for e in environments}
    cases = [*gates.cases(), *read_numeric_cases(checkout, plan.spec.name, gates)]
    for tree in _trees(store, checkout, plan, gates):
        kept.engines.add(tree.folder.name)
        kept.notes.add(kernels_key(tree.digest))
        for case in cases:
            for environment in environments:
                for card in CARDS.values():
                    target = GateTarget(store, environment, tree, gates.setup, card)
                    kept.answers.add(target.key(case).removeprefix("sha256:"))


def _is_from(facts: EnvironmentFacts, plan: ImagePlan) -> bool:
    """Whether an environment is of the lock's own wheels, or of the same versions elsewhere."""
    locked = {(pin.name, pin.version): pin.sha256 for pin in plan.lock.wheels}
    same = facts.kind == "host wheels" or all(
        locked.get((pin.name, pin.version)) == pin.sha256 for pin in facts.wheels
    )
    return same and all((pin.name, pin.version) in locked for pin in facts.wheels)


def _trees(store: Store, checkout: Checkout, plan: ImagePlan, gates: Gates) -> Iterator[EngineTree]:
    """The engine as published, with all patches, and with all but one."""
    pin = next((p for p in plan.lock.wheels if p.name == gates.setup.package), None)
    if pin is None:
        return
    folder = store.root / "gate" / "engines" / engine_key(pin)
    tree = EngineTree(folder, pin.name, pin.version, f"sha256:{pin.sha256}")
    yield tree
    series = checkout.series(plan.spec).patches
    place = (checkout.folder(plan.spec.name) / (plan.spec.patches or "none")).parent
    for left_out in [None, *series]:
        with suppress(PatchConflict):
            yield patched_tree(tree, [w for w in series if w is not left_out], place)[0]


def _objects(store: Store) -> set[str]:
    """Hashes of the files of every built image."""
    hashes: set[str] = set()
    for path in store.image_paths():
        for layer in read_image_record(path).layers:
            hashes |= {row.sha256 for row in store.contents(layer.record)}
    return hashes


def size_of(path: Path) -> int:
    """A file's size, or that of all files below a folder."""
    if path.is_dir() and not path.is_symlink():
        return sum(s.st_size for s in _stats(path) if s.st_nlink == 1)
    return path.lstat().st_size


def remove(paths: list[Path]) -> int:
    """Take leftovers away; returns the bytes freed."""
    freed = 0
    for path in paths:
        with os_errors_explained(path):
            freed += size_of(path)
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
    return freed

"""What gates write to the store: how much it is, and what no gate uses any more.

gate/environments/   interpreters with torch and Triton, unpacked: gigabytes
gate/engines/        engines' own files, as published and patched
gate/answers/        workers' answers to cases
gate/templates/      chat templates out of packages, and packages that render
gate/kernels/        what single kernels need, by Triton and ptxas, for any version
gate/kernels-unlocked/  the same of engines that no lock names, each for itself
gate/kernels-of/     which kernels an engine's code has
gates/arch/          which machine code an object holds
"""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.artifacts.store.store import Store, read_image_record
from pipeline.artifacts.store.upkeep import UNUSED_S, entries_of

GATE_PARTS = {
    "gate environments": "gate/environments",
    "gate engines": "gate/engines",
    "gate answers": "gate/answers",
    "gate templates": "gate/templates",
    "gate kernels": "gate/kernels",
    "gate kernels of other versions": "gate/kernels-unlocked",
    "gate notes on engines": "gate/kernels-of",
    "gate notes on objects": "gates/arch",
}


def gate_leftovers(store: Store) -> list[Path]:
    """Lists what no gate has used for a month, and notes on objects of no built image."""
    old = time.time() - UNUSED_S
    folders = [store.root / place for place in GATE_PARTS.values() if place.startswith("gate/")]
    unused = [x for folder in folders for x in entries_of(folder) if x.lstat().st_mtime < old]
    # reading an image's objects again takes minutes: their notes stay as long as the image
    hashes: set[str] = set()
    for path in store.image_paths():
        for layer in read_image_record(path).layers:
            hashes |= {row.sha256 for row in store.contents(layer.record)}
    notes = [p for p in entries_of(store.root / "gates" / "arch") if p.stem not in hashes]
    return [*unused, *notes]

"""How far layers are: counted by the processes that write them, shown by their parent."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Generator, Mapping, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.assemble.plan import LayerPlan

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# bytes written of each layer, in memory that processes share
Counts = MutableSequence[int]
# how often the bar moves
_LOOK_EVERY_S = 0.5


def shared_counts(layers: Sequence[LayerPlan]) -> Counts:
    """A number for each layer, which a worker of a fork server can be handed."""
    counts: Counts = multiprocessing.get_context("forkserver").RawArray("q", len(layers))
    return counts


class CountedFile(io.BufferedWriter):
    """A new file whose bytes are counted."""

    def __init__(self, path: Path, counts: Counts, slot: int) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._counts, self._slot = counts, slot

    def write(self, data: ReadableBuffer) -> int:
        written = super().write(data)
        self._counts[self._slot] += written
        return written


def watch(
    layers: Sequence[LayerPlan], futures: Mapping[Future[Any], LayerPlan], counts: Counts
) -> Generator[None]:
    """Show the writing of unfinished layers until the last is done; yields now and then."""
    slots = {id(layer): slot for slot, layer in enumerate(layers)}
    busy = {future: layer for future, layer in futures.items() if not future.done()}

    def written(future: Future[Any], layer: LayerPlan) -> int:
        # a layer is about as large as its files, whose compressed streams it takes over
        whole = _size(layer)
        return whole if future.done() else min(counts[slots[id(layer)]], whole)

    before = {future: written(future, layer) for future, layer in busy.items()}
    total = sum(_size(layer) - before[future] for future, layer in busy.items())
    with log.progress("written", total) as bar:
        gauges = {future: log.Gauge(bar, at=before[future]) for future in busy}
        while left := [future for future in busy if not future.done()]:
            wait(left, _LOOK_EVERY_S, FIRST_COMPLETED)
            for future, layer in busy.items():
                gauges[future].at(written(future, layer))
            yield


def _size(layer: LayerPlan) -> int:
    return sum(pin.size_bytes for pin in layer.pins)

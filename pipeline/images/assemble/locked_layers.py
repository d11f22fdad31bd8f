"""Layers that follow from locked files: fetched and written in parallel, in processes."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts.oci.record import LayerRecord
from pipeline.artifacts.store.store import Store
from pipeline.core import log, proc
from pipeline.core.errors import Interrupted
from pipeline.core.files import os_errors_explained
from pipeline.images.assemble.layer import with_parents, write_layer
from pipeline.images.assemble.plan import BIG_WHEEL_BYTES, LayerKind, LayerPlan, Work
from pipeline.images.assemble.rootfs import assemble_overlay, assemble_rootfs
from pipeline.images.assemble.venv import merge_wheels, wheel_entries
from pipeline.images.assemble.wheel import open_wheel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from pipeline.images.fetch.inputs import Fetcher

# the bytes written of each layer, in memory that processes share
Counts = MutableSequence[int]
# a worker counts into this memory, and its parent shows the progress
_worker: dict[str, Counts] = {}
# how often the bar moves
_LOOK_EVERY_S = 0.5


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
    """Shows the writing of unfinished layers until the last is done; yields now and then."""
    slots = {id(layer): slot for slot, layer in enumerate(layers)}
    busy = {future: layer for future, layer in futures.items() if not future.done()}

    def written(future: Future[Any], layer: LayerPlan) -> int:
        # a layer is about as large as its files, whose compressed streams it contains
        whole = layer.input_bytes
        return whole if future.done() else min(counts[slots[id(layer)]], whole)

    before = {future: written(future, layer) for future, layer in busy.items()}
    total = sum(layer.input_bytes - before[future] for future, layer in busy.items())
    with log.progress("written", total) as bar:
        gauges = {future: log.Gauge(bar, at=before[future]) for future in busy}
        while unfinished := [future for future in busy if not future.done()]:
            wait(unfinished, _LOOK_EVERY_S, FIRST_COMPLETED)
            for future, layer in busy.items():
                gauges[future].at(written(future, layer))
            yield


def begin_worker(counts: Counts) -> None:
    """Sets where a worker counts, and ends it with its parent: else a killed build leaves it."""
    _worker["counts"] = counts
    if parent := multiprocessing.parent_process():

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()


def make_layer(store_root: Path, layer: LayerPlan, slot: int) -> LayerRecord:
    """Writes one layer from inputs that are in the store, unless another process just did."""
    store = Store(store_root)
    # another build, perhaps of another checkout, may write the same layer now
    with store.locked(f"layer-{layer.key.removeprefix('sha256:')}"):
        if known := store.layer(layer.key):
            return known
        with store.scratch() as scratch, store.new_blob() as blob:
            if layer.kind is LayerKind.WHEELS:
                groups = []
                for pin in layer.pins:
                    wheel = open_wheel(store.input_path(pin.sha256), pin.file)
                    untrue = pin.name in layer.rewrite_record
                    without = dict(layer.without).get(pin.name, ())
                    groups.append(
                        wheel_entries(wheel, layer.venv, rewrite_record=untrue, without=without)
                    )
                entries = with_parents(merge_wheels(groups, layer.prefer))
            else:
                # under their own file names, so that errors name them
                debs = [scratch / pin.file for pin in layer.pins]
                for link, pin in zip(debs, layer.pins, strict=True):
                    link.symlink_to(store.input_path(pin.sha256).resolve())
                architecture, users = layer.architecture, layer.accounts
                if layer.kind is LayerKind.DEBS:
                    entries = assemble_overlay(debs, scratch, architecture=architecture)
                else:
                    entries = assemble_rootfs(debs, scratch, users=users, architecture=architecture)
            counts = _worker["counts"]
            with os_errors_explained(blob.path), CountedFile(blob.path, counts, slot) as out:
                written = write_layer(entries, out)
            blob.keep(written.record.digest)
        return store.keep_layer(layer.key, written)


@contextmanager
def _workers(store: Store, counts: Counts) -> Iterator[ProcessPoolExecutor]:
    """A process for each core; only the parent reacts to Ctrl-C."""
    # A terminal sends Ctrl-C to all processes. Signals that are blocked while the fork server
    # starts stay blocked in it and in its children; the tracker first, as its start unblocks them.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # not fork: a copy of this process would have the locks of its threads and not the threads
    context = multiprocessing.get_context("forkserver")
    # as many as this process may use, which in a container is less than the machine has
    count = min(len(os.sched_getaffinity(0)), 8)
    pool = ProcessPoolExecutor(count, context, begin_worker, (counts,))
    try:
        yield pool
    except BaseException:
        # unfinished layers are scratch files; their workers end at once and leave no name
        # a private name, but the only means to end them before their layer is done
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        store.sweep()


def make_layers(store: Store, work: Work, fetcher: Fetcher, *, keep_inputs: bool) -> None:
    """Fetches the missing files; writes each layer as soon as its last file is there."""
    waiting = {layer.key: {p.sha256 for p in layer.pins} for layer in work.missing}
    pins = list({p.sha256: p for layer in work.missing for p in layer.pins}.values())
    total_bytes = sum(p.size_bytes for p in pins)
    verb = "Looking for" if fetcher.offline else "Fetching"
    title = f"{verb} {log.count(len(work.fetch), 'file')}, {log.size(work.fetch_bytes)}"
    if (known_bytes := total_bytes - work.fetch_bytes) > 0:
        title += f", checking {log.size(known_bytes)} that are here"
    title += f", and writing {log.count(len(work.missing), 'layer')}"
    # in memory that a fork server's workers can use
    array = multiprocessing.get_context("forkserver").RawArray("q", len(work.missing))
    counts: Counts = array
    with log.step(title), _workers(store, counts) as pool:
        futures: dict[Future[LayerRecord], LayerPlan] = {}
        with (
            log.progress("fetched", total_bytes) as bar,
            # also the files that the store has: it is trusted only once they were hashed
            closing(fetcher.fetch_all(pins, bar)) as arrivals,
        ):
            for pin, _ in arrivals:
                for slot, layer in enumerate(work.missing):
                    waiting[layer.key].discard(pin.sha256)
                    is_started = any(started is layer for started in futures.values())
                    if not waiting[layer.key] and not is_started:
                        with proc.undisturbed():
                            future = pool.submit(make_layer, store.root, layer, slot)
                        futures[future] = layer
                _collect(store, work, futures, keep_inputs)
        # closed also where a layer fails: the error is not to be printed into a live bar
        with closing(watch(work.missing, futures, counts)) as looks:
            for _ in looks:
                _collect(store, work, futures, keep_inputs)
        _collect(store, work, futures, keep_inputs)


def _collect(
    store: Store, work: Work, futures: dict[Future[LayerRecord], LayerPlan], keep_inputs: bool
) -> None:
    """Takes finished layers and drops big wheels whose bytes a layer now holds."""
    finished = {future: layer for future, layer in futures.items() if future.done()}
    for future in finished:
        try:
            future.result()
        except BrokenProcessPool as error:
            hint = "Run it again. If it happens again, the machine may be short of memory."
            raise Interrupted("a worker was killed", hint) from error
    if keep_inputs:
        return
    keys = {layer.key for layer in finished.values()}
    needed = {p.sha256 for layer in work.missing if layer.key not in keys for p in layer.pins}
    wheels = [layer for layer in finished.values() if layer.kind is LayerKind.WHEELS]
    for pin in (pin for layer in wheels for pin in layer.pins):
        if pin.size_bytes >= BIG_WHEEL_BYTES and pin.sha256 not in needed:
            store.input_path(pin.sha256).unlink(missing_ok=True)

"""Layers that follow from locked files: fetched and written side by side, in processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.assemble.entry import Entry, with_parents
from pipeline.assemble.layer import write_layer
from pipeline.assemble.layer_progress import CountedFile, Counts, shared_counts, watch
from pipeline.assemble.overlap import merge_wheels
from pipeline.assemble.plan import BIG_WHEEL_BYTES, LayerKind, LayerPlan, Work
from pipeline.assemble.rootfs import assemble_overlay, assemble_rootfs
from pipeline.assemble.venv import wheel_entries
from pipeline.assemble.wheel import open_wheel
from pipeline.errors import Interrupted
from pipeline.files import os_errors_explained
from pipeline.lock.model import Pin
from pipeline.oci.record import LayerRecord
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.fetch.inputs import Fetcher


def shield_from_ctrl_c() -> None:
    """A terminal sends Ctrl-C to all processes; only the parent is to act on it.

    What is blocked while the fork server starts stays blocked in it and in its children.
    """
    # first, as starting it ends with SIGINT unblocked
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# what a worker writes to, so that its parent can show how far a layer is
_worker: dict[str, Counts] = {}


def begin_worker(counts: Counts) -> None:
    """Know where to count, and end with the parent: else a killed build leaves workers waiting."""
    _worker["counts"] = counts
    threading.Thread(target=_wait_for_parents_end, daemon=True).start()


def _wait_for_parents_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that come meanwhile are acted on at the end: no process is left half-started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = [(n, signal.signal(n, note)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if caught:
            # a second signal means the same as the first
            signal.raise_signal(caught[0])


def make_layer(store_root: Path, layer: LayerPlan, slot: int) -> LayerRecord:
    """Write one layer from inputs that are in the store, unless another process just did."""
    store = Store(store_root)
    # another build, perhaps of another checkout, may write the same layer now
    with store.locked(f"layer-{layer.key.removeprefix('sha256:')}"):
        known = store.layer(layer.key)
        if known:
            return known
        with store.scratch() as scratch, store.new_blob() as blob:
            entries = layer_entries(store, layer, scratch)
            with (
                os_errors_explained(blob.path),
                CountedFile(blob.path, _worker["counts"], slot) as out,
            ):
                written = write_layer(entries, out)
            blob.keep(written.record.digest)
        return store.keep_layer(layer.key, written)


def layer_entries(store: Store, layer: LayerPlan, scratch: Path) -> list[Entry]:
    """What goes into a layer, sorted, with its parent folders."""
    if layer.kind is LayerKind.WHEELS:
        groups = []
        for pin in layer.pins:
            wheel = open_wheel(store.input_path(pin.sha256), pin.file)
            untrue = pin.name in layer.rewrite_record
            groups.append(wheel_entries(wheel, layer.venv, rewrite_record=untrue))
        return with_parents(merge_wheels(groups, layer.prefer))
    debs = [_named(store, pin, scratch) for pin in layer.pins]
    if layer.kind is LayerKind.DEBS:
        return assemble_overlay(debs, scratch, architecture=layer.architecture)
    return assemble_rootfs(debs, scratch, users=layer.accounts, architecture=layer.architecture)


def _named(store: Store, pin: Pin, scratch: Path) -> Path:
    """An input under its own file name, so that errors name it."""
    link = scratch / pin.file
    link.symlink_to(store.input_path(pin.sha256).resolve())
    return link


@contextmanager
def _workers(store: Store, counts: Counts) -> Iterator[ProcessPoolExecutor]:
    """A process a core; Ctrl-C is the parent's to handle."""
    shield_from_ctrl_c()
    # not fork: a copy of this process would have the locks of its threads and not the threads
    context = multiprocessing.get_context("forkserver")
    # as many as this process may use, which in a container is less than the machine has
    count = min(len(os.sched_getaffinity(0)), 8)
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=begin_worker, initargs=(counts,)
    )
    try:
        yield pool
    except BaseException:
        # unfinished layers are scratch files; their workers end at once and leave no name behind
        # a private name, but the only way to end them before their layer is done
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        store.sweep()


def make_layers(store: Store, work: Work, fetcher: Fetcher, *, keep_inputs: bool) -> None:
    """Fetch what is missing; write each layer as soon as its last file is there."""
    waiting = {layer.key: {p.sha256 for p in layer.pins} for layer in work.missing}
    pins = list({p.sha256: p for layer in work.missing for p in layer.pins}.values())
    verb = "Looking for" if fetcher.offline else "Fetching"
    title = f"{verb} {log.count(len(work.fetch), 'file')}, {log.size(work.fetch_bytes)}"
    here_bytes = sum(p.size_bytes for p in pins) - work.fetch_bytes
    title += f", checking {log.size(here_bytes)} that are here" if here_bytes > 0 else ""
    title += f", and writing {log.count(len(work.missing), 'layer')}"
    counts = shared_counts(work.missing)
    with log.step(title), _workers(store, counts) as pool:
        futures: dict[Future[LayerRecord], LayerPlan] = {}
        with (
            log.progress("fetched", sum(p.size_bytes for p in pins)) as bar,
            # also what the store has: it is believed only once it was hashed
            closing(fetcher.fetch_all(pins, bar)) as arrivals,
        ):
            for pin, _ in arrivals:
                for slot, layer in enumerate(work.missing):
                    left = waiting[layer.key]
                    left.discard(pin.sha256)
                    # each layer starts as soon as its last file is there
                    if not left and not any(p is layer for p in futures.values()):
                        with undisturbed():
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
    """Take finished layers; a wheel that has become a layer of its own is not kept twice."""
    for future, layer in futures.items():
        if not future.done():
            continue
        try:
            future.result()
        except BrokenProcessPool as error:
            raise Interrupted(
                "a worker was killed",
                "Run it again. If it happens again, the machine may be short of memory.",
            ) from error
        if not keep_inputs:
            done = {layer.key for future, layer in futures.items() if future.done()}
            drop_inputs(store, layer, [x for x in work.missing if x.key not in done])


def drop_inputs(store: Store, layer: LayerPlan, unfinished: Sequence[LayerPlan]) -> None:
    """Remove big inputs whose bytes now live in a layer, unless another one still needs them."""
    needed = {pin.sha256 for other in unfinished for pin in other.pins}
    for pin in layer.pins:
        is_big = layer.kind is LayerKind.WHEELS and pin.size_bytes >= BIG_WHEEL_BYTES
        if is_big and pin.sha256 not in needed:
            store.input_path(pin.sha256).unlink(missing_ok=True)

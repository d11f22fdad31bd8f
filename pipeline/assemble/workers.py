"""Worker processes that neither outlive a build nor talk when it is stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from types import FrameType


def shield_from_ctrl_c() -> None:
    """A terminal sends Ctrl-C to all processes; only the parent is to act on it.

    What is blocked while the fork server starts stays blocked in it and in its children.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Without this the workers of a killed build would wait for work for ever."""
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
            signal.raise_signal(caught[0])

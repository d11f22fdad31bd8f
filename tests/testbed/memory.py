"""How much memory a group of processes takes at its peak, while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.5


@dataclass
class Peak:
    """The highest sums seen. PSS shares out common pages, RSS counts them for each process."""

    processes: int = 0
    rss_bytes: int = 0
    pss_bytes: int = 0


@contextmanager
def peak_memory(word: str) -> Iterator[Peak]:
    """Watch all processes that have the word in their command line."""
    peak, done = Peak(), threading.Event()
    thread = threading.Thread(target=_watch, args=(word.encode(), peak, done), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _watch(word: bytes, peak: Peak, done: threading.Event) -> None:
    while not done.wait(EVERY_S):
        rows = [row for folder in Path("/proc").glob("[0-9]*") if (row := _sizes(folder, word))]
        peak.processes = max(peak.processes, len(rows))
        peak.rss_bytes = max(peak.rss_bytes, sum(rss for rss, _ in rows))
        peak.pss_bytes = max(peak.pss_bytes, sum(pss for _, pss in rows))


def _sizes(folder: Path, word: bytes) -> tuple[int, int] | None:
    """RSS and PSS of one process; None where it is another's or has ended."""
    try:
        if word not in (folder / "cmdline").read_bytes():
            return None
        rows = [line.split() for line in (folder / "smaps_rollup").read_text().splitlines()]
    except OSError:
        return None
    sizes = {row[0]: int(row[1]) * 1024 for row in rows if row[0] in ("Rss:", "Pss:")}
    return (sizes["Rss:"], sizes["Pss:"]) if len(sizes) == 2 else None

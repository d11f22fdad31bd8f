"""The log of a starting engine: kept whole in a file, handed on line by line."""

from __future__ import annotations

import queue
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from pipeline import log
from pipeline.errors import PipelineError
from pipeline.files import os_errors_explained

_MOST_LINE_BYTES = 1 << 16
_MOST_FILE_BYTES = 64 << 20
# What is searched for known issues; a traceback of eight workers has some thousand lines.
_KEPT_LINES = 5000
# Sequences for a terminal (ECMA-48), and what is none of them; a tab may stay.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)


class LogReader:
    """Reads in a thread of its own, so that a silent engine does not hold up the wait for it."""

    def __init__(self, pieces: Iterable[bytes], file: Path) -> None:
        with os_errors_explained(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(pieces, file), daemon=True)
        self._thread.start()

    def new_lines(self) -> Iterator[str]:
        """What came since the last call."""
        with suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                self.last.append(line)
                yield line

    def finish(self, timeout_s: float) -> None:
        """Wait for the last lines of a container that has ended."""
        self._thread.join(timeout_s)

    def _read(self, pieces: Iterable[bytes], file: Path) -> None:
        # the container may be removed, or the engine go away, in the middle of a line
        with suppress(PipelineError, OSError):
            for line in split_lines(_copied(pieces, file)):
                self._lines.put(line)


def _copied(pieces: Iterable[bytes], file: Path) -> Iterator[bytes]:
    left = _MOST_FILE_BYTES if _is_added(file, b"") else 0
    for piece in pieces:
        if left > 0:
            left = left - len(piece) if _is_added(file, piece[:left]) else 0
        yield piece


def _is_added(file: Path, piece: bytes) -> bool:
    """A start that is killed leaves what it read; on a full disk it is judged all the same."""
    try:
        with file.open("ab") as out:
            out.write(piece)
    except OSError as error:
        log.say(f"{file}: the log is not kept from here on: {error.strerror}")
        return False
    return True


def split_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Lines of a stream; progress bars end theirs with a carriage return."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
        yield from filter(str.strip, map(_plain, lines))
        if len(rest) > _MOST_LINE_BYTES:
            yield _plain(rest)
            rest = b""
    if _plain(rest).strip():
        yield _plain(rest)


def _plain(line: bytes) -> str:
    """A line without colours and control characters: it is searched, shown and kept."""
    return _CONTROL.sub("", line.decode(errors="replace"))

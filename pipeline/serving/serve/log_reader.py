"""The log of a starting engine: stored whole, split into lines, and what the lines mean."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from pipeline.core import log
from pipeline.core.errors import PipelineError
from pipeline.core.files import os_errors_explained
from pipeline.core.model import Engine
from pipeline.serving.serve.engine_log import LINES

_MOST_LINE_BYTES = 1 << 16
_MOST_FILE_BYTES = 64 << 20
# What is searched for known issues; a traceback of eight workers has some thousand lines.
_LAST_LINES = 5000
# No line that counts is longer.
LONGEST = 4000
# Sequences for a terminal (ECMA-48), and what is none of them; a tab may stay.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)


class LogReader:
    """Reads in a thread of its own, so that a silent engine does not hold up the wait for it."""

    def __init__(self, pieces: Iterable[bytes], file: Path) -> None:
        with os_errors_explained(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            # an engine may serve before the thread has read its first line
            file.touch()
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._read_bytes = 0
        self._thread = threading.Thread(target=self._read, args=(pieces, file), daemon=True)
        self._thread.start()

    def new_lines(self) -> Iterator[str]:
        """The lines since the last call."""
        with suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                self.last.append(line)
                yield line

    def catch_up(self, printed: Iterable[bytes], timeout_s: float) -> None:
        """Waits until it has read what the container has printed so far, which is `printed`."""
        deadline, wanted = time.monotonic() + timeout_s, 0
        # a log that cannot be read is judged as far as it was read
        with suppress(PipelineError, OSError):
            for piece in printed:
                wanted += len(piece)
                if wanted > _MOST_FILE_BYTES:
                    break
        while self._read_bytes < wanted and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def finish(self, timeout_s: float) -> None:
        """Waits for the last lines of a container that has ended."""
        self._thread.join(timeout_s)

    def _read(self, pieces: Iterable[bytes], file: Path) -> None:
        rest = b""
        # the container may be removed, or the engine go away, in the middle of a line
        with suppress(PipelineError, OSError):
            # the end of the log ends its last line
            for piece in chain(_copied(pieces, file), [b"\n"]):
                # progress bars end their lines with a carriage return
                *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
                if len(rest) > _MOST_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    # without colours and control characters: it is searched, shown and stored
                    text = _CONTROL.sub("", line.decode(errors="replace"))
                    if text.strip():
                        self._lines.put(text)
                self._read_bytes += len(piece)


def _copied(pieces: Iterable[bytes], file: Path) -> Iterator[bytes]:
    """Yields the pieces, but first writes each to a file: a killed start leaves what it read."""
    left = _MOST_FILE_BYTES
    for piece in pieces:
        if left > 0:
            try:
                with file.open("ab") as out:
                    out.write(piece[:left])
                left -= len(piece)
            except OSError as error:
                # a start on a full disk is judged all the same
                log.say(f"{file}: the log is not kept from here on: {error.strerror}")
                left = 0
        yield piece


class Progress(NamedTuple):
    """Where a start is."""

    title: str
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        return self.title if self.total is None else f"{self.title}: {self.done} of {self.total}"


_OF = r"(?P<done>\d+)/(?P<total>\d+)"
# By title; the last step of each engine says that it listens, or is about to.
STAGES: dict[Engine, dict[str, str]] = {
    engine: {title: pattern.replace("{of}", _OF) for title, pattern in stages.items()}
    for engine, stages in LINES.stages.items()
}
STAGES["ik-llama"] = STAGES["llama-cpp"]
# After this line SGLang never answers, though its HTTP server outlives the scheduler.
SGLANG_FATAL = "Scheduler hit an exception: Traceback"


def read_progress(engine: Engine, line: str) -> Progress | None:
    """The step that a line announces; none where it announces none."""
    for title, pattern in STAGES[engine].items():
        if match := re.search(pattern, line[:LONGEST]):
            counts = match.groupdict()
            return Progress(title, *(int(counts[x]) for x in ("done", "total") if x in counts))
    return None

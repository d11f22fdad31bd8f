"""Tracebacks in logs: the functions that they go through, the kernels launched, and overruns.

Triton ends a launch with `OutOfResources: shared memory, Required: …, Hardware limit: …`. Lines of
a log carry prefixes (a time, a rank), so nothing here is bound to the start of a line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile

from pipeline.model import Frozen

_BEGINS = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"\n]{1,1000}\.py)", line \d+, in (\w+)')
# `_fwd_kernel[grid](`, as the line of source below a frame shows a launch
_LAUNCH = re.compile(r"\b(\w+)\[[^\]\n]*\]\(")
# Inductor writes no commas and no second space: `Required: 147456 Hardware limit:101376`.
_OVERRUN = re.compile(r"Required: ?(\d{1,9}),? ?Hardware limit: ?(\d{1,9})")
# An engine's own frames lie within the last dozens, below those of its server and above Triton's.
_MOST_FRAMES = 60
# Of one log: a server that fails at every request repeats few.
_MOST_TRACEBACKS = 100
# Each is looked up in the cases of every image; a crash has one, or one for each size it tried.
_MOST_OVERRUNS = 20
_LONGEST_LINE = 4000


class Frame(Frozen):
    """One step of a traceback."""

    path: str
    function: str

    def shared_parts(self, path: str) -> int:
        """How many parts are the same at the ends of its own path and of another one."""
        pairs = zip(reversed(self.path.split("/")), reversed(path.split("/")), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def is_in(self, path: str) -> bool:
        """Whether it is in a file of a package, wherever that is installed."""
        return self.shared_parts(path) == path.count("/") + 1

    def shared_with(self, function: str) -> int:
        """The same for a function that a case names as `module:name`; 0 for any other function."""
        path, name = _place(function)
        return self.shared_parts(path) if self.function == name else 0

    def calls(self, function: str) -> bool:
        """Whether it is in that function, in a file of the same whole path."""
        path, name = _place(function)
        return self.function == name and self.is_in(path)


def _place(function: str) -> tuple[str, str]:
    module, _, name = function.partition(":")
    return f"{module.replace('.', '/')}.py", name


class Traceback(Frozen):
    """What one traceback tells of a kernel: the active functions, and what they launch."""

    frames: tuple[Frame, ...] = ()
    launched: tuple[str, ...] = ()

    def called(self, functions: Iterable[str]) -> set[str]:
        """Those of the functions of cases that it goes through.

        For each frame that is the one in the nearest file. Packages are installed anywhere, and
        engines move their files from version to version: where nothing more is the same, the name
        of the file is enough, and then there may be several.
        """
        called, known = set(), set(functions)
        for frame in self.frames:
            shared = {function: frame.shared_with(function) for function in known}
            most = max(shared.values(), default=0)
            called |= {function for function, n in shared.items() if n == most and n}
        return called


class Overrun(Frozen):
    """A launch that asked for more shared memory than its card has."""

    required_bytes: int
    limit_bytes: int
    traceback: Traceback = Traceback()


class TracebackReader:
    """Notes tracebacks and overruns, each once, in lines that it hands on."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque(maxlen=_MOST_FRAMES)
        self._launched: deque[str] = deque(maxlen=_MOST_FRAMES)
        self._has_begun = False
        self._tracebacks: dict[Traceback, None] = {}
        self._overruns: dict[tuple[int, int], Overrun] = {}

    @property
    def tracebacks(self) -> list[Traceback]:
        """In the order of the log; a lone line of source counts as one, too."""
        return list(self._tracebacks)

    @property
    def overruns(self) -> list[Overrun]:
        return list(self._overruns.values())

    def watch(self, lines: Iterable[str]) -> Iterator[str]:
        """The same lines, one by one: a log may be a pipe, which can be read only once."""
        for line in lines:
            self._note(line[:_LONGEST_LINE])
            yield line
        self._end()
        self._has_begun = False

    def _note(self, line: str) -> None:
        if _BEGINS in line:
            # what stands before the first one are lines of a log that look like source
            self._end(is_kept=self._has_begun)
            self._has_begun = True
        self._frames.extend(Frame(path=f[1], function=f[2]) for f in _FRAME.finditer(line))
        # few lines have it, and to look for whole words in each takes long
        if "](" in line:
            self._launched.extend(_LAUNCH.findall(line))
        if match := _OVERRUN.search(line):
            self._note_overrun(int(match[1]), int(match[2]), self._end())

    def _note_overrun(self, required: int, limit: int, traceback: Traceback) -> None:
        # the first that has a traceback: later lines often only repeat the message
        known = self._overruns.get((required, limit))
        if known is None and len(self._overruns) >= _MOST_OVERRUNS:
            return
        if known is None or not known.traceback.frames:
            self._overruns[required, limit] = Overrun(
                required_bytes=required, limit_bytes=limit, traceback=traceback
            )

    def _end(self, *, is_kept: bool = True) -> Traceback:
        traceback = Traceback(frames=tuple(self._frames), launched=tuple(self._launched))
        self._frames.clear()
        self._launched.clear()
        if is_kept and traceback != Traceback():
            self._tracebacks[traceback] = None
            # a crash is at the end of a log
            if len(self._tracebacks) > _MOST_TRACEBACKS:
                del self._tracebacks[next(iter(self._tracebacks))]
        return traceback

"""What a person sees: steps and progress on stderr, results on stdout."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

# Often enough to see that a long download goes on, seldom enough for the log of a CI run.
QUIET_LINE_EVERY_S = 5.0
# A count that has not moved is printed again, so that it does not look dead.
SAME_LINE_EVERY_S = 30.0

_state: dict[str, Any] = {"quiet": False, "printed_at": 0.0}
# Secrets that this process was given; a shorter one is in half of all words.
_SECRETS, _SHORTEST_SECRET = ("SM120_API_KEY", "HF_TOKEN", "SM120_KEY_PASSPHRASE"), 6
# A login in an address, also with a slash in its password, and one before a host; `IMAGE@sha256:`
# and `user@host` are none.
_LOGINS = re.compile(
    r"(?<=//)(?:[^/\s]+|[^/\s:@\[]*:(?!\d*(?:/|\s|$))\S{0,300})@"
    r"|(?<![\w./:@-])[^\s/@:'\"]{1,100}:[^\s/@'\"]{1,300}@(?!sha256:)"
)
_ODD = re.compile(r"[^\n\t -~]")
# What click.style writes: colours and bold. Anything else that steers a terminal is foreign.
_COLOUR = re.compile(r"(\x1b\[(?:[0-2]|22|3[0-79]|9[0-7])m)")


def printable(text: str) -> str:
    """Makes every character visible: shows by number what steers a terminal or hides.

    Escapes, C1 controls and marks that turn the direction come with names of models, lines of
    logs and answers of servers.
    """

    def seen(match: re.Match[str]) -> str:
        char = match[0]
        is_seen = char.isprintable() or unicodedata.category(char) == "Zs"
        return char if is_seen else ascii(char)[1:-1]

    return _ODD.sub(seen, text)


def json_text(value: Any, **options: Any) -> str:
    """Writes JSON that acts on no terminal: escapes invisible characters, which read the same."""

    def escaped(match: re.Match[str]) -> str:
        return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]

    return _ODD.sub(escaped, json.dumps(value, ensure_ascii=False, **options))


def redacted(value: Any, *, logins: bool = False, more: Sequence[str] = ()) -> Any:
    """Removes the secrets that this process was given from a text, or from JSON with texts in it.

    A server may repeat the key that it was sent. With `logins`, names and passwords in addresses
    go, too: errors quote what a user typed. `more` are secrets that are not in the environment.
    Redact a text before you cut it short: nobody finds half a key.
    """
    if isinstance(value, dict):
        return {key: redacted(each, logins=logins, more=more) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each, logins=logins, more=more) for each in value]
    if not isinstance(value, str):
        return value
    for secret in (*(os.environ.get(name, "").strip() for name in _SECRETS), *more):
        if len(secret) >= _SHORTEST_SECRET:
            # as JSON and Python write it, too
            for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
                value = value.replace(form, "***")
    return _LOGINS.sub("***@", value) if logins else value


class Screen:
    """Standard output for people: no foreign text acts on the terminal."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        parts = _COLOUR.split(redacted(text))
        # the odd ones are our own colours
        shown = [part if at % 2 else printable(part) for at, part in enumerate(parts)]
        self._stream.write("".join(shown))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def set_quiet(quiet: bool) -> None:
    """`--quiet`: no steps, no bars."""
    _state["quiet"] = quiet


def say(text: str) -> None:
    """One line for a person, on stderr."""
    if not _state["quiet"]:
        _state["printed_at"] = time.monotonic()
        try:
            print(printable(redacted(text, logins=True)), file=sys.stderr, flush=True)
        except BrokenPipeError:
            # a reader that went away (`2>&1 | head`) is not a failure; further lines go nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


_COLOURS = {
    "red": ("31", "broken bad changed damaged failed invalid lost moved refused void wrong"),
    "yellow": ("33", "incomplete skipped stale undecided unknown unproved unsigned warning"),
    "green": ("32", "good identical passed proved right valid"),
}
_CODES = {word: code for code, words in _COLOURS.values() for word in words.split()}


def coloured(text: str, word: str = "", stream: Any = None) -> str:
    """A verdict in its colour, or a text in that of a word; plain where no person looks.

    NO_COLOR (https://no-color.org) and TERM=dumb turn it off.
    """
    code = _CODES.get(word or text)
    if not code or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    # a table may go to either, so that both must be seen
    is_seen = all(each.isatty() for each in ([stream] if stream else [sys.stdout, sys.stderr]))
    return f"\033[{code}m{text}\033[0m" if is_seen else text


def size(number: float) -> str:
    """1234567 -> '1.2 MB', in the units download pages use."""
    # powers of 1000, as the Hub, registries and disks count; GiB are for memory alone
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"


def count(number: int, one: str, several: str = "") -> str:
    """1 -> '1 rule', 2 -> '2 rules'."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def counts_by_kind(words: Iterable[str], kinds: Iterable[str]) -> str:
    """How many there are of each kind: '3 passed, 1 failed'; kinds without any are left out."""
    found = Counter(words)
    return ", ".join(f"{found[kind]} {kind}" for kind in kinds if found[kind])


def seconds(number: float) -> str:
    """75 -> '1 min 15 s', 3700 -> '1 h 1 min'."""
    if number < 60:
        return f"{number:.1f} s"
    minutes, rest = divmod(int(number), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def step(title: str) -> Iterator[None]:
    """Prints what begins, and how long it took once it is done."""
    say(title)
    start = time.monotonic()
    with watched(title):
        yield
    # not after an error, whose message is the next line
    say(f"  done in {seconds(time.monotonic() - start)}")


# A step that has been silent for so long prints that it goes on; then ever more seldom.
STILL_AFTER_S, STILL_AT_MOST_S = 10.0, 60.0


class StillWorking:
    """Ends a silence: shows that a long step goes on, also where nothing can be counted.

    A program that prints by itself gives a function as `title`, which returns what it does now: an
    empty text before it does anything. A new title begins a new wait.
    """

    def __init__(self, title: str | Callable[[], str], after_s: float | None = None) -> None:
        self._ask = title if callable(title) else lambda: title
        self._after_s = STILL_AFTER_S if after_s is None else after_s
        self._title: str | None = None
        self.look()

    def look(self) -> None:
        """Says that the step goes on, where nothing was printed for long enough."""
        now = time.monotonic()
        if (title := self._ask()) != self._title:
            self._title, self._wait_s = title, self._after_s
            self._start = _state["printed_at"] = now
        if title and now - _state["printed_at"] >= self._wait_s:
            self._wait_s = min(2 * self._wait_s, STILL_AT_MOST_S)
            say(f"  {title}: still working after {seconds(now - self._start)}")


def heard() -> None:
    """Notes that another program printed something: the silence begins anew."""
    _state["printed_at"] = time.monotonic()


@contextmanager
def watched(title: str | Callable[[], str], after_s: float | None = None) -> Iterator[None]:
    """For a step that is mostly quick: prints nothing, unless it takes long."""
    if _state["quiet"]:
        yield
        return
    still_working, ended = StillWorking(title, after_s), threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            still_working.look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


class Bar(Protocol):
    """Something that counts bytes, or things; safe to call from several threads."""

    def advance(self, n_bytes: int) -> None: ...


# The time left follows from the last seconds, or steps where each takes longer: how fast it was an
# hour ago says little of now.
RECENT_S, RECENT_STEPS = 30.0, 9


class LineBar:
    """Progress for logs and pipes: a plain line now and then."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total, self._done = title, total_bytes, 0
        self._shown = self._moved = time.monotonic()
        self._steps = deque([(self._shown, 0)])  # when so much was done
        self._lock = threading.Lock()

    def advance(self, n_bytes: int) -> None:
        """Counts so much more as done, or less; even with 0, it ends a long silence."""
        with self._lock:
            now = time.monotonic()
            self._done += n_bytes
            self._moved = now if n_bytes else self._moved
            # one for each second is enough: bytes come in pieces of a megabyte or less
            if now - self._steps[-1][0] >= 1 and self._done != self._steps[-1][1]:
                self._steps.append((now, self._done))
            while len(self._steps) > RECENT_STEPS and now - self._steps[1][0] >= RECENT_S:
                self._steps.popleft()
            then, before = self._steps[0]
            rate = (self._done - before) / (now - then) if now > then else 0.0
            # a new number after a few seconds, the same one only after a long while
            pause = QUIET_LINE_EVERY_S if self._moved > self._shown else SAME_LINE_EVERY_S
            if now - self._shown >= pause and (text := self._line(rate)):
                self._shown = now
                say(f"  {text}")

    def _line(self, rate: float) -> str:
        # a total is often an estimate: "0 s left" again and again is of no help
        if not 0 < self._done < self._total or rate <= 0:
            return ""
        done = f"{self._title}: {size(self._done)} of {size(self._total)}, {size(rate)}/s"
        return f"{done}, {seconds((self._total - self._done) / rate)} left"


class CountLine(LineBar):
    """Progress in things that take seconds or minutes each, for logs and pipes."""

    def __init__(self, total: int, one: str) -> None:
        super().__init__(one, total)

    def _line(self, rate: float) -> str:
        rest_s = (self._total - self._done) / rate if rate > 0 else 0
        about = f", about {seconds(rest_s)} left" if rest_s > 0 else ""
        return f"{self._done} of {count(self._total, self._title)}{about}"


class RichBar:
    """Progress for a terminal: a live bar with sizes, rate and time left."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, n_bytes: int) -> None:
        # `update`, unlike `advance`, keeps bytes that are taken back out of the shown speed
        self._progress.update(self._task, advance=n_bytes)
        # a bar that moves is no silence
        _state["printed_at"] = time.monotonic()


class NoBar:
    """Progress that is not shown."""

    def advance(self, n_bytes: int) -> None:
        return


class Gauge:
    """One file's progress in a bar that several files share."""

    def __init__(self, bar: Bar, at: int = 0) -> None:
        self._bar, self._at = bar, at

    def at(self, n_bytes: int) -> None:
        """Moves to so many bytes, also backwards, when they travel again."""
        self._bar.advance(n_bytes - self._at)
        self._at = n_bytes

    def advance(self, n_bytes: int) -> None:
        self.at(self._at + n_bytes)


def progress(title: str, total_bytes: int) -> AbstractContextManager[Bar]:
    """A live bar on a terminal, plain lines elsewhere."""
    line = LineBar(title, total_bytes)
    return _bar(line, printable(title), total_bytes, "  {task.description}", with_sizes=True)


def counting(total: int, one: str) -> AbstractContextManager[Bar]:
    """Progress in things such as cases: a live bar on a terminal, plain lines elsewhere."""
    text = "  {task.completed} of {task.total} {task.description}"
    return _bar(CountLine(total, one), f"{one}s", total, text, with_sizes=False)


@contextmanager
def _bar(line: LineBar, title: str, total: int, text: str, *, with_sizes: bool) -> Iterator[Bar]:
    if _state["quiet"] or not sys.stderr.isatty():
        yield NoBar() if _state["quiet"] else line
        return
    from rich import progress as rp  # loaded only where it is shown
    from rich.console import Console
    from rich.text import Text

    start = time.monotonic()

    class Times(rp.ProgressColumn):
        """How long it took and will take.

        Rich stops its clock at the total, which is often an estimate: the bar would look frozen.
        """

        def render(self, task: rp.Task) -> Text:
            remaining = task.time_remaining
            rest = "" if remaining is None else f", about {seconds(remaining)} left"
            so_far = f"{seconds(time.monotonic() - start)} so far"
            return Text(so_far + (", finishing" if task.finished else rest))

    sizes = (rp.DownloadColumn(), rp.TransferSpeedColumn()) if with_sizes else ()
    shown = (rp.TextColumn(text), rp.BarColumn(), *sizes, Times())
    # transient: what stays on the screen is the line that `step` prints
    with rp.Progress(*shown, console=Console(stderr=True), transient=True) as live:
        yield RichBar(live, live.add_task(title, total=total))


_DIGEST = re.compile(r"\b(sha256:[0-9a-f]{12})[0-9a-f]{52}\b")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Makes a plain aligned table; `-` stands for None.

    The same in a log, a pipe and the README. On a terminal that is too narrow for it, digests are
    short, and where that is not enough, the last column stands below each row.
    """
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    lines, needed = _aligned(head, cells)
    # none where a file or a program reads
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if width is not None and needed > width:
        cells = [[_DIGEST.sub(r"\1…", cell) for cell in row] for row in cells]
        lines, needed = _aligned(head, cells)
    if width is None or needed <= width or len(head) == 1:
        return "\n".join(lines)
    (title, rule, *shown), _ = _aligned(head[:-1], [row[:-1] for row in cells])
    # words are not broken: a path can be copied whole
    below = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    below.initial_indent = below.subsequent_indent = "    "
    lines = [title, f"    {head[-1]}", rule]
    for line, row in zip(shown, cells, strict=True):
        lines += [line, *below.wrap(row[-1])]
    return "\n".join(lines)


def _aligned(head: Sequence[str], cells: Sequence[Sequence[str]]) -> tuple[list[str], int]:
    """The lines of a table, and how wide they are."""
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    # padded first: a colour has no width
    lines = [
        "  ".join(coloured(c.ljust(w), c) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in [head, ["-" * w for w in widths], *cells]
    ]
    return lines, sum(widths) + 2 * (len(widths) - 1)

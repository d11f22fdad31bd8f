"""Copies of the working tree in which tests meet one mutant after another."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.core import files, proc
from tests.mutants.changes import Mutant, changed_source

Outcome = Literal["killed", "survived", "timed out", "not entered", "accepted"]
PYTEST = ("-m", "pytest", "-q", "-p", "tests.mutants.entered", "-p", "no:cacheprovider", "-n0")


_KEPT_MAPS = 20


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


class CannotTest(Exception):
    """The tests cannot judge anything; the message says why."""


@dataclass
class EnteredMap:
    """For each function the tests that enter it, the sharpest first."""

    tests: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unsound: list[str] = field(default_factory=list)

    def limit_s(self, tests: Sequence[str]) -> float:
        """How long these tests may take on a busy machine before a mutant counts as endless."""
        return 30 + 3 * sum(self.seconds[t] for t in tests)


@dataclass(frozen=True)
class Trial:
    """A mutant and how it ended."""

    mutant: Mutant
    outcome: Outcome
    tests: int = 0
    killed_by: str = ""
    seconds: float = 0.0


class Tree:
    """A copy of the working tree that is gone when its block ends."""

    def __init__(self, root: Path, top: Path, stop: threading.Event) -> None:
        self.top = top
        self._stop = stop
        for name in tracked(root):
            source, target = root / name, top / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        # the clock of a compiled file counts whole seconds: each mutant has one of its own
        self._clock = time.time() + 1000

    def enter(self, within: str, tests: Sequence[str]) -> EnteredMap:
        """Run the tests once, unchanged, and see which functions each of them enters."""
        lines = self.top.parent / "entered"
        lines.unlink(missing_ok=True)
        options = ["--entered", str(lines), "--within", within, *tests]
        code, output = self._pytest(options, limit_s=3600)
        if code not in (0, 1) or not lines.exists():
            raise CannotTest(f"the tests do not run unchanged:\n{output[-3000:]}")
        return read_map(lines.read_text(encoding="utf-8"))

    def meet(self, mutant: Mutant, entered: EnteredMap) -> Trial:
        """Put the mutant in place, run the tests that enter its function, put it back."""
        tests = entered.tests.get((mutant.file, mutant.function), [])
        if not tests:
            return Trial(mutant, "not entered")
        place = self.top / mutant.file
        original, times = place.read_bytes(), place.stat()
        start = time.monotonic()
        try:
            self._clock += 2
            place.write_text(changed_source(original.decode(), mutant), encoding="utf-8")
            os.utime(place, (self._clock, self._clock))
            outcome, killed_by = self._judge(tests, entered.limit_s(tests))
        finally:
            place.write_bytes(original)
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
        return Trial(mutant, outcome, len(tests), killed_by, time.monotonic() - start)

    def _judge(self, tests: list[str], limit_s: float) -> tuple[Outcome, str]:
        chosen = self.top.parent / "chosen.json"
        chosen.write_text(json.dumps(tests), encoding="utf-8")
        test_files = list(dict.fromkeys(t.partition("::")[0] for t in tests))
        code, output = self._pytest(["-x", "--chosen", str(chosen), *test_files], limit_s)
        if code is None:
            return "timed out", ""
        return ("survived", "") if code == 0 else ("killed", _first_failure(output))

    def _pytest(self, options: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Its exit code (none where it ran too long) and what it printed."""
        scratch = self.top.parent / "tmp"
        scratch.mkdir()
        words = self.top.parent / "output"
        env = proc.child_environment(PYTHONHASHSEED="0", TMPDIR=str(scratch), NO_COLOR="1")
        args = [sys.executable, *PYTEST, *options]
        try:
            with proc.running(args, env=env, output=words, cwd=self.top) as child:
                code = self._wait(child, limit_s)
        finally:
            remove(scratch)
        return code, words.read_text(encoding="utf-8", errors="replace")

    def _wait(self, child: subprocess.Popen[bytes], limit_s: float) -> int | None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not self._stop.is_set():
            try:
                return child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
        child.send_signal(signal.SIGINT)  # fixtures give back what they hold
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
        if self._stop.is_set():
            raise Stopped
        return None


def _first_failure(output: str) -> str:
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].partition(" - ")[0]
    return ""


def read_map(lines: str) -> EnteredMap:
    """What the watch wrote: tests own what they, their file and their shared fixtures entered."""
    enters: dict[str, set[tuple[str, str]]] = defaultdict(set)
    uses: dict[str, list[str]] = {}
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for line in lines.splitlines():
        name, what, value = json.loads(line)
        if what == "enters":
            enters[name].add((value[0], value[1]))
        elif what == "uses":
            uses[name] = value
        elif outcomes.get(name, "passed") == "passed":
            outcomes[name], seconds[name] = what, value
    entered = EnteredMap()
    owned: dict[str, set[tuple[str, str]]] = {}
    for name, fixtures in uses.items():
        test = name.removeprefix("test ")
        if outcomes.get(name) != "passed":
            entered.unsound += [test] if outcomes.get(name) == "failed" else []
            continue
        file = test.partition("::")[0]
        shared = [f"file {file}", *(f"fixture {f}" for f in fixtures)]
        owned[test] = enters[name].union(*(enters[s] for s in shared))
        entered.seconds[test] = seconds[name]
    # a test that enters little is about what it enters, and says no soonest
    for test in sorted(owned, key=lambda t: (len(owned[t]), entered.seconds[t], t)):
        for function in sorted(owned[test]):
            entered.tests.setdefault(function, []).append(test)
    return entered


def tracked(root: Path) -> list[str]:
    """The files of a working tree, new ones too, ignored ones not."""
    git = proc.find_tool("git", "Install git: the copies are made of what it lists.")
    said = proc.read([git, "-C", str(root), "ls-files", "-z", "-c", "-o", "--exclude-standard"])
    if said.returncode != 0:
        raise CannotTest(f"{root} is not a git checkout")
    names = sorted({n for n in said.stdout.decode().split("\0") if n})
    return [n for n in names if (root / n).is_symlink() or (root / n).is_file()]


def fingerprint(root: Path, *tests: str) -> str:
    """Changes whenever code or a test does, or what is asked of them."""
    digest = hashlib.sha256(repr((sys.version, tests)).encode())
    for name in tracked(root):
        if name.startswith(("pipeline/", "tests/")) and not name.endswith("accepted.toml"):
            data = (root / name).read_bytes()
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\0".encode())
    return digest.hexdigest()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, with whatever tests mounted in it."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder in which a killed test may have left a mount or closed doors."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for line in mounts:
        place = line.split(" ")[1]
        if place.startswith(f"{folder}{os.sep}"):
            proc.read(["umount", "--lazy", place])
    shutil.rmtree(folder, ignore_errors=True)


def map_path(root: Path, key: str) -> Path:
    """Where a map is kept: beside the environments, which git ignores."""
    return root / ".nox" / "mutant-maps" / f"{key}.json"


def load_map(root: Path, key: str) -> EnteredMap | None:
    """A map that was made of exactly this tree."""
    try:
        kept = json.loads(map_path(root, key).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    tests = {(file, function): names for file, function, names in kept["tests"]}
    return EnteredMap(tests, kept["seconds"], kept["unsound"])


def keep_map(root: Path, key: str, entered: EnteredMap) -> None:
    """Keep a map for the next run on the same tree."""
    tests = [[*function, names] for function, names in entered.tests.items()]
    kept = {"tests": tests, "seconds": entered.seconds, "unsound": entered.unsound}
    path = map_path(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, json.dumps(kept).encode())
    for old in sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)[:-_KEPT_MAPS]:
        old.unlink(missing_ok=True)

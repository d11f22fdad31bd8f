"""What became of a command that met a fault: the important part, so that it is tested by itself.

Four questions: did it answer as it should, is all there that was there before, is nothing visible
as finished that is not, and does the same command end well once the fault is over?
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pipeline.core import errors
from pipeline.core.errors import PipelineError


class Outcome(StrEnum):
    """The last four are what must not happen."""

    WENT_ON = "went on"  # exit code 0, and the result is right
    REFUSED = "refused"  # an error of its family; the next run ended well
    KILLED = "killed"  # by the fault; the next run ended well
    UNCLEAR = "unclear"  # a traceback, no message, or a code that says nothing
    HUNG = "hung"
    LOST = "lost"  # something that was there is gone or changed, or the next run fails
    WRONG = "wrong"  # success, or something that looks finished, with other bytes than it should

    @property
    def is_good(self) -> bool:
        return self in (Outcome.WENT_ON, Outcome.REFUSED, Outcome.KILLED)


class Half(Exception):
    """Something is visible as finished, and is not."""


class Ended(NamedTuple):
    """How a command ended: by itself, killed by the fault (-9), or not at all in its time."""

    code: int | None
    out: str
    err: str
    was_killed: bool = False


class Verdict(NamedTuple):
    outcome: Outcome
    why: str


# The digest of what the command makes; none where it is not there, `Half` where it is not whole.
Result = Callable[[], str | None]


@dataclass(frozen=True)
class Expected:
    """What is known from the run without a fault."""

    result: str
    before: str | None  # the result that was there already
    kept: Mapping[str, str]  # files that the command leaves as they are, with their digests
    is_done_once: bool = False  # a second run refuses to do it again


def families() -> set[int]:
    """The exit codes that say something; 1 says only that something failed."""
    known = [c for c in vars(errors).values() if isinstance(c, type)]
    return {c.exit_code for c in known if issubclass(c, PipelineError)} - {1}


def listing(folder: Path) -> dict[str, str]:
    """Every file below with the digest of its bytes, links with their targets."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def answer_of(ended: Ended) -> Verdict:
    """The first question, before anybody looks at what was made."""
    if ended.was_killed:
        return Verdict(Outcome.KILLED, "")
    if ended.code is None:
        return Verdict(Outcome.HUNG, "it did not end in its time")
    if "Traceback (most recent call last)" in ended.err:
        return Verdict(Outcome.UNCLEAR, f"a traceback: {ended.err.strip().splitlines()[-1]}")
    if ended.code == 0:
        return Verdict(Outcome.WENT_ON, "")
    lines = re.findall(r'^sm120: (.+)|"message": "(.+?)",?$', ended.err, re.M)
    line = " ".join(lines[-1]).strip() if lines else ""
    if ended.code not in families():
        return Verdict(Outcome.UNCLEAR, f"exit code {ended.code}: {line or ended.err[-200:]}")
    if not line:
        return Verdict(Outcome.UNCLEAR, f"exit code {ended.code} without a line that says why")
    return Verdict(Outcome.REFUSED, f"{ended.code}: {line}")


def judge(
    expected: Expected,
    ended: Ended,
    result: Result,
    here: Path,
    again: Callable[[], Ended],
    spoilt: frozenset[str] = frozenset(),
    heal: Callable[[], object] = lambda: None,
) -> Verdict:
    """All four questions in order; `spoilt` are files that the fault itself changed."""
    first = answer_of(ended)
    if gone := _missing(expected, here, spoilt):
        return Verdict(Outcome.LOST, gone)
    if not spoilt:
        try:
            seen = result()
        except Half as why:
            return Verdict(Outcome.WRONG, f"visible as finished: {why}")
        if seen not in (None, expected.before, expected.result):
            return Verdict(Outcome.WRONG, "the result is another than without the fault")
        if first.outcome is Outcome.WENT_ON and seen != expected.result:
            return Verdict(Outcome.WRONG, "exit code 0, and the result is not there")
        if seen is None and expected.before is not None:
            return Verdict(Outcome.LOST, "the result that was there before is gone")
    elif first.outcome is Outcome.WENT_ON and not _is(result, expected.result):
        return Verdict(Outcome.WRONG, "exit code 0 over damaged bytes, and the result is not right")
    if not first.outcome.is_good:
        return first
    heal()
    second = answer_of(again())
    may_refuse = expected.is_done_once and second.outcome is Outcome.REFUSED
    if second.outcome is not Outcome.WENT_ON and not may_refuse:
        return Verdict(Outcome.LOST, f"the next run: {second.outcome} ({second.why})")
    if gone := _missing(expected, here, spoilt):
        return Verdict(Outcome.LOST, f"after the next run: {gone}")
    try:
        if result() != expected.result:
            return Verdict(Outcome.WRONG, "the next run has another result")
    except Half as why:
        return Verdict(Outcome.WRONG, f"after the next run: {why}")
    return first


def _is(result: Result, wanted: str) -> bool:
    try:
        return result() == wanted
    except Half:
        return False


def _missing(expected: Expected, here: Path, spoilt: frozenset[str]) -> str:
    now = listing(here)
    for name, digest in expected.kept.items():
        if name not in spoilt and now.get(name) != digest:
            return f"{name} is {'changed' if name in now else 'gone'}"
    return ""

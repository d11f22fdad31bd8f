"""Verdicts, and the tree of checks that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from shlex import quote
from typing import Any

from pipeline.core import errors, log


class Verdict(Enum):
    """How far evidence holds, from best to worst."""

    VALID = "valid"
    UNSIGNED = "unsigned"  # and nothing worse: all of it holds but for a signature
    STALE = "stale"
    INCOMPLETE = "incomplete"
    MOVED = "moved"  # a tag, since it was signed
    CHANGED = "changed"  # a number, since it was signed or computed
    BROKEN = "broken"


class Code(Enum):
    """What a check found, for code that decides by it; the message is for people."""

    AHEAD = "dated-in-the-future"
    STRANGER = "unknown-key"
    UNJUDGED_SIGNER = "signer-not-judged"
    NO_EVIDENCE = "no-evidence"
    FACTS_NOT_GIVEN = "host-facts-not-given"
    NO_REQUESTS = "raw-requests-missing"


HOST = "host facts"
# What gives a run the facts of its host.
_MEASURE_AGAIN = (
    "Facts of the host cannot be added to a finished run. `sm120 host facts --json > facts.json`,"
    " `sm120 host attest facts.json`, then measure again with"
    " `sm120 bench … --host-facts facts.json --output FOLDER`."
)
_PUT_BESIDE = (
    "Put the file that `sm120 bench run --host-facts` was given, and its statement, beside the page"
    " or the run, or name their folder with --look-in."
)
# the order of the class, so that there is one place to change it
_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}
_ERRORS: dict[Verdict, type[errors.PipelineError]] = {
    Verdict.STALE: errors.EvidenceStale,
    Verdict.INCOMPLETE: errors.EvidenceIncomplete,
    Verdict.UNSIGNED: errors.EvidenceUnsigned,
    Verdict.MOVED: errors.TagMoved,
    Verdict.CHANGED: errors.NumberChanged,
    Verdict.BROKEN: errors.EvidenceBroken,
}


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of all verdicts; none at all is incomplete, never valid."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.INCOMPLETE)


@dataclass(frozen=True)
class Node:
    """One check, with the checks that it consists of."""

    title: str
    own: Verdict = Verdict.VALID
    message: str = ""
    children: tuple[Node, ...] = ()
    is_folded: bool = False  # children that are valid are not shown one by one
    code: Code | None = None
    subject: str = ""  # what it is about, where code needs it: a kind of statement, a file
    part: str = ""  # of a run, what it judges: `image`, `weights`, `recipe`, `host facts`, …

    @property
    def verdict(self) -> Verdict:
        return worst_verdict([self.own, *(child.verdict for child in self.children)])

    def culprit(self) -> Node:
        """The node that decides: the first of those that are as bad as the whole."""
        if self.own is self.verdict:
            return self
        return next(c for c in self.children if c.verdict is self.verdict).culprit()

    def every(self) -> Iterator[Node]:
        """This node and all below it, in the order in which they are shown."""
        yield self
        for child in self.children:
            yield from child.every()

    def as_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"title": self.title, "verdict": self.verdict.value}
        if self.code:
            body["code"] = self.code.value
        if self.message:
            body["message"] = self.message
        if self.children:
            body["children"] = [child.as_json() for child in self.children]
        return body


def broken(title: str, message: str) -> Node:
    """A check that contradicts the evidence."""
    return Node(title, Verdict.BROKEN, message)


def incomplete(title: str, message: str) -> Node:
    """A check that could not be made, or found something missing."""
    return Node(title, Verdict.INCOMPLETE, message)


def stale(title: str, message: str) -> Node:
    """A check whose evidence holds, although something has changed since."""
    return Node(title, Verdict.STALE, message)


def changed_node(title: str, message: str) -> Node:
    """A number, or the file that holds it, that is not what was signed or computed."""
    return Node(title, Verdict.CHANGED, message)


def show(node: Node, *, everything: bool = False) -> str:
    """The tree as text."""

    def lines(node: Node, first: str, margin: str) -> Iterator[str]:
        line = f"{first}{node.title}  {log.coloured(node.verdict.value)}"
        yield f"{line}: {node.message}" if node.message else line
        is_whole = everything or not node.is_folded
        shown = [c for c in node.children if is_whole or c.verdict is not Verdict.VALID]
        for child in shown:
            branch, below = ("└─ ", "   ") if child is shown[-1] else ("├─ ", "│  ")
            yield from lines(child, margin + branch, margin + below)

    return "\n".join(lines(node, "", ""))


def verdict_error(node: Node) -> errors.PipelineError | None:
    """The error that belongs to a verdict; none where all is valid."""
    kind = _ERRORS.get(node.verdict)
    if kind is None:
        return None
    decisive = node.culprit()
    where = decisive.title if decisive is node else f"{node.title}: {decisive.title}"
    # all else was checked, which is worth saying before `unsigned`
    if node.verdict is Verdict.UNSIGNED:
        return kind(f"{node.title}: valid but unsigned ({decisive.title}: {decisive.message})")
    error = kind(f"{where}: {decisive.message or decisive.verdict.value}")
    if node.verdict is Verdict.BROKEN:
        # only here: what cannot even be opened has no tree
        error.hint = "Do not use it before you know why; the tree above shows where."
    return error


def how_to_add_facts(node: Node) -> str:
    """What gives a run the facts of its host, or their statement; empty where none are missing."""
    missing = (n for n in node.every() if n.own is Verdict.INCOMPLETE)
    facts = next((n for n in missing if n.part == HOST), None)
    if facts is None:
        return ""
    if facts.code is Code.NO_EVIDENCE:
        return f"`sm120 host attest {quote(facts.subject)}` states the facts of the host."
    return _MEASURE_AGAIN if facts.code is Code.FACTS_NOT_GIVEN else _PUT_BESIDE

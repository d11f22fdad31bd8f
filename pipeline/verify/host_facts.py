"""Facts of the host behind a run: what is missing of them, and which command adds it."""

from __future__ import annotations

from shlex import quote

from pipeline.verify.verdict import Node, Verdict
from pipeline.verify.walk import NO_EVIDENCE

HOST = "host facts"
NOT_GIVEN = "no facts of the host were given"
_MEASURE_AGAIN = (
    "Facts of the host cannot be added to a finished run. `sm120 host facts --json > facts.json`,"
    " `sm120 host attest facts.json`, then measure again with"
    " `sm120 bench … --host-facts facts.json --out FOLDER`."
)
_PUT_BESIDE = (
    "Put the file that `sm120 bench run --host-facts` was given, and its statement, beside the page"
    " or the run, or name their folder with --look-in."
)


def how_to_add_facts(node: Node) -> str:
    """What gives a run the facts of its host, or their statement; empty where none are missing."""
    facts = _missing(node)
    if facts is None:
        return ""
    if facts.message == NO_EVIDENCE:
        # behind the path stands the digest
        path = facts.title.removeprefix(f"{HOST} ").rpartition(" ")[0]
        return f"`sm120 host attest {quote(path)}` states the facts of the host."
    return _MEASURE_AGAIN if facts.message == NOT_GIVEN else _PUT_BESIDE


def _missing(node: Node) -> Node | None:
    if node.title.startswith(HOST) and node.own is Verdict.INCOMPLETE:
        return node
    return next((found for child in node.children if (found := _missing(child))), None)

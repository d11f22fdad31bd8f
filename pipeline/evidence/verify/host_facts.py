"""Facts of the host of a run: which are missing, and which command adds them."""

from __future__ import annotations

from shlex import quote

from pipeline.evidence.verify.verdict import Code, Node, Verdict

HOST = "host facts"
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
    missing = (n for n in node.every() if n.own is Verdict.INCOMPLETE)
    facts = next((n for n in missing if n.part == HOST), None)
    if facts is None:
        return ""
    if facts.code is Code.NO_EVIDENCE:
        return f"`sm120 host attest {quote(facts.subject)}` states the facts of the host."
    return _MEASURE_AGAIN if facts.code is Code.FACTS_NOT_GIVEN else _PUT_BESIDE

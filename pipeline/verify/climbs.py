"""The result of a smoke of an address: its statement, and its requests and answers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.evidence.runs import EXCHANGES
from pipeline.verify.artifact import open_file
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.verdict import Node, Verdict
from pipeline.verify.walk import Walk, walk


def judge_climb(path: Path, items: Sequence[EvidenceItem], judge: Judge) -> Walk:
    """A `smoke.json` with its statements, and the file of exchanges that they name."""
    walked = walk(open_file(path), items, judge.trust, judge.checkout, judge.now)
    if not items:
        return walked
    kept = path.with_name(EXCHANGES)
    if not kept.exists():
        exchanges = Node(EXCHANGES, Verdict.INCOMPLETE, "is not beside the result")
    else:
        digest = open_file(kept).digest
        stated = [x.envelope.statement for x, _ in walked.opened if x.is_about_this]
        exchanges = (
            Node(EXCHANGES, message="these bytes")
            if any(statement.is_about(digest) for statement in stated)
            else Node(EXCHANGES, Verdict.BROKEN, f"has {digest}, which was not stated")
        )
    node = replace(walked.node, children=(*walked.node.children, exchanges))
    return replace(walked, node=node)

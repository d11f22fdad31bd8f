"""One statement beside a file: who signed it, and the file against what it says."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.attest.names import kind_of
from pipeline.attest.predicates import check_predicate
from pipeline.attest.statement import Statement
from pipeline.errors import RecordInvalid
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.signature import TrustedStatement, judge_signatures
from pipeline.verify.verdict import Node, Verdict
from pipeline.verify.walk import Walk

# what a statement says against the file; the word is "signed" or "stated"
Compare = Callable[[Statement, str], list[Node]]


def judge_statement(
    item: EvidenceItem, predicate_type: str, about: str, judge: Judge, compare: Compare
) -> Walk:
    """One envelope that must be of this type, `about` being the name of what such state."""
    if item.envelope is None:
        return Walk(Node(item.name, Verdict.BROKEN, item.error), ())
    statement = item.envelope.statement
    kind = kind_of(statement.predicate_type)
    title = f"{kind} ({item.name})"
    signature, keys = judge_signatures(item.envelope, judge.trust, judge.now)
    try:
        if statement.predicate_type != predicate_type:
            raise RecordInvalid(f"is no statement about a {about}")
        check_predicate(predicate_type, statement.predicate)
    except RecordInvalid as error:
        broken = Node("predicate", Verdict.BROKEN, str(error))
        return Walk(Node(title, children=(signature, broken)), ())
    nodes = [signature]
    # what an unbelieved statement says was changed may be its own lie: then it counts for nothing
    if signature.verdict is not Verdict.BROKEN:
        nodes += compare(statement, "signed" if item.envelope.signatures else "stated")
    believed = (TrustedStatement(item.name, statement, tuple(keys)),) if keys else ()
    return Walk(Node(title, children=tuple(nodes), subject=kind), believed)

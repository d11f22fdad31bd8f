"""A statement by itself: who signed it and whether it is well formed, but not what it is about."""

from __future__ import annotations

from pipeline.attest.names import CYCLONEDX, PROVENANCE, SPDX, TEST_RESULT, kind_of
from pipeline.attest.predicates import check_predicate
from pipeline.attest.statement import Statement
from pipeline.errors import RecordInvalid
from pipeline.evidence.gate_result import read_test_result
from pipeline.evidence.provenance import read_provenance
from pipeline.verify.bills import judge_bill
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.opened import Believed
from pipeline.verify.results import judge_tests
from pipeline.verify.signature import judge_signatures
from pipeline.verify.verdict import Node, Verdict
from pipeline.verify.walk import Walk


def judge_statement(item: EvidenceItem, judge: Judge) -> Walk:
    """Never valid: what a statement is about must be at hand for that."""
    if item.envelope is None:
        return Walk(Node(item.name, Verdict.BROKEN, item.error), ())
    statement = item.envelope.statement
    signature, keys = judge_signatures(item.envelope, judge.trust, judge.now)
    about = statement.subject[0]
    words = f"{about.name} sha256:{about.digest.sha256} is not at hand; verify that, with this"
    nodes = (signature, _said(statement), Node("subject", Verdict.INCOMPLETE, words))
    node = Node(f"{kind_of(statement.predicate_type)} ({item.name})", children=nodes)
    believed = (Believed(item.name, statement, tuple(keys)),) if keys else ()
    return Walk(node, believed)


def _said(statement: Statement) -> Node:
    kind, predicate = statement.predicate_type, statement.predicate
    try:
        if kind == PROVENANCE:
            read_provenance(predicate)
        elif kind == TEST_RESULT:
            return judge_tests(read_test_result(predicate), None, None)
        elif kind in (CYCLONEDX, SPDX):
            return judge_bill(kind, predicate, None)
        check_predicate(kind, predicate)
    except RecordInvalid as error:
        return Node("predicate", Verdict.BROKEN, str(error))
    return Node("predicate", words="well formed")

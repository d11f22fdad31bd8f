"""A statement whose signatures and subject were judged."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.attest.envelope import Envelope
from pipeline.attest.names import TEST_RESULT, kind_of
from pipeline.attest.statement import Statement
from pipeline.attest.trust import Trust, TrustedKey
from pipeline.errors import RecordInvalid
from pipeline.evidence.gate_result import TestResult, read_test_result
from pipeline.model import sha256_of
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.verdict import Node, Verdict, worst


@dataclass(frozen=True)
class Believed:
    """A statement about this artifact that a trusted key made."""

    name: str
    statement: Statement
    keys: tuple[TrustedKey, ...]

    @property
    def kind(self) -> str:
        return kind_of(self.statement.predicate_type)

    @property
    def test(self) -> TestResult | None:
        """What a gate found, where this is a gate's result and can be read."""
        if self.statement.predicate_type != TEST_RESULT:
            return None
        try:
            return read_test_result(self.statement.predicate)
        except RecordInvalid:
            return None


@dataclass(frozen=True)
class Opened:
    """An envelope whose signatures and subject were judged."""

    item: EvidenceItem
    envelope: Envelope
    checks: tuple[Node, ...]
    keys: tuple[TrustedKey, ...]
    trust: Trust | None

    @property
    def is_about_this(self) -> bool:
        return worst(c.verdict for c in self.checks) is not Verdict.BROKEN

    @property
    def is_believed(self) -> bool:
        return bool(self.keys) and self.is_about_this

    @property
    def believed(self) -> Believed:
        return Believed(self.item.name, self.envelope.statement, self.keys)

    @property
    def payload(self) -> str:
        """The digest by which a set names it."""
        return sha256_of(self.envelope.payload)

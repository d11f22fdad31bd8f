"""Who signed an envelope, and whether that key is trusted for this kind of statement and time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pipeline.attest.envelope import Envelope, Signature
from pipeline.attest.keys import is_valid_signature
from pipeline.attest.names import TEST_RESULT, kind_of
from pipeline.attest.statement import Statement
from pipeline.attest.trust import Trust, TrustedKey, judges_strangers
from pipeline.errors import RecordInvalid
from pipeline.evidence.gate_result import TestResult, read_test_result
from pipeline.model import sha256_of
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.verdict import Code, Node, Verdict, worst

SIGNATURE = "signature"


def judge_signatures(
    envelope: Envelope, trust: Trust | None, now: datetime
) -> tuple[Node, list[TrustedKey]]:
    """One trusted signature is enough; one that does not match its own key breaks everything."""
    if not envelope.signatures:
        return Node(SIGNATURE, Verdict.UNSIGNED, "nobody signed it"), []
    if trust is None:
        # not broken: the signature may be good, nobody here can tell
        message = f"{_by(envelope)}, and no key is trusted here"
        return Node(SIGNATURE, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER), []
    believed: list[TrustedKey] = []
    doubts: list[str] = []
    is_known = False
    for signature in envelope.signatures:
        key = _signer(envelope, signature, trust)
        if isinstance(key, str):
            # a wrong signature under a trusted key id is damage or an attack: nothing else counts
            if signature.key_id and trust.find(signature.key_id):
                return Node(SIGNATURE, Verdict.BROKEN, key), []
            doubts.append(key)
            continue
        is_known, statement = True, envelope.statement
        objection = key.objection(statement.predicate_type, statement.recorded, now)
        if objection:
            doubts.append(objection)
        # one key may have signed twice; it counts once
        elif key not in believed:
            believed.append(key)
    if not believed and not is_known and not judges_strangers(trust):
        message = f"{_by(envelope)}, and only your own keys are trusted here"
        return Node(SIGNATURE, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER), []
    if not believed:
        code = None if is_known else Code.STRANGER
        if is_known and not envelope.statement.has_happened(now):
            code = Code.AHEAD
        return Node(SIGNATURE, Verdict.BROKEN, "; ".join(doubts), code=code), []
    message = f"by {', '.join(key.name for key in believed)}"
    stated_at = envelope.statement.recorded
    # of the statement: a signature has no time, and `new-key` also signs what is older than its key
    message += (
        f"; stated {stated_at:%Y-%m-%d %H:%M:%S} UTC by its own clock"
        if stated_at
        else "; stated without a time"
    )
    message += f" (not counted: {'; '.join(doubts)})" if doubts else ""
    return Node(SIGNATURE, message=message), believed


def _by(envelope: Envelope) -> str:
    """The keys that a signature claims; cosign's claim none."""
    claimed = [signature.key_id for signature in envelope.signatures if signature.key_id]
    return f"signed by {', '.join(claimed) or 'a key without a name'}"


def _signer(envelope: Envelope, signature: Signature, trust: Trust) -> TrustedKey | str:
    """The trusted key that made a signature, or why there is none."""
    known = trust.find(signature.key_id)
    if not known:
        return f"signed by {signature.key_id}, a key that the trust file does not know"
    # cosign leaves the key id out: then every trusted key is tried
    for key in known:
        if is_valid_signature(key.key, signature.sig, envelope.signed_bytes):
            return key
    if signature.key_id:
        return f"the signature of {known[0].name} is not over these bytes"
    return "no key of the trust file made its signature"


@dataclass(frozen=True)
class TrustedStatement:
    """A statement about this artifact that a trusted key made."""

    name: str
    statement: Statement
    keys: tuple[TrustedKey, ...]

    @property
    def kind(self) -> str:
        return kind_of(self.statement.predicate_type)

    @property
    def test(self) -> TestResult | None:
        """The gate's result, where this is one and can be read."""
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
    def is_ahead(self) -> bool:
        """Whether a trusted key signed it, and it is dated in the future."""
        return any(check.code is Code.AHEAD for check in self.checks)

    @property
    def is_believed(self) -> bool:
        return bool(self.keys) and self.is_about_this

    @property
    def believed(self) -> TrustedStatement:
        return TrustedStatement(self.item.name, self.envelope.statement, self.keys)

    @property
    def payload(self) -> str:
        """The digest by which a set names it."""
        return sha256_of(self.envelope.payload)

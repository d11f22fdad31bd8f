"""Who signed an envelope, and whether they are believed in this matter at that time."""

from __future__ import annotations

from datetime import datetime

from pipeline.attest.envelope import Envelope, Signature
from pipeline.attest.keys import is_valid_signature
from pipeline.attest.trust import Trust, TrustedKey
from pipeline.verify.verdict import Node, Verdict

_TITLE = "signature"


def judge_signatures(
    envelope: Envelope, trust: Trust | None, now: datetime
) -> tuple[Node, list[TrustedKey]]:
    """One believed signature is enough; one that does not fit its own key breaks everything."""
    if not envelope.signatures:
        return Node(_TITLE, Verdict.UNSIGNED, "nobody signed it"), []
    if trust is None:
        return Node(_TITLE, Verdict.INCOMPLETE, "there is no trust file to judge it by"), []
    believed: list[TrustedKey] = []
    doubts: list[str] = []
    for signature in envelope.signatures:
        key = _signer(envelope, signature, trust)
        if isinstance(key, str):
            if signature.key_id and trust.find(signature.key_id):
                return Node(_TITLE, Verdict.BROKEN, key), []
            doubts.append(key)
            continue
        statement = envelope.statement
        objection = key.objection(statement.predicate_type, statement.recorded, now)
        if objection:
            doubts.append(objection)
        elif key not in believed:
            believed.append(key)
    if not believed:
        return Node(_TITLE, Verdict.BROKEN, "; ".join(doubts)), []
    words = f"by {', '.join(key.name for key in believed)}"
    said = envelope.statement.recorded
    words += f", {said:%Y-%m-%d %H:%M:%S} UTC by its own word" if said else ", without a time"
    words += f" (not counted: {'; '.join(doubts)})" if doubts else ""
    return Node(_TITLE, words=words), believed


def _signer(envelope: Envelope, signature: Signature, trust: Trust) -> TrustedKey | str:
    """The trusted key that made a signature, or why there is none."""
    known = trust.find(signature.key_id)
    if not known:
        return f"signed by {signature.key_id}, a key that the trust file does not know"
    for key in known:
        if is_valid_signature(key.key, signature.sig, envelope.signed_bytes):
            return key
    if signature.key_id:
        return f"the signature of {known[0].name} is not over these bytes"
    return "no key of the trust file made its signature"

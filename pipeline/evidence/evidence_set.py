"""The set of all statements about an image, stated itself: nothing can be taken away unnoticed.

Each statement is signed by itself, so whoever may delete files could delete one that says `failed`.
The set names every statement by the digest of its signed bytes, with its verdict, and says whether
the image was published past its gates. It is signed like the others, and so is its digest together
with the name that an image gets in a registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from pipeline.attest.envelope import Envelope
from pipeline.attest.keys import Signer
from pipeline.attest.names import EVIDENCE_SET, REBUILD, TEST_RESULT
from pipeline.attest.predicates import (
    MOST_STATEMENTS,
    Committed,
    EvidenceSet,
    check_predicate,
)
from pipeline.attest.statement import RECORDED, Moment, Statement, read_stamp, stamp, state
from pipeline.errors import RecordInvalid
from pipeline.evidence.folder import ENDING, keep, read_kept
from pipeline.model import sha256_of
from pipeline.store.store import Store

NAME = "evidence-set"


def is_set(envelope: Envelope) -> bool:
    """Whether an envelope holds a set, not a statement of one."""
    return envelope.statement.predicate_type == EVIDENCE_SET


def committed(envelope: Envelope) -> Committed:
    """A statement as a set names it."""
    statement = envelope.statement
    about, verdict = verdict_of(statement)
    return Committed(
        predicate_type=statement.predicate_type,
        payload=sha256_of(envelope.payload),
        about=about,
        verdict=verdict,
    )


def verdict_of(statement: Statement) -> tuple[str | None, str | None]:
    """What a statement judged and how; neither where it is no judgement."""
    said = statement.predicate
    if statement.predicate_type == TEST_RESULT and "sm120_verdict" in said:
        about = f"{said.get('sm120_gate')} on {said.get('sm120_card')}"
        return about, str(said["sm120_verdict"])
    if statement.predicate_type == REBUILD:
        by = str(said.get("rebuilt_by"))[:19]
        return f"by {by}", "identical" if said.get("identical") is True else "different"
    return None, None


def set_statement(
    image: str,
    platform: str,
    digest: str,
    envelopes: Iterable[Envelope],
    ungated: str | None = None,
    when: Moment | None = None,
) -> Statement:
    """The statement about all the others; a set in it is left out."""
    each_once = {e.payload: committed(e) for e in envelopes if not is_set(e)}.values()
    named = sorted(each_once, key=lambda c: (c.predicate_type, c.about or "", c.payload))
    if len(named) > MOST_STATEMENTS:
        raise RecordInvalid(f"{image}: has {len(named)} statements, more than {MOST_STATEMENTS}")
    said = EvidenceSet(image=image, platform=platform, statements=named, ungated=ungated)
    return state(image, digest, EVIDENCE_SET, said.model_dump(mode="json"), when)


def read_set(statement: Statement) -> EvidenceSet:
    """A set of unknown origin as a value."""
    check_predicate(EVIDENCE_SET, statement.predicate)
    body = {k: v for k, v in statement.predicate.items() if k != RECORDED}
    return EvidenceSet.model_validate(body)


def keep_set(
    store: Store, folder: Path, statement: Statement, signers: Sequence[Signer]
) -> Envelope:
    """Keep a set in the place of the one before, and as later than it: the latest one counts."""
    before, now = read_kept(folder / f"{NAME}{ENDING}"), statement.recorded
    if before and now and before.statement.has_happened(now) and before.statement.recorded:
        at = max(now, before.statement.recorded + timedelta(seconds=1))
        recorded = {**statement.predicate[RECORDED], "at": stamp(at)}
        predicate = {**statement.predicate, RECORDED: recorded}
        statement = statement.model_copy(update={"predicate": predicate})
    return keep(store, folder, NAME, statement, signers)


def latest(sets: Sequence[Envelope]) -> list[Envelope]:
    """The set that was made last; several where their times do not tell."""
    times = [e.statement.recorded for e in sets]
    if any(t is None for t in times):
        return list(sets)
    newest = max((t for t in times if t), default=read_stamp("1970-01-01T00:00:00Z"))
    return [e for e, t in zip(sets, times, strict=True) if t == newest]

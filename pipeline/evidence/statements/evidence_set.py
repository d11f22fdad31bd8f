"""An image's evidence in the store, and the set that lists all of it so that none goes missing.

The evidence lies in `images/<name>/<platform>/records/<digest>/`. Each statement is signed by
itself, so whoever can delete files could delete one with the verdict `failed`. The set is one more
statement: it lists every other by the digest of its signed bytes, with its verdict, and records
whether the image was published although its gates had not passed. The signature under an image's
name in a registry covers the set's digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifacts.attest.envelope import (
    SUFFIX,
    Envelope,
    read_kept_envelope,
    sign_or_countersign,
)
from pipeline.artifacts.attest.names import EVIDENCE_SET, REBUILD, TEST_RESULT
from pipeline.artifacts.attest.predicates import (
    MOST_STATEMENTS,
    Committed,
    EvidenceSet,
    check_predicate,
)
from pipeline.artifacts.attest.statement import (
    RECORDED,
    Moment,
    Statement,
    make_statement,
    read_stamp,
    stamp,
)
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import sha256_of
from pipeline.images.gate.runs import MARK, about_run

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer
    from pipeline.images.assemble.image import Built

NAME = "evidence-set"


def evidence_folder(store: Store, image: str, platform: str, digest: str) -> Path:
    """The folder of one image's evidence."""
    return store.image_folder(image, platform) / "records" / digest.removeprefix("sha256:")


def statements_folder(store: Store, built: Built) -> Path:
    """The folder of a built image's evidence."""
    return evidence_folder(store, built.name, built.platform, built.digest)


def kept_envelopes(store: Store, image: str, platform: str, digest: str) -> list[Path]:
    """All envelopes of an image, sorted by name."""
    return sorted(evidence_folder(store, image, platform, digest).glob(f"*{SUFFIX}"))


def readable(folder: Path) -> dict[str, Envelope]:
    """The envelopes of a folder by name; a damaged one is left out."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    # a damaged one is made again by the next build
    read = {path.name.removesuffix(SUFFIX): read_kept_envelope(path) for path in paths}
    return {name: envelope for name, envelope in read.items() if envelope}


def sign_and_keep(
    store: Store, folder: Path, name: str, statement: Statement, signers: Sequence[Signer]
) -> Envelope:
    """Sign and keep a statement; add a signature to an equal one that is already kept."""
    path = folder / f"{name}{SUFFIX}"
    # two people who sign at the same time must not lose each other's signature
    with store.locked(f"records-{folder.name}"):
        envelope = sign_or_countersign(path, statement, signers)
        store.write(path, envelope.dump())
    return envelope


def holds_set(envelope: Envelope) -> bool:
    """Whether an envelope holds a set."""
    return envelope.statement.predicate_type == EVIDENCE_SET


def verdict_of(statement: Statement) -> tuple[str | None, str | None]:
    """What a statement judged and its verdict; neither where it judges nothing."""
    predicate = statement.predicate
    if statement.predicate_type == TEST_RESULT and "sm120_verdict" in predicate:
        about = f"{predicate.get('sm120_gate')} on {predicate.get('sm120_card')}"
        if MARK in predicate:
            about = about_run(predicate[MARK], predicate.get("sm120_recipe"))
        return about, str(predicate["sm120_verdict"])
    if statement.predicate_type == REBUILD:
        # as long as `sha256:` and twelve digits, which is how people tell keys apart
        by = str(predicate.get("rebuilt_by"))[:19]
        verdict = "equivalent" if predicate.get("equivalent") else "different"
        return f"by {by}", "identical" if predicate.get("identical") is True else verdict
    return None, None


def set_statement(
    image: str,
    platform: str,
    digest: str,
    envelopes: Iterable[Envelope],
    ungated: str | None = None,
    when: Moment | None = None,
) -> Statement:
    """The statement that lists all others; a set among them is left out."""
    # a statement may be kept twice, before and after a second signature
    each_once = {e.payload: e.statement for e in envelopes if not holds_set(e)}
    listed = []
    for payload, statement in each_once.items():
        about, verdict = verdict_of(statement)
        named = {"predicate_type": statement.predicate_type, "payload": sha256_of(payload)}
        listed.append(Committed(**named, about=about, verdict=verdict))
    listed.sort(key=lambda c: (c.predicate_type, c.about or "", c.payload))
    if len(listed) > MOST_STATEMENTS:
        raise RecordInvalid(f"{image}: has {len(listed)} statements, more than {MOST_STATEMENTS}")
    predicate = EvidenceSet(image=image, platform=platform, statements=listed, ungated=ungated)
    return make_statement(image, digest, EVIDENCE_SET, predicate.model_dump(mode="json"), when)


def read_set(statement: Statement) -> EvidenceSet:
    """Checks a set of unknown origin and returns it as a closed value."""
    claims = check_predicate(EVIDENCE_SET, statement.predicate)
    assert isinstance(claims, EvidenceSet)
    return claims


def keep_set(
    store: Store, folder: Path, statement: Statement, signers: Sequence[Signer]
) -> Envelope:
    """Replace the earlier set by one that is dated later: the latest one counts."""
    before, now = read_kept_envelope(folder / f"{NAME}{SUFFIX}"), statement.recorded
    # clocks with whole seconds give two sets of one build the same time
    if before and now and before.statement.has_happened(now) and before.statement.recorded:
        # a clock that went back must not make the older set the latest
        at = max(now, before.statement.recorded + timedelta(seconds=1))
        recorded = {**statement.predicate[RECORDED], "at": stamp(at)}
        predicate = {**statement.predicate, RECORDED: recorded}
        statement = statement.model_copy(update={"predicate": predicate})
    return sign_and_keep(store, folder, NAME, statement, signers)


def latest(sets: Sequence[Envelope]) -> list[Envelope]:
    """The newest set; several where their times do not decide."""
    times = [e.statement.recorded for e in sets]
    # a set without a time could be the newest: all of them must hold
    if any(t is None for t in times):
        return list(sets)
    newest = max((t for t in times if t), default=read_stamp("1970-01-01T00:00:00Z"))
    return [e for e, t in zip(sets, times, strict=True) if t == newest]

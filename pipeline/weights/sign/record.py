"""The statement about a set for the chain of evidence: in-toto, ready to be signed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pipeline import __version__
from pipeline.artifacts.attest.names import WEIGHTS
from pipeline.artifacts.attest.predicates import Tool, Weights, WeightsLockName, WeightsVerification
from pipeline.artifacts.attest.statement import Statement, stamp, state_about, subject
from pipeline.core.model import canonical_json, sha256_of
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk.receipt import check_by_receipt
from pipeline.weights.disk.survey import FileFinding
from pipeline.weights.model import WeightsLock, dump_weights_lock
from pipeline.weights.place import LockedFolder


def weights_record_path(place: LockedFolder) -> Path:
    """Where a set's statement lies."""
    return place.state / "record.dsse.json"


def set_digest(lock: WeightsLock) -> str:
    """The set as one number: SHA-256 of the canonical JSON list of path, size and hash."""
    # files only: a lock of another name or spec, for the same bytes, gives the same number
    rows = [[pin.path, pin.size_bytes, pin.want] for pin in lock.files]
    return sha256_of(canonical_json(rows))


def verification(
    place: LockedFolder, neighbours: Collection[LockedFolder] = (), *, full: bool = False
) -> WeightsVerification:
    """Check a set. Unless `full`, read nothing: a file without a receipt is unknown."""
    if full:
        report = verify_files(place, WeightsVerifyOptions(full=True), neighbours).report
        read, why = report.files_read, reasons(report.damage)
        return verification_from(files_read=read, files_by_receipt=0, why=why)
    # evidence of a run needs an answer in seconds, not after hours of reading
    checked = check_by_receipt(place, neighbours)
    why = reasons(finding for finding in checked.findings if finding.damage)
    result: Literal["verified", "damaged", "unknown"] = "damaged" if why else "verified"
    if checked.unknown:
        result = "damaged" if why else "unknown"
        count, first = len(checked.unknown), checked.unknown[0].path
        why.append(f"no receipt vouches for {count} files, such as {first}")
    proved = len(checked.proved)
    stated = verification_from(files_read=0, files_by_receipt=proved, why=why)
    return stated.model_copy(update={"result": result, "how": "receipt"})


def verification_from(
    *, files_read: int, files_by_receipt: int, why: Sequence[str] = ()
) -> WeightsVerification:
    """Make the result of a fetch or verify that has just ended: all as locked, or why not."""
    return WeightsVerification(
        result="damaged" if why else "verified",
        how="receipt" if files_by_receipt else "full",
        at=stamp(),
        files_read=files_read,
        files_by_receipt=files_by_receipt,
        why=list(why),
    )


def weights_statement(place: LockedFolder, result: WeightsVerification) -> Statement:
    """The statement about a set: its subjects are the lock file and the set of files."""
    lock = place.lock
    predicate = Weights(
        lock=WeightsLockName(name=lock.name, seal=lock.seal, spec=lock.spec),
        repository=lock.repository,
        commit=lock.commit,
        files=len(lock.files),
        size_bytes=lock.size_bytes,
        layout="hub-cache" if place.hub_cache else "plain",
        verification=result,
        tool=Tool(name="sm120-pipeline", version=__version__),
    )
    subjects = [
        # the file's own digest, so that `sha256sum` finds the lock that is meant
        subject(f"{lock.name}.lock.yaml", sha256_of(dump_weights_lock(lock).encode())),
        subject(f"{lock.repository}@{lock.commit}", set_digest(lock)),
    ]
    return state_about(subjects, WEIGHTS, predicate.model_dump(mode="json"))


def reasons(findings: Iterable[FileFinding]) -> list[str]:
    """Findings as a statement lists them."""
    return [f"{finding.kind}: {finding.path} {finding.detail}".rstrip() for finding in findings]

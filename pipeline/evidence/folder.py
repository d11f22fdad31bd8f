"""Where an image's evidence lies: `images/<name>/<platform>/records/<digest>/` in the store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.attest.envelope import Envelope, countersigned, enclose, read_envelope
from pipeline.attest.statement import Statement
from pipeline.attest.strict import MAX_BYTES
from pipeline.errors import RecordInvalid
from pipeline.files import read_plain
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer

ENDING = ".dsse.json"


def evidence_folder(store: Store, image: str, platform: str, digest: str) -> Path:
    """The folder of one image's evidence."""
    return store.image_folder(image, platform) / "records" / digest.removeprefix("sha256:")


def kept(store: Store, image: str, platform: str, digest: str) -> list[Path]:
    """All envelopes of an image, sorted by name."""
    return sorted(evidence_folder(store, image, platform, digest).glob(f"*{ENDING}"))


def readable(folder: Path) -> dict[str, Envelope]:
    """The envelopes of a folder by their names; a damaged one is passed over."""
    paths = sorted(folder.glob(f"*{ENDING}"))
    read = {path.name.removesuffix(ENDING): read_kept(path) for path in paths}
    return {name: envelope for name, envelope in read.items() if envelope}


def read_kept(path: Path) -> Envelope | None:
    """A kept envelope; none where there is none that can be read, also one of any size."""
    try:
        data = read_plain(path, MAX_BYTES)
        return read_envelope(data, path.name) if data is not None else None
    except (OSError, RecordInvalid):
        return None


def keep(
    store: Store, folder: Path, name: str, statement: Statement, signers: Sequence[Signer]
) -> Envelope:
    """Sign and keep a statement. One that says the same already is signed as it is.

    But not one whose time is still to come: nobody would believe it, and signed by us it stayed so.
    """
    path = folder / f"{name}{ENDING}"
    # two people who sign at once must not lose one another's signature
    with store.locked(f"records-{folder.name}"):
        envelope = _same(path, statement)
        if envelope is None:
            envelope = enclose(statement, signers)
        else:
            for signer in signers:
                if not _is_signed(envelope, signer):
                    envelope = countersigned(envelope, signer)
        store.write(path, envelope.dump())
    return envelope


def _same(path: Path, statement: Statement) -> Envelope | None:
    found, now = read_kept(path), statement.recorded or datetime.now(UTC)
    if found is None or not found.statement.has_happened(now):
        return None
    return found if found.statement.core() == statement.core() else None


def _is_signed(envelope: Envelope, signer: Signer) -> bool:
    """Whether a signature under the signer's name is really theirs."""
    from pipeline.attest.keys import holds

    mine = (s.sig for s in envelope.signatures if s.key_id == signer.key_id)
    return any(holds(signer.public, sig, envelope.signed_bytes) for sig in mine)

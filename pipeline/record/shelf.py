"""Where an image's evidence lies: `images/<name>/<platform>/records/<digest>/` in the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import RecordInvalid
from pipeline.keys import Signer
from pipeline.record.envelope import Envelope, countersigned, enclose, read_envelope
from pipeline.record.statement import Statement
from pipeline.store.store import Store

ENDING = ".dsse.json"


def shelf(store: Store, image: str, platform: str, digest: str) -> Path:
    """The folder of one image's evidence."""
    return store.image_folder(image, platform) / "records" / digest.removeprefix("sha256:")


def kept(store: Store, image: str, platform: str, digest: str) -> list[Path]:
    """All envelopes of an image, sorted by name."""
    return sorted(shelf(store, image, platform, digest).glob(f"*{ENDING}"))


def readable(folder: Path) -> dict[str, Envelope]:
    """The envelopes of a folder by their names; a damaged one is passed over."""
    found = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        try:
            found[path.name.removesuffix(ENDING)] = read_envelope(path.read_bytes(), path.name)
        except (OSError, RecordInvalid):
            continue
    return found


def keep(
    store: Store, folder: Path, name: str, statement: Statement, signers: Sequence[Signer]
) -> Envelope:
    """Sign and keep a statement. One that says the same already is signed as it is."""
    path = folder / f"{name}{ENDING}"
    # two people who sign at once must not lose one another's signature
    with store.locked(f"records-{folder.name}"):
        envelope = _same(path, statement)
        if envelope is None:
            envelope = enclose(statement, signers)
        else:
            known = {s.key_id for s in envelope.signatures}
            for signer in signers:
                if signer.key_id not in known:
                    envelope = countersigned(envelope, signer)
        store.write(path, envelope.dump())
    return envelope


def _same(path: Path, statement: Statement) -> Envelope | None:
    try:
        found = read_envelope(path.read_bytes(), path.name)
    except (OSError, RecordInvalid):
        return None
    return found if found.statement.core() == statement.core() else None

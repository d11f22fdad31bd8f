"""What a receipt of `verify` vouches for, as identities to hold open files against."""

from __future__ import annotations

from pipeline.weights.place import Place
from pipeline.weights.proof import Identity
from pipeline.weights.receipt import read_receipt


def vouched(place: Place) -> dict[str, Identity]:
    """The identity of each file as it was proved; none where there is no good receipt."""
    known, wanted = read_receipt(place), {pin.path: pin.want for pin in place.lock.files}
    return {
        path: Identity(*entry.identity)
        for path, entry in known.items()
        if entry.identity is not None and entry.want == wanted.get(path)
    }

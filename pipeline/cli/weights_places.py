"""Which locked sets the folders of a command hold, and whose word their locks are."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import checkout_of
from pipeline.errors import UnknownImage

if TYPE_CHECKING:
    from pipeline.spec.checkout import Checkout
    from pipeline.weights.check.backing import Backing
    from pipeline.weights.place import Place


def places_in(context: click.Context, folder: Path) -> list[Place]:
    """The sets of a folder, by the locks beside the files or, where none is, the checkout's."""
    from pipeline.weights.model import kept_locks
    from pipeline.weights.place import find_places

    checkout = checkout_or_none(context)
    return find_places(folder, kept_locks(checkout) if checkout else ())


def checkout_or_none(context: click.Context) -> Checkout | None:
    """The checkout, if the command was started in one or was told of one."""
    try:
        return checkout_of(context)
    except UnknownImage:
        return None


def backing_of(context: click.Context, place: Place, *, strict: bool = True) -> Backing:
    """Whose word a set's lock is, by the checkout; raises where the checkout says otherwise.

    Unless `strict`, a checkout that has moved on to another revision is only named.
    """
    from pipeline.errors import LockStale
    from pipeline.weights.check.backing import Backing, checkout_backing

    try:
        return checkout_backing(place, checkout_or_none(context))
    except LockStale as error:
        if strict:
            raise
        log.say(f"{error}")
        return Backing()


def signed_backing_of(context: click.Context, place: Place, trust_path: Path | None) -> Backing:
    """The same, where signatures beside the set are asked, too."""
    backing = backing_of(context, place)
    kept = (place.state / name for name in ("model.sig", "record.dsse.json"))
    if backing.lock_from == "checkout" or not any(path.exists() for path in kept):
        return backing
    from pipeline.cli.keys import trust_of  # slow to load
    from pipeline.verify.weights import signed_backing

    trust = trust_of(context, trust_path)
    return signed_backing(place, backing, trust, datetime.now(UTC)) if trust else backing

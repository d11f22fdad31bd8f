"""Which locked sets a folder holds, and what vouches for their locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_or_none
from pipeline.cli.signing import trust_of
from pipeline.errors import LockStale, StoreUnwritable
from pipeline.files import ANOTHER_PLACE
from pipeline.weights.check.backing import Backing, checkout_backing
from pipeline.weights.model import kept_locks
from pipeline.weights.place import Place, find_places


def places_in(context: click.Context, folder: Path) -> list[Place]:
    """The sets of a folder, by the locks beside the files or, where none is, the checkout's."""
    checkout = checkout_or_none(context)
    return find_places(folder, kept_locks(checkout) if checkout else ())


@contextmanager
def hints_of_folder(elsewhere: str, mode: str) -> Iterator[None]:
    """The general hints speak of the store, but weights lie where a user named."""
    try:
        yield
    except StoreUnwritable as error:
        is_general = error.hint == StoreUnwritable.hint
        hint = mode if is_general else error.hint.replace(ANOTHER_PLACE, elsewhere)
        raise StoreUnwritable(str(error), hint) from error


def backing_of(context: click.Context, place: Place, *, strict: bool = True) -> Backing:
    """Whether the checkout vouches for the lock of a set; raises where it contradicts the lock.

    Unless `strict`, a checkout that has another revision by now is only mentioned.
    """
    try:
        return checkout_backing(place, checkout_or_none(context))
    except LockStale as error:
        if strict:
            raise
        log.say(f"{error}")
        return Backing()


def signed_backing_of(context: click.Context, place: Place, trust_path: Path | None) -> Backing:
    """The same, where signatures beside the set count, too."""
    backing = backing_of(context, place)
    kept = (place.state / name for name in ("model.sig", "record.dsse.json"))
    # the strongest backing is there already; signatures could only add to it
    if backing.lock_from == "checkout" or not any(path.exists() for path in kept):
        return backing
    # loads what reads signatures, which a set that the checkout backs does not need
    from pipeline.verify.weights_backing import signed_backing

    trust = trust_of(context, trust_path)
    return signed_backing(place, backing, trust, datetime.now(UTC)) if trust else backing

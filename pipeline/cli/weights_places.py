"""Which locked sets the folders of a command hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import checkout_of
from pipeline.errors import UnknownImage

if TYPE_CHECKING:
    from pipeline.weights.place import Place
    from pipeline.wish.load import Checkout


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

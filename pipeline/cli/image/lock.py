"""`sm120 image lock`: from specs to exact versions and hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from pipeline import log
from pipeline.cli.context import checkout_of, platforms_of, say_json, show_moves, store_of
from pipeline.cli.options import (
    base_options,
    json_option,
    lock_check_option,
    locking_dry_run_option,
    platform_option,
)
from pipeline.errors import SpecInvalid
from pipeline.fetch.base import Bases
from pipeline.fetch.base_settings import BaseSettings
from pipeline.fetch.settings import folder_of, named_mirrors
from pipeline.fetch.transport import make_transport
from pipeline.lock import export
from pipeline.lock.export import Move, diff_locks
from pipeline.lock.make import FindBase, Transport, make_lock
from pipeline.lock.model import BasePin, ImageLock, current_lock, read_lock, write_lock
from pipeline.lock.sealed import read_or_none
from pipeline.spec.base import ForeignBase
from pipeline.spec.checkout import Checkout


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@locking_dry_run_option
@lock_check_option
@click.option(
    "--export",
    "export_as",
    type=click.Choice(["pylock", "requirements"]),
    help="Print the locked wheels of one image for other tools.",
)
@base_options
@json_option
@click.pass_context
def lock(
    context: click.Context,
    names: tuple[str, ...],
    platform: str | None,
    dry_run: bool,
    check: bool,
    export_as: str | None,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Look up exact versions and hashes of images, and write their locks; without IMAGE, of all.

    This is the only command that asks what is newest. A lock holds no download address: the index
    comes from the settings of pip and uv, the Debian mirror from apt's, foreign base images from
    --base-registry.
    """
    checkout = checkout_of(context)
    if export_as:
        return _export(checkout, names, platform, export_as)
    if check:
        return _check(checkout, names, platform, as_json)
    moves: list[Move] = []
    transport = replace(make_transport(), find_base=_base_finder(context, bases))
    fresh: dict[str, dict[str, ImageLock]] = {}
    chosen = dict.fromkeys(names or checkout.images())
    # base images before those that stand on them, whose locks name theirs
    for name in sorted(chosen, key=lambda n: (_depth(checkout, n), n)):
        spec = checkout.spec(name)
        for each in platforms_of(spec, platform):
            # with --dry-run the lock of a base is not written, and its image must still see it
            known = fresh.setdefault(each, {})
            with log.step(f"Locking {name} for {each}"):
                known[name], changed = _lock_one(checkout, name, each, transport, known, dry_run)
            moves += changed
    if as_json:
        return say_json([m.model_dump() for m in moves])
    head = ["image", "platform", "kind", "name", "before", "after"]
    concerned = f"; images concerned: {', '.join(sorted({m.image for m in moves}))}"
    show_moves(head, [[getattr(m, name) for name in head] for m in moves], dry_run, concerned)


def _depth(checkout: Checkout, name: str) -> int:
    """How many images it stands on, the same on every platform."""
    return len(checkout.chain(name, checkout.spec(name).platforms[0]))


def _lock_one(
    checkout: Checkout,
    name: str,
    platform: str,
    transport: Transport,
    fresh: Mapping[str, ImageLock],
    dry_run: bool,
) -> tuple[ImageLock, list[Move]]:
    path = checkout.lock_path(name, platform)
    new = make_lock(checkout, name, platform, transport, fresh)
    old = read_or_none(read_lock, path)
    if not dry_run:
        write_lock(path, new)
    return new, diff_locks(old, new)


def _check(checkout: Checkout, names: tuple[str, ...], platform: str | None, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in names or tuple(checkout.images()):
        spec = checkout.spec(name)
        for each in platforms_of(spec, platform):
            current = current_lock(checkout, spec.on(each), each)
            counts = {"wheels": len(current.wheels), "debs": len(current.debs)}
            rows.append({"image": name, "platform": each, "seal": current.seal, **counts})
    if as_json:
        return say_json(rows)
    for row in rows:
        held = f"{log.count(row['wheels'], 'wheel')}, {log.count(row['debs'], 'deb')}"
        click.echo(f"{row['image']} {row['platform']}: {held}, current")


def _export(checkout: Checkout, names: tuple[str, ...], platform: str | None, form: str) -> None:
    # both formats describe one environment
    if len(names) != 1:
        raise SpecInvalid(
            "--export takes exactly one image", "sm120 image lock IMAGE --export pylock"
        )
    file = checkout.spec(names[0])
    chosen = platforms_of(file, platform)[0]
    spec = file.on(chosen)
    current = current_lock(checkout, spec, chosen)
    if spec.python is None:
        raise SpecInvalid(
            f"{spec.name}: has no wheels to export",
            "Name an image with `python:` in its spec, such as its base.",
        )
    if form == "requirements":
        click.echo(export.requirements(current), nl=False)
    else:
        click.echo(export.pylock(current, spec.python), nl=False)


def _base_finder(context: click.Context, bases: BaseSettings) -> FindBase:
    """Looks foreign bases up, first in the store and in folders that SM120_MIRRORS names."""

    def find(base: ForeignBase, platform: str) -> BasePin:
        folders = tuple(f for m in named_mirrors() if (f := folder_of(m)))
        # opened here: most images have no foreign base, and then no store is needed
        return Bases(store_of(context), replace(bases, folders=folders)).resolve(base, platform)

    return find

"""Commands about locks and where bytes come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import (
    checkout_of,
    json_option,
    mirror_option,
    platform_option,
    platforms_of,
    say_json,
    store_of,
)
from pipeline.cli.images import make_fetcher
from pipeline.errors import LockMissing, WishInvalid

if TYPE_CHECKING:
    from pipeline.fetch.http import Client
    from pipeline.lock.diff import Move
    from pipeline.lock.make import Transport
    from pipeline.lock.model import ImageLock
    from pipeline.lock.wheels import SizeFinder
    from pipeline.wish.load import Checkout


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@click.option("--diff", "only_diff", is_flag=True, help="Show what would move; write nothing.")
@click.option("--check", is_flag=True, help="Only check that the locks answer the wishes; offline.")
@click.option(
    "--export",
    "export_as",
    type=click.Choice(["pylock", "requirements"]),
    help="Print the wheels of one image's lock for other tools; resolves nothing.",
)
@json_option
@click.pass_context
def lock(
    context: click.Context,
    names: tuple[str, ...],
    platform: str | None,
    only_diff: bool,
    check: bool,
    export_as: str | None,
    as_json: bool,
) -> None:
    """Look up exact versions and hashes for images (all, if none is named) and write their locks.

    The only command that asks what is newest. A lock names no place: the index comes from pip's
    and uv's settings, Debian's mirror from apt's.
    """
    checkout = checkout_of(context)
    if export_as:
        return _export(checkout, names, platform, export_as)
    if check:
        return _check(checkout, names, platform)
    moves: list[Move] = []
    transport = make_transport()
    fresh: dict[tuple[str, str], ImageLock] = {}
    for name in _in_order(checkout, names):
        wish = checkout.wish(name)
        for found in platforms_of(wish, platform):
            base = fresh.get((wish.base or "", found))
            with log.step(f"Locking {name} for {found}"):
                new, changed = _lock_one(checkout, name, found, transport, base, only_diff)
            fresh[name, found] = new
            moves += changed
    if as_json:
        return say_json([m.model_dump() for m in moves])
    _say_moves(moves, only_diff)


def _lock_one(
    checkout: Checkout,
    name: str,
    platform: str,
    transport: Transport,
    base: ImageLock | None,
    only_diff: bool,
) -> tuple[ImageLock, list[Move]]:
    from pipeline.lock.diff import diff_locks
    from pipeline.lock.make import make_lock
    from pipeline.lock.model import read_lock, write_lock

    path = checkout.lock_path(name, platform)
    new = make_lock(checkout, name, platform, transport, base)
    try:
        old = read_lock(path)
    except LockMissing:
        old = None
    if not only_diff:
        write_lock(path, new)
    return new, diff_locks(old, new)


def _in_order(checkout: Checkout, names: tuple[str, ...]) -> list[str]:
    """Bases before what stands on them."""
    chosen = names or tuple(checkout.images())
    return sorted(dict.fromkeys(chosen), key=lambda n: (len(checkout.chain(n)), n))


def _say_moves(moves: list[Move], only_diff: bool) -> None:
    if not moves:
        click.echo("nothing moves" if only_diff else "locked; nothing moved")
        return
    rows = [[m.image, m.platform, m.kind, m.name, m.before or "-", m.after or "-"] for m in moves]
    click.echo(log.table(["image", "platform", "kind", "name", "before", "after"], rows))
    touched = sorted({m.image for m in moves})
    verb = "would move" if only_diff else "moved"
    click.echo(f"\n{len(moves)} {verb}; images touched: {', '.join(touched)}")


def _check(checkout: Checkout, names: tuple[str, ...], platform: str | None) -> None:
    from pipeline.lock.model import current_lock

    for name in names or tuple(checkout.images()):
        wish = checkout.wish(name)
        for found in platforms_of(wish, platform):
            held = current_lock(checkout, wish, found)
            click.echo(f"{name} {found}: {len(held.wheels)} wheels, {len(held.debs)} debs, current")


def _export(checkout: Checkout, names: tuple[str, ...], platform: str | None, form: str) -> None:
    from pipeline.lock import export
    from pipeline.lock.model import current_lock

    if len(names) != 1:
        raise WishInvalid("--export takes exactly one image", "sm120 lock IMAGE --export pylock")
    wish = checkout.wish(names[0])
    held = current_lock(checkout, wish, platforms_of(wish, platform)[0])
    if wish.python is None:
        raise WishInvalid(f"{wish.name}: has no wheels to export")
    if form == "requirements":
        click.echo(export.requirements(held), nl=False)
    else:
        click.echo(export.pylock(held, wish.python), nl=False)


def make_transport() -> Transport:
    """How a lock reaches the configured index and mirror."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    from pipeline.fetch.http import Client
    from pipeline.fetch.settings import read_settings
    from pipeline.fetch.sources import debian_mirror
    from pipeline.lock.make import Transport

    settings = read_settings()
    client = Client(settings)
    args: list[str] = []
    if settings.indexes and settings.indexes[0] != PYPI_SIMPLE_ENDPOINT:
        args = ["--default-index", settings.indexes[0]]
    for extra in settings.indexes[1:]:
        args += ["--index", extra]

    def debian(path: str) -> bytes:
        return client.read(f"{debian_mirror().main[0].rstrip('/')}/{path}")

    def security(path: str) -> bytes:
        return client.read(f"{debian_mirror().security[0].rstrip('/')}/{path}")

    return Transport(debian, security, _size_finder(client), args)


def _size_finder(client: Client) -> SizeFinder:
    """A file's size from the index's own words, else from the file server."""
    from pipeline.errors import SourceUnreachable
    from pipeline.fetch.sources import project_page

    def size_of(project: str, filename: str, sha256: str) -> int:
        for index in client.settings.indexes:
            page = project_page(client, index, project)
            for package in page.packages if page else []:
                if package.filename == filename and package.digests.get("sha256") == sha256:
                    return package.size or client.size_of(package.url)
        raise SourceUnreachable(f"{filename}: resolved, but no index lists it")

    return size_of


@click.command()
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True)
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True)
@platform_option
@mirror_option
@click.pass_context
def fetch(
    context: click.Context,
    names: tuple[str, ...],
    folder: Path,
    platform: str | None,
    mirrors: tuple[str, ...],
) -> None:
    """Collect every locked file of images in a folder, for a machine without network.

    There: sm120 build IMAGE --offline --mirror DIR
    """
    from pipeline.lock.model import read_lock
    from pipeline.ship.collect import collect

    checkout, store = checkout_of(context), store_of(context)
    pins = {}
    for name in names:
        for wish in checkout.chain(name):
            for found in platforms_of(checkout.wish(name), platform):
                held = read_lock(checkout.lock_path(wish.name, found))
                pins.update({p.sha256: p for p in held.pins})
    with store.in_use():
        total = collect(store, make_fetcher(store, mirrors, False), list(pins.values()), folder)
    click.echo(f"{folder}: {len(pins)} files, {log.size(total)}")


@click.command()
@json_option
def sources(as_json: bool) -> None:
    """Show where files would come from on this machine: indexes, folders, mirrors, certificates."""
    from pipeline.errors import MirrorUnknown
    from pipeline.fetch.settings import masked, read_settings
    from pipeline.fetch.sources import debian_mirror

    settings = read_settings()
    try:
        mirror = debian_mirror()
        debian = [*mirror.main, *mirror.security]
    except MirrorUnknown as error:
        debian = [f"unknown: {error}"]
    found = {
        "indexes": [masked(u) for u in settings.indexes],
        "folders": [str(f) for f in settings.folders],
        "mirrors": [masked(m) for m in settings.mirrors],
        "debian": [masked(u) for u in debian],
        "certificates": settings.ca_file or "the client library's own",
        "proxy": masked(settings.proxy) if settings.proxy else "from the environment",
    }
    if as_json:
        return say_json(found)
    for name, value in found.items():
        click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")


@click.command()
@click.argument("what", type=click.Choice(["image", "series"]))
def schema(what: str) -> None:
    """Print the JSON schema of image.yaml or series.yaml, for editors."""
    from pipeline.wish.image import ImageWish, PatchSeries
    from pipeline.wish.load import schema as text

    click.echo(text(ImageWish if what == "image" else PatchSeries), nl=False)

"""Commands about locks and where bytes come from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import (
    base_options,
    checkout_of,
    json_option,
    mirror_option,
    platform_option,
    platforms_of,
    say_json,
    store_of,
)
from pipeline.cli.images import make_fetcher
from pipeline.errors import LockEdited, LockMissing, SpecInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.fetch.base import BaseSettings
    from pipeline.fetch.http import Client
    from pipeline.fetch.settings import Settings
    from pipeline.lock.export import Move
    from pipeline.lock.make import FindBase, Transport
    from pipeline.lock.model import BasePin, ImageLock
    from pipeline.lock.wheels import SizeFinder
    from pipeline.spec.base import ForeignBase
    from pipeline.spec.checkout import Checkout


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@click.option("--diff", "only_diff", is_flag=True, help="Show what would move; write nothing.")
@click.option("--check", is_flag=True, help="Only check that the locks answer the specs; offline.")
@click.option(
    "--export",
    "export_as",
    type=click.Choice(["pylock", "requirements"]),
    help="Print the wheels of one image's lock for other tools; resolves nothing.",
)
@base_options
@json_option
@click.pass_context
def lock(
    context: click.Context,
    names: tuple[str, ...],
    platform: str | None,
    only_diff: bool,
    check: bool,
    export_as: str | None,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Look up exact versions and hashes for images (all, if none is named) and write their locks.

    The only command that asks what is newest. A lock names no place: the index comes from pip's
    and uv's settings, Debian's mirror from apt's, foreign bases from --base-registry.
    """
    checkout = checkout_of(context)
    if export_as:
        return _export(checkout, names, platform, export_as)
    if check:
        return _check(checkout, names, platform, as_json)
    moves: list[Move] = []
    transport = replace(make_transport(), find_base=_base_finder(context, bases))
    fresh: dict[str, dict[str, ImageLock]] = {}
    for name in _in_order(checkout, names):
        spec = checkout.spec(name)
        for found in platforms_of(spec, platform):
            known = fresh.setdefault(found, {})
            with log.step(f"Locking {name} for {found}"):
                known[name], changed = _lock_one(checkout, name, found, transport, known, only_diff)
            moves += changed
    if as_json:
        return say_json([m.model_dump() for m in moves])
    _say_moves(moves, only_diff)


def _lock_one(
    checkout: Checkout,
    name: str,
    platform: str,
    transport: Transport,
    fresh: Mapping[str, ImageLock],
    only_diff: bool,
) -> tuple[ImageLock, list[Move]]:
    from pipeline.lock.export import diff_locks
    from pipeline.lock.make import make_lock
    from pipeline.lock.model import read_lock, write_lock

    path = checkout.lock_path(name, platform)
    new = make_lock(checkout, name, platform, transport, fresh)
    try:
        old = read_lock(path)
    except (LockMissing, LockEdited):
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


def _check(checkout: Checkout, names: tuple[str, ...], platform: str | None, as_json: bool) -> None:
    from pipeline.lock.model import current_lock

    rows = []
    for name in names or tuple(checkout.images()):
        spec = checkout.spec(name)
        for found in platforms_of(spec, platform):
            held = current_lock(checkout, spec, found)
            counts = {"wheels": len(held.wheels), "debs": len(held.debs)}
            rows.append({"image": name, "platform": found, "seal": held.seal, **counts})
    if as_json:
        return say_json(rows)
    for row in rows:
        click.echo("{image} {platform}: {wheels} wheels, {debs} debs, current".format(**row))


def _export(checkout: Checkout, names: tuple[str, ...], platform: str | None, form: str) -> None:
    from pipeline.lock import export
    from pipeline.lock.model import current_lock

    if len(names) != 1:
        raise SpecInvalid("--export takes exactly one image", "sm120 lock IMAGE --export pylock")
    spec = checkout.spec(names[0])
    held = current_lock(checkout, spec, platforms_of(spec, platform)[0])
    if spec.python is None:
        raise SpecInvalid(f"{spec.name}: has no wheels to export")
    if form == "requirements":
        click.echo(export.requirements(held), nl=False)
    else:
        click.echo(export.pylock(held, spec.python), nl=False)


def _base_finder(context: click.Context, bases: BaseSettings) -> FindBase:
    """Looks foreign bases up, first in the store and in folders that SM120_MIRRORS names."""
    from pipeline.fetch.base import Bases
    from pipeline.fetch.settings import folder_of, named_mirrors

    def find(base: ForeignBase, platform: str) -> BasePin:
        folders = tuple(f for m in named_mirrors() if (f := folder_of(m)))
        found = Bases(store_of(context), replace(bases, folders=folders))
        return found.resolve(base, platform)

    return find


def make_transport() -> Transport:
    """How a lock reaches the configured index and mirror."""
    from pipeline.fetch.http import Client
    from pipeline.fetch.settings import read_settings
    from pipeline.fetch.sources import debian_mirror, read_below
    from pipeline.lock.make import Transport

    settings = read_settings()
    client = Client(settings)

    def debian(path: str, most_bytes: int) -> bytes:
        return read_below(client, debian_mirror().main, path, most_bytes)

    def security(path: str, most_bytes: int) -> bytes:
        return read_below(client, debian_mirror().security, path, most_bytes)

    args = [] if settings.indexes else ["--no-index"]
    return Transport(debian, security, _size_finder(client), args, uv_environment(settings))


def uv_environment(settings: Settings) -> dict[str, str]:
    """Our settings in uv's words; not as arguments, where everybody could read a password."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    env = {}
    if settings.indexes and settings.indexes[0] != PYPI_SIMPLE_ENDPOINT:
        env["UV_DEFAULT_INDEX"] = settings.indexes[0]
    if settings.indexes[1:]:
        env["UV_INDEX"] = " ".join(settings.indexes[1:])
    if folders := [str(f) for f in settings.folders if f.is_dir()]:
        env["UV_FIND_LINKS"] = ",".join(folders)
    if settings.ca_file:
        env["SSL_CERT_FILE"] = settings.ca_file
    if settings.proxy:
        env |= {"HTTP_PROXY": settings.proxy, "HTTPS_PROXY": settings.proxy}
    return env


def _size_finder(client: Client) -> SizeFinder:
    """A file's size from the folder it is in, the index's own words, else the file server."""
    from pipeline.errors import SourceUnreachable
    from pipeline.fetch.index import find_file
    from pipeline.fetch.settings import with_login

    def size_of(project: str, filename: str, sha256: str) -> int:
        for folder in client.settings.folders:
            if (folder / filename).is_file():
                return (folder / filename).stat().st_size
        for index in client.settings.indexes:
            for package in find_file(client, index, project, filename):
                if package.digests.get("sha256") == sha256:
                    return package.size or client.size_of(with_login(package.url, index))
        raise SourceUnreachable(f"{filename}: resolved, but no index lists it")

    return size_of


@click.command()
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True)
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True)
@platform_option
@mirror_option
@base_options
@click.pass_context
def fetch(
    context: click.Context,
    names: tuple[str, ...],
    folder: Path,
    platform: str | None,
    mirrors: tuple[str, ...],
    bases: BaseSettings,
) -> None:
    """Collect every locked file of images in a folder, for a machine without network.

    There: sm120 build IMAGE --offline --mirror DIR
    """
    from pipeline.fetch.inputs import collect, collect_base
    from pipeline.lock.model import current_lock

    checkout, store = checkout_of(context), store_of(context)
    pins, foreign = {}, {}
    for name in names:
        for spec in checkout.chain(name):
            for found in platforms_of(checkout.spec(name), platform):
                held = current_lock(checkout, spec, found)
                pins.update({p.sha256: p for p in held.pins})
                if held.base_image:
                    foreign[str(held.base_image)] = held.base_image
    with store.in_use():
        fetcher = make_fetcher(store, mirrors, False, bases)
        total = collect(store, fetcher, list(pins.values()), folder)
        sizes = [n for pin in foreign.values() for n in collect_base(store, fetcher, pin, folder)]
    click.echo(f"{folder}: {len(pins) + len(sizes)} files, {log.size(total + sum(sizes))}")


@click.command()
@json_option
def sources(as_json: bool) -> None:
    """Show where files would come from on this machine: indexes, folders, mirrors, certificates."""
    from pipeline.errors import MirrorUnknown
    from pipeline.fetch.settings import read_settings
    from pipeline.fetch.sources import debian_mirror
    from pipeline.net.address import masked

    settings = read_settings()
    registries = os.environ.get("SM120_BASE_REGISTRIES", "").split()
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
        "base registries": registries,
        "certificates": settings.ca_file or "the client library's own",
        "proxy": masked(settings.proxy) if settings.proxy else "from the environment",
    }
    if as_json:
        return say_json(found)
    for name, value in found.items():
        click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")


_SCHEMAS = ("image", "series", "gate", "numerics", "engine", "arch", "trust", "policy")
_PREDICATES = (
    "rebuild",
    "weights",
    "host-facts",
    "benchmark-run",
    "report",
    "ungated",
    "evidence-set",
)


@click.command()
@click.argument("what", type=click.Choice([*_SCHEMAS, *_PREDICATES]))
def schema(what: str) -> None:
    """Print the JSON schema of a file, for editors, or of a predicate that statements hold."""
    from pydantic import BaseModel

    from pipeline.attest.names import KINDS
    from pipeline.attest.predicates import MODELS
    from pipeline.attest.trust import Trust
    from pipeline.gate.arch.spec import ArchSpec
    from pipeline.gate.files import EngineSetup
    from pipeline.gate.numerics.cases import NumericsFile
    from pipeline.gate.smem.case_spec import GateFile
    from pipeline.spec.image import ImageSpec, PatchSeries
    from pipeline.verify.policy import Policy
    from pipeline.yaml_file import schema as text

    models: dict[str, type[BaseModel]] = {
        "image": ImageSpec,
        "series": PatchSeries,
        "gate": GateFile,
        "numerics": NumericsFile,
        "engine": EngineSetup,
        "arch": ArchSpec,
        "trust": Trust,
        "policy": Policy,
        **{kind: MODELS[KINDS[kind]] for kind in _PREDICATES},
    }
    click.echo(text(models[what]), nl=False)

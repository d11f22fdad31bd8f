"""Proving that an image comes out the same again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.attest.keys import Signer
from pipeline.attest.statement import moment
from pipeline.cli.context import checkout_of, say_json, store_of, store_to_read
from pipeline.cli.image.rebuild_plan import show_rebuild
from pipeline.cli.images import find_image
from pipeline.cli.options import (
    base_options,
    json_option,
    key_option,
    mirror_option,
    offline_option,
    platform_option,
)
from pipeline.cli.signing import signer_of
from pipeline.cli.source.compile import compile_missing
from pipeline.errors import NotReproducible, OfflineMiss
from pipeline.evidence.image import record_rebuild
from pipeline.evidence.rebuilt import Rebuilt
from pipeline.evidence.rebuilt import rebuild as build_again
from pipeline.fetch.base_settings import BaseSettings
from pipeline.fetch.transport import make_fetcher
from pipeline.source.objects import objects_folder
from pipeline.store.store import Store, open_store


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--attest", is_flag=True, help="Sign and keep the result, good or bad.")
@click.option(
    "--keep-objects",
    is_flag=True,
    help="Take compiled objects from the store, and only link again.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be fetched and built again.")
@key_option
@platform_option
@mirror_option
@offline_option
@base_options
@json_option
@click.pass_context
def rebuild(
    context: click.Context,
    name: str,
    attest: bool,
    keep_objects: bool,
    dry_run: bool,
    key_path: Path | None,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Build an image again in an empty store, and compare every byte with the first build.

    One platform is built again: that of --platform, else this machine's where the image has it.
    Prints `identical`, or names the first file and byte that differ. Inputs that the store still
    has are used; everything else is fetched again, and compiled again. Files that a source declares
    under `may_differ` may differ: then it prints `equivalent`, and each of them with the reason.
    With --attest the result is signed: a proof of equal bytes, not of a hosted builder.
    """
    if attest and keep_objects:
        # objects that were compiled before prove nothing about compiling
        raise click.UsageError("--attest needs everything compiled again; leave --keep-objects out")
    checkout = checkout_of(context)
    signer = signer_of(key_path) if attest else None
    if dry_run:
        seen = store_to_read(context)
        first = find_image(checkout, seen, name, platform)
        return show_rebuild(first, seen, keep_objects=keep_objects, as_json=as_json)
    store = store_of(context)
    with store.in_use(), store.scratch() as folder:
        first = find_image(checkout, store, name, platform)
        # nothing that was built before can leak into the second build
        empty = open_store(folder / "store")
        # inputs that the store kept, and the layers of a foreign base, need not travel again
        near = (str(store.root / "inputs"), str(store.root / "oci"))
        fetcher = make_fetcher(empty, (*mirrors, *near), offline, bases)
        if keep_objects:
            objects_folder(store).mkdir(exist_ok=True)
            objects_folder(empty).symlink_to(objects_folder(store))
        with _attested(store, first, signer) as ended, _offline_hint(name):
            compile_missing(checkout, empty, [first.plan], lambda: fetcher)
            ended.append(build_again(checkout, first, store, empty, fetcher))
    (rebuilt,) = ended
    if as_json:
        return say_json(_rebuilt_json(rebuilt))
    click.echo(f"{name} for {first.platform}: {rebuilt.verdict}, {rebuilt.second.digest}")
    for each in rebuilt.declared:
        click.echo(f"  {each.path} differs: {each.reason}")


def _rebuilt_json(rebuilt: Rebuilt) -> dict[str, Any]:
    row = {
        "image": rebuilt.second.name,
        "platform": rebuilt.second.platform,
        "digest": rebuilt.second.digest,
        "identical": not rebuilt.declared,
        "verdict": rebuilt.verdict,
    }
    return {**row, "differences": [each.model_dump() for each in rebuilt.declared]}


@contextmanager
def _offline_hint(name: str) -> Iterator[None]:
    """What a rebuild lacks is not in the store after another run either: it keeps no inputs."""
    try:
        yield
    except OfflineMiss as error:
        fix = f"`sm120 image collect {name} --to DIR` fills a folder for --mirror DIR."
        raise OfflineMiss(str(error), f"Leave --offline out. {fix}") from error


@contextmanager
def _attested(store: Store, first: Built, signer: Signer | None) -> Iterator[list[Rebuilt]]:
    """State how a rebuild ended, where somebody signs; a difference is stated like a success."""
    ended: list[Rebuilt] = []
    try:
        yield ended
    except NotReproducible as error:
        if signer is not None:
            record_rebuild(store, first, signer, str(error), moment())
        which = f"{first.name} for {first.platform}"
        raise NotReproducible(f"{which}: {error}", error.hint) from error
    if signer is not None:
        declared = ended[0].declared
        text = f"{log.count(len(declared), 'file')} with declared differences" if declared else ""
        record_rebuild(store, first, signer, text, moment(), declared)

"""Bringing images elsewhere: into Docker, into a folder, or their inputs to a machine offline."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.bootstrap import FOLDER
from pipeline.cli.context import (
    checkout_of,
    host_platform,
    platforms_of,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.image.run_lines import run_lines
from pipeline.cli.images import find_image
from pipeline.cli.options import ANY_PATH, base_options, json_option, mirror_option, platform_option
from pipeline.cli.recipe.recipes import recipes_of
from pipeline.evidence.evidence_set import kept
from pipeline.fetch.base_settings import BaseSettings
from pipeline.fetch.inputs import collect as collect_files
from pipeline.fetch.inputs import collect_base
from pipeline.fetch.tool import ToolTarget, collect_tool, own_python
from pipeline.fetch.transport import make_fetcher
from pipeline.files import need_space_for_copies
from pipeline.lock.model import current_lock
from pipeline.oci.layout import export_layout, require_new
from pipeline.spec.checkout import Checkout


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--tag", "tags", multiple=True, help="Name of the image in Docker. Repeatable.")
@platform_option
@click.option("--dry-run", is_flag=True, help="Show what would be loaded and load nothing.")
@json_option
@click.pass_context
def load(
    context: click.Context,
    name: str,
    tags: tuple[str, ...],
    platform: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Load a built image into the Docker daemon that DOCKER_HOST names.

    Without --tag it gets two names: sm120/IMAGE:DIGEST, which never moves, with the first twelve
    characters of the digest, and sm120/IMAGE:latest, which moves to whatever was loaded last.
    """
    # loads Docker's library, which the other verbs here do not need
    from pipeline.oci.docker import default_tag, moving_tag
    from pipeline.oci.docker import load as load_image

    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        # by digest first, so that a later image does not take its name away
        names = list(tags) or [default_tag(name, built.digest), moving_tag(name)]
        if dry_run:
            return _say_load(name, built, names, as_json)
        image_id = load_image(store, name, built.digest, names)
        store.note_loaded(names)
    if as_json:
        return say_json({"image": name, "digest": built.digest, "id": image_id, "tags": names})
    others = f", also named {' and '.join(names[1:])}" if names[1:] else ""
    click.echo(f"{names[0]} is in Docker as {image_id}{others}")
    for line in run_lines(recipes_of(context, ()), checkout.spec(name), names[0]):
        click.echo(line)


def _say_load(name: str, built: Built, tags: list[str], as_json: bool) -> None:
    """What a load would do; nothing is sent."""
    if as_json:
        return say_json({"image": name, "digest": built.digest, "tags": tags, "dry_run": True})
    size = f"{log.size(built.size_bytes)}, unpacked {log.size(built.record.unpacked_bytes)}"
    click.echo(f"{' and '.join(tags)} would be {built.digest} in Docker: {size}")


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("folder", metavar="DIR", type=ANY_PATH)
@platform_option
@click.option("--dry-run", is_flag=True, help="Show what would be written and write nothing.")
@click.pass_context
def export(
    context: click.Context, name: str, folder: Path, platform: str | None, dry_run: bool
) -> None:
    """Write a built image and its evidence to a new folder, as an OCI layout.

    Where the disk allows, the files are hard links to those of the store: do not edit them.
    """
    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        evidence = kept(store, name, built.platform, built.digest)
        if dry_run:
            require_new(folder)
            need_space_for_copies(store.root, folder, built.size_bytes)
            size, statements = log.size(built.size_bytes), log.count(len(evidence), "statement")
            return click.echo(f"{folder}: {built.digest}, {size} and {statements} would be written")
        export_layout(store, built.record, folder, evidence)
    click.echo(f"{folder}: {built.digest}")


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@click.option("--to", "folder", type=ANY_PATH, required=True, help="Folder for the files.")
@click.option("--tool", is_flag=True, help="Collect this tool's own wheels, too, into DIR/tool.")
@click.option(
    "--tool-platform",
    type=click.Choice(["linux/amd64", "linux/arm64", "host"]),
    default="host",
    show_default=True,
    help="Platform that the tool will run on.",
)
@click.option(
    "--tool-python",
    type=click.Choice([f"3.{minor}" for minor in range(11, 16)]),
    help="Python that the tool will run with [default: the one that runs this].",
)
@platform_option
@click.option("--dry-run", is_flag=True, help="Show how much would be collected; fetch nothing.")
@mirror_option
@base_options
@json_option
@click.pass_context
def collect(
    context: click.Context,
    names: tuple[str, ...],
    folder: Path,
    tool: bool,
    tool_platform: str,
    tool_python: str | None,
    platform: str | None,
    dry_run: bool,
    mirrors: tuple[str, ...],
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Download every locked file of images into a folder, for a machine without network.

    On that machine: sm120 build IMAGE --offline --mirror DIR

    With --tool also what the command itself is installed from. There, in the checkout:
    python3 noxfile.py -s build-sm120 -- IMAGE --offline --mirror DIR
    """
    if not names and not tool:
        raise click.UsageError("Name an image, or --tool.")
    checkout = checkout_of(context)
    images = wheels = None
    if names:
        images = _collect_images(
            context, checkout, names, folder, platform, dry_run, mirrors, bases
        )
        if not as_json:
            would = " would be collected" if dry_run else ""
            click.echo(f"{folder}: {images}{would}")
    if tool and not dry_run:
        on = host_platform() if tool_platform == "host" else tool_platform
        target = ToolTarget(platform=on, python=tool_python or own_python())
        wheels = Collected(*collect_tool(checkout.root, target, folder / FOLDER))
    if as_json:
        return _say_collected(folder, images, wheels, dry_run)
    if tool:
        what = wheels or "the wheels of this tool would be collected"
        click.echo(f"{folder / FOLDER}: {what}")


class Collected(NamedTuple):
    """Files in a folder, and their bytes."""

    files: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{log.count(self.files, 'file')}, {log.size(self.size_bytes)}"


def _say_collected(
    folder: Path, images: Collected | None, tool: Collected | None, dry_run: bool
) -> None:
    """For programs; of the tool's wheels a dry run knows neither number nor size."""
    parts = {"images": images and images._asdict(), "tool": tool and tool._asdict()}
    say_json({"folder": str(folder), **parts, "dry_run": dry_run})


def _collect_images(
    context: click.Context,
    checkout: Checkout,
    names: tuple[str, ...],
    folder: Path,
    platform: str | None,
    dry_run: bool,
    mirrors: tuple[str, ...],
    bases: BaseSettings,
) -> Collected:
    pins, foreign = {}, {}
    for name in names:
        # platforms of the image, not of its base, which may have more
        for each in platforms_of(checkout.spec(name), platform):
            for spec in checkout.chain(name, each):
                lock = current_lock(checkout, spec, each)
                # by hash: images of one chain share most of their wheels
                pins.update({p.sha256: p for p in lock.pins})
                if lock.base_image:
                    foreign[str(lock.base_image)] = lock.base_image
    if dry_run:
        sizes = [p.size_bytes for p in pins.values()]
        sizes += [b.size_bytes for base in foreign.values() for b in base.blobs]
        return Collected(len(sizes), sum(sizes))
    store = store_of(context)
    with store.in_use():
        fetcher = make_fetcher(store, mirrors, False, bases)
        total = collect_files(store, fetcher, list(pins.values()), folder)
        sizes = [n for pin in foreign.values() for n in collect_base(store, fetcher, pin, folder)]
    return Collected(len(pins) + len(sizes), total + sum(sizes))

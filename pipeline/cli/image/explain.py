"""Where a file in an image and where downloads come from, and what a spec may hold."""

from __future__ import annotations

import os
from dataclasses import asdict

import click
from pydantic import BaseModel

from pipeline import log
from pipeline.assemble.inside import FoundFile, list_inside, read_inside
from pipeline.attest.names import KINDS
from pipeline.attest.predicates import MODELS
from pipeline.attest.trust import Trust
from pipeline.cli.context import checkout_of, say_bytes, say_json, store_to_read
from pipeline.cli.images import find_image
from pipeline.cli.options import json_option, platform_option
from pipeline.errors import MirrorUnknown
from pipeline.evidence.inventory import explain as find_origin
from pipeline.fetch.settings import read_settings
from pipeline.fetch.sources import debian_mirror
from pipeline.gate.arch import ArchSpec
from pipeline.gate.files import EngineSetup
from pipeline.gate.numerics import NumericsFile
from pipeline.gate.smem.cases import GateFile
from pipeline.net.address import masked
from pipeline.oci.record import Kind
from pipeline.recipe.model import RecipeFile
from pipeline.spec.image import ImageFile, PatchSeries
from pipeline.spec.source import SourceSpec
from pipeline.verify.policy import Policy
from pipeline.yaml_file import schema as schema_text


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("path", metavar="FILE")
@platform_option
@json_option
@click.pass_context
def explain(
    context: click.Context, name: str, path: str, platform: str | None, as_json: bool
) -> None:
    """Show where a file of a built image comes from: which wheel, .deb, source or patch.

    FILE is a path in the image, such as /usr/bin/python3, or of an installed Python file.
    `sm120 image files IMAGE` lists them.
    """
    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        origin = find_origin(checkout, store, built, path)
    if as_json:
        return say_json(asdict(origin))
    # how the path was followed, before what it leads to
    for link in origin.links:
        click.echo(link)
    digest = f" sha256:{origin.sha256}" if origin.sha256 else ""
    click.echo(f"{origin.path}: {origin.kind}, {log.size(origin.size_bytes)}{digest}")
    click.echo(f"  from   {origin.origin}")
    if origin.package:
        click.echo(f"         {origin.package} sha256:{origin.package_sha256}")
    for patch in origin.patches:
        click.echo(f"  patch  {patch}")
    for own in origin.own_files:
        click.echo(f"  file   {own}")
    if origin.toolchain:
        click.echo(f"  with   {origin.toolchain}")
    click.echo(f"  layer  {origin.layer} {origin.layer_digest}")


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("path", metavar="[FOLDER|PATTERN]", default="/")
@platform_option
@json_option
@click.pass_context
def files(
    context: click.Context, name: str, path: str, platform: str | None, as_json: bool
) -> None:
    """List the files of a built image: those of a folder, or all that a pattern matches.

    FOLDER is a path in the image, or that of an installed Python package, such as vllm/attention.
    Of a PATTERN such as '*/fused_moe/*.json', each * stands for any part of a path.
    """
    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        found = list_inside(store, find_image(checkout, store, name, platform), path)
    if as_json:
        return say_json([asdict(each) for each in found])
    rows = [
        [None if each.target else log.size(each.size_bytes), _what(each), _shown(each.path)]
        for each in found
    ]
    click.echo(log.table(["size", "kind", "path"], rows))


def _what(found: FoundFile) -> str:
    if found.kind == Kind.DIR:
        return f"folder, {log.count(found.files, 'file')}"
    return f"link to {_shown(found.target)}" if found.target else str(found.kind)


def _shown(path: str) -> str:
    # a name in somebody else's layer may hold what controls a terminal
    return path if path.isprintable() else repr(path)[1:-1]


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("path", metavar="FILE")
@platform_option
@click.pass_context
def cat(context: click.Context, name: str, path: str, platform: str | None) -> None:
    """Print a file of a built image, as a container sees it.

    FILE is a path in the image, or the path of an installed Python file, such as vllm/version.py.
    `sm120 image files IMAGE` lists them.
    """
    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        say_bytes(read_inside(store, find_image(checkout, store, name, platform), path))


@click.command()
@json_option
def sources(as_json: bool) -> None:
    """Show where this machine downloads from: indexes, folders, mirrors, certificates."""
    settings = read_settings()
    registries = os.environ.get("SM120_BASE_REGISTRIES", "").split()
    try:
        mirror = debian_mirror()
        debian = [*mirror.main, *mirror.security]
    # an answer here, not an error: who asks wants to know why there is none
    except MirrorUnknown as error:
        debian = [f"unknown: {error}"]
    places = {
        # addresses may carry credentials, and this output goes into bug reports
        "indexes": [masked(u) for u in settings.indexes],
        "folders": [str(f) for f in settings.folders],
        "mirrors": [masked(m) for m in settings.mirrors],
        "debian": [masked(u) for u in debian],
        "base registries": registries,
        "certificates": settings.ca_file or "the client library's own",
        "proxy": masked(settings.proxy) if settings.proxy else "from the environment",
    }
    if as_json:
        return say_json(places)
    for name, value in places.items():
        click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")


# files that people write, then what our own kinds of statements hold
_SCHEMAS: dict[str, type[BaseModel]] = {
    "image": ImageFile,
    "series": PatchSeries,
    "gate": GateFile,
    "numerics": NumericsFile,
    "engine": EngineSetup,
    "arch": ArchSpec,
    "source": SourceSpec,
    "recipe": RecipeFile,
    "trust": Trust,
    "policy": Policy,
    **{kind: MODELS[uri] for kind, uri in KINDS.items() if uri in MODELS},
}


@click.command()
@click.argument("what", type=click.Choice(list(_SCHEMAS)))
def schema(what: str) -> None:
    """Print the JSON schema of a file that you write, or of a predicate that statements hold.

    Editors use it to complete and check image.yaml and its neighbours.
    """
    click.echo(schema_text(_SCHEMAS[what]), nl=False)

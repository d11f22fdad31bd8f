"""The files of images: specs and locks, what is inside, and bringing images elsewhere."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from pipeline import app
from pipeline.app.run_plan import RunPlan
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.names import KINDS
from pipeline.artifacts.attest.predicates import MODELS
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.oci.record import Kind
from pipeline.bootstrap import FOLDER
from pipeline.cli import options
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    PLATFORM,
    command,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import own_command, say_bytes, say_json, show_moves
from pipeline.core import log
from pipeline.core.errors import MirrorUnknown
from pipeline.core.net.address import masked
from pipeline.core.net.settings import read_settings
from pipeline.core.yaml_file import schema as schema_text
from pipeline.evidence.verify.chain import Policy
from pipeline.images.fetch.sources import debian_mirror
from pipeline.images.gate.arch import ArchSpec
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.numerics import NumericsFile
from pipeline.images.gate.parsers.cases import FormatsFile, ParsersFile, TruthsFile
from pipeline.images.gate.smem.cases import GateFile
from pipeline.images.gate.templates.sources import SourcesFile, TemplatesFile
from pipeline.images.spec.image import ImageFile, PatchSeries
from pipeline.images.spec.source import SourceSpec
from pipeline.serving.recipe.model import RecipeFile


@command
@click.argument("name", metavar="IMAGE")
@click.option("--base", metavar="IMAGE", help="Image that it stands on, as it is.")
@click.option("--like", metavar="IMAGE", help="Image whose whole spec is copied, to be changed.")
@click.option("--summary", help="One sentence about it.")
@many_option(
    "--require",
    "requirements",
    metavar="REQUIREMENT",
    help="Wheel to add, such as torch==2.13.0. Repeatable.",
)
@many_option(
    "--platform",
    "platforms",
    type=PLATFORM,
    help="Platform that it is for [default: those of its base]. Repeatable.",
)
def image_new_command(
    workspace: Workspace, /, name: str, base: str | None, like: str | None, **options: Any
) -> None:
    """Write images/IMAGE/image.yaml for an image of your own.

    With --base it holds all that the base holds, starts as it does, and adds to it: wheels,
    files, patches. With --like it is a copy of the spec, to change versions in.
    """
    if (base is None) == (like is None):
        raise click.UsageError("name one of --base and --like")
    if like and any(options.values()):
        flags = {"requirements": "--require", "platforms": "--platform", "summary": "--summary"}
        option = next(flag for name, flag in flags.items() if options[name])
        raise click.UsageError(f"{option} goes with --base; a copy (--like) is changed in its file")
    path = app.specs.new_spec(workspace, name, base or str(like), copied=bool(like), **options)
    click.echo(f"{path} is written; change in it what you like")
    click.echo(f"Next: {own_command()} image lock {name}")
    click.echo(f"      {own_command()} build {name} --accept")


@command
@click.argument("name", metavar="IMAGE")
@click.argument("file", metavar="FILE", type=EXISTING_FILE)
@click.option("--of", metavar="PATH", help="File of the image that FILE is a copy of.")
@click.option("--why", required=True, help="What breaks without the patch, or what it is for.")
@many_option("--upstream", metavar="URL", help="Issue or pull request. Repeatable.")
@click.option("--no-upstream", metavar="REASON", help="Why it is nothing for upstream.")
@click.option("--gate", metavar="NAME", help="Case file that fails without it, without `.yaml`.")
@click.option("--no-gate", metavar="REASON", help="Why no gate can judge it.")
@options.platform_option
def image_add_patch_command(workspace: Workspace, /, name: str, **options: Any) -> None:
    """Add a patch to an image: FILE is a diff, or an edited copy of the file that --of names.

    Writes the patch, its entry in series.yaml with the hashes before and after, and `patches` in
    image.yaml. A diff may come from upstream's repository: paths are found among the installed
    files, and what no wheel of the image has, such as tests, is left out. `sm120 image cat IMAGE
    PATH` prints the file to start from.
    """
    made, written = app.specs.add_patch(workspace, name, **options)
    for foreign in made.left_out:
        click.echo(f"left out, as no wheel of the image has it: {foreign}")
    for each in made.files:
        click.echo(f"changes {each.path} of {made.applies_to}")
    for path in written:
        click.echo(f"wrote {path}")
    click.echo(f"Next: {own_command()} build {name} --accept")


@query
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@options.platform_option
@options.locking_dry_run_option
@options.lock_check_option
@click.option(
    "--export",
    "export_as",
    type=click.Choice(["pylock", "requirements"]),
    help="Print the locked wheels of one image for other tools.",
)
@options.base_options
def image_lock_command(
    workspace: Workspace,
    /,
    names: tuple[str, ...],
    platform: str | None,
    dry_run: bool,
    check: bool,
    export_as: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Look up exact versions and hashes of images, and write their locks; without IMAGE, of all.

    This is the only command that asks what is newest. A lock holds no download address: the index
    comes from the settings of pip and uv, the Debian mirror from apt's, foreign base images from
    --base-registry.
    """
    if export_as:
        text = app.specs.export_lock(workspace, names, platform, export_as)
        return click.echo(text, nl=False)
    if check:
        rows = app.specs.check_locks(workspace, names, platform)
        if as_json:
            return say_json(rows)
        for row in rows:
            held = f"{log.count(row['wheels'], 'wheel')}, {log.count(row['debs'], 'deb')}"
            click.echo(f"{row['image']} {row['platform']}: {held}, current")
        return None
    moves = app.specs.lock_images(workspace, names, platform, dry_run=dry_run, **options)
    if as_json:
        return say_json([m.model_dump() for m in moves])
    head = ["image", "platform", "kind", "name", "before", "after"]
    concerned = f"; images concerned: {', '.join(sorted({m.image for m in moves}))}"
    show_moves(head, [[getattr(m, name) for name in head] for m in moves], dry_run, concerned)


@query
@click.argument("name", metavar="IMAGE")
@many_option("--tag", "tags", help="Name of the image in Docker. Repeatable.")
@options.platform_option
def load_command(workspace: Workspace, /, name: str, as_json: bool, **options: Any) -> None:
    """Load a built image into the Docker daemon that DOCKER_HOST names.

    Without --tag it gets two names: sm120/IMAGE:DIGEST, which never moves, with the first twelve
    characters of the digest, and sm120/IMAGE:latest, which moves to whatever was loaded last.
    """
    built, tags, image_id = app.deliver.load_image(workspace, name, **options)
    if as_json:
        about = {"image": name, "digest": built.digest, "tags": tags}
        return say_json({**about, "id": image_id})
    others = f", also named {' and '.join(tags[1:])}" if tags[1:] else ""
    click.echo(f"{tags[0]} is in Docker as {image_id}{others}")
    recipes = app.recipes.recipes_of(workspace, ())
    for line in app.recipes.run_lines(recipes, workspace.checkout().spec(name), tags[0]):
        click.echo(line)


@command
@click.argument("name", metavar="IMAGE")
@click.argument("folder", metavar="DIR", type=ANY_PATH)
@options.platform_option
def image_export_command(workspace: Workspace, /, folder: Path, **options: Any) -> None:
    """Write a built image and its evidence to a new folder, as an OCI layout.

    Where the disk allows, the files are hard links to those of the store: do not edit them.
    """
    done = app.deliver.export_image(workspace, folder=folder, **options)
    click.echo(f"{folder}: {done.digest}")


@query
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@path_option("--output", "folder", required=True, help="Folder for the files.")
@flag_option("--tool", help="Collect this tool's own wheels, too, into DIR/tool.")
@click.option(
    "--tool-platform",
    type=click.Choice(["linux/amd64", "linux/arm64", "host"]),
    default="host",
    help="Platform that the tool will run on.",
)
@click.option(
    "--tool-python",
    type=click.Choice([f"3.{minor}" for minor in range(11, 16)]),
    help="Python that the tool will run with [default: the one that runs this].",
)
@options.platform_option
@flag_option("--dry-run", help="Show how much would be collected; fetch nothing.")
@options.mirror_option
@options.base_options
def image_collect_command(
    workspace: Workspace,
    /,
    names: tuple[str, ...],
    folder: Path,
    tool: bool,
    tool_platform: str,
    tool_python: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Download every locked file of images into a folder, for a machine without network.

    On that machine: sm120 build IMAGE --offline --mirror DIR

    With --tool also what the command itself is installed from. There, in the checkout:
    python3 noxfile.py -s build-sm120 -- IMAGE --offline --mirror DIR
    """
    if not names and not tool:
        raise click.UsageError("Name an image, or --tool.")
    images = wheels = None
    if names:
        images = app.deliver.collect_images(workspace, names, folder, dry_run=dry_run, **options)
        if not as_json:
            click.echo(f"{folder}: {images}{' would be collected' if dry_run else ''}")
    if tool and not dry_run:
        wheels = app.deliver.collect_own_tool(workspace, folder, tool_platform, tool_python)
    if as_json:
        # of the tool's wheels a dry run knows neither number nor size
        parts = {"images": images and images._asdict(), "tool": wheels and wheels._asdict()}
        return say_json({"folder": str(folder), **parts, "dry_run": dry_run})
    if tool:
        what = wheels or "the wheels of this tool would be collected"
        click.echo(f"{folder / FOLDER}: {what}")


@query
@click.argument("name", metavar="IMAGE")
@click.argument("path", metavar="FILE")
@options.platform_option
def image_explain_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Show where a file of a built image comes from: which wheel, .deb, source or patch.

    FILE is a path in the image, such as /usr/bin/python3, or of an installed Python file.
    `sm120 image files IMAGE` lists them.
    """
    origin = app.images.explain_file(workspace, **options)
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


@query
@click.argument("name", metavar="IMAGE")
@click.argument("path", metavar="[FOLDER|PATTERN]", default="/")
@options.platform_option
def image_files_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """List the files of a built image: those of a folder, or all that a pattern matches.

    FOLDER is a path in the image, or that of an installed Python package, such as vllm/attention.
    Of a PATTERN such as '*/fused_moe/*.json', each * stands for any part of a path.
    """
    found = app.images.list_image_files(workspace, **options)
    if as_json:
        return say_json([asdict(each) for each in found])
    rows = []
    for each in found:
        what = (
            f"folder, {log.count(each.files, 'file')}" if each.kind == Kind.DIR else str(each.kind)
        )
        what = f"link to {_shown(each.target)}" if each.target else what
        size = None if each.target else log.size(each.size_bytes)
        rows.append([size, what, _shown(each.path)])
    click.echo(log.table(["size", "kind", "path"], rows))


def _shown(path: str) -> str:
    # a name in somebody else's layer may hold what controls a terminal
    return path if path.isprintable() else repr(path)[1:-1]


@command
@click.argument("name", metavar="IMAGE")
@click.argument("path", metavar="FILE")
@options.platform_option
def image_cat_command(workspace: Workspace, /, **options: Any) -> None:
    """Print a file of a built image, as a container sees it.

    FILE is a path in the image, or the path of an installed Python file, such as vllm/version.py.
    `sm120 image files IMAGE` lists them.
    """
    say_bytes(app.images.read_image_file(workspace, **options))


@click.command()
@options.json_option
def image_sources_command(as_json: bool) -> None:
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
    "parsers": ParsersFile,
    "formats": FormatsFile,
    "truths": TruthsFile,
    "templates": TemplatesFile,
    "sources": SourcesFile,
    "engine": EngineSetup,
    "arch": ArchSpec,
    "source": SourceSpec,
    "recipe": RecipeFile,
    "plan": RunPlan,
    "trust": Trust,
    "policy": Policy,
    **{kind: MODELS[uri] for kind, uri in KINDS.items() if uri in MODELS},
}


@click.command()
@click.argument("what", type=click.Choice(list(_SCHEMAS)))
def image_schema_command(what: str) -> None:
    """Print the JSON schema of a file that you write, or of a predicate that statements hold.

    Editors use it to complete and check image.yaml and its neighbours.
    """
    click.echo(schema_text(_SCHEMAS[what]), nl=False)

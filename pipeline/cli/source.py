"""`sm120 source`: lock sources, compile them and publish their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers.backend import KINDS
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.cli import options
from pipeline.cli.options import flag_option, query
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.images.source.compiled import objects_text

_FOLDER = click.Path(path_type=Path, file_okay=False)


@query
def source_list_command(workspace: Workspace, as_json: bool) -> None:
    """List the sources that can be compiled here, with their builds and times."""
    rows = app.sources.list_sources(workspace)
    if as_json:
        return say_json(rows)
    columns = ["source", "build", "toolchain", "for", "locked", "time"]
    click.echo(log.table(columns, [[str(row[c]) for c in columns] for row in rows]))


@query
@click.argument("names", metavar="[SOURCE]...", nargs=-1)
@click.option(
    "--from",
    "archive",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Lock this archive instead of the one that the spec names a place of.",
)
@options.locking_dry_run_option
def source_lock_command(
    workspace: Workspace, /, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Look up archives of sources and the digest of their files, and write their locks.

    Without SOURCE, of all. A lock names an archive by its hash and its files by one digest: the
    same files from another archive, such as a `git archive` of your own, are the same source.
    """
    rows = app.sources.lock_sources(workspace, dry_run=dry_run, **options)
    if as_json:
        return say_json(rows)
    if not rows:
        return click.echo("nothing would change" if dry_run else "locked; nothing changed")
    columns = ["source", "what", "before", "after"]
    click.echo(log.table(columns, [[row[c] or "-" for c in columns] for row in rows]))


@query
@click.argument("name", metavar="SOURCE")
@click.argument("build", metavar="BUILD")
@options.platform_option
@click.option(
    "--jobs",
    type=click.IntRange(0),
    default=0,
    help="Compilers to run at once (0: as memory allows).",
)
@click.option(
    "--runtime",
    "sandbox",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    help="What the steps run in.",
)
@click.option(
    "--object-cache",
    metavar="URL",
    envvar="SM120_OBJECT_CACHE",
    help="Folder of ccache objects on an HTTP server, shared with others [SM120_OBJECT_CACHE].",
)
@options.mirror_option
@options.offline_option
def source_build_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Compile one build of a source into the store, without making an image of it.

    The steps run in the source's toolchain image without network. Objects are kept: an interrupted
    or slightly changed build goes on where it was. `sm120 source list` shows builds and times.

    With --object-cache, objects that other machines compiled are taken, and new ones are sent. What
    was compiled so is not signed before a golden digest has it, or a build without the option.
    """
    tree, record = app.sources.build_source(workspace, **options)
    if as_json:
        return say_json({**tree.model_dump(), **record.model_dump()})
    rows = [
        ["layer", record.digest],
        ["size", log.size(record.unpacked_bytes)],
        ["toolchain", tree.toolchain],
        ["GPU code", ", ".join(tree.code.gpu) or "none"],
        ["instructions", ", ".join(tree.code.cpu) or "of every processor"],
        ["objects", objects_text(tree.objects)],
        *([["compiled by", ", ".join(tree.taken.signed_by)]] if tree.taken else []),
        ["time", log.seconds(tree.seconds)],
        ["version", tree.version.replace("\n", "; ")],
    ]
    click.echo(log.table([tree.source, tree.build], rows))


@query
@click.argument("name", metavar="SOURCE")
@click.argument("build", metavar="BUILD")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@options.platform_option
def source_export_command(
    workspace: Workspace, /, folder: Path, as_json: bool, **options: Any
) -> None:
    """Write the files of a compiled source into a folder, each with a signed statement.

    They are the same bytes as in images that include the source: `nccl_patched_library` of the
    Ansible role nccl takes a library from here. `sm120 verify FILE` checks one of them.
    """
    rows = app.sources.export_source(workspace, folder=folder, **options)
    if as_json:
        return say_json(
            [
                {
                    "path": row.path,
                    "sha256": row.sha256,
                    "size_bytes": row.size_bytes,
                    "statement": statement._asdict(),
                }
                for _, row, statement in rows
            ]
        )
    table = [
        [str(path.relative_to(folder)), log.size(row.size_bytes), row.sha256, statement.state]
        for path, row, statement in rows
    ]
    click.echo(log.table(["file", "size", "sha256", "statement"], table))


@query
@click.argument("name", metavar="SOURCE")
@click.argument("build", metavar="BUILD")
@click.argument("place", metavar="REGISTRY/REPO")
@options.platform_option
@options.key_option
@flag_option("--dry-run", help="Show what would be sent and send nothing.")
@options.registry_options
def source_publish_command(
    workspace: Workspace,
    /,
    name: str,
    build: str,
    place: str,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Push the layer of a compiled source, with a signed statement of what it was compiled from.

    Other machines then need not compile it: `sm120 build IMAGE --layers-from REGISTRY/REPO` takes
    it where your key is trusted (`sm120 evidence trust-key`), and checks that it is the layer of
    the very source, patches and toolchain that their checkout asks for. A key is needed: nobody
    takes an unsigned layer. One repository holds the layers of all sources; the tag of each is made
    from its name and key. After an interruption, run it again: it continues.
    """
    plan, layer, done, signed_by = app.sources.publish_source(
        workspace, name, build, place, dry_run=dry_run, **options
    )
    if as_json:
        return say_json(
            {
                "source": name,
                "build": build,
                "platform": plan.platform,
                "key": plan.key,
                "layer": layer.digest,
                "size_bytes": layer.size_bytes,
                "reference": done.reference,
                "tag": done.tag,
                "signed_by": signed_by,
                "sent_bytes": done.sent_bytes,
                "dry_run": dry_run,
            }
        )
    reference = parse_repository(place)
    verb = "would be sent" if dry_run else f"sent in {log.seconds(done.seconds)}"
    rows = [
        ["layer", layer.digest],
        ["size", f"{log.size(layer.size_bytes)}, {log.size(done.sent_bytes)} {verb}"],
        ["tag", f"{reference}:{done.tag}"],
        ["signed by", signed_by],
    ]
    click.echo(log.table([name, build], rows))
    if dry_run:
        return click.echo("\nnothing was sent")
    click.echo(f"\nNext, on another machine: `sm120 build IMAGE --layers-from {reference}`")

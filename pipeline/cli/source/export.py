"""`sm120 source export`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.assemble.plan import plan_tree
from pipeline.cli.context import checkout_of, host_platform, say_json, store_of
from pipeline.cli.options import json_option, platform_option
from pipeline.errors import UnknownSource
from pipeline.source.exported import export_tree
from pipeline.spec.image import CompiledSpec


@click.command("export")
@click.argument("name", metavar="SOURCE")
@click.argument("build", metavar="BUILD")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@platform_option
@json_option
@click.pass_context
def export(
    context: click.Context,
    name: str,
    build: str,
    folder: Path,
    platform: str | None,
    as_json: bool,
) -> None:
    """Write the files of a compiled source into a folder.

    They are the same bytes as in images that include the source: `nccl_patched_library` of the
    Ansible role nccl takes a library from here.
    """
    checkout, store = checkout_of(context), store_of(context)
    chosen = host_platform() if platform in (None, "host") else str(platform)
    plan = plan_tree(checkout, CompiledSpec(source=name, build=build), chosen)
    with store.in_use():
        record = store.layer(plan.key)
        if record is None:
            raise UnknownSource(
                f"{plan.title} is not compiled", f"`sm120 source build {name} {build}` does it."
            )
        rows = export_tree(store, record, plan.build.to, folder)
    if as_json:
        names = ("path", "sha256", "size_bytes")
        return say_json([{name: getattr(row, name) for name in names} for row in rows])
    table = [[Path(row.path).name, log.size(row.size_bytes), row.sha256] for row in rows]
    click.echo(log.table(["file", "size", "sha256"], table))

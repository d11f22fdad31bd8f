"""`sm120 source export`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import __version__, log
from pipeline.assemble.plan import plan_tree
from pipeline.attest.envelope import SUFFIX
from pipeline.attest.names import COMPILED_FILE
from pipeline.attest.predicates import CompiledFile, Tool
from pipeline.attest.statement import make_statement, moment
from pipeline.cli.context import checkout_of, host_platform, say_json, store_of
from pipeline.cli.file_statements import keep_beside
from pipeline.cli.options import json_option, platform_option
from pipeline.cli.signing import Signing
from pipeline.source.compiled import compiled_layer, export_tree
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
    """Write the files of a compiled source into a folder, each with a signed statement.

    They are the same bytes as in images that include the source: `nccl_patched_library` of the
    Ansible role nccl takes a library from here. `sm120 verify FILE` checks one of them.
    """
    signing = Signing()
    checkout, store = checkout_of(context), store_of(context)
    chosen = host_platform() if platform in (None, "host") else str(platform)
    plan = plan_tree(checkout, CompiledSpec(source=name, build=build), chosen)
    with store.in_use():
        record = compiled_layer(store, plan)
        written = export_tree(store, record, plan.build.to, folder)
    body = CompiledFile(
        source=name,
        build=build,
        platform=chosen,
        inputs=plan.key,
        layer=record.digest,
        tool=Tool(name="sm120-pipeline", version=__version__),
    ).model_dump(mode="json")
    when, rows = moment(), []
    for path, row in written.items():
        statement = make_statement(path.name, row.sha256, COMPILED_FILE, body, when)
        left = keep_beside(path.with_name(f"{path.name}{SUFFIX}"), statement, signing)
        rows.append((path, row, left))
    if as_json:
        return say_json(
            [
                {
                    "path": row.path,
                    "sha256": row.sha256,
                    "size_bytes": row.size_bytes,
                    "statement": left._asdict(),
                }
                for _, row, left in rows
            ]
        )
    table = [
        [str(path.relative_to(folder)), log.size(row.size_bytes), row.sha256, left.state]
        for path, row, left in rows
    ]
    click.echo(log.table(["file", "size", "sha256", "statement"], table))

"""`sm120 source export-objects` and `import-objects`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import say_json, store_of, store_to_read
from pipeline.cli.options import json_option
from pipeline.cli.signing import Signing, trust_of
from pipeline.errors import ObjectsUnusable
from pipeline.source.share import (
    ENVELOPE,
    MANIFEST,
    Shared,
    export_objects,
    import_objects,
    read_manifest,
)

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command("export-objects")
@click.argument("folder", metavar="DIR", type=_FOLDER)
@json_option
@click.pass_context
def export_to(context: click.Context, folder: Path, as_json: bool) -> None:
    """Write all compiled objects as plain files with a manifest of their hashes.

    Copy DIR to another machine and import it there: its builds compile only what is not in it.
    Where you have a key, the manifest is signed.
    """
    store, signing = store_to_read(context), Signing()
    with store.in_use():
        done = export_objects(store, folder, signing.signers)
    _show(done, f"exported to {folder}, {signing.state(list(done.signed_by))}", as_json)


@click.command("import-objects")
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option(
    "--trust",
    "trust_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Trust file to judge the signature by [lockfiles/trust.yaml and your own keys].",
)
@click.option("--unsigned", is_flag=True, help="Take objects that no trusted key vouches for.")
@json_option
@click.pass_context
def import_from(
    context: click.Context, folder: Path, trust_path: Path | None, unsigned: bool, as_json: bool
) -> None:
    """Take over exported objects, after each was compared with the manifest.

    Whoever made an object decides what is in your engine, so a trusted key must have signed the
    manifest; --unsigned takes one that nobody signed, as from another machine of your own. What
    builds took from an import is recorded, and the golden digest judges the result either way.
    """
    store = store_of(context)
    manifest, digest = read_manifest(folder)
    signed_by = [] if unsigned else _signers(context, folder, digest, trust_path)
    with store.in_use():
        done = import_objects(store, folder, manifest, digest, signed_by)
    signed = f"signed by {', '.join(signed_by)}" if signed_by else "unsigned"
    _show(done, f"imported, {done.new} new, {signed}", as_json)


def _signers(
    context: click.Context, folder: Path, digest: str, trust_path: Path | None
) -> list[str]:
    """The trusted keys that signed this very manifest."""
    from pipeline.attest.envelope import read_kept
    from pipeline.attest.names import OBJECTS
    from pipeline.verify.signature import judge_signatures

    hint = "Nothing was imported. --unsigned takes objects that you vouch for yourself."
    envelope = read_kept(folder / ENVELOPE)
    if envelope is None:
        raise ObjectsUnusable(f"{folder / MANIFEST}: nobody signed it", hint)
    statement = envelope.statement
    if statement.predicate_type != OBJECTS or not statement.is_about(digest):
        raise ObjectsUnusable(f"{folder / ENVELOPE}: is about another manifest", hint)
    node, keys = judge_signatures(envelope, trust_of(context, trust_path), datetime.now(UTC))
    if not keys:
        raise ObjectsUnusable(f"{folder / ENVELOPE}: {node.message}", hint)
    return [key.name for key in keys]


def _show(done: Shared, what: str, as_json: bool) -> None:
    if as_json:
        return say_json(
            {
                "manifest": done.manifest,
                "files": done.objects,
                "new": done.new,
                "size_bytes": done.size_bytes,
                "signed_by": list(done.signed_by),
            }
        )
    click.echo(f"{log.count(done.objects, 'file')}, {log.size(done.size_bytes)} {what}")
    click.echo(f"manifest {done.manifest}")

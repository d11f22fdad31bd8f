"""Commands that make evidence: record, attest, sbom."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.common import (
    checkout_of,
    json_option,
    platform_option,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.images import find_image
from pipeline.errors import SigningFailed

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer
    from pipeline.evidence.image import Recorded

_KEY_HELP = "The private key to sign with [SM120_SIGNING_KEY, SM120_SIGNING_AGENT]."
key_option = click.option("--key", "key_path", type=click.Path(path_type=Path), help=_KEY_HELP)


def signer_of(key_path: Path | None) -> Signer:
    """The key that was named or configured; without one there is an error, not a silent skip."""
    from pipeline.attest.keys import find_signer

    found = find_signer(key_path, os.environ)
    if found is None:
        raise SigningFailed("there is no key to sign with")
    return found


@click.command()
@click.argument("name", metavar="IMAGE")
@key_option
@click.option("--unsigned", is_flag=True, help="State it without a signature.")
@click.option("--spdx", is_flag=True, help="State the bill of materials as SPDX 2.3, too.")
@platform_option
@json_option
@click.pass_context
def record(
    context: click.Context,
    name: str,
    key_path: Path | None,
    unsigned: bool,
    spdx: bool,
    platform: str | None,
    as_json: bool,
) -> None:
    """State and sign what a built image is made of, how it was built and what its gates found.

    Kept beside the image in the store. Run again with another key, it adds a signature.
    """
    from pipeline.attest.statement import moment
    from pipeline.evidence.image import record_image

    checkout, store = checkout_of(context), store_of(context)
    signers = [] if unsigned else [signer_of(key_path)]
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        found = record_image(checkout, store, built, signers, moment(), spdx=spdx)
    if as_json:
        rows = [_row_json(r) for r in found]
        return say_json({"image": name, "digest": built.digest, "records": rows})
    click.echo(log.table(["record", "size", "signatures"], [_row(r) for r in found]))
    click.echo(f"\n{name} {built.digest}")


def _row(found: Recorded) -> list[str]:
    count = len(found.envelope.signatures)
    return [found.name, log.size(len(found.envelope.payload)), str(count) if count else "none"]


def _row_json(found: Recorded) -> dict[str, object]:
    keys = [s.key_id for s in found.envelope.signatures]
    kind = found.envelope.statement.predicate_type
    return {"record": found.name, "predicate_type": kind, "keys": keys}


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--type", "kind", required=True, help="host-facts, benchmark-run, report, …")
@click.option(
    "--predicate",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The JSON file that says it.",
)
@key_option
@click.pass_context
def attest(
    context: click.Context, artifact: Path, kind: str, predicate: Path, key_path: Path | None
) -> None:
    """Sign a statement about any file; it is kept beside the file."""
    from pipeline.attest.names import KINDS
    from pipeline.attest.predicates import MODELS
    from pipeline.attest.strict import read_json
    from pipeline.verify.artifact import read_bounded

    own = sorted(name for name, uri in KINDS.items() if uri in MODELS)
    if kind not in own:
        raise click.BadParameter(f"one of {', '.join(own)}", param_hint="--type")
    body = read_json(read_bounded(predicate), predicate.name)
    click.echo(str(attest_file(artifact, kind, body, signer_of(key_path))))


def attest_file(artifact: Path, kind: str, body: Any, signer: Signer) -> Path:
    """Sign a statement of one of our own kinds about a file; where it is kept."""
    from pipeline.attest.envelope import SUFFIX, enclose
    from pipeline.attest.names import KINDS
    from pipeline.attest.predicates import check_predicate
    from pipeline.attest.statement import make_statement, moment
    from pipeline.files import write_bytes
    from pipeline.verify.artifact import open_file

    check_predicate(KINDS[kind], body)
    said = make_statement(artifact.name, open_file(artifact).digest, KINDS[kind], body, moment())
    path = artifact.with_name(f"{artifact.name}{SUFFIX}")
    write_bytes(path, enclose(said, [signer]).dump())
    return path


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option(
    "--format",
    "form",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    show_default=True,
    help="CycloneDX 1.6 or SPDX 2.3, as JSON.",
)
@platform_option
@click.pass_context
def sbom(context: click.Context, name: str, form: str, platform: str | None) -> None:
    """Print a built image's bill of materials: every wheel, .deb, file and patch, by layer."""
    from pipeline.evidence.bill import bill_of
    from pipeline.evidence.sbom_cyclonedx import cyclonedx_bytes
    from pipeline.evidence.sbom_spdx import spdx_bytes

    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        bill = bill_of(checkout, store, built)
    click.echo((cyclonedx_bytes if form == "cyclonedx" else spdx_bytes)(bill), nl=False)


@click.command()
@click.argument("path", metavar="FILE_IN_IMAGE")
@click.option("--image", "name", required=True, help="Which image.")
@platform_option
@json_option
@click.pass_context
def explain(
    context: click.Context, path: str, name: str, platform: str | None, as_json: bool
) -> None:
    """Say where a file of an image came from: which wheel, .deb or patch."""
    from dataclasses import asdict

    from pipeline.evidence.inventory import explain as origin_of

    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        found = origin_of(checkout, store, built, path)
    if as_json:
        return say_json(asdict(found))
    for link in found.links:
        click.echo(link)
    digest = f" sha256:{found.sha256}" if found.sha256 else ""
    click.echo(f"{found.path}: {found.kind}, {log.size(found.size_bytes)}{digest}")
    click.echo(f"  from   {found.origin}")
    if found.package:
        click.echo(f"         {found.package} sha256:{found.package_sha256}")
    for patch in found.patches:
        click.echo(f"  patch  {patch}")
    click.echo(f"  layer  {found.layer} {found.layer_digest}")

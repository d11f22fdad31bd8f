"""Making evidence: statements about an image or any file, and bills of materials."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.attest.names import KINDS
from pipeline.attest.predicates import MODELS
from pipeline.attest.statement import moment
from pipeline.attest.strict import read_json
from pipeline.cli.context import checkout_of, say_bytes, say_json, store_of, store_to_read
from pipeline.cli.file_statements import attest_file
from pipeline.cli.images import find_image
from pipeline.cli.options import EXISTING_FILE, json_option, key_option, platform_option
from pipeline.cli.signing import signer_of
from pipeline.errors import RecordInvalid
from pipeline.evidence.bill import bill_of
from pipeline.evidence.image import record_image
from pipeline.evidence.sbom_cyclonedx import cyclonedx_bytes
from pipeline.evidence.sbom_spdx import spdx_bytes
from pipeline.verify.artifact import read_bounded


@click.command()
@click.argument("name", metavar="IMAGE")
@key_option
@click.option("--unsigned", is_flag=True, help="Make the statements without a signature.")
@click.option("--spdx", is_flag=True, help="Add the bill of materials as SPDX 2.3.")
@platform_option
@json_option
@click.pass_context
def make(
    context: click.Context,
    name: str,
    key_path: Path | None,
    unsigned: bool,
    spdx: bool,
    platform: str | None,
    as_json: bool,
) -> None:
    """State and sign what a built image is made of, how it was built, and its gates' results.

    The statements are kept beside the image in the store. Another key adds its signature.
    """
    checkout, store = checkout_of(context), store_of(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        # without a key an error, not silence: who calls this verb wants a signature
        signers = [] if unsigned else [signer_of(key_path)]
        statements = record_image(checkout, store, built, signers, moment(), spdx=spdx)
    if as_json:
        rows = [
            {
                "record": record,
                "predicate_type": envelope.statement.predicate_type,
                "keys": [s.key_id for s in envelope.signatures],
            }
            for record, envelope in statements.items()
        ]
        return say_json({"image": name, "digest": built.digest, "records": rows})
    table = [
        [n, log.size(len(e.payload)), len(e.signatures) or "none"] for n, e in statements.items()
    ]
    click.echo(log.table(["statement", "size", "signatures"], table))
    click.echo(f"\n{name} {built.digest}")


@click.command()
@click.argument("artifact", metavar="FILE", type=EXISTING_FILE)
@click.option(
    "--type",
    "kind",
    required=True,
    help="Kind of statement, such as host-facts, benchmark-run or report.",
)
@click.option(
    "--predicate",
    type=EXISTING_FILE,
    required=True,
    help="JSON file with the content of the statement.",
)
@key_option
@click.pass_context
def attest(
    context: click.Context, artifact: Path, kind: str, predicate: Path, key_path: Path | None
) -> None:
    """Sign a statement about any file. It is kept beside the file."""
    # only kinds whose content we can check; of others we would sign anything
    own = sorted(name for name, uri in KINDS.items() if uri in MODELS)
    if kind not in own:
        raise click.BadParameter(f"one of {', '.join(own)}", param_hint="--type")
    # strict and bounded: what is signed must mean the same to every reader
    try:
        body = read_json(read_bounded(predicate), predicate.name)
        click.echo(str(attest_file(artifact, kind, body, signer_of(key_path))))
    except RecordInvalid as error:
        # the general hint is for evidence of others, these facts are the user's own
        hint = f"Correct {predicate}; `sm120 image schema {kind}` prints its form."
        raise RecordInvalid(str(error), hint) from error


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
    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        bill = bill_of(checkout, store, built)
    # as a file it ends with a newline already; another would change its digest
    say_bytes((cyclonedx_bytes if form == "cyclonedx" else spdx_bytes)(bill))

"""`sm120 verify` and `sm120 evidence`: judge evidence, make statements, and keys that sign them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.names import KINDS
from pipeline.cli import options
from pipeline.cli.options import (
    EXISTING_FILE,
    command,
    file_option,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_bytes, say_json
from pipeline.core import log
from pipeline.evidence.verify.verdict import show


@query
@click.argument("name", metavar="IMAGE")
@options.key_option
@flag_option("--unsigned", help="Make the statements without a signature.")
@flag_option("--spdx", help="Add the bill of materials as SPDX 2.3.")
@options.platform_option
def evidence_make_command(
    workspace: Workspace, /, name: str, as_json: bool, **options: Any
) -> None:
    """State and sign what a built image is made of, how it was built, and its gates' results.

    The statements are kept beside the image in the store. Another key adds its signature.
    """
    built, statements = app.evidence.state_and_keep_image(workspace, name, **options)
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
@file_option("--predicate", required=True, help="JSON file with the content of the statement.")
@options.key_option
def evidence_attest_command(
    artifact: Path, kind: str, predicate: Path, key_path: Path | None
) -> None:
    """Sign a statement about any file. It is kept beside the file."""
    if kind not in app.evidence.OWN_KINDS:
        known = ", ".join(app.evidence.OWN_KINDS)
        raise click.BadParameter(f"one of {known}", param_hint="--type")
    click.echo(str(app.evidence.attest_file(artifact, kind, predicate, key_path)))


@command
@click.argument("name", metavar="IMAGE")
@click.option(
    "--format",
    "form",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    help="CycloneDX 1.6 or SPDX 2.3, as JSON.",
)
@many_option(
    "--weights",
    metavar="SET|DIR",
    help="Locked weights that run with it: makes it the bill of a run. Repeatable.",
)
@options.platform_option
def evidence_sbom_command(workspace: Workspace, /, **options: Any) -> None:
    """Print a built image's bill of materials: every wheel, .deb, file and patch, by layer.

    With --weights it is the bill of a run: each set stands in it as a machine-learning-model, by
    commit, with every file and its hash.
    """
    if options["weights"] and options["form"] == "spdx":
        raise click.UsageError("--weights needs CycloneDX, which has a type for models")
    # as a file it ends with a newline already; another would change its digest
    say_bytes(app.evidence.bill_of_materials(workspace, **options))


@command
@click.argument("name")
@path_option("--output", "folder", help="Folder for the key [default: your own keys].")
@flag_option("--passphrase", "ask", help="Ask for a passphrase [SM120_KEY_PASSPHRASE].")
def evidence_new_key_command(
    workspace: Workspace, name: str, folder: Path | None, ask: bool
) -> None:
    """Make a key (ECDSA P-256) that only you can read. An old key is never overwritten.

    Your first key signs the statements of every later command, and now those in the store that
    are unsigned and still true. On this machine it is trusted without an entry. With --output, the
    key is only written.
    """
    app.evidence.require_key_name(name)
    # never an option: the arguments of a process can be read by every user of a machine
    secret = os.environ.get("SM120_KEY_PASSPHRASE")
    if ask and not secret:
        secret = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    made = app.evidence.new_key(name, folder, secret)
    # on stderr, so that stdout is the entry alone and can be appended to a trust file
    log.say(f"{made.private}: the private key, keep it secret")
    log.say(f"{made.public}: the public key, for those who verify\n")
    log.say("Entry for their trust file, under `keys:` (shorten `for` to what it may sign):")
    click.echo(made.entry)
    # a key that is written elsewhere may be for another person: it signs nothing here
    for line in app.evidence.sign_with_first_key(workspace, made) if folder is None else ():
        log.say(line)


@click.command("show-key")
@click.argument("name", metavar="NAME|FILE.pub")
def evidence_show_key_command(name: str) -> None:
    """Print the entry of a key for a trust file: its id, its public half, what it may sign."""
    click.echo(app.evidence.key_entry(name))


@click.command("trust-key")
@click.argument("public", metavar="FILE.pub", type=EXISTING_FILE)
@click.option("--name", help="Name of the key in messages [default: that of its file].")
@many_option(
    "--for",
    "believed",
    metavar="KIND",
    type=click.Choice([*KINDS]),
    help="Believe it only about this, e.g. provenance. Repeatable [default: all kinds].",
)
@path_option(
    "--trust",
    "path",
    # the file that verify believes then, and no other
    envvar="SM120_TRUST",
    help="Trust file to change, e.g. lockfiles/trust.yaml [SM120_TRUST; default: your own].",
)
def evidence_trust_key_command(
    public: Path, name: str | None, believed: tuple[str, ...], path: Path | None
) -> None:
    """Add somebody's public key to a trust file, so that `sm120 verify` believes what it signed.

    For a year, which the file says and you may change. Compare the id that is printed with the
    owner of the key, over another channel than the one that the key came by.
    """
    click.echo(app.evidence.trust_key(public, name, believed, path))


@command
@click.argument("wanted", metavar="NAME|ID|FILE.pub")
@file_option(
    "--trust",
    "path",
    envvar="SM120_TRUST",
    help="Trust file to change, e.g. lockfiles/trust.yaml [SM120_TRUST; default: your own].",
)
def evidence_untrust_key_command(workspace: Workspace, wanted: str, path: Path | None) -> None:
    """Take a key out of a trust file, so that `sm120 verify` no longer believes what it signed.

    The way back from trust-key. A key that was stolen is better left there as `revoked`: what it
    signed is then broken, and not merely unknown.
    """
    click.echo(app.evidence.untrust_key(workspace, wanted, path))


@query
@options.trust_option
def evidence_list_keys_command(
    workspace: Workspace, trust_path: Path | None, as_json: bool
) -> None:
    """List the keys that are trusted, by which file, what for and until when."""
    rows = [
        {
            "name": key.name,
            "id": key.id,
            "state": state,
            "until": f"{key.until:%Y-%m-%d}",
            "in": str(file),
            "for": key.kinds,
        }
        for key, state, file in app.evidence.list_keys(workspace, trust_path)
    ]
    if as_json:
        return say_json(rows)
    if not rows:
        return click.echo(
            "no key is trusted here: `sm120 evidence trust-key FILE.pub` believes somebody's,"
            " `sm120 evidence new-key NAME` makes one"
        )
    table = [[*[*row.values()][:-1], ", ".join(row["for"])] for row in rows]
    click.echo(log.table([*rows[0]], table))


@query
@click.argument("artifact", metavar="IMAGE|RUN|REPORT|FILE|DIR|REGISTRY/REPO:TAG|@DIGEST")
@many_option(
    "--evidence",
    "places",
    # a mistyped name is no broken evidence
    type=click.Path(exists=True, path_type=Path),
    help="Statement file or folder of them [default: those beside it]. Repeatable.",
)
@options.look_in_option
@options.trust_option
@many_option(
    "--key",
    "key_paths",
    type=EXISTING_FILE,
    metavar="FILE.pub",
    help="Public key to believe for this once, about everything. Repeatable.",
)
@path_option("--policy", "policy_path", help="File of what the evidence must hold, for CI.")
@flag_option("--deep", help="Read every layer in a registry and every weights file.")
@flag_option("--all", "everything", help="Show every package, not only what is wrong.")
@options.own_recipes_option
@options.platform_option
@options.registry_options
def verify_command(
    workspace: Workspace,
    /,
    folders: tuple[Path, ...],
    own_recipes: tuple[Path, ...],
    everything: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check evidence: who signed it, whether it is about these bytes, and what is behind it.

    Works offline; for an image in a registry, only that registry is asked. The store remembers
    which image a tag named last, so that a tag which was moved back is noticed.

    The exit code is 0 only when everything holds. Stale, incomplete, unsigned, moved and broken
    have their own exit codes; what could not be checked never counts as valid.
    """
    # a run of a recipe of one's own is compared with that recipe, as `serve` found it
    request = app.verify.VerifyRequest(folders=(*folders, *own_recipes), **options)
    done = app.verify.verify_artifact(workspace, request)
    if as_json:
        answer = done.node.as_json()
        if judged := [each.as_json() for each in done.policy]:
            answer["policy"] = judged[0] if len(judged) == 1 else judged
        say_json(answer)
    else:
        click.echo("\n".join(show(n, everything=everything) for n in (done.node, *done.policy)))
    done.require_valid()

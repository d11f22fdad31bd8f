"""`sm120 evidence audit`: known vulnerabilities of images, and who holds a package."""

from __future__ import annotations

from typing import Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    EXISTING_FOLDER,
    Read,
    file_option,
    flag_option,
    many_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.evidence.audit.match import parse_held


@query
@click.argument("subjects", metavar="[IMAGE|BILL|DIR|REGISTRY/REPO:TAG|@DIGEST]...", nargs=-1)
@click.option(
    "--database",
    type=EXISTING_FOLDER,
    metavar="DIR",
    help="Folder with OSV's all.zip or records, and Debian's tracker dump, as published.",
)
@many_option(
    "--holds",
    type=Read("package", parse_held),
    metavar="NAME<VERSION",
    help="Find who holds this, e.g. urllib3<2.5 or deb:openssl<3.0.17-1. Repeatable.",
)
@file_option(
    "--hosts",
    "hosts_path",
    metavar="FILE",
    help="What `sm120 host status --json` printed: shows the hosts that serve each image.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "cyclonedx", "openvex"]),
    default="table",
    help="A table, or a VEX document in JSON.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["low", "medium", "high", "critical"]),
    help="Exit with 76 where a finding is as bad as this and not accepted.",
)
@click.option(
    "--max-age",
    "max_age_days",
    type=click.IntRange(1, 36_500),
    default=30,
    metavar="DAYS",
    help="Exit with 74 where the newest advisory is older.",
)
@flag_option("--attest", help="Sign the result and keep it with the image's evidence.")
@options.key_option
@options.trust_option
@options.platform_option
@options.access_options
def evidence_audit_command(
    workspace: Workspace,
    /,
    form: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Find known vulnerabilities in images, offline, by advisories that you fetched.

    Compares every wheel, .deb and vendored library (PEP 770) of each image's bill of materials with
    the database, by the version order of its ecosystem. Without an IMAGE it takes all of the
    checkout; one that is not built is judged by its lock. The database is read whole: a damaged
    record stops the audit, and an old database is named. `advisories` in an image's spec accepts a
    finding, with a reason and an end. --holds needs no database.
    """
    if not options["database"] and not options["holds"]:
        raise click.UsageError("name a database with --database, or a package with --holds")
    if (form != "table" or options["attest"] or options["fail_on"]) and not options["database"]:
        raise click.UsageError("--format, --attest and --fail-on need a --database")
    done = app.audit.audit_images(workspace, app.audit.AuditRequest(**options))
    if form != "table":
        say_json(done.vex(form))
    elif as_json:
        body: dict[str, Any] = {"images": [x.as_json() for x in done.images]}
        say_json({**body, "unplaced": done.unplaced})
    else:
        if done.rows:
            head = ["image", "package", "advisory", "severity", "fixed in", "state"]
            click.echo(log.table(head, done.rows) + "\n")
        held = [[x.title, p.title, ", ".join(x.hosts) or "-"] for x in done.images for p in x.held]
        if held:
            click.echo(log.table(["image", "package", "hosts"], held) + "\n")
        elif options["holds"]:
            click.echo(f"none of {log.count(len(done.images), 'image')} holds such a package\n")
        click.echo("\n".join(done.lines))
    if done.error:
        raise done.error

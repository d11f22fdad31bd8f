"""`sm120 publish` and `sm120 registry`: push, pull, list and clean up images in a registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.names import predicate_kind
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.cli import options
from pipeline.cli.options import ANY_PATH, flag_option, many_option, query
from pipeline.cli.output import say_json
from pipeline.core import log

if TYPE_CHECKING:
    from pipeline.artifacts.registry.access import Access


@query
@click.argument("name", metavar="IMAGE")
@click.argument("place", metavar="REGISTRY/REPO[:TAG]")
@options.platform_option
@flag_option("--index", help="Make an image index even for a single platform.")
@many_option(
    "--attach",
    "attachments",
    metavar="[PLATFORM=]FILE:TYPE",
    help="Attach a file to the image, or to one platform of it. Repeatable.",
)
@click.option(
    "--force-ungated",
    metavar="REASON",
    help="Publish although gates did not pass; the reason stays with the image.",
)
@options.key_option
@flag_option("--spdx", help="Add the bill of materials as SPDX 2.3.")
@flag_option("--no-evidence", help="Attach no statements and sign nothing.")
@flag_option("--dry-run", help="Show what would be sent and send nothing.")
@options.registry_options
def publish_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Push a built image to a registry: the bytes in the store, never a rebuild.

    Without --platform, every platform that was built; one that never was is named and left out.
    Only what the registry lacks is sent, and the tag is written last. Without TAG, the first
    twelve characters of the digest are the tag. After an interruption, run it again: it continues.

    Signed statements are attached, also where cosign looks for them. With a key, the image is
    recorded and signed first, and so is the fact that this name belongs to this digest.
    """
    done = app.registry.publish(workspace, **options)
    if as_json:
        return say_json(done.model_dump(mode="json"))
    rows = [[platform, digest] for platform, digest in done.platforms.items()]
    # a single platform without --index is its own root
    if done.digest not in done.platforms.values():
        rows.append(["index", done.digest])
    click.echo(log.table(["platform", "digest"], rows) + "\n")
    for proof in done.proved:
        click.echo(f"proved for {proof.sentence()}")
    counts = f"{done.blobs['sent']} sent, {done.blobs['mounted']} mounted"
    verb = "would be sent" if done.dry_run else f"sent in {log.seconds(done.seconds)}"
    click.echo(
        f"{log.size(done.sent_bytes)} of {log.size(done.total_bytes)} {verb}"
        f" ({counts}, {done.blobs['there']} were there)"
    )
    for a in done.attached:
        what = (
            f"statement {predicate_kind(a.predicate_type)}" if a.predicate_type else a.artifact_type
        )
        click.echo(f"attached {what}: {a.digest} ({a.found_by})")
    if done.attached:
        click.echo(f"{log.size(done.attached_bytes)} of evidence sent")
    if done.dry_run:
        return click.echo("nothing was sent")
    click.echo(f"{done.reference.partition('@')[0]}:{done.tag} is {done.digest}")


@click.command()
@click.argument("place", metavar="REGISTRY/REPO@DIGEST")
@click.argument("folder", metavar="DIR", type=ANY_PATH)
@options.platform_option
@flag_option("--evidence", help="Fetch what is attached to the image, too.")
@click.option(
    # a reference may name anything: it is refused before the disk is full
    "--max-gb",
    type=click.IntRange(1),
    default=200,
    help="Refuse an image that is larger.",
)
@options.registry_options
@options.json_option
def registry_pull_command(
    place: str, folder: Path, max_gb: int, as_json: bool, **options: Any
) -> None:
    """Fetch an image by digest into an OCI layout folder, and check every byte.

    A tag is only a way to the digest, which is shown. After an interruption, run it again: it
    continues where it was.
    """
    done = app.registry.pull(place, folder, most_bytes=max_gb * 1000**3, **options)
    if as_json:
        asked = str(parse_reference(place))
        return say_json({"folder": str(folder), "asked": asked, **done.model_dump()})
    click.echo(f"{folder}: {done.digest}, {log.size(done.received_bytes)} fetched")
    for digest in done.evidence:
        click.echo(f"  with {digest}")


@click.command()
@click.argument("place", metavar="REGISTRY/REPO")
@options.registry_options
@options.json_option
def registry_tags_command(place: str, access: Access, jobs: int, as_json: bool) -> None:
    """List the tags of a repository, and the images they name."""
    pairs = app.registry.list_tags(place, access, jobs)
    if as_json:
        return say_json([{"tag": t, "kind": m.kind, "digest": m.digest} for t, m in pairs])
    rows = [
        # an index names manifests, whose sizes are not those of images
        [tag, m.kind, m.digest, log.size(sum(b.size_bytes for b in m.blobs)) if m.blobs else None]
        for tag, m in pairs
    ]
    click.echo(log.table(["tag", "kind", "digest", "size"], rows))


@query
@click.argument("places", metavar="REGISTRY/REPO...", nargs=-1, required=True)
@many_option(
    "--keep",
    "patterns",
    metavar="PATTERN",
    required=True,
    help="Tags to keep, as a shell pattern such as 'v*'. Repeatable.",
)
# what is deleted in a registry cannot be brought back
@flag_option("--yes", help="Delete; without it, only show what would go.")
@options.registry_options
def registry_clean_command(
    workspace: Workspace,
    /,
    places: tuple[str, ...],
    patterns: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Delete manifests that no kept tag and no evidence of a kept image needs.

    The registry's own garbage collection then frees the space. Without --yes nothing is deleted.
    """
    plans = app.registry.clean_repository(workspace, places, patterns, delete=yes, **options)
    if as_json:
        return say_json([{**p.model_dump(mode="json"), "deleted": yes} for p in plans])
    goes = "deleted" if yes else "would go"
    for plan in plans:
        held = [("kept", h) for h in plan.kept] + [(goes, h) for h in plan.gone]
        rows = [[state, h.kind, h.digest, ", ".join(h.tags) or "-"] for state, h in held]
        click.echo(log.table([plan.repository, "kind", "digest", "tags"], rows) + "\n")
        end = "" if yes or not plan.gone else "; --yes deletes them"
        click.echo(
            f"{log.count(len(plan.gone), 'manifest')} {goes}, with {log.size(plan.freed_bytes)} of"
            f" blobs that nothing else names{end}"
        )

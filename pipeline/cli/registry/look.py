"""Looking into registries: pull an image, list tags, delete what nothing needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import named_platform, say_json, store_of
from pipeline.cli.options import ANY_PATH, json_option, platform_option, registry_options
from pipeline.oci.reference import Reference, parse_reference, parse_repository
from pipeline.publish.gc import Plan, plan_gc, run_gc
from pipeline.publish.known import KnownRepository
from pipeline.registry.access import Access
from pipeline.registry.client import RegistryClient
from pipeline.registry.pull import (
    LayoutBlobs,
    Wanted,
    missing_blobs,
    plan_pull,
    pull_layout,
    require_ours,
    resolve,
)
from pipeline.registry.repository import Repository


@contextmanager
def open_registry(reference: Reference, access: Access) -> Iterator[Repository]:
    """A repository, with the logins and CAs that this machine has for it."""
    client = RegistryClient(reference, access)
    try:
        yield Repository(client, reference.repository)
    except BaseException:
        # Ctrl-C reaches the main thread only: this ends what the others wait for
        client.hang_up()
        raise


@click.command()
@click.argument("place", metavar="REGISTRY/REPO@DIGEST")
@click.argument("folder", metavar="DIR", type=ANY_PATH)
@platform_option
@click.option("--evidence", is_flag=True, help="Fetch what is attached to the image, too.")
@click.option(
    # a reference may name anything: it is refused before the disk is full
    "--max-gb",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Refuse an image that is larger.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be fetched; fetch no layers.")
@registry_options
@json_option
def pull(
    place: str,
    folder: Path,
    platform: str | None,
    evidence: bool,
    max_gb: int,
    dry_run: bool,
    access: Access,
    jobs: int,
    as_json: bool,
) -> None:
    """Fetch an image by digest into an OCI layout folder, and check every byte.

    A tag is only a way to the digest, which is shown. After an interruption, run it again: it
    continues where it was.
    """
    reference = parse_reference(place)
    with open_registry(reference, access) as repository:
        # once: everything below goes by its digest, whatever happens to the tag meanwhile
        root = resolve(repository, reference)
        if not reference.digest:
            log.say(f"{reference} is {root.digest}")
        chosen = named_platform(platform)
        wanted = plan_pull(
            repository, root, chosen, with_evidence=evidence, most_bytes=max_gb * 1000**3
        )
        if dry_run:
            return _say_pull(wanted, folder, str(reference), as_json)
        done = pull_layout(repository, wanted, folder, jobs)
    if as_json:
        return say_json({"folder": str(folder), "asked": str(reference), **done.model_dump()})
    click.echo(f"{folder}: {done.digest}, {log.size(done.received_bytes)} fetched")
    for digest in done.evidence:
        click.echo(f"  with {digest}")


def _say_pull(wanted: Wanted, folder: Path, asked: str, as_json: bool) -> None:
    """What a pull would fetch; only manifests were read, and the folder looked at."""
    require_ours(folder)
    missing = missing_blobs(wanted, LayoutBlobs(folder))
    n_bytes = sum(blob.size_bytes for blob in missing)
    if as_json:
        row = {"folder": str(folder), "asked": asked, "digest": wanted.root.digest}
        return say_json({**row, "blobs": len(missing), "size_bytes": n_bytes, "dry_run": True})
    blobs = f"{len(missing)} of {log.count(len(wanted.blobs), 'blob')}, {log.size(n_bytes)},"
    click.echo(f"{folder}: {wanted.root.digest}, {blobs} would be fetched")


@click.command()
@click.argument("place", metavar="REGISTRY/REPO")
@registry_options
@json_option
def tags(place: str, access: Access, jobs: int, as_json: bool) -> None:
    """List the tags of a repository, and the images they name."""
    with open_registry(parse_repository(place), access) as repository:
        names = repository.tags()
        manifests = repository.client.each(jobs, names, repository.manifest)
    pairs = list(zip(names, manifests, strict=True))
    if as_json:
        return say_json([{"tag": t, "kind": m.kind, "digest": m.digest} for t, m in pairs])
    rows = [
        # an index names manifests, whose sizes are not those of images
        [tag, m.kind, m.digest, log.size(sum(b.size_bytes for b in m.blobs)) if m.blobs else None]
        for tag, m in pairs
    ]
    click.echo(log.table(["tag", "kind", "digest", "size"], rows))


@click.command()
@click.argument("places", metavar="REGISTRY/REPO...", nargs=-1, required=True)
@click.option(
    "--keep",
    "patterns",
    metavar="PATTERN",
    multiple=True,
    required=True,
    help="Tags to keep, as a shell pattern such as 'v*'. Repeatable.",
)
# what is deleted in a registry cannot be brought back
@click.option("--yes", is_flag=True, help="Delete; without it, only show what would go.")
@registry_options
@json_option
@click.pass_context
def clean(
    context: click.Context,
    places: tuple[str, ...],
    patterns: tuple[str, ...],
    yes: bool,
    access: Access,
    jobs: int,
    as_json: bool,
) -> None:
    """Delete manifests that no kept tag and no evidence of a kept image needs.

    The registry's own garbage collection then frees the space. Without --yes nothing is deleted.
    """
    store = store_of(context)
    plans = []
    for reference in [parse_repository(place) for place in places]:
        with (
            open_registry(reference, access) as repository,
            # a publish from here at the same time could refer to a manifest that is about to go
            KnownRepository(store, repository).alone(),
        ):
            plan = plan_gc(store, repository, patterns, jobs)
            if yes:
                run_gc(store, repository, plan)
        plans.append(plan)
    if as_json:
        return say_json([{**p.model_dump(mode="json"), "deleted": yes} for p in plans])
    for plan in plans:
        click.echo(_plan_table(plan, yes))


def _plan_table(plan: Plan, is_done: bool) -> str:
    goes = "deleted" if is_done else "would go"
    held = [("kept", h) for h in plan.kept] + [(goes, h) for h in plan.gone]
    rows = [[state, h.kind, h.digest, ", ".join(h.tags) or "-"] for state, h in held]
    end = "" if is_done or not plan.gone else "; --yes deletes them"
    return "\n".join(
        [
            log.table([plan.repository, "kind", "digest", "tags"], rows),
            "",
            f"{log.count(len(plan.gone), 'manifest')} {goes}, with {log.size(plan.freed_bytes)} of"
            f" blobs that nothing else names{end}",
        ]
    )

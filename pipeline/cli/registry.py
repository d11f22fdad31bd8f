"""Commands about registries: pull an image, list tags, clear what nothing needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import (
    Command,
    host_platform,
    json_option,
    platform_option,
    say_json,
    store_of,
)

if TYPE_CHECKING:
    from pipeline.oci.reference import Reference
    from pipeline.publish.gc import Plan
    from pipeline.registry.client import Access
    from pipeline.registry.repository import Repository


def registry_options(command: Command) -> Command:
    """How a registry may be reached."""
    options: list[Callable[[Command], Command]] = [
        click.option("--insecure-http", is_flag=True, help="Speak plain http to the registry."),
        click.option(
            "--ca",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The registry's own CA, besides the system's and Docker's certs.d.",
        ),
        click.option(
            "--jobs", type=click.IntRange(1, 32), default=4, show_default=True, help="At once."
        ),
    ]
    for option in options:
        command = option(command)
    return command


def open_registry(reference: Reference, insecure_http: bool, ca: Path | None) -> Repository:
    """A repository, with the logins and CAs that this machine has for it."""
    from pipeline.registry.client import Access, Client
    from pipeline.registry.repository import Repository

    access: Access = Access(ca_file=ca, insecure_http=insecure_http)
    return Repository(Client(reference, access), reference.repository)


@click.command()
@click.argument("place", metavar="REGISTRY/REPO@DIGEST")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@platform_option
@click.option("--evidence", is_flag=True, help="Also what is attached to the image.")
@click.option(
    "--most-gb", type=click.IntRange(1), default=200, show_default=True, help="Refuse more."
)
@registry_options
@json_option
def pull(
    place: str,
    folder: Path,
    platform: str | None,
    evidence: bool,
    most_gb: int,
    insecure_http: bool,
    ca: Path | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Fetch an image by digest into an OCI layout folder, every byte checked.

    A tag is only a way to find the digest, which is shown. Interrupted, it goes on where it was.
    """
    from pipeline.oci.reference import parse_reference
    from pipeline.registry.pull import plan_pull, pull_layout, resolve

    reference = parse_reference(place)
    repository = open_registry(reference, insecure_http, ca)
    root = resolve(repository, reference)
    if not reference.digest:
        log.say(f"{reference} is {root.digest}")
    chosen = host_platform() if platform == "host" else platform
    wanted = plan_pull(
        repository, root, chosen, with_evidence=evidence, most_bytes=most_gb * 1000**3
    )
    done = pull_layout(repository, wanted, folder, jobs)
    if as_json:
        return say_json({"folder": str(folder), "asked": str(reference), **done.model_dump()})
    click.echo(f"{folder}: {done.digest}, {log.size(done.received_bytes)} fetched")
    for digest in done.evidence:
        click.echo(f"  with {digest}")


@click.group()
def registry() -> None:
    """Look into a registry, and clear what nothing needs."""


@registry.command()
@click.argument("place", metavar="REGISTRY/REPO")
@registry_options
@json_option
def ls(place: str, insecure_http: bool, ca: Path | None, jobs: int, as_json: bool) -> None:
    """The tags of a repository, and what they name."""
    from pipeline.oci.reference import parse_repository

    repository = open_registry(parse_repository(place), insecure_http, ca)
    tags = repository.tags()
    found = repository.client.each(jobs, tags, repository.manifest)
    if as_json:
        pairs = zip(tags, found, strict=True)
        return say_json([{"tag": t, "kind": d.kind, "digest": d.digest} for t, d in pairs])
    rows = [
        [tag, d.kind, d.digest, log.size(sum(b.size_bytes for b in d.blobs)) if d.blobs else "-"]
        for tag, d in zip(tags, found, strict=True)
    ]
    click.echo(log.table(["tag", "kind", "digest", "size"], rows))


@registry.command()
@click.argument("places", metavar="REGISTRY/REPO...", nargs=-1, required=True)
@click.option(
    "--keep",
    "patterns",
    metavar="PATTERN",
    multiple=True,
    required=True,
    help="Tags to keep, as shell patterns (`v*`). Repeatable.",
)
@click.option("--really", is_flag=True, help="Delete; without it, only say what would go.")
@registry_options
@json_option
@click.pass_context
def gc(
    context: click.Context,
    places: tuple[str, ...],
    patterns: tuple[str, ...],
    really: bool,
    insecure_http: bool,
    ca: Path | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Delete manifests that no kept tag, and no evidence of a kept image, reaches.

    The registry's own garbage collection then frees the space.
    """
    from pipeline.oci.reference import parse_repository
    from pipeline.publish.gc import plan_gc, run_gc
    from pipeline.publish.known import KnownRepository

    store = store_of(context)
    plans = []
    for reference in [parse_repository(place) for place in places]:
        repository = open_registry(reference, insecure_http, ca)
        with KnownRepository(store, repository).alone():
            plan = plan_gc(store, repository, patterns, jobs)
            if really:
                run_gc(store, repository, plan)
        plans.append(plan)
    if as_json:
        return say_json([{**p.model_dump(mode="json"), "deleted": really} for p in plans])
    for plan in plans:
        click.echo(_plan_table(plan, really))


def _plan_table(plan: Plan, really: bool) -> str:
    goes = "deleted" if really else "would go"
    rows = [["kept", *_held(h.digest, h.kind, h.tags)] for h in plan.kept]
    rows += [[goes, *_held(h.digest, h.kind, h.tags)] for h in plan.gone]
    end = "" if really or not plan.gone else "; --really deletes them"
    return "\n".join(
        [
            log.table([plan.repository, "kind", "digest", "tags"], rows),
            "",
            f"{len(plan.gone)} manifests {goes}, with {log.size(plan.freed_bytes)} of blobs that"
            f" nothing else names{end}",
        ]
    )


def _held(digest: str, kind: str, tags: tuple[str, ...]) -> list[str]:
    return [kind, digest, ", ".join(tags) or "-"]

"""Registries: open one, pull an image by digest, list tags, delete what nothing needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.app.workspace import Workspace, named_platform
from pipeline.artifacts.oci.document import Document
from pipeline.artifacts.oci.reference import Reference, parse_reference, parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.client import RegistryClient
from pipeline.artifacts.registry.pull import (
    Pulled,
    plan_pull,
    pull_layout,
    resolve,
)
from pipeline.artifacts.registry.repository import Repository
from pipeline.core import log
from pipeline.evidence.publish.gc import Plan, plan_gc, run_gc
from pipeline.evidence.publish.known import KnownRepository


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


def pull(
    place: str,
    folder: Path,
    *,
    platform: str | None = None,
    evidence: bool = False,
    most_bytes: int = 200 * 1000**3,
    access: Access | None = None,
    jobs: int = 4,
) -> Pulled:
    """Fetch an image by digest into an OCI layout folder."""
    reference = parse_reference(place)
    with open_registry(reference, access or Access()) as repository:
        # once: everything below goes by its digest, whatever happens to the tag meanwhile
        root = resolve(repository, reference)
        if not reference.digest:
            log.say(f"{reference} is {root.digest}")
        chosen = named_platform(platform)
        wanted = plan_pull(repository, root, chosen, with_evidence=evidence, most_bytes=most_bytes)
        return pull_layout(repository, wanted, folder, jobs)


def list_tags(place: str, access: Access, jobs: int = 4) -> list[tuple[str, Document]]:
    """The tags of a repository, and the images that they name."""
    with open_registry(parse_repository(place), access) as repository:
        names = repository.tags()
        manifests = repository.client.each(jobs, names, repository.manifest)
        return list(zip(names, manifests, strict=True))


def clean(
    workspace: Workspace,
    places: Sequence[str],
    patterns: Sequence[str],
    *,
    delete: bool = False,
    access: Access | None = None,
    jobs: int = 4,
) -> list[Plan]:
    """Find the manifests that no kept tag and no evidence needs; with `delete`, delete them."""
    store, plans = workspace.store(), []
    for reference in [parse_repository(place) for place in places]:
        with (
            open_registry(reference, access or Access()) as repository,
            # a publish at the same time could refer to a manifest that is about to go
            KnownRepository(store, repository).alone(),
        ):
            plan = plan_gc(store, repository, patterns, jobs)
            if delete:
                run_gc(store, repository, plan)
        plans.append(plan)
    return plans

"""Registries: publish an image and its evidence, pull by digest, list tags, clean up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.app.images import find_images, image_spec
from pipeline.app.weights import backing_of, find_set
from pipeline.app.workspace import Workspace, named_platform
from pipeline.artifacts.attest.keys import find_signer
from pipeline.artifacts.oci.document import Document
from pipeline.artifacts.oci.reference import ImageReference, parse_reference, parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.client import RegistryClient
from pipeline.artifacts.registry.pull import Pulled, plan_pull, pull_layout, resolve
from pipeline.artifacts.registry.repository import Repository
from pipeline.core import log
from pipeline.core.errors import PublishRefused, ReferenceInvalid
from pipeline.evidence.publish.attachment import file_attachment
from pipeline.evidence.publish.evidence import make_bundle
from pipeline.evidence.publish.gc import CleanPlan, plan_gc, run_gc
from pipeline.evidence.publish.known import KnownRepository
from pipeline.evidence.publish.publish import (
    ImageUpload,
    Published,
    PublishOrder,
    plan_upload,
    rehearse,
)
from pipeline.evidence.publish.publish import push_with_evidence as publish_image
from pipeline.images.gate.state import gate_state, passed_steps, require_gates
from pipeline.weights.image import SetImage, set_image
from pipeline.weights.place import LockedFolder


@contextmanager
def open_registry(reference: ImageReference, access: Access) -> Iterator[Repository]:
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
    """List a repository's tags, and the images that they name."""
    with open_registry(parse_repository(place), access) as repository:
        names = repository.tags()
        manifests = repository.client.each(jobs, names, repository.manifest)
        return list(zip(names, manifests, strict=True))


def clean_repository(
    workspace: Workspace,
    places: Sequence[str],
    patterns: Sequence[str],
    *,
    delete: bool = False,
    access: Access | None = None,
    jobs: int = 4,
) -> list[CleanPlan]:
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


# one sentence: it is signed, and every later verify shows it
_MOST_REASON = 500


def publish(
    workspace: Workspace,
    name: str,
    place: str,
    *,
    platform: str | None = None,
    index: bool = False,
    attachments: Sequence[str] = (),
    force_ungated: str | None = None,
    key_path: Path | None = None,
    spdx: bool = False,
    no_evidence: bool = False,
    dry_run: bool = False,
    access: Access | None = None,
    jobs: int = 4,
) -> Published:
    """Push a built image with its evidence, and its name last; with `dry_run`, send nothing.

    `force_ungated` is the reason to publish although gates did not pass.
    """
    reference = parse_reference(place)
    checkout, store = workspace.checkout(), workspace.store()
    spec, reason = image_spec(checkout, name), force_ungated
    if reason is not None:
        reason = " ".join(reason.split())
        if not reason or not reason.isprintable() or len(reason) > _MOST_REASON:
            raise PublishRefused(
                "--force-ungated: a reason has one to 500 printable characters",
                "It stays with the image: write why it may be published anyway.",
            )
    with store.in_use():
        built = find_images(checkout, store, name, platform)
        patched = bool(checkout.series(spec).patches)
        states = [gate_state(store, spec.on(b.platform), b, has_patches=patched) for b in built]
        require_gates(name, states, reason)
        for state in states:
            if state.state == "no gates":
                log.say(f"{name} for {state.platform} has no gates: nothing was judged")
            elif state.state == "not passed":
                log.say(f"{name} for {state.platform} is published UNGATED: {state.message}")
        # gates first: there is no need to read from disk what may not be published
        shipment = plan_upload(store, built, index=index)
        if reference.digest not in (None, shipment.root.digest):
            raise ReferenceInvalid(
                f"{reference}: the image is {shipment.root.digest}",
                "Leave the digest out, or build that image.",
            )
        chosen = [file_attachment(a, list(shipment.images)) for a in attachments]
        # as short as Docker shows an image's id
        tag = reference.tag or shipment.root.digest[7:19]
        bundle = None
        if not no_evidence:
            # even for a dry run: report an unreadable key before the real one
            signer = find_signer(key_path, os.environ)
            # stated with the image: who pulls it learns that it was forced, and why
            bad = [s for s in states if s.state == "not passed"]
            at = f"{reference.registry}/{reference.repository}:{tag}"
            # to record an image changes the store, which a dry run leaves alone
            recorder = None if dry_run else signer
            bundle = make_bundle(checkout, store, built, recorder, bad, reason or "", at, spdx=spdx)
        with open_registry(reference, access or Access()) as repository:
            order = PublishOrder(
                shipment=shipment,
                repository=repository,
                tag=tag,
                gates=states,
                proved=[passed_steps(store, *each) for each in zip(built, states, strict=True)],
                bundle=bundle,
                attachments=chosen,
                ungated_reason=reason,
                jobs=jobs,
            )
            done = rehearse(order) if dry_run else publish_image(store, order)
    if dry_run:
        return done
    if done.evidence == "left out":
        log.say(f"{name} is published without evidence, as asked")
    elif done.evidence == "none":
        log.say(f"{name} has no signed statements: it is published without evidence")
        log.say("`sm120 evidence new-key NAME` makes a key that signs them")
    elif done.evidence != "signed":
        log.say(f"no key was given: the tag of {name} is not signed (--key FILE signs it)")
    return done


def publish_set(
    workspace: Workspace,
    folder: Path,
    target: str | None = None,
    name: str | None = None,
    *,
    dry_run: bool = False,
    access: Access | None = None,
    jobs: int = 4,
) -> tuple[LockedFolder, SetImage, Published | None]:
    """Make an OCI image of a verified set, without a copy on disk; push it if `target` is set."""
    reference = parse_reference(target) if target else None
    place = find_set(workspace, folder, name)
    log.say(f"{place.lock.name}: {backing_of(workspace, place).sentence()}")
    image = set_image(place)
    if reference is None:
        return place, image, None
    root = image.root
    if reference.digest not in (None, root.digest):
        raise ReferenceInvalid(
            f"{reference}: the image is {root.digest}", "Leave the digest out, or name that set."
        )
    store = workspace.store()
    with open_registry(reference, access or Access()) as repository:
        shipment = ImageUpload(place.lock.name, image.images, root, image.blobs)
        # as short as Docker shows an image's id
        tag = reference.tag or root.digest[7:19]
        order = PublishOrder(shipment, repository, tag, gates=[], jobs=jobs)
        done = rehearse(order) if dry_run else publish_image(store, order)
    return place, image, done

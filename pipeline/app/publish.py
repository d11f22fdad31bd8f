"""Publish a built image and its evidence to a registry."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.app.images import find_images, spec_of
from pipeline.app.registry import open_registry
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.keys import find_signer
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.access import Access
from pipeline.core import log
from pipeline.core.errors import PublishRefused, ReferenceInvalid
from pipeline.evidence.publish.attachment import file_attachment
from pipeline.evidence.publish.evidence import make_bundle
from pipeline.evidence.publish.publish import Order, Published, make_shipment, rehearse
from pipeline.evidence.publish.publish import publish as publish_image
from pipeline.images.gate.state import gate_state, how_far, require_gates

# one sentence: it is signed, and every later verify shows it
_MOST_REASON = 500


@dataclass(frozen=True)
class PublishRequest:
    """An image, where it goes, and what goes with it."""

    image: str
    place: str  # REGISTRY/REPO[:TAG]
    platform: str | None = None
    index: bool = False
    attachments: tuple[str, ...] = ()
    force_ungated: str | None = None  # the reason to publish although gates did not pass
    key_path: Path | None = None
    spdx: bool = False
    no_evidence: bool = False
    dry_run: bool = False
    access: Access = field(default_factory=Access)
    jobs: int = 4


def publish(workspace: Workspace, request: PublishRequest) -> Published:
    """Push a built image with its evidence, and its name last; with `dry_run`, send nothing."""
    reference, name = parse_reference(request.place), request.image
    checkout, store = workspace.checkout(), workspace.store()
    spec, reason = spec_of(checkout, name), request.force_ungated
    if reason is not None:
        reason = " ".join(reason.split())
        if not reason or not reason.isprintable() or len(reason) > _MOST_REASON:
            raise PublishRefused(
                "--force-ungated: a reason has one to 500 printable characters",
                "It stays with the image: write why it may be published anyway.",
            )
    with store.in_use():
        built = find_images(checkout, store, name, request.platform)
        patched = bool(checkout.series(spec).patches)
        states = [gate_state(store, spec.on(b.platform), b, has_patches=patched) for b in built]
        require_gates(name, states, reason)
        for state in states:
            if state.state == "no gates":
                log.say(f"{name} for {state.platform} has no gates: nothing was judged")
            elif state.state == "not passed":
                log.say(f"{name} for {state.platform} is published UNGATED: {state.message}")
        # gates first: what may not be published need not be read from the disk
        shipment = make_shipment(store, built, index=request.index)
        if reference.digest not in (None, shipment.root.digest):
            raise ReferenceInvalid(
                f"{reference}: the image is {shipment.root.digest}",
                "Leave the digest out, or build that image.",
            )
        chosen = [file_attachment(a, list(shipment.images)) for a in request.attachments]
        # as short as Docker shows an image's id
        tag = reference.tag or shipment.root.digest[7:19]
        bundle = None
        if not request.no_evidence:
            # also for a dry run: a key that cannot be read should be known before the real one
            signer = find_signer(request.key_path, os.environ)
            # stated with the image: who pulls it learns that it was forced, and why
            bad = [s for s in states if s.state == "not passed"]
            place = f"{reference.registry}/{reference.repository}:{tag}"
            # to record an image changes the store, which a dry run leaves alone
            recorder = None if request.dry_run else signer
            bundle = make_bundle(
                checkout, store, built, recorder, bad, reason or "", place, spdx=request.spdx
            )
        with open_registry(reference, request.access) as repository:
            order = Order(
                shipment=shipment,
                repository=repository,
                tag=tag,
                gates=states,
                proved=[how_far(store, *each) for each in zip(built, states, strict=True)],
                bundle=bundle,
                attachments=chosen,
                ungated_reason=reason,
                jobs=request.jobs,
            )
            done = rehearse(order) if request.dry_run else publish_image(store, order)
    if request.dry_run:
        return done
    if done.evidence == "left out":
        log.say(f"{name} is published without evidence, as asked")
    elif done.evidence == "none":
        log.say(f"{name} has no signed statements: it is published without evidence")
        log.say("`sm120 evidence new-key NAME` makes a key that signs them")
    elif done.evidence != "signed":
        log.say(f"no key was given: the tag of {name} is not signed (--key FILE signs it)")
    return done

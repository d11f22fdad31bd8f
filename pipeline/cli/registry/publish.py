"""`sm120 publish`: a built image and its evidence into a registry."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipeline import log
from pipeline.attest.keys import find_signer
from pipeline.attest.names import kind_of
from pipeline.cli.context import checkout_of, say_json, store_of
from pipeline.cli.images import find_images, spec_of
from pipeline.cli.options import json_option, key_option, platform_option, registry_options
from pipeline.cli.registry.look import open_registry
from pipeline.errors import PublishRefused, ReferenceInvalid
from pipeline.oci.reference import parse_reference
from pipeline.publish.attachment import file_attachment
from pipeline.publish.evidence import make_bundle
from pipeline.publish.gates import GateState, gate_state, how_far, require_gates
from pipeline.publish.publish import Order, Published, make_shipment, rehearse
from pipeline.publish.publish import publish as publish_image
from pipeline.registry.access import Access

# one sentence: it is signed, and every later verify shows it
_MOST_REASON = 500


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("place", metavar="REGISTRY/REPO[:TAG]")
@platform_option
@click.option("--index", is_flag=True, help="Make an image index even for a single platform.")
@click.option(
    "--attach",
    "attachments",
    metavar="[PLATFORM=]FILE:TYPE",
    multiple=True,
    help="Attach a file to the image, or to one platform of it. Repeatable.",
)
@click.option(
    "--force-ungated",
    metavar="REASON",
    help="Publish although gates did not pass; the reason stays with the image.",
)
@key_option
@click.option("--spdx", is_flag=True, help="Add the bill of materials as SPDX 2.3.")
@click.option("--no-evidence", is_flag=True, help="Attach no statements and sign nothing.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent and send nothing.")
@registry_options
@json_option
@click.pass_context
def publish(
    context: click.Context,
    name: str,
    place: str,
    platform: str | None,
    index: bool,
    attachments: tuple[str, ...],
    force_ungated: str | None,
    key_path: Path | None,
    spdx: bool,
    no_evidence: bool,
    dry_run: bool,
    access: Access,
    jobs: int,
    as_json: bool,
) -> None:
    """Push a built image to a registry: the bytes in the store, never a rebuild.

    Without --platform, every platform that was built; one that never was is named and left out.
    Only what the registry lacks is sent, and the tag is written last. Without TAG, the first
    twelve characters of the digest are the tag. After an interruption, run it again: it continues.

    Signed statements are attached, also where cosign looks for them. With a key, the image is
    recorded and signed first, and so is the fact that this name belongs to this digest.
    """
    reference = parse_reference(place)
    checkout, store = checkout_of(context), store_of(context)
    spec, reason = spec_of(checkout, name), _reason(force_ungated)
    with store.in_use():
        built = find_images(checkout, store, name, platform)
        patched = bool(checkout.series(spec).patches)
        states = [gate_state(store, spec.on(b.platform), b, has_patches=patched) for b in built]
        require_gates(name, states, reason)
        _say_gates(name, states)
        # gates first: what may not be published need not be read from the disk
        shipment = make_shipment(store, built, index=index)
        if reference.digest not in (None, shipment.root.digest):
            raise ReferenceInvalid(
                f"{reference}: the image is {shipment.root.digest}",
                "Leave the digest out, or build that image.",
            )
        chosen = [file_attachment(a, list(shipment.images)) for a in attachments]
        # as short as Docker shows an image's id
        tag = reference.tag or shipment.root.digest[7:19]
        # also for a dry run: a key that cannot be read should be known before the real one
        signer = find_signer(key_path, os.environ) if not no_evidence else None
        bundle = None
        if not no_evidence:
            # stated with the image: who pulls it learns that it was forced, and why
            bad = [s for s in states if s.state == "not passed"]
            place = f"{reference.registry}/{reference.repository}:{tag}"
            # to record an image changes the store, which a dry run leaves alone
            recorder = None if dry_run else signer
            bundle = make_bundle(
                checkout, store, built, recorder, bad, reason or "", place, spdx=spdx
            )
        with open_registry(reference, access) as repository:
            order = Order(
                shipment=shipment,
                repository=repository,
                tag=tag,
                gates=states,
                proved=[how_far(store, *each) for each in zip(built, states, strict=True)],
                bundle=bundle,
                attachments=chosen,
                ungated_reason=reason,
                jobs=jobs,
            )
            done = rehearse(order) if dry_run else publish_image(store, order)
    if not dry_run:
        _say_evidence(name, done)
    if as_json:
        return say_json(done.model_dump(mode="json"))
    click.echo(_shown(done))


def _reason(given: str | None) -> str | None:
    if given is None:
        return None
    reason = " ".join(given.split())
    if not reason or not reason.isprintable() or len(reason) > _MOST_REASON:
        raise PublishRefused(
            "--force-ungated: a reason has one to 500 printable characters",
            "It stays with the image: write why it may be published anyway.",
        )
    return reason


def _say_gates(name: str, states: list[GateState]) -> None:
    for state in states:
        if state.state == "no gates":
            log.say(f"{name} for {state.platform} has no gates: nothing was judged")
        elif state.state == "not passed":
            log.say(f"{name} for {state.platform} is published UNGATED: {state.message}")


def _say_evidence(name: str, done: Published) -> None:
    if done.evidence == "left out":
        log.say(f"{name} is published without evidence, as asked")
    elif done.evidence == "none":
        log.say(f"{name} has no signed statements: it is published without evidence")
        log.say("`sm120 evidence new-key NAME` makes a key that signs them")
    elif done.evidence != "signed":
        log.say(f"no key was given: the tag of {name} is not signed (--key FILE signs it)")


def _shown(done: Published) -> str:
    rows = [[platform, digest] for platform, digest in done.platforms.items()]
    # a single platform without --index is its own root
    if done.digest not in done.platforms.values():
        rows.append(["index", done.digest])
    counts = f"{done.blobs['sent']} sent, {done.blobs['mounted']} mounted"
    verb = "would be sent" if done.dry_run else f"sent in {log.seconds(done.seconds)}"
    lines = [
        log.table(["platform", "digest"], rows),
        "",
        *(f"proved for {proof.sentence()}" for proof in done.proved),
        f"{log.size(done.sent_bytes)} of {log.size(done.total_bytes)} {verb}"
        f" ({counts}, {done.blobs['there']} were there)",
    ]
    for a in done.attached:
        what = f"statement {kind_of(a.predicate_type)}" if a.predicate_type else a.artifact_type
        lines.append(f"attached {what}: {a.digest} ({a.found_by})")
    if done.attached:
        lines.append(f"{log.size(done.attached_bytes)} of evidence sent")
    place = done.reference.partition("@")[0]
    lines.append(f"{place}:{done.tag} is {done.digest}" if not done.dry_run else "nothing was sent")
    return "\n".join(lines)

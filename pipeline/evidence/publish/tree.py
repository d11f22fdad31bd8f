"""A compiled tree as an artifact of a registry: its layer, and a signed statement about it.

The tag has the first characters of the tree's key, so that a build finds the layer without asking
for a list. A tag proves nothing: the statement names the layer and all that it was compiled from.
"""

from __future__ import annotations

import re
from typing import Any

from pipeline.artifacts.attest.envelope import SUFFIX, sign_or_countersign
from pipeline.artifacts.attest.keys import Signer
from pipeline.artifacts.attest.names import COMPILED_TREE, tree_urn
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.oci.document import GZIP_LAYER, TITLE, Descriptor
from pipeline.artifacts.oci.record import LayerRecord, TitledLayer
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.registry.upload import LocalBlob
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import GoldenMismatch, PublishRefused
from pipeline.core.model import Frozen
from pipeline.evidence.publish.attachment import EMPTY, Attachment, described
from pipeline.evidence.publish.evidence import EvidenceBundle, statements_of
from pipeline.evidence.publish.publish import ImageUpload, PublishOrder
from pipeline.evidence.statements.inventory import tree_record
from pipeline.images.assemble.golden import Golden
from pipeline.images.assemble.plan import TreePlan
from pipeline.images.source.compiled import (
    CompiledTree,
    compiled_layer,
    require_decided,
    tree_path,
)

TREE_MEDIA = "application/vnd.sm120.tree.v1"


class TreeStatement(Frozen):
    """The signed claims about a compiled tree."""

    tree: CompiledTree
    record: LayerRecord
    inputs: dict[str, Any]  # whose digest is the key


def tree_tag(plan: TreePlan) -> str:
    """The tag of a tree's layer."""
    # a name may hold a plus sign, a tag may not
    name = re.sub(r"[^a-z0-9_.-]", "_", f"{plan.source.name}-{plan.name}")[:80]
    return f"{name}-{plan.platform.partition('/')[2]}-{plan.key[7:19]}"


def golden_objection(golden: Golden, plan: TreePlan, tree: CompiledTree) -> str:
    """Why a tree cannot be the one behind the committed digests; empty where nothing is known."""
    for label, image in golden.images.items():
        want = image.layers.get(plan.title)
        if plan.key in image.inputs.get("compiled", ()) and want not in (None, tree.layer):
            return f"the layer is {tree.layer}, and the golden digest of {label} has {want}"
    toolchain = plan.toolchain
    known = golden.images.get(f"{toolchain.spec.name}.{toolchain.architecture}")
    if known and known.inputs == toolchain.inputs and known.digest != tree.toolchain:
        return f"it was compiled in {tree.toolchain}, and the golden toolchain is {known.digest}"
    return ""


def order_tree(
    store: Store,
    repository: Repository,
    plan: TreePlan,
    golden: Golden,
    signer: Signer,
    *,
    dry_run: bool = False,
) -> PublishOrder:
    """All that publishing a compiled tree sends; the statement is signed unless nothing is sent."""
    record = compiled_layer(store, plan)
    tree = tree_record(store, plan, TitledLayer(title=plan.title, record=record))
    if tree.taken:
        raise PublishRefused(
            f"{plan.title} was compiled on another machine, by a statement that"
            f" {', '.join(tree.taken.signed_by)} signed",
            "Publish it from there. `oras cp -r` copies it to another registry as it was signed.",
        )
    require_decided(store, golden, plan)
    if objection := golden_objection(golden, plan, tree):
        raise GoldenMismatch(f"{plan.title}: {objection}", "Nothing was sent: nobody could use it.")
    layer = Descriptor(
        media_type=GZIP_LAYER,
        digest=record.digest,
        size_bytes=record.size_bytes,
        annotations={TITLE: plan.title},
    )
    # the same for the same tree, on every machine
    notes = {TITLE: plan.title, "sm120.tree": plan.key}
    artifact = Attachment(artifact_type=TREE_MEDIA, layers=(), kept=(layer,), annotations=notes)
    manifest = artifact.manifest()
    attachments = []
    if not dry_run:
        stated = TreeStatement(
            tree=tree.model_copy(update={"version": plain(tree.version)}),
            record=record,
            inputs=plan.inputs,
        )
        body = stated.model_dump(mode="json", exclude_none=True)
        name = tree_urn(plan.source.name, plan.name)
        statement = make_statement(name, record.digest, COMPILED_TREE, body, moment())
        # kept, so that publishing again sends the same bytes
        path = tree_path(store, plan.key).with_suffix(SUFFIX)
        envelope = sign_or_countersign(path, statement, [signer])
        store.write(path, envelope.dump())
        attachments = statements_of(EvidenceBundle({plan.platform: [envelope]}))
    blobs = (
        LocalBlob(record.digest, record.size_bytes, store.blob_path(record.digest), part="layer"),
        LocalBlob(described(EMPTY).digest, len(EMPTY.data), data=EMPTY.data),
    )
    return PublishOrder(
        shipment=ImageUpload(plan.title, {plan.platform: manifest}, manifest, blobs),
        repository=repository,
        tag=tree_tag(plan),
        gates=[],
        attachments=attachments,
    )

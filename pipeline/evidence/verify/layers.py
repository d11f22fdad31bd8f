"""A compiled layer in a registry: found by its tree's tag, believed by its signed statement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pipeline.artifacts.attest.envelope import Envelope
from pipeline.artifacts.attest.names import COMPILED_TREE
from pipeline.artifacts.attest.statement import RECORDED
from pipeline.artifacts.attest.strict import as_model
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.oci.document import Descriptor
from pipeline.artifacts.oci.record import LayerRecord
from pipeline.artifacts.registry.pull import receive_blob
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import LayerRefused, RecordInvalid
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.publish.tree import TreeStatement, golden_objection, tree_tag
from pipeline.evidence.verify.remote import RemoteImage, attached_to
from pipeline.evidence.verify.signature import judge_signatures
from pipeline.evidence.verify.verdict import Code
from pipeline.images.assemble.golden import Golden
from pipeline.images.assemble.plan import TreePlan
from pipeline.images.source.compiled import CompiledTree, TakenLayer, keep_taken

_TRUST = "`sm120 evidence trust-key FILE.pub` trusts a key; without --layers-from it is compiled."


@dataclass(frozen=True)
class OfferedLayer:
    """The layer of a tree in a registry, as a trusted key states it; its bytes are still unread."""

    repository: Repository
    record: LayerRecord
    tree: CompiledTree
    signed_by: tuple[str, ...]  # the keys' names in the trust file

    @property
    def blob(self) -> Descriptor:
        record = self.record
        return Descriptor(
            media_type=record.media_type, digest=record.digest, size_bytes=record.size_bytes
        )


def find_layer(
    repository: Repository, plan: TreePlan, golden: Golden, trust: Trust | None, now: datetime
) -> OfferedLayer | None:
    """The layer that a repository offers for a tree, if it has one; a trusted key must have signed.

    Whoever may push can attach anything, so one good statement is enough; none is an error.
    """
    tag = tree_tag(plan)
    document = repository.find_manifest(tag)
    if document is None:
        return None
    place = f"{repository}:{tag}"
    if document.kind != "manifest" or len(document.layers) != 1:
        raise LayerRefused(f"{place}: is not the layer of a compiled tree")
    remote = RemoteImage(repository, document, (document,), tag, document.digest)
    problems: list[str] = []
    is_strange = False
    for item in attached_to(remote, document, jobs=1).items:
        if item.envelope is None:
            problems.append(item.error)
            continue
        node, keys = judge_signatures(item.envelope, trust, now)
        is_strange |= node.code in (Code.STRANGER, Code.UNJUDGED_SIGNER)
        try:
            # nothing in a statement counts before its signature
            if not keys:
                raise LayerRefused(node.message)
            stated = _read(item.envelope, plan, golden, document.layers[0])
        except (LayerRefused, RecordInvalid) as error:
            problems.append(str(error))
            continue
        payload = sha256_of(item.envelope.payload)
        taken = TakenLayer(statement=payload, signed_by=[key.id for key in keys])
        tree = stated.tree.model_copy(update={"taken": taken})
        return OfferedLayer(repository, stated.record, tree, tuple(key.name for key in keys))
    why = "; ".join(dict.fromkeys(problems)) or "nobody signed it"
    raise LayerRefused(f"{place}: {why}", _TRUST if is_strange else "")


def _read(envelope: Envelope, plan: TreePlan, golden: Golden, layer: Descriptor) -> TreeStatement:
    """A statement about this layer, and about the very tree that the checkout asks for."""
    statement = envelope.statement
    if statement.predicate_type != COMPILED_TREE:
        raise LayerRefused("its statement is not about a compiled tree")
    body = {k: v for k, v in statement.predicate.items() if k != RECORDED}
    stated = as_model(TreeStatement, body, "its statement", "the predicate")
    tree, record = stated.tree, stated.record
    if not statement.is_about(record.digest) or tree.layer != record.digest:
        raise LayerRefused("its statement names two different layers")
    if (layer.digest, layer.size_bytes) != (record.digest, record.size_bytes):
        raise LayerRefused(f"the tag names {layer.digest}, and {record.digest} was signed")
    # by bytes: the signed inputs went through JSON
    want = {name: canonical_json(value) for name, value in plan.inputs.items()}
    got = {name: canonical_json(value) for name, value in stated.inputs.items()}
    if moved := sorted(k for k in {**want, **got} if want.get(k) != got.get(k)):
        raise LayerRefused(f"was signed for another tree: {', '.join(moved)} differ")
    names = (tree.key, tree.source, tree.build, tree.platform)
    if names != (plan.key, plan.source.name, plan.name, plan.platform):
        raise LayerRefused(f"was signed as {tree.source} ({tree.build}) for {tree.platform}")
    if tree.taken:
        raise LayerRefused("its signer did not compile it")
    if objection := golden_objection(golden, plan, tree):
        raise LayerRefused(objection)
    return stated


def take_layer(store: Store, plan: TreePlan, offered: OfferedLayer) -> LayerRecord:
    """Fetch an offered layer, and keep it as if it had been compiled in this store."""
    record, repository = offered.record, offered.repository
    with store.locked(f"tree-{plan.key.removeprefix('sha256:')}"):
        if known := store.layer(plan.key):
            return known
        # the blob, its files, and the blob that they give again
        store.need_space(2 * record.size_bytes + record.unpacked_bytes)
        partial = store.partial_path(record.digest.removeprefix("sha256:"))
        with (
            log.step(f"Fetching {plan.title}, {log.size(record.size_bytes)}, from {repository}"),
            log.progress("fetched", record.size_bytes) as bar,
        ):
            receive_blob(repository, offered.blob, partial, bar)
        try:
            return keep_taken(store, plan, partial, record, offered.tree)
        finally:
            partial.unlink(missing_ok=True)

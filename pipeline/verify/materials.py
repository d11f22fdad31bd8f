"""From an image's provenance to every byte behind it: layers, spec, locks, packages, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from pipeline import log
from pipeline.assemble.golden import read_golden
from pipeline.attest.strict import plain
from pipeline.attest.trust import Trust
from pipeline.errors import LockEdited, LockMissing, PipelineError
from pipeline.evidence.provenance import Provenance, Resource, SpecMaterial
from pipeline.lock.model import BasePin, ImageLock, read_lock
from pipeline.model import sha256_of, stays_below
from pipeline.oci.document import TITLE
from pipeline.spec.base import ForeignBase, parse_foreign
from pipeline.spec.checkout import Checkout
from pipeline.verify.artifact import Artifact
from pipeline.verify.pinned import judge_pin
from pipeline.verify.trees import judge_trees
from pipeline.verify.verdict import Node, Verdict

# What only a checkout can tell of an image.
_IN_A_CHECKOUT = "spec, locks, golden digest, every package and patches"


def judge_materials(
    provenance: Provenance,
    artifact: Artifact,
    checkout: Checkout | None,
    trust: Trust | None = None,
) -> tuple[Node, ...]:
    """Every claim of the provenance against what is really there."""
    nodes = [
        _layers(provenance, artifact),
        _annotations(provenance, artifact),
        _builder(provenance),
    ]
    if checkout is None:
        # a trust file can accept a base also where nothing else can be compared
        nodes += judge_base(provenance, {}, artifact, trust)
        nodes += judge_trees(provenance, artifact, None)
        # signed by a key that is trusted: a checkout would compare it with more, but adds no trust
        message = f"as stated; in a checkout of this image {_IN_A_CHECKOUT} are compared, too"
        return (*nodes, Node("materials", message=message))
    platform = provenance.definition.external.platform
    locks = {name: _lock(checkout, name, platform) for name in provenance.locks}
    nodes += [
        _spec(provenance, checkout),
        _locks(provenance, locks),
        _golden(provenance, artifact, checkout),
    ]
    nodes += judge_base(provenance, locks, artifact, trust)
    nodes += [
        _packages("wheel", provenance.packages("pypi"), provenance, locks, artifact),
        _packages("Debian package", provenance.packages("deb"), provenance, locks, artifact),
        _omitted(provenance, locks),
        _files(provenance, checkout),
    ]
    nodes += judge_trees(provenance, artifact, checkout)
    return tuple(nodes)


def _layers(provenance: Provenance, artifact: Artifact) -> Node:
    """The artifact's layers are those that were recorded, in order, no more and no less."""
    recorded = [f"sha256:{x.sha256}" for x in provenance.layers]
    present = list(artifact.layers or ())
    if not artifact.is_image:
        return Node("layers", Verdict.BROKEN, "the provenance is of an image, but this is a file")
    # the first difference is named: it says more than `the lists differ`
    for digest in present:
        if digest not in recorded:
            return Node(
                "layers", Verdict.BROKEN, f"{digest} is in the image, but not in its provenance"
            )
    for digest in recorded:
        if digest not in present:
            return Node(
                "layers", Verdict.BROKEN, f"{digest} is recorded, but missing from the image"
            )
    if recorded != present:
        return Node("layers", Verdict.BROKEN, "recorded in another order")
    # one blob has one diffID, but the config could claim another
    diff_ids = [x.annotations.get("diffId") for x in provenance.layers]
    if diff_ids != list(artifact.diff_ids):
        return Node("layers", Verdict.BROKEN, "their diffIDs are not those that were recorded")
    for base in provenance.base_layers:
        if f"sha256:{base.sha256}" not in present:
            return Node("layers", Verdict.BROKEN, f"the base layer {base.name!r} is not in it")
    message = f"{len(present)}, of which {len(provenance.base_layers)} of its base"
    return Node("layers", message=message)


def _annotations(provenance: Provenance, artifact: Artifact) -> Node:
    """The manifest's annotations, which are part of its digest, are those that were recorded."""
    external = provenance.definition.external
    wanted = {
        TITLE: external.image,
        # written by the builder, so a provenance of other inputs cannot be attached
        "sm120.lock": provenance.locks.get(external.image, ""),
        "sm120.format": str(provenance.definition.internal.format),
    }
    for name, value in wanted.items():
        if (got := artifact.annotations.get(name)) != value:
            message = f"{name} is {got}, but {value} was recorded"
            return Node("manifest's annotations", Verdict.BROKEN, message)
    return Node("manifest's annotations", message="the same image, lock and format")


def _builder(provenance: Provenance) -> Node:
    """The builder that it claims; only a rebuild proves that the same comes out again."""
    versions = ", ".join(
        f"{name} {v}" for name, v in sorted(provenance.run.builder.version.items())
    )
    code = provenance.definition.internal.builder_code
    return Node(
        "builder", message=plain(f"{provenance.run.builder.id}, {versions}, code {code[:19]}…")
    )


def _spec(provenance: Provenance, checkout: Checkout) -> Node:
    nodes = []
    platform = provenance.definition.external.platform
    for name, material in provenance.definition.external.images.items():
        nodes.append(_one_spec(name, material, checkout, platform))
    return Node("spec", children=tuple(nodes), is_folded=True)


def _one_spec(name: str, material: SpecMaterial, checkout: Checkout, platform: str) -> Node:
    # compared as values, not as text: a comment changes nothing
    title = f"images/{name}/image.yaml"
    try:
        spec = checkout.spec(name).on(platform)
        after = spec.dumped()
        series = checkout.series(spec).model_dump(mode="json")
    except PipelineError as error:
        return Node(title, Verdict.INCOMPLETE, str(error))
    # stale, not broken: a checkout moves on while an image stays as it was signed
    if material.series != series:
        return Node(title, Verdict.STALE, "series.yaml has changed since")
    before = material.spec
    moved = [k for k in {**before, **after} if before.get(k) != after.get(k)]
    if moved:
        return Node(title, Verdict.STALE, f"has changed since: {', '.join(sorted(moved))}")
    return Node(title)


def _lock(checkout: Checkout, name: str, platform: str) -> ImageLock | str:
    """The lock as it is now, or why there is none."""
    try:
        return read_lock(checkout.lock_path(name, platform))
    except (LockMissing, LockEdited) as error:
        return str(error)


def _locks(provenance: Provenance, locks: dict[str, ImageLock | str]) -> Node:
    nodes = []
    wanted = provenance.definition.external.images.keys()
    # without its lock an image's packages could not be missed
    for name in sorted(wanted - provenance.locks.keys()):
        nodes.append(Node(name, Verdict.BROKEN, "the provenance names no lock for it"))
    for name, seal in provenance.locks.items():
        lock = locks[name]
        if isinstance(lock, str):
            nodes.append(Node(name, Verdict.INCOMPLETE, lock))
        elif lock.seal != seal:
            nodes.append(Node(name, Verdict.STALE, f"was {seal[:19]}…, is {lock.seal[:19]}…"))
        else:
            nodes.append(Node(name))
    return Node("locks", children=tuple(nodes), is_folded=True)


def _golden(provenance: Provenance, artifact: Artifact, checkout: Checkout) -> Node:
    title = "golden digest"
    external, recorded = provenance.definition.external, provenance.golden
    # as golden.yaml names images
    label = f"{external.image}.{external.platform.partition('/')[2]}"
    try:
        now = read_golden(checkout.golden_path).images.get(label)
    except PipelineError as error:
        return Node(title, Verdict.INCOMPLETE, str(error))
    if recorded is None or recorded.digest is None:
        why = recorded.annotations.get("unknown") if recorded else None
        return Node(title, Verdict.INCOMPLETE, str(why or "was not recorded"))
    if now is None:
        return Node(title, Verdict.INCOMPLETE, f"none is committed for {label}")
    if now.digest != artifact.digest:
        return Node(title, Verdict.STALE, f"is {now.digest} now")
    if f"sha256:{recorded.sha256}" != artifact.digest:
        return Node(title, Verdict.STALE, f"was sha256:{recorded.sha256} when it was recorded")
    return Node(title)


def _packages(
    title: str,
    resources: Sequence[Resource],
    provenance: Provenance,
    locks: dict[str, ImageLock | str],
    artifact: Artifact,
) -> Node:
    nodes = tuple(_package(x, provenance, locks, artifact) for x in resources)
    good = all(node.verdict is Verdict.VALID for node in nodes)
    is_compared = all(not isinstance(lock, str) for lock in locks.values())
    message = "locked, and in a layer of this image" if good and nodes and is_compared else ""
    return Node(log.count(len(nodes), title), message=message, children=nodes, is_folded=True)


def _package(
    resource: Resource,
    provenance: Provenance,
    locks: dict[str, ImageLock | str],
    artifact: Artifact,
) -> Node:
    image = str(resource.annotations.get("image"))
    # the annotation only names it: the seal in the provenance decides which lock counts
    lock = locks.get(image)
    if lock is None:
        return Node(
            resource.name,
            Verdict.BROKEN,
            f"belongs to {image}, which has no lock in the provenance",
        )
    if resource.annotations.get("layer") not in (artifact.layers or ()):
        return Node(resource.name, Verdict.BROKEN, "is in a layer that this image does not have")
    if isinstance(lock, str):
        # said once, where locks are judged
        return Node(resource.name, message="not compared: its lock is missing")
    # compared by hash first: names and versions are checked by `judge_pin`
    pin = next((p for p in lock.pins if p.sha256 == resource.sha256), None)
    if pin is not None:
        return judge_pin(resource, pin, resource.uri)
    # the very lock that was used: so no later change of it explains the difference
    if lock.seal == provenance.locks[image]:
        return Node(resource.name, Verdict.BROKEN, "is not in the lock that the provenance names")
    return Node(resource.name, Verdict.STALE, "is no longer locked")


def _omitted(provenance: Provenance, locks: dict[str, ImageLock | str]) -> Node:
    """What is locked and missing from the provenance was left out by somebody."""
    recorded = {x.sha256 for x in (*provenance.packages("pypi"), *provenance.packages("deb"))}
    nodes = [
        Node(pin.file, Verdict.BROKEN, "is locked, but missing from the provenance")
        for name, lock in locks.items()
        # a newer lock may list more than was built
        if not isinstance(lock, str) and lock.seal == provenance.locks[name]
        for pin in lock.pins
        if pin.sha256 not in recorded
    ]
    return Node("nothing left out" if not nodes else "left out", children=tuple(nodes))


def _files(provenance: Provenance, checkout: Checkout) -> Node:
    nodes = tuple(_file(x, checkout) for x in provenance.files)
    patches = sum(x.annotations.get("kind") == "patch" for x in provenance.files)
    title = (
        f"{log.count(patches, 'patch', 'patches')},"
        f" {log.count(len(nodes) - patches, 'file')} of the checkout"
    )
    return Node(title, children=nodes, is_folded=True)


def _file(resource: Resource, checkout: Checkout) -> Node:
    path = unquote(resource.uri.removeprefix("urn:sm120-pipeline:checkout:"))
    try:
        stays_below(path)
    except ValueError:
        return Node(resource.name, Verdict.BROKEN, "its path leads out of the checkout")
    # a link in the checkout could lead to a file outside
    place = checkout.root / path
    if not place.is_file() or not place.resolve().is_relative_to(checkout.root.resolve()):
        return Node(path, Verdict.STALE, "is missing from this checkout")
    if sha256_of(place.read_bytes()) != f"sha256:{resource.sha256}":
        return Node(path, Verdict.STALE, "has changed since")
    return Node(path)


def judge_base(
    provenance: Provenance,
    locks: Mapping[str, ImageLock | str],
    artifact: Artifact,
    trust: Trust | None,
) -> list[Node]:
    """Nothing for images on a root of our own; else the foreign base, as far as it is known."""
    specified = _specified(provenance)
    recorded = provenance.bases
    if not specified and not recorded:
        return []
    # a chain has one root, so at most one foreign base
    if len(specified) != 1 or len(recorded) != 1:
        message = f"{len(specified)} in the specs, {len(recorded)} recorded"
        return [Node("base image", Verdict.BROKEN, message)]
    [(image, spec)], [resource] = specified.items(), recorded
    title = f"base image {spec.repository}@sha256:{resource.sha256}"
    if problem := _contradiction(resource, image, spec, artifact):
        return [Node(title, Verdict.BROKEN, problem)]
    count = len(resource.annotations["layers"])
    children = (_locked(resource, image, provenance, locks), _contents(resource, trust))
    return [Node(title, message=f"its {count} layers at the bottom, unchanged", children=children)]


def _specified(provenance: Provenance) -> dict[str, ForeignBase]:
    bases = {
        name: parse_foreign(str(each.spec.get("base") or ""))
        for name, each in provenance.definition.external.images.items()
    }
    return {name: base for name, base in bases.items() if base}


def _contradiction(resource: Resource, image: str, spec: ForeignBase, artifact: Artifact) -> str:
    annotations = resource.annotations
    if resource.name != spec.repository or annotations.get("image") != image:
        return f"is recorded as {resource.name} of {annotations.get('image')}"
    # a spec may name the index of platforms or the manifest of one
    if spec.digest not in (f"sha256:{resource.sha256}", annotations.get("index")):
        return f"the spec names {spec.digest}"
    layers, present = annotations.get("layers"), list(artifact.layers or ())
    # an empty list would be at the bottom of any image
    if not isinstance(layers, list) or not layers or present[: len(layers)] != layers:
        return "its layers are not at the bottom of this image"
    return ""


def _locked(
    resource: Resource, image: str, provenance: Provenance, locks: Mapping[str, ImageLock | str]
) -> Node:
    title = "locked"
    if not locks:
        return Node(title, message="as stated; a checkout of this image has the lock to compare")
    lock = locks.get(image, "there is no lock to compare it with")
    if isinstance(lock, str):
        return Node(title, Verdict.INCOMPLETE, lock)
    if lock.base_image is not None and _recorded_base(resource) == _locked_base(lock.base_image):
        return Node(title)
    if lock.seal == provenance.locks.get(image):
        return Node(title, Verdict.BROKEN, "differs from the lock that the provenance names")
    return Node(title, Verdict.STALE, "another base is locked now")


def _recorded_base(resource: Resource) -> list[object]:
    annotations = resource.annotations
    return [f"sha256:{resource.sha256}", annotations.get("config"), annotations.get("layers")]


def _locked_base(pin: BasePin) -> list[object]:
    return [pin.manifest.digest, pin.config.digest, [layer.digest for layer in pin.layers]]


def _contents(resource: Resource, trust: Trust | None) -> Node:
    title = "contents"
    # either may be accepted, as either may be named in a spec
    digests = (f"sha256:{resource.sha256}", str(resource.annotations.get("index")))
    reasons = [trust.bases[d] for d in digests if trust and d in trust.bases]
    if reasons:
        return Node(title, message=f"accepted as published: {reasons[0]}")
    message = "unknown; a trust file can accept this digest under `bases`"
    return Node(title, Verdict.INCOMPLETE, message)

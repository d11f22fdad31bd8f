"""From an image's provenance to every byte it was made of: layers, spec, locks, packages, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.oci.document import TITLE
from pipeline.core import log
from pipeline.core.errors import LockEdited, LockMissing, PipelineError
from pipeline.core.model import sha256_of, stays_below
from pipeline.evidence.statements.provenance import Provenance, Resource
from pipeline.evidence.verify.artifact import Artifact
from pipeline.evidence.verify.trees import judge_pin, judge_trees
from pipeline.evidence.verify.verdict import Node, Verdict, broken, incomplete, stale
from pipeline.images.assemble.golden import read_golden
from pipeline.images.lock.model import ImageLock, read_lock
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import parse_foreign

# What only a checkout can tell of an image.
_IN_A_CHECKOUT = "spec, locks, golden digest, every package and patches"
# The lock of each image as it is now, or why there is none.
_Locks = Mapping[str, ImageLock | str]


def judge_materials(
    made: Provenance, artifact: Artifact, checkout: Checkout | None, trust: Trust | None = None
) -> tuple[Node, ...]:
    """Compares every claim of the provenance with the image and the checkout."""
    # only a rebuild proves that the builder which it claims gives the same again
    run, code = made.run.builder, made.definition.internal.builder_code
    versions = ", ".join(f"{name} {v}" for name, v in sorted(run.version.items()))
    builder = Node("builder", message=plain(f"{run.id}, {versions}, code {code[:19]}…"))
    nodes = [_layers(made, artifact), _annotations(made, artifact), builder]
    if checkout is None:
        # a trust file can accept a base also where nothing else can be compared
        nodes += [*_base(made, {}, artifact, trust), *judge_trees(made, artifact, None)]
        # signed by a key that is trusted: a checkout would compare it with more, but adds no trust
        message = f"as stated; in a checkout of this image {_IN_A_CHECKOUT} are compared, too"
        return (*nodes, Node("materials", message=message))
    external, specs = made.definition.external, []
    for name, material in external.images.items():
        title = f"images/{name}/image.yaml"
        try:
            spec = checkout.spec(name).on(external.platform)
            # compared as values, not as text: a comment changes nothing
            before, after = material.spec, spec.dumped()
            series = checkout.series(spec).model_dump(mode="json")
        except PipelineError as error:
            specs.append(incomplete(title, str(error)))
            continue
        # stale, not broken: a checkout moves on while an image stays as it was signed
        moved = sorted(k for k in {**before, **after} if before.get(k) != after.get(k))
        if material.series != series:
            specs.append(stale(title, "series.yaml has changed since"))
        elif moved:
            specs.append(stale(title, f"has changed since: {', '.join(moved)}"))
        else:
            specs.append(Node(title))
    nodes.append(Node("spec", children=tuple(specs), is_folded=True))
    locks: dict[str, ImageLock | str] = {}
    for name in made.locks:
        try:
            locks[name] = read_lock(checkout.lock_path(name, external.platform))
        except (LockMissing, LockEdited) as error:
            locks[name] = str(error)
    nodes += [_sealed(made, locks), _golden(made, artifact, checkout)]
    nodes += _base(made, locks, artifact, trust)
    recorded = {x.sha256 for x in (*made.packages("pypi"), *made.packages("deb"))}
    own = external.images.get(external.image)
    slim = own.spec.get("slim") if own else None
    # by the spec of the image itself, which is compared with the checkout's above
    lists = [slim.get(field) for field in ("debs", "wheels")] if isinstance(slim, dict) else []
    left_out = {str(name) for listed in lists if isinstance(listed, list) for name in listed}
    omitted = tuple(
        broken(
            pin.file,
            "`slim` leaves it out, but the provenance has it"
            if pin.name in left_out
            else "is locked, but missing from the provenance",
        )
        for name, lock in locks.items()
        # a newer lock may list more than was built
        if not isinstance(lock, str) and lock.seal == made.locks[name]
        for pin in lock.pins
        if (pin.sha256 in recorded) == (pin.name in left_out)
    )
    nodes += [
        _packages("wheel", made.packages("pypi"), made, locks, artifact),
        _packages("Debian package", made.packages("deb"), made, locks, artifact),
        Node(
            "left out" if omitted or left_out else "nothing left out",
            message=f"{log.count(len(left_out), 'package')}, as its spec says" if left_out else "",
            children=omitted,
        ),
        _files(made, checkout),
    ]
    return (*nodes, *judge_trees(made, artifact, checkout))


def _layers(made: Provenance, artifact: Artifact) -> Node:
    """The artifact's layers are those that were recorded, in order, no more and no less."""
    title, recorded = "layers", [f"sha256:{x.sha256}" for x in made.layers]
    present = list(artifact.layers or ())
    if not artifact.is_image:
        return broken(title, "the provenance is of an image, but this is a file")
    # the first difference is named: it says more than `the lists differ`
    for digest in present:
        if digest not in recorded:
            return broken(title, f"{digest} is in the image, but not in its provenance")
    for digest in recorded:
        if digest not in present:
            return broken(title, f"{digest} is recorded, but missing from the image")
    if recorded != present:
        return broken(title, "recorded in another order")
    # one blob has one diffID, but the config could claim another
    if [x.annotations.get("diffId") for x in made.layers] != list(artifact.diff_ids):
        return broken(title, "their diffIDs are not those that were recorded")
    for base in made.base_layers:
        if f"sha256:{base.sha256}" not in present:
            return broken(title, f"the base layer {base.name!r} is not in it")
    return Node(title, message=f"{len(present)}, of which {len(made.base_layers)} of its base")


def _annotations(made: Provenance, artifact: Artifact) -> Node:
    """The manifest's annotations, which are part of its digest, are those that were recorded."""
    title, external = "manifest's annotations", made.definition.external
    wanted = {
        TITLE: external.image,
        # written by the builder, so a provenance of other inputs cannot be attached
        "sm120.lock": made.locks.get(external.image, ""),
        "sm120.format": str(made.definition.internal.format),
    }
    for name, value in wanted.items():
        if (got := artifact.annotations.get(name)) != value:
            return broken(title, f"{name} is {got}, but {value} was recorded")
    return Node(title, message="the same image, lock and format")


def _sealed(made: Provenance, locks: _Locks) -> Node:
    # without its lock an image's packages could not be missed
    unlocked = sorted(made.definition.external.images.keys() - made.locks.keys())
    nodes = [broken(name, "the provenance names no lock for it") for name in unlocked]
    for name, seal in made.locks.items():
        lock = locks[name]
        if isinstance(lock, str):
            nodes.append(incomplete(name, lock))
        elif lock.seal != seal:
            nodes.append(stale(name, f"was {seal[:19]}…, is {lock.seal[:19]}…"))
        else:
            nodes.append(Node(name))
    return Node("locks", children=tuple(nodes), is_folded=True)


def _golden(made: Provenance, artifact: Artifact, checkout: Checkout) -> Node:
    title, recorded, external = "golden digest", made.golden, made.definition.external
    # as golden.yaml names images
    label = f"{external.image}.{external.platform.partition('/')[2]}"
    try:
        now = read_golden(checkout.golden_path).images.get(label)
    except PipelineError as error:
        return incomplete(title, str(error))
    if recorded is None or recorded.digest is None:
        why = recorded.annotations.get("unknown") if recorded else None
        return incomplete(title, str(why or "was not recorded"))
    if now is None:
        return incomplete(title, f"none is committed for {label}")
    if now.digest != artifact.digest:
        return stale(title, f"is {now.digest} now")
    if f"sha256:{recorded.sha256}" != artifact.digest:
        return stale(title, f"was sha256:{recorded.sha256} when it was recorded")
    return Node(title)


def _packages(
    kind: str, resources: Sequence[Resource], made: Provenance, locks: _Locks, artifact: Artifact
) -> Node:
    nodes = []
    for resource in resources:
        title, image = resource.name, str(resource.annotations.get("image"))
        # the annotation only names it: the seal in the provenance decides which lock counts
        lock = locks.get(image)
        if lock is None:
            message = f"belongs to {image}, which has no lock in the provenance"
            nodes.append(broken(title, message))
        elif resource.annotations.get("layer") not in (artifact.layers or ()):
            nodes.append(broken(title, "is in a layer that this image does not have"))
        elif isinstance(lock, str):
            # the check of the locks says why
            nodes.append(Node(title, message="not compared: its lock is missing"))
        # compared by hash first: `judge_pin` checks names and versions
        elif pin := next((p for p in lock.pins if p.sha256 == resource.sha256), None):
            nodes.append(judge_pin(resource, pin, resource.uri))
        # the very lock that was used: so no later change of it explains the difference
        elif lock.seal == made.locks[image]:
            nodes.append(broken(title, "is not in the lock that the provenance names"))
        else:
            nodes.append(stale(title, "is no longer locked"))
    is_good = bool(nodes) and all(node.verdict is Verdict.VALID for node in nodes)
    is_compared = all(not isinstance(lock, str) for lock in locks.values())
    message = "locked, and in a layer of this image" if is_good and is_compared else ""
    title = log.count(len(nodes), kind)
    return Node(title, message=message, children=tuple(nodes), is_folded=True)


def _files(made: Provenance, checkout: Checkout) -> Node:
    nodes = []
    for resource in made.files:
        path = unquote(resource.uri.removeprefix("urn:sm120-pipeline:checkout:"))
        try:
            place = checkout.root / stays_below(path)
        except ValueError:
            nodes.append(broken(resource.name, "its path leads out of the checkout"))
            continue
        # a link in the checkout could lead to a file outside
        if not place.is_file() or not place.resolve().is_relative_to(checkout.root.resolve()):
            nodes.append(stale(path, "is missing from this checkout"))
        elif sha256_of(place.read_bytes()) != f"sha256:{resource.sha256}":
            nodes.append(stale(path, "has changed since"))
        else:
            nodes.append(Node(path))
    patches = sum(x.annotations.get("kind") == "patch" for x in made.files)
    counts = log.count(patches, "patch", "patches"), log.count(len(nodes) - patches, "file")
    title = f"{', '.join(counts)} of the checkout"
    return Node(title, children=tuple(nodes), is_folded=True)


def _base(made: Provenance, locks: _Locks, artifact: Artifact, trust: Trust | None) -> list[Node]:
    """Judges the foreign base, as far as it is known; nothing for images on our own root."""
    images = made.definition.external.images.items()
    foreign = {name: parse_foreign(str(each.spec.get("base") or "")) for name, each in images}
    specified = [(name, spec) for name, spec in foreign.items() if spec]
    recorded = made.bases
    if not specified and not recorded:
        return []
    # a chain has one root, so at most one foreign base
    if len(specified) != 1 or len(recorded) != 1:
        message = f"{len(specified)} in the specs, {len(recorded)} recorded"
        return [broken("base image", message)]
    [(image, spec)], [resource] = specified, recorded
    digest, notes = f"sha256:{resource.sha256}", resource.annotations
    title = f"base image {spec.repository}@{digest}"
    if resource.name != spec.repository or notes.get("image") != image:
        return [broken(title, f"is recorded as {resource.name} of {notes.get('image')}")]
    # a spec may name the index of platforms or the manifest of one
    if spec.digest not in (digest, notes.get("index")):
        return [broken(title, f"the spec names {spec.digest}")]
    layers, present = notes.get("layers"), list(artifact.layers or ())
    # an empty list would be at the bottom of any image
    if not isinstance(layers, list) or not layers or present[: len(layers)] != layers:
        return [broken(title, "its layers are not at the bottom of this image")]
    locked, lock = Node("locked"), locks.get(image, "there is no lock to compare it with")
    if not locks:
        message = "as stated; a checkout of this image has the lock to compare"
        locked = Node("locked", message=message)
    elif isinstance(lock, str):
        locked = incomplete("locked", lock)
    else:
        pin = lock.base_image
        want = pin and [pin.manifest.digest, pin.config.digest, [x.digest for x in pin.layers]]
        if want != [digest, notes.get("config"), layers]:
            locked = stale("locked", "another base is locked now")
            if lock.seal == made.locks.get(image):
                locked = broken("locked", "differs from the lock that the provenance names")
    # a trust file may accept either digest, as a spec may name either
    accepted = trust.bases if trust else {}
    reasons = [accepted[d] for d in (digest, str(notes.get("index"))) if d in accepted]
    contents = incomplete("contents", "unknown; a trust file can accept this digest under `bases`")
    if reasons:
        contents = Node("contents", message=f"accepted as published: {reasons[0]}")
    message = f"its {len(layers)} layers at the bottom, unchanged"
    return [Node(title, message=message, children=(locked, contents))]

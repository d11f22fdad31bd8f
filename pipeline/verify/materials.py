"""From an image's provenance to every byte behind it: layers, spec, locks, packages, files."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from pipeline.assemble.golden import read_golden
from pipeline.attest.strict import plain
from pipeline.attest.trust import Trust
from pipeline.errors import LockEdited, LockMissing, PipelineError
from pipeline.evidence.provenance import Provenance, Resource, SpecMaterial
from pipeline.lock.model import DebPin, ImageLock, Pin, read_lock
from pipeline.model import sha256_of, stays_below
from pipeline.spec.checkout import Checkout
from pipeline.verify.artifact import Artifact
from pipeline.verify.base import judge_base
from pipeline.verify.verdict import Node, Verdict


def judge_materials(
    found: Provenance, artifact: Artifact, checkout: Checkout | None, trust: Trust | None = None
) -> tuple[Node, ...]:
    """Every claim of the provenance against what is really there."""
    nodes = [_layers(found, artifact), _notes(found, artifact), _builder(found)]
    if checkout is None:
        nodes += judge_base(found, {}, artifact, trust)
        words = "there is no checkout to compare spec, lock and patches with"
        return (*nodes, Node("materials", Verdict.INCOMPLETE, words))
    platform = found.definition.external.platform
    locks = {name: _lock(checkout, name, platform) for name in found.locks}
    nodes += [_spec(found, checkout), _locks(found, locks), _golden(found, artifact, checkout)]
    nodes += judge_base(found, locks, artifact, trust)
    nodes += [
        _packages("wheels", found.packages("pypi"), found, locks, artifact),
        _packages("Debian packages", found.packages("deb"), found, locks, artifact),
        _omitted(found, locks),
        _files(found, checkout),
    ]
    return tuple(nodes)


def _layers(found: Provenance, artifact: Artifact) -> Node:
    """The artifact's layers are those that were recorded, in order, no more and no less."""
    recorded = [f"sha256:{x.sha256}" for x in found.layers]
    present = list(artifact.layers or ())
    if not artifact.is_image:
        return Node("layers", Verdict.BROKEN, "provenance of an image, but this is a file")
    for digest in present:
        if digest not in recorded:
            return Node("layers", Verdict.BROKEN, f"{digest} is in the image, not in its record")
    for digest in recorded:
        if digest not in present:
            return Node("layers", Verdict.BROKEN, f"{digest} was recorded, the image has it not")
    if recorded != present:
        return Node("layers", Verdict.BROKEN, "recorded in another order")
    said = [x.annotations.get("diffId") for x in found.layers]
    if said != list(artifact.diff_ids):
        return Node("layers", Verdict.BROKEN, "their diffIDs are not those that were recorded")
    for base in found.base_layers:
        if f"sha256:{base.sha256}" not in present:
            return Node("layers", Verdict.BROKEN, f"the base layer {base.name!r} is not in it")
    words = f"{len(present)}, of which {len(found.base_layers)} of its base"
    return Node("layers", words=words)


def _notes(found: Provenance, artifact: Artifact) -> Node:
    """What the manifest says of itself, which is part of its digest, is what was recorded."""
    external = found.definition.external
    wanted = {
        "org.opencontainers.image.title": external.image,
        "sm120.lock": found.locks.get(external.image, ""),
        "sm120.format": str(found.definition.internal.format),
    }
    for name, value in wanted.items():
        if (got := artifact.notes.get(name)) != value:
            words = f"{name} is {got}, but {value} was recorded"
            return Node("manifest's own words", Verdict.BROKEN, words)
    return Node("manifest's own words", words="the same image, lock and format")


def _builder(found: Provenance) -> Node:
    """By what it says it was built; that the same comes out again is what a rebuild proves."""
    versions = ", ".join(f"{name} {v}" for name, v in sorted(found.run.builder.version.items()))
    code = found.definition.internal.builder_code
    return Node("builder", words=plain(f"{found.run.builder.id}, {versions}, code {code[:19]}…"))


def _spec(found: Provenance, checkout: Checkout) -> Node:
    nodes = []
    for name, said in found.definition.external.images.items():
        nodes.append(_one_spec(name, said, checkout))
    return Node("spec", children=tuple(nodes), is_folded=True)


def _one_spec(name: str, said: SpecMaterial, checkout: Checkout) -> Node:
    title = f"images/{name}/image.yaml"
    try:
        spec = checkout.spec(name)
        after = spec.model_dump(mode="json", by_alias=True)
        series = checkout.series(spec).model_dump(mode="json")
    except PipelineError as error:
        return Node(title, Verdict.INCOMPLETE, str(error))
    if said.series != series:
        return Node(title, Verdict.STALE, "series.yaml has changed since")
    before = said.spec
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


def _locks(found: Provenance, locks: dict[str, ImageLock | str]) -> Node:
    nodes = []
    wanted = found.definition.external.images.keys()
    for name in sorted(wanted - found.locks.keys()):
        nodes.append(Node(name, Verdict.BROKEN, "the record names no lock of it"))
    for name, seal in found.locks.items():
        lock = locks[name]
        if isinstance(lock, str):
            nodes.append(Node(name, Verdict.INCOMPLETE, lock))
        elif lock.seal != seal:
            nodes.append(Node(name, Verdict.STALE, f"was {seal[:19]}…, is {lock.seal[:19]}…"))
        else:
            nodes.append(Node(name))
    return Node("locks", children=tuple(nodes), is_folded=True)


def _golden(found: Provenance, artifact: Artifact, checkout: Checkout) -> Node:
    title = "golden digest"
    external, recorded = found.definition.external, found.golden
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
    found: Provenance,
    locks: dict[str, ImageLock | str],
    artifact: Artifact,
) -> Node:
    nodes = tuple(_package(x, found, locks, artifact) for x in resources)
    good = all(node.verdict is Verdict.VALID for node in nodes)
    words = "locked, and in a layer of this image" if good and nodes else ""
    return Node(f"{len(nodes)} {title}", words=words, children=nodes, is_folded=True)


def _package(
    resource: Resource, found: Provenance, locks: dict[str, ImageLock | str], artifact: Artifact
) -> Node:
    image = str(resource.annotations.get("image"))
    lock = locks.get(image)
    if lock is None:
        return Node(resource.name, Verdict.BROKEN, f"belongs to {image}, of which nothing is known")
    if resource.annotations.get("layer") not in (artifact.layers or ()):
        return Node(resource.name, Verdict.BROKEN, "lies in a layer that this image does not have")
    if isinstance(lock, str):
        return Node(resource.name, Verdict.INCOMPLETE, lock)
    pin = next((p for p in lock.pins if p.sha256 == resource.sha256), None)
    if pin is not None:
        return _pinned(resource, pin)
    if lock.seal == found.locks[image]:
        return Node(resource.name, Verdict.BROKEN, "is not in the lock that the record names")
    return Node(resource.name, Verdict.STALE, "is no longer locked")


def _pinned(resource: Resource, pin: Pin) -> Node:
    """The recorded words for a package are those of its pin."""
    kind = "deb/debian" if isinstance(pin, DebPin) else "pypi"
    said = [resource.name, unquote(resource.uri.partition("?")[0])]
    said.append(str(resource.annotations.get("sizeBytes")))
    want = [pin.file, f"pkg:{kind}/{pin.name}@{pin.version}", str(pin.size_bytes)]
    for got, wanted in zip(said, want, strict=True):
        if got != wanted:
            return Node(pin.file, Verdict.BROKEN, f"is recorded as {got}, but locked as {wanted}")
    return Node(resource.name)


def _omitted(found: Provenance, locks: dict[str, ImageLock | str]) -> Node:
    """What a lock holds and its image's record leaves out was left out by somebody."""
    recorded = {x.sha256 for x in (*found.packages("pypi"), *found.packages("deb"))}
    nodes = [
        Node(pin.file, Verdict.BROKEN, "is locked, but the record leaves it out")
        for name, lock in locks.items()
        if not isinstance(lock, str) and lock.seal == found.locks[name]
        for pin in lock.pins
        if pin.sha256 not in recorded
    ]
    return Node("nothing left out" if not nodes else "left out", children=tuple(nodes))


def _files(found: Provenance, checkout: Checkout) -> Node:
    nodes = tuple(_file(x, checkout) for x in found.files)
    patches = sum(x.annotations.get("kind") == "patch" for x in found.files)
    title = f"{patches} patches, {len(nodes) - patches} files of the checkout"
    return Node(title, children=nodes, is_folded=True)


def _file(resource: Resource, checkout: Checkout) -> Node:
    path = unquote(resource.uri.removeprefix("urn:sm120-pipeline:checkout:"))
    try:
        stays_below(path)
    except ValueError:
        return Node(resource.name, Verdict.BROKEN, "its path leads out of the checkout")
    place = checkout.root / path
    if not place.is_file() or not place.resolve().is_relative_to(checkout.root.resolve()):
        return Node(path, Verdict.STALE, "is no longer there")
    if sha256_of(place.read_bytes()) != f"sha256:{resource.sha256}":
        return Node(path, Verdict.STALE, "has changed since")
    return Node(path)

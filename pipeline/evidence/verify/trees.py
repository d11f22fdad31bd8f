"""From a compiled layer to its source archive, each patch and the toolchain.

The manifest names the digest of everything that decided the image, and that digest covers the
inputs of each compiled tree. So a provenance that tells other inputs contradicts the image itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

from pydantic import TypeAdapter

from pipeline.artifacts.attest.names import file_urn, layer_urn, source_urn, toolchain_urn, tree_urn
from pipeline.artifacts.attest.strict import plain
from pipeline.core import log
from pipeline.core.errors import LockEdited, LockMissing, PipelineError
from pipeline.core.model import Name, Platform, canonical_json, sha256_of
from pipeline.evidence.statements.inventory import objects_origin
from pipeline.evidence.statements.provenance import Provenance, Resource, source_spec
from pipeline.evidence.verify.artifact import Artifact
from pipeline.evidence.verify.verdict import Node, broken, incomplete, stale
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.plan import BUILD_HINTS, plan_image
from pipeline.images.lock.model import DebPin, Pin, read_lock, read_source_lock
from pipeline.images.spec.checkout import Checkout

_NAME: TypeAdapter[str] = TypeAdapter(Name)
_PLATFORM: TypeAdapter[str] = TypeAdapter(Platform)
_MOST_IMAGES = 20  # that stand on each other; far above any chain of ours


def judge_pin(resource: Resource, pin: Pin, purl: str) -> Node:
    """Checks that a package is recorded with the name, version and size of its pin."""
    kind = "deb/debian" if isinstance(pin, DebPin) else "pypi"
    # qualifiers of a package URL repeat the rest
    recorded = [resource.name, unquote(purl.partition("?")[0])]
    recorded.append(str(resource.annotations.get("sizeBytes")))
    want = [pin.file, f"pkg:{kind}/{pin.name}@{pin.version}", str(pin.size_bytes)]
    for got, wanted in zip(recorded, want, strict=True):
        if got != wanted:
            return broken(pin.file, f"is recorded as {got}, but locked as {wanted}")
    return Node(resource.name)


def judge_trees(
    provenance: Provenance, artifact: Artifact, checkout: Checkout | None
) -> list[Node]:
    """Judges each compiled tree with all that it was made of; nothing for images without any."""
    recorded = (*provenance.trees, *provenance.archives, *provenance.toolchains)
    try:
        if not _wanted(provenance) and not recorded and not provenance.build_time:
            return []
        # the images from the root to the one that was built
        external, chain = provenance.definition.external, list[str]()
        current: object = external.image
        while isinstance(current, str) and current in external.images and len(chain) < _MOST_IMAGES:
            chain.insert(0, current)
            current = external.images[current].spec.get("base")
        # all inputs of the image, put together again, must give the digest that its manifest names
        key: str | None = None
        files = _file_digests(provenance)
        trees = {tree.uri: tree for tree in provenance.trees}
        for name in chain:
            spec, series = external.images[name].spec, external.images[name].series
            folder = f"images/{name}"
            patches = f"{folder}/{spec['patches']}".rpartition("/")[0] if spec["patches"] else ""
            inputs = {
                "format": provenance.definition.internal.format,
                "spec": sha256_of(canonical_json(spec)),
                "lock": provenance.locks[name],
                "base": key,
                "files": [files[f"{folder}/{x['from']}"] for x in spec["files"]],
                "patches": [files[f"{patches}/{x['file']}"] for x in series["patches"]],
                "series": sha256_of(canonical_json(series)),
            }
            if compiled := spec.get("compiled"):
                urns = [tree_urn(x["source"], x["build"]) for x in compiled]
                inputs["compiled"] = [trees[urn].annotations["key"] for urn in urns]
            key = sha256_of(canonical_json(inputs))
        named, title = artifact.annotations.get("sm120.inputs"), "inputs in the manifest"
        bound = Node(title, message="spec, locks, files and compiled trees, as recorded")
        if (key or "") != named:
            bound = broken(title, f"is {named}, but other inputs were recorded")
        return [bound, *_TreeJudge(provenance, artifact, checkout).judge()]
    # of unknown origin: a value that is missing, or not of its kind, proves nothing
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        return [broken("compiled trees", f"their record lacks {plain(str(error))[:80]!r}")]


def _wanted(provenance: Provenance) -> list[tuple[str, str, str]]:
    """Image, source and build of each tree that the specs ask for, in their order."""
    return [
        (name, str(each["source"]), str(each["build"]))
        for name, material in provenance.definition.external.images.items()
        for each in material.spec.get("compiled") or []
    ]


def _file_digests(provenance: Provenance) -> dict[str, str]:
    """Files of the checkout by their path."""
    return {x.name: f"sha256:{x.sha256}" for x in provenance.files if x.uri == file_urn(x.name)}


def may_differ(provenance: Provenance) -> dict[str, str]:
    """The files of the image that a rebuild may give other bytes, each with its reason."""
    declared: dict[str, str] = {}
    try:
        for _, source, build in _wanted(provenance):
            spec = provenance.definition.external.sources[source].spec["builds"][build]
            folder = str(spec["to"]).rstrip("/")
            declared |= {f"{folder}/{path}": why for path, why in spec["may_differ"].items()}
    # reported where the provenance itself is judged
    except (LookupError, TypeError, AttributeError):
        return {}
    return declared


class _TreeJudge:
    """One provenance, and the checkout that it is compared with."""

    def __init__(
        self, provenance: Provenance, artifact: Artifact, checkout: Checkout | None
    ) -> None:
        self._provenance, self._artifact, self._checkout = provenance, artifact, checkout
        self._external = provenance.definition.external
        self._files = _file_digests(provenance)
        self._trees = {x.uri: x for x in provenance.trees}

    def judge(self) -> list[Node]:
        wanted, made = _wanted(self._provenance), self._provenance
        nodes = [self._tree(*each) for each in wanted]
        # records of trees that no spec asks for
        urns = {tree_urn(source, build) for _, source, build in wanted}
        trees = [x for x in made.trees if x.uri in urns]
        sources = {source_urn(str(x.annotations["source"])) for x in trees}
        digests = {str(x.annotations["toolchain"]) for x in trees}
        names = {x.name for x in made.toolchains}
        extra = [x for x in made.trees if x.uri not in urns]
        extra += [x for x in made.archives if x.uri not in sources]
        extra += [x for x in made.toolchains if f"sha256:{x.sha256}" not in digests]
        extra += [x for x in made.build_time if x.annotations["toolchain"] not in names]
        message = "is recorded, but no image's spec asks for it"
        nodes += [broken(plain(x.name), message) for x in extra]
        for name in dict.fromkeys(source for _, source, _ in wanted):
            builds = {build for _, source, build in wanted if source == name}
            nodes.append(self._source(name, builds))
        # everything in a toolchain, and whether the checkout would give the same one now
        for toolchain in made.toolchains:
            title, chain = f"toolchain {plain(toolchain.name)}", toolchain.annotations["chain"]
            # they name files of the checkout below, and must not lead out of it
            _PLATFORM.validate_python(toolchain.annotations["platform"])
            for name in (toolchain.name, *(each["name"] for each in chain)):
                _NAME.validate_python(name)
            unrecorded = (
                f"{kind} of {plain(str(each['name']))}: not all of them are recorded"
                for each in chain
                for kind in ("files", "patches")
                if [self._files.get(x, "missing") for x in each[kind]] != each["inputs"][kind]
            )
            if message := next(unrecorded, ""):
                nodes.append(broken(title, message))
            elif self._checkout is None:
                nodes.append(Node(title, message=f"sha256:{toolchain.sha256}"))
            else:
                children = [self._golden(toolchain, self._checkout)]
                children += [self._packages(toolchain, each, self._checkout) for each in chain]
                nodes.append(Node(title, children=tuple(children), is_folded=True))
        return nodes

    def _tree(self, image: str, source: str, build: str) -> Node:
        title = f"compiled {source} ({build})"
        tree = self._trees.get(tree_urn(source, build))
        if tree is None:
            return broken(title, "is in the spec, but its record is missing")
        digest, urn, layer = f"sha256:{tree.sha256}", layer_urn(image, tree.name), Node("layer")
        recorded = [x.sha256 for x in self._provenance.layers if x.uri == urn]
        if recorded != [tree.sha256] or tree.annotations["image"] != image:
            layer = broken("layer", f"{digest} is not the image's layer of it")
        elif digest not in (self._artifact.layers or ()):
            layer = broken("layer", f"{digest} is missing from the image")
        made_of = [layer, self._inputs(tree, source, build), self._made_from(tree, source)]
        # the toolchain is the one that the key covers, image by image of its chain
        spec = self._external.sources[source].spec["builds"][build]
        platform = spec.get("toolchain_platform") or self._external.platform
        digest, tools = str(tree.annotations["toolchain"]), f"toolchain {spec['toolchain']}"
        urn = toolchain_urn(spec["toolchain"], digest)
        toolchain = next((x for x in self._provenance.toolchains if x.uri == urn), None)
        made_in = Node(tools, message=digest)
        if toolchain is None or f"sha256:{toolchain.sha256}" != digest:
            made_in = broken(tools, f"was {digest}, which is missing")
        elif toolchain.annotations["platform"] != platform:
            made_in = broken(tools, "it runs on another platform than the build's")
        elif _chain_key(toolchain) != tree.annotations["inputs"]["toolchain"]:
            made_in = broken(tools, "it was compiled in one of other inputs")
        objects = Node("objects", message=objects_origin(tree.annotations["run"]))
        message = f"layer sha256:{tree.sha256[:12]}…"
        return Node(title, message=message, children=(*made_of, made_in, objects))

    def _inputs(self, tree: Resource, source: str, build: str) -> Node:
        """The key covers the inputs, and the inputs are those of the recorded source.yaml."""
        inputs, spec = tree.annotations["inputs"], self._external.sources[source].spec
        if sha256_of(canonical_json(inputs)) != tree.annotations["key"]:
            return broken("inputs", "its key is not the digest of its inputs")
        steps = {k: v for k, v in spec["builds"][build].items() if k not in BUILD_HINTS}
        wanted = {
            "platform": self._external.platform,
            "build": steps,
            "outputs": [*spec["outputs"], *spec["builds"][build].get("outputs", [])],
            "files": [[x["to"], x["mode"]] for x in spec["files"]],
        }
        for name, value in wanted.items():
            if inputs[name] != value:
                return broken("inputs", f"{name}: not as in the recorded source.yaml")
        names = ", ".join(step["name"] for step in steps["steps"])
        return Node("inputs", message=plain(f"steps: {names}"))

    def _made_from(self, tree: Resource, source: str) -> Node:
        """The archive's files, our own and the patches, by the digests that the key covers."""
        title, inputs = "source", tree.annotations["inputs"]
        archive = self._archive(source)
        if archive is None:
            return broken(title, "the provenance names no source archive")
        if archive.annotations["tree"] != inputs["tree"]:
            return broken(title, f"was compiled from other files: {inputs['tree']}")
        spec = self._external.sources[source].spec
        names = [*(x["from"] for x in spec["files"]), *(x["file"] for x in spec["patches"])]
        paths = [f"images/sources/{source}/{name}" for name in names]
        for path in paths:
            if path not in self._files:
                return broken(title, plain(f"{path} is missing from the provenance"))
        if [self._files[path] for path in paths] != inputs["own"]:
            return broken(title, "was compiled with other files or patches of ours")
        ours = [x.name for x in self._provenance.files if x.annotations.get("source") == source]
        if extra := sorted(set(ours) - set(paths)):
            return broken(title, plain(f"{extra[0]} is not part of its source.yaml"))
        patches = log.count(len(spec["patches"]), "patch", "patches")
        files = log.count(len(spec["files"]), "file")
        return Node(title, message=plain(f"{archive.name}, {files} of ours, {patches}"))

    def _archive(self, source: str) -> Resource | None:
        urn = source_urn(source)
        return next((x for x in self._provenance.archives if x.uri == urn), None)

    def _source(self, name: str, builds: Collection[str]) -> Node:
        """A source and its archive, against source.yaml and lock of the checkout."""
        title = f"images/sources/{name}/source.yaml"
        material, archive = self._external.sources[name], self._archive(name)
        if archive is None:
            return broken(title, "the provenance names no source archive")
        notes = archive.annotations
        stated = [material.spec["licence"], material.spec["upstream"]]
        if [notes["licence"], notes["upstream"]] != stated:
            return broken(title, "names another licence or commit than its archive")
        commit = f"{notes['upstream']['repository']} {notes['upstream']['commit']}"
        origin = plain(f"{archive.name}: {commit}, {notes['licence']}")
        if self._checkout is None:
            return Node(title, message=origin)
        try:
            after = source_spec(self._checkout.source(name), builds)
            lock = read_source_lock(self._checkout.source_lock_path(name))
        except PipelineError as error:
            return incomplete(title, str(error))
        if lock.seal == notes["lock"]:
            # the very lock that the provenance names: no later change of it explains a difference
            pin = lock.archive
            recorded = [archive.name, archive.sha256, notes["sizeBytes"], notes["kind"]]
            recorded += [notes["tree"], notes["files"]]
            locked = [pin.file, pin.sha256, pin.size_bytes, pin.kind, lock.tree, lock.files]
            for got, want in zip(recorded, locked, strict=True):
                if got != want:
                    return broken(title, plain(f"is recorded as {got}, but locked as {want}"))
        before = material.spec
        moved = sorted(k for k in {**before, **after} if before.get(k) != after.get(k))
        if moved:
            return stale(title, f"has changed since: {', '.join(moved)}")
        if lock.seal != notes["lock"]:
            return stale(title, f"another archive is locked now: {lock.archive.file}")
        return Node(title, message=origin)

    def _golden(self, toolchain: Resource, checkout: Checkout) -> Node:
        """The digest that the same inputs must give, as it is committed."""
        title, platform = "golden digest", str(toolchain.annotations["platform"])
        label = f"{toolchain.name}.{platform.partition('/')[2]}"
        try:
            now = plan_image(checkout, toolchain.name, platform)
            golden = read_golden(checkout.golden_path).images.get(label)
        except PipelineError as error:
            return incomplete(title, str(error))
        inputs = toolchain.annotations["chain"][-1]["inputs"]
        if golden is not None and golden.inputs == inputs:
            if golden.digest != f"sha256:{toolchain.sha256}":
                message = f"these inputs give {golden.digest}, not sha256:{toolchain.sha256}"
                return broken(title, message)
            if now.key == _chain_key(toolchain):
                return Node(title)
        if now.key != _chain_key(toolchain):
            moved = [k for k in {**inputs, **now.inputs} if inputs.get(k) != now.inputs.get(k)]
            return stale(title, f"has changed since: {', '.join(sorted(moved))}")
        return incomplete(title, f"none is committed for {label}")

    def _packages(self, toolchain: Resource, image: Mapping[str, Any], checkout: Checkout) -> Node:
        """Each package of a toolchain's image is locked, and each locked one is recorded."""
        name, seal = str(image["name"]), image["inputs"]["lock"]
        platform = str(toolchain.annotations["platform"])
        try:
            lock = read_lock(checkout.lock_path(name, platform))
        except (LockMissing, LockEdited) as error:
            return incomplete(plain(name), str(error))
        if lock.seal != seal:
            return stale(plain(name), "is locked otherwise now")
        notes = {"toolchain": toolchain.name, "platform": platform, "image": name}
        recorded = {
            x.sha256: x
            for x in self._provenance.build_time
            if all(x.annotations[key] == value for key, value in notes.items())
        }
        nodes = []
        for pin in lock.pins:
            resource = recorded.pop(pin.sha256, None)
            if resource is None:
                nodes.append(broken(pin.file, "is locked, but missing from the provenance"))
            else:
                nodes.append(judge_pin(resource, pin, str(resource.annotations["purl"])))
        extra = "is not in the lock that the provenance names"
        nodes += [broken(plain(x.name), extra) for x in recorded.values()]
        title = f"{plain(name)}: {log.count(len(nodes), 'package')} at build time"
        return Node(title, children=tuple(nodes), is_folded=True)


def _chain_key(toolchain: Resource) -> str:
    """The key of a toolchain's plan; empty where one image does not stand on the one before."""
    key: str | None = None
    for image in toolchain.annotations["chain"]:
        if image["inputs"]["base"] != key:
            return ""
        key = sha256_of(canonical_json(image["inputs"]))
    return key or ""

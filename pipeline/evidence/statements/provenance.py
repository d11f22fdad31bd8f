"""SLSA provenance v1 of an image, written and read back: spec, every input by digest, builder.

On one's own machine this is SLSA Build L1 plus a signature; nothing here claims more.
https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline import __version__
from pipeline.artifacts.attest import names
from pipeline.artifacts.attest.statement import DigestSet, Moment, Statement, make_statement
from pipeline.artifacts.attest.strict import as_model, plain
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import Digest, Frozen, Identity, Name, Platform, Stamp
from pipeline.evidence.statements import inventory
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.image import Built, code_digest
from pipeline.images.assemble.plan import FORMAT
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import DEFAULT_ARCH, required_results
from pipeline.images.spec.source import SourceSpec


class Resource(Frozen):
    """An in-toto resource descriptor; without a digest, an annotation has the reason."""

    uri: Identity
    name: str
    digest: DigestSet | None = None
    annotations: dict[str, Any] = {}

    @property
    def sha256(self) -> str:
        return self.digest.sha256 if self.digest else ""


class SpecMaterial(Frozen):
    """An image.yaml and its series as they were built."""

    spec: dict[str, Any]
    series: dict[str, Any]

    @property
    def required_results(self) -> list[tuple[str, str]]:
        """Each gate that it asked for, with each card that it must be judged for."""
        listed = self.spec.get("gates")
        gates = [str(g) for g in listed] if isinstance(listed, list) else []
        return required_results(gates, self._archs, patched=bool(self.series.get("patches")))

    @property
    def cards(self) -> list[str]:
        """The cards it was for, by machine code and by number: kernels are compiled for those."""
        return [*self._archs, *(card.rstrip("af") for card in self._archs)]

    @property
    def _archs(self) -> list[str]:
        cuda = self.spec.get("cuda")
        listed = cuda.get("architectures") if isinstance(cuda, dict) else None
        named = [str(card) for card in listed] if isinstance(listed, list) else []
        return named or [DEFAULT_ARCH]


class SourceMaterial(Frozen):
    """A source.yaml as it was compiled, with those of its builds that the image holds."""

    spec: dict[str, Any]


class _External(Frozen):
    image: Name
    platform: Platform
    images: dict[Name, SpecMaterial]
    sources: dict[Name, SourceMaterial] = {}


class _Internal(Frozen):
    format: int
    builder_code: Digest = Field(alias="builderCode")


class _Definition(Frozen):
    build_type: Identity = Field(alias="buildType")
    external: _External = Field(alias="externalParameters")
    internal: _Internal = Field(alias="internalParameters")
    # far above any image: each one is searched in all locks
    dependencies: list[Resource] = Field(
        alias="resolvedDependencies", min_length=1, max_length=10_000
    )


class _Builder(Frozen):
    id: Identity
    version: dict[str, str]


class _Metadata(Frozen):
    invocation: Identity = Field(alias="invocationId")
    finished: Stamp = Field(alias="finishedOn")


class _Run(Frozen):
    builder: _Builder
    byproducts: list[Resource]
    metadata: _Metadata | None = None


def _urns(resources: list[Resource], kind: str) -> list[Resource]:
    return [x for x in resources if x.uri.startswith(f"urn:sm120-pipeline:{kind}:")]


class Provenance(Frozen):
    """An image's provenance."""

    definition: _Definition = Field(alias="buildDefinition")
    run: _Run = Field(alias="runDetails")

    @property
    def layers(self) -> list[Resource]:
        return _urns(self.run.byproducts, "layer")

    @property
    def locks(self) -> dict[str, str]:
        """The seal of each image's lock."""
        locks = _urns(self.run.byproducts, "lock")
        return {x.uri.split(":")[3]: f"sha256:{x.sha256}" for x in locks}

    @property
    def golden(self) -> Resource | None:
        return next(iter(_urns(self.run.byproducts, "golden")), None)

    @property
    def trees(self) -> list[Resource]:
        """Compiled trees, each by the digest of its layer."""
        return _urns(self.run.byproducts, "tree")

    def packages(self, kind: Literal["pypi", "deb", "oci"]) -> list[Resource]:
        return [x for x in self.definition.dependencies if x.uri.startswith(f"pkg:{kind}/")]

    @property
    def bases(self) -> list[Resource]:
        """Foreign base images."""
        return self.packages("oci")

    @property
    def files(self) -> list[Resource]:
        return _urns(self.definition.dependencies, "checkout")

    @property
    def base_layers(self) -> list[Resource]:
        return _urns(self.definition.dependencies, "layer")

    @property
    def archives(self) -> list[Resource]:
        """The archives of sources that were compiled."""
        return _urns(self.definition.dependencies, "source")

    @property
    def toolchains(self) -> list[Resource]:
        """The images that sources were compiled in."""
        return _urns(self.definition.dependencies, "toolchain")

    @property
    def build_time(self) -> list[Resource]:
        """The packages of toolchains."""
        return _urns(self.definition.dependencies, "build-time")


def image_provenance(
    checkout: Checkout,
    built: Built,
    when: Moment | None = None,
    trees: Sequence[inventory.ImageTree] = (),
) -> Statement:
    """What an image was made of and by what; `trees` are its compiled ones."""
    plan = built.plan
    images = {
        each.spec.name: SpecMaterial(
            # as people write it, so that a reader can compare it with the file
            spec=each.spec.dumped(),
            series=checkout.series(each.spec).model_dump(mode="json"),
        )
        for each in plan.chain()
    }
    external: dict[str, Any] = {
        "image": plan.spec.name,
        "platform": plan.platform,
        "images": images,
    }
    sources = {}
    for source in (tree.plan.source for tree in trees):
        builds = {tree.plan.name for tree in trees if tree.plan.source.name == source.name}
        sources[source.name] = SourceMaterial(spec=source_spec(source, builds))
    if sources:
        # not written where there are none, so that other images are stated as before
        external["sources"] = sources
    # byproducts: the locks, the digest that it must have, and the layers that come out
    results = [
        _resource(
            names.committed_urn("lock", each.spec.name, each.platform), "lock seal", each.lock.seal
        )
        for each in plan.chain()
    ]
    golden = read_golden(checkout.golden_path).images.get(f"{built.name}.{plan.architecture}")
    urn = names.committed_urn("golden", built.name, built.platform)
    if golden is None:
        why = {"unknown": "no golden digest was committed for this image"}
        results.append(Resource(uri=urn, name="golden digest", annotations=why))
    else:
        results.append(_resource(urn, "golden digest", golden.digest))
    for placed in inventory.placed_layers(built):
        title, record = placed.layer.title, placed.layer.record
        notes: dict[str, Any] = {"diffId": record.diff_id, "sizeBytes": record.size_bytes}
        if placed.warm:
            # which entry serves which case and recipe is in the layer's own index.json
            notes["inputs"] = placed.warm.inputs
        urn = names.layer_urn(placed.image, title)
        results.append(_resource(urn, title, record.digest, **notes))
    predicate = Provenance(
        buildDefinition=_Definition(
            buildType=names.BUILD_TYPE,
            externalParameters=_External.model_validate(external),
            internalParameters=_Internal(format=FORMAT, builderCode=code_digest()),
            resolvedDependencies=_dependencies(checkout, built, trees),
        ),
        runDetails=_Run(
            builder=_Builder(id=names.BUILDER, version={"sm120-pipeline": __version__}),
            byproducts=[*results, *(_tree(tree) for tree in trees)],
        ),
    )
    # fields without a value are left out, not written as null
    body = predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return make_statement(built.name, built.digest, names.PROVENANCE, body, when)


def source_spec(source: SourceSpec, builds: Collection[str]) -> dict[str, Any]:
    """A source.yaml without the builds that others are made of."""
    spec = source.model_dump(mode="json", by_alias=True)
    spec["builds"] = {name: each for name, each in spec["builds"].items() if name in builds}
    return spec


def _resource(uri: str, name: str, digest: str, **annotations: Any) -> Resource:
    values = {"uri": uri, "name": name, "digest": DigestSet(sha256=digest.removeprefix("sha256:"))}
    # `exclude_unset` writes only the given fields: no empty annotations
    return Resource.model_validate(
        {**values, "annotations": annotations} if annotations else values
    )


def _dependencies(
    checkout: Checkout, built: Built, trees: Sequence[inventory.ImageTree]
) -> list[Resource]:
    materials = []
    if base := inventory.base_image(built.plan):
        pin = base.pin
        notes: dict[str, Any] = {
            "image": base.image,
            "index": pin.index.digest if pin.index else "none: the manifest itself is asked for",
            "config": pin.config.digest,
            "layers": [layer.digest for layer in pin.layers],
            "contents": names.UNLISTED,
        }
        materials.append(_resource(base.purl, pin.repository, pin.manifest.digest, **notes))
    for part in inventory.package_parts(built):
        notes = {"image": part.image, "layer": part.layer.record.digest}
        notes["sizeBytes"] = part.pin.size_bytes
        materials.append(_resource(part.purl, part.pin.file, part.pin.sha256, **notes))
    materials += [
        _resource(file.urn, file.path, file.digest, image=file.image, kind=file.kind)
        for file in inventory.own_files(checkout, built.plan)
    ]
    materials += [
        _resource(names.layer_urn(x.image, x.layer.title), x.layer.title, x.layer.record.digest)
        for x in inventory.placed_layers(built)
        # its own layers come out of this build, so they are byproducts
        if x.image != built.plan.spec.name or x.base is not None
    ]
    # a toolchain may stand on the image's own base: a file that both use is listed once
    known = {x.uri for x in materials}
    for resource in _tree_materials(checkout, trees):
        if resource.uri not in known:
            known.add(resource.uri)
            materials.append(resource)
    return materials


def _tree_materials(checkout: Checkout, trees: Sequence[inventory.ImageTree]) -> Iterator[Resource]:
    for tree in trees:
        source, lock = tree.plan.source, tree.plan.lock
        yield _resource(
            names.source_urn(source.name),
            lock.archive.file,
            lock.archive.sha256,
            source=source.name,
            kind=lock.archive.kind,
            purl=tree.archive_purl,
            sizeBytes=lock.archive.size_bytes,
            tree=lock.tree,
            files=lock.files,
            lock=lock.seal,
            licence=plain(source.licence),
            upstream=source.upstream.model_dump(mode="json"),
        )
        for file in inventory.source_files(tree.plan):
            notes: dict[str, Any] = {"source": file.image, "kind": file.kind}
            yield _resource(file.urn, file.path, file.digest, **notes)
    for toolchain in inventory.toolchains_of(trees):
        name, platform = toolchain.name, toolchain.plan.platform
        ours = inventory.own_files(checkout, toolchain.plan)
        # all that decides the toolchain: each image of its chain by its inputs
        chain = [
            {
                "name": each.spec.name,
                "inputs": each.inputs,
                # in the order in which the inputs have their digests
                "files": [f"images/{each.spec.name}/{file.source}" for file in each.spec.files],
                "patches": [x.path for x in ours if x.patch and x.image == each.spec.name],
            }
            for each in toolchain.plan.chain()
        ]
        notes = {"purl": toolchain.purl, "platform": platform, "chain": chain}
        notes["use"] = names.BUILD_TIME
        urn = names.toolchain_urn(name, toolchain.digest)
        yield _resource(urn, name, toolchain.digest, **notes)
        for part in toolchain.parts:
            yield _resource(
                part.urn,
                part.pin.file,
                part.pin.sha256,
                toolchain=name,
                platform=platform,
                image=part.image,
                purl=part.purl,
                sizeBytes=part.pin.size_bytes,
                use=names.BUILD_TIME,
            )
        for file in ours:
            notes = {"image": file.image, "kind": file.kind, "use": names.BUILD_TIME}
            yield _resource(file.urn, file.path, file.digest, **notes)


def _tree(tree: inventory.ImageTree) -> Resource:
    plan, made = tree.plan, tree.made
    # these stand beside it already, or, as how long it took, prove nothing
    known = {"key", "source", "build", "platform", "toolchain", "layer", "seconds", "version"}
    return _resource(
        names.tree_urn(plan.source.name, plan.name),
        plan.title,
        made.layer,
        image=tree.image,
        source=plan.source.name,
        build=plan.name,
        purl=tree.purl,
        key=plan.key,
        inputs=plan.inputs,
        toolchain=made.toolchain,
        version=plain(made.version),
        run=made.model_dump(mode="json", exclude=known, exclude_none=True),
        origin=inventory.objects_origin(made.model_dump(mode="json", include={"objects", "taken"})),
    )


def read_provenance(predicate: dict[str, Any]) -> Provenance:
    """The provenance of one of our images, whole and without contradictions."""
    made = as_model(Provenance, predicate, "provenance", "the predicate")
    definition, builder = made.definition, made.run.builder
    # another builder's provenance may mean something else by the same fields
    if definition.build_type != names.BUILD_TYPE:
        raise RecordInvalid(f"provenance: {definition.build_type}: is not a build type of ours")
    if builder.id != names.BUILDER:
        raise RecordInvalid(f"provenance: {builder.id}: is not a builder of ours")
    # every material is of a known kind, has a digest, and is listed once
    known = [*made.packages("pypi"), *made.packages("deb"), *made.files, *made.bases]
    known += [*made.base_layers, *made.archives, *made.toolchains, *made.build_time]
    kinds = {x.uri for x in known}
    for resource in definition.dependencies:
        if resource.uri not in kinds:
            raise RecordInvalid(f"provenance: {resource.uri}: is not a known kind of material")
        if resource.digest is None:
            raise RecordInvalid(f"provenance: {resource.uri}: has no digest")
    images = definition.external.images.keys()
    if definition.external.image not in images or made.locks.keys() - images:
        raise RecordInvalid("provenance: names an image without its spec")
    # two digests under one name would let a reader choose
    uris = Counter(x.uri for x in (*definition.dependencies, *made.trees))
    for doubled in (uri for uri, times in uris.items() if times > 1):
        raise RecordInvalid(f"provenance: {doubled}: is listed twice")
    return made

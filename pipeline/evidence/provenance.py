"""SLSA provenance v1 of an image, written and read back: spec, every input by digest, builder.

On one's own machine this is SLSA Build L1 plus a signature; nothing here claims more.
https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline import __version__
from pipeline.assemble.golden import read_golden
from pipeline.assemble.image import Built, code_digest
from pipeline.assemble.plan import FORMAT, ImagePlan
from pipeline.attest.names import (
    BUILD_TIME,
    BUILD_TYPE,
    BUILDER,
    PROVENANCE,
    UNLISTED,
    golden_urn,
    layer_urn,
    lock_urn,
    source_urn,
    toolchain_urn,
    tree_urn,
)
from pipeline.attest.statement import DigestSet, Moment, Statement, make_statement
from pipeline.attest.strict import as_model, plain
from pipeline.errors import RecordInvalid
from pipeline.evidence.compiled import ImageTree, Toolchain, toolchains_of
from pipeline.evidence.inventory import (
    BaseImage,
    ImagePart,
    OwnFile,
    base_image,
    own_files,
    parts_of,
    placed_layers,
    source_files,
)
from pipeline.model import Digest, Frozen, Identity, Name, Platform, Stamp
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import DEFAULT_ARCH, required_results
from pipeline.spec.source import SourceSpec


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
    # far above any image: each one is looked for in all locks
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


class Provenance(Frozen):
    """An image's provenance."""

    definition: _Definition = Field(alias="buildDefinition")
    run: _Run = Field(alias="runDetails")

    def _below(self, kind: str) -> list[Resource]:
        prefix = f"urn:sm120-pipeline:{kind}:"
        return [x for x in self.run.byproducts if x.uri.startswith(prefix)]

    @property
    def layers(self) -> list[Resource]:
        return self._below("layer")

    @property
    def locks(self) -> dict[str, str]:
        """The seal of each image's lock."""
        return {x.uri.split(":")[3]: f"sha256:{x.sha256}" for x in self._below("lock")}

    @property
    def golden(self) -> Resource | None:
        return next(iter(self._below("golden")), None)

    def packages(self, kind: Literal["pypi", "deb"]) -> list[Resource]:
        return [x for x in self.definition.dependencies if x.uri.startswith(f"pkg:{kind}/")]

    @property
    def files(self) -> list[Resource]:
        prefix = "urn:sm120-pipeline:checkout:"
        return [x for x in self.definition.dependencies if x.uri.startswith(prefix)]

    @property
    def base_layers(self) -> list[Resource]:
        prefix = "urn:sm120-pipeline:layer:"
        return [x for x in self.definition.dependencies if x.uri.startswith(prefix)]

    def _materials(self, kind: str) -> list[Resource]:
        prefix = f"urn:sm120-pipeline:{kind}:"
        return [x for x in self.definition.dependencies if x.uri.startswith(prefix)]

    @property
    def archives(self) -> list[Resource]:
        """The archives of sources that were compiled."""
        return self._materials("source")

    @property
    def toolchains(self) -> list[Resource]:
        """The images that sources were compiled in."""
        return self._materials("toolchain")

    @property
    def build_time(self) -> list[Resource]:
        """The packages of toolchains."""
        return self._materials("build-time")

    @property
    def trees(self) -> list[Resource]:
        """What was compiled, each by the digest of its layer."""
        return self._below("tree")

    @property
    def bases(self) -> list[Resource]:
        """Foreign base images."""
        return [x for x in self.definition.dependencies if x.uri.startswith("pkg:oci/")]


def image_provenance(
    checkout: Checkout,
    built: Built,
    when: Moment | None = None,
    trees: Sequence[ImageTree] = (),
) -> Statement:
    """What an image was made of and by what; `trees` are its compiled ones."""
    predicate = Provenance(
        buildDefinition=_Definition(
            buildType=BUILD_TYPE,
            externalParameters=_external(checkout, built.plan, trees),
            internalParameters=_Internal(format=FORMAT, builderCode=code_digest()),
            resolvedDependencies=_dependencies(checkout, built, trees),
        ),
        runDetails=_Run(
            builder=_Builder(id=BUILDER, version={"sm120-pipeline": __version__}),
            byproducts=[
                *_locks(built.plan),
                _golden(checkout, built),
                *_layers(built),
                *(_tree(tree) for tree in trees),
            ],
        ),
    )
    # fields without a value are left out, not written as null
    body = predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return make_statement(built.name, built.digest, PROVENANCE, body, when)


def _external(checkout: Checkout, plan: ImagePlan, trees: Sequence[ImageTree]) -> _External:
    """The spec: image.yaml and series.yaml of the image and of those it stands on."""
    images = {
        each.spec.name: SpecMaterial(
            # as people write it, so that a reader can compare it with the file
            spec=each.spec.dumped(),
            series=checkout.series(each.spec).model_dump(mode="json"),
        )
        for each in plan.chain()
    }
    builds: dict[str, list[str]] = {}
    for tree in trees:
        builds.setdefault(tree.plan.source.name, []).append(tree.plan.name)
    by_name = {tree.plan.source.name: tree.plan.source for tree in trees}
    sources = {
        name: SourceMaterial(spec=source_spec(spec, builds[name])) for name, spec in by_name.items()
    }
    # not written where there are none, so that other images are stated as before
    compiled = {"sources": sources} if sources else {}
    return _External(image=plan.spec.name, platform=plan.platform, images=images, **compiled)


def source_spec(source: SourceSpec, builds: Collection[str]) -> dict[str, Any]:
    """A source.yaml without the builds that others are made of."""
    spec = source.model_dump(mode="json", by_alias=True)
    spec["builds"] = {name: each for name, each in spec["builds"].items() if name in builds}
    return spec


def _dependencies(checkout: Checkout, built: Built, trees: Sequence[ImageTree]) -> list[Resource]:
    base = base_image(built.plan)
    materials = [_base(base)] if base else []
    materials += [_part(part) for part in parts_of(built)]
    materials += [_file(file) for file in own_files(checkout, built.plan)]
    materials += [
        _resource(layer_urn(x.image, x.layer.title), x.layer.title, x.layer.record.digest)
        for x in placed_layers(built)
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


def _tree_materials(checkout: Checkout, trees: Sequence[ImageTree]) -> Iterator[Resource]:
    for tree in trees:
        yield _archive(tree)
        for file in source_files(tree.plan):
            kind = "patch" if file.patch else "file"
            yield _resource(file.urn, file.path, file.digest, source=file.image, kind=kind)
    for toolchain in toolchains_of(trees):
        ours = own_files(checkout, toolchain.plan)
        yield _toolchain(toolchain, ours)
        for part in toolchain.parts:
            yield _resource(
                part.urn,
                part.pin.file,
                part.pin.sha256,
                toolchain=toolchain.name,
                platform=toolchain.plan.platform,
                image=part.image,
                purl=part.purl,
                sizeBytes=part.pin.size_bytes,
                use=BUILD_TIME,
            )
        for file in ours:
            kind = "patch" if file.patch else "file"
            notes = {"image": file.image, "kind": kind, "use": BUILD_TIME}
            yield _resource(file.urn, file.path, file.digest, **notes)


def _archive(tree: ImageTree) -> Resource:
    source, lock = tree.plan.source, tree.plan.lock
    return _resource(
        source_urn(source.name),
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


def _toolchain(toolchain: Toolchain, ours: Sequence[OwnFile]) -> Resource:
    """An image that is compiled in, and all that decides it: each image of its chain by inputs."""
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
    return _resource(
        toolchain_urn(toolchain.name, toolchain.digest),
        toolchain.name,
        toolchain.digest,
        purl=toolchain.purl,
        platform=toolchain.plan.platform,
        chain=chain,
        use=BUILD_TIME,
    )


def _tree(tree: ImageTree) -> Resource:
    plan, made = tree.plan, tree.made
    # what names it stands beside this already, and how long it took proves nothing
    known = {"key", "source", "build", "platform", "toolchain", "layer", "seconds", "version"}
    return _resource(
        tree_urn(plan.source.name, plan.name),
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
        origin=tree.objects_text,
    )


def _resource(uri: str, name: str, digest: str, **annotations: Any) -> Resource:
    values = {"uri": uri, "name": name, "digest": DigestSet(sha256=digest.removeprefix("sha256:"))}
    # `exclude_unset` writes only what was given: no empty annotations
    return Resource.model_validate(
        {**values, "annotations": annotations} if annotations else values
    )


def _base(base: BaseImage) -> Resource:
    """A foreign base by the manifest of this platform; what is in it stays unknown."""
    pin = base.pin
    return _resource(
        base.purl,
        pin.repository,
        pin.manifest.digest,
        image=base.image,
        index=pin.index.digest if pin.index else "none: the manifest itself is asked for",
        config=pin.config.digest,
        layers=[layer.digest for layer in pin.layers],
        contents=UNLISTED,
    )


def _part(part: ImagePart) -> Resource:
    return _resource(
        part.purl,
        part.pin.file,
        part.pin.sha256,
        image=part.image,
        layer=part.layer.record.digest,
        sizeBytes=part.pin.size_bytes,
    )


def _file(file: OwnFile) -> Resource:
    kind = "patch" if file.patch else "file"
    return _resource(file.urn, file.path, file.digest, image=file.image, kind=kind)


def _locks(plan: ImagePlan) -> list[Resource]:
    return [
        _resource(lock_urn(each.spec.name, each.platform), "lock seal", each.lock.seal)
        for each in plan.chain()
    ]


def _golden(checkout: Checkout, built: Built) -> Resource:
    label = f"{built.name}.{built.platform.partition('/')[2]}"
    known = read_golden(checkout.golden_path).images.get(label)
    urn = golden_urn(built.name, built.platform)
    if known is None:
        why = {"unknown": "no golden digest was committed for this image"}
        return Resource(uri=urn, name="golden digest", annotations=why)
    return _resource(urn, "golden digest", known.digest)


def _layers(built: Built) -> list[Resource]:
    return [
        _resource(
            layer_urn(x.image, x.layer.title),
            x.layer.title,
            x.layer.record.digest,
            diffId=x.layer.record.diff_id,
            sizeBytes=x.layer.record.size_bytes,
        )
        for x in placed_layers(built)
    ]


def read_provenance(predicate: dict[str, Any]) -> Provenance:
    """The provenance of one of our images, whole and without contradictions."""
    provenance = as_model(Provenance, predicate, "provenance", "the predicate")
    definition, builder = provenance.definition, provenance.run.builder
    # another builder's provenance may mean something else by the same fields
    if definition.build_type != BUILD_TYPE:
        raise RecordInvalid(f"provenance: {definition.build_type}: is not a build type of ours")
    if builder.id != BUILDER:
        raise RecordInvalid(f"provenance: {builder.id}: is not a builder of ours")
    _require_accounted(provenance)
    return provenance


def _require_accounted(provenance: Provenance) -> None:
    """Every material is of a known kind, has a digest, and is listed once."""
    definition = provenance.definition
    known = [*provenance.packages("pypi"), *provenance.packages("deb"), *provenance.files]
    known += [*provenance.bases, *provenance.base_layers]
    known += [*provenance.archives, *provenance.toolchains, *provenance.build_time]
    for resource in definition.dependencies:
        if resource not in known:
            raise RecordInvalid(f"provenance: {resource.uri}: is not a known kind of material")
        if resource.digest is None:
            raise RecordInvalid(f"provenance: {resource.uri}: has no digest")
    images = definition.external.images.keys()
    if definition.external.image not in images or provenance.locks.keys() - images:
        raise RecordInvalid("provenance: names an image without its spec")
    # two digests under one name would let a reader choose
    uris = [x.uri for x in (*definition.dependencies, *provenance.trees)]
    if len(uris) != len(set(uris)):
        doubled = next(u for u in uris if uris.count(u) > 1)
        raise RecordInvalid(f"provenance: {doubled}: is listed twice")

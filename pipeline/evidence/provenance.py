"""SLSA provenance v1 of an image, written and read back: spec, every input by digest, builder.

On one's own machine this is SLSA Build L1 plus a signature; nothing here claims more.
https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipeline import __version__
from pipeline.assemble.golden import read_golden
from pipeline.assemble.image import Built, code_digest
from pipeline.assemble.plan import FORMAT, ImagePlan
from pipeline.attest.names import (
    BUILD_TYPE,
    BUILDER,
    PROVENANCE,
    UNLISTED,
    golden_urn,
    layer_urn,
    lock_urn,
)
from pipeline.attest.statement import DigestSet, Moment, Statement, make_statement
from pipeline.attest.strict import as_model
from pipeline.errors import RecordInvalid
from pipeline.evidence.inventory import (
    BaseImage,
    ImagePart,
    OwnFile,
    base_image,
    own_files,
    parts_of,
    placed_layers,
)
from pipeline.model import Digest, Frozen, Identity, Name, Platform, Stamp
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import DEFAULT_ARCH


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
    def gates(self) -> list[str]:
        """The gates it asked for; patches are judged together with shared memory."""
        listed = self.spec.get("gates")
        gates = [str(g) for g in listed] if isinstance(listed, list) else []
        return [*gates, "patches"] if "smem" in gates and self.series.get("patches") else gates

    @property
    def cards(self) -> list[str]:
        """The cards it was for, by machine code and by number: kernels are compiled for those."""
        cuda = self.spec.get("cuda")
        listed = cuda.get("architectures") if isinstance(cuda, dict) else None
        named = [str(card) for card in listed] if isinstance(listed, list) else []
        return [*named, *(card.rstrip("af") for card in named)] or [DEFAULT_ARCH]


class _External(Frozen):
    image: Name
    platform: Platform
    images: dict[Name, SpecMaterial]


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

    @property
    def bases(self) -> list[Resource]:
        """Foreign base images."""
        return [x for x in self.definition.dependencies if x.uri.startswith("pkg:oci/")]


def image_provenance(checkout: Checkout, built: Built, when: Moment | None = None) -> Statement:
    """What an image was made of and by what."""
    predicate = Provenance(
        buildDefinition=_Definition(
            buildType=BUILD_TYPE,
            externalParameters=_external(checkout, built.plan),
            internalParameters=_Internal(format=FORMAT, builderCode=code_digest()),
            resolvedDependencies=_dependencies(checkout, built),
        ),
        runDetails=_Run(
            builder=_Builder(id=BUILDER, version={"sm120-pipeline": __version__}),
            byproducts=[*_locks(built.plan), _golden(checkout, built), *_layers(built)],
        ),
    )
    # fields without a value are left out, not written as null
    body = predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return make_statement(built.name, built.digest, PROVENANCE, body, when)


def _external(checkout: Checkout, plan: ImagePlan) -> _External:
    """The spec: image.yaml and series.yaml of the image and of those it stands on."""
    images = {
        each.spec.name: SpecMaterial(
            # as people write it, so that a reader can compare it with the file
            spec=each.spec.dumped(),
            series=checkout.series(each.spec).model_dump(mode="json"),
        )
        for each in plan.chain()
    }
    return _External(image=plan.spec.name, platform=plan.platform, images=images)


def _dependencies(checkout: Checkout, built: Built) -> list[Resource]:
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
    return materials


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
    for resource in definition.dependencies:
        if resource not in known:
            raise RecordInvalid(f"provenance: {resource.uri}: is not a known kind of material")
        if resource.digest is None:
            raise RecordInvalid(f"provenance: {resource.uri}: has no digest")
    images = definition.external.images.keys()
    if definition.external.image not in images or provenance.locks.keys() - images:
        raise RecordInvalid("provenance: names an image without its spec")
    # two digests under one name would let a reader choose
    uris = [x.uri for x in definition.dependencies]
    if len(uris) != len(set(uris)):
        doubled = next(u for u in uris if uris.count(u) > 1)
        raise RecordInvalid(f"provenance: {doubled}: is listed twice")

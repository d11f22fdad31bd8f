"""SLSA provenance read back as a closed value; what it leaves out or says twice is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.attest.names import BUILD_TYPE, BUILDER
from pipeline.attest.statement import DigestSet
from pipeline.attest.strict import as_model
from pipeline.errors import RecordInvalid
from pipeline.model import Digest, Frozen, Identity, Name, Platform, Stamp

DEFAULT_CARD = "sm_120"


class Resource(Frozen):
    """A thing by digest; without one it says why."""

    uri: Identity
    name: str
    digest: DigestSet | None = None
    annotations: dict[str, Any] = {}

    @property
    def sha256(self) -> str:
        return self.digest.sha256 if self.digest else ""


class SpecMaterial(Frozen):
    """An image.yaml and its series as they were."""

    spec: dict[str, Any]
    series: dict[str, Any]

    @property
    def gates(self) -> list[str]:
        """The gates it asked for; patches are judged together with shared memory."""
        found = self.spec.get("gates")
        gates = [str(g) for g in found] if isinstance(found, list) else []
        return [*gates, "patches"] if "smem" in gates and self.series.get("patches") else gates

    @property
    def cards(self) -> list[str]:
        """The cards it was for, and the one that every image is judged for."""
        cuda = self.spec.get("cuda")
        found = cuda.get("architectures") if isinstance(cuda, dict) else None
        named = [str(card) for card in found] if isinstance(found, list) else []
        return [DEFAULT_CARD, *named]


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
    dependencies: Annotated[
        list[Resource], Field(alias="resolvedDependencies", min_length=1, max_length=10_000)
    ]


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


def read_provenance(predicate: dict[str, Any]) -> Provenance:
    """The provenance of one of our images, whole and without contradictions."""
    found = as_model(Provenance, predicate, "provenance", "the predicate")
    if found.definition.build_type != BUILD_TYPE:
        raise RecordInvalid(f"provenance: {found.definition.build_type}: no build type of ours")
    if found.run.builder.id != BUILDER:
        raise RecordInvalid(f"provenance: {found.run.builder.id}: no builder of ours")
    _require_accounted(found)
    return found


def _require_accounted(found: Provenance) -> None:
    known = [*found.packages("pypi"), *found.packages("deb"), *found.files]
    known += [*found.bases, *found.base_layers]
    for resource in found.definition.dependencies:
        if resource not in known:
            raise RecordInvalid(f"provenance: {resource.uri}: a material of no known kind")
        if resource.digest is None:
            raise RecordInvalid(f"provenance: {resource.uri}: a material without a digest")
    images = found.definition.external.images.keys()
    if found.definition.external.image not in images or found.locks.keys() - images:
        raise RecordInvalid("provenance: speaks of an image whose spec it does not hold")
    uris = [x.uri for x in found.definition.dependencies]
    if len(uris) != len(set(uris)):
        doubled = next(u for u in uris if uris.count(u) > 1)
        raise RecordInvalid(f"provenance: {doubled}: is there twice")

"""A foreign base as a lock holds it: every document and layer by digest and size."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from pipeline.model import Digest, Frozen, RepositoryPath
from pipeline.oci.document import LayerType

Size = Annotated[int, Field(gt=0)]
MOST_LAYERS = 127  # more than that no container engine mounts


class BlobPin(Frozen):
    """A part of a foreign base: an index, a manifest or a config."""

    digest: Digest
    size_bytes: Size


class LayerPin(BlobPin):
    """A layer of a foreign base, taken as it is."""

    diff_id: Digest
    media_type: LayerType


class BasePin(Frozen):
    """A foreign base for one platform: every document and layer by digest, and no place."""

    repository: RepositoryPath
    index: BlobPin | None
    manifest: BlobPin
    config: BlobPin
    layers: Annotated[list[LayerPin], Field(min_length=1, max_length=MOST_LAYERS)]

    def __str__(self) -> str:
        return f"{self.repository}@{self.manifest.digest}"

    @property
    def asked(self) -> str:
        """The digest that the spec names."""
        return (self.index or self.manifest).digest

    @property
    def documents(self) -> list[BlobPin]:
        """Index and manifest, then the config: small, and all that decides but the layers."""
        return [*([self.index] if self.index else []), self.manifest, self.config]

    @property
    def blobs(self) -> list[BlobPin]:
        """Config and layers, each once."""
        found = {x.digest: x.size_bytes for x in (self.config, *self.layers)}
        return [BlobPin(digest=d, size_bytes=n) for d, n in found.items()]


def dump_base(base: BasePin | None) -> list[str]:
    """Its lines in a lock: one a layer; none where there is no such base."""
    if base is None:
        return []
    found: dict[str, Any] = base.model_dump()
    layers = found.pop("layers")
    lines = [f"  {name}: {json.dumps(value)}" for name, value in found.items()]
    return ["base_image:", *lines, "  layers:", *(f"  - {json.dumps(x)}" for x in layers)]

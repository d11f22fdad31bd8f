"""SLSA provenance v1 of an image: the spec, every input by digest, and what built it.

On one's own machine this is SLSA Build L1 plus a signature; nothing here claims more.
"""

from __future__ import annotations

from typing import Any

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
from pipeline.attest.statement import Moment, Statement, make_statement
from pipeline.evidence.inventory import (
    BaseImage,
    OwnFile,
    Part,
    base_image,
    own_files,
    parts_of,
    placed_layers,
)
from pipeline.spec.checkout import Checkout


def image_provenance(
    checkout: Checkout, plan: ImagePlan, built: Built, when: Moment | None = None
) -> Statement:
    """What an image was made of and by what."""
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": external_parameters(checkout, plan),
            "internalParameters": {"format": FORMAT, "builderCode": code_digest()},
            "resolvedDependencies": _dependencies(checkout, plan, built),
        },
        "runDetails": {
            "builder": {"id": BUILDER, "version": {"sm120-pipeline": __version__}},
            "byproducts": [*_locks(plan), _golden(checkout, built), *_layers(plan, built)],
        },
    }
    return make_statement(built.name, built.digest, PROVENANCE, predicate, when)


def external_parameters(checkout: Checkout, plan: ImagePlan) -> dict[str, Any]:
    """The spec: image.yaml and series.yaml of the image and of those it stands on."""
    images = {
        each.spec.name: {
            "spec": each.spec.model_dump(mode="json", by_alias=True),
            "series": checkout.series(each.spec).model_dump(mode="json"),
        }
        for each in plan.chain()
    }
    return {"image": plan.spec.name, "platform": plan.platform, "images": images}


def _dependencies(checkout: Checkout, plan: ImagePlan, built: Built) -> list[dict[str, Any]]:
    base = base_image(plan)
    found = [_base(base)] if base else []
    found += [_part(part) for part in parts_of(plan, built)]
    found += [_file(file) for file in own_files(checkout, plan)]
    found += [
        descriptor(layer_urn(x.image, x.layer.title), x.layer.title, x.layer.record.digest)
        for x in placed_layers(plan, built)
        if x.image != plan.spec.name or x.base is not None
    ]
    return found


def descriptor(uri: str, name: str, digest: str, **annotations: Any) -> dict[str, Any]:
    """An in-toto resource descriptor."""
    found: dict[str, Any] = {
        "uri": uri,
        "name": name,
        "digest": {"sha256": digest.removeprefix("sha256:")},
    }
    return {**found, "annotations": annotations} if annotations else found


def _base(base: BaseImage) -> dict[str, Any]:
    """A foreign base by the manifest of this platform; what is in it stays unknown."""
    pin = base.pin
    return descriptor(
        base.purl,
        pin.repository,
        pin.manifest.digest,
        image=base.image,
        index=pin.index.digest if pin.index else "none: the manifest itself is asked for",
        config=pin.config.digest,
        layers=[layer.digest for layer in pin.layers],
        contents=UNLISTED,
    )


def _part(part: Part) -> dict[str, Any]:
    return descriptor(
        part.purl,
        part.pin.file,
        part.pin.sha256,
        image=part.image,
        layer=part.layer.record.digest,
        sizeBytes=part.pin.size_bytes,
    )


def _file(file: OwnFile) -> dict[str, Any]:
    kind = "patch" if file.patch else "file"
    return descriptor(file.urn, file.path, file.digest, image=file.image, kind=kind)


def _locks(plan: ImagePlan) -> list[dict[str, Any]]:
    return [
        descriptor(lock_urn(each.spec.name, each.platform), "lock seal", each.lock.seal)
        for each in plan.chain()
    ]


def _golden(checkout: Checkout, built: Built) -> dict[str, Any]:
    label = f"{built.name}.{built.platform.partition('/')[2]}"
    known = read_golden(checkout.golden_path).images.get(label)
    urn = golden_urn(built.name, built.platform)
    if known is None:
        why = {"unknown": "no golden digest was committed for this image"}
        return {"uri": urn, "name": "golden digest", "annotations": why}
    return descriptor(urn, "golden digest", known.digest)


def _layers(plan: ImagePlan, built: Built) -> list[dict[str, Any]]:
    return [
        descriptor(
            layer_urn(x.image, x.layer.title),
            x.layer.title,
            x.layer.record.digest,
            diffId=x.layer.record.diff_id,
            sizeBytes=x.layer.record.size_bytes,
        )
        for x in placed_layers(plan, built)
    ]

"""Image config and manifest, as pure functions of what an image is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.build.plan import FORMAT, ImagePlan
from pipeline.errors import WishInvalid
from pipeline.store.record import LayerRecord
from pipeline.wish.image import Account

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
# Nothing in an image says when it was built: that would make every build another image.
CREATED = "1980-01-01T00:00:00Z"
_PREFIX = "org.opencontainers.image."


@dataclass(frozen=True)
class TitledLayer:
    """A finished layer and what a person calls it."""

    title: str
    record: LayerRecord


def image_config(plan: ImagePlan, layers: list[TitledLayer]) -> dict[str, Any]:
    """The OCI config: how the image runs, and the diffIDs of its layers."""
    wish = plan.wish
    settings: dict[str, Any] = {
        "Env": [f"{k}={v}" for k, v in sorted(environment(plan).items())],
        "Labels": notes_of(plan),
        "WorkingDir": _inherited(plan, "workdir") or "/",
    }
    if wish.entrypoint:
        settings["Entrypoint"] = wish.entrypoint
    if wish.command:
        settings["Cmd"] = wish.command
    if wish.ports:
        settings["ExposedPorts"] = {f"{port}/tcp": {} for port in wish.ports}
    if user := _inherited(plan, "user"):
        account = _account(plan, user)
        settings["User"] = f"{account.uid}:{account.gid}"
    return {
        "architecture": plan.architecture,
        "os": "linux",
        "created": CREATED,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [x.record.diff_id for x in layers]},
        "history": [{"created": CREATED, "created_by": f"sm120: {x.title}"} for x in layers],
    }


def _inherited(plan: ImagePlan, field: str) -> str | None:
    """The image's own setting, else that of the nearest base that has one."""
    values: list[str | None] = [getattr(p.wish, field) for p in plan.chain()]
    return next((v for v in reversed(values) if v), None)


def environment(plan: ImagePlan) -> dict[str, str]:
    """The base's variables, then the image's own."""
    return {k: v for p in plan.chain() for k, v in p.wish.env.items()}


def _account(plan: ImagePlan, name: str) -> Account:
    accounts = [a for p in plan.chain() for a in p.wish.accounts]
    found = next((a for a in accounts if a.name == name), None)
    if found is None:
        raise WishInvalid(f"{plan.wish.name}: user: {name!r} is not an account of its root image")
    return found


def notes_of(plan: ImagePlan) -> dict[str, str]:
    """What registries and people read, the same in labels and in the manifest."""
    wish = plan.wish
    notes = {
        f"{_PREFIX}title": wish.name,
        f"{_PREFIX}description": wish.summary,
        "sm120.format": str(FORMAT),
        "sm120.lock": plan.lock.seal,
        "sm120.inputs": plan.key,
    }
    if wish.base:
        notes[f"{_PREFIX}base.name"] = wish.base
    if wish.cuda and wish.cuda.architectures:
        notes["sm120.architectures"] = ",".join(wish.cuda.architectures)
    if wish.python:
        engine = wish.python.requirements[0].partition("==")
        notes[f"{_PREFIX}version"] = engine[2]
    return {**notes, **wish.labels}


def manifest(
    plan: ImagePlan, config_digest: str, config_size: int, layers: list[TitledLayer]
) -> dict[str, Any]:
    """The OCI manifest."""
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": config_digest, "size": config_size},
        "layers": [
            {
                "mediaType": LAYER,
                "digest": x.record.digest,
                "size": x.record.size_bytes,
                "annotations": {f"{_PREFIX}title": x.title},
            }
            for x in layers
        ],
        "annotations": notes_of(plan),
    }


def descriptor(plan: ImagePlan, digest: str, size_bytes: int) -> dict[str, Any]:
    """The image's line in an index."""
    return {
        "mediaType": MANIFEST,
        "digest": digest,
        "size": size_bytes,
        "platform": {"os": "linux", "architecture": plan.architecture},
        "annotations": {f"{_PREFIX}ref.name": f"{plan.wish.name}-{plan.architecture}"},
    }

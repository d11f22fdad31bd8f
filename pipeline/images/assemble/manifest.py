"""Image config and manifest, as pure functions of what an image is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts.oci.config import ImageConfig, RunSettings
from pipeline.artifacts.oci.document import (
    OCI_CONFIG,
    OCI_MANIFEST,
    TITLE,
    Descriptor,
    descriptor_json,
)
from pipeline.artifacts.oci.record import TitledLayer
from pipeline.core.errors import SpecInvalid
from pipeline.core.model import sha256_of
from pipeline.images.assemble.plan import FORMAT, ImagePlan

# Docker's own default where an image sets no PATH.
_PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Images carry no build time: it would give every build another digest.
CREATED = "1980-01-01T00:00:00Z"
_PREFIX = "org.opencontainers.image."


@dataclass(frozen=True)
class Below:
    """How a foreign base runs, and who its users are."""

    config: ImageConfig
    find_user: Callable[[str], str]


def image_config(
    plan: ImagePlan, layers: list[TitledLayer], below: Below | None = None
) -> dict[str, Any]:
    """The OCI config: how the image runs, and the diffIDs of its layers.

    A foreign base's variables, user, folder, ports, volumes and stop signal stay where the image
    sets nothing else. Its labels do not: they describe another image.
    """
    base = below.config.runs if below else RunSettings.model_validate({})
    specs = [each.spec for each in plan.chain()]
    workdirs, users = [x.workdir for x in specs if x.workdir], [x.user for x in specs if x.user]
    variables = below.config.variables() if below else {}
    if below and any(spec.python for spec in specs):
        # wheels on a foreign base come first
        variables["PATH"] = f"/{plan.venv.bin}:{variables.get('PATH') or _PLAIN_PATH}"
    variables |= {k: v for spec in specs for k, v in spec.env.items()}
    # as Docker inherits them: an own entrypoint drops a base's command
    entrypoint, command = base.entrypoint or [], base.command or []
    for spec in specs:
        command = spec.command or ([] if spec.entrypoint else command)
        entrypoint = spec.entrypoint or entrypoint
    user = base.user
    if users:
        # by number: no lookup at run time, and Kubernetes can check it
        user = below.find_user(users[-1]) if below else _account(plan, users[-1])
    ports = {f"{port}/tcp" for spec in specs for port in spec.ports} | set(base.ports or {})
    settings: dict[str, Any] = {
        # sorted, as everything that a digest is made of
        "Env": [f"{k}={v}" for k, v in sorted(variables.items())],
        "Labels": notes_of(plan),
        "WorkingDir": workdirs[-1] if workdirs else base.workdir or "/",
    }
    optional: dict[str, Any] = {
        "Entrypoint": entrypoint,
        "Cmd": command,
        "ExposedPorts": {port: {} for port in sorted(ports)},
        "Volumes": {path: {} for path in sorted(base.volumes or {})},
        "StopSignal": base.stop_signal,
        "User": user,
    }
    # the base's own steps as they are, where they fit its layers; a step for each other layer
    past = below.config.past() if below else None
    known = len(below.config.rootfs.diff_ids) if below and past is not None else 0
    ours = [{"created": CREATED, "created_by": f"sm120: {x.title}"} for x in layers[known:]]
    return {
        "architecture": plan.architecture,
        "os": "linux",
        "created": CREATED,
        "config": settings | {name: value for name, value in optional.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [x.record.diff_id for x in layers]},
        "history": [*(past or []), *ours],
    }


def _account(plan: ImagePlan, name: str) -> str:
    for account in (a for p in plan.chain() for a in p.spec.accounts):
        if account.name == name:
            return f"{account.uid}:{account.gid}"
    raise SpecInvalid(f"{plan.spec.name}: user: {name!r} is not an account of its root image")


def notes_of(plan: ImagePlan) -> dict[str, str]:
    """What registries and people read, the same in labels and in the manifest."""
    spec = plan.spec
    notes = {
        TITLE: spec.name,
        f"{_PREFIX}description": spec.summary,
        "sm120.format": str(FORMAT),
        "sm120.lock": plan.lock.seal,
        "sm120.inputs": plan.key,
    }
    if spec.parent:
        notes[f"{_PREFIX}base.name"] = spec.parent
    if plan.lock.base_image:
        notes[f"{_PREFIX}base.name"] = plan.lock.base_image.repository
        notes[f"{_PREFIX}base.digest"] = plan.lock.base_image.manifest.digest
    if spec.cuda and spec.cuda.architectures:
        notes["sm120.architectures"] = ",".join(spec.cuda.architectures)
    if spec.python:
        # the first requirement is the engine, pinned with ==
        notes[f"{_PREFIX}version"] = spec.python.requirements[0].partition("==")[2]
    return {**notes, **spec.labels}


def image_manifest(
    plan: ImagePlan, config: Descriptor, layers: list[TitledLayer]
) -> dict[str, Any]:
    """The OCI manifest."""
    described = [
        Descriptor(
            media_type=x.record.media_type,
            digest=x.record.digest,
            size_bytes=x.record.size_bytes,
            annotations={TITLE: x.title},
        )
        for x in layers
    ]
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor_json(config),
        "layers": [descriptor_json(x) for x in described],
        "annotations": notes_of(plan),
    }


def config_descriptor(config: bytes) -> Descriptor:
    """How a manifest names the image's config."""
    return Descriptor(media_type=OCI_CONFIG, digest=sha256_of(config), size_bytes=len(config))


def image_descriptor(plan: ImagePlan, manifest: bytes) -> Descriptor:
    """The image's line in an index."""
    return Descriptor(
        media_type=OCI_MANIFEST,
        digest=sha256_of(manifest),
        size_bytes=len(manifest),
        platform=plan.platform,
        annotations={f"{_PREFIX}ref.name": f"{plan.spec.name}-{plan.architecture}"},
    )

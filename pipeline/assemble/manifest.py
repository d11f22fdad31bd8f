"""Image config and manifest, as pure functions of what an image is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.assemble.plan import FORMAT, ImagePlan
from pipeline.errors import SpecInvalid
from pipeline.model import sha256_of
from pipeline.oci.config import ImageConfig
from pipeline.oci.document import OCI_CONFIG, OCI_MANIFEST, Descriptor, descriptor_json
from pipeline.oci.record import TitledLayer

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

    Of a foreign base its variables, user, folder, ports, volumes and stop signal are kept where
    the image sets nothing else. Its labels are not: they describe another image.
    """
    settings: dict[str, Any] = {
        # sorted, as everything that a digest is made of
        "Env": [f"{k}={v}" for k, v in sorted(environment(plan, below).items())],
        "Labels": notes_of(plan),
        "WorkingDir": _inherited(plan, "workdir") or _of_base(below, "workdir") or "/",
        **_started(plan, below),
        **_kept(plan, below),
    }
    if user := _inherited(plan, "user"):
        # by number: the user need not be looked up at run time, and Kubernetes can check it
        settings["User"] = below.find_user(user) if below else _account(plan, user)
    elif user := _of_base(below, "user"):
        settings["User"] = user
    return {
        "architecture": plan.architecture,
        "os": "linux",
        "created": CREATED,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [x.record.diff_id for x in layers]},
        "history": _history(layers, below),
    }


def _of_base(below: Below | None, field: str) -> Any:
    return getattr(below.config.runs, field) if below else None


def _started(plan: ImagePlan, below: Below | None) -> dict[str, list[str]]:
    """Entrypoint and command as Docker inherits them: an own entrypoint drops a base's command."""
    entrypoint: list[str] = _of_base(below, "entrypoint") or []
    command: list[str] = _of_base(below, "command") or []
    for spec in (each.spec for each in plan.chain()):
        command = spec.command or ([] if spec.entrypoint else command)
        entrypoint = spec.entrypoint or entrypoint
    started = {"Entrypoint": entrypoint, "Cmd": command}
    return {name: arguments for name, arguments in started.items() if arguments}


def _kept(plan: ImagePlan, below: Below | None) -> dict[str, Any]:
    """Ports of the image and of its bases; a foreign base's volumes and stop signal."""
    settings: dict[str, Any] = {}
    own = {f"{port}/tcp" for each in plan.chain() for port in each.spec.ports}
    ports = own | set(_of_base(below, "ports") or {})
    if ports:
        settings["ExposedPorts"] = {port: {} for port in sorted(ports)}
    if volumes := _of_base(below, "volumes"):
        settings["Volumes"] = {path: {} for path in sorted(volumes)}
    if signal := _of_base(below, "stop_signal"):
        settings["StopSignal"] = signal
    return settings


def _history(layers: list[TitledLayer], below: Below | None) -> list[dict[str, Any]]:
    """The base's own steps as they are, where they fit its layers; a step for each other layer."""
    past = below.config.past() if below else None
    known = len(below.config.rootfs.diff_ids) if below and past is not None else 0
    ours = [{"created": CREATED, "created_by": f"sm120: {x.title}"} for x in layers[known:]]
    return [*(past or []), *ours]


def _inherited(plan: ImagePlan, field: str) -> str | None:
    """The image's own setting, else that of the nearest base that has one."""
    values: list[str | None] = [getattr(p.spec, field) for p in plan.chain()]
    return next((v for v in reversed(values) if v), None)


def environment(plan: ImagePlan, below: Below | None = None) -> dict[str, str]:
    """The base's variables, then the image's own; wheels on a foreign base come first in PATH."""
    own = {k: v for p in plan.chain() for k, v in p.spec.env.items()}
    if below is None:
        return own
    variables = below.config.variables()
    if any(p.spec.python for p in plan.chain()):
        variables["PATH"] = f"/{plan.venv.bin}:{variables.get('PATH') or _PLAIN_PATH}"
    return {**variables, **own}


def _account(plan: ImagePlan, name: str) -> str:
    accounts = [a for p in plan.chain() for a in p.spec.accounts]
    account = next((a for a in accounts if a.name == name), None)
    if account is None:
        raise SpecInvalid(f"{plan.spec.name}: user: {name!r} is not an account of its root image")
    return f"{account.uid}:{account.gid}"


def notes_of(plan: ImagePlan) -> dict[str, str]:
    """What registries and people read, the same in labels and in the manifest."""
    spec = plan.spec
    notes = {
        f"{_PREFIX}title": spec.name,
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
        engine = spec.python.requirements[0].partition("==")
        notes[f"{_PREFIX}version"] = engine[2]
    return {**notes, **spec.labels}


def image_manifest(
    plan: ImagePlan, config: Descriptor, layers: list[TitledLayer]
) -> dict[str, Any]:
    """The OCI manifest."""
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor_json(config),
        "layers": [descriptor_json(_layer_descriptor(x)) for x in layers],
        "annotations": notes_of(plan),
    }


def _layer_descriptor(layer: TitledLayer) -> Descriptor:
    return Descriptor(
        media_type=layer.record.media_type,
        digest=layer.record.digest,
        size_bytes=layer.record.size_bytes,
        annotations={f"{_PREFIX}title": layer.title},
    )


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

"""A Deployment and a Service for Kubernetes."""

from __future__ import annotations

import re
from typing import Any

from pipeline.errors import RecipeInvalid
from pipeline.recipe.container import cache_of, container_name
from pipeline.recipe.launch import Launch, Mount
from pipeline.recipe.render.target import (
    NCCL_LIBRARY,
    NCCL_SETTINGS,
    USER_ID,
    Target,
    locks_memory,
    mounts,
    shm_bytes,
)
from pipeline.recipe.render.yaml_text import dump, with_dollars_doubled

# a Service's name is a part of a DNS name
_LONGEST_NAME = 63
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NCCL_MAP = "sm120-nccl"


def render_kubernetes(launch: Launch, target: Target) -> str:
    """The objects for `kubectl apply -f`."""
    name = container_name(launch.recipe)
    if len(name) > _LONGEST_NAME:
        raise RecipeInvalid(
            f"{name}: is longer than the {_LONGEST_NAME} characters of a name in Kubernetes",
            "Copy the recipe under a shorter name.",
        )
    if not _LABEL.fullmatch(name):
        raise RecipeInvalid(
            f"{name}: a name in Kubernetes ends in a letter or a digit",
            "Copy the recipe under a name that does.",
        )
    if target.claim and not _CLAIM.fullmatch(target.claim):
        raise RecipeInvalid(
            f"{target.claim!r} is no name of a PersistentVolumeClaim",
            "`kubectl get persistentvolumeclaims` shows their names.",
        )
    if target.gpus is not None:
        raise RecipeInvalid("Kubernetes chooses the GPUs itself", "Leave --gpus out.")
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "sm120"}
    return _head(launch, target) + dump(
        [_deployment(launch, target, name, labels), _service(launch, name, labels)]
    )


def _head(launch: Launch, target: Target) -> str:
    lines = ["# `kubectl apply -f` this file."]
    if locks_memory(launch):
        # most clusters have no field for it (kubernetes/kubernetes#3595)
        lines.append("# Locked memory: set LimitMEMLOCK=infinity for the node's container runtime.")
    if target.nccl:
        lines.append(
            f"# First, on the node: kubectl create configmap {_NCCL_MAP}"
            f" --from-env-file={NCCL_SETTINGS}"
        )
    return "\n".join(lines) + "\n"


def _deployment(
    launch: Launch, target: Target, name: str, labels: dict[str, str]
) -> dict[str, Any]:
    chosen = {"app.kubernetes.io/name": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            # the old pod holds the cards that the new one needs
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": chosen},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": USER_ID,
                        "runAsGroup": USER_ID,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [_container(launch, target)],
                    "volumes": _volumes(launch, target),
                },
            },
        },
    }


def _container(launch: Launch, target: Target) -> dict[str, Any]:
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if launch.container.capabilities:
        capabilities["add"] = list(launch.container.capabilities)
    values = with_dollars_doubled(dict(launch.environment))
    container: dict[str, Any] = {
        "name": "engine",
        "image": target.image,
        "imagePullPolicy": "Never" if target.is_local else "IfNotPresent",
        # `$(NAME)` would be a variable
        "args": with_dollars_doubled(list(launch.arguments)),
        "envFrom": [{"configMapRef": {"name": _NCCL_MAP}}] if target.nccl else None,
        "env": [{"name": key, "value": value} for key, value in values.items()],
        "ports": [{"name": "http", "containerPort": launch.port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
        "resources": {"limits": {"nvidia.com/gpu": launch.cards}} if launch.cards else None,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": _volume_mounts(launch, target),
    }
    return {key: value for key, value in container.items() if value}


def _volume_mounts(launch: Launch, target: Target) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": _volume_name(mount), "mountPath": mount.inside, "readOnly": mount.read_only}
        for mount in mounts(launch, target)
    ]
    if launch.cards:
        found.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    if cache := cache_of(launch):
        found.append({"name": "cache", "mountPath": cache.inside})
    return found


def _volumes(launch: Launch, target: Target) -> list[dict[str, Any]]:
    volumes = [_volume(mount, target) for mount in mounts(launch, target)]
    if launch.cards:
        # instead of the node's IPC namespace, which most clusters forbid
        bound = {"sizeLimit": str(size)} if (size := shm_bytes(launch)) else {}
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **bound}})
    if cache_of(launch):
        # of the pod, so that no other image or recipe sees it
        volumes.append({"name": "cache", "emptyDir": {}})
    return volumes


def _volume(mount: Mount, target: Target) -> dict[str, Any]:
    name = _volume_name(mount)
    if name == "models" and target.claim:
        claim = {"claimName": target.claim, "readOnly": mount.read_only}
        return {"name": name, "persistentVolumeClaim": claim}
    return {"name": name, "hostPath": {"path": mount.host, "type": "Directory"}}


def _volume_name(mount: Mount) -> str:
    return "nccl" if mount == NCCL_LIBRARY else mount.inside.strip("/").replace("/", "-")


def _service(launch: Launch, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"app.kubernetes.io/name": name},
            "ports": [{"name": "http", "port": launch.port, "targetPort": "http"}],
        },
    }

"""A launch as YAML: a Compose file, and a Deployment with its Service for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from pipeline.artifacts.oci.reference import parse_reference
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.container import (
    NCCL_LIBRARY,
    NCCL_SETTINGS,
    RDMA_DEVICES,
    LaunchTarget,
    contained,
    container_name,
    published,
)
from pipeline.serving.recipe.launch import Launch

# YAML 1.1, which PyYAML writes, and 1.2, which these tools read, differ in what is a number
# (`1e3`, `0o17`) and in what is a switch (`y`).
_UNSURE = re.compile(r"[-+.]?[0-9.].*|[yYnN]", re.DOTALL)
# A Service's name is a part of a DNS name.
_LONGEST_NAME = 63
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NCCL_MAP = "sm120-nccl"
# The user of the images. Kubernetes can tell only of a number that it is not root.
_USER_ID = 1000


class _Dumper(yaml.SafeDumper):
    """Writes the same list twice, and texts that every reader takes for texts."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "'" if _UNSURE.fullmatch(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _dump(documents: Sequence[dict[str, Any]]) -> str:
    # no line is folded: people find a value by searching for it
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=1 << 20, allow_unicode=True
    )


def _with_dollars_doubled(value: Any) -> Any:
    """The same value, in which no `$` begins a variable."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, list):
        return [_with_dollars_doubled(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_dollars_doubled(each) for key, each in value.items()}
    return value


def render_compose(launch: Launch, target: LaunchTarget) -> str:
    """The file for `docker compose up`."""
    container, is_bare = contained(launch, target), not launch.container.as_documented
    volumes: list[dict[str, Any]] = []
    for mount in container.mounts:
        place = {"source": mount.host, "target": mount.inside, "read_only": mount.read_only}
        # a path with a typing error must not become an empty folder
        volumes.append({"type": "bind", **place, "bind": {"create_host_path": False}})
    cache = container.cache
    if cache:
        volumes.append({"type": "volume", "source": "cache", "target": cache.inside})
    cards: dict[str, Any] = {"driver": "cdi", "device_ids": container.devices}
    if not target.cdi and target.gpus is None:
        cards = {"driver": "nvidia", "count": "all"}
    elif not target.cdi:
        cards = {"driver": "nvidia", "device_ids": list(map(str, target.gpus or ()))}
    # `capabilities` says nothing to the driver cdi, but the Compose specification asks for it
    devices = {"devices": [{**cards, "capabilities": ["gpu"]}]}
    service = {
        "image": target.image,
        "pull_policy": "never" if target.is_local else None,
        "command": container.arguments,
        "restart": "unless-stopped",
        "network_mode": "host" if container.host_network else None,
        "ports": None if container.host_network else [published(container)],
        "devices": [RDMA_DEVICES] if target.rdma else None,
        "cap_drop": ["ALL"] if is_bare else None,
        "cap_add": container.capabilities,
        "security_opt": ["no-new-privileges"] if is_bare else None,
        "ipc": "host" if container.ipc == "host" else None,
        "shm_size": container.shm_bytes,
        "ulimits": {"memlock": -1} if container.memory_locked else None,
        "env_file": [NCCL_SETTINGS] if target.nccl else None,
        "environment": container.environment,
        "volumes": volumes,
        "deploy": {"resources": {"reservations": devices}} if container.devices else None,
    }
    engine = {key: value for key, value in service.items() if value}
    body: dict[str, Any] = {"name": container.name, "services": {"engine": engine}}
    if cache:
        body["volumes"] = {"cache": {"name": cache.name}}
    head = f"# compose.yaml: `docker compose up -d` in its folder starts {container.name}.\n"
    # Compose puts variables of the shell in place of `$NAME`
    return head + _dump([_with_dollars_doubled(body)])


def render_kubernetes(launch: Launch, target: LaunchTarget) -> str:
    """The objects for `kubectl apply -f`."""
    name = container_name(launch.recipe)
    if launch.nodes > 1:
        raise RecipeInvalid(
            f"{launch.recipe}: Kubernetes starts and ends pods of a Deployment one by one, and the"
            f" ranks of {launch.nodes} nodes must start and end together",
            "A LeaderWorkerSet does that; `--as docker` prints what each of its pods runs.",
        )
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
    if target.weights_image and target.claim:
        raise RecipeInvalid(
            "the weights cannot come from a claim and from an image", "Give one of the two."
        )
    # a tag may move: the pod would serve other weights after a restart
    if target.weights_image and parse_reference(target.weights_image).digest is None:
        raise RecipeInvalid(
            f"{target.weights_image}: an image of weights is named by its digest",
            "`sm120 weights image DIR` prints it: REGISTRY/REPO@sha256:….",
        )
    if target.gpus is not None:
        raise RecipeInvalid("Kubernetes chooses the GPUs itself", "Leave --gpus out.")
    head = "# `kubectl apply -f` this file.\n"
    if launch.cards and launch.container.memory_locked:
        # most clusters have no field for it (kubernetes/kubernetes#3595)
        head += "# Locked memory: set LimitMEMLOCK=infinity for the node's container runtime.\n"
    if target.nccl:
        command = f"kubectl create configmap {_NCCL_MAP} --from-env-file={NCCL_SETTINGS}"
        head += f"# First, on the node: {command}\n"
    container, volumes = _pod(launch, target)
    user = {"runAsNonRoot": True, "runAsUser": _USER_ID, "runAsGroup": _USER_ID}
    chosen = {"app.kubernetes.io/name": name}
    about = {"name": name, "labels": {**chosen, "app.kubernetes.io/managed-by": "sm120"}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": about,
        "spec": {
            "replicas": 1,
            # the old pod holds the cards that the new one needs
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": chosen},
            "template": {
                "metadata": {"labels": about["labels"]},
                "spec": {
                    "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }
    ports = [{"name": "http", "port": launch.port, "targetPort": "http"}]
    spec = {"selector": chosen, "ports": ports}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}
    return head + _dump([deployment, service])


def _pod(launch: Launch, target: LaunchTarget) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pod's one container, and its volumes."""
    own = contained(launch, target)
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    for mount in own.mounts:
        name = "nccl" if mount == NCCL_LIBRARY else mount.inside.strip("/").replace("/", "-")
        mounts.append({"name": name, "mountPath": mount.inside, "readOnly": mount.read_only})
        source: dict[str, Any] = {"hostPath": {"path": mount.host, "type": "Directory"}}
        if name == "models" and target.claim:
            claim = {"claimName": target.claim, "readOnly": mount.read_only}
            source = {"persistentVolumeClaim": claim}
        if name == "models" and target.weights_image:
            # on by default in Kubernetes 1.35: kubernetes.io, Use an Image Volume With a Pod
            image = {"reference": target.weights_image, "pullPolicy": "IfNotPresent"}
            source = {"image": image}
        volumes.append({"name": name, **source})
    if launch.cards:
        # instead of the node's IPC namespace, which most clusters forbid
        limit = {"sizeLimit": str(own.shm_bytes)} if own.shm_bytes else {}
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **limit}})
    if own.cache:
        # of the pod, so that no other image or recipe sees it
        mounts.append({"name": "cache", "mountPath": own.cache.inside})
        volumes.append({"name": "cache", "emptyDir": {}})
    added = {"add": own.capabilities} if own.capabilities else {}
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}}
    values = _with_dollars_doubled(own.environment)
    container = {
        "name": "engine",
        "image": target.image,
        "imagePullPolicy": "Never" if target.is_local else "IfNotPresent",
        # `$(NAME)` would be a variable
        "args": _with_dollars_doubled(own.arguments),
        "envFrom": [{"configMapRef": {"name": _NCCL_MAP}}] if target.nccl else None,
        "env": [{"name": key, "value": value} for key, value in values.items()],
        "ports": [{"name": "http", "containerPort": launch.port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
        "resources": {"limits": {"nvidia.com/gpu": launch.cards}} if launch.cards else None,
        "securityContext": rights,
        "volumeMounts": mounts,
    }
    return {key: value for key, value in container.items() if value}, volumes

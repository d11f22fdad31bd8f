"""A Compose file."""

from __future__ import annotations

from typing import Any

from pipeline.recipe.container import cache_of, container_name
from pipeline.recipe.launch import Launch
from pipeline.recipe.render.target import (
    NCCL_SETTINGS,
    Target,
    devices,
    drops_rights,
    locks_memory,
    mounts,
    published,
    shares_memory,
    shm_bytes,
)
from pipeline.recipe.render.yaml_text import dump, with_dollars_doubled


def render_compose(launch: Launch, target: Target) -> str:
    """The file for `docker compose up`."""
    name, cache = container_name(launch.recipe), cache_of(launch)
    body: dict[str, Any] = {"name": name, "services": {"engine": _service(launch, target)}}
    if cache:
        body["volumes"] = {"cache": {"name": cache.name}}
    head = f"# compose.yaml: `docker compose up -d` in its folder starts {name}.\n"
    # Compose puts variables of the shell in place of `$NAME`
    return head + dump([with_dollars_doubled(body)])


def _service(launch: Launch, target: Target) -> dict[str, Any]:
    names = devices(launch, target)
    service: dict[str, Any] = {
        "image": target.image,
        "pull_policy": "never" if target.is_local else None,
        "command": list(launch.arguments),
        "restart": "unless-stopped",
        "ports": [published(launch, target)],
        "cap_drop": ["ALL"] if drops_rights(launch) else None,
        "cap_add": list(launch.container.capabilities),
        "security_opt": ["no-new-privileges"] if drops_rights(launch) else None,
        "ipc": "host" if shares_memory(launch) else None,
        "shm_size": shm_bytes(launch),
        "ulimits": {"memlock": -1} if locks_memory(launch) else None,
        "env_file": [NCCL_SETTINGS] if target.nccl else None,
        "environment": dict(launch.environment),
        "volumes": _volumes(launch, target),
        "deploy": _reservation(names, target) if names else None,
    }
    return {key: value for key, value in service.items() if value}


def _volumes(launch: Launch, target: Target) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {
            "type": "bind",
            "source": mount.host,
            "target": mount.inside,
            "read_only": mount.read_only,
            # a path with a typing error must not become an empty folder
            "bind": {"create_host_path": False},
        }
        for mount in mounts(launch, target)
    ]
    if cache := cache_of(launch):
        volumes.append({"type": "volume", "source": "cache", "target": cache.inside})
    return volumes


def _reservation(names: list[str], target: Target) -> dict[str, Any]:
    # `capabilities` says nothing to the driver cdi, but the Compose specification asks for it
    device: dict[str, Any] = {"driver": "cdi", "device_ids": names, "capabilities": ["gpu"]}
    if not target.cdi:
        chosen = (
            {"count": "all"} if target.gpus is None else {"device_ids": list(map(str, target.gpus))}
        )
        device = {"driver": "nvidia", **chosen, "capabilities": ["gpu"]}
    return {"resources": {"reservations": {"devices": [device]}}}

"""`docker run` and `podman run`."""

from __future__ import annotations

from pipeline.recipe.container import cache_of
from pipeline.recipe.launch import Launch, Mount
from pipeline.recipe.render.quoting import grouped, shell_lines
from pipeline.recipe.render.target import (
    NCCL_LIBRARY,
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


def render_docker(launch: Launch, target: Target) -> str:
    """A command for Docker: with CDI 25 or newer."""
    return shell_lines(run_words(launch, target, "docker", _kept(target)))


def render_podman(launch: Launch, target: Target) -> str:
    """A command for Podman (4.1 or newer, which has CDI)."""
    return shell_lines(run_words(launch, target, "podman", _kept(target)))


def run_words(launch: Launch, target: Target, runner: str, first: list[str]) -> list[list[str]]:
    """The whole command, each option with its value as one group."""
    return [
        [runner, "run", *first],
        *options(launch, target),
        *(["-v", volume(each, runner)] for each in mounts(launch, target)),
        *_cache(launch, runner),
        [target.image_for(runner)],
        *grouped(launch.arguments),
    ]


def options(launch: Launch, target: Target) -> list[list[str]]:
    """What both engines spell alike."""
    container, is_bare = launch.container, drops_rights(launch)
    return [
        *_cards(launch, target),
        ["-p", published(launch, target)],
        *([["--cap-drop=ALL"], ["--security-opt=no-new-privileges"]] if is_bare else []),
        *([f"--cap-add={name}"] for name in container.capabilities),
        *isolation(launch, target),
        *([["--env-file", NCCL_SETTINGS]] if target.nccl else []),
        *(["-e", f"{name}={value}"] for name, value in launch.environment.items()),
    ]


def _kept(target: Target) -> list[str]:
    """One in the background stays when it ends: nobody has seen its output yet."""
    return ["-d"] if target.detached else ["--rm"]


def _cards(launch: Launch, target: Target) -> list[list[str]]:
    names = devices(launch, target)
    if target.cdi or not names:
        return [["--device", name] for name in names]
    # Docker reads a list as CSV, so that it stands in quotes of its own
    listed = ",".join(map(str, target.gpus or ()))
    return [["--gpus", "all" if target.gpus is None else f'"device={listed}"']]


def isolation(launch: Launch, target: Target) -> list[list[str]]:
    """Shared memory, locked memory, and where the image may come from."""
    words: list[list[str]] = []
    if shares_memory(launch):
        words.append(["--ipc=host"])
    if size := shm_bytes(launch):
        words.append([f"--shm-size={size}"])
    if locks_memory(launch):
        words.append(["--ulimit=memlock=-1:-1"])
    if target.is_local:
        # somebody else may own the same name in a public registry
        words.append(["--pull=never"])
    return words


def volume(mount: Mount, runner: str) -> str:
    """A mounted folder as `-v` takes it."""
    rights = ["ro"] if mount.read_only else ["rw"]
    # SELinux: only containers of Podman are confined by default. What belongs to the host's own
    # system keeps its label.
    if runner == "podman" and mount != NCCL_LIBRARY:
        rights.append("Z")
    return f"{mount.host}:{mount.inside}:{','.join(rights)}"


def _cache(launch: Launch, runner: str) -> list[list[str]]:
    if (cache := cache_of(launch)) is None:
        return []
    return [["-v", f"{cache.name}:{cache.inside}{':U' if runner == 'podman' else ''}"]]

"""The NCCL settings and the patched NCCL that the role `nccl` left on a host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import StartFailed
from pipeline.core.files import read_at_most
from pipeline.hosts.fleet.tunnel import Tunnel
from pipeline.serving.recipe.container import NCCL_LIBRARY, NCCL_SETTINGS
from pipeline.serving.recipe.launch import Launch

HostNccl: TypeAlias = Literal["settings", "patched"]
SETTINGS, LIBRARY = Path(NCCL_SETTINGS), Path(NCCL_LIBRARY.host)
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,79}")
_MOST_BYTES = 64 << 10
_HINT = "The role `nccl` makes it (`sm120 host provision`); or leave --host-nccl out."


def with_host_nccl(
    launch: Launch, wanted: HostNccl, *, settings: Path = SETTINGS, library: Path = LIBRARY
) -> Launch:
    """The same launch with the host's settings; the recipe's own settings stay."""
    try:
        data = read_at_most(settings, _MOST_BYTES) or b""
    except OSError as error:
        raise StartFailed(f"{settings}: cannot be read: {error.strerror}", _HINT) from error
    return _with_nccl(launch, wanted, data, settings, library if library.is_dir() else None)


def with_nccl_of(tunnel: Tunnel, launch: Launch, wanted: HostNccl) -> Launch:
    """The same with another host's."""
    done = tunnel.read(["cat", str(SETTINGS)])
    if done.code:
        raise StartFailed(f"{tunnel.host}: {done.message}", _HINT)
    has_library = tunnel.read(["test", "-d", str(LIBRARY)]).code == 0
    return _with_nccl(launch, wanted, done.out, SETTINGS, LIBRARY if has_library else None)


def _with_nccl(
    launch: Launch, wanted: HostNccl, data: bytes, settings: Path, library: Path | None
) -> Launch:
    # lines of `NAME=value`, as Docker and systemd read them
    lines = (line.strip() for line in data.decode(errors="replace").splitlines())
    pairs = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    if odd := [name for name, _, _ in pairs if not _NAME.fullmatch(name)]:
        raise StartFailed(f"{settings}: {odd[0]!r} is not the name of a variable", _HINT)
    environment = {**{name: value for name, _, value in pairs}, **launch.environment}
    mounts = list(launch.mounts)
    if wanted == "patched":
        if library is None:
            raise StartFailed(f"{LIBRARY}: the host has no NCCL of its own", _HINT)
        # under the same path: the settings name it
        mounts.append(Mount(host=str(library), inside=str(library)))
    # validated: a user may have edited the file
    body = {**launch.model_dump(), "environment": environment, "mounts": mounts}
    return Launch.model_validate(body)

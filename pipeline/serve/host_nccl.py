"""The NCCL settings and the patched NCCL that the role `nccl` left on this host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from pipeline.errors import StartFailed
from pipeline.files import read_at_most
from pipeline.recipe.launch import Launch, Mount
from pipeline.recipe.render.target import NCCL_LIBRARY, NCCL_SETTINGS

HostNccl: TypeAlias = Literal["settings", "patched"]
SETTINGS, LIBRARY = Path(NCCL_SETTINGS), Path(NCCL_LIBRARY.host)
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,79}")
_MOST_BYTES = 64 << 10
_HINT = "The role `nccl` makes it (`sm120 host provision`); or leave --host-nccl out."


def with_host_nccl(
    launch: Launch, wanted: HostNccl, *, settings: Path = SETTINGS, library: Path = LIBRARY
) -> Launch:
    """The same launch with the host's settings; what the recipe itself sets stays."""
    environment = {**read_settings(settings), **launch.environment}
    mounts = list(launch.mounts)
    if wanted == "patched":
        if not library.is_dir():
            raise StartFailed(f"{library}: this host has no NCCL of its own", _HINT)
        # under the same path: the settings name it
        mounts.append(Mount(host=str(library), inside=str(library)))
    return Launch.model_validate(
        {**launch.model_dump(), "environment": environment, "mounts": mounts}
    )


def read_settings(path: Path) -> dict[str, str]:
    """Lines of `NAME=value`, as Docker and systemd read them."""
    try:
        data = read_at_most(path, _MOST_BYTES) or b""
    except OSError as error:
        raise StartFailed(f"{path}: cannot be read: {error.strerror}", _HINT) from error
    lines = (line.strip() for line in data.decode(errors="replace").splitlines())
    pairs = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    odd = [name for name, _, _ in pairs if not _NAME.fullmatch(name)]
    if odd:
        raise StartFailed(f"{path}: {odd[0]!r} is not the name of a variable", _HINT)
    return {name: value for name, _, value in pairs}

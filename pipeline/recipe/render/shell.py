"""The same engine without a container: a script that becomes the engine."""

from __future__ import annotations

import shlex

from pipeline.recipe.launch import Launch
from pipeline.recipe.render.quoting import grouped, shell_lines
from pipeline.recipe.render.target import NCCL_SETTINGS, Target, require_count


def render_shell(launch: Launch, target: Target) -> str:
    """A script for sh."""
    lines = [
        "#!/bin/sh",
        f"# {launch.recipe}: {launch.model} by {launch.engine}, without a container",
        "set -eu",
    ]
    if target.gpus is not None and launch.cards:
        require_count(launch, target.gpus)
        lines.append(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, target.gpus))}")
    if target.nccl:
        lines.append(f"set -a; . {NCCL_SETTINGS}; set +a")
    lines += [f"export {name}={shlex.quote(v)}" for name, v in launch.environment.items()]
    command = [["exec", *launch.program], *grouped(launch.arguments), _listening(launch)]
    return "\n".join(lines) + "\n" + shell_lines(command)


def _listening(launch: Launch) -> list[str]:
    """The address, which the images' entrypoints name: some engines answer this host alone."""
    is_named = any(word.partition("=")[0] == "--host" for word in launch.arguments)
    return [] if is_named else ["--host", "0.0.0.0"]  # noqa: S104

"""All formats by name."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.recipe.launch import Launch
from pipeline.recipe.render.compose import render_compose
from pipeline.recipe.render.container import render_docker, render_podman
from pipeline.recipe.render.kubernetes import render_kubernetes
from pipeline.recipe.render.quadlet import render_quadlet
from pipeline.recipe.render.shell import render_shell
from pipeline.recipe.render.systemd import render_systemd
from pipeline.recipe.render.target import Target, require_contained, require_plain

CONTAINED: dict[str, Callable[[Launch, Target], str]] = {
    "docker": render_docker,
    "podman": render_podman,
    "quadlet": render_quadlet,
    "systemd": render_systemd,
    "compose": render_compose,
    "kubernetes": render_kubernetes,
}
# `env` is made for clients, of no launch
FORMATS = [*CONTAINED, "shell", "env"]


def render(launch: Launch, target: Target, format_name: str) -> str:
    """A launch in one of the formats that start an engine."""
    require_plain(launch, target)
    if format_name == "shell":
        return render_shell(launch, target)
    require_contained(launch)
    return CONTAINED[format_name](launch, target)

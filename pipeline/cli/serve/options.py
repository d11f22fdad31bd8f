"""The option about container engines that several commands share."""

from __future__ import annotations

import click

engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "docker", "podman"]),
    default="auto",
    help="Container engine; auto starts in Docker where it answers, else in Podman, and finds what"
    " is served in either.",
)

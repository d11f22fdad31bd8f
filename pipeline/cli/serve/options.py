"""Options about recipes and container engines that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline.cli.options import EXISTING_FOLDER, all_of
from pipeline.recipe.find import Recipes
from pipeline.recipe.launch import Overrides
from pipeline.spec.checkout import Checkout

recipes_option = click.option(
    "--recipes",
    "folders",
    type=EXISTING_FOLDER,
    multiple=True,
    help="Folder with recipes of your own; they come first. Repeatable.",
)
engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "docker", "podman"]),
    default="auto",
    help="Container engine; auto is Docker where it answers, else Podman.",
)
# The names of the documents' scripts; a recipe that lists one of them also reads the variable.
_OVERRIDES = all_of(
    [
        click.option("--served-model-name", help="Name that clients ask for [SERVED_MODEL_NAME]."),
        click.option("--max-model-len", type=int, help="Most tokens of a request [MAX_MODEL_LEN]."),
        click.option(
            "--gpu-memory-utilization",
            type=float,
            help="Share of each GPU's memory to use [GPU_MEMORY_UTILIZATION].",
        ),
        click.option("--port", type=click.IntRange(1, 65535), help="Port to serve on [PORT]."),
        click.option(
            "--enable-eagle3/--disable-eagle3",
            "enable_eagle3",
            default=None,
            help="Turn the recipe's draft model on or off [ENABLE_EAGLE3].",
        ),
        click.option("--eagle3-model", help="Draft model in the container [EAGLE3_MODEL]."),
    ]
)


def override_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user changes for one start; the command gets it as `overrides`."""

    @_OVERRIDES
    @functools.wraps(command)
    def packed(*args: Any, **rest: Any) -> Any:
        given = {name: rest.pop(name) for name in Overrides.model_fields if name in rest}
        return command(*args, overrides=Overrides.model_validate(given), **rest)

    return packed


def recipes_of(checkout: Checkout, folders: tuple[Path, ...]) -> Recipes:
    """A user's own recipes, then those of the checkout."""
    return Recipes([*folders, checkout.root / "recipes"])

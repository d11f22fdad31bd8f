"""What the verbs about recipes share: where recipes lie, what a user changes, and the image."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.assemble.golden import read_golden
from pipeline.assemble.image import find_built
from pipeline.assemble.plan import plan_image
from pipeline.cli.context import (
    checkout_of,
    checkout_or_none,
    pick_platform,
    store_of,
    store_to_read,
)
from pipeline.cli.options import EXISTING_FOLDER, all_of
from pipeline.errors import LockUnusable, RecipeInvalid, UnknownImage, WeightsUnknown
from pipeline.recipe.container import MOST_GPUS
from pipeline.recipe.find import Recipes
from pipeline.recipe.launch import Overrides, read_overrides
from pipeline.recipe.model import Recipe
from pipeline.serve.weights import tiny_weights
from pipeline.weights.model import WeightsLock, current_lock
from pipeline.weights.place import new_place, user_cache

recipes_option = click.option(
    "--recipes",
    "folders",
    type=EXISTING_FOLDER,
    multiple=True,
    envvar="SM120_RECIPES",
    help="Folder with recipes of your own. Repeatable [SM120_RECIPES].",
)

# where `folders` are those to look for evidence in
own_recipes_option = click.option(
    "--recipes",
    "own_recipes",
    type=EXISTING_FOLDER,
    multiple=True,
    envvar="SM120_RECIPES",
    help="Folder with recipes of your own. Repeatable [SM120_RECIPES].",
)


class Gpus(click.ParamType[tuple[int, ...]]):
    """Numbers of GPUs such as 0,1."""

    name = "gpus"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """In the order that was typed."""
        numbers = str(value).split(",")
        if not all(each.isascii() and each.isdigit() and len(each) <= 2 for each in numbers):
            self.fail("write numbers with commas, such as 0,1", param, ctx)
        gpus = tuple(int(each) for each in numbers)
        if len(set(gpus)) != len(gpus) or max(gpus) >= MOST_GPUS:
            self.fail(f"name different GPUs, each below {MOST_GPUS}", param, ctx)
        return gpus


gpus_option = click.option(
    "--gpus", type=Gpus(), metavar="N,N", help="GPUs to use, by number [default: all]."
)
_OVERRIDES = (
    click.option("--model-path", metavar="PATH", help="Model in place of the recipe's."),
    click.option("--served-model-name", metavar="NAME", help="Name that clients ask for."),
    click.option("--max-model-len", type=int, metavar="N", help="Context, in tokens."),
    click.option(
        "--gpu-memory-utilization", type=float, metavar="F", help="Share of each GPU's memory."
    ),
    click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port to serve on."),
    click.option(
        "--enable-eagle3/--disable-eagle3",
        "--eagle3/--no-eagle3",
        "enable_eagle3",
        default=None,
        help="Speculate with a draft model.",
    ),
    click.option("--eagle3-model", metavar="PATH", help="Draft model in place of the recipe's."),
)


def recipes_of(context: click.Context, folders: tuple[Path, ...]) -> Recipes:
    """A user's own folders first, then the checkout's."""
    # outside a checkout the user's own folders are all there is
    checkout = checkout_or_none(context) if folders else checkout_of(context)
    return Recipes([*folders, *([checkout.root / "recipes"] if checkout else [])])


def say_contrary(recipe: Recipe) -> None:
    """Name the published reports that speak against what a recipe does."""
    for report in recipe.contrary:
        log.say(f"{recipe.name}: a report speaks against it: {report.what}\n  {report.link}")


def override_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user changes for one start; the command gets it as `overrides`, to be completed."""

    @all_of(_OVERRIDES)
    @functools.wraps(command)
    def packed(*args: Any, **rest: Any) -> Any:
        given = {name: rest.pop(name) for name in Overrides.model_fields}
        # values are checked when the recipe is known, with those of the environment
        return command(*args, overrides=Overrides.model_construct(**given), **rest)

    return packed


def all_overrides(recipe: Recipe, options: Overrides, weights: object = None) -> Overrides:
    """Options first, then the variables that the recipe listens to; `weights` is --weights."""
    if weights and options.model_path:
        raise RecipeInvalid(
            f"--weights {weights} and --model-path {options.model_path} both name the model",
            "Leave one of them out.",
        )
    overrides = read_overrides(options, os.environ, list(recipe.overrides))
    if weights and overrides.model_path:
        log.say(f"MODEL_PATH={overrides.model_path} is not used: --weights names {weights}")
        return overrides.model_copy(update={"model_path": None})
    return overrides


def image_digest(context: click.Context, recipe: Recipe, platform: str | None) -> str:
    """The digest of a recipe's image: as it was built here, else as every build must give it."""
    checkout, name = checkout_of(context), recipe.image or ""
    spec = checkout.spec(name)
    if platform is None and recipe.hardware.cards:
        # not that of this machine: a recipe is often rendered for another one
        platform = "linux/arm64" if recipe.hardware.card == "gb10" else "linux/amd64"
    plan = plan_image(checkout, name, pick_platform(spec, platform))
    if built := find_built(store_to_read(context), plan):
        return built.digest
    golden = read_golden(checkout.golden_path).images.get(f"{name}.{plan.architecture}")
    # one of other inputs is that of an older image
    if golden is None or golden.inputs != plan.inputs:
        raise UnknownImage(
            f"{name} for {plan.platform} is not built, and no digest is committed for it",
            f"Run `sm120 build {name} --platform {plan.platform}` first,"
            " or name the image with --registry REGISTRY/REPOSITORY@sha256:….",
        )
    return golden.digest


def weights_folder(context: click.Context, recipe: Recipe, given: Path | None) -> str:
    """The folder of a recipe's weights on the host: as named, else in this user's Hub cache."""
    if given is None and recipe.model.tiny:
        # made on the spot, as `serve` does it
        return str(tiny_weights(store_of(context), recipe).folder)
    if folder := given or _cached(context, recipe.model.weights):
        return _whole_path(folder)
    raise RecipeInvalid(
        f"{recipe.name}: nothing says where its weights lie",
        f"Name their folder with --weights DIR;"
        f" `sm120 weights fetch {recipe.model.weights or 'NAME'} --to DIR` downloads them.",
    )


def draft_folder(context: click.Context, recipe: Recipe, given: Path | None) -> str:
    """The same of a draft model, which the engine may also fetch itself."""
    spec = recipe.speculation
    folder = given or _cached(context, spec.weights if spec else None)
    return _whole_path(folder) if folder else ""


def _whole_path(folder: Path) -> str:
    """Links stay, they may be there on purpose; but Kubernetes and systemd take no `..`."""
    return str(folder.resolve() if ".." in folder.parts else folder.absolute())


def with_locked_file(context: click.Context, recipe: Recipe, weights: str) -> Recipe:
    """The recipe with the first part that the lock of its weights names, where they are not here.

    A command is often rendered on another machine than the one that has the weights.
    """
    model = recipe.model
    if model.file or not model.folder or Path(weights, model.folder).is_dir():
        return recipe
    lock = _lock(context, model.weights)
    first = f"{model.folder}/*-00001-of-*.gguf"
    found = [file.path for file in lock.files if fnmatchcase(file.path, first)] if lock else []
    # with none or several, the launch says what is missing
    update = {"model": model.model_copy(update={"file": found[0]})} if len(found) == 1 else {}
    return recipe.model_copy(update=update)


def _cached(context: click.Context, name: str | None) -> Path | None:
    """A locked set in the cache of the Hub's client, where `weights fetch --hub-cache` puts it."""
    # what is not locked has no known commit, and so no known folder
    if (lock := _lock(context, name)) is None:
        return None
    folder = new_place(user_cache(), lock, hub_cache=True).snapshot
    return folder if folder.is_dir() else None


def _lock(context: click.Context, name: str | None) -> WeightsLock | None:
    checkout = checkout_or_none(context)
    if checkout is None or name is None:
        return None
    try:
        return current_lock(checkout, name)
    except (LockUnusable, WeightsUnknown):
        return None

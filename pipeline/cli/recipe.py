"""`sm120 recipe` and `sm120 render`: list, show and render recipes and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    flag,
    gpus_option,
    json_option,
    override_options,
    platform_option,
    recipes_option,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.files import write_bytes
from pipeline.serving.recipe.render.formats import FORMATS

if TYPE_CHECKING:
    from pipeline.images.engine.parser_flags import FlagSpec
    from pipeline.serving.recipe.model import Recipe

_MOST_SHOWN = 60


@click.command("list")
@recipes_option
@json_option
@click.pass_obj
def list_recipes(workspace: Workspace, folders: tuple[Path, ...], as_json: bool) -> None:
    """List the recipes: engine, image, cards, and what each rests on."""
    recipes = app.recipes.recipes_of(workspace, folders)
    rows = [_recipe_row(recipes.read(name)) for name in recipes.names()]
    if as_json:
        return say_json(rows)
    head = ["name", "engine", "image", "gpus", "backing", "summary"]
    click.echo(log.table(head, [[row[name] for name in head] for row in rows]))


def _recipe_row(recipe: Recipe) -> dict[str, object]:
    cards = recipe.hardware
    return {
        "name": recipe.name,
        "engine": recipe.engine,
        "image": recipe.image,
        "gpus": f"{cards.cards}x {cards.card}" if cards.cards else None,
        "backing": recipe.backing,
        "summary": recipe.summary,
    }


@click.command("show")
@click.argument("name", metavar="RECIPE")
@recipes_option
@json_option
@click.pass_obj
def show(workspace: Workspace, name: str, folders: tuple[Path, ...], as_json: bool) -> None:
    """Show a recipe with all that it extends: flags by source, hardware, changes."""
    recipe = app.recipes.recipes_of(workspace, folders).read(name)
    # without defaults, as in the file
    body = recipe.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        return say_json(body)
    click.echo(yaml.safe_dump(body, sort_keys=False, width=100, allow_unicode=True), nl=False)


@click.command()
@click.argument("recipe", metavar="RECIPE")
@click.option(
    "--as", "format_name", type=click.Choice(FORMATS), required=True, help="What to write."
)
@click.option("--weights", type=ANY_PATH, help="Folder of the model's weights on the host.")
@click.option("--draft", type=ANY_PATH, help="Folder of the draft model's weights on the host.")
@click.option(
    "--registry", metavar="REF", help="Where the image was published [default: loaded locally]."
)
@gpus_option
@click.option(
    "--host-nccl",
    type=click.Choice(["settings", "patched"]),
    help="Use the host's NCCL settings, or its patched library too, from the role nccl.",
)
@click.option(
    "--runner",
    type=click.Choice(["docker", "podman"]),
    default="docker",
    show_default=True,
    help="What a systemd unit starts.",
)
@click.option(
    "--node", default="127.0.0.1", show_default=True, help="Address of the server, for --as env."
)
@flag("--lan", help="Let other machines connect, too.")
@flag("--detach", help="Start the container in the background (docker, podman).")
@flag(
    "--no-cdi",
    help="Ask for the cards with --gpus, for a Docker without CDI (docker, systemd, compose).",
)
@click.option("--claim", help="PersistentVolumeClaim with the weights, for --as kubernetes.")
@override_options
@recipes_option
@platform_option
@click.option("--out", type=ANY_PATH, help="File to write, instead of standard output.")
@json_option
@click.pass_obj
def render(workspace: Workspace, /, out: Path | None, as_json: bool, **options: Any) -> None:
    """Print a recipe as a command, a unit, a Compose file, Kubernetes objects or settings.

    The image is named by its digest, the weights are mounted read-only, and the engine runs as a
    user without rights; only this machine can connect, unless --lan is given. --as shell is the
    same engine without a container, --as env what clients of the server set. --json prints what
    all formats are made of.
    """
    request = app.recipes.RenderRequest(**options)
    form = request.format_name
    # an option that has no effect would leave a user believing in it
    if request.detach and form not in ("docker", "podman"):
        raise click.UsageError(f"--detach is for docker and podman; this is {form}.")
    engine = request.runner if form == "systemd" else form
    if request.no_cdi and engine not in ("docker", "compose"):
        raise click.UsageError(f"--no-cdi is for Docker; this is {engine}.")
    done = app.recipes.render(workspace, request)
    if as_json:
        return say_json(done.body)
    if out is None:
        return click.echo(done.text(), nl=False)
    write_bytes(out, done.text().encode())
    log.say(f"wrote {out}")


@click.command()
@click.argument("image")
@platform_option
@flag("--read", "again", help="Read the built image, not its committed file.")
@flag("--accept", help="Read the built image and write its committed file.")
@click.option(
    "--program",
    type=EXISTING_FILE,
    help="Read this llama-server, compiled from the image's source, in place of the image.",
)
@click.option(
    "--archive",
    type=EXISTING_FILE,
    help="Read the source of llama.cpp in this archive, which the image is locked to.",
)
@click.option(
    "--wheel",
    type=EXISTING_FILE,
    help="Read this wheel of the engine, with what it imports from the image --inside.",
)
@click.option("--inside", metavar="IMAGE", help="A built image that this machine can run.")
@json_option
@click.pass_obj
def flags(workspace: Workspace, /, image: str, as_json: bool, **options: Any) -> None:
    """Show the flags that the engine of IMAGE accepts, and its own variables.

    They are read by running the engine's own argument parser in a sandbox, without network and
    without a GPU. Recipes are checked against the committed files in lockfiles/flags, so that this
    works on machines that have no image.
    """
    if (options["wheel"] is None) != (options["inside"] is None):
        raise click.UsageError("--wheel and --inside belong together")
    if sum(options[name] is not None for name in ("program", "archive", "wheel")) > 1:
        raise click.UsageError("give one of --program, --archive and --wheel")
    shown = app.recipes.read_flags_of(workspace, image, **options)
    if as_json:
        return say_json(shown.model_dump(mode="json", exclude_defaults=True))
    names = sorted(shown.flags, key=lambda name: name.lstrip("-"))
    rows = [
        [name, ", ".join(shown.flags[name].aliases), *_value(shown.flags[name])] for name in names
    ]
    click.echo(log.table(["flag", "also", "takes", "values"], rows))
    click.echo(
        f"\n{shown.image}: {shown.title}, {log.count(len(rows), 'flag')},"
        f" {log.count(len(shown.variables), 'variable')} of its own; read from {shown.read_from}"
    )


def _value(flag: FlagSpec) -> list[str]:
    if flag.retired:
        return ["–", f"removed: {flag.retired}"[:_MOST_SHOWN]]
    values = " ".join(
        [*(flag.choices or ([] if flag.takes == "none" else [flag.type])), *flag.words]
    )
    shown = values if len(values) <= _MOST_SHOWN else values[: _MOST_SHOWN - 1] + "…"
    return [flag.takes, shown or ", ".join(flag.off)]

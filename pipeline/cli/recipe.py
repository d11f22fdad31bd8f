"""`sm120 recipe` and `sm120 render`: list, show and render recipes and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    file_option,
    flag_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.files import write_bytes
from pipeline.serving.recipe.render.formats import FORMATS

_MOST_SHOWN = 60
# What starts the container, where a format leaves a choice.
_RUNNERS = {"systemd": ("docker", "podman"), "slurm": ("podman", "pyxis")}


@query
@options.recipes_option
def recipe_list_command(workspace: Workspace, folders: tuple[Path, ...], as_json: bool) -> None:
    """List the recipes: engine, image, cards, and what each rests on."""
    recipes = app.recipes.recipes_of(workspace, folders)
    head, rows = ["name", "engine", "image", "gpus", "backing", "summary"], []
    for recipe in map(recipes.read, recipes.names()):
        cards = recipe.hardware
        gpus = f"{cards.cards}x {cards.card}" if cards.cards else None
        gpus = f"{recipe.nodes} nodes, {gpus}" if recipe.nodes > 1 else gpus
        row = {name: getattr(recipe, name) for name in head if name != "gpus"}
        rows.append({**row, "gpus": gpus})
    if as_json:
        return say_json(rows)
    click.echo(log.table(head, [[row[name] for name in head] for row in rows]))


@query
@click.argument("name", metavar="RECIPE")
@options.recipes_option
def recipe_show_command(
    workspace: Workspace, name: str, folders: tuple[Path, ...], as_json: bool
) -> None:
    """Show a recipe with all that it extends: flags by source, hardware, changes."""
    recipe = app.recipes.recipes_of(workspace, folders).read(name)
    # without defaults, as in the file
    body = recipe.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        return say_json(body)
    click.echo(yaml.safe_dump(body, sort_keys=False, width=100, allow_unicode=True), nl=False)


@query
@click.argument("recipe", metavar="RECIPE")
@click.option(
    "--as", "format_name", type=click.Choice(FORMATS), required=True, help="What to write."
)
@path_option("--weights", help="Folder of the model's weights on the host.")
@path_option("--draft", help="Folder of the draft model's weights on the host.")
@click.option(
    "--registry", metavar="REF", help="Where the image was published [default: loaded locally]."
)
@options.gpus_option
@click.option(
    "--host-nccl",
    type=click.Choice(["settings", "patched"]),
    help="Use the host's NCCL settings, or its patched library too, from the role nccl.",
)
@click.option(
    "--runtime",
    "runner",
    type=click.Choice(["docker", "podman", "pyxis"]),
    help="What a systemd unit [docker] or a Slurm job starts [podman; pyxis where a site has it].",
)
@click.option("--node", default="127.0.0.1", help="Address of the server, for --as env.")
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    help="Machines that share the model, with the recipe's cards divided among them.",
)
@options.hosts_option
@click.option("--node-rank", "rank", type=click.IntRange(0), help="Print this rank alone.")
@flag_option("--rdma", help="Give the container the host's RDMA devices (InfiniBand, RoCE).")
@flag_option("--lan", help="Let other machines connect, too.")
@flag_option("--detach", help="Start the container in the background (docker, podman).")
@flag_option(
    "--no-cdi",
    help="Ask for the cards with --gpus, for a Docker without CDI (docker, systemd, compose).",
)
@click.option("--claim", help="PersistentVolumeClaim with the weights, for --as kubernetes.")
@click.option(
    "--weights-image",
    metavar="REF@DIGEST",
    help="Image of `sm120 weights image`, for --as kubernetes.",
)
@options.override_options
@options.recipes_option
@options.platform_option
@path_option("--output", "out", help="File to write, instead of standard output.")
def render_command(
    workspace: Workspace, /, out: Path | None, as_json: bool, **options: Any
) -> None:
    """Print a recipe as a command, a unit, a Compose file, Kubernetes objects or settings.

    The image is named by its digest, the weights are mounted read-only, and the engine runs as a
    user without rights; only this machine can connect, unless --lan is given. --as shell is the
    same engine without a container, --as env what clients of the server set. --json prints what
    all formats are made of.

    Of a recipe over several nodes, each rank is printed; --output FILE.EXT then writes
    FILE-rank-0.EXT, FILE-rank-1.EXT and so on. --as slurm is one job for all of them.
    """
    request = app.recipes.RenderRequest(**options)
    form = request.format_name
    # an option that has no effect would leave a user believing in it
    if request.detach and form not in ("docker", "podman"):
        raise click.UsageError(f"--detach is for docker and podman; this is {form}.")
    if request.weights_image and form != "kubernetes":
        raise click.UsageError(f"--weights-image is for kubernetes; this is {form}.")
    if form == "slurm" and (request.hosts or request.rank is not None):
        raise click.UsageError("Slurm chooses the nodes: leave --hosts and --node-rank out.")
    if request.rdma and form in ("kubernetes", "shell", "env"):
        raise click.UsageError(f"--rdma is for a container that this starts; this is {form}.")
    if request.runner and request.runner not in (_RUNNERS.get(form) or ()):
        raise click.UsageError(f"--runtime {request.runner} is not for {form}.")
    engine = (request.runner or "docker") if form == "systemd" else form
    if request.no_cdi and engine not in ("docker", "compose"):
        raise click.UsageError(f"--no-cdi is for Docker; this is {engine}.")
    done = app.recipes.render_recipe(workspace, request)
    if as_json:
        return say_json(done.body)
    texts = done.texts()
    for rank, text in texts.items():
        if out is None:
            ranked = f"# rank {rank} of {len(texts)}\n{text}\n"
            click.echo(ranked if len(texts) > 1 else text, nl=False)
            continue
        path = out.with_name(f"{out.stem}-rank-{rank}{out.suffix}") if len(texts) > 1 else out
        write_bytes(path, text.encode())
        log.say(f"wrote {path}")


@query
@click.argument("image")
@options.platform_option
@flag_option("--read", "again", help="Read the built image, not its committed file.")
@flag_option("--accept", help="Read the built image and write its committed file.")
@file_option(
    "--program",
    help="Read this llama-server, compiled from the image's source, in place of the image.",
)
@file_option(
    "--archive", help="Read the source of llama.cpp in this archive, which the image is locked to."
)
@file_option(
    "--wheel", help="Read this wheel of the engine, with what it imports from the image --inside."
)
@click.option("--inside", metavar="IMAGE", help="A built image that this machine can run.")
def recipe_flags_command(
    workspace: Workspace, /, image: str, as_json: bool, **options: Any
) -> None:
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
    rows = []
    for name in sorted(shown.flags, key=lambda name: name.lstrip("-")):
        spec = shown.flags[name]
        known = spec.choices or ([] if spec.takes == "none" else [spec.type])
        values = " ".join([*known, *spec.words]) or ", ".join(spec.off)
        if spec.retired:
            values = f"removed: {spec.retired}"
        if len(values) > _MOST_SHOWN:
            values = f"{values[: _MOST_SHOWN - 1]}…"
        takes = "–" if spec.retired else spec.takes
        rows.append([name, ", ".join(spec.aliases), takes, values])
    click.echo(log.table(["flag", "also", "takes", "values"], rows))
    click.echo(
        f"\n{shown.image}: {shown.title}, {log.count(len(rows), 'flag')},"
        f" {log.count(len(shown.variables), 'variable')} of its own; read from {shown.read_from}"
    )

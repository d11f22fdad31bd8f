"""`sm120 render`: a recipe as the exact command, unit or object that runs it."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, pick_platform, say_json
from pipeline.cli.options import ANY_PATH, json_option, platform_option
from pipeline.cli.recipe.recipes import (
    all_overrides,
    draft_folder,
    gpus_option,
    image_digest,
    override_options,
    recipes_of,
    recipes_option,
    say_contrary,
    weights_folder,
    with_locked_file,
)
from pipeline.errors import RecipeInvalid
from pipeline.files import write_bytes
from pipeline.oci.docker import default_tag
from pipeline.oci.reference import Reference, parse_reference
from pipeline.recipe.launch import Overrides, plan_launch, with_whole_repositories
from pipeline.recipe.model import Recipe
from pipeline.recipe.parser import require_known_flags
from pipeline.recipe.render.client import client_settings, render_env
from pipeline.recipe.render.formats import CONTAINED, FORMATS
from pipeline.recipe.render.formats import render as rendered
from pipeline.recipe.render.target import Target
from pipeline.spec.checkout import Checkout


@click.command()
@click.argument("name", metavar="RECIPE")
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
@click.option("--lan", is_flag=True, help="Let other machines connect, too.")
@click.option(
    "--detach", is_flag=True, help="Start the container in the background (docker, podman)."
)
@click.option(
    "--no-cdi",
    is_flag=True,
    help="Ask for the cards with --gpus, for a Docker without CDI (docker, systemd, compose).",
)
@click.option("--claim", help="PersistentVolumeClaim with the weights, for --as kubernetes.")
@override_options
@recipes_option
@platform_option
@click.option("--out", type=ANY_PATH, help="File to write, instead of standard output.")
@json_option
@click.pass_context
def render(
    context: click.Context,
    name: str,
    format_name: str,
    weights: Path | None,
    draft: Path | None,
    registry: str | None,
    gpus: tuple[int, ...] | None,
    host_nccl: str | None,
    runner: str,
    node: str,
    lan: bool,
    detach: bool,
    no_cdi: bool,
    claim: str | None,
    overrides: Overrides,
    folders: tuple[Path, ...],
    platform: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print a recipe as a command, a unit, a Compose file, Kubernetes objects or settings.

    The image is named by its digest, the weights are mounted read-only, and the engine runs as a
    user without rights; only this machine can connect, unless --lan is given. --as shell is the
    same engine without a container, --as env what clients of the server set. --json prints what
    all formats are made of.
    """
    # an option that has no effect would leave a user believing in it
    if detach and format_name not in ("docker", "podman"):
        raise click.UsageError(f"--detach is for docker and podman; this is {format_name}.")
    engine = runner if format_name == "systemd" else format_name
    if no_cdi and engine not in ("docker", "compose"):
        raise click.UsageError(f"--no-cdi is for Docker; this is {engine}.")
    recipe = recipes_of(context, folders).read(name)
    overrides = all_overrides(recipe, overrides, weights)
    say_contrary(recipe)
    if format_name == "shell" and recipe.image:
        _compare_engines(checkout_of(context), recipe)
    if format_name == "env":
        model = overrides.served_model_name or recipe.model.name
        settings = client_settings(model, overrides.port or recipe.port, node)
        return say_json(settings) if as_json else _write(render_env(settings), out)
    reference = parse_reference(registry) if registry else None
    contained, digest = format_name in CONTAINED, None
    if contained and recipe.image:
        digest = (reference and reference.digest) or image_digest(context, recipe, platform)
    # a model that is named otherwise needs no folder
    folder = "" if overrides.model_path else weights_folder(context, recipe, weights)
    recipe = with_locked_file(context, recipe, folder)
    launch = plan_launch(
        recipe if contained else recipe.model_copy(update={"image": None}),
        overrides,
        weights=folder,
        draft=draft_folder(context, recipe, draft),
        digest=digest,
    )
    launch = with_whole_repositories(launch)
    require_known_flags(checkout_of(context), launch)
    if as_json:
        return say_json(launch.model_dump(mode="json"))
    target = Target.model_validate(
        {
            "image": _image(recipe, reference, digest),
            "gpus": gpus,
            "nccl": host_nccl,
            "runner": runner,
            "lan": lan,
            "cdi": not no_cdi,
            "detached": detach,
            "claim": claim,
        }
    )
    _write(rendered(launch, target, format_name), out)


def _compare_engines(checkout: Checkout, recipe: Recipe) -> None:
    """Refuse where the host's engine dies without the image's patches; else name them."""
    if needed := recipe.needs_patches:
        raise RecipeInvalid(
            f"{recipe.name}: the engine of this machine lacks {needed[0]} of the image"
            f" {recipe.image}, and dies with these flags",
            "Render it for a container, or take a recipe without an image: `sm120 recipe list`.",
        )
    name = recipe.image
    if name is None or name not in checkout.images():
        return
    for spec in checkout.chain(name, pick_platform(checkout.spec(name), None)):
        for patch in checkout.series(spec).patches:
            log.say(
                f"{recipe.name}: the image {name} has {patch.file}, which this machine's engine"
                f" lacks: {patch.why}"
            )


def _write(text: str, out: Path | None) -> None:
    if out is None:
        return click.echo(text, nl=False)
    write_bytes(out, text.encode())
    log.say(f"wrote {out}")


def _image(recipe: Recipe, reference: Reference | None, digest: str | None) -> str:
    """The image by digest in its registry, or by the name that `sm120 load` gives it."""
    if recipe.image is None or digest is None:
        return ""
    if reference is None:
        return default_tag(recipe.image, digest)
    return str(reference.model_copy(update={"tag": None, "digest": digest}))

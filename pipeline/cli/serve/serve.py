"""`sm120 serve`: a recipe becomes a server that answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.cli.context import checkout_of, pick_platform, say_json, store_of
from pipeline.cli.images import find_image
from pipeline.cli.options import EXISTING_FOLDER, json_option
from pipeline.cli.recipe.recipes import (
    all_overrides,
    gpus_option,
    override_options,
    recipes_of,
    recipes_option,
)
from pipeline.cli.serve.options import engine_option
from pipeline.errors import (
    BackendDiffers,
    RecipeInvalid,
    StartFailed,
    UnknownImage,
    WeightsUnknown,
)
from pipeline.known import Known, unknown
from pipeline.lock.model import current_lock
from pipeline.publish.gates import GateState, gate_state
from pipeline.recipe.container import ANYWHERE, LOOPBACK
from pipeline.recipe.find import Recipes
from pipeline.recipe.hub_cache import with_whole_repositories
from pipeline.recipe.launch import Launch, Overrides, plan_launch
from pipeline.recipe.model import Recipe
from pipeline.recipe.parser import check_flags
from pipeline.recipe.parser_flags import find_parser_flags, flags_folder
from pipeline.serve.find_engine import Wanted, find_engine
from pipeline.serve.host_nccl import HostNccl, with_host_nccl
from pipeline.serve.preflight import CHECKS
from pipeline.serve.run import Job, new_attempt
from pipeline.serve.run import serve as serve_job
from pipeline.serve.start import Served
from pipeline.serve.weights import WeightsFolder, find_weights, tiny_weights
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store
from pipeline.weights.model import kept_locks

# Weights of 600 GB take a quarter of an hour, and kernels may be compiled at the first start.
_TIMEOUT_S = 3600
# The compiler whose output the driver has to load; the first that an image has.
_CUDA_COMPILERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
_LONGEST_CHAIN = 8


@dataclass(frozen=True)
class _Request:
    """What the user asked for; the same for a recipe and its fallbacks."""

    checkout: Checkout
    store: Store
    overrides: Overrides
    weights: Path | None
    draft: Path | None
    cards: tuple[int, ...]
    lan: bool
    host_nccl: HostNccl | None
    timeout_s: float
    skipped: tuple[str, ...]


@click.command()
@click.argument("name", metavar="RECIPE")
@recipes_option
@click.option("--weights", type=EXISTING_FOLDER, help="Folder of the weights [MODEL_PATH].")
@click.option("--draft", type=EXISTING_FOLDER, help="Folder of the draft model's weights.")
@override_options
@gpus_option
@click.option("--lan", is_flag=True, help="Let other machines connect, too.")
@click.option(
    "--host-nccl",
    type=click.Choice(["settings", "patched"]),
    help="Use this host's NCCL settings, and with `patched` also its NCCL.",
)
@engine_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1),
    default=_TIMEOUT_S,
    show_default=True,
    help="Seconds to wait for the first answer.",
)
@click.option(
    "--skip-preflight",
    "skipped",
    type=click.Choice([*CHECKS]),
    multiple=True,
    help="Leave a check of this machine out. Repeatable.",
)
@click.option("--with-fallback", is_flag=True, help="Where it fails, try the recipe's fallback.")
@json_option
@click.pass_context
def serve(
    context: click.Context,
    name: str,
    folders: tuple[Path, ...],
    weights: Path | None,
    draft: Path | None,
    overrides: Overrides,
    gpus: tuple[int, ...] | None,
    lan: bool,
    host_nccl: HostNccl | None,
    engine: Wanted,
    timeout_s: int,
    skipped: tuple[str, ...],
    with_fallback: bool,
    as_json: bool,
) -> None:
    """Start a recipe's engine in a container, and wait until it answers.

    The container stays when this command ends: see `status`, `logs` and `stop` of `sm120 recipe`.
    """
    request = _Request(
        checkout=checkout_of(context),
        store=store_of(context),
        overrides=overrides,
        weights=weights,
        draft=draft,
        cards=gpus or (),
        lan=lan,
        host_nccl=host_nccl,
        timeout_s=timeout_s,
        skipped=skipped,
    )
    recipes = recipes_of(context, folders)
    with_engine = find_engine(engine)
    after: str | None = None
    for recipe in _chain(recipes, name):
        with request.store.in_use():
            job = _job(request, recipe, after)
            begun = new_attempt(job)
            try:
                served = serve_job(with_engine, request.store, job, begun)
                return _show(recipe, served, begun.id, as_json)
            except (StartFailed, BackendDiffers) as error:
                if not recipe.fallback:
                    raise
                if not with_fallback:
                    error.hint += f" The recipe's fallback: `sm120 serve {recipe.fallback}`."
                    raise
                log.say(f"{error}\nTrying its fallback, {recipe.fallback}")
                after = begun.id


def _chain(recipes: Recipes, name: str) -> Iterator[Recipe]:
    """A recipe, then its fallbacks; read one by one, as most starts need none."""
    seen: list[str] = []
    following: str | None = name
    while following is not None:
        if following in seen or len(seen) > _LONGEST_CHAIN:
            raise RecipeInvalid(f"{name}: fallback: {' → '.join([*seen, following])} has no end")
        seen.append(following)
        recipe = recipes.read(following)
        yield recipe
        following = recipe.fallback


def _job(request: _Request, recipe: Recipe, after: str | None) -> Job:
    if recipe.image is None:
        raise RecipeInvalid(
            f"{recipe.name}: is for an engine without a container",
            f"`sm120 render {recipe.name} --as shell` prints its command.",
        )
    overrides = all_overrides(recipe, request.overrides)
    if request.weights:
        # the option names all of the weights, so the variable has nothing more to say
        overrides = overrides.model_copy(update={"model_path": None})
    weights = _weights(request, recipe, overrides)
    if weights is None and recipe.model.folder and not overrides.model_path:
        raise WeightsUnknown(f"{recipe.name}: no weights are named", "Name their --weights DIR.")
    built = _built(request, recipe.image)
    launch = plan_launch(
        recipe,
        overrides,
        weights=str(weights.folder) if weights else "",
        draft=str(request.draft.resolve()) if request.draft else "",
        digest=built.digest if built else None,
    )
    launch = with_whole_repositories(launch)
    return Job(
        recipe=recipe,
        launch=with_host_nccl(launch, request.host_nccl) if request.host_nccl else launch,
        record=built.record if built else None,
        weights=weights,
        timeout_s=request.timeout_s,
        flags=_refused(request.checkout, launch),
        cuda=_cuda(request.checkout, recipe.image),
        gates=_gates(request, built) if built else None,
        cards=request.cards,
        address=ANYWHERE if request.lan else LOOPBACK,
        skipped=request.skipped,
        after=after,
    )


def _weights(request: _Request, recipe: Recipe, overrides: Overrides) -> WeightsFolder | None:
    given = Path(overrides.model_path) if overrides.model_path else None
    if recipe.model.tiny and given is None:
        return tiny_weights(request.store, recipe)
    folder = request.weights
    # a name of the Hub is no folder of this machine
    if folder is None and given is not None and given.is_absolute():
        # of a GGUF model the variable names the file itself
        folder = given.parent if given.is_file() else given
    return find_weights(recipe, folder, kept_locks(request.checkout)) if folder else None


def _built(request: _Request, image: str) -> Built | None:
    try:
        return find_image(request.checkout, request.store, image, None)
    except UnknownImage:
        # an image that this checkout does not know at all is the recipe's fault
        request.checkout.spec(image)
        return None


def _gates(request: _Request, built: Built) -> GateState:
    spec = built.plan.spec
    has_patches = bool(request.checkout.series(spec).patches)
    return gate_state(request.store, spec, built, has_patches=has_patches)


def _refused(checkout: Checkout, launch: Launch) -> Known[tuple[str, ...]]:
    """What the engine of the image would refuse, as far as its parser is known."""
    try:
        parser = find_parser_flags(flags_folder(checkout), launch.engine, launch.image)
    except RecipeInvalid as error:
        return unknown(f"{error}. {error.hint}")
    return tuple(str(problem) for problem in check_flags(launch, parser))


def _cuda(checkout: Checkout, image: str) -> str | None:
    """The CUDA branch that an image compiles with at run time."""
    platform = pick_platform(checkout.spec(image), None)
    specs = checkout.chain(image, platform)
    versions = {
        pin.name: pin.version
        for spec in specs
        for pin in current_lock(checkout, spec, platform).wheels
    }
    found = next((versions[name] for name in _CUDA_COMPILERS if name in versions), None)
    return ".".join(found.split(".")[:2]) if found else None


def _show(recipe: Recipe, served: Served, attempt: str, as_json: bool) -> None:
    if as_json:
        return say_json(
            {
                "recipe": recipe.name,
                "container": served.container,
                "url": served.url,
                "model": served.model,
                "attempt": attempt,
                "seconds": round(served.seconds, 3),
            }
        )
    click.echo(f"{served.model} is served at {served.url} after {log.seconds(served.seconds)}")
    click.echo(f"`sm120 recipe stop {recipe.name}` ends it.")

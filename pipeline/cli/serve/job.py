"""A recipe and a user's options as a job for the container engine, with nothing left to look up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.assemble.image import Built
from pipeline.cli.context import pick_platform
from pipeline.cli.images import find_image
from pipeline.cli.recipe.recipes import all_overrides
from pipeline.errors import RecipeInvalid, UnknownImage, WeightsUnknown
from pipeline.known import Known, unknown
from pipeline.lock.model import current_lock
from pipeline.publish.gates import GateState, gate_state
from pipeline.recipe.container import ANYWHERE, LOOPBACK
from pipeline.recipe.launch import Launch, Overrides, plan_launch, with_whole_repositories
from pipeline.recipe.model import Recipe
from pipeline.recipe.parser import check_flags
from pipeline.recipe.parser_flags import find_parser_flags, flags_folder
from pipeline.serve.attempts import ServeOptions
from pipeline.serve.fits import FitPlan, model_in, plan_fit
from pipeline.serve.host_nccl import with_host_nccl, with_nccl_of
from pipeline.serve.run import Job
from pipeline.serve.site import HERE, Site, platform_of, tunnel_of
from pipeline.serve.weights import (
    WeightsFolder,
    find_weights,
    find_weights_on,
    tiny_weights,
    tiny_weights_on,
)
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store
from pipeline.weights.model import kept_locks

# The compiler whose output the driver has to load; the first that an image has.
_CUDA_COMPILERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


@dataclass(frozen=True)
class Request:
    """What the user asked for; the same for a recipe and its fallbacks."""

    checkout: Checkout
    store: Store
    options: ServeOptions
    site: Site = HERE
    dry_run: bool = False  # nothing is written, here or on another host


def make_job(request: Request, recipe: Recipe, after: str | None = None) -> Job:
    """One start of a recipe."""
    options = request.options
    if recipe.image is None:
        raise RecipeInvalid(
            f"{recipe.name}: is for an engine without a container",
            f"`sm120 render {recipe.name} --as shell` prints its command.",
        )
    tunnel = tunnel_of(request.site)
    overrides = _overrides(recipe, options, is_here=tunnel is None)
    weights = _weights(request, recipe, overrides)
    if tunnel and weights and recipe.model.folder:
        # parts are looked for on the host, not here
        first = str(weights.folder / weights.file)
        overrides = overrides.model_copy(update={"model_path": first})
    if weights is None and recipe.model.folder and not overrides.model_path:
        raise WeightsUnknown(f"{recipe.name}: no weights are named", "Name their --weights DIR.")
    platform = platform_of(tunnel, request.site.host) if tunnel else None
    built = _built(request, recipe.image, platform)
    launch = plan_launch(
        recipe,
        overrides,
        weights=str(weights.folder) if weights else "",
        draft=options.draft or "",
        digest=built.digest if built else None,
    )
    launch = with_whole_repositories(launch)
    return Job(
        recipe=recipe,
        launch=_with_nccl(request, launch),
        record=built.record if built else None,
        weights=weights,
        timeout_s=options.timeout_s,
        flags=_refused(request.checkout, launch),
        cuda=_cuda(request.checkout, recipe.image, platform),
        gates=_gates(request, built) if built else None,
        cards=options.cards,
        address=ANYWHERE if options.lan else LOOPBACK,
        skipped=options.skipped,
        after=after,
        options=options.model_copy(update={"overrides": overrides}),
        site=request.site,
        fit=_fit(request, recipe, overrides, weights),
    )


def _fit(
    request: Request, recipe: Recipe, overrides: Overrides, weights: WeightsFolder | None
) -> FitPlan | None:
    if not recipe.hardware.cards:
        return None
    return plan_fit(recipe, overrides, model_in(recipe, weights, request.checkout))


def _with_nccl(request: Request, launch: Launch) -> Launch:
    wanted, tunnel = request.options.host_nccl, tunnel_of(request.site)
    if wanted is None:
        return launch
    return with_nccl_of(tunnel, launch, wanted) if tunnel else with_host_nccl(launch, wanted)


def _overrides(recipe: Recipe, options: ServeOptions, *, is_here: bool) -> Overrides:
    overrides = all_overrides(recipe, options.overrides, options.weights)
    path = Path(overrides.model_path or "")
    if is_here and path.is_absolute():
        # the folder by its real name, which tells a snapshot of a Hub cache; of a GGUF file that is
        # the folder above it, as the file itself is a link to a blob there
        real = path.parent.resolve() / path.name if path.is_file() else path.resolve()
        return overrides.model_copy(update={"model_path": str(real)})
    return overrides


def _weights(request: Request, recipe: Recipe, overrides: Overrides) -> WeightsFolder | None:
    given = Path(overrides.model_path) if overrides.model_path else None
    tunnel = tunnel_of(request.site)
    if recipe.model.tiny and given is None and not request.options.weights:
        if tunnel:
            return tiny_weights_on(tunnel, recipe, dry_run=request.dry_run)
        return tiny_weights(request.store, recipe, dry_run=request.dry_run)
    folder = Path(request.options.weights) if request.options.weights else None
    # a name of the Hub is no folder of this machine
    if folder is None and given is not None and given.is_absolute():
        # of a GGUF model the variable names the file itself
        is_file = given.suffix == ".gguf" if tunnel else given.is_file()
        folder = given.parent if is_file else given
    if folder is None:
        return None
    known = kept_locks(request.checkout)
    if tunnel:
        return find_weights_on(tunnel, recipe, str(folder), known)
    return find_weights(recipe, folder, known)


def _built(request: Request, image: str, platform: str | None) -> Built | None:
    try:
        return find_image(request.checkout, request.store, image, platform)
    except UnknownImage:
        # an image that this checkout does not know at all is the recipe's fault
        request.checkout.spec(image)
        return None


def _gates(request: Request, built: Built) -> GateState:
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


def _cuda(checkout: Checkout, image: str, platform: str | None) -> str | None:
    """The CUDA branch that an image compiles with at run time."""
    platform = pick_platform(checkout.spec(image), platform)
    specs = checkout.chain(image, platform)
    versions = {
        pin.name: pin.version
        for spec in specs
        for pin in current_lock(checkout, spec, platform).wheels
    }
    found = next((versions[name] for name in _CUDA_COMPILERS if name in versions), None)
    return ".".join(found.split(".")[:2]) if found else None

"""Recipes as commands use them: their folders, the user's changes, their image and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.app.images import find_image
from pipeline.app.workspace import Workspace, pick_platform
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.core import errors, log
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.image import find_built
from pipeline.images.assemble.plan import plan_image
from pipeline.images.engine.parser_flags import (
    ParserFlags,
    find_parser_flags,
    flags_folder,
    write_parser_flags,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageSpec
from pipeline.serving.recipe.container import LOOPBACK, LaunchTarget, UnitSettings
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import (
    NodePlace,
    Overrides,
    model_words,
    node_places,
    on_node,
    over_nodes,
    plan_launch,
    read_overrides,
    with_whole_repositories,
)
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.recipe.parser import require_known_flags
from pipeline.serving.recipe.render.formats import CONTAINED, client_settings, render_env
from pipeline.serving.recipe.render.formats import render_launch as render_launch
from pipeline.weights.model import WeightsLock, current_weights_lock
from pipeline.weights.place import new_place, user_cache


def recipes_of(workspace: Workspace, folders: tuple[Path, ...]) -> Recipes:
    """A user's own folders first, then the checkout's."""
    # outside a checkout the user's own folders are all there is
    checkout = workspace.checkout_or_none() if folders else workspace.checkout()
    return Recipes([*folders, *([checkout.root / "recipes"] if checkout else [])])


def is_address(target: str) -> bool:
    """Whether a RECIPE|URL is a server's address: recipe names have no colon or slash."""
    return ":" in target or "/" in target


def say_contrary(recipe: Recipe) -> None:
    """Name the published reports that speak against what a recipe does."""
    for report in recipe.contrary:
        log.say(f"{recipe.name}: a report speaks against it: {report.what}\n  {report.link}")


def all_overrides(recipe: Recipe, options: Overrides, weights: object = None) -> Overrides:
    """Merge options, then the variables that the recipe reads; `weights` is --weights."""
    if weights and options.model_path:
        raise errors.RecipeInvalid(
            f"--weights {weights} and --model-path {options.model_path} both name the model",
            "Leave one of them out.",
        )
    overrides = read_overrides(options, os.environ, list(recipe.overrides))
    if weights and overrides.model_path:
        log.say(f"MODEL_PATH={overrides.model_path} is not used: --weights names {weights}")
        return overrides.model_copy(update={"model_path": None})
    return overrides


def image_digest(workspace: Workspace, recipe: Recipe, platform: str | None) -> str:
    """Return the digest of a recipe's image: of the local build, else the golden one."""
    checkout, name = workspace.checkout(), recipe.image or ""
    spec = checkout.spec(name)
    if platform is None and recipe.hardware.cards:
        # not that of this machine: a recipe is often rendered for another one
        platform = "linux/arm64" if recipe.hardware.card == "gb10" else "linux/amd64"
    plan = plan_image(checkout, name, pick_platform(spec, platform))
    if built := find_built(workspace.store_to_read(), plan):
        return built.digest
    golden = read_golden(checkout.golden_path).images.get(f"{name}.{plan.architecture}")
    # a digest of other inputs belongs to an older image
    if golden is None or golden.inputs != plan.inputs:
        raise errors.UnknownImage(
            f"{name} for {plan.platform} is not built, and no digest is committed for it",
            f"Run `sm120 build {name} --platform {plan.platform}` first,"
            " or name the image with --registry REGISTRY/REPOSITORY@sha256:….",
        )
    return golden.digest


def weights_folder(workspace: Workspace, recipe: Recipe, given: Path | None) -> str:
    """Find the folder of a recipe's weights: as named, else in this user's Hub cache."""
    # with all of the weights' package: a build that names recipes does not need it
    from pipeline.serving.serve.weights import tiny_weights

    if given is None and recipe.model.tiny:
        # made on the spot, as `serve` does it
        return str(tiny_weights(workspace.store(), recipe).folder)
    if folder := given or _cached(workspace, recipe.model.weights):
        return _whole_path(folder)
    raise errors.RecipeInvalid(
        f"{recipe.name}: nothing says where its weights lie",
        f"Name their folder with --weights DIR;"
        f" `sm120 weights fetch {recipe.model.weights or 'NAME'} --output DIR` downloads them.",
    )


def _whole_path(folder: Path) -> str:
    """Keep links, which may be there on purpose; but Kubernetes and systemd take no `..`."""
    return str(folder.resolve() if ".." in folder.parts else folder.absolute())


def _cached(workspace: Workspace, name: str | None) -> Path | None:
    """Find a locked set in the Hub cache, where `weights fetch --hub-cache` puts it."""
    # what is not locked has no known commit, and so no known folder
    if (lock := _lock(workspace, name)) is None:
        return None
    folder = new_place(user_cache(), lock, hub_cache=True).snapshot
    return folder if folder.is_dir() else None


def _lock(workspace: Workspace, name: str | None) -> WeightsLock | None:
    checkout = workspace.checkout_or_none()
    if checkout is None or name is None:
        return None
    try:
        return current_weights_lock(checkout, name)
    except (errors.LockUnusable, errors.WeightsUnknown):
        return None


_ON_CARDS = ["--gpus", "all", "--ipc=host", "--ulimit", "memlock=-1"]


def run_lines(recipes: Recipes, spec: ImageSpec, tag: str) -> Iterator[str]:
    """Yield a `docker run` with port and model, how to ask it, and a recipe for it."""
    recipe = next(recipes_for(recipes, spec.name), None)
    # an image without a server, or one that no recipe knows how to give a model to
    if recipe is None or not spec.ports:
        return
    port, is_file = spec.ports[0], recipe.engine in ("llama-cpp", "ik-llama")
    model = model_words(recipe.engine, f"/models/{'MODEL.gguf' if is_file else 'MODEL'}")
    flags = ["--rm", *(_ON_CARDS if recipe.hardware.cards else [])]
    # to this machine alone: engines ask nobody for a password
    flags += ["-p", f"{LOOPBACK}:{port}:{port}", "-v", "/models:/models:ro"]
    yield f"Run it: docker run {' '.join(flags)} {tag} {' '.join(model)}"
    yield f"Ask it: curl http://{LOOPBACK}:{port}/v1/models"
    yield f"Or let a recipe do both: sm120 serve {recipe.name}"


def recipes_for(recipes: Recipes, image: str) -> Iterator[Recipe]:
    """Find the recipes that serve an image; skip unreadable ones."""
    for name in recipes.names():
        try:
            recipe = recipes.read(name)
        except errors.PipelineError:
            # an unfinished recipe is no reason to end a build or a load with an error
            continue
        if recipe.image == image:
            yield recipe


def read_flags_of(
    workspace: Workspace,
    image: str,
    *,
    platform: str | None = None,
    again: bool = False,
    accept: bool = False,
    program: Path | None = None,
    archive: Path | None = None,
    wheel: Path | None = None,
    inside: str | None = None,
) -> ParserFlags:
    """Read the flags that an image's engine accepts: as committed, or from its parser now.

    With `accept`, writes them to the committed file.
    """
    from pipeline.artifacts.containers.container_engine import find_backend
    from pipeline.images.engine.read_flags import (
        find_parser,
        read_flags,
        read_program_flags,
        read_source_flags,
        read_wheel_flags,
    )

    checkout = workspace.checkout()
    folder = flags_folder(checkout)
    if program:
        found = read_program_flags(checkout, image, program.resolve())
    elif archive:
        found = read_source_flags(checkout, image, archive)
    else:
        plan = plan_image(checkout, image, checkout.spec(image).platforms[0])
        if not (again or accept or wheel):
            found = find_parser_flags(folder, find_parser(plan).engine, image)
        else:
            store = workspace.store()
            built = find_image(checkout, store, inside or image, platform)
            backend = find_backend("auto")
            found = (
                read_wheel_flags(store, plan, wheel, built, backend)
                if wheel
                else read_flags(store, built, backend)
            )
    if accept:
        found = found.model_copy(update={"also": images_alike(checkout, image)})
        log.say(f"Written: {write_parser_flags(folder, found)}")
    return found


def images_alike(checkout: Checkout, image: str) -> list[str]:
    """List other images whose engine has the same parser, version, patches and source."""
    own = _engines(checkout, image)
    return [
        name
        for name in checkout.images()
        if name != image and any(each in own for each in _engines(checkout, name))
    ]


def _engines(checkout: Checkout, name: str) -> list[tuple[object, ...]]:
    """List, per platform, what decides the flags of an image; empty without an engine."""
    from pipeline.images.engine.read_flags import find_parser

    try:
        plans = [plan_image(checkout, name, each) for each in checkout.spec(name).platforms]
        parsers = [find_parser(plan) for plan in plans]
    except errors.PipelineError:
        return []  # starts no engine
    engines: list[tuple[object, ...]] = []
    for plan, parser in zip(plans, parsers, strict=True):
        wheels = {
            (wheel.name, wheel.version)
            for each in plan.chain()
            for wheel in each.lock.wheels
            if wheel.name in ("vllm", "sglang", "xllamacpp")
        }
        patches = [
            str(digest)
            for each in plan.chain()
            if isinstance(each.inputs["patches"], list)
            for digest in each.inputs["patches"]
        ]
        trees = {
            t.lock.tree for t in plan.all_trees() if t.source.name in ("ik-llama", "llama-cpp")
        }
        key = (parser.engine, parser.arguments[0], frozenset(wheels), tuple(patches))
        engines.append((*key, frozenset(trees)))
    return engines


@dataclass(frozen=True)
class RenderRequest:
    """A recipe, the format to render it in, and what the user changes of it."""

    recipe: str
    format_name: str
    weights: Path | None = None
    draft: Path | None = None
    registry: str | None = None  # where the image was published
    gpus: tuple[int, ...] | None = None
    host_nccl: str | None = None
    runner: str | None = None  # none: Docker in a unit, Podman in a Slurm job
    node: str = "127.0.0.1"
    nodes: int | None = None  # machines in place of the recipe's
    hosts: tuple[str, ...] = ()  # their addresses, in the order of their ranks
    rank: int | None = None  # this one alone
    rdma: bool = False
    lan: bool = False
    detach: bool = False
    no_cdi: bool = False
    claim: str | None = None
    weights_image: str | None = None
    overrides: Overrides = field(default_factory=Overrides)
    folders: tuple[Path, ...] = ()
    platform: str | None = None
    unit: UnitSettings | None = None  # of a unit that stays on a host


class Rendered(NamedTuple):
    """What all formats are made from, and the text in the requested format.

    An engine over several nodes has a text for each rank.
    """

    body: dict[str, Any] | list[dict[str, Any]]
    texts: Callable[[], dict[int, str]]


def render_recipe(workspace: Workspace, request: RenderRequest) -> Rendered:
    """A recipe as a command, a unit, a Compose file, Kubernetes objects or settings."""
    from pipeline.artifacts.containers.docker import default_tag

    form = request.format_name
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    recipe = over_nodes(recipe, request.nodes or len(request.hosts) or recipe.nodes)
    overrides = all_overrides(recipe, request.overrides, request.weights)
    say_contrary(recipe)
    if form == "shell" and recipe.image:
        _compare_engines(workspace.checkout(), recipe)
    if form == "env":
        name = overrides.served_model_name or recipe.model.name
        settings = client_settings(name, overrides.port or recipe.port, request.node)
        return Rendered(dict(settings), lambda: {0: render_env(settings)})
    # Slurm knows the addresses once it has chosen the nodes; Kubernetes is refused below
    places = {} if form in ("slurm", "kubernetes") else node_places(recipe, request.hosts)
    if request.rank is not None and request.rank not in places:
        ranks = f"its ranks are 0 to {recipe.nodes - 1}" if places else "it has no ranks"
        message = f"{recipe.name}: --node-rank {request.rank}: {ranks}"
        raise errors.RecipeInvalid(message, "Leave --node-rank out, or name another one.")
    reference = parse_reference(request.registry) if request.registry else None
    contained, digest = form in CONTAINED, None
    if contained and recipe.image:
        named = reference and reference.digest
        digest = named or image_digest(workspace, recipe, request.platform)
    # a model that an override names needs no folder
    folder = "" if overrides.model_path else weights_folder(workspace, recipe, request.weights)
    spec, model = recipe.speculation, recipe.model
    # a command is often rendered on another machine than the one that has the weights: then the
    # lock names their first part
    if model.folder and not model.file and not Path(folder, model.folder).is_dir():
        lock, first = _lock(workspace, model.weights), f"{model.folder}/*-00001-of-*.gguf"
        found = [file.path for file in lock.files if fnmatchcase(file.path, first)] if lock else []
        # with none or several, the launch says what is missing
        if len(found) == 1:
            model = model.model_copy(update={"file": found[0]})
            recipe = recipe.model_copy(update={"model": model})
    # the engine may also fetch a draft model itself
    draft = request.draft or _cached(workspace, spec.weights if spec else None)
    launch = plan_launch(
        recipe if contained else recipe.model_copy(update={"image": None}),
        overrides,
        weights=folder,
        draft=_whole_path(draft) if draft else "",
        digest=digest,
    )
    launch = with_whole_repositories(launch)
    launches = {rank: on_node(launch, place) for rank, place in places.items()} or {0: launch}
    # the flags of two ranks are those of all, also where Slurm is to place them
    meeting = [NodePlace(rank, LOOPBACK, LOOPBACK) for rank in range(min(recipe.nodes, 2))]
    for each in [on_node(launch, place) for place in meeting] if meeting[1:] else [launch]:
        require_known_flags(workspace.checkout(), each)
    if request.rank is not None:
        launches = {request.rank: launches[request.rank]}
    # the image by digest in its registry, or by the name that `sm120 load` gives it
    image = ""
    if recipe.image and digest:
        image = default_tag(recipe.image, digest)
        if reference:
            image = str(reference.model_copy(update={"tag": None, "digest": digest}))

    def texts() -> dict[int, str]:
        body = {
            "image": image,
            "gpus": request.gpus,
            "nccl": request.host_nccl,
            "runner": request.runner or ("podman" if form == "slurm" else "docker"),
            "rdma": request.rdma,
            "lan": request.lan,
            "cdi": not request.no_cdi,
            "detached": request.detach,
            "claim": request.claim,
            "weights_image": request.weights_image,
            "deployed": request.unit,
        }
        target = LaunchTarget.model_validate(body)
        return {rank: render_launch(each, target, form) for rank, each in launches.items()}

    shown = [each.model_dump(mode="json") for each in launches.values()]
    return Rendered(shown if places else shown[0], texts)


def _compare_engines(checkout: Checkout, recipe: Recipe) -> None:
    """Refuse if the host's engine would die without the image's patches; else name them."""
    if needed := recipe.needs_patches:
        raise errors.RecipeInvalid(
            f"{recipe.name}: the engine of this machine lacks {needed[0]} of the image"
            f" {recipe.image}, and dies with these flags",
            "Render it for a container, or take a recipe without an image: `sm120 recipe list`.",
        )
    name = recipe.image
    if name is None or checkout.written(name) not in checkout.images():
        return
    for spec in checkout.chain(name, pick_platform(checkout.spec(name), None)):
        for patch in checkout.series(spec).patches:
            log.say(
                f"{recipe.name}: the image {name} has {patch.file}, which this machine's engine"
                f" lacks: {patch.why}"
            )

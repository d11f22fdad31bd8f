"""Build images into the store: plan, build, state, gate; then rebuild to compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.app.image_statements import ImageStatements, state_images
from pipeline.app.images import find_image, plans_of
from pipeline.app.signing import Signing, signer_of
from pipeline.app.sources import (
    LayerSettings,
    compile_missing,
    missing_archives,
    missing_trees,
    offered_layers,
)
from pipeline.app.workspace import Workspace
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core import log
from pipeline.core.errors import (
    NotCovered,
    NotReproducible,
    OfflineMiss,
    SpecInvalid,
    StoreDamaged,
    UnknownImage,
)
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.image import Built, assemble_images
from pipeline.images.assemble.plan import ImagePlan, TreePlan, WarmPlan, Work, work_for
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.source.compiled import require_decided
from pipeline.images.source.toolchain import why_not_here

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer
    from pipeline.evidence.statements.rebuilt import Rebuilt
    from pipeline.evidence.verify.layers import OfferedLayer
    from pipeline.images.fetch.inputs import Fetcher
    from pipeline.images.gate.stage import Staged


@dataclass(frozen=True)
class BuildRequest:
    """Images to build, and from where their parts may come."""

    names: tuple[str, ...] = ()  # none: all that need no compiling first
    platform: str | None = None
    accept: bool = False  # write golden digests and the hashes of edited patches
    keep_inputs: bool = False
    gated: bool = False
    mirrors: tuple[str, ...] = ()
    layers: LayerSettings | None = None
    offline: bool = False
    bases: BaseSettings = field(default_factory=BaseSettings)
    slim: bool = False  # of warm images, the variants that compile nothing
    recipes: tuple[str, ...] = ()  # that these must serve; none: all of the spec


@dataclass(frozen=True)
class BuildResult:
    """The built images, their statements, and the results of their gates."""

    built: list[Built]
    statements: dict[Built, ImageStatements]
    stages: dict[Built, Staged]
    seconds: float
    store: Store

    def require_passed(self) -> None:
        """Raise the error of the first image whose gates failed; the store keeps the images."""
        for staged in self.stages.values():
            if staged.error:
                raise staged.error

    def offer_key(self) -> None:
        """Mention once, for each store, how evidence gets signed."""
        is_unsigned = any(not each.stated.signed_by for each in self.statements.values())
        Signing().offer_key(self.store, is_unsigned)


@dataclass(frozen=True)
class BuildPlan:
    """What building images would take."""

    plans: list[ImagePlan]
    work: Work
    compiled: list[TreePlan]  # compiled on this machine first
    taken: list[tuple[TreePlan, OfferedLayer]]  # from a registry
    not_here: list[str]  # why this machine cannot compile some of them
    store: Store
    warm: list[WarmPlan]  # kernels that are compiled on this machine, too

    @property
    def taken_bytes(self) -> int:
        return sum(layer.record.size_bytes for _, layer in self.taken)


OnJudged = Callable[["Staged"], None]


def build_images(
    workspace: Workspace, request: BuildRequest, on_judged: OnJudged | None = None
) -> BuildResult:
    """Build images, state what they are made of, and with `gated` run their gates.

    `on_judged` gets the results of each image's gates as soon as they are known.
    """
    start = time.monotonic()
    checkout, signing, store = workspace.checkout(), Signing(), workspace.store()
    plans, offered = _plans(workspace, request, store)
    if not plans:
        message = "there is no image to build that is not compiled first"
        raise UnknownImage(message, "Name those to compile and build: `sm120 build IMAGE`.")

    def judge(image: Built) -> None:
        if image.plan.slim:
            # slow to import, and most builds are not judged
            from pipeline.artifacts.containers.container_engine import find_backend
            from pipeline.images.start_test.prove import require_libraries

            require_libraries(store, image, find_backend("auto"))

    # a function: a build with nothing to fetch reads no settings and runs no pip
    def fetcher() -> Fetcher:
        from pipeline.images.fetch.inputs import make_fetcher  # slow; often nothing is fetched

        return make_fetcher(store, request.mirrors, request.offline, request.bases)

    with store.in_use():
        compile_missing(checkout, store, plans, fetcher, offered)
        _make_missing_warm(workspace, store, plans, fetcher, request.mirrors, request.offline)
        # objects that others chose must not become a golden digest
        for tree in [t for plan in plans for t in plan.all_trees()] if request.accept else ():
            require_decided(store, read_golden(checkout.golden_path), tree)
        built = assemble_images(
            *(checkout, store, plans, fetcher),
            keep_inputs=request.keep_inputs,
            accept=request.accept,
            before_named=judge,
        )
        # a damaged record of gates is an error, unless gates run now and replace it
        with suppress(*([StoreDamaged] if request.gated else [])):
            statements = state_images(checkout, store, built, signing)
    stages: dict[Built, Staged] = {}
    if request.gated:
        # after the image is stated and kept: a failed gate must not cost the build
        stages = _judge(workspace, built, request, on_judged)
        with store.in_use():
            statements = state_images(checkout, store, built, signing)
    return BuildResult(built, statements, stages, time.monotonic() - start, store)


def _plans(
    workspace: Workspace, request: BuildRequest, store: Store
) -> tuple[list[ImagePlan], dict[str, OfferedLayer]]:
    """The images to build, and the compiled layers that a registry offers for them."""
    checkout, names = workspace.checkout(), request.names
    if request.slim:
        if not names:
            raise UnknownImage("--slim is for images with `warm`, and none is named")
        for name in names:
            if (spec := checkout.spec(name)).warm and not spec.slim:
                fix = "Name there the packages that compile: `sm120 image schema image`."
                raise UnknownImage(f"{name}: its spec has no `slim`", fix)
        # one without `warm` is refused below, as `sm120 image warm` refuses it
        written = {name: checkout.spec(name).warm for name in names}
        names = tuple(f"{checkout.written(n)}-slim" if written[n] else n for n in names)
    plans = plans_of(checkout, names, request.platform)
    if request.recipes and not (request.slim or any(plan.slim for plan in plans)):
        raise SpecInvalid("--recipe says what a slim image must serve", "Add --slim.")
    for plan in plans if request.slim else [plan for plan in plans if plan.slim]:
        # slow to import, and most images have no kernels
        from pipeline.app.warm import WarmRequest, report_warm

        about = WarmRequest(plan.spec.name, platform=plan.platform, recipes=request.recipes)
        rows = report_warm(workspace, replace(about, all_recipes=True))
        lacking = [row for row in rows if row.state not in ("present", "none needed")]
        if lacking or not rows:
            # says once what several recipes lack for one reason
            lacks: dict[str, list[str]] = {}
            for row in lacking:
                why = f"({row.reason})" if row.reason else ""
                first = f": {row.missing[0]}" if row.missing else ""
                reason = f"{row.library} {row.state} {why}{first}"
                lacks.setdefault(reason, []).append(row.recipe)
            reasons = "; ".join(f"{', '.join(names)}: {what}" for what, names in lacks.items())
            reasons = reasons or "`warm: recipes:` names none, so nothing says what it must serve"
            raise NotCovered(f"{plan.spec.name} is not built: {reasons}")
    trees, access = missing_trees(store, plans), request.bases.access
    offered = offered_layers(workspace, trees, request.layers, access, offline=request.offline)
    if names:
        return plans, offered
    ready: list[ImagePlan] = []
    for plan in plans:
        missing = [x for x in missing_trees(store, [plan]) if x.key not in offered]
        cold = missing_warm(store, [plan])
        if not missing and not cold:
            ready.append(plan)
            continue
        name, minutes = plan.spec.name, sum(tree.build.cpu_minutes for tree in missing)
        what = f"it is compiled first, {minutes} CPU-minutes"
        if not missing:
            what = "its kernels are compiled first, for minutes"
        log.say(f"{name} for {plan.platform} is left out: {what}. `sm120 build {name}` does it.")
    return ready, offered


def _judge(
    workspace: Workspace, built: list[Built], request: BuildRequest, on_judged: OnJudged | None
) -> dict[Built, Staged]:
    """Judge every image's gates in turn; a failure is raised only after the last one."""
    # slow to import, and most builds are not judged
    from pipeline.app.gate import make_gate_context
    from pipeline.images.gate.stage import judge_built

    context = make_gate_context(workspace, request.mirrors, request.offline)
    stages: dict[Built, Staged] = {}
    for image in built:
        if not context.checkout.spec(image.name).gates:
            continue
        with context.store.in_use(), log.step(f"Judging {image.name}"):
            staged = judge_built(context, image)
        if staged:
            stages[image] = staged
            if on_judged:
                on_judged(staged)
    return stages


def missing_warm(store: Store, plans: list[ImagePlan]) -> list[WarmPlan]:
    """The warm layers that images need and the store lacks, each once."""
    warm = {p.warm.key: p.warm for plan in plans for p in plan.chain() if p.warm}
    return [plan for key, plan in warm.items() if store.layer(key) is None]


def _make_missing_warm(
    workspace: Workspace,
    store: Store,
    plans: list[ImagePlan],
    fetcher: Callable[[], Fetcher],
    mirrors: tuple[str, ...],
    offline: bool,
) -> None:
    """Compile the kernels of images whose warm layers the store lacks."""
    if cold := missing_warm(store, plans):
        from pipeline.app.gate import make_gate_context
        from pipeline.app.warm import make_warm  # slow, and most images have none

        context = make_gate_context(workspace, mirrors, offline)
        make_warm(replace(context, store=store, make_fetcher=fetcher), cold)


def plan_build(workspace: Workspace, request: BuildRequest) -> BuildPlan:
    """Work out what `build` would take for the same images; fetch and write nothing."""
    Signing()  # refuses a key that cannot be read, as the build would
    store = workspace.store_to_read()
    return _build_plan(store, *_plans(workspace, request, store))


def plan_images(
    workspace: Workspace,
    names: tuple[str, ...] = (),
    platform: str | None = None,
    layers: LayerSettings | None = None,
    access: Access | None = None,
) -> BuildPlan:
    """Work out what building images would take: all of them if none is named."""
    store = workspace.store_to_read()
    plans = plans_of(workspace.checkout(), names, platform)
    offered = offered_layers(workspace, missing_trees(store, plans), layers, access)
    return _build_plan(store, plans, offered)


def _build_plan(
    store: Store, plans: list[ImagePlan], offered: Mapping[str, OfferedLayer]
) -> BuildPlan:
    missing = missing_trees(store, plans)
    trees = [tree for tree in missing if tree.key not in offered]
    # what compiles them is built first, where it is missing
    work = work_for([*plans, *(tree.toolchain for tree in trees)], store)
    work = replace(work, fetch=(*work.fetch, *missing_archives(store, trees)))
    taken = [(tree, offered[tree.key]) for tree in missing if tree.key in offered]
    reasons = {tree.title: why for tree in trees if (why := why_not_here(tree))}
    warm = missing_warm(store, plans)
    return BuildPlan(plans, work, trees, taken, [*reasons.values()], store, warm)


def rebuild_image(
    workspace: Workspace,
    name: str,
    *,
    attest: bool = False,
    keep_objects: bool = False,
    key_path: Path | None = None,
    platform: str | None = None,
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
    bases: BaseSettings | None = None,
) -> Rebuilt:
    """Build an image again in an empty store, and compare every byte with the first build."""
    from pipeline.evidence.statements.rebuilt import Rebuilt, compare_builds
    from pipeline.images.source.objects import objects_folder

    checkout, signer = workspace.checkout(), signer_of(key_path) if attest else None
    store = workspace.store()
    with store.in_use(), store.scratch() as folder:
        first = find_image(checkout, store, name, platform)
        empty = open_store(folder / "store")
        if keep_objects:
            objects_folder(store).mkdir(exist_ok=True)
            objects_folder(empty).symlink_to(objects_folder(store))
        with _attested(store, first, signer) as ended:
            second = build_again(workspace, empty, first.plan, mirrors, offline, bases)
            with log.watched(f"Comparing {first.name}"):
                ended.append(Rebuilt(second, compare_builds(store, first, empty, second)))
    (rebuilt,) = ended
    return rebuilt


def build_again(
    workspace: Workspace,
    empty: Store,
    plan: ImagePlan,
    mirrors: tuple[str, ...],
    offline: bool,
    bases: BaseSettings | None,
) -> Built:
    """Build an image in an empty store, so that no earlier build can leak into it."""
    from pipeline.images.fetch.inputs import make_fetcher

    checkout, store = workspace.checkout(), workspace.store()
    # inputs that the store has, and the layers of a foreign base, need not travel again
    near = (str(store.root / "inputs"), str(store.root / "oci"))
    fetcher = make_fetcher(empty, (*mirrors, *near), offline, bases or BaseSettings())
    try:
        compile_missing(checkout, empty, [plan], lambda: fetcher)
        _make_missing_warm(workspace, empty, [plan], lambda: fetcher, mirrors, offline)
        return assemble_images(checkout, empty, [plan], lambda: fetcher, judge=False)[0]
    except OfflineMiss as error:
        # the store lacks it after another run, too: a rebuild keeps no inputs
        name = plan.spec.name
        fix = f"`sm120 image collect {name} --output DIR` fills a folder for --mirror DIR."
        raise OfflineMiss(str(error), f"Leave --offline out. {fix}") from error


@contextmanager
def _attested(store: Store, first: Built, signer: Signer | None) -> Iterator[list[Rebuilt]]:
    """State how a rebuild ended, where there is a signer; a difference is stated, too."""
    from pipeline.artifacts.attest.statement import moment
    from pipeline.evidence.statements.image import record_rebuild

    ended: list[Rebuilt] = []
    try:
        yield ended
    except NotReproducible as error:
        if signer is not None:
            record_rebuild(store, first, signer, str(error), moment())
        which = f"{first.name} for {first.platform}"
        raise NotReproducible(f"{which}: {error}", error.hint) from error
    if signer is not None:
        declared = ended[0].declared
        text = f"{log.count(len(declared), 'file')} with declared differences" if declared else ""
        record_rebuild(store, first, signer, text, moment(), declared)

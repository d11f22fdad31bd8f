"""A whole serve: preflight, start, and an entry of it in the list of attempts."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pipeline import log
from pipeline.errors import (
    Interrupted,
    NothingServed,
    PipelineError,
    ServeFailed,
    UnknownImage,
    WeightsUnknown,
)
from pipeline.host.rules.verdict import RuleResult
from pipeline.known import Known
from pipeline.model import canonical_json, sha256_of
from pipeline.oci.record import ImageRecord
from pipeline.publish.gates import GateState
from pipeline.recipe.container import (
    ATTEMPT_LABEL,
    LOOPBACK,
    OWNER_LABEL,
    PORT_LABEL,
    RECIPE_LABEL,
    container_name,
)
from pipeline.recipe.launch import Launch
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import AttemptList, Begun, Ended, Outcome, new_id, short_failure, stamp
from pipeline.serve.container_engine import ContainerEngine, titles
from pipeline.serve.facts import ContainerFacts, own_name, require_own
from pipeline.serve.fits import FitPlan
from pipeline.serve.options import ServeOptions
from pipeline.serve.preflight import Plan, require_ready, run_checks
from pipeline.serve.site import HERE, Site
from pipeline.serve.start import Served, Start, make_room, start_engine
from pipeline.serve.weights import WeightsFolder
from pipeline.store.store import Store


@dataclass(frozen=True)
class Job:
    """A recipe that is to be served, with nothing left to look up."""

    recipe: Recipe
    launch: Launch
    record: ImageRecord | None  # none: not built
    weights: WeightsFolder | None
    timeout_s: float
    cuda: str | None = None
    gates: GateState | None = None
    cards: tuple[int, ...] = ()
    flags: Known[tuple[str, ...]] = ()  # what the engine's own parser would refuse
    address: str = LOOPBACK
    skipped: Collection[str] = ()
    after: str | None = None  # the attempt that this one follows
    options: ServeOptions | None = None
    site: Site = HERE
    fit: FitPlan | None = None


def attempts_of(store: Store) -> AttemptList:
    """The list of a store."""
    return AttemptList(store.root / "attempts")


def recipe_digest(recipe: Recipe) -> str:
    """A recipe as attempts and statements name it."""
    return sha256_of(canonical_json(recipe.model_dump(mode="json")))


def new_attempt(job: Job) -> Begun:
    """The entry that begins a serve."""
    return Begun(
        id=new_id(),
        kind="serve",
        recipe=job.recipe.name,
        recipe_digest=recipe_digest(job.recipe),
        image=job.recipe.image,
        image_digest=job.record.digest if job.record else None,
        weights_digest=job.weights.digest if job.weights else None,
        after=job.after,
        options=job.options,
        host=job.site.host or None,
        at=stamp(),
    )


def serve(engine: ContainerEngine, store: Store, job: Job, begun: Begun) -> Served:
    """Preflight and start; both, and any failure, are kept."""
    attempts = attempts_of(store)
    with kept(attempts, begun, "serving"):
        # first: a port that the same recipe holds would be the wrong reason
        make_room(engine, job.recipe.name)
        require_ready(preflight(job, port_holder(engine, job.launch.port)))
        if job.record is None:
            raise UnknownImage(f"{job.recipe.image} is not built")
        _require_folders(job.launch)
        start = Start(
            launch=job.launch,
            record=job.record,
            expect=job.recipe.expect,
            timeout_s=job.timeout_s,
            log_file=attempts.log_path(begun.id),
            cards=job.cards,
            address=job.address,
            labels=((ATTEMPT_LABEL, begun.id), (OWNER_LABEL, own_name())),
            door=job.site.door(job.launch.port),
        )
        with job.site.guarded(container_name(job.recipe.name), begun.id):
            return start_engine(engine, store, start)


def port_holder(engine: ContainerEngine, port: int) -> str:
    """The recipe that is served at a port; empty where none of ours is."""
    held = [c for c in engine.containers() if c.running and c.labels.get(PORT_LABEL) == str(port)]
    return held[0].labels.get(RECIPE_LABEL, "") if held else ""


def preflight(job: Job, holder: str = "") -> list[RuleResult]:
    """Whether the machine is ready for a start, check by check."""
    plan = Plan(
        recipe=job.recipe,
        port=job.launch.port,
        image_is_built=job.record is not None,
        weights=job.weights,
        cuda=job.cuda,
        gates=job.gates,
        cards=job.cards,
        flags=job.flags,
        fit=job.fit,
        port_holder=holder,
    )
    machine = job.site.look(job.recipe, job.launch.port)
    return run_checks(plan, machine, job.skipped)


def _require_folders(launch: Launch) -> None:
    for mount in launch.mounts:
        if not mount.host:
            raise WeightsUnknown(
                f"{launch.recipe}: no folder is named for {mount.inside}",
                "--weights DIR names the weights, --draft DIR those of a draft model.",
            )


@contextmanager
def kept(attempts: AttemptList, begun: Begun, good: Outcome) -> Iterator[None]:
    """An attempt with its end, however that comes; `good` is the outcome where all went well."""
    attempts.add(begun)
    start = time.monotonic()

    def end(outcome: Outcome, failure: str = "", issues: Collection[str] = ()) -> None:
        seconds = round(time.monotonic() - start, 3)
        text = short_failure(failure)
        ended = Ended(
            id=begun.id,
            outcome=outcome,
            failure=text,
            issues=list(issues),
            seconds=seconds,
            at=stamp(),
        )
        try:
            attempts.add(ended)
        except PipelineError as error:
            # neither an engine that serves nor the reason of one that does not is lost by that
            log.say(f"The end of the attempt {begun.id} is not kept: {error}")

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as error:
        end("interrupted", str(error) or "stopped")
        raise
    except PipelineError as error:
        issues = error.issues if isinstance(error, ServeFailed) else ()
        end("failed", f"{type(error).__name__}: {error}", issues)
        raise
    except BaseException as error:
        # defects of ours
        end("failed", f"{type(error).__name__}: {error}")
        raise
    end(good)


def find_served(engine: ContainerEngine, recipe: str) -> ContainerFacts:
    """The container of a recipe, running or not."""
    facts = engine.container(container_name(recipe))
    if facts is None or facts.labels.get(RECIPE_LABEL) != recipe:
        raise NothingServed(f"{recipe}: no container of it is in {titles([engine])}")
    return facts


def find_among(
    engines: Sequence[ContainerEngine], recipe: str
) -> tuple[ContainerEngine, ContainerFacts]:
    """The same where several container engines may hold it."""
    for engine in engines:
        with suppress(NothingServed):
            return engine, find_served(engine, recipe)
    raise NothingServed(f"{recipe}: no container of it is in {titles(engines)}")


def stop(engine: ContainerEngine, store: Store, facts: ContainerFacts, timeout_s: int) -> float:
    """End a container and remove it; how long that took."""
    require_own(facts)
    begun = time.monotonic()
    recipe = facts.labels.get(RECIPE_LABEL, facts.name)
    with log.step(f"Stopping {recipe}"):
        if facts.running:
            engine.stop(facts.id, timeout_s)
        engine.remove(facts.id)
    seconds = time.monotonic() - begun
    attempts = attempts_of(store)
    # started with another store, or by hand with our labels: there is nothing to add to
    attempt = facts.labels.get(ATTEMPT_LABEL, "")
    if any(known.begun.id == attempt for known in attempts.read().attempts):
        ended = Ended(id=attempt, outcome="stopped", seconds=round(seconds, 3), at=stamp())
        attempts.add(ended)
    return seconds

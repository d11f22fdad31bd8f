"""Serves a recipe with its entry in the list of attempts, says what is served, and ends it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from pipeline.artifacts.attest.statement import stamp
from pipeline.artifacts.containers.arguments import Label
from pipeline.artifacts.containers.container_engine import ContainerEngine, titles
from pipeline.artifacts.containers.facts import (
    ContainerFacts,
    difference,
    other_owner,
    own_user,
    require_own,
)
from pipeline.artifacts.oci.record import ImageRecord
from pipeline.artifacts.store.store import Store, read_image_record
from pipeline.core import errors, log
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.core.verdict import RuleResult
from pipeline.serving.recipe.container import LOOPBACK, container_name
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.attempts import (
    AttemptList,
    Begun,
    Ended,
    Outcome,
    ServeOptions,
    new_id,
)
from pipeline.serving.serve.engine_log import kernel_choices
from pipeline.serving.serve.health import is_healthy
from pipeline.serving.serve.preflight import PlannedStart, require_ready, run_checks
from pipeline.serving.serve.site import HERE, Site
from pipeline.serving.serve.start import Served, Start, make_room, start_engine


@dataclass(frozen=True, kw_only=True)
class ServeJob(PlannedStart):
    """A recipe that is to be served, with nothing left to look up."""

    launch: Launch
    record: ImageRecord | None  # none: not built
    timeout_s: float
    address: str = LOOPBACK
    skipped: Collection[str] = ()
    after: str | None = None  # the attempt that this one follows
    options: ServeOptions | None = None
    site: Site = HERE
    workers: tuple[tuple[ContainerEngine, str], ...] = ()  # of rank 0: containers of the others


def attempts_of(store: Store) -> AttemptList:
    """The list of attempts of a store."""
    return AttemptList(store.root / "attempts")


def recipe_digest(recipe: Recipe) -> str:
    """A recipe as attempts and statements name it."""
    return sha256_of(canonical_json(recipe.model_dump(mode="json")))


def new_attempt(job: ServeJob) -> Begun:
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


def serve_launch(engine: ContainerEngine, store: Store, job: ServeJob, begun: Begun) -> Served:
    """Checks the machine and starts the engine; records the attempt, however it ends."""
    attempts = attempts_of(store)
    with kept_attempt(attempts, begun, "serving"):
        # first: a port that the same recipe holds would be the wrong reason
        make_room(engine, job.recipe.name)
        require_ready(preflight(job, port_holder(engine, job.launch.port)))
        if job.record is None:
            raise errors.UnknownImage(f"{job.recipe.image} is not built")
        for mount in job.launch.mounts:
            if not mount.host:
                raise errors.WeightsUnknown(
                    f"{job.launch.recipe}: no folder is named for {mount.inside}",
                    "--weights DIR names the weights, --draft DIR those of a draft model.",
                )
        start = Start(
            launch=job.launch,
            record=job.record,
            expect=job.recipe.expect,
            timeout_s=job.timeout_s,
            log_file=attempts.log_path(begun.id),
            cards=job.cards,
            address=job.address,
            labels=((Label.ATTEMPT, begun.id), (Label.OWNER, own_user())),
            # a rank above 0 is never asked
            door=None if job.launch.rank else job.site.door(job.launch.port),
            workers=job.workers,
        )
        # from outside: the guard must see the end of whatever happens in the start
        with job.site.guarded(container_name(job.recipe.name), begun.id):
            return start_engine(engine, store, start)


def port_holder(engine: ContainerEngine, port: int) -> str:
    """The recipe that is served at a port; empty where none of ours is."""
    held = [c for c in engine.containers() if c.running and c.port == port]
    return held[0].recipe if held else ""


def preflight(job: ServeJob, holder: str = "") -> list[RuleResult]:
    """Whether the machine is ready for a start, check by check."""
    machine = job.site.look(job.recipe, job.port)
    return run_checks(replace(job, port_holder=holder), machine, job.skipped)


@contextmanager
def kept_attempt(attempts: AttemptList, begun: Begun, good: Outcome) -> Iterator[None]:
    """Records an attempt and its end; `good` is the outcome of a block that ends well."""
    attempts.add(begun)
    start = time.monotonic()
    outcome, failure = good, ""
    issues: tuple[str, ...] = ()
    try:
        yield
    except (errors.Interrupted, KeyboardInterrupt) as error:
        outcome, failure = "interrupted", str(error) or "stopped"
        raise
    # whatever ends the start: an attempt without an end reads as killed
    except BaseException as error:
        outcome, failure = "failed", f"{type(error).__name__}: {error}"
        issues = error.issues if isinstance(error, errors.ServeFailed) else ()
        raise
    finally:
        seconds = round(time.monotonic() - start, 3)
        log_file = attempts.log_path(begun.id)
        kernels = kernel_choices(log_file) if outcome == "serving" and log_file.exists() else []
        ended = Ended(
            id=begun.id,
            outcome=outcome,
            failure=failure,
            issues=list(issues),
            kernels=kernels,
            seconds=seconds,
            at=stamp(),
        )
        try:
            attempts.add(ended)
        except errors.PipelineError as error:
            # a full disk must hide neither an engine that serves nor the reason of a failure
            log.say(f"The end of the attempt {begun.id} is not kept: {error}")


def find_served(engine: ContainerEngine, recipe: str) -> ContainerFacts:
    """The container of a recipe, running or not."""
    return find_among([engine], recipe)[1]


def find_among(
    engines: Sequence[ContainerEngine], recipe: str
) -> tuple[ContainerEngine, ContainerFacts]:
    """The same, if several container engines may hold it."""
    for engine in engines:
        facts = engine.container(container_name(recipe))
        if facts is not None and facts.recipe == recipe:
            return engine, facts
    raise errors.NothingServed(f"{recipe}: no container of it is in {titles(engines)}")


def stop_container(
    engine: ContainerEngine, store: Store, facts: ContainerFacts, timeout_s: int
) -> float:
    """Ends a container and removes it; returns how long that took."""
    require_own(facts)
    begun = time.monotonic()
    with log.step(f"Stopping {facts.recipe or facts.name}"):
        if facts.running:
            engine.stop(facts.id, timeout_s)
        engine.remove(facts.id)
    seconds = time.monotonic() - begun
    attempts = attempts_of(store)
    # started with another store, or by hand with our labels: there is nothing to add to
    attempt = facts.labels.get(Label.ATTEMPT, "")
    if any(known.begun.id == attempt for known in attempts.read().attempts):
        ended = Ended(id=attempt, outcome="stopped", seconds=round(seconds, 3), at=stamp())
        attempts.add(ended)
    return seconds


class ServedStatus(Frozen):
    """One container of a recipe."""

    recipe: str
    container: str
    status: str
    healthy: bool
    port: int | None
    model: str
    image: str
    digest: str
    # same: the image and every layer are those of the store
    built: Literal["same", "other", "unknown"]
    why: str
    attempt: str
    started_at: str
    other_owner: str = ""  # another user who started it
    # of an engine over several nodes, such as 1/2; only rank 0 answers clients
    rank: str = Field(default="", exclude_if=lambda rank: not rank)

    @property
    def is_forgotten(self) -> bool:
        """Whether it answers, though its container engine says that it never started.

        Podman takes running containers for those of an earlier boot if its /run folder was cleared;
        `podman system reset` clears it, also with another storage.
        """
        return self.status == "created" and self.healthy


def status_of(engine: ContainerEngine, store: Store, site: Site = HERE) -> list[ServedStatus]:
    """Every container of a recipe."""
    records = {record.digest: record for record in map(read_image_record, store.image_paths())}
    found = []
    for facts in engine.containers():
        labels, port = facts.labels, facts.port
        # Podman says `created` of an engine that it forgot
        may_run = facts.running or facts.status == "created"
        record = records.get(labels.get(Label.DIGEST, ""))
        why = difference(record, engine.image(facts.image)) if record else "not in this store"
        rank = labels.get(Label.RANK, "")
        is_worker = bool(rank) and not rank.startswith("0/")
        answers = facts.running if is_worker else may_run and port is not None
        if answers and port is not None and not is_worker:
            answers = is_healthy(site.door(port))
        status = ServedStatus(
            recipe=facts.recipe,
            container=facts.name,
            status=facts.status,
            healthy=answers,
            port=port,
            model=labels.get(Label.MODEL, ""),
            image=labels.get(Label.IMAGE, ""),
            digest=labels.get(Label.DIGEST, ""),
            built="unknown" if record is None else ("other" if why else "same"),
            why=why,
            attempt=labels.get(Label.ATTEMPT, ""),
            started_at=facts.started_at,
            other_owner=other_owner(facts),
            rank=rank,
        )
        found.append(status)
    return found

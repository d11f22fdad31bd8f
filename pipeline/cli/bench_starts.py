"""`sm120 bench RECIPE --workload start`: the engine of a recipe is started again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from pipeline import log
from pipeline.bench.server import Server
from pipeline.bench.starts import Started, Starter
from pipeline.cli.context import checkout_of, store_of
from pipeline.cli.serve.job import Request, make_job
from pipeline.cli.serve.on_host import folder_on, machine_on
from pipeline.errors import NothingServed, WorkloadInvalid
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import Begun, ServeOptions
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.find_engine import Wanted
from pipeline.serve.run import Job, find_served, new_attempt, serve, stop
from pipeline.serve.start import STOP_S
from pipeline.smoke.wire import Address


@dataclass(frozen=True)
class RecipeStarts:
    """The engine of a recipe on this machine, as `sm120 serve` would start it."""

    engine: ContainerEngine
    request: Request
    job: Job
    headers: Mapping[str, str]

    def start(self) -> Started:
        """Until it answers; an attempt as any other."""
        store = self.request.store
        with store.in_use():
            served = serve(self.engine, store, self.job, new_attempt(self.job))
        url = served.url.removesuffix("/v1")
        server = Server(Address.read(url), url, self.headers)
        return Started(server, served.model, served.seconds)

    def stop(self) -> None:
        """Nothing of it is left, also where nothing was."""
        with suppress(NothingServed):
            facts = find_served(self.engine, self.job.recipe.name)
            stop(self.engine, self.request.store, facts, STOP_S)

    def is_served(self) -> bool:
        """Whether somebody uses it now, or could."""
        with suppress(NothingServed):
            return find_served(self.engine, self.job.recipe.name).running
        return False


def require_recipe(recipe: Recipe | None) -> Recipe:
    """Nobody starts a server that is known by its address alone."""
    if recipe is None:
        raise WorkloadInvalid(
            "how long a start takes can be measured of a recipe alone",
            "Name the recipe in place of the address.",
        )
    return recipe


@contextmanager
def recipe_starter(
    context: click.Context,
    recipe: Recipe,
    engine: Wanted,
    weights: Path | None,
    headers: Mapping[str, str],
) -> Iterator[tuple[Starter, Begun]]:
    """Starts of a recipe, and what stands behind each; the machine is left as it was found."""
    options = ServeOptions(weights=folder_on(None, weights, "--weights"))
    with machine_on(context, None, engine, recipe.name) as (site, containers):
        request = Request(checkout_of(context), store_of(context), options, site)
        job = make_job(request, recipe)
        if job.weights is None:
            raise WorkloadInvalid(
                f"{recipe.name}: its weights are in no folder that is known here",
                "--weights DIR names it: a cold start reads them from the disk again.",
            )
        starts = RecipeStarts(containers, request, job, headers)
        with _left_as_found(starts):
            yield Starter(starts.start, starts.stop, job.weights.folder), new_attempt(job)


@contextmanager
def _left_as_found(starts: RecipeStarts) -> Iterator[None]:
    name, was_served = starts.job.recipe.name, starts.is_served()
    if was_served:
        log.say(f"{name} is served now: it is ended, as its start is to be measured")
    try:
        yield
    finally:
        if not was_served:
            starts.stop()
        elif starts.is_served():
            log.say(
                f"{name} is served again, as the recipe says and without options that it was"
                f" served with before; `sm120 recipe stop {name}` ends it"
            )
        else:
            log.say(f"{name} is not served any more; `sm120 serve {name}` starts it")

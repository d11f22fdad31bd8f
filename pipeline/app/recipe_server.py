"""The server of a recipe while a smoke test runs: found or started, restarted, rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.app.serve import ServeContext, make_job
from pipeline.artifacts.containers.container_engine import ContainerEngine
from pipeline.core.errors import (
    ImageDiffers,
    NothingServed,
    PreflightFailed,
    RecipeInvalid,
    ServeFailed,
    ServerGone,
)
from pipeline.core.net.wire import Address
from pipeline.serving.recipe.launch import speculates
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.attempts import Begun, ServeOptions, new_id, stamp
from pipeline.serving.serve.run import (
    ServedStatus,
    attempts_of,
    find_served,
    new_attempt,
    recipe_digest,
    serve,
    status_of,
    stop,
)
from pipeline.serving.serve.start import STOP_S, restart
from pipeline.serving.smoke.client import Gone
from pipeline.serving.smoke.session import Session


@dataclass
class RecipeServer:
    """What runs of a recipe now, and what a test may do to it."""

    engine: ContainerEngine
    context: ServeContext
    recipe: Recipe
    status: ServedStatus
    begun: Begun | None  # the attempt that started it; none where this store does not know it
    drafts: ServeOptions | None  # how the user wants it served, where that is with a draft model

    @property
    def url(self) -> str:
        """Where it listens, on its own machine."""
        host = self.context.site.host
        return f"http://127.0.0.1:{self.status.port}{f' on {host}' if host else ''}"

    def address(self) -> Address:
        """Where this machine reaches it."""
        door = self.context.site.door(self.status.port or 0)
        near = Address.read(f"http://127.0.0.1:{self.status.port}")
        return replace(near, socket=door) if isinstance(door, Path) else near

    def connect(self, session: Session) -> None:
        """Let a test do what cannot be done to a server at an address."""
        session.restart = self._restart
        session.why_no_drafting = f"{self.recipe.name}: is served without a draft model"
        if self.drafts:
            session.start_drafting = self._start_drafting

    async def _restart(self) -> None:
        facts, limit_s = find_served(self.engine, self.recipe.name), self.context.options.timeout_s
        door = self.context.site.door(self.status.port or 0)
        await _in_thread(lambda: restart(self.engine, facts, door, limit_s))

    async def _start_drafting(self) -> None:
        await _in_thread(lambda: self.serve_again(drafting=True))

    def serve_again(self, *, drafting: bool, after: str | None = None) -> None:
        """The same with the draft model or without it, in the place of what runs."""
        assert self.drafts is not None
        stop_recipe(self.engine, self.context, self.recipe)
        again = replace(self.context, options=self.drafts.drafting(drafting))
        after = after or (self.begun.id if self.begun else None)
        self.begun = start_recipe(self.engine, again, self.recipe, after)
        self.status = _status(self.engine, self.context, self.recipe)

    def attempt(self) -> Begun:
        """The entry that begins a test."""
        built = self.status.built == "same"
        return smoke_attempt(
            self.recipe,
            image=self.recipe.image if built else None,
            image_digest=self.status.digest if built else None,
            weights_digest=self.begun.weights_digest if self.begun else None,
            after=self.begun.id if self.begun else None,
            host=self.context.site.host or None,
        )


def smoke_attempt(recipe: Recipe, **known: str | None) -> Begun:
    """A test with what a recipe expects; of a server at an address the digests are not known."""
    body = {
        "id": new_id(),
        "kind": "smoke",
        "recipe": recipe.name,
        "recipe_digest": recipe_digest(recipe),
        "at": stamp(),
    }
    return Begun.model_validate({**body, **known})


def find_server(engine: ContainerEngine, context: ServeContext, recipe: Recipe) -> RecipeServer:
    """The server that `sm120 serve` started of a recipe."""
    status = _status(engine, context, recipe)
    attempts = attempts_of(context.store).read().attempts
    begun = next((a.begun for a in attempts if a.begun.id == status.attempt), None)
    if begun and begun.recipe_digest != recipe_digest(recipe):
        raise RecipeInvalid(
            f"{recipe.name}: has changed since it was served",
            f"Serve it anew: `sm120 recipe stop {recipe.name}`, `sm120 serve {recipe.name}`.",
        )
    options = begun.options if begun else None
    drafts = options if options and speculates(recipe, options.overrides) else None
    known = replace(context, options=options or context.options)
    return RecipeServer(engine, known, recipe, status, begun, drafts)


@contextmanager
def started_server(
    engine: ContainerEngine, context: ServeContext, recipe: Recipe
) -> Iterator[RecipeServer]:
    """A recipe, served for one test; without its draft model, which is the last rung."""
    options = make_job(context, recipe).options or context.options
    drafts = options if speculates(recipe, options.overrides) else None
    first = replace(context, options=options.drafting(False) if drafts else options)
    begun = start_recipe(engine, first, recipe, None)
    try:
        yield RecipeServer(engine, first, recipe, _status(engine, first, recipe), begun, drafts)
    finally:
        stop_recipe(engine, context, recipe)


def start_recipe(
    engine: ContainerEngine, context: ServeContext, recipe: Recipe, after: str | None
) -> Begun:
    """Serve a recipe as `sm120 serve` does; returns its attempt."""
    with context.store.in_use():
        job = make_job(context, recipe, after)
        begun = new_attempt(job)
        serve(engine, context.store, job, begun)
    return begun


def stop_recipe(engine: ContainerEngine, context: ServeContext, recipe: Recipe) -> None:
    """Stop what is served of a recipe."""
    # a start that failed may have made no container
    with suppress(NothingServed):
        stop(engine, context.store, find_served(engine, recipe.name), STOP_S)


def _status(engine: ContainerEngine, context: ServeContext, recipe: Recipe) -> ServedStatus:
    name = recipe.name
    found = status_of(engine, context.store, context.site)
    status = next((each for each in found if each.recipe == name), None)
    if status is None:
        raise NothingServed(
            f"{name}: nothing of it is served here",
            f"`sm120 serve {name}` starts it; `sm120 smoke {name} --serve` does so for the climb.",
        )
    if status.built == "other":
        raise ImageDiffers(f"{status.container}: {status.why}")
    if status.is_forgotten:
        raise ServerGone(
            f"{name}: answers, but Podman has forgotten that it runs",
            f"`sm120 recipe stop {name}` ends it; then serve it again.",
        )
    if status.port is None or not status.healthy:
        raise ServerGone(
            f"{name}: its container is {status.status}, and does not answer",
            f"`sm120 recipe logs {name}` shows why.",
        )
    return status


async def _in_thread(act: Callable[[], None]) -> None:
    """Run something slow about a container; a test takes a server that does not start as gone."""
    try:
        await asyncio.to_thread(act)
    except (ServeFailed, PreflightFailed) as error:
        raise Gone(str(error)) from error

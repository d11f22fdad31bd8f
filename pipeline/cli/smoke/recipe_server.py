"""The server of a recipe for the time of a climb: found or started, restarted, rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cli.serve.job import Request, make_job
from pipeline.errors import (
    ImageDiffers,
    NothingServed,
    PreflightFailed,
    RecipeInvalid,
    ServeFailed,
    ServerGone,
)
from pipeline.recipe.launch import speculates
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import Begun, ServeOptions, new_id, stamp
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.health import Door
from pipeline.serve.run import (
    ServedStatus,
    attempts_of,
    find_served,
    new_attempt,
    recipe_digest,
    serve,
    status_of,
    stop,
)
from pipeline.serve.start import STOP_S, restart
from pipeline.smoke.client import Gone
from pipeline.smoke.session import Session
from pipeline.smoke.wire import Address


@dataclass
class RecipeServer:
    """What runs of a recipe now, and what it can be made to be."""

    engine: ContainerEngine
    request: Request
    recipe: Recipe
    status: ServedStatus
    begun: Begun | None  # the attempt that started it; none where this store does not know it
    drafts: ServeOptions | None  # how the user wants it served, where that is with a draft model

    @property
    def url(self) -> str:
        """Where it listens, on its own machine."""
        host = self.request.site.host
        return f"http://127.0.0.1:{self.status.port}{f' on {host}' if host else ''}"

    def address(self) -> Address:
        """Where this machine reaches it."""
        door = self._door()
        near = Address.read(f"http://127.0.0.1:{self.status.port}")
        return replace(near, socket=door) if isinstance(door, Path) else near

    def _door(self) -> Door:
        return self.request.site.door(self.status.port or 0)

    def connect(self, session: Session) -> None:
        """Let a climb do what cannot be done to a server at an address."""
        session.restart = self._restart
        session.why_no_drafting = f"{self.recipe.name}: is served without a draft model"
        if self.drafts:
            session.start_drafting = self._start_drafting

    async def _restart(self) -> None:
        facts, door = find_served(self.engine, self.recipe.name), self._door()
        limit_s = self.request.options.timeout_s
        await _in_thread(lambda: restart(self.engine, facts, door, limit_s))

    async def _start_drafting(self) -> None:
        await _in_thread(lambda: self.serve_again(drafting=True))

    def serve_again(self, *, drafting: bool, after: str | None = None) -> None:
        """The same with the draft model or without it, in the place of what runs."""
        assert self.drafts is not None
        stop_recipe(self.engine, self.request, self.recipe)
        options = self.drafts.drafting(drafting)
        after = after or (self.begun.id if self.begun else None)
        self.begun = start_recipe(
            self.engine, replace(self.request, options=options), self.recipe, after
        )
        self.status = _status(self.engine, self.request, self.recipe)

    def attempt(self) -> Begun:
        """The entry that begins a climb."""
        built = self.status.built == "same"
        return smoke_attempt(
            self.recipe,
            image=self.recipe.image if built else None,
            image_digest=self.status.digest if built else None,
            weights_digest=self.begun.weights_digest if self.begun else None,
            after=self.begun.id if self.begun else None,
            host=self.request.site.host or None,
        )


def smoke_attempt(
    recipe: Recipe,
    *,
    image: str | None = None,
    image_digest: str | None = None,
    weights_digest: str | None = None,
    after: str | None = None,
    host: str | None = None,
) -> Begun:
    """A climb with what a recipe expects; of a server at an address the digests are not known."""
    return Begun(
        id=new_id(),
        kind="smoke",
        recipe=recipe.name,
        recipe_digest=recipe_digest(recipe),
        image=image,
        image_digest=image_digest,
        weights_digest=weights_digest,
        after=after,
        host=host,
        at=stamp(),
    )


def find_server(engine: ContainerEngine, request: Request, recipe: Recipe) -> RecipeServer:
    """What `sm120 serve` started of a recipe."""
    status = _status(engine, request, recipe)
    attempts = attempts_of(request.store).read().attempts
    begun = next((a.begun for a in attempts if a.begun.id == status.attempt), None)
    if begun and begun.recipe_digest != recipe_digest(recipe):
        raise RecipeInvalid(
            f"{recipe.name}: has changed since it was served",
            f"Serve it anew: `sm120 recipe stop {recipe.name}`, `sm120 serve {recipe.name}`.",
        )
    options = begun.options if begun else None
    drafts = options if options and speculates(recipe, options.overrides) else None
    known = replace(request, options=options or request.options)
    return RecipeServer(engine, known, recipe, status, begun, drafts)


@contextmanager
def started_server(
    engine: ContainerEngine, request: Request, recipe: Recipe
) -> Iterator[RecipeServer]:
    """A recipe, served for a climb alone; without its draft model, which is the last rung."""
    options = make_job(request, recipe).options or request.options
    drafts = options if speculates(recipe, options.overrides) else None
    first = replace(request, options=options.drafting(False) if drafts else options)
    begun = start_recipe(engine, first, recipe, None)
    try:
        yield RecipeServer(engine, first, recipe, _status(engine, first, recipe), begun, drafts)
    finally:
        stop_recipe(engine, request, recipe)


def start_recipe(
    engine: ContainerEngine, request: Request, recipe: Recipe, after: str | None
) -> Begun:
    """Serve a recipe as `sm120 serve` does; its attempt."""
    with request.store.in_use():
        job = make_job(request, recipe, after)
        begun = new_attempt(job)
        serve(engine, request.store, job, begun)
    return begun


def stop_recipe(engine: ContainerEngine, request: Request, recipe: Recipe) -> None:
    """End what is served of a recipe."""
    # a start that failed has left nothing to end
    with suppress(NothingServed):
        stop(engine, request.store, find_served(engine, recipe.name), STOP_S)


def _status(engine: ContainerEngine, request: Request, recipe: Recipe) -> ServedStatus:
    name = recipe.name
    found = status_of(engine, request.store, request.site)
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
    """Something slow about a container, as a climb sees it: a server that does not come is gone."""
    try:
        await asyncio.to_thread(act)
    except (ServeFailed, PreflightFailed) as error:
        raise Gone(str(error)) from error

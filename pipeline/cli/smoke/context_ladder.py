"""`sm120 serve RECIPE --context-ladder`: the longest context that a recipe proves is served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pipeline import log
from pipeline.cli.serve.job import Request
from pipeline.cli.smoke.recipe_server import find_server, start_recipe, stop_recipe
from pipeline.errors import AlreadyServed, PreflightFailed, ServeFailed, SmokeFailed
from pipeline.recipe.model import Recipe
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.run import attempts_of, kept
from pipeline.smoke.client import Client
from pipeline.smoke.code import run_in_sandbox
from pipeline.smoke.ladder import climb
from pipeline.smoke.model import plan_for
from pipeline.smoke.rungs.first import FIRST
from pipeline.smoke.rungs.length import LENGTH
from pipeline.smoke.session import Session

# Stay at the first until it is proved, then go on: the ladder of "Blackwell Shenanigans 001".
STEPS = (65_536, 98_304, 131_072, 262_144)


def serve_longest(
    engine: ContainerEngine,
    request: Request,
    recipe: Recipe,
    steps: Sequence[int],
    headers: dict[str, str],
) -> tuple[int, str]:
    """Start with each context in turn while it proves itself; the last good one stays served.

    Returns it, and why the next one did not hold; empty where all did.
    """
    good, why = 0, ""
    for tokens in sorted(steps):
        try:
            if good:
                stop_recipe(engine, request, recipe)
            start_recipe(engine, _with_context(request, tokens), recipe, None)
            _prove(engine, request, recipe, tokens, headers)
            good = tokens
        except (ServeFailed, PreflightFailed, SmokeFailed) as error:
            # what runs already, or cannot run on this machine at all, is no matter of its context
            if isinstance(error, AlreadyServed) or (
                isinstance(error, PreflightFailed) and not good
            ):
                raise
            why = f"{tokens} tokens: {error}"
            stop_recipe(engine, request, recipe)
            if not good:
                raise
            log.say(f"{why}\nServing {recipe.name} with {good} tokens again")
            start_recipe(engine, _with_context(request, good), recipe, None)
            break
    return good, why


def _with_context(request: Request, tokens: int) -> Request:
    overrides = request.options.overrides.model_copy(update={"max_model_len": tokens})
    return replace(request, options=request.options.model_copy(update={"overrides": overrides}))


def _prove(
    engine: ContainerEngine, request: Request, recipe: Recipe, tokens: int, headers: dict[str, str]
) -> None:
    """The first answer, and needles in a text of the whole context."""
    server = find_server(engine, request, recipe)
    changes = {"contexts": [tokens], "served_tokens": None, "model": server.status.model}
    plan = plan_for(recipe).model_copy(update=changes)
    session = Session(Client(server.address(), plan.limits, headers), plan, run_in_sandbox)
    begun = server.attempt()
    with kept(attempts_of(request.store), begun, "passed"):
        log.say(f"Testing {recipe.name} with {tokens} tokens at {server.url}")
        result = asyncio.run(climb(session, server.url, (FIRST, LENGTH)))
        if failures := result.failures():
            raise SmokeFailed(f"{failures[0].name}: {failures[0].message[:300]}")

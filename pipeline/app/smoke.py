"""Smoke tests: a server proves itself rung by rung, and the result is stated and signed.

The server is an address, a recipe that `serve` started, or one that starts for the test.
A recipe's statement is about its image; an address's is next to the result.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.app.image_statements import state_runs
from pipeline.app.images import find_image
from pipeline.app.recipes import is_address, recipes_of, say_contrary
from pipeline.app.serve import (
    RemoteHost,
    ServeContext,
    ServeRequest,
    connected,
    folder_on,
    machine_on,
    make_job,
)
from pipeline.app.signing import Signing
from pipeline.app.statements import state_run
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.statement import stamp
from pipeline.artifacts.containers.container_engine import ContainerEngine, Wanted
from pipeline.artifacts.containers.facts import require_own
from pipeline.core import errors, log
from pipeline.core.files import sha256_of_file
from pipeline.core.known import Unknown
from pipeline.core.model import sha256_of
from pipeline.core.net.wire import Address
from pipeline.hosts.rules.issues import issue_findings, match_rungs
from pipeline.images.gate.runs import OUTPUTS, ImageRun
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import speculates
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.attempts import Begun, ServeOptions, new_id
from pipeline.serving.serve.run import (
    ServedStatus,
    attempts_of,
    find_served,
    kept_attempt,
    new_attempt,
    recipe_digest,
    serve_launch,
    status_of,
    stop_container,
)
from pipeline.serving.serve.site import HERE
from pipeline.serving.serve.start import STOP_S, restart
from pipeline.serving.smoke.client import ChatClient, Gone, Unsound
from pipeline.serving.smoke.ladder import LADDER, as_run, keep_ladder, run_ladder
from pipeline.serving.smoke.model import THINKING_TOKENS, SmokePlan, SmokeResult, plan_for, quick
from pipeline.serving.smoke.rungs.answers import run_in_sandbox
from pipeline.serving.smoke.rungs.first import FIRST
from pipeline.serving.smoke.rungs.length import LENGTH
from pipeline.serving.smoke.rungs.soak import SOAK
from pipeline.serving.smoke.rungs.speculation import SPECULATION
from pipeline.serving.smoke.session import (
    Baseline,
    Rung,
    SmokeSession,
    read_baseline,
    record_baseline,
    write_baseline,
)

RUNGS = [rung.name for rung in LADDER]
# Stay at the first until it is proved, then go on: the ladder of "Blackwell Shenanigans 001".
CONTEXT_STEPS = (65_536, 98_304, 131_072, 262_144)


@dataclass(frozen=True)
class SmokeExpectations:
    """What the user expects of a server in place of what its recipe says."""

    model: str | None = None
    no_quality: bool = False
    no_tools: bool = False
    no_cache: bool = False
    reasoning: bool = False
    vision: bool = False
    text_only: bool = False
    quick: bool = False
    streams: list[int] | None = None
    contexts: list[int] | None = None
    context_tokens: int | None = None
    lengths: int | None = None
    pressure: int | None = None
    request_limit_s: float | None = None

    def plan(self, recipe: Recipe | None) -> SmokePlan:
        """What the server must do."""
        base = plan_for(recipe) if recipe else SmokePlan()
        same = ("model", "streams", "contexts", "context_tokens", "lengths", "vision", "text_only")
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given["pressure_prompts"] = self.pressure
        values = {name: value for name, value in given.items() if value}
        if self.no_quality:
            values |= {"quality": False, "why_no_quality": "--no-quality"}
        if self.no_tools:
            values["tools"] = False
        if self.no_cache:
            values["caches"] = False
        if self.reasoning:
            values |= {"reasoning": True, "answer_tokens": THINKING_TOKENS}
        if self.contexts:
            # who names lengths expects them of the server as it is
            values["served_tokens"] = None
        if self.request_limit_s:
            values["limits"] = {**base.limits.model_dump(), "request_s": self.request_limit_s}
        plan = SmokePlan.model_validate({**base.model_dump(), **values})
        return quick(plan) if self.quick else plan


@dataclass(frozen=True)
class SmokeRequest:
    """Which server to test, how far, and where to keep the result."""

    target: str  # a recipe or an address
    expected: str | None = None  # of an address: the recipe that says what to expect
    folders: tuple[Path, ...] = ()  # recipes of the user's own
    expectations: SmokeExpectations = field(default_factory=SmokeExpectations)
    start: bool = False  # start the recipe first and stop it last
    weights: Path | None = None
    draft: Path | None = None
    restart: bool = False  # allow restarts of a server that others may use
    engine: Wanted = "auto"
    on: RemoteHost | None = None
    up_to: str = RUNGS[-1]
    keep: Path | None = None
    record: Path | None = None  # record a baseline in this file, and test nothing else
    baseline: Path | None = None
    soak_s: float | None = None  # run mixed work this long, instead of the ladder

    @property
    def rungs(self) -> Sequence[Rung]:
        if self.soak_s:
            return (FIRST, SOAK)
        # recording a baseline needs only a server that answers, no other rung
        return LADDER[:1] if self.record else LADDER[: RUNGS.index(self.up_to) + 1]

    @property
    def may_restart(self) -> bool:
        # nobody else uses a server that was started for this test alone
        return self.restart or self.start

    def session(self, address: Address, plan: SmokePlan) -> SmokeSession:
        """A test that has not begun."""
        session = SmokeSession(
            ChatClient(address, plan.limits, api_headers()), plan, run_in_sandbox
        )
        session.baseline = read_baseline(self.baseline) if self.baseline else None
        session.soak_s = self.soak_s or 0.0
        return session


OnResult = Callable[[SmokeResult, str | None], None]


def api_headers() -> dict[str, str]:
    """The key for a server, from SM120_API_KEY."""
    key = os.environ.get("SM120_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def smoke(
    workspace: Workspace, request: SmokeRequest, on_result: OnResult | None = None
) -> SmokeResult | Baseline:
    """Test a server rung by rung, and state the result; raises SmokeFailed where a rung fails.

    `on_result` gets the result with the id of its attempt as soon as it is known, good or bad.
    With `record`, returns the recorded answers.
    """
    show = on_result or (lambda result, attempt: None)
    if is_address(request.target):
        return _smoke_address(workspace, request, show)
    options = ServeOptions(
        weights=folder_on(request.on, request.weights, "--weights"),
        draft=folder_on(request.on, request.draft, "--draft"),
    )
    recipes, signing = recipes_of(workspace, request.folders), Signing()
    recipe = recipes.read(request.target)
    if recipe.nodes > 1 and request.may_restart:
        raise errors.RecipeInvalid(
            f"{recipe.name}: its {recipe.nodes} ranks can only be started together",
            "Serve it with --on HOST,HOST first, and test it without --serve and --restart.",
        )
    holding = None if request.start else recipe.name
    with machine_on(workspace, request.on, request.engine, holding) as (site, containers):
        context = ServeContext(workspace.checkout(), workspace.store(), options, site)
        if request.start:
            with started_server(containers, context, recipe) as server:
                return _smoke_recipe(request, recipes, signing, server, show)
        server = find_server(containers, context, recipe)
        return _smoke_recipe(request, recipes, signing, server, show)


def _smoke_address(
    workspace: Workspace, request: SmokeRequest, show: OnResult
) -> SmokeResult | Baseline:
    expected = request.expected
    recipe = recipes_of(workspace, request.folders).read(expected) if expected else None
    signing, url, address = Signing(), request.target, Address.read(request.target)
    with ExitStack() as stack:
        host = request.on.host if request.on else None
        begun = smoke_attempt(recipe, host=host) if recipe else None
        if request.on:
            # an address on that host, perhaps closed to this machine
            tunnel = stack.enter_context(connected(workspace, request.on))
            address = replace(address, socket=tunnel.forward(address.netloc))
            url = f"{url} on {request.on.host}"
        session = request.session(address, request.expectations.plan(recipe))
        if begun:
            attempts = attempts_of(workspace.store())
            stack.enter_context(kept_attempt(attempts, begun, "passed"))
        result = _tested(request, session, url, show, begun)
        if isinstance(result, SmokeResult):
            try:
                folder = request.keep or workspace.store().root / "smoke" / new_id()
                if not request.keep:
                    keep_ladder(folder, result, session.client.exchanges)
            # keep hours of tests even if their result cannot be stored
            except (errors.StoreUnwritable, errors.DiskFull) as error:
                log.say(f"Nothing is stated: {error}")
            else:
                # nobody knows what runs at the address, only what is expected there
                run = as_run(
                    result,
                    session.client.exchanges,
                    recipe=None,
                    inputs={f"expected/{recipe.name}": recipe_digest(recipe)} if recipe else {},
                    machine={"address": result.url},
                )
                files = {name: sha256_of_file(folder / name) for name in OUTPUTS}
                stated = state_run(folder, files, run, signing)
                log.say(f"statement: {stated.file}, {stated.state}")
            _require_passed(result, session)
        return result


def _smoke_recipe(
    request: SmokeRequest, recipes: Recipes, signing: Signing, server: RecipeServer, show: OnResult
) -> SmokeResult | Baseline:
    """Test a recipe's server, state the result, and take back a draft model that does not hold."""
    plan = request.expectations.plan(server.recipe)
    named = request.expectations.model or server.status.model or plan.model
    session = request.session(server.address(), plan.model_copy(update={"model": named}))
    if request.may_restart:
        require_own(find_served(server.engine, server.recipe.name))
        server.connect(session)
        if server.drafts and not request.start and SPECULATION in request.rungs:
            log.say("Its draft model is turned off until the last rung.")
            server.serve_again(drafting=False)
    else:
        # restarts nothing, also not with a draft model: people may be using the server
        session.why_no_restart = session.why_no_drafting = "only with --restart"
    if not server.context.site.host:
        session.memory_bytes = server.memory_bytes
    session.read_log, session.log_lines = server.read_log, len(server.read_log())
    begun = server.attempt()
    try:
        with kept_attempt(attempts_of(server.context.store), begun, "passed"):
            result = _tested(request, session, server.url, show, begun)
            if isinstance(result, SmokeResult):
                if request.soak_s:
                    log.say("A soak is not stated beside the image; --output keeps its result.")
                else:
                    make = partial(as_run, result, session.client.exchanges)
                    state_recipe_run(server, recipes, make, signing)
                _require_passed(result, session)
            return result
    except errors.SmokeFailed as error:
        say_contrary(server.recipe)
        # the last rung failed after, or while, the draft model was turned on
        last = session.client.check.partition(":")[0]
        drafted = session.start_drafting is not None and last == SPECULATION.name
        if drafted and not request.start:
            log.say("Serving it again without its draft model, as the rungs before proved it.")
            server.serve_again(drafting=False, after=begun.id)
            error.hint = "It is served without its draft model now. " + error.hint
        elif server.recipe.fallback:
            error.hint += f" The recipe's fallback: `sm120 smoke {server.recipe.fallback} --serve`."
        raise


def _tested(
    request: SmokeRequest, session: SmokeSession, url: str, show: OnResult, begun: Begun | None
) -> SmokeResult | Baseline:
    """Run the rungs, and keep and show the result; or record a baseline instead."""
    log.say(f"Testing {url}")
    if path := request.record:

        async def recorded() -> Baseline:
            _require_passed(await run_ladder(session, url, request.rungs), session)
            with log.step("Recording greedy answers, one at a time"):
                return await record_baseline(session, url)

        try:
            baseline = asyncio.run(recorded())
        except Unsound as error:
            raise errors.SmokeFailed(f"{url}: {error}") from error
        write_baseline(path, baseline)
        return baseline
    result = asyncio.run(run_ladder(session, url, request.rungs))
    if request.keep:
        keep_ladder(request.keep, result, session.client.exchanges)
    show(result, begun.id if begun else None)
    return result


def _require_passed(result: SmokeResult, session: SmokeSession) -> None:
    if result.verdict == "passed":
        return
    if not any(e.status for e in session.client.exchanges):
        raise errors.ServerGone(f"{result.url}: {result.failures()[0].message}")
    rung = result.rungs[-1]
    failed = [check for check in rung.checks if check.verdict == "failed"]
    first = failed[0]
    error = errors.SmokeFailed(f"{result.url}: {rung.name}: {first.name}: {first.message[:300]}")
    matches = match_rungs([(rung.name, f"{c.name}: {c.message}") for c in failed])
    issues = [finding.issue for finding in issue_findings([matches])]
    for issue in issues:
        log.say(
            f"  {issue.id}: {issue.title}\n    {issue.cause}\n    see {', '.join(issue.sources)}"
        )
    known = " ".join(f"Perhaps {issue.id}: {issue.fix}" for issue in issues)
    error.hint = f"{known} {error.hint}".strip()
    raise error


def state_recipe_run(
    server: RecipeServer, recipes: Recipes, make: Callable[..., ImageRun], signing: Signing
) -> None:
    """Keep and state a result, good or bad; only of an image that this checkout builds.

    `make` gets the recipe's name, the digests of what served, and the machine.
    """
    checkout, store, recipe = server.context.checkout, server.context.store, server.recipe
    try:
        built = find_image(checkout, store, recipe.image or "", None)
    except errors.UnknownImage:
        built = None
    if built is None or server.status.built != "same" or built.digest != server.status.digest:
        log.say("Nothing is stated: what runs is not the image that this checkout builds.")
        return
    # verify does not search the checkout for a user's own recipes
    shipped = checkout.root / "recipes"
    inputs = {
        f"{'recipes' if path.parent == shipped else 'own'}/{path.name}": sha256_of(
            path.read_bytes()
        )
        for path in recipes.files(recipe.name)
    }
    inputs["recipe"] = recipe_digest(recipe)
    if server.begun and server.begun.weights_digest:
        inputs["weights"] = server.begun.weights_digest
    machine = {"engine": server.engine.kind, "processor": platform.machine()}
    facts = HERE.look(recipe, recipe.port).facts
    if not isinstance(facts, Unknown) and not isinstance(facts.gpus, Unknown):
        counted = Counter(gpu.name for gpu in facts.gpus)
        machine["cards"] = ", ".join(f"{count}x {name}" for name, count in sorted(counted.items()))
    run = make(recipe=recipe.name, inputs=inputs, machine=machine)
    with store.in_use():
        state_runs(checkout, store, built, [run], signing)


def serve_longest(
    workspace: Workspace, request: ServeRequest, contexts: Sequence[int] = ()
) -> tuple[int, str]:
    """Serve a recipe with ever longer contexts while it passes; keep the last good one.

    Returns its tokens, and why the next one failed; empty if all passed.
    """
    options = request.options()
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    with machine_on(workspace, request.on, request.engine) as (site, engine):
        context = ServeContext(workspace.checkout(), workspace.store(), options, site)
        own = recipe.smoke.contexts if recipe.smoke.contexts[1:] else CONTEXT_STEPS
        good, why = 0, ""
        for tokens in sorted(contexts or own):
            try:
                if good:
                    stop_recipe(engine, context, recipe)
                start_recipe(engine, _with_tokens(context, tokens), recipe, None)
                server = find_server(engine, context, recipe)
                # the first answer, and needles in a text of the whole context
                changes = {"contexts": [tokens], "served_tokens": None}
                plan = plan_for(recipe).model_copy(update={**changes, "model": server.status.model})
                client = ChatClient(server.address(), plan.limits, api_headers())
                session = SmokeSession(client, plan, run_in_sandbox)
                with kept_attempt(attempts_of(context.store), server.attempt(), "passed"):
                    log.say(f"Testing {recipe.name} with {tokens} tokens at {server.url}")
                    result = asyncio.run(run_ladder(session, server.url, (FIRST, LENGTH)))
                    if failures := result.failures():
                        text = f"{failures[0].name}: {failures[0].message[:300]}"
                        raise errors.SmokeFailed(text)
                good = tokens
            except (errors.ServeFailed, errors.PreflightFailed, errors.SmokeFailed) as error:
                # a running server or an unfit machine says nothing about the context
                never_ran = isinstance(error, errors.PreflightFailed) and not good
                if isinstance(error, errors.AlreadyServed) or never_ran:
                    raise
                why = f"{tokens} tokens: {error}"
                stop_recipe(engine, context, recipe)
                if not good:
                    raise
                log.say(f"{why}\nServing {recipe.name} with {good} tokens again")
                start_recipe(engine, _with_tokens(context, good), recipe, None)
                break
    return good, why


def _with_tokens(context: ServeContext, tokens: int) -> ServeContext:
    overrides = context.options.overrides.model_copy(update={"max_model_len": tokens})
    return replace(context, options=context.options.model_copy(update={"overrides": overrides}))


@dataclass
class RecipeServer:
    """A running recipe, and what a test may do to it."""

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

    def _door(self) -> int | Path:
        return self.context.site.door(self.status.port or 0)

    def address(self) -> Address:
        """Where this machine reaches it."""
        door = self._door()
        near = Address.read(f"http://127.0.0.1:{self.status.port}")
        return replace(near, socket=door) if isinstance(door, Path) else near

    def connect(self, session: SmokeSession) -> None:
        """Let a test do what cannot be done to a server at an address."""
        engine, name, limit_s = self.engine, self.recipe.name, self.context.options.timeout_s
        # looks it up at each restart: its container and its port may have changed by then
        session.restart = lambda: _in_thread(
            partial(restart, engine, find_served(engine, name), self._door(), limit_s)
        )
        session.why_no_drafting = f"{self.recipe.name}: is served without a draft model"
        if self.drafts:
            session.start_drafting = lambda: _in_thread(partial(self.serve_again, drafting=True))

    def memory_bytes(self) -> int | None:
        """Memory of its processes without cached files; None if the kernel does not tell.

        https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
        """
        with suppress(OSError, ValueError, errors.NothingServed):
            pid = find_served(self.engine, self.recipe.name).pid
            groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
            place = next(line[3:] for line in groups if line.startswith("0::"))
            stat = Path(f"/sys/fs/cgroup{place}/memory.stat").read_text(encoding="utf-8")
            return int(dict(line.split() for line in stat.splitlines())["anon"])
        return None

    def read_log(self) -> list[str]:
        """The engine's log so far."""
        facts = find_served(self.engine, self.recipe.name)
        data = b"".join(self.engine.output(facts.id, follow=False))
        return data.decode(errors="replace").splitlines()

    def serve_again(self, *, drafting: bool, after: str | None = None) -> None:
        """Restart the server with or without the draft model."""
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
    """Begin an attempt to test a recipe; an address has no known digests."""
    body = {
        "id": new_id(),
        "kind": "smoke",
        "recipe": recipe.name,
        "recipe_digest": recipe_digest(recipe),
        "at": stamp(),
    }
    return Begun.model_validate({**body, **known})


def find_server(engine: ContainerEngine, context: ServeContext, recipe: Recipe) -> RecipeServer:
    """Find the server that `sm120 serve` started from a recipe."""
    status = _status(engine, context, recipe)
    attempts = attempts_of(context.store).read().attempts
    begun = next((a.begun for a in attempts if a.begun.id == status.attempt), None)
    if begun and begun.recipe_digest != recipe_digest(recipe):
        raise errors.RecipeInvalid(
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
    """Serve a recipe for one test, without its draft model, which is the last rung."""
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
        serve_launch(engine, context.store, job, begun)
    return begun


def stop_recipe(engine: ContainerEngine, context: ServeContext, recipe: Recipe) -> None:
    """Stop a recipe's server."""
    # a start that failed may have made no container
    with suppress(errors.NothingServed):
        stop_container(engine, context.store, find_served(engine, recipe.name), STOP_S)


def _status(engine: ContainerEngine, context: ServeContext, recipe: Recipe) -> ServedStatus:
    name = recipe.name
    found = status_of(engine, context.store, context.site)
    status = next((each for each in found if each.recipe == name), None)
    if status is None:
        raise errors.NothingServed(
            f"{name}: nothing of it is served here",
            f"`sm120 serve {name}` starts it; `sm120 smoke {name} --serve` does so for the test.",
        )
    if status.built == "other":
        raise errors.ImageDiffers(f"{status.container}: {status.why}")
    if status.is_forgotten:
        raise errors.ServerGone(
            f"{name}: answers, but Podman has forgotten that it runs",
            f"`sm120 recipe stop {name}` ends it; then serve it again.",
        )
    if status.port is None or not status.healthy:
        raise errors.ServerGone(
            f"{name}: its container is {status.status}, and does not answer",
            f"`sm120 recipe logs {name}` shows why.",
        )
    return status


async def _in_thread(act: Callable[[], None]) -> None:
    """Do something slow with a container; a server that does not start counts as gone."""
    try:
        await asyncio.to_thread(act)
    except (errors.ServeFailed, errors.PreflightFailed) as error:
        raise Gone(str(error)) from error

"""`sm120 smoke`: a running server proves itself, rung by rung."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json, store_of
from pipeline.cli.options import ANY_PATH, EXISTING_FILE, is_address, json_option
from pipeline.cli.recipe.recipes import recipes_of, recipes_option, say_contrary
from pipeline.cli.serve.job import Request
from pipeline.cli.serve.on_host import OnHost, folder_on, machine_on, on_options
from pipeline.cli.serve.options import engine_option
from pipeline.cli.signing import Signing
from pipeline.cli.smoke.dry_run import foresee, leave_running, show_ladder
from pipeline.cli.smoke.plan import PlanOptions, plan_options
from pipeline.cli.smoke.recipe_server import (
    RecipeServer,
    find_server,
    smoke_attempt,
    started_server,
)
from pipeline.cli.smoke.state import state_address, state_climb
from pipeline.errors import DiskFull, ServerGone, SmokeFailed, StoreUnwritable
from pipeline.host.rules.issues import findings, match_rungs
from pipeline.recipe.find import Recipes
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import ServeOptions, new_id
from pipeline.serve.facts import require_own
from pipeline.serve.find_engine import Wanted
from pipeline.serve.run import attempts_of, find_served, kept
from pipeline.smoke.baseline import baseline_questions, read_baseline, write_baseline
from pipeline.smoke.client import Client, Unsound
from pipeline.smoke.code import run_in_sandbox
from pipeline.smoke.ladder import LADDER, climb
from pipeline.smoke.model import RungResult, SmokePlan, SmokeResult
from pipeline.smoke.record import keep_climb
from pipeline.smoke.rungs.speculation import SPECULATION
from pipeline.smoke.session import Rung, Session, record_baseline
from pipeline.smoke.wire import Address

_NAMES = [rung.name for rung in LADDER]


@dataclass(frozen=True)
class Order:
    """How far to climb, and what to leave of it."""

    rungs: Sequence[Rung]
    keep: Path | None
    record: Path | None
    baseline: Path | None
    as_json: bool
    dry_run: bool = False

    def session(self, address: Address, plan: SmokePlan) -> Session:
        """A climb that has not begun."""
        key = os.environ.get("SM120_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        session = Session(Client(address, plan.limits, headers), plan, run_in_sandbox)
        session.baseline = read_baseline(self.baseline) if self.baseline else None
        return session

    def rehearse(self, target: str, session: Session, notes: Sequence[str] = ()) -> None:
        """What a climb would ask, and what it would leave."""
        if self.record:
            count = log.count(len(baseline_questions()), "greedy answer")
            notes = [*notes, f"Then {count} would be recorded in {self.record}"]
        elif self.keep:
            notes = [*notes, f"The result would be in {self.keep}"]
        # a baseline is recorded of a server that answers, and of no other rung
        rungs = LADDER[:1] if self.record else self.rungs
        show_ladder(target, session, rungs, notes, self.as_json)


@click.command("smoke")
@click.argument("target", metavar="RECIPE|URL")
@click.option("--recipe", "expected", metavar="NAME", help="Of a URL: expect what a recipe says.")
@recipes_option
@plan_options
@click.option("--serve", "is_started", is_flag=True, help="Start the recipe first, stop it last.")
@click.option("--weights", type=ANY_PATH, help="With --serve: folder of the weights.")
@click.option("--draft", type=ANY_PATH, help="With --serve: the draft model's weights.")
@click.option(
    "--restart",
    is_flag=True,
    help="Restart the recipe's running server for the tests that need it.",
)
@click.option("--no-restart", is_flag=True, hidden=True, help="Answers with the new name.")
@engine_option
@on_options
@click.option(
    "--up-to",
    type=click.Choice(_NAMES),
    default=_NAMES[-1],
    # all of them in one word would be wider than a terminal
    metavar="RUNG",
    help=f"Last rung: {', '.join(_NAMES)}.",
)
@click.option("--keep", type=ANY_PATH, help="Folder for the result and every request and answer.")
@click.option("--record", type=ANY_PATH, help="Record greedy answers as a baseline, and stop.")
@click.option("--baseline", type=EXISTING_FILE, help="Compare with a recorded baseline.")
@click.option("--dry-run", is_flag=True, help="Show what would be asked, and ask nothing.")
@json_option
@click.pass_context
def smoke(
    context: click.Context,
    target: str,
    expected: str | None,
    folders: tuple[Path, ...],
    plan_options: PlanOptions,
    is_started: bool,
    weights: Path | None,
    draft: Path | None,
    restart: bool,
    no_restart: bool,
    engine: Wanted,
    on: OnHost | None,
    up_to: str,
    keep: Path | None,
    record: Path | None,
    baseline: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Prove what a served model answers: from one answer to many streams and the whole context.

    Of a RECIPE, it tests the server that `sm120 serve` started, on another host with --on. It
    leaves that server running; with --restart it restarts it and turns its draft model on last:
    where that changes answers, the recipe is served without it again. A server of --serve is
    always restarted. The ladder stops at the first rung that fails. A key for the server is read
    from SM120_API_KEY. The result is stated and signed: of a recipe beside its image, of a URL
    beside smoke.json, in the folder of --keep or in the store.
    """
    if no_restart:
        raise click.UsageError(
            "--no-restart is what smoke does now: leave it out; --restart allows restarts"
        )
    order = Order(LADDER[: _NAMES.index(up_to) + 1], keep, record, baseline, as_json, dry_run)
    if is_address(target):
        if is_started or weights or draft or on or restart:
            raise click.UsageError(
                "--serve, --weights, --draft, --restart and --on are for a recipe"
            )
        recipe = recipes_of(context, folders).read(expected) if expected else None
        return _smoke_address(context, order, target, recipe, plan_options)
    if expected or ((weights or draft) and not is_started):
        raise click.UsageError("--recipe is for a URL; --weights and --draft are for --serve")
    options = ServeOptions(
        weights=folder_on(on, weights, "--weights"), draft=folder_on(on, draft, "--draft")
    )
    recipes, signing = recipes_of(context, folders), Signing()
    recipe = recipes.read(target)
    if dry_run:
        return _rehearse_recipe(
            order, recipe, plan_options, is_started, may_restart=restart or is_started
        )
    # what was started for the climb alone is used by nobody else
    climb_it = functools.partial(
        _smoke_recipe, order, recipes, plan_options, signing, may_restart=restart or is_started
    )
    holding = None if is_started else recipe.name
    with machine_on(context, on, engine, holding) as (site, containers):
        request = Request(checkout_of(context), store_of(context), options, site)
        if is_started:
            with started_server(containers, request, recipe) as server:
                climb_it(server, is_ours=True)
            return
        climb_it(find_server(containers, request, recipe))


def _smoke_address(
    context: click.Context, order: Order, url: str, recipe: Recipe | None, options: PlanOptions
) -> None:
    signing = Signing()
    session = order.session(Address.read(url), options.plan(recipe))
    if order.dry_run:
        return order.rehearse(url, session)
    begun = smoke_attempt(recipe) if recipe else None
    more = {"attempt": begun.id} if begun else {}
    with kept(attempts_of(store_of(context)), begun, "passed") if begun else nullcontext():
        result = _climbed(order, session, url, more)
        if result is not None:
            try:
                folder = order.keep or store_of(context).root / "smoke" / new_id()
                if not order.keep:
                    keep_climb(folder, result, session.client.exchanges)
            # a climb of hours is not thrown away because its result cannot be kept
            except (StoreUnwritable, DiskFull) as error:
                log.say(f"Nothing is stated: {error}")
            else:
                state_address(folder, session, result, recipe, signing)
        _require_passed(result, session)


def _rehearse_recipe(
    order: Order, recipe: Recipe, options: PlanOptions, is_started: bool, *, may_restart: bool
) -> None:
    """A climb of what is served, or of what would be, as far as the recipe alone says it."""
    near = Address.read(f"http://127.0.0.1:{recipe.port}")
    session = order.session(near, options.plan(recipe))
    foresee(session, recipe, may_restart=may_restart)
    name = recipe.name
    first = f"{name} would be started first and stopped last; `sm120 serve {name} --dry-run` checks"
    order.rehearse(name, session, [f"{first} the machine for it"] if is_started else [])


def _smoke_recipe(
    order: Order,
    recipes: Recipes,
    options: PlanOptions,
    signing: Signing,
    server: RecipeServer,
    *,
    may_restart: bool,
    is_ours: bool = False,
) -> None:
    """Climb, state the result, and take back a draft model that does not hold."""
    session = order.session(server.address(), _plan(server, options))
    if may_restart:
        require_own(find_served(server.engine, server.recipe.name))
        server.connect(session)
        if server.drafts and not is_ours and SPECULATION in order.rungs and not order.record:
            log.say("Its draft model is turned off until the last rung.")
            server.serve_again(drafting=False)
    else:
        leave_running(session)
    begun = server.attempt()
    try:
        with kept(attempts_of(server.request.store), begun, "passed"):
            result = _climbed(order, session, server.url, {"attempt": begun.id})
            if result is not None:
                state_climb(server, recipes, session, result, signing)
            _require_passed(result, session)
    except SmokeFailed as error:
        say_contrary(server.recipe)
        if _failed_by_drafts(session) and not is_ours:
            log.say("Serving it again without its draft model, as the rungs before proved it.")
            server.serve_again(drafting=False, after=begun.id)
            error.hint = "It is served without its draft model now. " + error.hint
        elif server.recipe.fallback:
            error.hint += f" The recipe's fallback: `sm120 smoke {server.recipe.fallback} --serve`."
        raise


def _plan(server: RecipeServer, options: PlanOptions) -> SmokePlan:
    plan = options.plan(server.recipe)
    named = options.given["model"] or server.status.model or plan.model
    return plan.model_copy(update={"model": named})


def _failed_by_drafts(session: Session) -> bool:
    """Whether the last rung failed after, or while, its draft model was turned on."""
    last = session.client.check.partition(":")[0]
    return session.start_drafting is not None and last == SPECULATION.name


def _climbed(
    order: Order, session: Session, url: str, more: Mapping[str, str] | None = None
) -> SmokeResult | None:
    """The ladder, kept and shown; none where a baseline was recorded instead."""
    log.say(f"Climbing at {url}")
    if order.record:
        asyncio.run(_record(session, url, order.record))
        return None
    result = asyncio.run(climb(session, url, order.rungs))
    if order.keep:
        keep_climb(order.keep, result, session.client.exchanges)
    if order.as_json:
        say_json({**result.model_dump(mode="json"), **(more or {})})
    else:
        _show(result)
    return result


async def _record(session: Session, url: str, path: Path) -> None:
    first: tuple[Rung, ...] = LADDER[:1]
    result = await climb(session, url, first)
    _require_passed(result, session)
    with log.step("Recording greedy answers, one at a time"):
        try:
            recorded = await record_baseline(session, url)
        except Unsound as error:
            raise SmokeFailed(f"{url}: {error}") from error
    write_baseline(path, recorded)
    click.echo(f"{path}: {log.count(len(recorded.answers), 'answer')} of {recorded.model}")


def _show(result: SmokeResult) -> None:
    rows = [
        [check.verdict, rung.name, check.name, check.message[:100]]
        for rung in result.rungs
        for check in rung.checks
    ]
    click.echo(log.table(["verdict", "rung", "check", "message"], rows))
    click.echo(
        f"{result.model or result.url}: {result.verdict}, last good rung:"
        f" {result.last_good or 'none'}; {log.count(result.exchanges, 'request')} in"
        f" {log.seconds(result.seconds)}. Tolerance: {result.plan.tolerance.sentence()}."
    )


def _require_passed(result: SmokeResult | None, session: Session) -> None:
    if result is None or result.verdict == "passed":
        return
    if not any(e.status for e in session.client.exchanges):
        raise ServerGone(f"{result.url}: {result.failures()[0].message}")
    rung = result.rungs[-1]
    first = next(c for c in rung.checks if c.verdict == "failed")
    error = SmokeFailed(f"{result.url}: {rung.name}: {first.name}: {first.message[:300]}")
    error.hint = f"{_known(rung)} {error.hint}".strip()
    raise error


def _known(rung: RungResult) -> str:
    """Known issues that fail in this way, each with its fix."""
    failed = [(rung.name, f"{c.name}: {c.message}") for c in rung.checks if c.verdict == "failed"]
    issues = [finding.issue for finding in findings([match_rungs(failed)])]
    for issue in issues:
        log.say(
            f"  {issue.id}: {issue.title}\n    {issue.cause}\n    see {', '.join(issue.sources)}"
        )
    return " ".join(f"Perhaps {issue.id}: {issue.fix}" for issue in issues)

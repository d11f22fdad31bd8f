"""`sm120 smoke`: a running server proves itself, rung by rung."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.cli.context import checkout_or_none, say_json
from pipeline.cli.options import ANY_PATH, EXISTING_FILE, EXISTING_FOLDER, json_option
from pipeline.errors import ServerGone, SmokeFailed
from pipeline.recipe.find import Recipes
from pipeline.smoke.baseline import read_baseline, write_baseline
from pipeline.smoke.client import Client, Unsound
from pipeline.smoke.code import run_in_sandbox
from pipeline.smoke.ladder import LADDER, climb
from pipeline.smoke.model import THINKING_TOKENS, SmokePlan, SmokeResult, plan_for, quick
from pipeline.smoke.record import keep_climb
from pipeline.smoke.session import Rung, Session
from pipeline.smoke.trusted import record_baseline
from pipeline.smoke.wire import Address

_NAMES = [rung.name for rung in LADDER]
# Options that set one field of the plan.
_FIELDS = {
    "model": "model",
    "streams": "streams",
    "contexts": "contexts",
    "context_tokens": "context_tokens",
    "lengths": "lengths",
    "pressure": "pressure_prompts",
}


class _Numbers(click.ParamType[list[int]]):
    """Numbers such as 1,2,8."""

    name = "numbers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """In the order that was typed."""
        if isinstance(value, list):
            return value
        try:
            numbers = [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,8", param, ctx)
        if min(numbers) < 1:
            self.fail("must be 1 or more", param, ctx)
        return numbers


def _plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What the server is expected to do; the command gets it as `plan`."""

    @click.option("--recipe", metavar="NAME", help="Expect what this recipe says.")
    @click.option(
        "--recipes",
        "folders",
        multiple=True,
        type=EXISTING_FOLDER,
        envvar="SM120_RECIPES",
        help="Folder with recipes of your own. Repeatable [SM120_RECIPES].",
    )
    @click.option("--model", help="Name of the model [default: the first that the server has].")
    @click.option(
        "--no-quality",
        is_flag=True,
        help="Judge only what any sound server guarantees, for a model that cannot think.",
    )
    @click.option("--no-tools", is_flag=True, help="Expect no tool calls.")
    @click.option("--reasoning", is_flag=True, help="Expect a model that thinks before it answers.")
    @click.option("--quick", is_flag=True, help="Climb in small steps, for a slow machine.")
    @click.option("--streams", type=_Numbers(), help="Concurrent requests, such as 1,2,8,64.")
    @click.option("--contexts", type=_Numbers(), help="Prompt lengths to walk, in tokens.")
    @click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(256, 1 << 24),
        help="Context of the server [default: what it says].",
    )
    @click.option("--lengths", type=click.IntRange(1, 4096), help="Consecutive prompt lengths.")
    @click.option(
        "--pressure",
        type=click.IntRange(1, 100_000),
        help="Texts that push others out of the KV cache.",
    )
    @click.option(
        "--request-limit-s",
        type=click.FloatRange(1),
        help="Seconds for one request; long prompts need more [default: 600].",
    )
    @click.pass_context
    @functools.wraps(command)
    def packed(context: click.Context, *args: Any, **options: Any) -> Any:
        names = ("no_quality", "no_tools", "reasoning")
        given = {name: options.pop(name) for name in (*names, *_FIELDS, "request_limit_s")}
        recipe, folders = options.pop("recipe"), options.pop("folders")
        base = _recipe_plan(context, recipe, folders) if recipe else SmokePlan()
        plan = _planned(base, given)
        plan = quick(plan) if options.pop("quick") else plan
        return command(*args, plan=plan, **options)

    return packed


def _recipe_plan(context: click.Context, name: str, folders: Sequence[Path]) -> SmokePlan:
    checkout = checkout_or_none(context)
    own = [checkout.root / "recipes"] if checkout else []
    return plan_for(Recipes([*folders, *own]).read(name))


def _planned(base: SmokePlan, given: dict[str, Any]) -> SmokePlan:
    values: dict[str, Any] = {}
    if given["no_quality"]:
        values |= {"quality": False, "why_no_quality": "--no-quality"}
    if given["no_tools"]:
        values["tools"] = False
    if given["reasoning"]:
        values |= {"reasoning": True, "answer_tokens": THINKING_TOKENS}
    values |= {field: given[name] for name, field in _FIELDS.items() if given[name]}
    if given["request_limit_s"]:
        values["limits"] = {**base.limits.model_dump(), "request_s": given["request_limit_s"]}
    return SmokePlan.model_validate({**base.model_dump(), **values})


@click.command("smoke")
@click.argument("url", metavar="URL")
@_plan_options
@click.option("--up-to", type=click.Choice(_NAMES), default=_NAMES[-1], help="Last rung to climb.")
@click.option("--keep", type=ANY_PATH, help="Folder for the result and every request and answer.")
@click.option("--record", type=ANY_PATH, help="Record greedy answers as a baseline, and stop.")
@click.option("--baseline", type=EXISTING_FILE, help="Compare with a recorded baseline.")
@json_option
def smoke(
    url: str,
    plan: SmokePlan,
    up_to: str,
    keep: Path | None,
    record: Path | None,
    baseline: Path | None,
    as_json: bool,
) -> None:
    """Prove what a served model answers: from one answer to many streams and the whole context.

    The ladder stops at the first rung that fails. A key for the server is read from SM120_API_KEY.
    """
    key = os.environ.get("SM120_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = Client(Address.read(url), plan.limits, headers)
    session = Session(client, plan, run_in_sandbox)
    session.baseline = read_baseline(baseline) if baseline else None
    if record:
        asyncio.run(_record(session, url, record))
        return
    rungs = LADDER[: _NAMES.index(up_to) + 1]
    log.say(f"Climbing at {url}")
    result = asyncio.run(climb(session, url, rungs))
    if keep:
        keep_climb(keep, result, client.exchanges)
    if as_json:
        say_json(result.model_dump(mode="json"))
    else:
        _show(result)
    _require_passed(result, session)


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
        f" {result.last_good or 'none'}; {result.exchanges} requests in"
        f" {log.seconds(result.seconds)}. Tolerance: {result.plan.tolerance.sentence()}."
    )


def _require_passed(result: SmokeResult, session: Session) -> None:
    if result.verdict == "passed":
        return
    if not any(e.status for e in session.client.exchanges):
        raise ServerGone(f"{result.url}: {result.failures()[0].message}")
    rung = result.rungs[-1]
    first = next(c for c in rung.checks if c.verdict == "failed")
    raise SmokeFailed(f"{result.url}: {rung.name}: {first.name}: {first.message[:300]}")

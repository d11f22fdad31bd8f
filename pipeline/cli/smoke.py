"""`sm120 smoke`: a running server proves itself, rung by rung."""

from __future__ import annotations

from typing import Any

import click

from pipeline import app
from pipeline.app.recipes import is_address
from pipeline.app.smoke import RUNGS, SmokeExpectations, SmokeRequest
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    COUNTS,
    DURATION,
    file_option,
    flag_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.serving.smoke.model import SmokeResult

_OPTIONS = (
    click.option("--model", help="Name of the model [default: the first that the server has]."),
    flag_option(
        "--no-quality",
        help="Judge only what any sound server guarantees, for a model that cannot think.",
    ),
    flag_option("--no-tools", help="Expect no tool calls."),
    flag_option("--no-cache", help="Expect a server that keeps nothing of earlier prompts."),
    flag_option("--reasoning", help="Expect a model that thinks before it answers."),
    flag_option("--vision", help="Expect a model that sees pictures."),
    flag_option("--text-only", help="Leave pictures out, also if the model sees."),
    flag_option("--quick", help="Test in small steps, for a slow machine."),
    click.option("--streams", type=COUNTS, help="Concurrent requests, such as 1,2,8,64."),
    click.option("--contexts", type=COUNTS, help="Prompt lengths to walk, in tokens."),
    click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(256, 1 << 24),
        help="Context of the server [default: what it says].",
    ),
    click.option("--lengths", type=click.IntRange(1, 4096), help="Consecutive prompt lengths."),
    click.option(
        "--pressure",
        type=click.IntRange(1, 100_000),
        help="Texts that push others out of the KV cache.",
    ),
    click.option(
        "--request-limit-s",
        type=click.FloatRange(1),
        help="Seconds for one request; long prompts need more [default: 600].",
    ),
)


@query
@click.argument("target", metavar="RECIPE|URL")
@click.option("--recipe", "expected", metavar="NAME", help="Of a URL: expect what a recipe says.")
@options.recipes_option
@options.packed("expectations", SmokeExpectations, *_OPTIONS)
@flag_option("--serve", "is_started", help="Start the recipe first, stop it last.")
@path_option("--weights", help="With --serve: folder of the weights.")
@path_option("--draft", help="With --serve: the draft model's weights.")
@flag_option("--restart", help="Restart the recipe's running server for the tests that need it.")
@options.engine_option
@options.on_options
@click.option(
    "--up-to",
    type=click.Choice(RUNGS),
    default=RUNGS[-1],
    # all of them in one word would be wider than a terminal
    metavar="RUNG",
    help=f"Last rung: {', '.join(RUNGS)}.",
)
@path_option("--output", "keep", help="Folder for the result and every request and answer.")
@path_option("--record", help="Record greedy answers as a baseline, and stop.")
@click.option(
    "--soak",
    "soak_s",
    type=DURATION,
    help="In place of the ladder: mixed work for so long, such as 30m or 8h.",
)
@file_option("--baseline", help="Compare with a recorded baseline.")
def smoke_command(
    workspace: Workspace, /, target: str, is_started: bool, as_json: bool, **options: Any
) -> None:
    """Prove what a served model answers: from one answer to many streams and the whole context.

    Of a RECIPE, it tests the server that `sm120 serve` started, on another host with --on; a URL
    with --on is one that HOST itself reaches, such as http://127.0.0.1:8000. It
    leaves that server running; with --restart it restarts it and turns its draft model on last:
    where that changes answers, the recipe is served without it again. A server of --serve is
    always restarted. The ladder stops at the first rung that fails. A key for the server is read
    from SM120_API_KEY. --soak works for hours in place of the ladder, and Ctrl-C ends it with what
    was found. The result is stated and signed: of a recipe beside its image, of a URL
    beside smoke.json, in the folder of --output or in the store.
    """
    request = SmokeRequest(target, start=is_started, **options)
    loads = request.weights or request.draft
    if is_address(target) and (is_started or loads or request.restart):
        raise click.UsageError("--serve, --weights, --draft and --restart are for a recipe")
    if not is_address(target) and (request.expected or (loads and not is_started)):
        raise click.UsageError("--recipe is for a URL; --weights and --draft are for --serve")
    if request.soak_s and (request.record or request.baseline):
        raise click.UsageError("--soak is in place of the ladder: without --record and --baseline")

    def show(result: SmokeResult, attempt: str | None) -> None:
        if as_json:
            more = {"attempt": attempt} if attempt else {}
            return say_json({**result.model_dump(mode="json"), **more})
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

    done = app.smoke.smoke(workspace, request, show)
    if not isinstance(done, SmokeResult):
        click.echo(f"{request.record}: {log.count(len(done.answers), 'answer')} of {done.model}")

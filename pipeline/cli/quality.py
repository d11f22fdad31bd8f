"""`sm120 quality`: what a server answers, beside what its model should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from pipeline import app
from pipeline.app.quality import QualityChoices, QualityRequest
from pipeline.app.recipes import is_address
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    EXISTING_FILE,
    EXISTING_FOLDER,
    file_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import QualityFailed, QualityUnknown
from pipeline.serving.quality.model import PARTS, QualityPlan, QualityResult
from pipeline.serving.quality.run import plan_sentence
from pipeline.serving.quality.scores import PublishedScore

_PLAN = QualityPlan()


_OPTIONS = (
    many_option("--only", "parts", type=click.Choice(PARTS), help="Only this part. Repeatable."),
    click.option("--model", help="Name of the model [default: the first that the server has]."),
    click.option(
        "--tool-cases",
        "cases",
        type=click.IntRange(1, 10_000),
        help=f"Tool cases, each asked whole and streamed [default: {_PLAN.cases}].",
    ),
    click.option(
        "--tool-choice",
        type=click.Choice(["auto", "required"]),
        help="Let the engine force a call with `required` [default: auto].",
    ),
    click.option("--seed", type=click.IntRange(0), help="Seed of cases and texts [default: 26]."),
    click.option(
        "--texts",
        type=click.IntRange(2, 10_000),
        help=f"Texts of a recorded reference [default: {_PLAN.texts}].",
    ),
    click.option(
        "--places",
        type=click.IntRange(1, 1000),
        help=f"Places in each text of it [default: {_PLAN.places}].",
    ),
    click.option(
        "--at-once", type=click.IntRange(1, 256), help="Concurrent requests [default: 4]."
    ),
    click.option(
        "--least-valid",
        type=click.FloatRange(0, 1),
        help=f"Share of calls that must fit [default: {_PLAN.least_valid}].",
    ),
    click.option(
        "--least-agreement",
        type=click.FloatRange(0, 1),
        help=f"Share of places that must agree [default: {_PLAN.least_agreement}].",
    ),
    click.option(
        "--most-nats",
        type=click.FloatRange(0),
        help=f"Mean difference of log probabilities [default: {_PLAN.most_nats}].",
    ),
)


@query
@click.argument("target", metavar="RECIPE|URL")
@options.recipes_option
@options.packed("choices", QualityChoices, *_OPTIONS)
@click.option(
    "--weights",
    type=click.Path(exists=True, path_type=Path),
    help="Folder or GGUF file of the served weights [default: those of the recipe].",
)
@click.option("--cases", "case_folder", type=EXISTING_FOLDER, help="Tool cases of a folder.")
@path_option("--record", help="Record a reference in a file, and stop.")
@file_option("--reference", help="Compare with a recorded reference.")
@options.engine_option
@options.on_options
@path_option(
    "--output",
    "keep",
    help="Folder for the result and every request and answer; a stopped run there goes on.",
)
def quality_run_command(
    workspace: Workspace,
    /,
    target: str,
    choices: QualityChoices,
    case_folder: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare a server's token counts, tool calls and probabilities with what they should be.

    Token counts must be those of the model's own chat template and tokenizer, which lie with the
    weights. Tool calls must fit their schemas, whole and streamed. At fixed places of fixed texts,
    the server must expect what a reference expected. The result is stated and signed: of a recipe
    beside its image, of a URL beside quality.json, in the folder of --output or in the store.
    """
    request = QualityRequest(target, choices.plan(), cases=case_folder, **options)
    if is_address(target) and request.on:
        raise click.UsageError("--on is for a recipe: an address names its host itself")
    if request.record and request.reference:
        raise click.UsageError("--record and --reference exclude each other")

    def show(result: QualityResult) -> None:
        if as_json:
            return say_json(result.model_dump(mode="json"))
        rows = [[part.verdict, part.name, part.message[:100]] for part in result.parts]
        click.echo(log.table(["verdict", "part", "message"], rows))
        numbers = [
            [part.name, number.name, number.text(), number.bar_text(), number.vendor or None]
            for part in result.parts
            for number in part.numbers
        ]
        if numbers:
            head = ["part", "number", "value [95 %]", "bar", "vendor"]
            click.echo("\n" + log.table(head, numbers))
        click.echo(
            f"\n{result.model}: {result.verdict}; {log.count(result.exchanges, 'request')} in"
            f" {log.seconds(result.seconds)}; {plan_sentence(result.plan)}."
        )

    done = app.quality.judge_quality(workspace, request, show)
    if not isinstance(done, QualityResult):
        places = sum(len(text.places) for text in done.texts)
        click.echo(f"{request.record}: {log.count(places, 'place')} of {done.model}")


@query
@click.argument("file", type=EXISTING_FILE)
@click.option("--published", type=click.FloatRange(0, 1), help="The vendor's score for the task.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="How far below it a sound server may be.",
)
@click.option("--source", metavar="URL", help="Where the vendor publishes it.")
@click.option("--metric", help="One metric of the file, by the name that the table shows.")
def quality_import_command(
    workspace: Workspace,
    /,
    file: Path,
    published: float | None,
    tolerance: float,
    source: str | None,
    metric: str | None,
    as_json: bool,
) -> None:
    """Hold a score of lm-eval, evalscope or inspect-ai against a published one.

    FILE is the result as the program wrote it. The score passes where its whole 95 % interval is
    above the published number less the tolerance, and fails where all of it is below. The result is
    stated and signed beside the file.
    """
    if (published is None) != (source is None):
        raise click.UsageError("--published needs --source, the page that has the number")
    bar = None
    if published is not None and source is not None:
        try:
            bar = PublishedScore.model_validate(
                {"value": published, "tolerance": tolerance, "source": source}
            )
        except ValidationError as error:
            raise click.BadParameter("is no address", param_hint="'--source'") from error
    found, stated = app.quality.import_scores(file, bar, metric)
    if as_json:
        say_json({**found.model_dump(mode="json"), "verdict": found.verdict})
    else:
        rows = []
        for score in found.scores:
            value, low, high = score.estimate.value, score.estimate.low, score.estimate.high
            interval = f"[{low:.4f}, {high:.4f}]"
            about = (score.verdict, score.task, score.metric)
            rows.append([*about, f"{value:.4f}", interval, score.samples])
        head = ["verdict", "task", "metric", "value", "95 %", "samples"]
        click.echo(log.table(head, rows))
    log.say(f"statement: {stated.file}, {stated.state}")
    if bar and found.verdict != "passed":
        kind = QualityFailed if found.verdict == "failed" else QualityUnknown
        raise kind(f"{file}: {found.verdict} beside {bar.value} - {bar.tolerance} ({bar.source})")

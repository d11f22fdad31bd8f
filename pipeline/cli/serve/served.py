"""What is served: look at it, read its log, end it; and what was tried before."""

from __future__ import annotations

import click

from pipeline import log
from pipeline.cli.context import say_bytes, say_json, store_of, store_to_read
from pipeline.cli.options import json_option
from pipeline.cli.serve.on_host import OnHost, machine_of_all, on_options
from pipeline.cli.serve.options import engine_option
from pipeline.errors import ImageDiffers, NothingServed
from pipeline.serve.attempts import Attempt
from pipeline.serve.container_engine import titles
from pipeline.serve.facts import other_owner
from pipeline.serve.find_engine import Wanted
from pipeline.serve.run import ServedStatus, attempts_of, find_among, status_of
from pipeline.serve.run import stop as stop_container
from pipeline.serve.start import STOP_S

_SHORT_FAILURE = 60


@click.command()
@engine_option
@on_options
@json_option
@click.pass_context
def status(context: click.Context, engine: Wanted, on: OnHost | None, as_json: bool) -> None:
    """Show what is served here, and whether it is what was built.

    A container that is not of the image that its labels name is an error.
    """
    store = store_to_read(context)
    with machine_of_all(context, on, engine) as (site, engines):
        rows = [row for each in engines for row in status_of(each, store, site)]
    if as_json:
        say_json([row.model_dump() for row in rows])
    elif rows:
        head = ("recipe", "status", "answers", "port", "model", "image", "as built")
        click.echo(log.table(head, map(_row, rows)))
    else:
        click.echo(f"nothing is served in {titles(engines)}")
    for row in rows:
        if row.other_owner:
            log.say(f"{row.container}: another user serves it ({row.other_owner})")
        if row.is_forgotten:
            log.say(
                f"{row.container}: Podman has forgotten that it runs;"
                f" `sm120 recipe stop {row.recipe}` ends it."
            )
        if row.built == "other":
            raise ImageDiffers(f"{row.container}: {row.why}")


def _row(row: ServedStatus) -> tuple[object, ...]:
    answers = "yes" if row.healthy else "no"
    image = f"{row.image}@{row.digest[:19]}"
    return row.recipe, row.status, answers, row.port, row.model, image, row.built


@click.command()
@click.argument("recipe", metavar="RECIPE")
@click.option("--follow", "-f", is_flag=True, help="Go on until the engine ends.")
@click.option("--tail", type=click.IntRange(1), help="Only the last lines.")
@engine_option
@on_options
@click.pass_context
def logs(
    context: click.Context,
    recipe: str,
    follow: bool,
    tail: int | None,
    engine: Wanted,
    on: OnHost | None,
) -> None:
    """Print the log of a served recipe."""
    with machine_of_all(context, on, engine) as (_, engines):
        containers, facts = find_among(engines, recipe)
        for piece in containers.output(facts.id, follow=follow, tail=tail):
            say_bytes(piece)


@click.command()
@click.argument("recipes", metavar="RECIPE...", nargs=-1)
@click.option("--all", "stop_all", is_flag=True, help="Everything that is served here.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(0),
    default=STOP_S,
    show_default=True,
    help="Seconds until an engine that does not end is killed.",
)
@engine_option
@on_options
@json_option
@click.pass_context
def stop(
    context: click.Context,
    recipes: tuple[str, ...],
    stop_all: bool,
    timeout_s: int,
    engine: Wanted,
    on: OnHost | None,
    as_json: bool,
) -> None:
    """End served recipes, and remove their containers.

    What another user of the same Docker serves is named, and keeps running.
    """
    if bool(recipes) == stop_all:
        raise click.UsageError("name recipes, or --all")
    store = store_of(context)
    with machine_of_all(context, on, engine) as (_, engines):
        all_served = [(each, facts) for each in engines for facts in each.containers()]
        own = [(each, facts) for each, facts in all_served if not other_owner(facts)]
        found = own if stop_all else [find_among(engines, name) for name in recipes]
        for _, facts in all_served if stop_all else ():
            if owner := other_owner(facts):
                log.say(f"{facts.name}: another user serves it ({owner}), so it keeps running")
        if not found:
            raise NothingServed(f"nothing is served in {titles(engines)}")
        seconds = {
            facts.recipe or facts.name: stop_container(containers, store, facts, timeout_s)
            for containers, facts in found
        }
    if as_json:
        return say_json({name: round(value, 3) for name, value in seconds.items()})
    for name, value in seconds.items():
        click.echo(f"{name} stopped after {log.seconds(value)}")


@click.command()
@click.option("--on", "host", metavar="HOST", help="Only attempts on this host.")
@json_option
@click.pass_context
def attempts(context: click.Context, host: str | None, as_json: bool) -> None:
    """Show what was served and tried, oldest first, and how it went."""
    known = attempts_of(store_to_read(context))
    timeline = known.read()
    tried = [each for each in timeline.attempts if host in (None, each.begun.host)]
    if timeline.damaged:
        log.say(f"{known.path}: {log.count(timeline.damaged, 'line')} cannot be read")
    if as_json:
        return say_json([_attempt_json(each) for each in tried])
    if not tried:
        return click.echo("nothing was tried yet")
    head = ("attempt", "kind", "recipe", "host", "image", "outcome", "time", "failure")
    click.echo(log.table(head, map(_attempt_row, tried)))


def _attempt_row(attempt: Attempt) -> tuple[object, ...]:
    begun = attempt.begun
    image = f"{begun.image}@{begun.image_digest[:19]}" if begun.image_digest else begun.image
    time = None if attempt.seconds is None else log.seconds(attempt.seconds)
    failure = attempt.failure[:_SHORT_FAILURE] or None
    place = begun.host or "here"
    return begun.id, begun.kind, begun.recipe, place, image, attempt.outcome, time, failure


def _attempt_json(attempt: Attempt) -> dict[str, object]:
    return {
        **attempt.begun.model_dump(exclude={"event"}),
        "outcome": attempt.outcome,
        "failure": attempt.failure,
        "seconds": attempt.seconds,
        "ends": [end.model_dump(exclude={"event", "id"}) for end in attempt.ends],
    }

"""`sm120 serve`, and what is served: status, log, stop, and what was tried before."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    COUNTS,
    command,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_bytes, say_json
from pipeline.core import log
from pipeline.core.errors import ImageDiffers
from pipeline.serving.serve.attempts import START_S
from pipeline.serving.serve.preflight import CHECKS, require_ready
from pipeline.serving.serve.start import STOP_S

if TYPE_CHECKING:
    from pipeline.app.serve import RemoteHost
    from pipeline.artifacts.containers.container_engine import Wanted

_SHORT_FAILURE = 60
# of `host deploy`, too
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1),
    default=int(START_S),
    help="Seconds to wait for the first answer.",
)
skip_preflight_option = many_option(
    "--skip-preflight",
    "skipped",
    type=click.Choice([*CHECKS]),
    # all of them in one word would be wider than a terminal
    metavar="CHECK",
    help=f"Leave a check of the machine out: {', '.join(CHECKS)}. Repeatable.",
)


@query
@click.argument("name", metavar="RECIPE")
@options.recipes_option
@path_option("--weights", help="Folder of the weights [MODEL_PATH].")
@path_option("--draft", help="Folder of the draft model's weights.")
@options.override_options
@options.gpus_option
@flag_option("--lan", help="Let other machines connect, too.")
@click.option(
    "--host-nccl",
    type=click.Choice(["settings", "patched"]),
    help="Use this host's NCCL settings, and with `patched` also its NCCL.",
)
@options.engine_option
@options.on_options
@options.hosts_option
@timeout_option
@skip_preflight_option
@flag_option(
    "--context-ladder",
    help="Start with one context after the other, test each, and keep the last good one.",
)
@click.option(
    "--contexts",
    type=COUNTS,
    help="Contexts of --context-ladder [default: the recipe's, else 65536,98304,131072,262144].",
)
@flag_option("--with-fallback", help="Where it fails, try the recipe's fallback.")
@flag_option("--dry-run", help="Check the machine and show the container; start nothing.")
def serve_command(
    workspace: Workspace,
    /,
    name: str,
    gpus: tuple[int, ...] | None,
    on: RemoteHost | None,
    context_ladder: bool,
    contexts: list[int] | None,
    with_fallback: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Start a recipe's engine in a container, and wait until it answers.

    The container stays when this command ends: see `status`, `logs` and `stop` of `sm120 recipe`.

    A recipe over several nodes is started on as many hosts (--on A,B; the first answers clients),
    after what must be equal on all of them was compared; where one rank fails, none stays. They
    reach each other at the addresses of --hosts [default: where this machine reaches them].
    """
    several = on is not None and len(on.each()) > 1
    if several and (context_ladder or with_fallback):
        raise click.UsageError("--context-ladder and --with-fallback are for one host")
    if options["hosts"] and not several:
        raise click.UsageError("--hosts are the addresses of several hosts: --on A,B")
    if contexts and not context_ladder:
        raise click.UsageError("--contexts are those of --context-ladder")
    if context_ladder and (options["overrides"].max_model_len or with_fallback or dry_run):
        raise click.UsageError(
            "--context-ladder chooses the context itself: leave --max-model-len, --with-fallback"
            " and --dry-run out"
        )
    request = app.serve.ServeRequest(name, gpus=gpus or (), on=on, **options)
    if dry_run:
        plan = app.serve.plan_start(workspace, request)
        if as_json:
            checks = [row.model_dump(mode="json") for row in plan.checks]
            commands = {"commands": plan.commands} if several else {"command": plan.commands[0]}
            say_json({"recipe": plan.recipe, "checks": checks, **commands})
        else:
            rows = [(r.rule, r.subject, r.verdict, r.why) for r in plan.checks]
            click.echo(log.table(["check", "of", "verdict", "why"], rows))
            click.echo("".join(f"\n{shlex.join(command)}" for command in plan.commands))
        return require_ready(plan.checks)
    if context_ladder:
        good, why = app.smoke.serve_longest(workspace, request, contexts or ())
        if as_json:
            return say_json({"recipe": name, "context_tokens": good, "beyond": why})
        click.echo(f"{name} is served with {good} tokens of context")
        return click.echo(f"No more: {why}" if why else "That is the last step asked for.")
    done = app.serve.serve_recipe(workspace, request, with_fallback=with_fallback)
    recipe, served = done.recipe, done.served
    if as_json:
        return say_json(
            {
                "recipe": recipe.name,
                "host": on.host if on else None,
                "container": served.container,
                "url": served.url,
                "model": served.model,
                "attempt": done.attempt,
                "seconds": round(served.seconds, 3),
            }
        )
    where, time = f" on {on.host}" if on else "", log.seconds(served.seconds)
    click.echo(f"{served.model} is served{where} at {served.url} after {time}")
    if on:
        port = served.url.rpartition(":")[2].partition("/")[0]
        first = on.each()[0].host
        click.echo(f"`ssh -N -L {port}:127.0.0.1:{port} {first}` brings it to this machine.")
    again = " ".join(["sm120 recipe stop", recipe.name, *([on.words()] if on else [])])
    click.echo(f"`{again}` ends it.")


@query
@options.engine_option
@options.on_options
def recipe_status_command(
    workspace: Workspace, engine: Wanted, on: RemoteHost | None, as_json: bool
) -> None:
    """Show what is served here, and whether it is what was built.

    A container that is not of the image that its labels name is an error.
    """
    rows, engines = app.serve.served_now(workspace, engine, on)
    if as_json:
        say_json([row.model_dump() for row in rows])
    elif rows:
        head = ("recipe", "status", "answers", "port", "model", "image", "as built")
        table = []
        for r in rows:
            answers, image = "yes" if r.healthy else "no", f"{r.image}@{r.digest[:19]}"
            table.append([r.recipe, r.status, answers, r.port, r.model, image, r.built])
        click.echo(log.table(head, table))
    else:
        click.echo(f"nothing is served in {engines}")
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


@command
@click.argument("recipe", metavar="RECIPE")
@flag_option("--follow", "-f", help="Go on until the engine ends.")
@click.option("--tail", type=click.IntRange(1), help="Only the last lines.")
@options.engine_option
@options.on_options
def recipe_logs_command(workspace: Workspace, /, **options: Any) -> None:
    """Print the log of a served recipe."""
    for piece in app.serve.follow_log(workspace, **options):
        say_bytes(piece)


@query
@click.argument("recipes", metavar="RECIPE...", nargs=-1)
@flag_option("--all", "stop_all", help="Everything that is served here.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(0),
    default=STOP_S,
    help="Seconds until an engine that does not end is killed.",
)
@options.engine_option
@options.on_options
def recipe_stop_command(
    workspace: Workspace, /, recipes: tuple[str, ...], stop_all: bool, as_json: bool, **options: Any
) -> None:
    """End served recipes, and remove their containers.

    What another user of the same Docker serves is named, and keeps running.
    """
    if bool(recipes) == stop_all:
        raise click.UsageError("name recipes, or --all")
    # of an engine over several hosts rank 0 ends first, so that nobody waits for an answer
    on, seconds = options.pop("on"), dict[str, float]()
    for host in on.each() if on else [None]:
        ended = app.serve.stop_recipes(workspace, recipes, on=host, **options)
        for name, took in ended.items():
            seconds[name] = seconds.get(name, 0.0) + took
    if as_json:
        return say_json({name: round(value, 3) for name, value in seconds.items()})
    for name, value in seconds.items():
        click.echo(f"{name} stopped after {log.seconds(value)}")


@query
@click.option("--on", "host", metavar="HOST", help="Only attempts on this host.")
def recipe_attempts_command(workspace: Workspace, host: str | None, as_json: bool) -> None:
    """Show what was served and tried, oldest first, and how it went."""
    tried = app.serve.attempts(workspace, host)
    if as_json:
        return say_json(
            [
                {
                    **each.begun.model_dump(exclude={"event"}),
                    "outcome": each.outcome,
                    "failure": each.failure,
                    "seconds": each.seconds,
                    "ends": [end.model_dump(exclude={"event", "id"}) for end in each.ends],
                }
                for each in tried
            ]
        )
    if not tried:
        return click.echo("nothing was tried yet")
    head = ("attempt", "kind", "recipe", "host", "image", "outcome", "time", "failure")
    rows = []
    for each in tried:
        begun, digest = each.begun, each.begun.image_digest
        image = f"{begun.image}@{digest[:19]}" if digest else begun.image
        time = None if each.seconds is None else log.seconds(each.seconds)
        place, failure = begun.host or "here", each.failure[:_SHORT_FAILURE] or None
        row = (begun.id, begun.kind, begun.recipe, place, image, each.outcome, time, failure)
        rows.append(row)
    click.echo(log.table(head, rows))

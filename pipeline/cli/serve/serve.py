"""`sm120 serve`: a recipe becomes a server that answers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json, store_of, store_to_read
from pipeline.cli.options import ANY_PATH, Numbers, json_option
from pipeline.cli.recipe.recipes import (
    gpus_option,
    override_options,
    recipes_of,
    recipes_option,
    say_contrary,
)
from pipeline.cli.serve.job import Request, make_job
from pipeline.cli.serve.on_host import OnHost, folder_on, machine_on, on_options
from pipeline.cli.serve.options import engine_option
from pipeline.cli.smoke.context_ladder import STEPS, serve_longest
from pipeline.errors import BackendDiffers, RecipeInvalid, StartFailed
from pipeline.oci.docker import default_tag
from pipeline.recipe.container import container_arguments
from pipeline.recipe.find import Recipes
from pipeline.recipe.launch import Overrides
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import START_S, ServeOptions
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.find_engine import Wanted
from pipeline.serve.host_nccl import HostNccl
from pipeline.serve.preflight import CHECKS, require_ready
from pipeline.serve.run import Job, new_attempt, port_holder, preflight
from pipeline.serve.run import serve as serve_job
from pipeline.serve.start import Served

_LONGEST_CHAIN = 8


@click.command()
@click.argument("name", metavar="RECIPE")
@recipes_option
@click.option("--weights", type=ANY_PATH, help="Folder of the weights [MODEL_PATH].")
@click.option("--draft", type=ANY_PATH, help="Folder of the draft model's weights.")
@override_options
@gpus_option
@click.option("--lan", is_flag=True, help="Let other machines connect, too.")
@click.option(
    "--host-nccl",
    type=click.Choice(["settings", "patched"]),
    help="Use this host's NCCL settings, and with `patched` also its NCCL.",
)
@engine_option
@on_options
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1),
    default=int(START_S),
    show_default=True,
    help="Seconds to wait for the first answer.",
)
@click.option(
    "--skip-preflight",
    "skipped",
    type=click.Choice([*CHECKS]),
    multiple=True,
    # all of them in one word would be wider than a terminal
    metavar="CHECK",
    help=f"Leave a check of the machine out: {', '.join(CHECKS)}. Repeatable.",
)
@click.option(
    "--context-ladder",
    is_flag=True,
    help="Start with one context after the other, test each, and keep the last good one.",
)
@click.option(
    "--contexts",
    type=Numbers(),
    help="Contexts of --context-ladder [default: the recipe's, else 65536,98304,131072,262144].",
)
@click.option("--with-fallback", is_flag=True, help="Where it fails, try the recipe's fallback.")
@click.option(
    "--dry-run", is_flag=True, help="Check the machine and show the container; start nothing."
)
@json_option
@click.pass_context
def serve(
    context: click.Context,
    name: str,
    folders: tuple[Path, ...],
    weights: Path | None,
    draft: Path | None,
    overrides: Overrides,
    gpus: tuple[int, ...] | None,
    lan: bool,
    host_nccl: HostNccl | None,
    engine: Wanted,
    on: OnHost | None,
    timeout_s: int,
    skipped: tuple[str, ...],
    context_ladder: bool,
    contexts: list[int] | None,
    with_fallback: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Start a recipe's engine in a container, and wait until it answers.

    The container stays when this command ends: see `status`, `logs` and `stop` of `sm120 recipe`.
    """
    if contexts and not context_ladder:
        raise click.UsageError("--contexts are those of --context-ladder")
    if context_ladder and (overrides.max_model_len or with_fallback or dry_run):
        raise click.UsageError(
            "--context-ladder chooses the context itself: leave --max-model-len, --with-fallback"
            " and --dry-run out"
        )
    options = ServeOptions(
        overrides=overrides,
        weights=folder_on(on, weights, "--weights"),
        draft=folder_on(on, draft, "--draft"),
        cards=gpus or (),
        lan=lan,
        host_nccl=host_nccl,
        timeout_s=timeout_s,
        skipped=skipped,
    )
    recipes = recipes_of(context, folders)
    # a wrong name is the answer, also where no Docker runs
    first = recipes.read(name)
    with machine_on(context, on, engine) as (site, containers):
        store = store_to_read(context) if dry_run else store_of(context)
        request = Request(checkout_of(context), store, options, site, dry_run)
        if dry_run:
            return _rehearse(make_job(request, first), containers, as_json)
        if context_ladder:
            steps = contexts or (first.smoke.contexts if first.smoke.contexts[1:] else STEPS)
            key = os.environ.get("SM120_API_KEY")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            good, why = serve_longest(containers, request, first, steps, headers)
            if as_json:
                return say_json({"recipe": name, "context_tokens": good, "beyond": why})
            click.echo(f"{name} is served with {good} tokens of context")
            return click.echo(f"No more: {why}" if why else "That is the last step asked for.")
        recipe, served, attempt = _serve(containers, request, recipes, first, with_fallback)
    _show(recipe, served, attempt, on, as_json)


def _serve(
    containers: ContainerEngine,
    request: Request,
    recipes: Recipes,
    first: Recipe,
    with_fallback: bool,
) -> tuple[Recipe, Served, str]:
    """The first recipe of the chain that serves, and its attempt."""
    after: str | None = None
    for recipe in _chain(recipes, first):
        say_contrary(recipe)
        with request.store.in_use():
            job = make_job(request, recipe, after)
            begun = new_attempt(job)
            try:
                return recipe, serve_job(containers, request.store, job, begun), begun.id
            except (StartFailed, BackendDiffers) as error:
                if not recipe.fallback:
                    raise
                if not with_fallback:
                    error.hint += f" The recipe's fallback: `sm120 serve {recipe.fallback}`."
                    raise
                log.say(f"{error}\nTrying its fallback, {recipe.fallback}")
                after = begun.id
    raise AssertionError("the last recipe of a chain has no fallback")


def _rehearse(job: Job, containers: ContainerEngine, as_json: bool) -> None:
    """Every check of the machine, and the container that would be made."""
    rows = preflight(job, port_holder(containers, job.launch.port))
    name = job.recipe.image or ""
    # where it is not built, a check has failed and says so
    image = default_tag(name, job.record.digest) if job.record else name
    # where no folder is named, a check has failed and says so, with the same word in its fix
    mounts = [m if m.host else m.model_copy(update={"host": "DIR"}) for m in job.launch.mounts]
    launch = job.launch.model_copy(update={"mounts": mounts})
    arguments = container_arguments(launch, image=image, cards=job.cards, address=job.address)
    command = [containers.kind, "run", *arguments.run_flags(), image, *arguments.arguments]
    if as_json:
        checks = [row.model_dump(mode="json") for row in rows]
        say_json({"recipe": job.recipe.name, "checks": checks, "command": command})
    else:
        head = ["check", "of", "verdict", "why"]
        click.echo(log.table(head, [(r.rule, r.subject, r.verdict, r.why) for r in rows]))
        click.echo(f"\n{shlex.join(command)}")
    require_ready(rows)


def _chain(recipes: Recipes, first: Recipe) -> Iterator[Recipe]:
    """A recipe, then its fallbacks; read one by one, as most starts need none."""
    recipe, seen = first, [first.name]
    yield recipe
    while following := recipe.fallback:
        if following in seen or len(seen) > _LONGEST_CHAIN:
            chain = " → ".join([*seen, following])
            raise RecipeInvalid(f"{first.name}: fallback: {chain} has no end")
        seen.append(following)
        recipe = recipes.read(following)
        yield recipe


def _show(recipe: Recipe, served: Served, attempt: str, on: OnHost | None, as_json: bool) -> None:
    if as_json:
        return say_json(
            {
                "recipe": recipe.name,
                "host": on.host if on else None,
                "container": served.container,
                "url": served.url,
                "model": served.model,
                "attempt": attempt,
                "seconds": round(served.seconds, 3),
            }
        )
    where = f" on {on.host}" if on else ""
    time = log.seconds(served.seconds)
    click.echo(f"{served.model} is served{where} at {served.url} after {time}")
    if on:
        port = served.url.rpartition(":")[2].partition("/")[0]
        click.echo(f"`ssh -N -L {port}:127.0.0.1:{port} {on.host}` brings it to this machine.")
    again = " ".join(["sm120 recipe stop", recipe.name, *([on.words()] if on else [])])
    click.echo(f"`{again}` ends it.")

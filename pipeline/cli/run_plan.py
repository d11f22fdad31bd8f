"""`sm120 run`: a plan of commands, of which only what changed runs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import app
from pipeline.app.run_plan import RunRequest, Stage
from pipeline.app.workspace import Workspace
from pipeline.cli.options import flag_option, many_option, query
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import PlanFailed, PlanInvalid


@query
@click.argument("path", metavar="PLAN", type=click.Path(path_type=Path))
@flag_option(
    "--dry-run", help="Show what would run and why, with bytes, time and disk; run nothing."
)
@click.option("--from", "first", metavar="STAGE", help="Begin here; take all before as done.")
@click.option("--until", "last", metavar="STAGE", help="End after this one.")
@many_option("--again", metavar="STAGE", help="Run it, changed or not. Repeatable.")
@click.option(
    "--on",
    metavar="slurm[:PARTITION]",
    help="Submit a job for each stage; jobs wait for those they need.",
)
def run_command(
    workspace: Workspace,
    /,
    path: Path,
    dry_run: bool,
    on: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the stages of a plan: `sm120` commands, in an order in which each has what it needs.

    \b
    format: 1
    stages:
      image:   {run: build vllm --gate}
      weights: {run: weights fetch kimi-k2.6 --output /models/k2.6}
      bench:   {run: bench kimi-k26-vllm-8x --output night, needs: [image]}
      page:    {run: report night --output report.html}

    A stage runs when its command, a spec, lock, recipe or file that the command names, or a stage
    that it needs has changed, when it failed the last time, or when what it wrote is gone. A stage
    that names another's --output needs it. When one fails, those that do not need it go on.
    Commands run in the plan's folder.
    """
    place, _, partition = (on or "").partition(":")
    if place not in ("", "slurm"):
        raise click.UsageError("--on takes slurm or slurm:PARTITION")
    root = click.get_current_context().find_root()
    is_shown = not root.params["quiet"]
    request = RunRequest(path, slurm=partition or None, is_shown=is_shown, **options)
    stages = app.run_plan.read_stages(workspace, path)
    for stage in stages:
        context, words = root, list(stage.words)
        try:
            # as the command line finds it, so that a wrong word is refused before anything runs
            while isinstance(context.command, click.Group):
                name, found, words = context.command.resolve_command(context, [*words, "--help"])
                if found is None:
                    break
                context = click.Context(found, parent=context, info_name=name)
        except click.UsageError as error:
            raise PlanInvalid(f"{path.name}: {stage.name}: {error.message}") from error
    free: int | None = None
    if dry_run:
        results, free = app.run_plan.dry_run(workspace, request)
    elif on:
        results = app.run_plan.submit_stages(workspace, request)
    else:

        def show(number: int, total: int, stage: Stage) -> None:
            log.say(f"[{number}/{total}] {stage.name}: sm120 {' '.join(stage.words)}")

        results = app.run_plan.run_stages(workspace, request, show)
    is_real = not (dry_run or on)
    if as_json:
        rows = [
            {
                "stage": each.stage.name,
                "command": list(each.stage.words),
                "state": each.state,
                "why": each.why,
                "seconds": each.seconds,
                "fetch_bytes": each.fetch_bytes,
                "disk_bytes": each.disk_bytes,
                "job": each.job or None,
                "key": each.stage.key,
            }
            for each in results
        ]
        say_json({"stages": rows, "free_bytes": free})
    else:
        states = {"run": "ran" if is_real else "job {job}" if on else "would run"}
        table = []
        for each in results:
            state = states.get(each.state, each.state).format(job=each.job)
            seconds = "-" if each.seconds is None else log.seconds(each.seconds)
            sizes = [each.fetch_bytes, each.disk_bytes] if dry_run else []
            shown = ["-" if n is None else log.size(n) for n in sizes]
            table.append([each.stage.name, state, seconds, *shown, each.why])
        head = ["stage", "state", "took" if is_real else "took before"]
        click.echo(log.table([*head, *(["fetches", "disk"] if dry_run else []), "why"], table))
        if free is not None:
            disk = sum(each.disk_bytes or 0 for each in results)
            known = sum(each.seconds or 0 for each in results if each.state == "run")
            enough = "" if disk <= free else ": not enough"
            click.echo(
                f"\nat least {log.size(disk)} of disk, {log.size(free)} free{enough};"
                f" {log.seconds(known)} for those that ran before"
            )
    failed = [each.stage.name for each in results if each.state == "failed"]
    if failed:
        out = [each.stage.name for each in results if each.state == "left out"]
        more = f"; left out: {', '.join(out)}" if out else ""
        raise PlanFailed(f"{path.name}: {', '.join(failed)} failed{more}")

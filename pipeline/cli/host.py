"""`sm120 host` for this machine: facts, drift, checks of its GPUs, NCCL settings, known issues."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.hosts import show_fix, show_fixes
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    flag_option,
    json_option,
    many_option,
    query,
)
from pipeline.cli.output import own_command, say_json
from pipeline.core import log
from pipeline.core.errors import IssueFound
from pipeline.core.known import Unknown
from pipeline.hosts.fleet.verify import FleetResult

if TYPE_CHECKING:
    from pipeline.app.host import Diagnosis, Probes
    from pipeline.images.gate.tracebacks import KnownKernel, Overrun

_LOG = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
# The known issue that overruns are of; all else in its entry is text.
_OVERRUN_ISSUE = "shared-memory-101376"
_SEE_BELOW = "Take an image in which this kernel is patched; what is known about it stands below."
_MOST_KERNELS = 4
# so that a host can be judged on another machine, and rules tested without its hardware
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True),
    help="Read a copied file tree or a capture (host/facts/capture.py) instead of this machine.",
)
# for bug reports: serial numbers and UUIDs identify an owner
redact_option = flag_option("--redact", help="Leave out serial numbers, UUIDs and names.")


_DEVICE = click.Choice(["cuda", "cpu"])
_probe_options = options.packed(
    "probes",
    # late: most commands of this module test no GPU
    lambda python, image, device, step_limit_s: app.host.Probes(
        python, image, device, step_limit_s
    ),
    click.option(
        "--python",
        default=sys.executable,
        show_default=False,
        help="Python with torch that runs the tests.",
    ),
    click.option("--image", help="Run the tests in a container of this loaded image."),
    click.option(
        "--device", type=_DEVICE, default="cuda", help="Device to test; `cpu` tests only the tests."
    ),
    # a collective over all cards takes seconds; on a bus that hangs it never ends
    click.option(
        "--step-limit-s", default=60.0, help="Seconds after which a step counts as a hang."
    ),
)


@click.command("facts")
@click.option("--name", help="Name of this host [default: a digest of its machine id].")
@flag_option("--capture", "as_capture", help="Print what was read, as JSON, without judging it.")
@root_option
@redact_option
@json_option
def host_facts_command(
    name: str | None, as_capture: bool, root: Path | None, redact: bool, as_json: bool
) -> None:
    """Show what this host is: GPUs, driver, bus, kernel, processors, disks, software.

    A field that could not be read shows why. Nothing is changed, and no server is asked.
    """
    if as_capture:
        shown = app.host.capture_of(root, redacted=redact)
        return say_json(shown.model_dump(mode="json", exclude_none=True))
    host = app.host.read_host_facts(root, redacted=redact, name=name)
    if as_json:
        return say_json(host.model_dump(mode="json"))
    rows = [
        ["host", host.host],
        ["system", f"{_shown(host.software.os)}, Linux {_shown(host.kernel.release)}"],
        ["processor", f"{_shown(host.cpu.name)} ({_shown(host.cpu.threads)} threads)"],
        ["memory", _size(host.memory_bytes)],
        ["driver", f"{_shown(host.driver.version)}, open module: {_shown(host.driver.is_open)}"],
        [
            "CUDA",
            f"driver {_shown(host.driver.cuda)}, toolkit {_shown(host.software.cuda_toolkit)}",
        ],
        ["IOMMU, ASPM", f"{_shown(host.pci.iommu)}, {_shown(host.pci.aspm_policy)}"],
        [
            "containers",
            f"docker {_shown(host.software.docker)}, podman {_shown(host.software.podman)}",
        ],
    ]
    click.echo(f"{log.table(['fact', 'value'], rows)}\n")
    if isinstance(host.gpus, Unknown):
        return click.echo(f"no GPUs: {host.gpus.unknown}")
    head = ["GPU", "name", "memory", "BAR1", "link", "limit", "VBIOS"]
    cards = []
    for gpu in host.gpus:
        link = f"gen {_shown(gpu.link.generation_max)} x{_shown(gpu.link.width)}"
        sizes = [_size(gpu.memory_bytes), _size(gpu.bar1_bytes)]
        limit = f"{_shown(gpu.power.limit_w)} W"
        cards.append([gpu.index, _shown(gpu.name), *sizes, link, limit, _shown(gpu.vbios)])
    click.echo(log.table(head, cards))


def _shown(value: object) -> str:
    why = getattr(value, "unknown", None)
    return f"unknown ({why})" if why else str(value)


def _size(value: object) -> str:
    return log.size(value) if isinstance(value, int) else _shown(value)


@click.command("drift")
@click.argument("old", type=EXISTING_FILE)
@click.argument("new", metavar="[NEW|live]", default="live")
@root_option
@json_option
def host_drift_command(old: Path, new: str, root: Path | None, as_json: bool) -> None:
    """Compare recorded facts (OLD) with those of this machine, or with other recorded ones (NEW).

    Fields that change by themselves, such as current clocks, are left out.
    """
    differences, error = app.host.drift(old, None if new == "live" else Path(new), root)
    if as_json:
        say_json([d.model_dump() for d in differences])
    elif differences:
        rows = [[d.field, d.kind, d.before, d.after] for d in differences]
        click.echo(log.table(["field", "change", "before", "after"], rows))
    else:
        click.echo("nothing has changed")
    if error:
        raise error


@click.command("outliers")
@click.argument("files", nargs=-1, required=True, type=EXISTING_FILE)
@many_option(
    "--checks",
    type=EXISTING_FILE,
    help="Result of `host check --json` of each host, in the same order. Repeatable.",
)
@json_option
def host_outliers_command(files: tuple[Path, ...], checks: tuple[Path, ...], as_json: bool) -> None:
    """Find the host or GPU that differs from the rest, by recorded facts and measurements."""
    result, error = app.host.outliers(files, checks)
    if as_json:
        say_json(result.model_dump())
    else:
        rows = [[o.subject, o.field, o.value, o.others] for o in result.outliers]
        click.echo(
            log.table(["host or GPU", "field", "value", "the others"], rows) if rows else "none"
        )
        for reason in result.unjudged:
            click.echo(f"not judged: {reason}")
    if error:
        raise error


@click.command("check")
@flag_option("--facts", "only_facts", help="Judge the rules over facts only.")
@flag_option("--functions", "only_functions", help="Run the function tests only.")
@click.option("--cuda", metavar="13.x", help="CUDA branch of the images that this host will run.")
@click.option("--ranks", type=int, help="Number of GPUs that must be there and are tested.")
@many_option(
    "--only",
    type=click.Choice(["copy", "all_reduce", "writes"]),
    help="Run only this test. Repeatable.",
)
@click.option("--floors", metavar="JSON", help='Other lower limits, such as {"copy_gb_per_s": 20}.')
@click.option("--library", help="Path of the libnccl that must be in use.")
@_probe_options
@root_option
@json_option
def host_check_command(
    only_facts: bool,
    only_functions: bool,
    cuda: str | None,
    ranks: int | None,
    only: tuple[str, ...],
    floors: str | None,
    library: str | None,
    probes: Probes,
    root: Path | None,
    as_json: bool,
) -> None:
    """Judge this host by rules over its facts, then test what its GPUs really do.

    A test that hangs is stopped and named. Known failures come with their cause and fix. For the
    hosts of an inventory, use `sm120 host verify`.
    """
    # checked before anything starts: the tests would refuse it only in their container
    try:
        limits = json.loads(floors or "{}")
        good = isinstance(limits, dict) and all(isinstance(v, int | float) for v in limits.values())
    except ValueError:
        good = False
    if not good:
        raise click.BadParameter("must be a JSON object of numbers", param_hint="--floors")
    given = {"--ranks": ranks, "--floors": floors, "--library": library}
    arguments = [x for k, v in given.items() if v is not None for x in (k, str(v))]
    arguments += [x for name in only for x in ("--only", name)]
    result, answer = app.host.check_host(
        root,
        cuda=cuda,
        rules=not only_functions,
        functions=not only_facts,
        probes=probes,
        arguments=arguments,
    )
    if as_json:
        say_json(
            {
                "verdict": result.verdict,
                "rules": [r.model_dump() for r in result.rules],
                "functions": answer.model_dump(mode="json") if answer else None,
                "findings": [f.model_dump() for f in result.findings],
            }
        )
    else:
        rows = [[r.verdict, r.rule, r.subject, r.why] for r in result.rules]
        rows += [[r.verdict, r.check, r.subject, r.why] for r in result.functions]
        click.echo(log.table(["verdict", "check", "subject", "reason"], rows))
        show_fixes(result)
    app.hosts.require_verified(FleetResult(hosts=[result]))


@click.command("tune-nccl")
@click.argument("out", metavar="OUT", type=ANY_PATH)
@click.option("--ranks", type=int, required=True, help="Number of GPUs that work together.")
@click.option(
    # DeepSeek-V3 and Kimi K2 have this hidden size; it decides how large each all_reduce is
    "--hidden",
    type=int,
    default=7168,
    help="Hidden size of the model.",
)
@click.option(
    "--concurrency", nargs=2, type=int, default=(1, 32), help="Fewest and most concurrent requests."
)
@click.option("--graph-file", help="NCCL_GRAPH_FILE to try, too.")
@flag_option("--full", help="Try all combinations, not one setting at a time.")
@click.option("--rounds", type=int, default=50, help="Rounds of each size.")
@_probe_options
@json_option
def host_tune_nccl_command(
    out: Path, ranks: int, hidden: int, concurrency: tuple[int, int], as_json: bool, **options: Any
) -> None:
    """Measure NCCL settings at the sizes that engines use, and write the best to OUT.

    A setting that hangs, crashes or gives wrong sums is refused. Without a clear gain, NCCL's own
    choice stays.
    """
    # one rank sends nothing: there would be nothing to measure
    if ranks < 2 or min(concurrency) < 1 or hidden < 1:
        raise click.BadParameter("tuning needs two ranks or more, and positive numbers")
    tuning, error = app.host.tune_nccl(
        out, ranks, hidden=hidden, concurrency=concurrency, **options
    )
    if as_json:
        say_json(tuning.model_dump(mode="json"))
    else:
        sizes = sorted({size for each in tuning.tried for size in each.us_by_kib})
        rows = []
        for each in tuning.tried:
            times = [f"{each.us_by_kib[s]:.1f}" if s in each.us_by_kib else "" for s in sizes]
            rows.append([each.setting.label, each.refused or "", *times])
        click.echo(log.table(["setting", "refused", *(f"{s} KiB µs" for s in sizes)], rows))
        for winner in tuning.winners:
            gain = "" if winner.gain is None else f", {winner.gain:.1%} better than untuned"
            click.echo(f"\n{winner.workload.name}: {winner.setting.label}{gain}")
            click.echo(winner.conf, nl=False)
    if error:
        raise error


@query
@click.argument("logs", nargs=-1, type=_LOG)
@flag_option("--no-facts", help="Read the logs only, not this machine.")
@root_option
def doctor_command(
    workspace: Workspace, logs: tuple[Path, ...], no_facts: bool, root: Path | None, as_json: bool
) -> None:
    """Recognise known issues in logs and in the facts of this machine; name cause and fix.

    Logs may come from a pipe: `docker logs NAME 2>&1 | sm120 doctor -`. The `-` waits until the
    pipe ends; without it, a pipe in which nothing comes is left alone after ten seconds. In a
    checkout a kernel that needs too much shared memory is looked up in its gates, and the image
    and the patch with exactly these bytes are named.
    """
    paths = logs or app.host.piped_log()
    if no_facts and not paths:
        raise click.UsageError("name a log, or leave --no-facts out: there is nothing to read")
    done = app.host.diagnose(workspace, paths, machine=not no_facts, root=root)
    issues = done.issues
    if as_json:
        kernels = [
            {
                "required_bytes": overrun.required_bytes,
                "limit_bytes": overrun.limit_bytes,
                "known": [{**k.model_dump(), "commands": k.commands} for k in known or []],
            }
            for overrun, known in done.kernels
        ]
        say_json(
            [
                {**each.model_dump(), "kernels": kernels if each.issue.id == _OVERRUN_ISSUE else []}
                for each in issues
            ]
        )
    else:
        _show_findings(done)
    if issues:
        raise IssueFound(f"{log.count(len(issues), 'known issue')}, such as {issues[0].issue.id}")


def _show_findings(done: Diagnosis) -> None:
    issues, kernels = done
    for each in issues:
        click.echo(f"{each.issue.id}: {each.issue.title} (seen {each.times}x)\n  {each.seen[0]}")
        is_looked_up = each.issue.id == _OVERRUN_ISSUE and kernels
        show_fix(each, _SEE_BELOW if is_looked_up else "")
        click.echo(f"  see:   {', '.join(each.issue.sources)}\n")
        if each.issue.id == _OVERRUN_ISSUE:
            for overrun, known in kernels:
                _show_overrun(overrun, known)
    if not issues:
        # an empty result must not read as a clean bill of health
        click.echo("no known issue was recognised; that does not prove that there is none")


def _show_overrun(overrun: Overrun, known: list[KnownKernel] | None) -> None:
    over = overrun.required_bytes - overrun.limit_bytes
    click.echo(f"{overrun.required_bytes} bytes of shared memory, {over} too many:")
    if known is None:
        click.echo(
            "  No checkout is here: with --checkout DIR its gates name the image and the patch.\n"
        )
        return
    for kernel in known[:_MOST_KERNELS]:
        click.echo(
            f"  kernel: {', '.join(kernel.kernels)} of {kernel.engine}, gate {kernel.gate}"
            f" ({', '.join(kernel.stands_for[:4])})"
        )
        about = "its cases call this kernel, and no patch changes it"
        if kernel.patch:
            about = f"{kernel.patch} fixes this in {kernel.applies_to}"
        elif kernel.accepted:
            about = f"over the limit there, too, and accepted: {kernel.accepted}"
        match = "exactly these bytes; other kernels may need as many, and the log has no traceback"
        if kernel.in_traceback:
            named = "it" if kernel.same_path else "its function, in a file of this name elsewhere"
            bytes_too = ", with exactly these bytes" if kernel.same_bytes else ""
            match = f"the traceback names {named}{bytes_too}"
        click.echo(f"  image:  {kernel.image}: {about}\n  match:  {match}")
        for title, line in zip(("run:", ""), kernel.commands, strict=False):
            click.echo(f"  {title:7} {line}")
    if len(known) > _MOST_KERNELS:
        click.echo(f"  and {len(known) - _MOST_KERNELS} more, which --json lists")
    if not known:
        click.echo("  No patch, case or recorded result of this checkout has these bytes.")
        click.echo(f"  run:    {own_command()} gate run IMAGE --only smem --unpatched")
    click.echo("")

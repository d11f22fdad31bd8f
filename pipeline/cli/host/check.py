"""Whether this host works: rules over its facts, tests of its GPUs, NCCL by measurement."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.cli.context import say_json
from pipeline.cli.host.facts import facts_of, root_option, show_fix
from pipeline.cli.options import ANY_PATH, all_of, json_option
from pipeline.errors import HostUnfit, HostUnknown, NothingTuned, ProbeFailed
from pipeline.files import write_bytes
from pipeline.host.probes.runner import ProbeReport, run_in_image, run_probes
from pipeline.host.probes.tune import Setting, Tuning, plan, sweep, workloads
from pipeline.host.rules.issues import Finding, findings, match_lines, match_rules
from pipeline.host.rules.judge import judge
from pipeline.host.rules.verdict import RuleResult, overall

_probe_options = all_of(
    [
        click.option(
            "--python", default=sys.executable, help="Python with torch that runs the tests."
        ),
        click.option("--image", help="Run the tests in a container of this loaded image."),
        click.option(
            "--device",
            type=click.Choice(["cuda", "cpu"]),
            default="cuda",
            show_default=True,
            help="Device to test; `cpu` tests only the tests.",
        ),
        click.option(
            "--step-limit-s",
            type=float,
            default=60.0,
            show_default=True,
            help="Seconds after which a step counts as a hang.",
        ),
    ]
)


@click.command("check")
@click.option("--facts", "only_facts", is_flag=True, help="Judge the rules over facts only.")
@click.option("--functions", "only_functions", is_flag=True, help="Run the function tests only.")
@click.option("--cuda", metavar="13.x", help="CUDA branch of the images that this host will run.")
@click.option("--ranks", type=int, help="Number of GPUs that must be there and are tested.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["copy", "all_reduce", "writes"]),
    help="Run only this test. Repeatable.",
)
@click.option("--floors", metavar="JSON", help='Other lower limits, such as {"copy_gb_per_s": 20}.')
@click.option("--library", help="Path of the libnccl that must be in use.")
@_probe_options
@root_option
@json_option
def check(
    only_facts: bool,
    only_functions: bool,
    cuda: str | None,
    ranks: int | None,
    only: tuple[str, ...],
    floors: str | None,
    library: str | None,
    python: str,
    image: str | None,
    device: str,
    step_limit_s: float,
    root: Path | None,
    as_json: bool,
) -> None:
    """Judge this host by rules over its facts, then test what its GPUs really do.

    A test that hangs is stopped and named. Known failures come with their cause and fix. For the
    hosts of an inventory, use `sm120 host verify`.
    """
    rules = [] if only_functions else judge(facts_of(root), cuda)
    answer = None
    if not only_facts and root is None:
        specs = {"--ranks": ranks, "--floors": _checked(floors), "--library": library}
        arguments = ["--device", device, "--step-limit-s", str(step_limit_s)]
        arguments += [x for k, v in specs.items() if v is not None for x in (k, str(v))]
        arguments += [x for name in only for x in ("--only", name)]
        with log.step("Testing the GPUs"):
            answer = _runner(python, image)(arguments, {})
    lines = answer.lines() if answer else []
    issues = findings([match_rules(rules), match_lines("tests", lines)])
    if as_json:
        say_json(_as_json(rules, answer, issues))
    else:
        _show(rules, answer, issues)
    _require_passed(rules, answer)


def _checked(floors: str | None) -> str | None:
    if floors is None:
        return None
    try:
        value = json.loads(floors)
        good = isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values())
    except ValueError:
        good = False
    if not good:
        raise click.BadParameter("must be a JSON object of numbers", param_hint="--floors")
    return floors


def _runner(python: str, image: str | None) -> Callable[[list[str], dict[str, str]], ProbeReport]:
    if image:
        return lambda arguments, settings: run_in_image(image, arguments, settings)
    return lambda arguments, settings: run_probes(python, arguments, settings)


def _as_json(
    rules: list[RuleResult], answer: ProbeReport | None, issues: list[Finding]
) -> dict[str, Any]:
    return {
        "verdict": _verdict(rules, answer),
        "rules": [r.model_dump() for r in rules],
        "functions": answer.model_dump(mode="json") if answer else None,
        "findings": [f.model_dump() for f in issues],
    }


def _verdict(rules: list[RuleResult], answer: ProbeReport | None) -> str:
    seen = [r.verdict for r in rules] + [r.verdict for r in (answer.rows if answer else [])]
    return overall(seen)


def _show(rules: list[RuleResult], answer: ProbeReport | None, issues: list[Finding]) -> None:
    rows = [[r.verdict, r.rule, r.subject, r.why] for r in rules]
    rows += [[r.verdict, r.check, r.subject, r.why] for r in (answer.rows if answer else [])]
    click.echo(log.table(["verdict", "check", "subject", "reason"], rows))
    for rule in rules:
        if rule.fix:
            click.echo(f"\n{rule.rule}, {rule.subject}: {rule.fix}")
    for each in issues:
        click.echo(f"\n{each.issue.id}: {each.issue.title}")
        show_fix(each)


def _require_passed(rules: list[RuleResult], answer: ProbeReport | None) -> None:
    failed = [r for r in (answer.rows if answer else []) if r.verdict == "failed"]
    if failed:
        raise ProbeFailed(f"{failed[0].check}, {failed[0].subject}: {failed[0].why}")
    unfit = [r for r in rules if r.verdict == "failed"]
    if unfit:
        raise HostUnfit(
            f"{log.count(len(unfit), 'rule')} failed, such as {unfit[0].rule}, {unfit[0].subject}"
        )
    if _verdict(rules, answer) == "unknown":
        raise HostUnknown("not everything could be judged")


@click.command("tune-nccl")
@click.argument("out", metavar="OUT", type=ANY_PATH)
@click.option("--ranks", type=int, required=True, help="Number of GPUs that work together.")
@click.option(
    "--hidden", type=int, default=7168, show_default=True, help="Hidden size of the model."
)
@click.option(
    "--concurrency",
    nargs=2,
    type=int,
    default=(1, 32),
    show_default=True,
    help="Fewest and most concurrent requests.",
)
@click.option("--graph-file", help="NCCL_GRAPH_FILE to try, too.")
@click.option("--full", is_flag=True, help="Try all combinations, not one setting at a time.")
@click.option("--rounds", type=int, default=50, show_default=True, help="Rounds of each size.")
@_probe_options
@json_option
def tune_nccl(
    out: Path,
    ranks: int,
    hidden: int,
    concurrency: tuple[int, int],
    graph_file: str | None,
    full: bool,
    rounds: int,
    python: str,
    image: str | None,
    device: str,
    step_limit_s: float,
    as_json: bool,
) -> None:
    """Measure NCCL settings at the sizes that engines use, and write the best to OUT.

    A setting that hangs, crashes or gives wrong sums is refused. Without a clear gain, NCCL's own
    choice stays.
    """
    if ranks < 2 or min(concurrency) < 1 or hidden < 1:
        raise click.BadParameter("tuning needs two ranks or more, and positive numbers")
    settings = plan(full=full, graph_file=graph_file)
    common = ["--device", device, "--step-limit-s", str(step_limit_s), "--rounds", str(rounds)]
    common += ["--only", "all_reduce", "--ranks", str(ranks), "--from-ranks", str(ranks)]
    # settings are compared at the sizes of the workloads; large copies would only take time
    common += ["--bulk-bytes", "0"]

    def measure(setting: Setting, sizes: list[int]) -> ProbeReport:
        log.say(f"  trying {setting.label}")
        # the host's own nccl.conf would override the settings that are compared
        variables = {"NCCL_CONF_FILE": "/dev/null", **setting.variables}
        arguments = [*common, "--sizes-kib", ",".join(map(str, sizes))]
        return _runner(python, image)(arguments, variables)

    with log.step(f"Trying {len(settings)} settings on {ranks} ranks"):
        loads = workloads(hidden, *concurrency)
        tuning = sweep(settings, loads, measure, ranks=ranks, device=device)
    text = json.dumps(tuning.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    write_bytes(out, text.encode())
    if as_json:
        say_json(tuning.model_dump(mode="json"))
    else:
        _show_tuning(tuning)
    if not tuning.winners:
        raise NothingTuned(f"none of the {len(settings)} settings finished")


def _show_tuning(tuning: Tuning) -> None:
    rows = [
        [t.setting.label, t.refused or "", *(f"{v:.1f}" for _, v in sorted(t.us_by_kib.items()))]
        for t in tuning.tried
    ]
    sizes = sorted({s for t in tuning.tried for s in t.us_by_kib})
    width = 2 + len(sizes)
    padded = [[*r, *[""] * (width - len(r))] for r in rows]
    click.echo(log.table(["setting", "refused", *(f"{s} KiB µs" for s in sizes)], padded))
    for winner in tuning.winners:
        gain = "" if winner.gain is None else f", {winner.gain:.1%} better than untuned"
        click.echo(
            f"\n{winner.workload.name}: {winner.setting.label}{gain}\n{winner.conf}", nl=False
        )

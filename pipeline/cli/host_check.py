"""Whether a host works: rules over its facts, function tests of its cards, NCCL by measurement."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.common import json_option, say_json
from pipeline.cli.host_facts import doctor, drift, facts, facts_of, outliers, root_option
from pipeline.errors import HostUnfit, HostUnknown, NothingTuned, ProbeFailed
from pipeline.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.host.probes.runner import ProbeReport
    from pipeline.host.probes.tune import Setting, Tuning
    from pipeline.host.rules.issues import Finding
    from pipeline.host.rules.verdict import RuleResult

_python_option = click.option(
    "--python", default=sys.executable, help="A Python that has torch, to run the tests with."
)
_image_option = click.option("--image", help="Run the tests in a container of this loaded image.")
_device_option = click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
_limit_option = click.option("--step-limit-s", type=float, default=60.0, show_default=True)


@click.command("check")
@click.option("--facts", "only_facts", is_flag=True, help="Only the rules over facts.")
@click.option("--functions", "only_functions", is_flag=True, help="Only the function tests.")
@click.option("--cuda", metavar="13.x", help="The CUDA branch of the images this host shall run.")
@click.option("--ranks", type=int, help="How many cards there must be and are tested.")
@click.option(
    "--only", multiple=True, type=click.Choice(["copy", "all_reduce", "writes"]), help="Some tests."
)
@click.option("--floors", metavar="JSON", help='Other floors, such as {"copy_gb_per_s": 20}.')
@click.option("--library", help="The libnccl that must be the one in use.")
@_python_option
@_image_option
@_device_option
@_limit_option
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
    """Judge this host: rules over its facts, then tests of what its cards really do.

    A test that hangs is ended and named. Known failures come with their cause and fix. For the
    hosts of an inventory, and what their roles promised: `sm120 host verify`.
    """
    from pipeline.host.rules.issues import findings, match_lines, match_rules
    from pipeline.host.rules.judge import judge

    rules = [] if only_functions else judge(facts_of(root), cuda)
    answer = None
    if not only_facts and root is None:
        specs = {"--ranks": ranks, "--floors": _checked(floors), "--library": library}
        arguments = ["--device", device, "--step-limit-s", str(step_limit_s)]
        arguments += [x for k, v in specs.items() if v is not None for x in (k, str(v))]
        arguments += [x for name in only for x in ("--only", name)]
        with log.step("Testing what the cards do"):
            answer = _runner(python, image)(arguments, {})
    lines = answer.lines() if answer else []
    found = findings([match_rules(rules), match_lines("tests", lines)])
    if as_json:
        say_json(_as_json(rules, answer, found))
    else:
        _say(rules, answer, found)
    _end(rules, answer)


def _checked(floors: str | None) -> str | None:
    if floors is None:
        return None
    try:
        value = json.loads(floors)
        good = isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values())
    except ValueError:
        good = False
    if not good:
        raise click.BadParameter("is no JSON object of numbers", param_hint="--floors")
    return floors


def _runner(python: str, image: str | None) -> Callable[[list[str], dict[str, str]], ProbeReport]:
    from pipeline.host.probes.runner import run_in_image, run_probes

    if image:
        return lambda arguments, settings: run_in_image(image, arguments, settings)
    return lambda arguments, settings: run_probes(python, arguments, settings)


def _as_json(
    rules: list[RuleResult], answer: ProbeReport | None, found: list[Finding]
) -> dict[str, Any]:
    return {
        "verdict": _verdict(rules, answer),
        "rules": [r.model_dump() for r in rules],
        "functions": answer.model_dump(mode="json") if answer else None,
        "findings": [f.model_dump() for f in found],
    }


def _verdict(rules: list[RuleResult], answer: ProbeReport | None) -> str:
    from pipeline.host.rules.verdict import overall

    seen = [r.verdict for r in rules] + [r.verdict for r in (answer.rows if answer else [])]
    return overall(seen)


def _say(rules: list[RuleResult], answer: ProbeReport | None, found: list[Finding]) -> None:
    rows = [[r.verdict, r.rule, r.subject, r.why] for r in rules]
    rows += [[r.verdict, r.check, r.subject, r.why] for r in (answer.rows if answer else [])]
    click.echo(log.table(["verdict", "what", "where", "why"], rows))
    for rule in rules:
        if rule.fix:
            click.echo(f"\n{rule.rule}, {rule.subject}: {rule.fix}")
    for one in found:
        click.echo(f"\n{one.issue.id}: {one.issue.title}\n  cause: {one.issue.cause}")
        click.echo(f"  fix:   {one.issue.fix}")


def _end(rules: list[RuleResult], answer: ProbeReport | None) -> None:
    failed = [r for r in (answer.rows if answer else []) if r.verdict == "failed"]
    if failed:
        raise ProbeFailed(f"{failed[0].check}, {failed[0].subject}: {failed[0].why}")
    unfit = [r for r in rules if r.verdict == "failed"]
    if unfit:
        raise HostUnfit(f"{len(unfit)} rules failed, such as {unfit[0].rule}, {unfit[0].subject}")
    if _verdict(rules, answer) == "unknown":
        raise HostUnknown("not everything could be judged")


@click.command("tune-nccl")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--ranks", type=int, required=True, help="How many cards work together.")
@click.option("--hidden", type=int, default=7168, show_default=True, help="A model's hidden size.")
@click.option("--concurrency", nargs=2, type=int, default=(1, 32), show_default=True)
@click.option("--graph-file", help="Also try this NCCL_GRAPH_FILE.")
@click.option("--full", is_flag=True, help="All factors with all, instead of one at a time.")
@click.option("--rounds", type=int, default=50, show_default=True)
@_python_option
@_image_option
@_device_option
@_limit_option
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
    """Measure NCCL's settings at the sizes engines use, and keep the best per workload in OUT.

    A setting that hangs, dies or gives wrong sums is refused. Without a gain worth keeping, NCCL's
    own choice wins.
    """
    from pipeline.host.probes.tune import plan, sweep, workloads

    if ranks < 2 or min(concurrency) < 1 or hidden < 1:
        raise click.BadParameter("tuning takes two ranks or more, and whole positive numbers")
    settings = plan(full=full, graph_file=graph_file)
    common = ["--device", device, "--step-limit-s", str(step_limit_s), "--rounds", str(rounds)]
    common += ["--only", "all_reduce", "--ranks", str(ranks), "--from-ranks", str(ranks)]
    common += ["--bulk-bytes", "0"]

    def measure(setting: Setting, sizes: list[int]) -> ProbeReport:
        log.say(f"  trying {setting.label}")
        # what the host's own nccl.conf says would hide what is being compared
        variables = {"NCCL_CONF_FILE": "/dev/null", **setting.variables}
        asked = [*common, "--sizes-kib", ",".join(map(str, sizes))]
        return _runner(python, image)(asked, variables)

    with log.step(f"Trying {len(settings)} settings on {ranks} ranks"):
        loads = workloads(hidden, *concurrency)
        tuning = sweep(settings, loads, measure, ranks=ranks, device=device)
    text = json.dumps(tuning.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    write_bytes(out, text.encode())
    if as_json:
        say_json(tuning.model_dump(mode="json"))
    else:
        _say_tuning(tuning)
    if not tuning.winners:
        raise NothingTuned(f"none of {len(settings)} settings finished")


def _say_tuning(tuning: Tuning) -> None:
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


HOST_COMMANDS = (facts, check, doctor, tune_nccl, drift, outliers)

"""Whether this host works: rules over its facts, tests of its GPUs, NCCL by measurement."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from pipeline import log
from pipeline.cli.context import say_json
from pipeline.cli.host.facts import facts_of, root_option
from pipeline.cli.host.verify import require_verified, show_fixes
from pipeline.cli.options import ANY_PATH, json_option
from pipeline.errors import NothingTuned
from pipeline.files import write_bytes
from pipeline.host.fleet.result import FleetResult, HostResult
from pipeline.host.probes.runner import ProbeReport, run_in_image, run_probes
from pipeline.host.probes.tune import Setting, Tuning, plan, sweep, workloads
from pipeline.host.rules.judge import judge


class Probes(NamedTuple):
    """Where function tests run, and on what."""

    python: str
    image: str | None
    device: str
    step_limit_s: float

    def run(self, arguments: list[str], settings: dict[str, str] | None = None) -> ProbeReport:
        """Run them with the user's options and these."""
        given = ["--device", self.device, "--step-limit-s", str(self.step_limit_s), *arguments]
        if self.image:
            return run_in_image(self.image, given, settings)
        return run_probes(self.python, given, settings)


def _probe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How function tests are run; the command gets it as `probes`."""

    @click.option("--python", default=sys.executable, help="Python with torch that runs the tests.")
    @click.option("--image", help="Run the tests in a container of this loaded image.")
    @click.option(
        "--device",
        type=click.Choice(["cuda", "cpu"]),
        default="cuda",
        show_default=True,
        help="Device to test; `cpu` tests only the tests.",
    )
    @click.option(
        "--step-limit-s",
        type=float,
        # a collective over all cards takes seconds; on a bus that hangs it never ends
        default=60.0,
        show_default=True,
        help="Seconds after which a step counts as a hang.",
    )
    @functools.wraps(command)
    def packed(
        *args: Any, python: str, image: str | None, device: str, step_limit_s: float, **rest: Any
    ) -> Any:
        return command(*args, probes=Probes(python, image, device, step_limit_s), **rest)

    return packed


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
    probes: Probes,
    root: Path | None,
    as_json: bool,
) -> None:
    """Judge this host by rules over its facts, then test what its GPUs really do.

    A test that hangs is stopped and named. Known failures come with their cause and fix. For the
    hosts of an inventory, use `sm120 host verify`.
    """
    rules = [] if only_functions else judge(facts_of(root), cuda)
    answer = None
    # a capture has no GPUs that could be tested
    if not only_facts and root is None:
        given = {"--ranks": ranks, "--floors": _checked(floors), "--library": library}
        arguments = [x for k, v in given.items() if v is not None for x in (k, str(v))]
        arguments += [x for name in only for x in ("--only", name)]
        with log.step("Testing the GPUs"):
            answer = probes.run(arguments)
    tests, output = (answer.rows, answer.lines()) if answer else ([], [])
    name = root.name if root else "this host"
    result = HostResult(host=name, rules=rules, functions=tests, output=output)
    if as_json:
        say_json(
            {
                "verdict": result.verdict,
                "rules": [r.model_dump() for r in rules],
                "functions": answer.model_dump(mode="json") if answer else None,
                "findings": [f.model_dump() for f in result.findings],
            }
        )
    else:
        rows = [[r.verdict, r.rule, r.subject, r.why] for r in rules]
        rows += [[r.verdict, r.check, r.subject, r.why] for r in tests]
        click.echo(log.table(["verdict", "check", "subject", "reason"], rows))
        show_fixes(result)
    require_verified(FleetResult(hosts=[result]))


def _checked(floors: str | None) -> str | None:
    if floors is None:
        return None
    try:
        # checked before anything starts: the tests would refuse it only in their container
        value = json.loads(floors)
        good = isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values())
    except ValueError:
        good = False
    if not good:
        raise click.BadParameter("must be a JSON object of numbers", param_hint="--floors")
    return floors


@click.command("tune-nccl")
@click.argument("out", metavar="OUT", type=ANY_PATH)
@click.option("--ranks", type=int, required=True, help="Number of GPUs that work together.")
@click.option(
    # DeepSeek-V3 and Kimi K2 have this hidden size; it decides how large each all_reduce is
    "--hidden",
    type=int,
    default=7168,
    show_default=True,
    help="Hidden size of the model.",
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
    probes: Probes,
    as_json: bool,
) -> None:
    """Measure NCCL settings at the sizes that engines use, and write the best to OUT.

    A setting that hangs, crashes or gives wrong sums is refused. Without a clear gain, NCCL's own
    choice stays.
    """
    # one rank sends nothing: there would be nothing to measure
    if ranks < 2 or min(concurrency) < 1 or hidden < 1:
        raise click.BadParameter("tuning needs two ranks or more, and positive numbers")
    settings = plan(full=full, graph_file=graph_file)
    common = ["--rounds", str(rounds), "--only", "all_reduce"]
    common += ["--ranks", str(ranks), "--from-ranks", str(ranks)]
    # settings are compared at the sizes of the workloads; large copies would only take time
    common += ["--bulk-bytes", "0"]

    def measure(setting: Setting, sizes: list[int]) -> ProbeReport:
        log.say(f"  trying {setting.label}")
        # the host's own nccl.conf would override the settings that are compared
        variables = {"NCCL_CONF_FILE": "/dev/null", **setting.variables}
        arguments = [*common, "--sizes-kib", ",".join(map(str, sizes))]
        return probes.run(arguments, variables)

    with log.step(f"Trying {len(settings)} settings on {ranks} ranks"):
        loads = workloads(hidden, *concurrency)
        tuning = sweep(settings, loads, measure, ranks=ranks, device=probes.device)
    text = json.dumps(tuning.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    # written whether or not something won: it is the record of what was tried
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

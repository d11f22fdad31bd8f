"""`sm120 host verify`: every promise of every role, on every host of an inventory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json
from pipeline.cli.host.doctor import show_fix
from pipeline.cli.host.fleet import Fleet, fleet_of, fleet_options
from pipeline.cli.options import json_option
from pipeline.errors import (
    HostDrifted,
    HostUnfit,
    HostUnknown,
    HostUnreached,
    ProbeFailed,
    PromiseBroken,
)
from pipeline.host.facts.drift import Difference
from pipeline.host.fleet.playbook import promises_of
from pipeline.host.fleet.promised import Roles
from pipeline.host.fleet.result import FleetResult, HostResult
from pipeline.host.fleet.verify import VerifyOptions, verify_fleet
from pipeline.host.promises.run import judge_promises

_QUIET = ("passed", "not applicable")
# in the order in which site.yml runs them
ROLES = tuple(Roles.model_fields)


@click.command("verify")
@fleet_options
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    metavar="ROLE",
    help="Check this role only. Repeatable.",
)
@click.option(
    "--facts", "rules", is_flag=True, help="Judge the rules over the facts of each host, too."
)
@click.option(
    "--functions",
    "image",
    metavar="IMAGE",
    help="Test the GPUs, too, in a container of this image.",
)
@click.option("--cuda", metavar="13.x", help="CUDA branch of the images, for --facts.")
@click.option("--ranks", type=int, help="Number of GPUs that each host must have, for --functions.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Save the facts of each host here, for `host outliers` and `host drift`.",
)
@click.option("--brief", is_flag=True, help="Show only the rows that did not pass.")
@json_option
@click.pass_context
def verify(
    context: click.Context,
    /,
    roles: tuple[str, ...],
    rules: bool,
    image: str | None,
    cuda: str | None,
    ranks: int | None,
    save: Path | None,
    brief: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Prove on each host that it has what its roles promise: testinfra over SSH, read only.

    One row for each promise; a host that is down is named as not reached. Where there is a record
    of the last provisioning run, changes since then are named, too. Known failures come with
    their fix.
    """
    arguments = () if ranks is None else ("--ranks", str(ranks))
    fleet = fleet_of(given)
    asked = VerifyOptions(
        roles=roles,
        rules=rules,
        image=image,
        cuda=cuda,
        probe_arguments=arguments,
        records=fleet.records,
        save=save,
    )
    result = look(context, fleet, asked)
    if as_json:
        say_json(result.model_dump(mode="json"))
    else:
        show_result(result, asked, brief)
    require_verified(result)


def look(context: click.Context, fleet: Fleet, asked: VerifyOptions) -> FleetResult:
    """Ask Ansible what was promised, and the hosts what they have."""
    checkout = checkout_of(context)
    fleet.require_inventories()
    with (
        log.step("Asking Ansible what was promised"),
        fleet.password_files() as passwords,
        promises_of(checkout, [*fleet.arguments(), *passwords]) as promised,
    ):
        hosts = [fleet.reach(p) for p in promised]
    # outside the block above, whose files hold passwords
    with log.step(f"Looking at {log.count(len(hosts), 'host')}"):
        return verify_fleet(
            hosts,
            asked,
            judge_promises,
            jobs=fleet.jobs,
            on_result=lambda h: log.say(f"  {h.host}: {h.verdict}"),
        )


def show_result(result: FleetResult, asked: VerifyOptions, brief: bool = False) -> None:
    """A row for each promise, the fixes, what changed, and a line for each host."""
    rows = [row for h in result.hosts for row in _rows(h) if not (brief and row[1] in _QUIET)]
    if rows:
        click.echo(log.table(["host", "verdict", "role", "promise", "reason"], rows))
    for host in result.hosts:
        show_fixes(host)
        _show_drift(host)
    click.echo("")
    for host in result.hosts:
        click.echo(_summary(host))
    # a fleet that was only looked at must not seem tested
    if asked.image is None:
        click.echo(
            "The GPUs were not tested: --functions IMAGE does that, and --facts judges their setup."
        )


def _rows(host: HostResult) -> list[list[str]]:
    if host.unreached is not None:
        return [[host.host, "not reached", "-", "-", host.unreached]]
    rows = [[host.host, r.verdict, r.role, r.promise, r.why] for r in host.rows]
    rows += [[host.host, r.verdict, "facts", f"{r.rule}, {r.subject}", r.why] for r in host.rules]
    return rows + [
        [host.host, r.verdict, "functions", f"{r.check}, {r.subject}", r.why]
        for r in host.functions
    ]


def show_fixes(host: HostResult) -> None:
    """How to mend what failed, and the known issues that explain it."""
    # one fix often mends several promises: it is shown once, below all of them
    fixes: dict[str, list[str]] = {}
    for row in host.rows:
        if row.fix:
            fixes.setdefault(row.fix, []).append(row.promise)
    for fix, promises in fixes.items():
        click.echo(f"\n{host.host}: {'; '.join(promises)}\n  fix: {fix}")
    for rule in host.rules:
        if rule.fix:
            click.echo(f"\n{host.host}, {rule.rule}, {rule.subject}: {rule.fix}")
    for each in host.findings:
        click.echo(f"\n{host.host}, {each.issue.id}: {each.issue.title}")
        show_fix(each)


def _show_drift(host: HostResult) -> None:
    if host.drift:
        click.echo("")
    for difference in host.drift or []:
        click.echo(change_line(host.host, difference))


def change_line(host: str, difference: Difference) -> str:
    """A changed fact in one line, however many lines its values have."""
    before, after = (" ".join(text.split()) for text in (difference.before, difference.after))
    return f"{host} changed: {difference.field}: {before} -> {after}"


def _summary(host: HostResult) -> str:
    if host.unreached is not None:
        return f"{host.host}: not reached"
    counts = [f"{host.count(v)} {v}" for v in ("passed", "failed", "unknown") if host.count(v)]
    drift = "no record to compare with"
    if host.drift is not None:
        count = len(host.drift)
        changed = log.count(count, "fact")
        drift = f"{changed} changed since it was recorded" if count else "as recorded"
    return f"{host.host}: {', '.join(counts) or 'nothing judged'}; {drift}"


def require_verified(result: FleetResult) -> None:
    """Raise the worst error of all hosts."""
    # what the hardware does comes before what files and settings are
    for host in result.hosts:
        for test in host.functions:
            if test.verdict == "failed":
                raise ProbeFailed(f"{host.host}: {test.check}, {test.subject}: {test.why}")
    broken = [(h.host, r) for h in result.hosts for r in h.rows if r.verdict == "failed"]
    if broken:
        name, row = broken[0]
        what = f"{len(broken)} promises broken, such as" if len(broken) > 1 else "promise broken:"
        raise PromiseBroken(f"{what} {name}, {row.role}, {row.promise}: {row.why}")
    unfit = [(h.host, r) for h in result.hosts for r in h.rules if r.verdict == "failed"]
    if unfit:
        raise HostUnfit(
            f"{log.count(len(unfit), 'rule')} failed, such as {unfit[0][0]}, {unfit[0][1].rule}"
        )
    # after what failed: an error that is known outweighs one that may be
    lost = [h.host for h in result.hosts if h.unreached is not None]
    if lost:
        raise HostUnreached(f"not reached: {', '.join(lost)}")
    changed = [(h.host, d) for h in result.hosts for d in h.drift or [] if d.kind != "gained"]
    if changed:
        raise HostDrifted(f"{changed[0][0]}: {changed[0][1].field} changed since it was recorded")
    if result.verdict != "passed":
        raise HostUnknown("not everything could be judged")

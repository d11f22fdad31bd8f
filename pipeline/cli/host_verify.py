"""`sm120 host verify`: every promise of every role, on every host of an inventory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.common import checkout_of, json_option, say_json
from pipeline.cli.fleet_options import Fleet, fleet_of, fleet_options
from pipeline.errors import (
    HostDrifted,
    HostUnfit,
    HostUnknown,
    HostUnreached,
    ProbeFailed,
    PromiseBroken,
)

if TYPE_CHECKING:
    from pipeline.host.facts.drift import Difference
    from pipeline.host.fleet.result import FleetResult, HostResult
    from pipeline.host.fleet.verify import VerifyOptions

_QUIET = ("passed", "not applicable")
ROLES = (
    *("nvidia_repository", "nvidia_driver", "cuda", "pcie", "nccl", "container_runtime"),
    *("host_tuning", "registry", "weights"),
)


@click.command("verify")
@fleet_options
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), help="Only these roles.")
@click.option("--facts", "rules", is_flag=True, help="Also the rules over each host's facts.")
@click.option("--functions", "image", metavar="IMAGE", help="Also test the cards, in this image.")
@click.option("--cuda", metavar="13.x", help="The CUDA branch of the images, for the rules.")
@click.option("--ranks", type=int, help="How many cards each host must have, for --functions.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep each host's facts in this folder, for `host outliers` and `host drift`.",
)
@click.option("--forks", type=int, default=20, show_default=True, help="Hosts at once.")
@click.option("--brief", is_flag=True, help="Only the rows that did not pass.")
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
    forks: int,
    brief: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Prove on each host that it has what its roles promised: testinfra over SSH, read only.

    A row a promise; a host that is down is named as not reached. Where there is a record of the
    last provisioning run, what moved since is named too. Known failures come with their fix.
    """
    from pipeline.host.fleet.verify import VerifyOptions

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
    found = look(context, fleet, asked, forks)
    if as_json:
        say_json(found.model_dump(mode="json"))
    else:
        say_result(found, asked, brief)
    end(found)


def look(context: click.Context, fleet: Fleet, asked: VerifyOptions, forks: int) -> FleetResult:
    """Ask Ansible what was promised, and the hosts what they have."""
    from pipeline.host.fleet.playbook import promises_of
    from pipeline.host.fleet.verify import verify_fleet

    checkout = checkout_of(context)
    with (
        log.step("Asking Ansible what was promised"),
        fleet.password_files() as passwords,
        promises_of(checkout, [*fleet.arguments(), *passwords]) as promised,
    ):
        hosts = [fleet.reach(p) for p in promised]
    with log.step(f"Looking at {len(hosts)} hosts"):
        return verify_fleet(
            hosts, asked, jobs=forks, on_result=lambda h: log.say(f"  {h.host}: {h.verdict}")
        )


def say_result(found: FleetResult, asked: VerifyOptions, brief: bool = False) -> None:
    """A row a promise, the fixes, what moved, and a line a host."""
    rows = [row for h in found.hosts for row in _rows(h) if not (brief and row[1] in _QUIET)]
    if rows:
        click.echo(log.table(["host", "verdict", "what", "promise", "why"], rows))
    for host in found.hosts:
        _say_fixes(host)
        _say_drift(host)
    click.echo("")
    for host in found.hosts:
        click.echo(_summary(host))
    if asked.image is None:
        click.echo("The cards were not tested; --functions IMAGE does, and --facts judges them.")


def _rows(host: HostResult) -> list[list[str]]:
    if host.unreached is not None:
        return [[host.host, "not reached", "-", "-", host.unreached]]
    found = [[host.host, r.verdict, r.role, r.promise, r.why] for r in host.rows]
    found += [[host.host, r.verdict, "facts", f"{r.rule}, {r.subject}", r.why] for r in host.rules]
    return found + [
        [host.host, r.verdict, "functions", f"{r.check}, {r.subject}", r.why]
        for r in host.functions
    ]


def _say_fixes(host: HostResult) -> None:
    fixes: dict[str, list[str]] = {}
    for row in host.rows:
        if row.fix:
            fixes.setdefault(row.fix, []).append(row.promise)
    for fix, promises in fixes.items():
        click.echo(f"\n{host.host}: {'; '.join(promises)}\n  fix: {fix}")
    for rule in host.rules:
        if rule.fix:
            click.echo(f"\n{host.host}, {rule.rule}, {rule.subject}: {rule.fix}")
    for one in host.findings:
        click.echo(f"\n{host.host}, {one.issue.id}: {one.issue.title}")
        click.echo(f"  cause: {one.issue.cause}\n  fix:   {one.issue.fix}")


def _say_drift(host: HostResult) -> None:
    if host.drift:
        click.echo("")
    for moved in host.drift or []:
        click.echo(moved_line(host.host, moved))


def moved_line(host: str, moved: Difference) -> str:
    """One line, however many a value has."""
    before, after = (" ".join(text.split()) for text in (moved.before, moved.after))
    return f"{host} moved: {moved.field}: {before} -> {after}"


def _summary(host: HostResult) -> str:
    if host.unreached is not None:
        return f"{host.host}: not reached"
    counts = [f"{host.count(v)} {v}" for v in ("passed", "failed", "unknown") if host.count(v)]
    drift = "no record to compare with"
    if host.drift is not None:
        count = len(host.drift)
        drift = f"{count} moved since it was recorded" if count else "as recorded"
    return f"{host.host}: {', '.join(counts) or 'nothing judged'}; {drift}"


def end(found: FleetResult) -> None:
    """The worst ending of all hosts."""
    for host in found.hosts:
        for test in host.functions:
            if test.verdict == "failed":
                raise ProbeFailed(f"{host.host}: {test.check}, {test.subject}: {test.why}")
    broken = [(h.host, r) for h in found.hosts for r in h.rows if r.verdict == "failed"]
    if broken:
        name, row = broken[0]
        words = f"{len(broken)} promises broken, such as" if len(broken) > 1 else "promise broken:"
        raise PromiseBroken(f"{words} {name}, {row.role}, {row.promise}: {row.why}")
    unfit = [(h.host, r) for h in found.hosts for r in h.rules if r.verdict == "failed"]
    if unfit:
        raise HostUnfit(f"{len(unfit)} rules failed, such as {unfit[0][0]}, {unfit[0][1].rule}")
    lost = [h.host for h in found.hosts if h.unreached is not None]
    if lost:
        raise HostUnreached(f"not reached: {', '.join(lost)}")
    moved = [(h.host, d) for h in found.hosts for d in h.drift or [] if d.kind != "gained"]
    if moved:
        raise HostDrifted(f"{moved[0][0]}: {moved[0][1].field} moved since it was recorded")
    if found.verdict != "passed":
        raise HostUnknown("not everything could be judged")

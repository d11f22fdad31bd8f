"""`sm120 host provision`: check the lock, run the playbook, let the hosts prove themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.common import checkout_of
from pipeline.cli.fleet_options import Fleet, fleet_of, fleet_options
from pipeline.cli.host_verify import ROLES, end, look, moved_line, say_result
from pipeline.cli.records import key_option, signer_of
from pipeline.cli.signing import Signing
from pipeline.cli.statements import leave_host_statement, say_statement, without_statements
from pipeline.errors import ProvisionFailed

if TYPE_CHECKING:
    from pipeline.host.fleet.records import HostChanges


_busy_option = click.option(
    "--even-if-busy", is_flag=True, help="Reboot and restart Docker although the GPUs are at work."
)


@click.command("provision", context_settings={"ignore_unknown_options": True})
@fleet_options
@click.option("-C", "--check", is_flag=True, help="Show what would change; change nothing.")
@click.option("-D", "--diff", is_flag=True, help="Show the differences in files.")
@_busy_option
@click.option("-t", "--tags", multiple=True, help="Only these roles.")
@click.option("--forks", type=int, default=20, show_default=True, help="Hosts at once.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[ANSIBLE'S OPTIONS]")
@click.pass_context
def provision(
    context: click.Context,
    /,
    check: bool,
    diff: bool,
    even_if_busy: bool,
    tags: tuple[str, ...],
    forks: int,
    more: tuple[str, ...],
    **given: Any,
) -> None:
    """Bring the hosts of an inventory to what is locked, and prove that they are there.

    The first host is a canary; the others follow in batches, and a failure stops the run. What each
    host was before and after is kept as its record (--records), and what it is now is stated beside
    that, signed where there is a key.
    """
    from pipeline.host.fleet.verify import VerifyOptions

    _require_lock(context)
    fleet = fleet_of(given)
    words = ["--forks", str(forks), *more, *(x for t in tags for x in ("--tags", t))]
    words += ["--check"] * check + ["--diff"] * diff
    _play(context, fleet, "site.yml", words, even_if_busy)
    if check:
        return
    roles = tuple(role for tag in tags for role in tag.split(",") if role in ROLES)
    asked = VerifyOptions(roles=roles, records=fleet.records)
    found = look(context, fleet, asked, forks)
    say_result(found, asked, brief=True)
    end(found)


@click.command("rollback", context_settings={"ignore_unknown_options": True})
@fleet_options
@click.option("-C", "--check", is_flag=True, help="Show what would change; change nothing.")
@_busy_option
@click.option("--forks", type=int, default=20, show_default=True, help="Hosts at once.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[ANSIBLE'S OPTIONS]")
@click.pass_context
def rollback(
    context: click.Context,
    /,
    check: bool,
    even_if_busy: bool,
    forks: int,
    more: tuple[str, ...],
    **given: Any,
) -> None:
    """Bring hosts back to the driver that worked last.

    Its packages lie on each host, so no repository is asked. Where the present driver is the one
    that worked last, the one before it comes back; a second rollback returns.
    """
    words = ["--forks", str(forks), *more, *["--check"] * check]
    _play(context, fleet_of(given), "rollback.yml", words, even_if_busy)
    if not check:
        log.say(
            "The lock is unchanged, so the next provision installs its driver again. To stay,\n"
            "name this driver's version in lockfiles/host.yaml and lock it with `sm120 host lock`."
        )


def _play(
    context: click.Context, fleet: Fleet, playbook: str, words: list[str], even_if_busy: bool
) -> None:
    """Run a playbook over a fleet, and keep and state what each host was before and after."""
    from pipeline.host.fleet.playbook import stream_playbook
    from pipeline.host.fleet.records import keep_records

    signing = Signing()
    # what a run by hand has left becomes records too, and is not taken for this run's
    keep_records(fleet.records)
    variables = {"sm120_records": str(fleet.records)}
    if even_if_busy:
        variables |= {"reboot_even_if_busy": "true"}
    words = [*fleet.arguments(), *words, "--extra-vars", json.dumps(variables)]
    with fleet.password_files() as passwords:
        code = stream_playbook(checkout_of(context), playbook, [*words, *passwords])
    check = "--check" in words
    if check:
        log.say("Check mode: nothing was changed, so nothing is recorded or verified.")
    else:
        say_moves(fleet.records, signing)
    if code != 0:
        hint = "" if check else "The hosts were not verified; `sm120 host verify` does that alone."
        raise ProvisionFailed(f"ansible-playbook ended with code {code}", hint)


def _require_lock(context: click.Context) -> None:
    """The lock must answer today's spec before any host is touched."""
    from pipeline.lock.host_model import current_host_lock, host_lock_path
    from pipeline.spec.host import read_host_spec

    checkout = checkout_of(context)
    current_host_lock(host_lock_path(checkout), read_host_spec(checkout))


def say_moves(folder: Path, signing: Signing) -> None:
    """Keep and state what a run left of each host, and say what moved on it."""
    from pipeline.host.fleet.records import keep_records, record_path

    for host in keep_records(folder):
        for line in _lines(host):
            click.echo(line)
        say_statement(leave_host_statement(record_path(folder, host.host), signing))


def _lines(host: HostChanges) -> list[str]:
    if not host.changes:
        return [f"{host.host}: no fact moved in this run"]
    return [moved_line(host.host, d) for d in host.changes]


@click.command("record")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@key_option
def record(files: tuple[Path, ...], key_path: Path | None) -> None:
    """Sign host records (or facts); each statement is kept beside its file.

    `sm120 verify FILE` proves it later, and `sm120 host drift FILE` compares with it.
    """
    from pipeline.cli.records import attest_file
    from pipeline.host.facts.drift import read_facts
    from pipeline.host.facts.summary import summarise

    signer = signer_of(key_path)
    for path in without_statements(files):
        body = summarise(read_facts(path)).model_dump(mode="json")
        click.echo(str(attest_file(path, "host-facts", body, signer)))

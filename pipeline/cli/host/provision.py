"""`sm120 host provision`: check the lock, run the playbook, let the hosts prove themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click

from pipeline import log
from pipeline.cli.context import checkout_of
from pipeline.cli.file_statements import (
    attest_file,
    leave_host_statement,
    show_statement,
    without_statements,
)
from pipeline.cli.host.fleet import Fleet, fleet_of, fleet_options
from pipeline.cli.host.verify import ROLES, change_line, look, require_verified, show_result
from pipeline.cli.options import EXISTING_FILE, all_of, key_option
from pipeline.cli.signing import Signing, signer_of
from pipeline.errors import ProvisionFailed
from pipeline.host.facts.drift import read_facts
from pipeline.host.facts.summary import summarise
from pipeline.host.fleet.playbook import stream_playbook
from pipeline.host.fleet.verify import VerifyOptions, keep_records, record_path
from pipeline.lock.host_model import current_host_lock, host_lock_path
from pipeline.spec.host import read_host_spec

_play_options = all_of(
    [
        fleet_options,
        click.option(
            "-C",
            "--check",  # the name that users of Ansible know
            "--dry-run",
            "dry_run",
            is_flag=True,
            help="Show what would change and change nothing.",
        ),
        click.option("-D", "--diff", is_flag=True, help="Show the differences in files."),
        click.option(
            "--even-if-busy",
            is_flag=True,
            help="Reboot and restart Docker even while the GPUs are in use.",
        ),
        click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[ANSIBLE OPTIONS]..."),
        click.pass_context,
    ]
)
# what is not an option of ours is one of ansible-playbook's
_FOR_ANSIBLE = {"ignore_unknown_options": True}


@click.command(context_settings=_FOR_ANSIBLE)
@_play_options
@click.option("-t", "--tags", multiple=True, help="Run this role only. Repeatable.")
def provision(
    context: click.Context,
    /,
    tags: tuple[str, ...],
    dry_run: bool,
    diff: bool,
    even_if_busy: bool,
    more: tuple[str, ...],
    **given: Any,
) -> None:
    """Bring the hosts of an inventory to what is locked, and prove that they have it.

    The first host is a canary; the others follow in batches, and a failure stops the run. What
    each host was before and after is kept as its record (--records), and its present state is
    stated beside that, signed where there is a key.
    """
    fleet = fleet_of(given)
    fleet.require_inventories()
    _require_lock(context)
    chosen = [x for t in tags for x in ("--tags", t)]
    _play(context, fleet, "site.yml", [*more, *chosen], _Mode(dry_run, diff, even_if_busy))
    if dry_run:
        return
    # tags that are no role, such as Ansible's `always`, promise nothing that could be verified
    roles = tuple(role for tag in tags for role in tag.split(",") if role in ROLES)
    asked = VerifyOptions(roles=roles, records=fleet.records)
    # Ansible's recap tells which tasks ran, not what the host is now
    result = look(context, fleet, asked)
    show_result(result, asked, brief=True)
    require_verified(result)


@click.command(context_settings=_FOR_ANSIBLE)
@_play_options
def rollback(
    context: click.Context,
    /,
    dry_run: bool,
    diff: bool,
    even_if_busy: bool,
    more: tuple[str, ...],
    **given: Any,
) -> None:
    """Bring hosts back to the driver that worked last.

    Its packages are kept on each host, so no repository is needed. Where the present driver is the
    one that worked last, the one before it comes back; a second rollback undoes the first.
    """
    mode = _Mode(dry_run, diff, even_if_busy)
    fleet = fleet_of(given)
    fleet.require_inventories()
    _play(context, fleet, "rollback.yml", list(more), mode)
    if not dry_run:
        log.say(
            "The lock is unchanged, so the next provision installs its driver again. To stay,\n"
            "name this driver's version in lockfiles/host.yaml and lock it with `sm120 host lock`."
        )


class _Mode(NamedTuple):
    """How a playbook runs."""

    dry_run: bool
    diff: bool
    even_if_busy: bool

    def arguments(self) -> list[str]:
        return ["--check"] * self.dry_run + ["--diff"] * self.diff


def _play(
    context: click.Context, fleet: Fleet, playbook: str, more: list[str], mode: _Mode
) -> None:
    """Run a playbook over a fleet, and keep and state what each host was before and after."""
    # first of all: a named key that cannot sign must not be found out after a reboot of all hosts
    signing = Signing()
    # what a run of Ansible by hand left becomes records first, so that it does not count as ours
    keep_records(fleet.records)
    variables = {"sm120_records": str(fleet.records)}
    if mode.even_if_busy:
        variables |= {"reboot_even_if_busy": "true"}
    arguments = [*fleet.arguments(), "--forks", str(fleet.jobs), *more, *mode.arguments()]
    arguments += ["--extra-vars", json.dumps(variables)]
    with fleet.password_files() as passwords:
        played = stream_playbook(checkout_of(context), playbook, [*arguments, *passwords])
    if mode.dry_run:
        log.say("Dry run: nothing was changed, so nothing is recorded or verified.")
    else:
        show_changes(fleet.records, signing)
    # after the records: hosts that were changed before the failure are recorded, too
    if played.code != 0:
        alone = "The hosts were not verified; `sm120 host verify` does that alone."
        hint = "" if mode.dry_run else alone
        raise ProvisionFailed(played.summary, hint)


def _require_lock(context: click.Context) -> None:
    """The lock must match today's spec before any host is touched."""
    checkout = checkout_of(context)
    current_host_lock(host_lock_path(checkout), read_host_spec(checkout))


def show_changes(folder: Path, signing: Signing) -> None:
    """Keep and state what a run recorded of each host, and show what changed on it."""
    for host in keep_records(folder):
        for difference in host.changes:
            click.echo(change_line(host.host, difference))
        if not host.changes:
            click.echo(f"{host.host}: no fact changed in this run")
        show_statement(leave_host_statement(record_path(folder, host.host), signing))


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=EXISTING_FILE)
@key_option
def attest(files: tuple[Path, ...], key_path: Path | None) -> None:
    """Sign host records or facts. Each statement is kept beside its file.

    `sm120 verify FILE` checks it later, and `sm120 host drift FILE` compares with it.
    """
    signer = signer_of(key_path)
    for path in without_statements(files):
        body = summarise(read_facts(path)).model_dump(mode="json")
        click.echo(str(attest_file(path, "host-facts", body, signer)))

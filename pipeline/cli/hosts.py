"""`sm120 host` for a fleet: lock packages, provision, verify and roll back its hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.hosts import ROLES, PlayMode
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    EXISTING_FILE,
    all_of,
    file_option,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json, show_moves
from pipeline.core import log, proc
from pipeline.core.files import write_bytes
from pipeline.hosts.fleet.verify import HostVerifyOptions

if TYPE_CHECKING:
    from pipeline.app.hosts import Fleet, PlaybookResult
    from pipeline.hosts.facts.drift import Difference
    from pipeline.hosts.fleet.verify import FleetResult, HostResult
    from pipeline.hosts.rules.issues import IssueFinding

_QUIET = ("passed", "not applicable")
# a program in the place of a password file may itself ask a person
_ASK_LIMIT_S = 60.0
_FLEET: Sequence[Callable[[Any], Any]] = (
    many_option(
        "-i",
        "--inventory",
        "inventories",
        required=True,
        help="Ansible inventory of the hosts. Repeatable.",
    ),
    # the same letters and names as ansible-playbook, whose users type them without thinking
    click.option("-l", "--limit", help="Work on these hosts or groups only."),
    many_option("-e", "--extra-vars", help="Variables that override the inventory's. Repeatable."),
    click.option("-u", "--user", help="User on the hosts."),
    file_option("--private-key", help="SSH key."),
    file_option("--vault-password-file", help="File with the password of Ansible's vault."),
    many_option("--vault-id", "vault_ids", help="Vault identity, as in Ansible. Repeatable."),
    flag_option("-J", "--ask-vault-pass", help="Ask for the vault password once."),
    flag_option("-k", "--ask-pass", help="Ask for the SSH password once."),
    file_option(
        "--connection-password-file",
        envvar="ANSIBLE_CONNECTION_PASSWORD_FILE",
        help="File with the SSH password.",
    ),
    flag_option("-K", "--ask-become-pass", help="Ask for the sudo password once."),
    file_option(
        "--become-password-file",
        envvar="ANSIBLE_BECOME_PASSWORD_FILE",
        help="File with the sudo password.",
    ),
    click.option(
        "--records",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of host records [default: records/ beside the inventory].",
    ),
    options.jobs_option("Hosts in parallel.", most=1000, default=20),
)
fleet_options = all_of(_FLEET)
_CHECK = "Show what would change and change nothing."


play_options = all_of(
    [
        fleet_options,
        options.packed(
            "mode",
            PlayMode,
            flag_option("-C", "--check", "--dry-run", "dry_run", help=_CHECK),
            flag_option("-D", "--diff", help="Show the differences in files."),
            flag_option(
                "--even-if-busy", help="Reboot and restart Docker even while the GPUs are in use."
            ),
            click.argument(
                "more", nargs=-1, type=click.UNPROCESSED, metavar="[ANSIBLE OPTIONS]..."
            ),
        ),
        click.pass_obj,
    ]
)
# what is not an option of ours is one of ansible-playbook's
FOR_ANSIBLE = {"ignore_unknown_options": True}


def fleet_of(given: dict[str, Any]) -> Fleet:
    """The Fleet of these options; asks for passwords where that was asked for."""
    secrets = app.hosts.Secrets(
        ssh=_secret(given["connection_password_file"], given["ask_pass"], "SSH password"),
        sudo=_secret(given["become_password_file"], given["ask_become_pass"], "sudo password"),
        vault=_secret(None, given["ask_vault_pass"], "Vault password"),
    )
    names = ("inventories", "limit", "extra_vars", "user", "private_key", "vault_password_file")
    chosen = {name: given[name] for name in (*names, "vault_ids", "records", "jobs")}
    return app.hosts.Fleet(**chosen, secrets=secrets)


def _secret(path: Path | None, ask: bool, prompt: str) -> str:
    """From the user, from a file, or from the output of a program in its place, as Ansible does."""
    # asked once and handed on: Ansible and our own connections would each ask again
    if ask:
        typed: str = click.prompt(prompt, hide_input=True, err=True)
        return typed
    if path is None:
        return ""
    is_program = os.access(path, os.X_OK)
    try:
        if is_program:
            done = proc.read([os.path.abspath(path)], timeout_s=_ASK_LIMIT_S)  # noqa: PTH100
            done.check_returncode()
        output = done.stdout if is_program else path.read_bytes()
        return output.decode("utf-8").rstrip("\r\n")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        what = "the program failed" if is_program else "it is not text"
        raise click.UsageError(f"{path}: no password can be read: {what}") from error


@query
@click.option("--target", help="System and processor, such as ubuntu-24.04/amd64.")
@click.option(
    "--repository",
    "address",
    envvar="SM120_HOST_REPOSITORY",
    help="URL or folder of NVIDIA's repository for that system, or of a mirror.",
)
@click.option(
    "--keyring",
    type=click.Path(path_type=Path),
    envvar="SM120_HOST_KEYRING",
    help="Public key of the repository, armored or binary.",
)
@click.option("--suite", help="Suite of the repository, where it is not a flat one.")
@many_option(
    "--component", "components", default=["main"], help="Component of the suite. Repeatable."
)
@options.locking_dry_run_option
@options.lock_check_option
def host_lock_command(
    workspace: Workspace,
    /,
    target: str | None,
    dry_run: bool,
    check: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Look up exact packages for lockfiles/host.yaml and write lockfiles/host.lock.yaml.

    One run locks one system; the others in the lock stay as they are. The lock names no download
    address, so a mirror in a closed network serves as well as NVIDIA's own repository.
    """
    if check:
        known = app.hosts.check_lock(workspace, target)
        rows = {name: len(each.pins()) for name, each in known.targets.items()}
        if as_json:
            return say_json({"seal": known.seal, "spec": known.spec, "targets": rows})
        for name, count in rows.items():
            click.echo(f"{name}: {log.count(count, 'package')}, current")
        return None
    moves = app.hosts.lock_host(workspace, target, dry_run=dry_run, **options)
    if as_json:
        return say_json(moves)
    show_moves(["package", "before", "after"], [[*m.values()] for m in moves], dry_run)


@click.command(context_settings=FOR_ANSIBLE)
@play_options
@many_option("-t", "--tags", help="Run this role only. Repeatable.")
def host_provision_command(
    workspace: Workspace, /, tags: tuple[str, ...], mode: PlayMode, **given: Any
) -> None:
    """Bring the hosts of an inventory to what is locked, and prove that they have it.

    The first host is a canary; the others follow in batches, and a failure stops the run. What
    each host was before and after is kept as its record (--records), and its present state is
    stated beside that, signed where there is a key.
    """
    fleet = fleet_of(given)
    _show_played(app.hosts.provision(workspace, fleet, mode, tags))
    if mode.dry_run:
        return
    # tags that are no role, such as Ansible's `always`, promise nothing that could be verified
    roles = tuple(role for tag in tags for role in tag.split(",") if role in ROLES)
    asked = HostVerifyOptions(roles=roles, records=fleet.records_folder)
    # Ansible's recap says which tasks ran, not what the host is now
    result = app.hosts.verify_hosts(workspace, fleet, asked)
    show_result(result, asked, brief=True)
    app.hosts.require_verified(result)


def _show_played(played: PlaybookResult) -> None:
    for host, changes, stated in played.hosts:
        for difference in changes:
            click.echo(_change_line(host, difference))
        if not changes:
            click.echo(f"{host}: no fact changed in this run")
        click.echo(f"statement: {stated.file}, {stated.state}")
    if played.error:
        raise played.error


@click.command(context_settings=FOR_ANSIBLE)
@play_options
def host_rollback_command(workspace: Workspace, /, mode: PlayMode, **given: Any) -> None:
    """Bring hosts back to the driver that worked last.

    Its packages are kept on each host, so no repository is needed. Where the present driver is the
    one that worked last, the one before it comes back; a second rollback undoes the first.
    """
    _show_played(app.hosts.rollback(workspace, fleet_of(given), mode))
    if not mode.dry_run:
        log.say(
            "The lock is unchanged, so the next provision installs its driver again. To stay,\n"
            "name this driver's version in lockfiles/host.yaml and lock it with `sm120 host lock`."
        )


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=EXISTING_FILE)
@options.key_option
def host_attest_command(files: tuple[Path, ...], key_path: Path | None) -> None:
    """Sign host records or facts. Each statement is kept beside its file.

    `sm120 verify FILE` checks it later, and `sm120 host drift FILE` compares with it.
    """
    for path in app.hosts.attest_hosts(files, key_path):
        click.echo(str(path))


@query
@fleet_options
@many_option(
    "--role",
    "roles",
    type=click.Choice(ROLES),
    metavar="ROLE",
    help="Check this role only. Repeatable.",
)
@flag_option("--facts", "rules", help="Judge the rules over the facts of each host, too.")
@click.option(
    "--functions",
    "image",
    metavar="IMAGE",
    help="Test the GPUs, too, in a container of this image.",
)
@click.option("--cuda", metavar="13.x", help="CUDA branch of the images, for --facts.")
@click.option("--ranks", type=int, help="Number of GPUs that each host must have, for --functions.")
@click.option(
    "--output",
    "save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Save the facts of each host here, for `host outliers` and `host drift`.",
)
@flag_option("--brief", help="Show only the rows that did not pass.")
def host_verify_command(
    workspace: Workspace,
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
    fleet = fleet_of(given)
    asked = HostVerifyOptions(
        roles=roles,
        rules=rules,
        image=image,
        cuda=cuda,
        probe_arguments=() if ranks is None else ("--ranks", str(ranks)),
        records=fleet.records_folder,
        save=save,
    )
    result = app.hosts.verify_hosts(workspace, fleet, asked)
    if as_json:
        say_json(result.model_dump(mode="json"))
    else:
        show_result(result, asked, brief)
    app.hosts.require_verified(result)


@query
@fleet_options
@many_option(
    "--bench",
    "benches",
    type=options.EXISTING_FOLDER,
    help="Folder with results of `sm120 bench`, also below it. Repeatable [bench].",
)
@path_option("--html", "page", help="Write the table as a page, too.")
def host_status_command(
    workspace: Workspace,
    /,
    benches: tuple[Path, ...],
    page: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Show what every host of an inventory is, and what it serves; changes nothing.

    Each host is asked over one SSH connection, as its login's user, all at the same time; one that
    is down is a row. What was recorded, tested and measured of it is known by this machine: its
    records beside the inventory, the attempts of this store, and the results of `sm120 bench RECIPE
    --on HOST`. Where something is wrong, the worst of it decides the exit code.
    """
    # late: other commands of this module need nothing of what serves and measures
    from pipeline.app.host_status import COLUMNS, host_status, render_status

    own = Path("bench")
    found = benches or ((own,) if own.is_dir() else ())
    rows, error = host_status(workspace, fleet_of(given), found)
    if page:
        write_bytes(page, render_status(rows))
        log.say(f"wrote {page}")
    if as_json:
        say_json([row.model_dump(mode="json") for row in rows])
    else:
        click.echo(log.table(COLUMNS, [line for row in rows for line in row.cells()]))
        for row in rows:
            for problem in row.problems:
                click.echo(f"{row.host}: {problem.why}")
    if error:
        raise error


def show_result(result: FleetResult, asked: HostVerifyOptions, brief: bool = False) -> None:
    """A row for each promise, the fixes, what changed, and a line for each host."""
    rows = []
    for host in result.hosts:
        if host.unreached is not None:
            rows.append([host.host, "not reached", "-", "-", host.unreached])
            continue
        found = [(r.verdict, r.role, r.promise, r.why) for r in host.rows]
        found += [(r.verdict, "facts", f"{r.rule}, {r.subject}", r.why) for r in host.rules]
        found += [
            (r.verdict, "functions", f"{r.check}, {r.subject}", r.why) for r in host.functions
        ]
        rows += [[host.host, *row] for row in found if not (brief and row[0] in _QUIET)]
    if rows:
        click.echo(log.table(["host", "verdict", "role", "promise", "reason"], rows))
    for host in result.hosts:
        show_fixes(host)
        if host.drift:
            click.echo("")
        for difference in host.drift or []:
            click.echo(_change_line(host.host, difference))
    click.echo("")
    for host in result.hosts:
        if host.unreached is not None:
            click.echo(f"{host.host}: not reached")
            continue
        counts = [f"{host.count(v)} {v}" for v in ("passed", "failed", "unknown") if host.count(v)]
        drift = "no record to compare with"
        if host.drift is not None:
            changed = f"{log.count(len(host.drift), 'fact')} changed since it was recorded"
            drift = changed if host.drift else "as recorded"
        click.echo(f"{host.host}: {', '.join(counts) or 'nothing judged'}; {drift}")
    # a fleet that was only looked at must not seem tested
    if asked.image is None:
        click.echo(
            "The GPUs were not tested: --functions IMAGE does that, and --facts judges their setup."
        )


def show_fixes(host: HostResult) -> None:
    """How to fix what failed, and the known issues that explain it."""
    # one fix often repairs several promises: it is shown once, below all of them
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


def _change_line(host: str, difference: Difference) -> str:
    """A changed fact in one line, however many lines its values have."""
    before, after = (" ".join(text.split()) for text in (difference.before, difference.after))
    return f"{host} changed: {difference.field}: {before} -> {after}"


def show_fix(finding: IssueFinding, fix: str = "") -> None:
    """Cause and fix of a known issue; another fix, where more is known."""
    click.echo(f"  cause: {finding.issue.cause}\n  fix:   {fix or finding.issue.fix}")

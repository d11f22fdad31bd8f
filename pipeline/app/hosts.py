"""The hosts of an inventory: lock their packages, bring them to the lock, and prove it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pipeline.app.signing import Signing, signer_of
from pipeline.app.statements import FileStatement, sign_file, state_host, without_statements
from pipeline.app.workspace import Workspace
from pipeline.core import errors, log
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import read_settings
from pipeline.core.sealed import read_or_none
from pipeline.hosts import lock_model
from pipeline.hosts.facts.drift import Difference, read_recorded_facts
from pipeline.hosts.facts.summary import summarise
from pipeline.hosts.fleet.playbook import promises_of, stream_playbook
from pipeline.hosts.fleet.promised import Promised, Roles
from pipeline.hosts.fleet.verify import (
    FleetResult,
    HostVerifyOptions,
    host_record_path,
    keep_records,
    verify_fleet,
)
from pipeline.hosts.lock import lock_target, read_package_index, refused_key
from pipeline.hosts.promises.run import judge_promises
from pipeline.hosts.spec import read_host_spec
from pipeline.images.fetch.sources import read_below

# in the order in which site.yml runs them
ROLES = tuple(Roles.model_fields)


@dataclass(frozen=True, repr=False)
class Secrets:
    """Passwords that a person typed or a file holds; empty where there is none."""

    ssh: str = ""
    sudo: str = ""
    vault: str = ""


@dataclass(frozen=True)
class Fleet:
    """An inventory, and how its hosts are reached."""

    inventories: tuple[str, ...]
    limit: str | None = None
    extra_vars: tuple[str, ...] = ()
    user: str | None = None
    private_key: Path | None = None
    vault_password_file: Path | None = None
    vault_ids: tuple[str, ...] = ()
    secrets: Secrets = field(default_factory=Secrets)
    records: Path | None = None  # else next to the inventory
    jobs: int = 20

    @property
    def records_folder(self) -> Path:
        """The folder of records: where a site keeps its inventory, not in this checkout."""
        if self.records:
            return self.records
        path = Path(os.path.abspath(self.inventories[0]))  # noqa: PTH100 -- links stay as they are
        if path.is_dir():
            # not inside an inventory folder: Ansible would take them for a part of it
            return path.with_name(f"{path.name}-records")
        return (path.parent if path.exists() else Path.cwd()) / "records"

    def arguments(self) -> list[str]:
        """The same options for Ansible."""
        pairs = [("--inventory", i) for i in self.inventories]
        pairs += [("--extra-vars", e) for e in self.extra_vars]
        pairs += [("--vault-id", v) for v in self.vault_ids]
        single = {
            "--limit": self.limit,
            "--user": self.user,
            "--private-key": self.private_key,
            "--vault-password-file": self.vault_password_file,
        }
        pairs += [(name, str(value)) for name, value in single.items() if value is not None]
        return [argument for pair in pairs for argument in pair]

    def require_inventories(self) -> None:
        """Refuse a name that is not there; Ansible only warns, and goes on with no hosts."""
        for each in self.inventories:
            # with a comma it is a list of hosts; a plugin's inventory is a file, too
            if "," not in each and not Path(each).exists():
                raise errors.FleetUnready(
                    f"{each}: no such inventory",
                    "Name a file or folder, or hosts with a comma such as `rig1,`.",
                )

    def reach(self, promised: Promised) -> Promised:
        """Fill in what only the command line names."""
        to = promised.connection
        filled = {
            "user": to.user or self.user or "",
            "key": to.key or str(self.private_key or ""),
            # what the inventory has for one host is more exact than one password for all
            "password": to.password or self.secrets.ssh,
            "become_password": to.become_password or self.secrets.sudo,
        }
        return promised.model_copy(update={"connection": to.model_copy(update=filled)})

    @contextmanager
    def password_files(self) -> Iterator[list[str]]:
        """Write Ansible's passwords to files that exist only in this block."""
        given = {
            "--connection-password-file": self.secrets.ssh,
            "--become-password-file": self.secrets.sudo,
            "--vault-password-file": self.secrets.vault,
        }
        arguments: list[str] = []
        # files, since the arguments of a process can be read by every user
        with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
            for option, secret in given.items():
                if secret:
                    path = Path(folder, option.strip("-"))
                    path.touch(mode=0o600)
                    path.write_text(secret + "\n", encoding="utf-8")
                    arguments += [option, str(path)]
            yield arguments


class HostRunResult(NamedTuple):
    """What a run changed on a host, and the statement about its record."""

    host: str
    changes: list[Difference]
    statement: FileStatement


@dataclass(frozen=True)
class PlayMode:
    """How a playbook runs."""

    dry_run: bool = False
    diff: bool = False
    even_if_busy: bool = False
    more: tuple[str, ...] = ()  # options of ansible-playbook


@dataclass(frozen=True)
class PlaybookResult:
    """What a playbook changed on each host, and the error it ended with."""

    hosts: list[HostRunResult]
    error: errors.ProvisionFailed | None


def provision(
    workspace: Workspace, fleet: Fleet, mode: PlayMode, tags: Sequence[str] = ()
) -> PlaybookResult:
    """Bring the hosts of an inventory to what is locked."""
    fleet.require_inventories()
    checkout = workspace.checkout()
    # the lock must match today's spec before any host is touched
    lock_model.current_host_lock(lock_model.host_lock_path(checkout), read_host_spec(checkout))
    chosen = [x for t in tags for x in ("--tags", t)]
    return _play(workspace, fleet, "site.yml", [*mode.more, *chosen], mode)


def rollback(workspace: Workspace, fleet: Fleet, mode: PlayMode) -> PlaybookResult:
    """Bring hosts back to the driver that worked last."""
    fleet.require_inventories()
    return _play(workspace, fleet, "rollback.yml", mode.more, mode)


def _play(
    workspace: Workspace, fleet: Fleet, playbook: str, more: Sequence[str], mode: PlayMode
) -> PlaybookResult:
    """Run a playbook over a fleet, and keep and state what each host was before and after."""
    # first of all: after a reboot of all hosts it is too late to learn that a key cannot sign
    signing, records = Signing(), fleet.records_folder
    # first make records of what Ansible wrote when run by hand, so that it does not count as ours
    keep_records(records)
    variables = {"sm120_records": str(records)}
    if mode.even_if_busy:
        variables |= {"reboot_even_if_busy": "true"}
    arguments = [*fleet.arguments(), "--forks", str(fleet.jobs), *more]
    arguments += ["--check"] * mode.dry_run + ["--diff"] * mode.diff
    arguments += ["--extra-vars", json.dumps(variables)]
    with fleet.password_files() as passwords:
        played = stream_playbook(workspace.checkout(), playbook, [*arguments, *passwords])
    if mode.dry_run:
        log.say("Dry run: nothing was changed, so nothing is recorded or verified.")
    # even after a failure: record and state the hosts that changed before it, too
    hosts = []
    for each in () if mode.dry_run else keep_records(records):
        stated = state_host(host_record_path(records, each.host), signing)
        hosts.append(HostRunResult(each.host, each.changes, stated))
    error = None
    if played.code != 0:
        alone = "The hosts were not verified; `sm120 host verify` does that alone."
        error = errors.ProvisionFailed(played.summary, "" if mode.dry_run else alone)
    return PlaybookResult(hosts, error)


def verify_hosts(workspace: Workspace, fleet: Fleet, asked: HostVerifyOptions) -> FleetResult:
    """Ask Ansible what was promised, and the hosts what they have; change nothing."""
    checkout = workspace.checkout()
    fleet.require_inventories()
    # what `host deploy` brought to each host is recorded there
    engines = [
        "--extra-vars",
        json.dumps({"engine_records": str(fleet.records_folder / "engines")}),
    ]
    with (
        log.step("Asking Ansible what was promised"),
        fleet.password_files() as passwords,
        promises_of(checkout, [*fleet.arguments(), *engines, *passwords]) as promised,
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


def require_verified(result: FleetResult) -> None:
    """Raise the worst error of all hosts."""
    # what the hardware does comes before what files and settings are
    for host in result.hosts:
        for test in host.functions:
            if test.verdict == "failed":
                raise errors.ProbeFailed(f"{host.host}: {test.check}, {test.subject}: {test.why}")
    broken = [(h.host, r) for h in result.hosts for r in h.rows if r.verdict == "failed"]
    if broken:
        name, row = broken[0]
        what = f"{len(broken)} promises broken, such as" if len(broken) > 1 else "promise broken:"
        raise errors.PromiseBroken(f"{what} {name}, {row.role}, {row.promise}: {row.why}")
    unfit = [(h.host, r) for h in result.hosts for r in h.rules if r.verdict == "failed"]
    if unfit:
        raise errors.HostUnfit(
            f"{log.count(len(unfit), 'rule')} failed, such as {unfit[0][0]}, {unfit[0][1].rule}"
        )
    # after what failed: a known error outweighs a possible one
    lost = [h.host for h in result.hosts if h.unreached is not None]
    if lost:
        raise errors.HostUnreached(f"not reached: {', '.join(lost)}")
    changed = [(h.host, d) for h in result.hosts for d in h.drift or [] if d.kind != "gained"]
    if changed:
        raise errors.HostDrifted(
            f"{changed[0][0]}: {changed[0][1].field} changed since it was recorded"
        )
    if result.verdict != "passed":
        raise errors.HostUnknown("not everything could be judged")


def attest_hosts(files: Sequence[Path], key_path: Path | None = None) -> list[Path]:
    """Sign host records or facts; returns the statements, each next to its file."""
    signer = signer_of(key_path)
    return [
        sign_file(
            path, "host-facts", summarise(read_recorded_facts(path)).model_dump(mode="json"), signer
        )
        for path in without_statements(files)
    ]


def check_lock(workspace: Workspace, target: str | None = None) -> lock_model.HostLock:
    """The lock, if it matches today's spec and has the target."""
    checkout = workspace.checkout()
    lock = lock_model.current_host_lock(
        lock_model.host_lock_path(checkout), read_host_spec(checkout)
    )
    if target is not None and target not in lock.targets:
        raise errors.LockMissing(
            f"host.lock.yaml: has no packages for {target}", "Make them with `sm120 host lock`."
        )
    return lock


def lock_host(
    workspace: Workspace,
    target: str | None,
    address: str | None,
    keyring: Path | None,
    suite: str | None = None,
    components: tuple[str, ...] = ("main",),
    *,
    dry_run: bool = False,
) -> list[dict[str, str | None]]:
    """Look up exact packages for a target and write its part of the lock; returns what changed."""
    checkout = workspace.checkout()
    spec = read_host_spec(checkout)
    if target is None or address is None or keyring is None:
        raise errors.SpecInvalid(
            "a lock needs a system, a repository and its key",
            "sm120 host lock --target ubuntu-24.04/amd64 --repository ADDRESS --keyring KEY",
        )
    if target not in spec.targets:
        raise errors.SpecInvalid(
            f"lockfiles/host.yaml does not name {target} (only {', '.join(spec.targets)})",
            "Choose one of its targets, or add this one.",
        )
    with log.step(f"Locking the packages of {target}"):
        read = partial(read_below, NetClient(read_settings()), [address])
        try:
            index = read_package_index(read, keyring, target.partition("/")[2], suite, components)
        except errors.SourceUnreachable as error:
            # the general hint speaks of the sources of images
            hint = "Check --repository, --suite and the network, then run it again."
            raise errors.SourceUnreachable(str(error), hint) from error
        new = lock_target(spec, target, index)
    # after locking: the lock itself is right, only these hosts cannot use this repository
    if key := refused_key(target, index):
        log.say(
            f"Warning: apt on {target} will refuse this repository: its key {key} is bound by\n"
            "SHA-1 only, which apt there rejects since 2026-02-01. Use the repository that NVIDIA\n"
            "signs with a newer key for this system, or a mirror that you sign yourself;\n"
            "ansible/README.md shows the ways."
        )
    path = lock_model.host_lock_path(checkout)
    old = read_or_none(lock_model.read_host_lock, path)
    # pins that answer another spec are dropped, not kept beside the new ones
    still_valid = old.targets if old and old.spec == spec.digest() else {}
    dropped = sorted(set(old.targets) - {target, *still_valid}) if old else []
    if not dry_run:
        lock_model.write_host_lock(path, spec, {**still_valid, target: new})
    if dropped:
        log.say(
            f"Warning: host.yaml changed since {', '.join(dropped)} was locked, so the new lock\n"
            "leaves it out. Lock it again: `sm120 host lock --target TARGET` for each."
        )
    before = old.targets.get(target) if old else None
    had, has = before.pins() if before else {}, new.pins()
    return [
        {
            "name": name,
            "before": had[name].version if name in had else None,
            "after": has[name].version if name in has else None,
        }
        for name in sorted({*had, *has})
        if had.get(name) != has.get(name)
    ]

"""Lock the packages that hosts get, from a signed repository."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.app.workspace import Workspace
from pipeline.core import log
from pipeline.core.errors import LockMissing, SourceUnreachable, SpecInvalid
from pipeline.core.net.http import Client
from pipeline.core.net.settings import read_settings
from pipeline.core.sealed import read_or_none
from pipeline.hosts.lock import lock_target, read_package_index, refused_key
from pipeline.hosts.lock_model import (
    HostLock,
    current_host_lock,
    host_lock_path,
    read_host_lock,
    sealed_host,
    write_host_lock,
)
from pipeline.hosts.spec import read_host_spec
from pipeline.images.fetch.sources import read_below


def check_lock(workspace: Workspace, target: str | None = None) -> HostLock:
    """The lock, if it matches today's spec and has the target."""
    checkout = workspace.checkout()
    lock = current_host_lock(host_lock_path(checkout), read_host_spec(checkout))
    if target is not None and target not in lock.targets:
        raise LockMissing(
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
        raise SpecInvalid(
            "a lock needs a system, a repository and its key",
            "sm120 host lock --target ubuntu-24.04/amd64 --repository ADDRESS --keyring KEY",
        )
    if target not in spec.targets:
        raise SpecInvalid(
            f"lockfiles/host.yaml does not name {target} (only {', '.join(spec.targets)})",
            "Choose one of its targets, or add this one.",
        )
    with log.step(f"Locking the packages of {target}"):
        read = partial(read_below, Client(read_settings()), [address])
        try:
            index = read_package_index(read, keyring, target.partition("/")[2], suite, components)
        except SourceUnreachable as error:
            # the general hint speaks of the sources of images
            hint = "Check --repository, --suite and the network, then run it again."
            raise SourceUnreachable(str(error), hint) from error
        new = lock_target(spec, target, index)
    # after locking: the lock itself is right, only these hosts cannot use this repository
    if key := refused_key(target, index):
        log.say(
            f"Warning: apt on {target} will refuse this repository: its key {key} is bound by\n"
            "SHA-1 only, which apt there rejects since 2026-02-01. Use the repository that NVIDIA\n"
            "signs with a newer key for this system, or a mirror that you sign yourself;\n"
            "ansible/README.md shows the ways."
        )
    path = host_lock_path(checkout)
    old = read_or_none(read_host_lock, path)
    # pins that answer another spec are dropped, not kept beside the new ones
    kept = old.targets if old and old.spec == spec.digest() else {}
    dropped = sorted(set(old.targets) - {target, *kept}) if old else []
    if not dry_run:
        write_host_lock(path, sealed_host(spec, {**kept, target: new}))
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

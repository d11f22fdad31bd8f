"""The hosts' lock: exact packages for each system, without the address of a repository."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pipeline.core.errors import LockStale
from pipeline.core.files import write_bytes
from pipeline.core.model import FILE_VERSION, Digest, Frozen, Name
from pipeline.core.sealed import UNSEALED, Sealed, read_sealed
from pipeline.hosts.spec import CudaRelease, HostSpec, Target
from pipeline.images.lock.model import DebPin
from pipeline.images.spec.checkout import Checkout

PARTS = ("driver", "cuda", "container_toolkit", "nccl")
_COMMAND = "sm120 host lock"
_json = partial(json.dumps, ensure_ascii=False)


class LockedPart(Frozen):
    """What is installed by name, and all that comes with it from the same repository."""

    packages: list[Name]
    debs: list[DebPin]


class TargetLock(Frozen):
    """One system's packages, as of one signed index."""

    index_date: str
    driver: LockedPart
    cuda: LockedPart
    container_toolkit: LockedPart
    nccl: LockedPart

    def pins(self) -> dict[str, DebPin]:
        """Every pin by name."""
        return {pin.name: pin for part in PARTS for pin in getattr(self, part).debs}


class HostLock(Sealed):
    """The packages that satisfy the hosts' spec."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    spec: Digest
    driver_branch: int
    cuda_release: CudaRelease
    # of the spec: a play checks a running driver against it without reading the spec
    cuda_oldest_branches: dict[CudaRelease, int]
    targets: dict[Target, TargetLock]
    seal: Digest


def host_lock_path(checkout: Checkout) -> Path:
    """The file of the hosts' lock."""
    return checkout.root / "lockfiles" / "host.lock.yaml"


def write_host_lock(path: Path, spec: HostSpec, targets: dict[str, TargetLock]) -> HostLock:
    """Write a new lock, sorted and sealed, with one line for each pin."""
    lock = HostLock(
        spec=spec.digest(),
        driver_branch=spec.driver.branch,
        cuda_release=spec.cuda.release,
        cuda_oldest_branches=dict(sorted(spec.cuda.oldest_branches.items())),
        targets=dict(sorted(targets.items())),
        seal=UNSEALED,
    ).sealed()
    lines = [
        f"# Written by `{_COMMAND}`; do not edit: the seal would not match and plays would stop.",
        f"format: {lock.format}",
        f"spec: {lock.spec}",
        f"driver_branch: {lock.driver_branch}",
        f"cuda_release: {_json(lock.cuda_release)}",
        f"cuda_oldest_branches: {_json(lock.cuda_oldest_branches)}",
        "targets:" if lock.targets else "targets: {}",
    ]
    for name, target in lock.targets.items():
        lines += [f"  {name}:", f"    index_date: {_json(target.index_date)}"]
        for part_name in PARTS:
            part: LockedPart = getattr(target, part_name)
            lines += [f"    {part_name}:", f"      packages: {_json(part.packages)}"]
            lines.append("      debs:" if part.debs else "      debs: []")
            lines += [f"      - {_json(pin.model_dump())}" for pin in part.debs]
    write_bytes(path, "\n".join([*lines, f"seal: {lock.seal}", ""]).encode())
    return lock


def read_host_lock(path: Path) -> HostLock:
    """A lock that is whole and unedited."""
    missing, edited = f"Make it with `{_COMMAND}`.", f"Make it again with `{_COMMAND}`."
    return read_sealed(path, HostLock, missing=missing, edited=edited)


def current_host_lock(path: Path, spec: HostSpec) -> HostLock:
    """Read the lock; refuse one made for another spec."""
    lock = read_host_lock(path)
    if lock.spec != spec.digest():
        raise LockStale(
            f"{path.name}: the spec has changed since it was locked",
            f"Look at what would move with `{_COMMAND} --dry-run`, then lock.",
        )
    return lock

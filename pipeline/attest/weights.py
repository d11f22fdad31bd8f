"""What a signed record says of a set of weights."""

from __future__ import annotations

from typing import Literal

from pipeline.model import Count, Digest, Frozen, Identity, Stamp
from pipeline.weights.model import Repository, Sha1


class WeightsLockName(Frozen):
    """Which lock, and which spec it answers."""

    name: Identity
    seal: Digest
    spec: Digest


class WeightsVerification(Frozen):
    """Whether the files on disk are the locked ones; `unknown` and `damaged` say why."""

    result: Literal["verified", "damaged", "unknown"]
    how: Literal["full", "receipt"]
    at: Stamp
    files_read: Count
    files_by_receipt: Count
    why: list[str]


class Tool(Frozen):
    """Who says so."""

    name: Literal["sm120-pipeline"]
    version: Identity


class Weights(Frozen):
    """A set of model files, as locked and as found on a disk."""

    lock: WeightsLockName
    repository: Repository
    commit: Sha1
    files: Count
    size_bytes: Count
    layout: Literal["plain", "hub-cache"]
    verification: WeightsVerification
    tool: Tool

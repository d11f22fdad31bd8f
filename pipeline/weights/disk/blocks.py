"""Blocks of a set: what hosts hand to each other while they are still fetching it.

A lock has the hash of a whole file, so it cannot judge a part. A block list can: the SHA-256 of
each block, computed by a machine that has the whole file, proved. The list is a claim, which spares
time; the file's own hash in the lock decides in the end.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated

from pydantic import Field

from pipeline.core.model import Frozen, Hex

LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 1 << 20, 16 << 20
# Small enough that eight hosts soon have something to exchange, and so few that the map of what a
# host holds stays some kilobytes.
_BLOCKS = 2048
Bits = Annotated[str, Field(pattern=r"^[0-9a-f]{1,8192}$")]  # a hexadecimal number, a bit a block


def block_bytes_of(set_bytes: int) -> int:
    """The size of a block of a set: every host that has the same lock computes the same."""
    block_bytes = LEAST_BLOCK_BYTES
    while block_bytes < MOST_BLOCK_BYTES and set_bytes > block_bytes * _BLOCKS:
        block_bytes *= 2
    return block_bytes


def all_blocks(size_bytes: int, block_bytes: int) -> int:
    """The bits of a whole file."""
    return (1 << -(-size_bytes // block_bytes)) - 1


class BlockList(Frozen):
    """The hash of every block of one file."""

    block_bytes: int
    sha256: list[Hex]


class HeldBlocks(Frozen):
    """What a host has of a set, by the hash of each file, and what it asks the origin for."""

    host: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # chosen anew for each run
    block_bytes: int
    is_whole: bool
    received_bytes: int  # a host whose number stands still has stopped
    files: dict[str, Bits]
    asked: dict[str, Bits] = {}


def hash_blocks(handle: int, size_bytes: int, block_bytes: int) -> BlockList:
    """The block list of an open file that is proved."""
    hashes = []
    for at in range(0, size_bytes, block_bytes):
        data = os.pread(handle, min(block_bytes, size_bytes - at), at)
        hashes.append(hashlib.sha256(data).hexdigest())
    return BlockList(block_bytes=block_bytes, sha256=hashes)

"""Deflate streams that come out the same on every machine.

A system's zlib is not one thing (zlib, zlib-ng, ISA-L compress differently), so nothing here
compresses with it. Tar headers are packed by `squeeze`, a pure function; file contents that are
not already deflated go through libdeflate, pinned by hash and checked by `check_compressor`.
Inflating is free of that worry, so it uses the fastest library there is (ISA-L).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import Protocol, cast

import deflate
from isal import isal_zlib

from pipeline.errors import CorruptArchive, MissingTool
from pipeline.model import sha256_of

# No name, no time, no operating system: RFC 1952.
GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
# An empty last block in fixed codes.
FINAL_BLOCK = b"\x03\x00"
# Part of every digest: another level is another FORMAT.
LEVEL = 6
CHUNK_BYTES = 1 << 20
_INFLATE_STEP_BYTES = 4 << 20
# shorter runs are cheaper stored than as a block of their own
_ZERO_RUN = re.compile(rb"\0{16,}")
_LONGEST_MATCH = 258
# ISA-L's own error is no zlib.error, and its stubs declare an instance instead of the class.
_DamagedStream = cast(type[Exception], isal_zlib.error)
# ISA-L reads up to eight bytes ahead: with fewer behind a stream it cannot say that they are
# left over, nor that it still holds output. So there are always more.
_GUARD = b"\0" * 16
# of the probe at LEVEL with the `deflate` that lockfiles/tool pins
_PROBE_DIGEST = "sha256:88aaae9f22a238b61973a9edd1ba2f2436bc716235399ed78990c0b48602f3fb"


class Inflater(Protocol):
    """The part of a decompress object that is used here."""

    eof: bool
    unused_data: bytes
    unconsumed_tail: bytes

    def decompress(self, data: bytes, max_length: int = ...) -> bytes: ...


def check_compressor() -> None:
    """Stop before the first byte if libdeflate here is not the one the digests were made with."""
    got = sha256_of(compress(_probe()))
    if got != _PROBE_DIGEST:
        raise MissingTool(
            "the installed `deflate` library compresses differently from the pinned one",
            "Install the locked version: pip install --require-hashes -r lockfiles/tool/run.txt",
        )


def _probe() -> bytes:
    """Copies near and far between noise: each level of libdeflate makes another stream of it."""
    out, state = bytearray(range(256)), 1
    while len(out) < 100_000:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        start, length = (state >> 9) % len(out), 3 + (state >> 5) % (300 if state & 16 else 12)
        noise = (state & 0x3F3F3F3F).to_bytes(4, "little")
        out += out[start : start + length] if state & 8 else noise
    return bytes(out)


def compress(data: bytes) -> bytes:
    """A complete raw deflate stream."""
    return bytes(deflate.deflate_compress(data, LEVEL))


def trailer(crc32: int, size_bytes: int) -> bytes:
    """How a gzip member ends."""
    return struct.pack("<II", crc32, size_bytes & 0xFFFFFFFF)


def squeeze(data: bytes) -> bytes:
    """Deflate blocks, none of them final, closed on a byte, so that a stream can follow.

    Text is stored as it is, runs of zeros (most of a tar header) become a few bits.
    """
    out = bytearray()
    position = 0
    for run in _ZERO_RUN.finditer(data):
        if run.start() > position:
            out += b"\0" if not out else b""
            out += _stored(data[position : run.start()])
        out += _zeros(run.end() - run.start())
        position = run.end()
    out += b"\0" if not out else b""
    return bytes(out + _stored(data[position:]))


def _stored(chunk: bytes) -> bytes:
    """Length and bytes of a stored block; its three type bits are the byte before it."""
    parts = [chunk[i : i + 0xFFFF] for i in range(0, len(chunk), 0xFFFF)] or [b""]
    return b"\0".join(struct.pack("<HH", len(p), len(p) ^ 0xFFFF) + p for p in parts)


# tar headers have few different runs of zeros
@cache
def _zeros(length: int) -> bytes:
    """A block of `length` zeros in fixed Huffman codes, then the type bits of a stored block."""
    bits: list[int] = [0, 1, 0]  # not final; type 1, low bit first
    zero = [0, 0, 1, 1, 0, 0, 0, 0]
    bits += zero
    left = length - 1
    while left >= 3:
        match = min(left, _LONGEST_MATCH)
        bits += _length_bits(match) + [0] * 5  # distance 1
        left -= match
    bits += zero * left
    bits += [0] * 7  # end of block
    bits += [0] * 3  # the stored block that follows
    bits += [0] * (-len(bits) % 8)
    return bytes(sum(b << i for i, b in enumerate(bits[o : o + 8])) for o in range(0, len(bits), 8))


def _length_bits(length: int) -> list[int]:
    """A match of 3 to 258 bytes in fixed Huffman codes, RFC 1951 3.2.5."""
    if length == _LONGEST_MATCH:
        return _huffman(285)
    code, base = 257, 3
    for extra_bits in (0, 0, 1, 2, 3, 4, 5):
        for _ in range(4):
            if length < base + (1 << extra_bits):
                return _huffman(code) + [(length - base) >> i & 1 for i in range(extra_bits)]
            code, base = code + 1, base + (1 << extra_bits)
    raise ValueError(length)


def _huffman(code: int) -> list[int]:
    """The fixed Huffman code of a length symbol, high bit first."""
    if code < 280:
        return [(code - 256) >> i & 1 for i in range(6, -1, -1)]
    return [(code - 280 + 0xC0) >> i & 1 for i in range(7, -1, -1)]


def inflate(chunks: Iterator[bytes], size_bytes: int, name: str) -> Iterator[bytes]:
    """Inflate one raw stream; it must end exactly where its input and its stated size end."""
    engine: Inflater = isal_zlib.decompressobj(-15)
    left = size_bytes
    for chunk in _guarded(chunks):
        while chunk:
            if engine.eof:
                raise CorruptArchive(f"{name}: bytes after the end of its deflate stream")
            try:
                # one byte more than stated is enough to know that it lies
                out = engine.decompress(chunk, min(left + 1, _INFLATE_STEP_BYTES))
            except _DamagedStream as error:
                raise CorruptArchive(f"{name}: damaged deflate stream ({error})") from error
            left -= len(out)
            if left < 0:
                raise CorruptArchive(
                    f"{name}: inflates to more than the {size_bytes} bytes it states"
                )
            if out:
                yield out
            chunk = b"" if engine.eof else engine.unconsumed_tail
    if not engine.eof or left or engine.unused_data != _GUARD:
        raise CorruptArchive(f"{name}: does not inflate to the {size_bytes} bytes it states")


def _guarded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks, the last one with the guard behind it."""
    last = b""
    for chunk in filter(None, chunks):
        yield last
        last = chunk
    yield last + _GUARD

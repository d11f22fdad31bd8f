"""Deflate streams that come out the same on every machine.

Systems have different zlibs (zlib, zlib-ng and ISA-L compress differently), so this module never
compresses with them. `squeeze`, a pure function, packs tar headers; file contents that are not yet
deflated go through libdeflate, pinned by hash and checked by `check_compressor`. Inflating gives
the same bytes everywhere, so it uses the fastest library there is (ISA-L).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from typing import cast

import deflate
from isal import isal_zlib

from pipeline.core.errors import CorruptArchive, MissingTool
from pipeline.core.model import sha256_of

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
# ISA-L reads up to eight bytes ahead: with fewer after a stream it cannot report that they are
# unused, nor that it still holds output. So there are always more.
_GUARD = b"\0" * 16
# of the probe at LEVEL with the `deflate` that lockfiles/tool pins
_PROBE_DIGEST = "sha256:88aaae9f22a238b61973a9edd1ba2f2436bc716235399ed78990c0b48602f3fb"


def check_compressor() -> None:
    """Stops before the first byte if the installed libdeflate would give other digests."""
    # copies near and far between noise: each level of libdeflate makes another stream of it
    probe, state = bytearray(range(256)), 1
    while len(probe) < 100_000:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        start, length = (state >> 9) % len(probe), 3 + (state >> 5) % (300 if state & 16 else 12)
        noise = (state & 0x3F3F3F3F).to_bytes(4, "little")
        probe += probe[start : start + length] if state & 8 else noise
    if sha256_of(compress(bytes(probe))) != _PROBE_DIGEST:
        message = "the installed `deflate` library compresses differently from the pinned one"
        hint = "Install the locked version: pip install --require-hashes -r lockfiles/tool/run.txt"
        raise MissingTool(message, hint)


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
    out, position = bytearray(), 0
    for run in _ZERO_RUN.finditer(data):
        if run.start() > position:
            out += (b"" if out else b"\0") + _stored(data[position : run.start()])
        out += _zeros(run.end() - run.start())
        position = run.end()
    return bytes(out + (b"" if out else b"\0") + _stored(data[position:]))


def _stored(chunk: bytes) -> bytes:
    """Length and bytes of a stored block; its three type bits are the byte before it."""
    parts = [chunk[i : i + 0xFFFF] for i in range(0, len(chunk), 0xFFFF)] or [b""]
    return b"\0".join(struct.pack("<HH", len(p), len(p) ^ 0xFFFF) + p for p in parts)


# tar headers have few different runs of zeros
@cache
def _zeros(length: int) -> bytes:
    """A block of `length` zeros in fixed Huffman codes, then the type bits of a stored block."""
    zero = [0, 0, 1, 1, 0, 0, 0, 0]
    bits = [0, 1, 0, *zero]  # not final; type 1, low bit first
    remaining = length - 1
    while remaining >= 3:
        match = min(remaining, _LONGEST_MATCH)
        # the symbol of a match, RFC 1951 3.2.5: four symbols for each number of extra bits
        symbol, base, extra = (285, _LONGEST_MATCH, 0) if match == _LONGEST_MATCH else (257, 3, 0)
        while match >= base + (1 << extra):
            symbol, base = symbol + 1, base + (1 << extra)
            extra = max(0, (symbol - 261) // 4)
        code, width = (symbol - 256, 7) if symbol < 280 else (symbol - 280 + 0xC0, 8)
        bits += [code >> i & 1 for i in reversed(range(width))]
        bits += [(match - base) >> i & 1 for i in range(extra)] + [0] * 5  # distance 1
        remaining -= match
    # what is shorter than a match, the end of the block, and the type of the stored one after it
    bits += zero * remaining + [0] * 7 + [0] * 3
    bits += [0] * (-len(bits) % 8)
    return bytes(sum(b << i for i, b in enumerate(bits[o : o + 8])) for o in range(0, len(bits), 8))


def inflate(chunks: Iterator[bytes], size_bytes: int, name: str) -> Iterator[bytes]:
    """Inflates one raw stream; it must end exactly where its input and its stated size end."""
    engine = isal_zlib.decompressobj(-15)
    remaining = size_bytes
    for chunk, following in pairwise(chain([b""], filter(None, chunks), [b""])):
        # the guard comes in one piece with the last chunk
        chunk += b"" if following else _GUARD
        while chunk:
            if engine.eof:
                raise CorruptArchive(f"{name}: bytes after the end of its deflate stream")
            try:
                # one byte more than stated is enough to detect that it is longer
                out = engine.decompress(chunk, min(remaining + 1, _INFLATE_STEP_BYTES))
            except _DamagedStream as error:
                raise CorruptArchive(f"{name}: damaged deflate stream ({error})") from error
            remaining -= len(out)
            if remaining < 0:
                message = f"{name}: inflates to more than the {size_bytes} bytes it states"
                raise CorruptArchive(message)
            if out:
                yield out
            chunk = b"" if engine.eof else engine.unconsumed_tail
    if not engine.eof or remaining or engine.unused_data != _GUARD:
        raise CorruptArchive(f"{name}: does not inflate to the {size_bytes} bytes it states")

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Iterator

import deflate as libdeflate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts.oci.record import Kind
from pipeline.core.errors import CorruptArchive, MissingTool
from pipeline.core.model import sha256_of
from pipeline.images.assemble import deflate
from pipeline.images.assemble.deflate import (
    FINAL_BLOCK,
    check_compressor,
    compress,
    inflate,
    squeeze,
)
from pipeline.images.assemble.layer import Entry, tar_header

RUNS = st.one_of(st.binary(max_size=60), st.integers(0, 1200).map(bytes))
TEXT = b"the same words, the same words, and then some others\n" * 400


def raw_deflate(data: bytes, level: int = 6) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def unpacked(stream: bytes) -> bytes:
    engine = zlib.decompressobj(-15)
    data = engine.decompress(stream)
    assert engine.eof
    assert not engine.unused_data
    return data


def inflated(stream: bytes, size: int, piece: int = 1 << 20) -> bytes:
    pieces = (stream[i : i + piece] for i in range(0, len(stream), piece))
    return b"".join(inflate(pieces, size, "sample"))


@given(st.lists(RUNS, max_size=8).map(b"".join))
def test_squeezed_bytes_come_back(data: bytes) -> None:
    assert unpacked(squeeze(data) + FINAL_BLOCK) == data


@given(st.lists(RUNS, min_size=1, max_size=4).map(b"".join), st.binary(max_size=200))
@settings(max_examples=50)
def test_another_stream_may_follow_squeezed_bytes(head: bytes, body: bytes) -> None:
    assert unpacked(squeeze(head) + raw_deflate(body)) == head + body


def test_every_length_of_zeros_comes_back() -> None:
    for length in range(1100):
        assert unpacked(squeeze(b"a" + bytes(length) + b"b") + FINAL_BLOCK).count(0) == length


@pytest.mark.parametrize("size", [0xFFFE, 0xFFFF, 0x10000, 0x2FFFF])
def test_bytes_longer_than_a_stored_block_come_back(size: int) -> None:
    data = b"x" * size
    assert unpacked(squeeze(data) + FINAL_BLOCK) == data


def test_a_squeezed_header_is_these_bytes_on_every_machine() -> None:
    block = tar_header(Entry("usr/bin/python3.11", Kind.FILE, 0o755), 6_831_704)
    packed = squeeze(block)
    assert len(packed) < 150
    assert sha256_of(packed) == (
        "sha256:f1e86604312fdbb9176fbeba9d1cddba4c02539416cee0499c5567bea5dce94d"
    )


def test_the_pinned_compressor_is_accepted() -> None:
    check_compressor()
    assert unpacked(compress(TEXT)) == TEXT


def test_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libdeflate, "deflate_compress", lambda data, _: raw_deflate(data))
    with pytest.raises(MissingTool, match="compresses differently"):
        check_compressor()


@pytest.mark.parametrize("level", [1, 5, 7, 9, 12])
def test_another_level_is_refused(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    monkeypatch.setattr(deflate, "LEVEL", level)
    with pytest.raises(MissingTool):
        check_compressor()


def test_a_library_that_loses_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libdeflate, "deflate_compress", lambda data, level: data[:100])
    with pytest.raises(MissingTool):
        check_compressor()


@given(st.binary(max_size=3000), st.integers(0, 9), st.integers(1, 400))
def test_any_stream_inflates_in_pieces_of_any_size(data: bytes, level: int, piece: int) -> None:
    assert inflated(raw_deflate(data, level), len(data), piece) == data


@pytest.mark.parametrize("more", [0, 1, 257, 258, 70_000, 4 << 20])
def test_bytes_that_wait_inside_the_engine_are_not_forgotten(more: int) -> None:
    data = bytes((4 << 20) + more)
    assert inflated(raw_deflate(data), len(data)) == data


def test_empty_pieces_do_not_matter() -> None:
    pieces = iter([b"", STREAM[:9], b"", STREAM[9:], b""])
    assert b"".join(inflate(pieces, len(TEXT), "sample")) == TEXT


STREAM = raw_deflate(TEXT)
DAMAGED = {
    "nothing": (b"", len(TEXT)),
    "cut": (STREAM[:-1], len(TEXT)),
    "half": (STREAM[: len(STREAM) // 2], len(TEXT)),
    "a byte after its end": (STREAM + b"\0", len(TEXT)),
    "bytes after its end": (STREAM + b"more", len(TEXT)),
    "many bytes after its end": (STREAM + bytes(64), len(TEXT)),
    "a second stream": (STREAM + STREAM, len(TEXT)),
    "states one byte less": (STREAM, len(TEXT) - 1),
    "states one byte more": (STREAM, len(TEXT) + 1),
    "states nothing": (STREAM, 0),
    "no such block type": (b"\xff" + STREAM[1:], len(TEXT)),
    "stored length lies": (b"\x01\x05\x00\x00\x00hello", 5),
    "distance too far": (raw_deflate(TEXT)[40:], len(TEXT)),
}


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(("stream", "size"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_stream_is_refused(stream: bytes, size: int, piece: int) -> None:
    with pytest.raises(CorruptArchive, match=r"^sample: "):
        inflated(stream, size, piece)


def test_a_stream_without_end_is_stopped_at_its_stated_size() -> None:
    def endless() -> Iterator[bytes]:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        while True:
            yield packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_SYNC_FLUSH)

    tracemalloc.start()
    with pytest.raises(CorruptArchive, match="more than the 1000 bytes"):
        list(inflate(endless(), 1000, "bomb"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
def test_what_follows_the_stated_size_is_never_inflated(size: int) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    good = packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH)
    bomb = packer.compress(bytes(32 << 20)) + packer.flush()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptArchive, match=f"more than the {size} bytes"):
            list(inflate(iter([good, bomb]), size, "bomb"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@given(st.integers(0, len(STREAM) - 1), st.integers(1, 255))
def test_a_flipped_byte_ends_in_our_own_error_or_other_bytes(at: int, flip: int) -> None:
    raw = bytearray(STREAM)
    raw[at] ^= flip
    try:
        assert len(inflated(bytes(raw), len(TEXT))) == len(TEXT)
    except CorruptArchive:
        return

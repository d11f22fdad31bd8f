from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.binary.fatbin import ForwardReader

DATA = bytes(range(256)) * 4


def new_reader(data: bytes, chunk_bytes: int) -> ForwardReader:
    return ForwardReader(data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes))


@given(st.integers(1, 1100), st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=12))
def test_taking_and_skipping_is_slicing_whatever_the_chunks(
    chunk_bytes: int, moves: list[tuple[bool, int]]
) -> None:
    reader, at = new_reader(DATA, chunk_bytes), 0
    for takes, n_bytes in moves:
        want = DATA[at : at + n_bytes]
        if takes:
            assert reader.take(n_bytes) == want
        else:
            assert reader.skip(n_bytes) == len(want)
        at += len(want)
        assert reader.position == at


@given(st.binary(max_size=200), st.integers(1, 220))
def test_every_needle_is_found_across_the_borders_of_chunks(noise: bytes, chunk_bytes: int) -> None:
    data = noise.replace(b"<", b"") + b"<one>" + noise.replace(b"<", b"") + b"<three>" + b"<one>"
    reader, result = new_reader(data, chunk_bytes), []
    while needle := reader.find(b"<one>", b"<three>"):
        result.append((reader.position, needle))
        reader.skip(1)
    want = [
        (i, n) for i in range(len(data)) for n in (b"<one>", b"<three>") if data.startswith(n, i)
    ]
    assert result == want
    assert reader.position == len(data)


@given(st.integers(1, 1100), st.integers(0, 1023), st.integers(0, 1100))
def test_a_range_is_kept_while_it_passes(chunk_bytes: int, offset: int, size_bytes: int) -> None:
    reader = new_reader(DATA, chunk_bytes)
    reader.keep(offset, size_bytes)
    reader.skip(len(DATA))
    assert reader.kept(offset) == DATA[offset : offset + size_bytes]


def test_a_range_that_has_passed_is_not_kept() -> None:
    reader = new_reader(DATA, 16)
    reader.skip(100)
    reader.keep(0, 50)
    reader.skip(len(DATA))
    assert reader.kept(0) == b""

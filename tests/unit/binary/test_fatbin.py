from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.binary import fatbin
from pipeline.artifacts.binary.elf import Unreadable
from pipeline.artifacts.binary.fatbin import CodeTarget, ForwardReader
from tests.unit.binary.arch_files import CUOBJDUMP, DATA, A, F, container, entry


def targets_of(data: bytes) -> list[CodeTarget]:
    return list(fatbin.fatbin_entries(ForwardReader(iter([data])), len(data)))


@pytest.mark.parametrize("name", [n for n in CUOBJDUMP if n.endswith(".fatbin")])
def test_compiled_fatbins_read_as_nvidias_tool_reads_them(name: str) -> None:
    result = targets_of((DATA / name).read_bytes())
    assert sorted(map(str, result)) == CUOBJDUMP[name]


@pytest.mark.parametrize(
    ("kind", "arch", "flags", "name"),
    [
        (2, 120, 0x11, "sm_120"),
        (2, 120, A, "sm_120a"),
        (2, 120, F | 0x8000, "sm_120f"),
        (1, 90, 0x2000, "compute_90"),
        (1, 100, F, "compute_100f"),
        (8, 75, 0, "lto_75"),
        (64, 75, 0, "kind64_75"),
    ],
)
def test_an_entry_says_kind_arch_and_variant(kind: int, arch: int, flags: int, name: str) -> None:
    assert [str(t) for t in targets_of(container(entry(arch, kind, flags)))] == [name]


def test_a_suffix_that_cannot_be_told_is_said_to_be_unknown() -> None:
    assert str(CodeTarget(fatbin.CUBIN, 120, None)) == "sm_120 (a/f unknown)"


def test_an_empty_fatbin_holds_nothing() -> None:
    assert targets_of(container()) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (container(entry(), claimed=1 << 62), "more than the file has"),
        (container(entry(), claimed=81), "more than the file has"),
        (container(entry(), claimed=79), "past the end of its fatbin"),
        (container(entry(), claimed=40), "cut off"),
        (container(entry(claimed=1 << 63)), "past the end of its fatbin"),
        (container(entry(claimed=17)), "past the end of its fatbin"),
        (container(entry(claimed=8)), "cut off"),
        (container(entry(head_bytes=0)), "unknown form"),
        (container(entry(head_bytes=63)), "unknown form"),
        (container(entry(head_bytes=0xFFFFFFFF)), "unknown form"),
        (container(entry(version=0x0102)), "unknown form"),
        (container(entry(arch=0)), "sm_0"),
        (container(entry(arch=0xFFFFFFFF)), "sm_4294967295"),
        (container(entry(flags=A | F)), "both"),
        (container(container(entry())), "unknown form"),
    ],
)
def test_a_fatbin_that_lies_is_unreadable(data: bytes, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        targets_of(data)


@pytest.mark.parametrize("length", [0, 8, 15])
def test_half_a_head_is_unreadable(length: int) -> None:
    with pytest.raises(Unreadable, match="cut off"):
        targets_of(container(entry())[:length])


def test_a_file_that_ends_inside_a_payload_is_unreadable() -> None:
    # the heads are right, the file is shorter than it is said to be
    reader = ForwardReader(iter([container(entry(claimed=100), claimed=164)]))
    with pytest.raises(Unreadable, match="past the end"):
        list(fatbin.fatbin_entries(reader, 180))


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_reader_or_keep_it_busy(noise: bytes) -> None:
    data = fatbin.MAGIC + struct.pack("<Q", len(noise)) + noise
    try:
        result = targets_of(data)
    except Unreadable:
        return
    assert len(result) <= len(noise) // 64


@given(st.data())
def test_no_flipped_bit_crashes_the_reader(data: st.DataObject) -> None:
    whole = bytearray((DATA / "lto_120.fatbin").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 200))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        result = targets_of(bytes(whole))
    except Unreadable:
        return
    assert len(result) <= len(whole) // 64

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts.binary.elf import Unreadable
from pipeline.artifacts.binary.modules import read_modules
from pipeline.core.errors import StoreDamaged
from tests.unit.binary.arch_files import (
    CUOBJDUMP,
    DATA,
    container,
    entry,
    host_object,
    modules_of,
    names_of,
    opener,
)

MIXED = (DATA / "mixed.so").read_bytes()
CUBIN = (DATA / "sm_120a.cubin").read_bytes()


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4096, 61])
@pytest.mark.parametrize("name", list(CUOBJDUMP))
def test_every_compiled_file_reads_as_nvidias_tool_reads_it(name: str, chunk_bytes: int) -> None:
    assert names_of((DATA / name).read_bytes(), chunk_bytes) == CUOBJDUMP[name]


def test_modules_are_counted_and_told_apart() -> None:
    one, other = container(entry(90)), container(entry(90), entry(120))
    result = modules_of(host_object({".nv_fatbin": one + other + one}))
    assert sorted(([str(t) for t in m], n) for m, n in result.items()) == [
        (["sm_120", "sm_90"], 1),
        (["sm_90"], 2),
    ]


def test_objects_of_another_processor_are_read_too() -> None:
    aarch64 = bytearray(MIXED)
    struct.pack_into("<H", aarch64, 18, 183)
    assert names_of(bytes(aarch64)) == CUOBJDUMP["mixed.so"]


def test_objects_for_arm64_leave_more_room_between_their_fatbins() -> None:
    one = container(entry(120))
    apart = {".nv_fatbin": one.ljust(256, b"\0") + one}
    assert sum(modules_of(host_object(apart, machine=183, alignment=256)).values()) == 2
    with pytest.raises(Unreadable, match="not a fatbin"):
        modules_of(host_object(apart, machine=183))
    further = {".nv_fatbin": one.ljust(len(one) + 264, b"\0") + one}
    with pytest.raises(Unreadable, match="not a fatbin"):
        modules_of(host_object(further, machine=183, alignment=1 << 20))


def test_fatbins_among_the_data_are_found() -> None:
    assert names_of(host_object({".rodata": b"text" * 10 + container(entry(120))})) == ["sm_120"]


def test_a_cubin_among_the_data_is_found_with_its_variant() -> None:
    assert names_of(host_object({".rodata": b"some text" + CUBIN})) == ["sm_120a"]


def test_names_far_from_the_section_headers_are_found_in_a_second_pass() -> None:
    far = host_object({".nv_fatbin": container(entry()), ".data": bytes(1 << 17)}, names_last=False)
    assert names_of(far, 5000) == ["sm_120"]


def test_what_is_only_there_to_be_linked_does_not_count_beside_what_is_linked() -> None:
    parts = {"__nv_relfatbin": container(entry(90)), ".nv_fatbin": container(entry(80))}
    assert names_of(host_object(parts)) == ["sm_80"]


def test_a_linker_script_named_so_holds_no_code() -> None:
    assert modules_of(b"/* GNU ld script */ GROUP ( libm.so.6 )") == {}


def test_several_fatbins_in_one_file_are_all_read() -> None:
    assert names_of(container(entry(90)) + container(entry(120))) == ["sm_120", "sm_90"]


def test_bytes_that_only_look_like_a_fatbin_do_no_harm_outside_its_section() -> None:
    text = {".text": container(entry(arch=7)), ".nv_fatbin": container(entry())}
    assert names_of(host_object(text)) == ["sm_120"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "neither an ELF"),
        (b"MZ" + bytes(100), "neither an ELF"),
        (b"#!/bin/sh\n", "neither an ELF"),
        (b"\x7fELF", "cut off"),
        (MIXED[:40], "cut off"),
        (MIXED[:100], "outside the file"),
        (MIXED[:-1], "outside the file"),
        (CUBIN[:100], "outside the file"),
        (container(entry()) + b"more", "other bytes follow"),
        (container(entry())[:-1], "more than the file has"),
        (host_object({".nv_fatbin": b"\0" * 80}), "not a fatbin"),
        (host_object({".nv_fatbin": container(entry())[8:] + bytes(8)}), "not a fatbin"),
        (host_object({".nv_fatbin": container(entry()) + b"x" * 80}), "not a fatbin"),
        (host_object({".nv_fatbin": bytes(80) + container(entry())}), "not a fatbin"),
        (host_object({".nv_fatbin": container(entry(arch=7))}), "sm_7"),
        (host_object({".nv_fatbin": container(entry(), claimed=1 << 40)}), "more than the file"),
        (
            host_object({".nv_fatbin": container(entry()), ".data": b"x" * 16}).replace(
                container(entry())[:16], container(entry(), claimed=96)[:16]
            ),
            "cut off|crosses",
        ),
    ],
)
def test_a_damaged_object_is_unreadable_and_says_why(data: bytes, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        modules_of(data)


def test_a_fatbin_that_swallows_the_section_of_another_is_unreadable() -> None:
    inner = container(entry(120))
    liar = container(entry(90, payload=b"", claimed=len(inner)), claimed=64 + len(inner))
    with pytest.raises(Unreadable, match="extends past the end"):
        modules_of(host_object({".rodata": liar, ".nv_fatbin": inner}))


def test_a_file_shorter_than_the_table_of_contents_says_is_unreadable() -> None:
    with pytest.raises(Unreadable):
        read_modules(opener(MIXED), len(MIXED) + 100)


@pytest.mark.parametrize("data", [MIXED, CUBIN, container(entry()), b"no object", MIXED[:50]])
def test_damage_that_shows_only_at_the_end_is_no_verdict(data: bytes) -> None:
    def damaged() -> Iterator[bytes]:
        yield data
        raise StoreDamaged("its hash is wrong")

    with pytest.raises(StoreDamaged):
        read_modules(damaged, len(data))


def test_a_fatbin_in_a_32_bit_object_is_unreadable_and_none_is_no_code() -> None:
    old = b"\x7fELF\x01\x01\x01" + bytes(60)
    assert modules_of(old) == {}
    with pytest.raises(Unreadable, match="32-bit"):
        modules_of(old + container(entry()))


ENDLESS: dict[str, Callable[[], bytes]] = {
    "entries": lambda: container(entry(payload=b"") * 200_001),
    "fatbins in a file": lambda: container(entry()) * 100_001,
    "fatbins among the data": lambda: host_object({".rodata": container(entry()) * 100_001}),
    "magic": lambda: host_object({".nv_fatbin": container(claimed=1 << 60) * 50_000}),
    "magic among the data": lambda: host_object({".data": container(claimed=1 << 60) * 200_001}),
    "objects among the data": lambda: host_object({".data": host_object({})[:64] * 200_001}),
    "sections": lambda: host_object({f".nv_fatbin\0{n}": container(entry()) for n in range(40)}),
}


@pytest.mark.share(2)  # each fills a limit of the reader: seconds
@pytest.mark.parametrize("name", list(ENDLESS))
def test_what_never_ends_is_given_up_in_bounded_time(name: str) -> None:
    data = ENDLESS[name]()
    start = time.process_time()
    with pytest.raises(Unreadable):
        modules_of(data)
    assert time.process_time() - start < 20


def test_a_large_object_is_read_in_little_memory() -> None:
    head = host_object({".nv_fatbin": container(entry())}, extra=bytes(1 << 26))
    chunks = [head[at : at + (1 << 20)] for at in range(0, len(head), 1 << 20)]

    def passing() -> Iterator[bytes]:
        yield from chunks

    tracemalloc.start()
    read_modules(passing, len(head))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_crashes_the_reader_or_invents_code(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["mixed.so", "relocatable.o", "sm_120a.cubin", "plain.so"]))
    whole = bytearray((DATA / name).read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(whole) - 8))
        whole[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        result = modules_of(bytes(whole[:cut]), data.draw(st.sampled_from([7, 1000, 1 << 20])))
    except Unreadable:
        return
    # every target takes a header of 64 bytes at least
    assert sum(times * max(len(module), 1) for module, times in result.items()) <= cut // 64


@pytest.mark.parametrize("name", ["mixed.so", "relocatable.o", "sm_120.cubin", "sm_120.fatbin"])
def test_a_cut_file_is_never_read_as_whole(name: str) -> None:
    whole = (DATA / name).read_bytes()
    for length in range(0, len(whole), 37):
        with pytest.raises(Unreadable):
            modules_of(whole[:length])

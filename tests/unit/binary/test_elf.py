from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.binary import elf
from tests.unit.binary.arch_files import DATA, host_object

PLAIN = (DATA / "plain.so").read_bytes()


def header_of(data: bytes) -> elf.ElfHeader:
    return elf.read_header(data[:64], len(data))


def changed(data: bytes, offset: int, form: str, value: int) -> bytes:
    new = bytearray(data)
    struct.pack_into(form, new, offset, value)
    return bytes(new)


def sections_of(data: bytes) -> list[elf.Section]:
    return elf.read_sections(header_of(data), lambda at, size: data[at:][:size], len(data))


def test_sections_have_their_names() -> None:
    names = [s.name for s in sections_of((DATA / "mixed.so").read_bytes())]
    assert ".nv_fatbin" in names
    assert ".nvFatBinSegment" in names


def test_a_section_without_bytes_in_the_file_may_be_larger_than_it() -> None:
    data = host_object({".data": b"x" * 8})
    kind = header_of(data).table_offset + 64 + 4
    grown = changed(changed(data, kind, "<I", 8), kind + 28, "<Q", 1 << 40)
    assert [s.size_bytes for s in sections_of(grown)][1] == 0


@pytest.mark.parametrize(
    ("offset", "form", "value", "error"),
    [
        (32, "<Q", 1 << 60, "outside the file"),
        (40, "<Q", 1 << 60, "outside the file"),
        (40, "<Q", 8, "outside the file"),
        (58, "<H", 40, "have 40 bytes"),
        (60, "<H", 0xFFFF, "outside the file"),
        (60, "<H", 0, "too many sections"),
    ],
)
def test_a_header_that_lies_is_not_believed(offset: int, form: str, value: int, error: str) -> None:
    with pytest.raises(elf.Unreadable, match=error):
        header_of(changed(PLAIN, offset, form, value))


@pytest.mark.parametrize("length", [0, 4, 16, 63])
def test_half_a_header_is_none(length: int) -> None:
    with pytest.raises(elf.Unreadable, match="cut off"):
        header_of(PLAIN[:length])


@pytest.mark.parametrize(
    ("field", "form", "value", "error"),
    [
        (24, "<Q", 1 << 50, "outside the file"),
        (32, "<Q", 1 << 50, "outside the file"),
        (0, "<I", 1 << 30, "outside the names"),
    ],
)
def test_a_section_that_lies_is_not_believed(field: int, form: str, value: int, error: str) -> None:
    at = header_of(PLAIN).table_offset + 64 + field
    with pytest.raises(elf.Unreadable, match=error):
        sections_of(changed(PLAIN, at, form, value))


def test_names_that_are_nowhere_make_it_unreadable() -> None:
    with pytest.raises(elf.Unreadable, match="names"):
        sections_of(changed(PLAIN, 62, "<H", 500))


def test_endless_names_cost_no_time() -> None:
    many, names_bytes = 60_000, 8 << 20
    header = elf.ElfHeader(62, 64, 64, many, 0, 64)
    table = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 0, names_bytes, 0, 0, 1, 0) * many
    start = time.process_time()
    sections = elf.read_sections(header, lambda at, size: table if at else b"x" * size, names_bytes)
    assert len(sections[0].name) == 64
    assert time.process_time() - start < 5


def target_of(name: str, *, notes: bool = True) -> tuple[int, str | None]:
    data = (DATA / name).read_bytes()
    return elf.cubin_target(data[:64], data[64:] if notes else b"")


@pytest.mark.parametrize(
    ("name", "arch", "suffix"),
    [
        ("sm_90.ptxas-12.8.cubin", 90, ""),
        ("sm_90a.ptxas-12.8.cubin", 90, "a"),
        ("sm_120a.ptxas-12.8.cubin", 120, "a"),
        ("sm_120.cubin", 120, ""),
        ("sm_120a.cubin", 120, "a"),
        ("sm_120f.cubin", 120, "f"),
    ],
)
def test_a_cubin_says_what_it_was_compiled_for(name: str, arch: int, suffix: str) -> None:
    assert target_of(name) == (arch, suffix)


@pytest.mark.parametrize("name", ["sm_120.cubin", "sm_120a.cubin", "sm_120f.cubin"])
def test_without_its_notes_a_new_cubin_does_not_tell_its_variant(name: str) -> None:
    assert target_of(name, notes=False) == (120, None)


def test_without_its_notes_the_flag_of_older_compilers_still_tells() -> None:
    assert target_of("sm_120a.ptxas-12.8.cubin", notes=False) == (120, "a")


def test_notes_that_contradict_each_other_tell_nothing() -> None:
    data = (DATA / "sm_120.cubin").read_bytes()
    both = data[64:] + b"-arch sm_120a " + b"-arch sm_120f "
    assert elf.cubin_target(data[:64], both) == (120, None)


def test_a_note_for_another_card_does_not_count() -> None:
    data = (DATA / "sm_120.cubin").read_bytes()
    assert elf.cubin_target(data[:64], b"-arch sm_90a ") == (120, None)


def test_a_cubin_of_an_unknown_abi_is_unreadable() -> None:
    data = bytearray((DATA / "sm_120.cubin").read_bytes())
    data[8] = 9
    with pytest.raises(elf.Unreadable, match="ABI"):
        elf.cubin_target(bytes(data[:64]), b"")


@given(st.binary(min_size=64, max_size=64), st.integers(64, 1 << 40))
def test_no_header_crashes_the_reader(noise: bytes, file_bytes: int) -> None:
    head = elf.MAGIC64 + noise[7:]
    try:
        header = elf.read_header(head, file_bytes)
    except elf.Unreadable:
        return
    assert header.end <= file_bytes


@given(st.binary(max_size=640))
def test_no_section_table_crashes_the_reader(noise: bytes) -> None:
    table = noise[: len(noise) // 64 * 64]
    header = elf.ElfHeader(62, 64, 64, len(table) // 64, 1, 0)
    # the table is asked for first, then the names
    texts = iter([table])
    try:
        result = elf.read_sections(header, lambda at, size: next(texts, b"\0" * size), 1 << 20)
    except elf.Unreadable:
        return
    assert [s.name for s in result] == [""] * header.sections


MIXED = (DATA / "mixed.so").read_bytes()


def table_of(data: bytes) -> list[bytes]:
    header = header_of(data)
    table = data[header.table_offset :][: header.table_bytes]
    return [table[i : i + 64] for i in range(0, len(table), 64)]


def with_table(data: bytes, rows: list[bytes], names_index: int) -> bytes:
    """The same file with its section headers in another order."""
    at = header_of(data).table_offset
    whole = data[:at] + b"".join(rows) + data[at + 64 * len(rows) :]
    return changed(whole, 62, "<H", names_index)


@pytest.mark.parametrize("data", [PLAIN, MIXED])
def test_section_headers_in_any_order_name_the_same_sections(data: bytes) -> None:
    rows = table_of(data)
    last = len(rows) - 1
    backwards = with_table(data, rows[::-1], last - header_of(data).names_index)
    assert sections_of(backwards) == sections_of(data)[::-1]
    names = header_of(data).names_index
    first = with_table(data, [rows[names], *rows[:names], *rows[names + 1 :]], 0)
    assert {s.name for s in sections_of(first)} == {s.name for s in sections_of(data)}


@pytest.mark.parametrize("short", [1, 63, 64, 128])
def test_a_table_shorter_than_its_header_says_is_cut_off(short: int) -> None:
    header = header_of(PLAIN)
    table = PLAIN[header.table_offset :][: header.table_bytes]
    with pytest.raises(elf.Unreadable, match="cut off"):
        elf.read_sections(header, lambda at, size: table[:-short], len(PLAIN))
    with pytest.raises(elf.Unreadable, match="cut off"):
        elf.read_sections(header, lambda at, size: table + bytes(short), len(PLAIN))


def test_what_ends_with_the_file_is_inside_and_one_byte_more_is_not() -> None:
    header = header_of(PLAIN)
    end = header.table_offset + header.table_bytes
    assert elf.read_header(PLAIN[:64], end).sections == header.sections
    with pytest.raises(elf.Unreadable, match="section headers lie outside"):
        elf.read_header(PLAIN[:64], end - 1)
    at = header.table_offset + 64
    offset = len(PLAIN) - 8
    whole = changed(
        changed(changed(PLAIN, at + 4, "<I", 1), at + 24, "<Q", offset), at + 32, "<Q", 8
    )
    assert sections_of(whole)[1].end == len(PLAIN)
    with pytest.raises(elf.Unreadable, match="a section lies outside"):
        sections_of(changed(whole, at + 32, "<Q", 9))


def test_the_end_of_what_a_header_points_at_is_the_later_of_its_two_tables() -> None:
    header = header_of(PLAIN)
    assert header.end == header.table_offset + header.table_bytes
    segments = changed(changed(PLAIN, 54, "<H", 56), 56, "<H", 1)
    late = len(PLAIN) - 56
    assert header_of(changed(segments, 32, "<Q", late)).end == len(PLAIN)
    with pytest.raises(elf.Unreadable, match="program headers lie outside"):
        header_of(changed(segments, 32, "<Q", late + 1))


def test_a_names_index_past_the_last_section_is_missing() -> None:
    count = header_of(PLAIN).sections
    with pytest.raises(elf.Unreadable, match="names of its sections are missing"):
        sections_of(changed(PLAIN, 62, "<H", count))
    with pytest.raises(elf.Unreadable, match="missing"):
        sections_of(changed(PLAIN, 62, "<H", 0xFFFF))


def test_a_name_may_be_the_last_byte_of_the_names_and_no_later() -> None:
    header = elf.ElfHeader(62, 64, 64, 1, 0, 0)

    def named(at: int) -> str:
        texts = iter([struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 0, 3, 0, 0, 1, 0), b"\0a\0"])
        return elf.read_sections(header, lambda offset, size: next(texts), 100)[0].name

    assert (named(1), named(2)) == ("a", "")
    with pytest.raises(elf.Unreadable, match="outside the names"):
        named(3)

"""Libraries with the right names and nothing behind them."""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import struct
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import GateEnvironment
from pipeline.images.gate.smem.stub_libraries import Links, make_stubs, read_links, shared_object
from tests.unit.binary.arch_files import DATA

MACHINES = {"x86_64": 62, "aarch64": 183}
SYMBOLS = [("", "_ZTI3Foo"), ("", "cuInit"), ("libcublas.so.12", "cublasCreate_v2")]


@pytest.fixture
def machine() -> int:
    if platform.machine() not in MACHINES or sys.platform != "linux":
        pytest.skip("Hollow libraries are made for Linux on x86-64 and arm64.")
    return MACHINES[platform.machine()]


def test_a_stub_library_loads_and_its_functions_fail(tmp_path: Path, machine: int) -> None:
    path = tmp_path / "libcublas.so.12"
    path.write_bytes(shared_object(path.name, SYMBOLS, machine))
    library = ctypes.CDLL(str(path))
    assert library.cublasCreate_v2() != 0
    assert library.cuInit(0) != 0
    with pytest.raises(AttributeError):
        library.cublasDestroy_v2  # noqa: B018


def test_a_type_description_knows_its_name(tmp_path: Path, machine: int) -> None:
    path = tmp_path / "libcublas.so.12"
    path.write_bytes(shared_object(path.name, SYMBOLS, machine))
    described = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(path)), "_ZTI3Foo")
    assert ctypes.string_at(described[1] or 0) == b"3Foo"


def test_symbols_have_the_version_they_are_asked_for_by(tmp_path: Path, machine: int) -> None:
    path = tmp_path / "libcublas.so.12"
    path.write_bytes(shared_object(path.name, SYMBOLS, machine))
    library = ctypes.CDLL(str(path))
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_char_p] * 2
    assert find(library._handle, b"cublasCreate_v2", b"libcublas.so.12")
    assert not find(library._handle, b"cublasCreate_v2", b"libcublas.so.13")


@pytest.mark.parametrize("machine", MACHINES.values())
def test_both_processors_get_a_library(machine: int) -> None:
    made = shared_object("libcuda.so.1", SYMBOLS, machine)
    assert made[:4] == b"\x7fELF"
    assert made[18] == machine


def test_the_same_symbols_give_the_same_bytes() -> None:
    assert shared_object("a.so", SYMBOLS, 62) == shared_object("a.so", SYMBOLS, 62)


def test_only_what_is_missing_is_written(tmp_path: Path) -> None:
    python = Path(sys.executable).resolve()
    links = read_links(python)
    if links is None or "libm.so.6" not in links.needed:
        pytest.skip("This interpreter is not linked with libm.")
    around = []
    for name in set(links.needed) - {"libm.so.6"}:
        (tmp_path / name).write_bytes(shared_object(name, [], links.machine))
        around.append(tmp_path / name)
    assert make_stubs([python], around, tmp_path / "stubs") == ["libm.so.6"]
    assert (tmp_path / "stubs" / "libm.so.6").is_file()


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + b"\0" * 99]
)
def test_a_file_that_is_no_64_bit_object_has_no_links(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.so").write_bytes(data)
    assert read_links(tmp_path / "x.so") is None
    assert read_links(tmp_path / "missing.so") is None


PLAIN = (DATA / "plain.so").read_bytes()
DYNAMIC, DYNSYM, STRTAB, VERSYM = 6, 11, 3, 0x6FFFFFFF


def rows_of(data: bytes) -> list[bytes]:
    at = struct.unpack_from("<Q", data, 40)[0]
    count = struct.unpack_from("<H", data, 60)[0]
    return [data[at + 64 * i :][:64] for i in range(count)]


def with_rows(data: bytes, rows: list[bytes]) -> bytes:
    at = struct.unpack_from("<Q", data, 40)[0]
    return data[:at] + b"".join(rows) + data[at + 64 * len(rows) :]


def with_field(kind: int, at: int, form: str, value: int) -> bytes:
    """The object with one field of the first section of a kind changed."""
    rows = rows_of(PLAIN)
    index = next(i for i, row in enumerate(rows) if struct.unpack_from("<I", row, 4)[0] == kind)
    row = bytearray(rows[index])
    struct.pack_into(form, row, at, value)
    rows[index] = bytes(row)
    return with_rows(PLAIN, rows)


def links_of(tmp_path: Path, data: bytes) -> Links | None:
    (tmp_path / "x.so").write_bytes(data)
    return read_links(tmp_path / "x.so")


@pytest.fixture
def linked() -> bytes:
    """A real library that asks others for symbols, some of them by version."""
    module = getattr(_ctypes, "__file__", None)
    if module is None or sys.platform != "linux":
        pytest.skip("This interpreter has ctypes built in.")
    return Path(module).read_bytes()


def test_section_headers_in_another_order_give_the_same_links(
    tmp_path: Path, linked: bytes
) -> None:
    rows = rows_of(linked)
    last = len(rows) - 1
    turned = []
    for row in rows[::-1]:
        link = struct.unpack_from("<I", row, 40)[0]
        turned.append(row[:40] + struct.pack("<I", last - link) + row[44:])
    whole = links_of(tmp_path, linked)
    assert whole is not None
    assert "libc.so.6" in whole.needed
    assert any(library == "libc.so.6" and version for library, version, _ in whole.wanted)
    assert links_of(tmp_path, with_rows(linked, turned)) == whole


def test_what_stands_behind_the_end_of_the_dynamic_table_is_not_read(
    tmp_path: Path, linked: bytes
) -> None:
    row = next(r for r in rows_of(linked) if struct.unpack_from("<I", r, 4)[0] == DYNAMIC)
    at = struct.unpack_from("<Q", row, 24)[0]
    ended = linked[:at] + bytes(8) + linked[at + 8 :]
    result = links_of(tmp_path, ended)
    assert result is not None
    assert result.needed == []


@pytest.mark.parametrize(
    "data",
    [
        PLAIN[: len(PLAIN) // 2],
        PLAIN[:-1],
        with_field(DYNSYM, 24, "<Q", len(PLAIN)),
        with_field(DYNSYM, 32, "<Q", 1 << 62),
        with_field(DYNSYM, 32, "<Q", 25),
        with_field(DYNSYM, 40, "<I", 9999),
        with_field(DYNAMIC, 32, "<Q", 17),
        with_field(STRTAB, 32, "<Q", 1),
        with_field(STRTAB, 24, "<Q", 1 << 63),
        PLAIN[:60] + b"\xff\xff" + PLAIN[62:],
        PLAIN[:58] + b"\x10\x00" + PLAIN[60:],
        PLAIN[:40] + b"\xff" * 8 + PLAIN[48:],
    ],
)
def test_tables_that_are_short_or_elsewhere_are_an_error_with_the_files_name(
    tmp_path: Path, data: bytes
) -> None:
    with pytest.raises(GateEnvironment, match=r"x\.so: its ELF tables are damaged"):
        links_of(tmp_path, data)

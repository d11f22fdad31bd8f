"""Libraries with the right names and nothing behind them."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import pytest

from pipeline.gate.hollow import hollow_out, read_links, shared_object

MACHINES = {"x86_64": 62, "aarch64": 183}
SYMBOLS = [("", "_ZTI3Foo"), ("", "cuInit"), ("libcublas.so.12", "cublasCreate_v2")]


@pytest.fixture
def machine() -> int:
    if platform.machine() not in MACHINES or sys.platform != "linux":
        pytest.skip("Hollow libraries are made for Linux on x86-64 and arm64.")
    return MACHINES[platform.machine()]


def test_a_hollow_library_loads_and_its_functions_fail(tmp_path: Path, machine: int) -> None:
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
    assert hollow_out([python], around, tmp_path / "hollow") == ["libm.so.6"]
    assert (tmp_path / "hollow" / "libm.so.6").is_file()


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + b"\0" * 99]
)
def test_a_file_that_is_no_64_bit_object_has_no_links(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.so").write_bytes(data)
    assert read_links(tmp_path / "x.so") is None
    assert read_links(tmp_path / "missing.so") is None

"""The checks that run inside an image, without an image."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.images.start_test.expected import DRIVER
from pipeline.images.start_test.inside import check, libraries
from pipeline.images.start_test.inside.check import CheckFailed, Row, one
from tests.unit.start_test.elf_file import write_elf


def rows_of(name: str, **wanted: Any) -> list[Row]:
    written: list[Row] = []
    one({"limit_s": 10.0, "driver": list(DRIVER), **wanted}, name, written.append)
    return [row for row in written if row[1] != "doing"]


def test_folders_that_can_be_written_to_are_left_as_they_were(tmp_path: Path) -> None:
    (row,) = rows_of("folders", folders=[str(tmp_path), str(tmp_path / "cache/deep")])
    assert row[:2] == ("folders", "passed")
    assert not any(p.is_file() for p in tmp_path.rglob("*"))


@pytest.mark.parametrize("folder", ["/proc/self/nothing/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_to_is_named_with_its_owner(folder: str) -> None:
    (row,) = rows_of("folders", folders=[folder])
    assert row[:2] == ("folders", "failed")
    assert folder in row[2]
    assert "belongs to 0:0" in row[2] or "belongs to" in row[2]


def fake_user(monkeypatch: pytest.MonkeyPatch, name: str, uid: int, home: str) -> None:
    entry = pwd.struct_passwd((name, "x", uid, uid, "", home, "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: entry)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setenv("HOME", "/home/engine")


def test_the_right_user_with_its_home_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_user(monkeypatch, "engine", 1000, "/home/engine")
    (row,) = rows_of("user", user="engine")
    assert row[1] == "passed"


@pytest.mark.parametrize(
    ("name", "uid", "home", "why"),
    [
        ("other", 1001, "/home/engine", "not as engine"),
        ("engine", 0, "/home/engine", "as root"),
        ("engine", 1000, "/root", "HOME is /home/engine"),
    ],
)
def test_a_wrong_user_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, uid: int, home: str, why: str
) -> None:
    fake_user(monkeypatch, name, uid, home)
    (row,) = rows_of("user", user="engine")
    assert row[1] == "failed"
    assert why in row[2]


def test_a_user_without_an_account_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    (row,) = rows_of("user", user="engine")
    assert row[:2] == ("user", "failed")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


MODULES = {
    "good": ("__version__ = '1.2'", "passed", "1.2"),
    "absent": ("import nobody_has_this", "failed", "No module named 'nobody_has_this'"),
    "wrong": ("1 / 0", "failed", "ZeroDivisionError"),
    "linked": ("raise ImportError('libfoo.so.1: cannot open')", "failed", "libfoo.so.1"),
    "driver": ("raise ImportError('libcuda.so.1: cannot open')", "skipped", "libcuda.so.1"),
    "nvml": ("raise OSError('libnvidia-ml.so.1: cannot open')", "skipped", "libnvidia-ml.so.1"),
}


@pytest.mark.parametrize(("text", "verdict", "message"), MODULES.values(), ids=MODULES)
def test_a_module_that_needs_more_than_the_driver_is_caught(
    modules: Path, text: str, verdict: str, message: str
) -> None:
    (modules / "planted_module.py").write_text(text)
    (row,) = rows_of("modules", modules=["planted_module"])
    assert row[:2] == ("import planted_module", verdict)
    assert message in row[2]


def test_later_modules_are_tried_after_one_that_failed(modules: Path) -> None:
    (modules / "planted_bad.py").write_text("1 / 0")
    (modules / "planted_good.py").write_text("")
    verdicts = [row[1] for row in rows_of("modules", modules=["planted_bad", "planted_good"])]
    assert verdicts == ["failed", "passed"]


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image whose Python is a library without code."""
    python = write_elf(tmp_path / "usr/bin/python3")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(libraries, "linked_files", partial(libraries.linked_files, str(tmp_path)))
    return tmp_path


def test_a_missing_library_is_caught_by_name_and_the_drivers_is_not_blamed(image: Path) -> None:
    write_elf(image / "opt/x.so", ["libcuda.so.1", "libplanted.so.1"])
    rows = rows_of("libraries", optional={})
    assert [row[:2] for row in rows] == [
        ("library libplanted.so.1", "failed"),
        ("libraries", "failed"),
    ]
    assert "opt/x.so asks for it" in rows[0][2]


def test_an_image_that_lacks_only_the_drivers_libraries_passes(image: Path) -> None:
    write_elf(image / "opt/x.so", ["libcuda.so.1", "libnvidia-ml.so.1"])
    (row,) = rows_of("libraries", optional={})
    assert row[:2] == ("libraries", "passed")
    assert "the driver brings libcuda.so.1, libnvidia-ml.so.1" in row[2]


def test_what_some_files_may_go_without_no_other_file_may(image: Path) -> None:
    write_elf(image / "opt/plugin_mpi.so", ["libmpi.so.40"])
    optional = {"*/plugin_*": "only in jobs of MPI"}
    rows = rows_of("libraries", optional=optional)
    assert [row[1] for row in rows] == ["skipped", "passed"]
    assert rows[0][2] == "only in jobs of MPI (libmpi.so.40)"
    write_elf(image / "opt/engine.so", ["libmpi.so.40"])
    rows = rows_of("libraries", optional=optional)
    assert ("library libmpi.so.40", "failed") in [row[:2] for row in rows]


def test_many_missing_libraries_are_counted(image: Path) -> None:
    write_elf(image / "opt/x.so", [f"lib{n}.so" for n in range(30)])
    rows = rows_of("libraries", optional={})
    assert len(rows) == 21
    assert rows[-1] == ("libraries", "failed", "30 are missing from the image")


def test_a_program_that_is_not_on_the_path_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = rows_of("programs", programs=["numactl", "gcc"])
    assert [row[1] for row in rows] == ["failed", "failed"]
    program.chmod(0o755)
    assert [row[1] for row in rows_of("programs", programs=["numactl"])] == ["passed"]


def answer(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]) -> None:
    def run(command: list[str], limit_s: float, cwd: str | None = None) -> str:
        Path(command[3]).write_text(json.dumps({"flags": flags}))
        return ""

    monkeypatch.setattr(check, "run", run)


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        ({"--port": {"aliases": ["-p"]}, "--model": {}, "--new": {}}, "passed"),
        ({"--port": {}, "--model": {}}, "failed"),
        ({}, "failed"),
    ],
)
def test_a_parser_must_know_what_recipes_are_checked_against(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], verdict: str
) -> None:
    answer(monkeypatch, flags)
    parser = {"arguments": ["vllm"], "flags": ["--model", "-p"], "file": "vllm.yaml"}
    (row,) = rows_of("parser", parser=parser)
    assert row[:2] == ("argument parser", verdict)


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("usage: vllm serve", "passed"),
        ("nothing of use", "failed"),
        (CheckFailed("vllm: exit code 1: RuntimeError: Failed to infer device type"), "skipped"),
        (CheckFailed("vllm: exit code 1: ImportError: libfoo.so"), "failed"),
    ],
)
def test_what_an_image_runs_by_itself_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, output: str | CheckFailed, verdict: str
) -> None:
    def run(*_: Any, **__: Any) -> str:
        if isinstance(output, CheckFailed):
            raise output
        return output

    monkeypatch.setattr(check, "run", run)
    (row,) = rows_of("command", command=["vllm", "--help"])
    assert row[:2] == ("command", verdict)


@pytest.mark.parametrize("name", ["c", "cxx", "ninja", "nvcc", "triton"])
def test_a_compiler_that_is_missing_or_fails_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def run(*_: Any) -> str:
        raise CheckFailed("gcc: No such file or directory")

    (tmp_path / "backends/nvidia/bin").mkdir(parents=True)
    (tmp_path / "backends/nvidia/bin/ptxas").write_text("")
    spec = ModuleType("triton")
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)], raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(check, "run", run)
    monkeypatch.setenv("HOME", str(tmp_path))
    (row,) = rows_of(name, arch="sm_120")
    assert row[1] == "failed"
    assert "No such file" in row[2]


def test_an_image_without_triton_or_its_ptxas_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert rows_of("triton", arch="sm_120")[0][1] == "failed"
    spec = ModuleType("triton")
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)], raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert "holds no ptxas" in rows_of("triton", arch="sm_120")[0][2]


def test_a_check_that_takes_too_long_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> str:
        raise subprocess.TimeoutExpired("vllm", 10.0)

    monkeypatch.setattr(check, "run", run)
    (row,) = rows_of("command", command=["vllm", "--help"])
    assert row == ("command", "unknown", "took longer than 10 s")


def test_every_check_has_a_title_of_its_own() -> None:
    titles = [title for title, _ in check.CHECKS.values()]
    assert len(titles) == len(set(titles))


def test_checks_run_side_by_side_and_are_told_in_their_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, later = threading.Barrier(2), threading.Event()

    def apart(_path: str, _wanted: dict[str, Any], name: str) -> list[Row]:
        both.wait(10.0)  # each waits for the other: one after the other, they would never meet
        if name == "parser":
            later.set()
        assert later.wait(10.0)
        return [(name, "passed", "x" * 1000)]

    monkeypatch.setattr(check, "_apart", apart)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    check.every("wanted.json", {"checks": ["modules", "parser"]})
    rows = [json.loads(x.removeprefix(check.MARK)) for x in capsys.readouterr().out.splitlines()]
    assert [row["check"] for row in rows] == ["modules", "parser"]
    assert {len(row["message"]) for row in rows} == {600}

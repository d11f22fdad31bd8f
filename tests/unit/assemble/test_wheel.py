from __future__ import annotations

import csv
import io
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.core.errors import CorruptArchive
from pipeline.images.assemble.layer import Deflated, Slice, with_parents, write_layer
from pipeline.images.assemble.venv import record_row, wheel_entries
from tests.makers import Part, Parts, make_wheel, record_line, record_of, wheel_parts, write_zip
from tests.unit.assemble.wheel_values import (
    GOOD,
    INFO,
    LIES,
    MODULE,
    SITE,
    VENV,
    content,
    lying,
    opened,
    placed,
    rows,
    with_points,
    written,
)


def test_files_go_below_site_packages_as_their_own_deflate_streams(tmp_path: Path) -> None:
    entries = placed(make_wheel(tmp_path, "pkg", GOOD))
    module = entries[f"{SITE}/pkg/mod.py"]
    assert isinstance(module.content, Deflated)
    assert (content(module), module.owner) == (MODULE, "pkg")
    assert f"{SITE}/{INFO}/METADATA" in entries


def test_data_folders_go_where_their_scheme_says(tmp_path: Path) -> None:
    parts = {
        "pkg-1.0.data/purelib/pkg/pure.py": b"pure",
        "pkg-1.0.data/platlib/pkg/plat.so": b"plat",
        "pkg-1.0.data/scripts/tool": b"#!/bin/sh\n",
        "pkg-1.0.data/data/share/doc.txt": b"doc",
        "pkg-1.0.data/headers/pkg.h": b"#pragma once\n",
    }
    entries = placed(make_wheel(tmp_path, "pkg", {**GOOD, **parts}))
    assert {
        f"{SITE}/pkg/pure.py",
        f"{SITE}/pkg/plat.so",
        "opt/venv/bin/tool",
        "opt/venv/share/doc.txt",
        "opt/venv/include/site/python3.11/pkg/pkg.h",
    } <= entries.keys()
    assert not any(".data/" in path for path in entries)


def test_a_data_folder_is_known_by_its_ending_as_pip_knows_it(tmp_path: Path) -> None:
    entries = placed(make_wheel(tmp_path, "pkg", {**GOOD, "Pkg-1.0.data/data/etc/x": b"1"}))
    assert "opt/venv/etc/x" in entries


def test_a_python_shebang_becomes_the_images_interpreter(tmp_path: Path) -> None:
    script = {"pkg-1.0.data/scripts/tool": b"#!python -u\nprint(1)\n"}
    entries = placed(make_wheel(tmp_path, "pkg", {**GOOD, **script}))
    tool = entries["opt/venv/bin/tool"]
    assert content(tool) == b"#!/opt/venv/bin/python\nprint(1)\n"
    assert record_row("../../../bin/tool", content(tool)) in content(
        entries[f"{SITE}/{INFO}/RECORD"]
    ).decode().splitlines(keepends=True)


@pytest.mark.parametrize("shebang", [b"#!/usr/bin/env python\n", b"#! python\n", b"\x7fELF"])
def test_any_other_script_stays_as_it_is_and_can_be_run(tmp_path: Path, shebang: bytes) -> None:
    entries = placed(make_wheel(tmp_path, "pkg", {**GOOD, "pkg-1.0.data/scripts/t": shebang}))
    assert (content(entries["opt/venv/bin/t"]), entries["opt/venv/bin/t"].mode) == (shebang, 0o755)


def test_console_scripts_are_made_with_and_without_extras(tmp_path: Path) -> None:
    text = """
[console_scripts]
plain = pkg.mod:main
extra = pkg.mod:main [fast,more]
nested=pkg.mod:App.run
[gui_scripts]
window = pkg:main
[other.group]
ignored = not even : plain
"""
    entries = placed(make_wheel(tmp_path, "pkg", with_points(text)))
    made = {path.rpartition("/")[2]: e for path, e in entries.items() if "/bin/" in path}
    assert sorted(made) == ["extra", "nested", "plain", "window"]
    assert {e.mode for e in made.values()} == {0o755}
    assert content(made["extra"]) == content(made["plain"])
    assert b"from pkg.mod import App\n" in content(made["nested"])
    assert b"sys.exit(App.run())" in content(made["nested"])


def test_a_made_script_is_python_that_calls_the_function(tmp_path: Path) -> None:
    entries = placed(
        make_wheel(tmp_path, "pkg", with_points("[console_scripts]\nx = pkg.mod:main"))
    )
    script = tmp_path / "x"
    script.write_bytes(content(entries["opt/venv/bin/x"]))
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text("def main(): return 7\n")
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 7


def test_a_shipped_script_stands_before_its_entry_point(tmp_path: Path) -> None:
    parts = {
        **with_points("[console_scripts]\nx = pkg.mod:main\n[gui_scripts]\nx = pkg:main"),
        "pkg-1.0.data/scripts/x": b"#!/bin/sh\n",
    }
    entries = wheel_entries(opened(make_wheel(tmp_path, "pkg", parts)), VENV)
    assert [content(e) for e in entries if e.path == "opt/venv/bin/x"] == [b"#!/bin/sh\n"]


def test_a_script_named_in_two_groups_is_made_once(tmp_path: Path) -> None:
    text = "[console_scripts]\nx = pkg.mod:main\n[gui_scripts]\nx = pkg:main"
    entries = wheel_entries(opened(make_wheel(tmp_path, "pkg", with_points(text))), VENV)
    assert len([e for e in entries if e.path == "opt/venv/bin/x"]) == 1


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        (0o100755, 0o755),
        (0o100711, 0o755),
        (0o100654, 0o755),
        (0o100644, 0o644),
        (0o100666, 0o644),
        (0o755, 0o644),
        (0, 0o644),
    ],
)
def test_the_executable_bit_follows_pips_rule(tmp_path: Path, mode: int, want: int) -> None:
    entries = placed(make_wheel(tmp_path, "pkg", {**GOOD, "pkg/run": Part(b"1", mode)}))
    assert entries[f"{SITE}/pkg/run"].mode == want


def test_stored_entries_are_taken_too(tmp_path: Path) -> None:
    stored = Part(MODULE, method=zipfile.ZIP_STORED)
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "pkg/stored.py": stored})
    entry = placed(wheel)[f"{SITE}/pkg/stored.py"]
    assert isinstance(entry.content, Slice)
    assert content(entry) == MODULE
    written(wheel)


def test_no_file_is_needed_that_says_who_asked_for_it(tmp_path: Path) -> None:
    entries = placed(make_wheel(tmp_path, "pkg", GOOD))
    assert f"{SITE}/{INFO}/REQUESTED" not in entries
    assert content(entries[f"{SITE}/{INFO}/INSTALLER"]) == b"sm120-pipeline\n"


def test_every_row_of_the_new_RECORD_is_true_and_sorted(tmp_path: Path) -> None:
    parts = {
        **with_points("[console_scripts]\nx = pkg.mod:main"),
        "pkg-1.0.data/scripts/tool": b"#!python\n",
        "pkg/with, comma.txt": b"1",
    }
    entries = placed(make_wheel(tmp_path, "pkg", parts))
    recorded = rows(entries)
    for path, entry in entries.items():
        row = recorded.pop(os.path.relpath(path, SITE))
        if not path.endswith("RECORD"):
            data = content(entry)
            assert row == next(csv.reader([record_line("", data)]))[1:]
    assert not recorded
    lines = content(entries[f"{SITE}/{INFO}/RECORD"]).decode().splitlines()
    assert lines == sorted(lines)


def test_other_spellings_of_the_project_are_the_same_project(tmp_path: Path) -> None:
    parts = wheel_parts("My_Pkg", "1.0", {"my_pkg.py": b"1"})
    path = write_zip(tmp_path / "my_pkg-1.0-py3-none-any.whl", parts)
    assert opened(path).project == "my-pkg"


def test_directories_and_names_in_other_scripts_are_fine(tmp_path: Path) -> None:
    parts: dict[str, bytes | Part] = {"pkg/": b"", "pkg/größe.txt": b"1", "pkg/日本.py": b"2"}
    del (whole := wheel_parts("pkg", "1.0", parts))[f"{INFO}/RECORD"]
    named = {n: p for n, p in whole.items() if not n.endswith("/")}
    whole[f"{INFO}/RECORD"] = record_of(named, f"{INFO}/RECORD").encode()
    path = write_zip(tmp_path / "pkg-1.0-py3-none-any.whl", whole)
    assert f"{SITE}/pkg/日本.py" in placed(path)
    written(path)


def test_a_wheel_known_for_its_untrue_RECORD_gets_a_true_one(tmp_path: Path) -> None:
    wheel = lying(tmp_path, LIES["wrong hash"])
    entries = wheel_entries(opened(wheel), VENV, rewrite_record=True)
    write_layer(with_parents(entries), io.BytesIO())
    recorded = rows({e.path: e for e in entries})
    assert recorded["pkg/mod.py"] == next(csv.reader([record_line("", MODULE)]))[1:]


def test_an_untrue_RECORD_is_no_excuse_for_damaged_bytes(tmp_path: Path) -> None:
    stored = {**GOOD, "pkg/mod.py": Part(MODULE, method=zipfile.ZIP_STORED)}
    wheel = lying(tmp_path, LIES["wrong hash"], stored)
    wheel.write_bytes(wheel.read_bytes().replace(MODULE, MODULE.replace(b"0", b"1", 1)))
    with pytest.raises(CorruptArchive, match="CRC is wrong"):
        wheel_entries(opened(wheel), VENV, rewrite_record=True)


PIP_POINTS = b"[console_scripts]\nhello = pkg.mod:main\nextra = pkg.mod:main [fast]\n"


def pip_tree(prefix: Path) -> dict[str, Path]:
    return {
        f"opt/venv/{path.relative_to(prefix)}": path
        for path in prefix.rglob("*")
        if path.is_file() and path.name not in ("REQUESTED", "direct_url.json")
    }


def pip_install(prefix: Path, wheels: list[Path]) -> dict[str, Path]:
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--quiet", "--no-index"]
    command += ["--no-deps", "--no-compile", "--ignore-installed", "--no-warn-script-location"]
    command += ["--disable-pip-version-check", "--prefix", str(prefix), *map(str, wheels)]
    subprocess.run(command, check=True)
    return pip_tree(prefix)


def comparable_rows(text: str, base: str) -> dict[str, list[str]]:
    """RECORD's rows, less those about files that differ for a known reason."""
    recorded = {row[0]: row[1:] for row in csv.reader(io.StringIO(text))}
    other = re.compile(r"(INSTALLER|REQUESTED|direct_url\.json|/bin/(hello|extra|tool))$")
    return {path: row for path, row in recorded.items() if not other.search(path)}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pip installs for its own version.")
def test_the_tree_is_the_one_pip_makes(tmp_path: Path) -> None:
    one: Parts = {
        "pkg/__init__.py": b"",
        "pkg/mod.py": MODULE,
        "pkg/run.sh": Part(b"#!/bin/sh\n", 0o100755),
        "pkg/stored.bin": Part(bytes(range(256)), method=zipfile.ZIP_STORED),
        "pkg/größe.txt": b"1",
        "pkg-1.0.data/purelib/pkg/pure.py": b"pure = 1\n",
        "pkg-1.0.data/scripts/tool": Part(b"#!python\nprint(1)\n", 0o100755),
        "pkg-1.0.data/data/share/pkg/doc.txt": b"doc",
        "pkg-1.0.data/headers/pkg.h": b"#pragma once\n",
        f"{INFO}/entry_points.txt": PIP_POINTS,
    }
    two: Parts = {"other.py": b"x = 1\n", "other-1.0.data/platlib/_other.so": b"\x7fELF"}
    wheels = [make_wheel(tmp_path, "pkg", one), make_wheel(tmp_path, "other", two)]
    theirs = pip_install(tmp_path / "prefix", wheels)
    ours = {path: entry for wheel in wheels for path, entry in placed(wheel).items()}
    assert ours.keys() == theirs.keys()
    for path, entry in ours.items():
        there = theirs[path]
        assert bool(entry.mode & 0o111) == bool(there.stat().st_mode & stat.S_IXUSR), path
        if path.endswith("/RECORD"):
            mine = comparable_rows(content(entry).decode(), path)
            assert mine == comparable_rows(there.read_text(encoding="utf-8"), path)
        elif path.startswith("opt/venv/bin/"):
            assert content(entry).startswith(b"#!/opt/venv/bin/python\n")
        elif not path.endswith("/INSTALLER"):
            assert content(entry) == there.read_bytes(), path

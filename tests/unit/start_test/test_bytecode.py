"""Bytecode for an emulated start: found by the image's Python, whatever the files' times are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pipeline.images.start_test.prove import BYTECODE_VARIABLE, compile_bytecode

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def make_module(root: Path, text: str, version: str = VERSION) -> Path:
    folder = root / "opt/venv/lib" / version / "site-packages"
    folder.mkdir(parents=True)
    (folder / "thing.py").write_text(text)
    return folder


def test_a_module_is_imported_from_the_bytecode_at_its_path_in_the_image(tmp_path: Path) -> None:
    folder = make_module(tmp_path / "root", "print('compiled here')\n")
    (folder / "broken.py").write_text("print 'for another Python'\n")
    made = compile_bytecode(tmp_path / "root", tmp_path / "bytecode")
    assert made is not None
    (file,) = made.rglob("thing.*.pyc")
    assert file.parent == made / "opt/venv/lib" / VERSION / "site-packages"
    # other text and another time: the bytecode is used all the same
    (folder / "thing.py").write_text("print('compiled inside')\n")
    os.utime(folder / "thing.py", (0, 0))
    prefix = made.parent / "as-if-root-were-slash"
    # the path of the image's root is none of the prefix inside; here the root is no chroot
    whole = prefix / folder.resolve().relative_to("/")
    whole.mkdir(parents=True)
    file.rename(whole / file.name)
    command = [sys.executable, "-c", "import thing"]
    env = {BYTECODE_VARIABLE: str(prefix), "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "compiled here\n"


def test_an_image_with_another_version_of_python_compiles_its_own(tmp_path: Path) -> None:
    make_module(tmp_path / "root", "x = 1\n", version="python3.9")
    assert compile_bytecode(tmp_path / "root", tmp_path / "bytecode") is None


def test_an_image_without_python_has_no_bytecode(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    assert compile_bytecode(tmp_path / "root", tmp_path / "bytecode") is None

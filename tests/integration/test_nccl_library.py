"""NCCL compiled here: it loads alone and in place of the one that torch came with.

`SM120_STORE=… pytest --big tests/integration/test_nccl_library.py`; a store that has it compiled
compiles nothing. Without a card nothing is sent: that it loads is all that is shown here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.context import host_platform
from tests.integration.built import sm120

VERSION = 22907
LOAD = """
import ctypes
number = ctypes.c_int()
assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0
print(number.value)
"""
IN_TORCH = """
import torch
print(torch.cuda.nccl.version())
print(sorted({line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line}))
"""


@pytest.fixture(scope="module")
def library(big_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as hosts get it."""
    folder = tmp_path_factory.mktemp("nccl")
    platform = ("--platform", host_platform())
    sm120(big_store, "source", "build", "nccl-sm120", "sm120", *platform)
    sm120(big_store, "source", "export", "nccl-sm120", "sm120", str(folder), *platform)
    return folder / "libnccl.so.2"


def run(code: str, **env: str) -> list[str]:
    command = [sys.executable, "-c", code]
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_it_loads_without_a_driver_and_says_its_version(library: Path) -> None:
    assert run(LOAD, LD_LIBRARY_PATH=str(library.parent)) == [str(VERSION)]


def test_its_first_line_of_output_will_name_this_build(library: Path) -> None:
    assert b"2.29.7-sm120" in library.read_bytes()


def test_it_exports_what_a_program_calls_and_nothing_of_its_own(library: Path) -> None:
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"ncclAllReduce", "ncclCommInitRankConfig", "ncclCommWindowRegister"} <= names
    assert not [name for name in names if not name.startswith(("nccl", "pnccl", "_Z"))]


def test_torch_of_the_image_vllm_takes_it_in_place_of_its_own(
    library: Path, big_store: Path
) -> None:
    """In the gate's environment of that torch: stand-ins for every NVIDIA library but this one."""
    for folder in sorted((big_store / "gate" / "environments").glob("*/facts.json")):
        facts = json.loads(folder.read_text())
        stubs = folder.parent / "stubs"
        if facts.get("torch") == "2.13.0" and stubs.is_dir():
            break
    else:
        pytest.skip("The gate has no environment of vllm yet: `sm120 gate run vllm` makes one.")
    version, mapped = run(
        IN_TORCH,
        LD_PRELOAD=str(library),
        LD_LIBRARY_PATH=str(stubs),
        PYTHONPATH=str(folder.parent / "site"),
    )
    assert version == "(2, 29, 7)"
    assert mapped == str([str(library)])

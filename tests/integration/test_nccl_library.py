"""NCCL compiled here: it loads alone and in place of the one that torch came with.

`SM120_STORE=… pytest --big tests/integration/test_nccl_library.py`; a store that has it compiled
compiles nothing. Without a card nothing is sent: who calls it is all that is shown here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.app.images import find_image
from pipeline.app.workspace import host_platform
from pipeline.artifacts.containers.backend import StepContainer, StepLimits, run_step
from pipeline.artifacts.containers.sandbox import Namespaces
from pipeline.artifacts.oci.config import read_image_config
from pipeline.artifacts.store.store import open_store
from pipeline.images.source.toolchain import unpacked
from pipeline.images.spec.checkout import Checkout
from tests.integration.built import build_image, sm120
from tests.testbed.forked import ROOT

VERSION = 22907
LOAD = """
import ctypes
number = ctypes.c_int()
assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0
print(number.value)
"""
PYTHON = "/opt/venv/bin/python"
# The library that each NCCL function of torch is bound to when it is loaded.
IN_TORCH = r"""
import os, re, subprocess, sys
code = "import torch; print(torch.cuda.nccl.version())"
env = {**os.environ, "LD_DEBUG": "bindings", "LD_BIND_NOW": "1"}
done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
print(done.stdout.strip() or done.stderr[-500:])
bound = r"binding file \S*libtorch\S* \[0\] to (\S+) \[0\]: \S+ symbol `nccl[A-Z]"
print(sorted(set(re.findall(bound, done.stderr))))
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


def test_torch_of_the_image_calls_it_in_place_of_its_own(big_store: Path) -> None:
    """By what the dynamic linker says: torch also loads the one that it came with."""
    build_image(big_store, "vllm-nccl", host_platform())
    store = open_store(big_store)
    image = find_image(Checkout(ROOT), store, "vllm-nccl", host_platform())
    variables = read_image_config(store.read_blob(image.record.config)).variables()
    lines: list[str] = []
    with store.scratch() as scratch, unpacked(store, image) as root:
        limits = StepLimits(cpus=2, memory_bytes=64 << 30, silent_s=1800.0)
        container = StepContainer(root, "", {}, variables, limits, scratch, workdir="/")
        code = run_step(Namespaces(), container, [PYTHON, "-c", IN_TORCH], lines.append)
    assert not code, lines[-5:]
    assert lines[-2] == "(2, 29, 7)"
    assert lines[-1] == "['/opt/nccl-sm120/libnccl.so.2']"

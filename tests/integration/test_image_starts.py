"""The small image proves its start for real; faults that are planted in it are caught."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.app.workspace import host_platform
from tests.integration.built import build_image, need_sandbox, run_sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.forked import ROOT

IMAGE = "llama-cpp-cpu"
_TRIPLET = {"linux/amd64": "x86_64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}
LIBRARIES = f"/usr/lib/{_TRIPLET[host_platform()]}"
PACKAGES = "/opt/venv/lib/python3.11/site-packages"
# Where a file of one line is put over what the image has there, and which tests must say so.
FAULTS: dict[str, tuple[str, set[str]]] = {
    "a missing library": (f"{LIBRARIES}/libgomp.so.1.0.0", {"library libgomp.so.1", "libraries"}),
    "a cache of root": ("/home/engine/.cache/planted", {"owners", "folders"}),
    "a missing compiler": (
        f"/usr/bin/{_TRIPLET[host_platform()]}-gcc-12",
        {"program gcc", "C compiler"},
    ),
    "missing headers": ("/usr/include/python3.11/Python.h", {"C compiler"}),
    "a module that fails": (f"{PACKAGES}/xllamacpp/__init__.py", {"import xllamacpp"}),
    "a parser that fails": ("/opt/sm120/serve.py", {"argument parser"}),
    "no certificates": ("/etc/ssl/certs/ca-certificates.crt", {"certificates"}),
}


# Faults that share an image: no fault of one of them makes a test fail that another must fail.
PLANTED = [
    ("a missing library", "a missing compiler"),
    ("a module that fails", "missing headers", "no certificates"),
]
IN_DOCKER = ("a parser that fails", "a cache of root")


def image_test(
    small_store: Path, checkout: Path, *options: str, **env: str
) -> tuple[int, dict[str, str]]:
    """How the command ends, and the verdict of each test."""
    words = ("--checkout", str(checkout), "image", "test", IMAGE, "--json", *options)
    done = run_sm120(small_store, *words, **env)
    assert done.stdout, done.stderr[-2000:]
    tests: list[dict[str, Any]] = json.loads(done.stdout)[0]["tests"]
    return done.returncode, {test["name"]: test["verdict"] for test in tests}


def failed(verdicts: dict[str, str]) -> set[str]:
    return {name for name, verdict in verdicts.items() if verdict == "failed"}


def planted(small_store: Path, place: Path, *paths: str) -> Path:
    """A checkout whose image has a file of one line at these paths, built."""
    for folder in ("images", "lockfiles"):
        shutil.copytree(ROOT / folder, place / folder)
    spec = place / "images" / IMAGE / "image.yaml"
    body = yaml.safe_load(spec.read_text())
    (spec.parent / "planted").write_text("raise ImportError('planted')\n")
    kept = [each for each in body["files"] if each["to"] not in paths]
    faults = [{"from": "planted", "to": path} for path in paths]
    spec.write_text(yaml.safe_dump({**body, "files": [*kept, *faults]}))
    words = ("--checkout", str(place), "build", IMAGE, "--platform", "host", "--accept")
    done = run_sm120(small_store, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return place


def test_a_sound_image_starts_in_namespaces_and_says_so_in_its_evidence(small_store: Path) -> None:
    need_sandbox()
    build_image(small_store, IMAGE, host_platform())
    code, verdicts = image_test(small_store, ROOT)
    assert (code, failed(verdicts)) == (0, set())
    wanted = {"user", "owners", "folders", "libraries", "C compiler", "C++ compiler"}
    assert wanted <= {name for name, verdict in verdicts.items() if verdict == "passed"}
    assert verdicts["import xllamacpp"] == verdicts["argument parser"] == "passed"
    shown = run_sm120(small_store, "verify", IMAGE)
    assert "start  valid: starts" in shown.stdout
    assert not list((small_store / "tmp").iterdir())


@pytest.mark.parametrize("faults", PLANTED, ids=" and ".join)
def test_planted_faults_are_caught_each_by_the_test_that_should(
    small_store: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    need_sandbox()
    build_image(small_store, IMAGE, host_platform())
    paths = [FAULTS[fault][0] for fault in faults]
    code, verdicts = image_test(small_store, planted(small_store, tmp_path, *paths))
    assert code == 92
    for fault in faults:
        assert FAULTS[fault][1] <= failed(verdicts), fault


def test_every_fault_is_planted_once() -> None:
    assert sorted([*(f for faults in PLANTED for f in faults), *IN_DOCKER]) == sorted(FAULTS)


def test_the_same_in_docker_with_a_sound_image_and_with_planted_faults(
    small_store: Path, tmp_path: Path, docker_daemon: DockerDaemon, is_long: bool
) -> None:
    build_image(small_store, IMAGE, host_platform())
    env = {"DOCKER_HOST": docker_daemon.socket_url}
    # whatever else is tested passes with these faults too
    if is_long:
        code, verdicts = image_test(small_store, ROOT, "--runtime", "docker", **env)
        assert (code, failed(verdicts)) == (0, set())
    checkout = planted(small_store, tmp_path, *(FAULTS[fault][0] for fault in IN_DOCKER))
    code, verdicts = image_test(small_store, checkout, "--runtime", "docker", **env)
    assert (code, failed(verdicts)) == (92, {"owners", "folders", "argument parser"})


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("image", ["vllm", "sglang"])
def test_an_engine_image_starts_without_a_gpu(big_store: Path, image: str) -> None:
    build_image(big_store, image, host_platform())
    done = run_sm120(big_store, "image", "test", image, "--platform", "host", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = {test["name"]: test["verdict"] for test in json.loads(done.stdout)[0]["tests"]}
    assert verdicts["CUDA compiler"] == verdicts["Triton's ptxas"] == "passed"
    assert verdicts["argument parser"] == verdicts["import torch"] == "passed"

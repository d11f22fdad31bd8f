"""Whose files and variables a step has: the caller's in a build, the image's own in a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers import backend
from pipeline.artifacts.containers.backend import Running, StepContainer, StepLimits, run_step
from pipeline.artifacts.containers.podman import Podman
from pipeline.core import proc
from tests.unit.docker_sdk import Asked, docker_on

LIMITS = StepLimits(cpus=2, memory_bytes=1 << 30, silent_s=60.0)
CALLER = f"{os.geteuid()}:{os.getegid()}"


def container(place: Path, user: tuple[int, int] | None) -> StepContainer:
    return StepContainer(
        root=place / "root",
        image="sm120/vllm:abc",
        mounts={"/build": place / "work"},
        env={"HOME": "/build"},
        limits=LIMITS,
        scratch=place,
        user=user,
    )


@pytest.fixture
def in_docker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Docker is asked for to run a step."""

    def run(container: StepContainer, *command: str) -> dict[str, Any]:
        asked = Asked()
        assert run_step(docker_on(asked, monkeypatch), container, command, print) == 0
        return asked.wanted

    return run


@pytest.fixture
def in_podman(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The words that start Podman to run a step."""
    started: list[list[str]] = []

    @contextmanager
    def start(words: list[str], env: object, cwd: Path) -> Iterator[Running]:
        started.append(words)
        output, into = os.pipe()
        os.close(into)
        yield Running(output, lambda: 0)
        os.close(output)

    done = subprocess.CompletedProcess([], 0, b"", b"")
    monkeypatch.setattr(proc, "read", lambda *_, **__: done)
    monkeypatch.setattr(backend, "started", start)

    def run(container: StepContainer, *command: str) -> list[str]:
        assert run_step(Podman(list), container, command, print) == 0
        return started[-1]

    return run


def test_a_build_in_docker_runs_as_the_caller_on_files_that_it_cannot_change(
    tmp_path: Path, in_docker: Any
) -> None:
    arguments = in_docker(container(tmp_path, None), "make")
    assert (arguments["read_only"], arguments["user"]) == (True, CALLER)
    assert arguments["command"] == ["/usr/bin/env", "-i", "HOME=/build", "make"]
    assert arguments["working_dir"] == "/build"


def test_a_test_in_docker_leaves_user_variables_and_files_to_the_image(
    tmp_path: Path, in_docker: Any
) -> None:
    arguments = in_docker(container(tmp_path, (1000, 1000)), "python", "check.py")
    assert arguments["command"] == ["python", "check.py"]
    assert not {"read_only", "user", "working_dir"} & arguments.keys()


@pytest.mark.parametrize("user", [None, (1000, 1000)])
def test_both_have_no_network_and_no_capabilities(
    tmp_path: Path, user: tuple[int, int] | None, in_docker: Any, in_podman: Any
) -> None:
    arguments = in_docker(container(tmp_path, user), "make")
    assert (arguments["network_mode"], arguments["cap_drop"]) == ("none", ["ALL"])
    assert arguments["security_opt"] == ["no-new-privileges"]
    flags = in_podman(container(tmp_path, user), "make")
    assert {"--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= {*flags}


def test_podman_builds_on_unpacked_files_and_tests_the_image_itself(
    tmp_path: Path, in_podman: Any
) -> None:
    building = in_podman(container(tmp_path, None))
    assert building[-5:] == ["--rootfs", f"{tmp_path}/root:O", "/usr/bin/env", "-i", "HOME=/build"]
    assert {"--read-only", f"--user={CALLER}"} <= {*building}
    testing = in_podman(container(tmp_path, (1000, 1000)))
    assert testing[-2:] == ["--pull=never", "sm120/vllm:abc"]
    assert not [flag for flag in testing if flag.startswith(("--user", "--rootfs", "--read-only"))]

"""Whose files and variables a box has: the caller's in a build, the image's own in a test of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.artifacts.containers.box import Box, Limits, Podman, _docker_arguments

LIMITS = Limits(cpus=2, memory_bytes=1 << 30, silent_s=60.0)
CALLER = f"{os.geteuid()}:{os.getegid()}"


def box(place: Path, user: tuple[int, int] | None) -> Box:
    return Box(
        root=place / "root",
        image="sm120/vllm:abc",
        mounts={"/build": place / "work"},
        env={"HOME": "/build"},
        limits=LIMITS,
        scratch=place,
        user=user,
    )


def test_a_build_in_docker_runs_as_the_caller_on_files_that_it_cannot_change(
    tmp_path: Path,
) -> None:
    arguments = _docker_arguments(box(tmp_path, None), ["make"])
    assert (arguments["read_only"], arguments["user"]) == (True, CALLER)
    assert arguments["command"] == ["/usr/bin/env", "-i", "HOME=/build", "make"]
    assert arguments["working_dir"] == "/build"


def test_a_test_in_docker_leaves_user_variables_and_files_to_the_image(tmp_path: Path) -> None:
    arguments = _docker_arguments(box(tmp_path, (1000, 1000)), ["python", "check.py"])
    assert arguments["command"] == ["python", "check.py"]
    assert not {"read_only", "user", "working_dir"} & arguments.keys()


@pytest.mark.parametrize("user", [None, (1000, 1000)])
def test_both_have_no_network_and_no_capabilities(
    tmp_path: Path, user: tuple[int, int] | None
) -> None:
    arguments = _docker_arguments(box(tmp_path, user), ["make"])
    assert (arguments["network_mode"], arguments["cap_drop"]) == ("none", ["ALL"])
    assert arguments["security_opt"] == ["no-new-privileges"]
    flags = Podman()._arguments(box(tmp_path, user), "it")
    assert {"--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= {*flags}


def test_podman_builds_on_unpacked_files_and_tests_the_image_itself(tmp_path: Path) -> None:
    building = Podman()._arguments(box(tmp_path, None), "it")
    assert building[-5:] == ["--rootfs", f"{tmp_path}/root:O", "/usr/bin/env", "-i", "HOME=/build"]
    assert {"--read-only", f"--user={CALLER}"} <= {*building}
    testing = Podman()._arguments(box(tmp_path, (1000, 1000)), "it")
    assert testing[-2:] == ["--pull=never", "sm120/vllm:abc"]
    assert not [flag for flag in testing if flag.startswith(("--user", "--rootfs", "--read-only"))]

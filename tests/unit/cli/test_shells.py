"""A command in a shell that lacks something: a stream, its folder, room for the output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.support import ROOT

SM120 = f"PYTHONPATH='{ROOT}' '{sys.executable}' -m pipeline --checkout '{ROOT}'"


def in_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of shell; {sm120} stands for the command."""
    script = line.replace("{sm120}", f"{SM120} --store '{folder}/store'")
    return subprocess.run(
        ["/bin/sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_error(closed: str, tmp_path: Path) -> None:
    done = in_shell(f"{{sm120}} recipe list {closed}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_with_closed_output_keeps_its_line_and_code(tmp_path: Path) -> None:
    done = in_shell("{sm120} recipe show no-such-recipe >&-", tmp_path)
    assert done.returncode == 41
    assert "there is no recipe 'no-such-recipe'" in done.stderr


def test_output_that_has_no_room_is_named(tmp_path: Path) -> None:
    done = in_shell("{sm120} recipe list > /dev/full", tmp_path)
    assert done.returncode == 40
    assert done.stderr.startswith("sm120: the output, or a file of this command: no space left")


def test_a_deleted_working_folder_is_named(tmp_path: Path) -> None:
    done = in_shell("mkdir gone; cd gone; rmdir ../gone; {sm120} recipe list", tmp_path)
    assert done.returncode == 40
    assert "the working folder of this shell was deleted" in done.stderr


def test_a_log_from_closed_input_is_empty(tmp_path: Path) -> None:
    done = in_shell("{sm120} doctor - <&-", tmp_path)
    assert (done.returncode, "no known issue" in done.stdout) == (0, True)

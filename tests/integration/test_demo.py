"""The demo as a user runs it: to its end, and interrupted on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.demo.breaks import BREAKS
from tests.demo.story import STORY
from tests.demo.world import NODES_STEP
from tests.testbed.forked import ROOT

pytestmark = [pytest.mark.big, pytest.mark.timeout(3600)]


@contextmanager
def demo(to: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.demo", "--output", str(to), "--json"]
    with (to.parent / "overview.txt").open("w") as overview:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=overview, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def left_running(folder: Path) -> list[str]:
    """Processes whose command line, or mounts that, name the demo's folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in (*commands, *mounts) if str(folder) in line]


def test_the_whole_story_is_told_every_break_is_noticed_and_nothing_runs_after_it(
    tmp_path: Path,
) -> None:
    to = tmp_path / "demo"
    with demo(to) as process:
        out, _ = process.communicate()
    said = (tmp_path / "overview.txt").read_text()
    assert process.returncode == 0, said[-3000:]
    result = json.loads(out)
    assert [step["title"] for step in result["steps"]] == list(STORY)
    ran = [stage for step in result["steps"] for stage in step["stages"]]
    if os.geteuid() == 0:
        assert {each["state"] for each in (*result["steps"], *ran)} == {"done"}, said[-3000:]
        # each once, although the plan was run twice
        plan = yaml.safe_load((to / "plan.yaml").read_text())["stages"]
        assert [stage["title"] for stage in ran] == list(plan)
        assert [each["broken"] for each in result["noticed"]] == list(BREAKS)
        assert [each["code"] for each in result["noticed"]] == [77, 31, 75, 80, 91]
    assert (to / "report.html").is_file()
    assert json.loads((to / "demo.json").read_text()) == result
    assert left_running(to) == []


def test_ctrl_c_among_the_nodes_leaves_nothing_running(tmp_path: Path) -> None:
    to = tmp_path / "demo"
    with demo(to) as process:
        deadline = time.monotonic() + 1800
        while NODES_STEP + "  (next" not in (tmp_path / "overview.txt").read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=180)
    assert process.returncode == 130
    assert left_running(to) == []

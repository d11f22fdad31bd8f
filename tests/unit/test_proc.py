"""Programs that threads wait for end with Ctrl-C, which reaches the main thread alone."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from pipeline.core import proc
from pipeline.core.files import on_all_cores


def test_ctrl_c_ends_the_programs_of_all_threads(tmp_path: Path) -> None:
    ended: dict[int, int] = {}

    def work(number: int) -> None:
        if number == 2:
            # as Ctrl-C, once both others run
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt
        script = f"touch {tmp_path}/{number}; exec sleep 60"
        ended[number] = proc.read(["sh", "-c", script]).returncode

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        on_all_cores(work, [2, 0, 1], proc.end_reads, jobs=3)
    assert ended == {0: -9, 1: -9}
    assert time.monotonic() - start < 30


def test_programs_that_have_ended_are_let_be() -> None:
    assert proc.read(["true"]).returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        proc.read(["sleep", "60"], timeout_s=0.1)
    proc.end_reads()
    assert proc.read(["true"]).returncode == 0

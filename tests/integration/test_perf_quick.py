"""The measurements run from their first row to the last, with files of a megabyte."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.unit.support import ROOT


@pytest.mark.big
def test_the_measurements_of_weights_run_whole() -> None:
    command = [sys.executable, "-m", "tests.perf", "--quick", "--only-weights", "--turns", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "load of the machine" in lines[0]
    rows = [[cell.strip() for cell in x.split("|")[1:-1]] for x in lines if x.startswith("|")]
    assert {len(row) for row in rows} == {9}
    # who is measured beside us, in the order of the rows
    beside = [
        "snapshot_download",
        "snapshot_download, hf cache verify",
        "hf cache verify",
        "hashlib in memory, one thread",
        "-",
    ]
    assert [row[4] for row in rows[2:]] == beside
    time_cell = re.compile(r"[\d.]+ s \([\d.]+–[\d.]+\)")
    for row in rows[2:]:
        assert row[1] == "2"
        assert all(time_cell.fullmatch(cell) for cell in row[2:4])
        if row[4] != "-":
            assert all(time_cell.fullmatch(cell) for cell in row[5:7])
            assert all(re.fullmatch(r"[\d.]+× \([\d.]+–[\d.]+\)", cell) for cell in row[7:])
    # with files of a megabyte the command's own start is all there is: hashing alone is faster
    lost = lines.index("Where we lose:")
    assert any("against hashlib in memory" in line for line in lines[lost:])
    facts = [line for line in lines if line.startswith("- ")]
    assert any("fetch, most memory" in line for line in facts)
    assert any("verify from the disk" in line for line in facts)

"""Which parts of the measurements run, and that none meets what another one left."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from pipeline.store.store import Store
from tests.perf import __main__ as perf
from tests.perf import measure
from tests.perf.dockerfile import platform_options
from tests.perf.measure import Report, run


def parts(*arguments: str) -> list[str]:
    return perf.chosen_parts(perf.read_options(arguments))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ([], list(perf.PARTS)),
        (["--no-docker"], [part for part in perf.PARTS if part != "docker"]),
        (["--only-weights"], ["weights"]),
        (["--only-bench"], ["bench"]),
        (["--only-publish", "--no-docker"], ["publish"]),
        (["--quick"], ["sources", "weights"]),
        (["--quick", "--only-weights"], ["weights"]),
    ],
)
def test_options_choose_parts(arguments: list[str], want: list[str]) -> None:
    assert parts(*arguments) == want


def test_every_part_gets_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, bool]] = []

    def litter(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
        seen.append((scratch.name, any(scratch.iterdir())))
        # the names that two parts once made in one folder
        for name in ("source", "checkout"):
            (scratch / name).mkdir()

    monkeypatch.setattr(perf, "_MEASURE", dict.fromkeys(perf.PARTS, litter))
    perf.main([])
    assert seen == [(part, False) for part in perf.PARTS]


def test_a_measurement_that_is_ended_leaves_no_folder_and_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end_it(child: subprocess.Popen[bytes]) -> tuple[int, float]:
        seen.append(child)
        signal.raise_signal(signal.SIGTERM)
        return 0, 0.0

    def measure_one(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
        (scratch / "large").touch()
        run([sys.executable, "-c", "import time; time.sleep(60)"])

    seen: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measure, "_watch", end_it)
    monkeypatch.setattr(perf, "_MEASURE", dict.fromkeys(perf.PARTS, measure_one))
    with pytest.raises(SystemExit) as ended:
        perf.main(["--only-bench"])
    assert ended.value.code == 143
    assert [child.returncode for child in seen] == [-signal.SIGTERM]
    assert not list(tmp_path.iterdir())


def test_fetching_and_verifying_share_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[Path] = []
    for name in ("measure_fetch", "measure_verify"):
        monkeypatch.setattr(perf, name, lambda report, scratch, sizes: folders.append(scratch))
    perf.measure_weights(Report(), Store(tmp_path), tmp_path, perf.read_options(["--quick"]))
    assert len(set(folders)) == 2
    assert all(folder.is_dir() and not any(folder.iterdir()) for folder in folders)


def test_pip_is_told_the_platforms_of_the_wheels_themselves() -> None:
    names = ("a-1-py3-none-any", "b-2-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64")
    wheels = [Path(f"{name}.whl") for name in names]
    both = "--platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64"
    assert platform_options(wheels) == both
    assert platform_options(wheels[:1]) == ""

"""Runs on a disk: read back, and refused where anything is not as it was written."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import DiskFull, RunInvalid
from pipeline.serving.bench.metrics import metrics_of
from pipeline.serving.bench.model import RequestRow
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.record import (
    append_rows,
    end_of_rows,
    measured_alone,
    read_request_rows,
    read_run,
    write_run,
)
from tests.unit.bench.example_run import FOLDER, example_rows, write_example


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "run")
    return tmp_path / "run"


def test_the_example_is_what_the_code_writes(tmp_path: Path) -> None:
    write_example(tmp_path)
    for name in ("bench.json", "requests.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_metrics_can_be_computed_again_from_the_requests() -> None:
    run = read_run(FOLDER)
    for trial in (trial for cell in run.cells for trial in cell.trials):
        rows = read_request_rows(FOLDER, trial.requests)
        assert metrics_of(rows, run.workload.objectives, energy_j=207.5) == trial.metrics


def test_a_run_is_named_by_its_folder_or_its_file() -> None:
    assert read_run(FOLDER) == read_run(FOLDER / "bench.json")


def test_a_changed_digit_in_a_request_is_found(folder: Path) -> None:
    requests = folder / "requests.jsonl"
    requests.write_bytes(requests.read_bytes().replace(b'"chunks":8', b'"chunks":9', 1))
    trial = read_run(folder).cells[0].trials[0]
    with pytest.raises(RunInvalid, match="other requests"):
        list(read_request_rows(folder, trial.requests))


def test_missing_requests_are_found(folder: Path) -> None:
    requests = folder / "requests.jsonl"
    requests.write_bytes(requests.read_bytes()[:-200])
    trial = read_run(folder).cells[-1].trials[-1]
    with pytest.raises(RunInvalid):
        list(read_request_rows(folder, trial.requests))
    requests.unlink()
    with pytest.raises(RunInvalid, match="cannot be read"):
        list(read_request_rows(folder, trial.requests))


def test_a_line_that_is_no_request_is_refused(folder: Path) -> None:
    requests = folder / "requests.jsonl"
    requests.write_bytes(requests.read_bytes().replace(b'"sent_s"', b'"sent_x"', 1))
    trial = read_run(folder).cells[0].trials[0]
    with pytest.raises(RunInvalid, match="not a request"):
        list(read_request_rows(folder, trial.requests))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "sm120-bench/1"}'])
def test_a_file_that_is_no_run_is_refused(folder: Path, text: str) -> None:
    (folder / "bench.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunInvalid):
        read_run(folder)


def test_an_unknown_field_is_refused(folder: Path) -> None:
    file = folder / "bench.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**value, "extra": 1}), encoding="utf-8")
    with pytest.raises(RunInvalid, match="extra"):
        read_run(folder)


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunInvalid, match="cannot be read"):
        read_run(tmp_path)


def test_what_an_interrupted_trial_left_is_overwritten(folder: Path) -> None:
    run = read_run(folder)
    end = end_of_rows(run)
    with (folder / "requests.jsonl").open("ab") as file:
        file.write(b'{"half of a line')
    lines = append_rows(folder, example_rows(1, 7), end)
    assert lines.first_byte == end
    assert [row.number for row in read_request_rows(folder, lines)] == list(range(6))
    write_run(folder, run)
    assert read_run(folder) == run


def test_of_a_trial_that_cannot_be_written_whole_nothing_stays(folder: Path) -> None:
    before = (folder / REQUESTS_FILE).read_bytes()

    def full() -> Iterator[RequestRow]:
        yield from example_rows(1, 7)
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(DiskFull):
        append_rows(folder, full(), len(before))
    assert (folder / REQUESTS_FILE).read_bytes() == before


def test_only_one_program_measures_into_a_folder(tmp_path: Path) -> None:
    with measured_alone(tmp_path / "run"):
        busy = pytest.raises(RunInvalid, match="another `sm120 bench` is measuring into it")
        with busy as refused, measured_alone(tmp_path / "run"):
            pass
        assert "--output" in refused.value.hint
        with measured_alone(tmp_path / "other"):
            pass
    with measured_alone(tmp_path / "run"):
        (tmp_path / "run" / RUN_FILE).write_text("{}")
    # a run has three files, and a lock is none of them
    assert [path.name for path in (tmp_path / "run").iterdir()] == [RUN_FILE]
    assert not (tmp_path / "other").exists()

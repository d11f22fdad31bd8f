from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.serving.report.build import report_data
from pipeline.serving.report.check import open_report
from pipeline.serving.report.from_run import read_foreign_data
from pipeline.serving.report.model import Lengths
from pipeline.serving.report.page import render_page
from tests.unit.bench.example_run import FOLDER
from tests.unit.report.reports import MADE
from tests.unit.support import ROOT, Command

RESULTS = ROOT / "tests" / "unit" / "bench" / "foreign_results"
EVERY = sorted(path.name for path in RESULTS.iterdir())


@pytest.mark.parametrize("name", EVERY)
def test_a_result_of_every_program_becomes_a_page(name: str) -> None:
    page = render_page(report_data([read_foreign_data(RESULTS / name)], [], [], made=MADE))
    assert open_report(page).problem() == ""


def test_numbers_stand_under_the_names_of_ours() -> None:
    (series,) = read_foreign_data(RESULTS / "vllm-serve.json").series
    (cell,) = series.cells
    assert (cell.concurrency, series.lengths) == (8, Lengths(input=256, output=100))
    assert (cell.mean("output_tok_s"), cell.mean("total_tok_s")) == (200.0, 712.0)
    assert cell.mean("ttft_ms.p99") == 315.0


def test_a_number_that_is_defined_otherwise_is_shown_with_the_difference() -> None:
    (series,) = read_foreign_data(RESULTS / "vllm-serve.json").series
    notes = [note for cell in series.cells for note in cell.notes]
    assert {note.kind for note in notes} == {"defined otherwise"}
    assert all(": " in note.message for note in notes)


def test_repeated_measurements_have_an_interval() -> None:
    (series,) = read_foreign_data(RESULTS / "vllm-sweep").series
    measure = series.cells[0].numbers["output_tok_s"]
    assert measure.trials == 3
    assert measure.low is not None
    assert measure.low <= measure.mean


def test_nothing_stands_behind_a_foreign_result() -> None:
    states = {link.state for link in read_foreign_data(RESULTS / "vllm-serve.json").evidence}
    assert states == {"unknown"}


def test_a_foreign_result_is_drawn_beside_a_run(sm120: Command, tmp_path: Path) -> None:
    assert sm120("report", FOLDER, RESULTS / "vllm-serve.json").code == 0
    data = open_report((tmp_path / "report.html").read_bytes()).data
    assert [run.tool for run in data.runs] == ["sm120-bench 0", "vllm bench"]
    assert [reference.name for reference in data.references] == ["kimi-k2-sm120"]


def test_a_file_of_nobody_is_refused(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert sm120("report", tmp_path / "x.json").error == "RunInvalid"


@pytest.mark.parametrize("name", EVERY)
def test_a_page_is_compared_with_a_foreign_result_that_lies_beside_it(
    sm120: Command, tmp_path: Path, name: str
) -> None:
    copy = shutil.copytree if (RESULTS / name).is_dir() else shutil.copyfile
    copy(RESULTS / name, tmp_path / name)
    assert sm120("report", name, "--output", "r.html").code == 0
    told = sm120("verify", "r.html")
    assert "numbers of the report  valid" in told.out
    assert told.error == "EvidenceIncomplete"  # nobody signs what other programs write


def test_a_foreign_result_that_is_away_or_changed_is_never_valid(
    sm120: Command, tmp_path: Path
) -> None:
    name = "vllm-serve.json"
    shutil.copyfile(RESULTS / name, tmp_path / name)
    assert sm120("report", name, "--output", "r.html").code == 0
    (tmp_path / name).write_text((tmp_path / name).read_text().replace("200", "300"))
    assert "none of the folders" in sm120("verify", "r.html").out
    (tmp_path / name).unlink()
    assert "none of the folders" in sm120("verify", "r.html").out

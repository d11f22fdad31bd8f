"""A report walked back: one changed byte anywhere is found, whoever else agrees with it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.artifacts.attest.envelope import SUFFIX, enclose
from pipeline.artifacts.attest.keys import LocalSigner, PrivateKey, make_private_key
from pipeline.core.errors import NumberChanged
from pipeline.evidence.verify.chain import VerifyContext
from pipeline.evidence.verify.evidence import beside, gather_envelopes
from pipeline.evidence.verify.runs import RunInputs, judge_report
from pipeline.evidence.verify.verdict import Node, Verdict, show, verdict_error
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.results.recompute import benchmark_statement
from pipeline.serving.report.build import report_data
from pipeline.serving.report.check import open_report
from pipeline.serving.report.from_run import NUMBERS, read_run_data
from pipeline.serving.report.markup import Markup
from pipeline.serving.report.page import render_page, report_statement
from tests.unit.bench.example_run import FOLDER
from tests.unit.verify.world import NOW, WHEN, trust_in, trusted

KEY = make_private_key()
JUDGE = VerifyContext(trust_in(trusted(KEY)), None, NOW)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A signed report beside its signed run."""
    run = tmp_path / "run"
    shutil.copytree(FOLDER, run)
    signer = LocalSigner(KEY)
    envelope = enclose(benchmark_statement(run, WHEN), [signer])
    (run / f"{RUN_FILE}{SUFFIX}").write_bytes(envelope.dump())
    data = report_data([read_run_data(run)], [], [], made="2026-05-31T08:00:00Z", title=None)
    path = tmp_path / "report.html"
    path.write_bytes(render_page(data))
    _sign(path)
    return path


def _sign(path: Path, key: PrivateKey = KEY) -> None:
    page = path.read_bytes()
    statement = report_statement(path.name, page, open_report(page).data, WHEN)
    envelope = enclose(statement, [LocalSigner(key)])
    path.with_name(f"{path.name}{SUFFIX}").write_bytes(envelope.dump())


def _judged(path: Path, behind: RunInputs | None = None) -> Node:
    return judge_report(path, gather_envelopes(beside(path)), JUDGE, behind or RunInputs(None)).node


def _all(node: Node) -> list[Node]:
    return [node, *(each for child in node.children for each in _all(child))]


def _find(node: Node, title: str) -> Node:
    found = [n for n in _all(node) if n.title.startswith(title)]
    assert found, show(node, everything=True)
    return found[0]


MEAN = "/runs/0/series/0/cells/0/numbers/output_tok_s/mean"


def _change_data(path: Path) -> None:
    """One digit of the embedded data, as an editor would change it."""
    text = path.read_text()
    new = re.sub(r'("output_tok_s":\{[^}]*"mean":)6', r"\g<1>9", text, count=1)
    assert new != text
    path.write_text(new)


def test_an_untouched_report_is_as_signed_and_its_run_is_walked(page: Path) -> None:
    node = _judged(page)
    assert _find(node, "report (").verdict is Verdict.VALID
    assert _find(node, "page").message == "every byte as signed"
    run = _find(node, "run ")
    assert _find(run, "numbers of the report").message == "as in the run"
    assert _find(run, "benchmark-run").verdict is Verdict.VALID
    # the example was served from nothing that has a digest
    assert node.verdict is Verdict.INCOMPLETE


def test_a_changed_digit_in_the_data_is_named_with_all_that_contradict_it(page: Path) -> None:
    _change_data(page)
    node = _judged(page)
    error = verdict_error(node)
    assert isinstance(error, NumberChanged)
    assert str(page) in str(error)
    assert "which was not signed" in str(error)
    assert "the page states sha256:" in _find(node, "embedded data").message
    assert "the run" in _find(_find(node, "numbers of the report"), MEAN).message


SEEN = [
    (rb"<td[^>]*>(\d)", b"9"),  # a number of a table
    (rb"<svg.*?<text[^>]*>(\d)", b"7"),  # a label of a chart
    (rb'<rect[^>]* width="(\d)', b"9"),  # a bar of a chart
    (rb"<style>()", b"*{color:red}"),
    (rb"<h1>(B)", b"b"),
]


@pytest.mark.parametrize(("place", "new"), SEEN)
def test_a_byte_that_people_see_and_that_was_changed_is_found(
    page: Path, place: bytes, new: bytes
) -> None:
    data = page.read_bytes()
    match = re.search(place, data, re.S)
    assert match
    page.write_bytes(data[: match.start(1)] + new + data[match.end(1) :])
    node = _judged(page)
    error = verdict_error(node)
    assert isinstance(error, NumberChanged)
    assert error.exit_code == 77
    assert "which was not signed" in str(error)


def test_a_page_stays_valid_where_a_later_version_draws_words_or_counts_otherwise(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serving.report.page._asset", lambda name: Markup("p{margin:1px}"))
    monkeypatch.setattr("pipeline.serving.report.build.all_references", lambda: ())
    monkeypatch.setattr("pipeline.serving.report.from_run.NUMBERS", (*NUMBERS, "energy_j"))
    node = _judged(page)
    assert _find(node, "report (").verdict is Verdict.VALID
    assert _find(node, "numbers of the report").verdict is Verdict.VALID
    assert render_page(open_report(page.read_bytes()).data) != page.read_bytes()


def test_without_a_statement_the_run_still_tells(page: Path) -> None:
    page.with_name(f"{page.name}{SUFFIX}").unlink()
    _change_data(page)
    node = _judged(page)
    assert node.verdict is Verdict.CHANGED
    assert _find(_find(node, "numbers of the report"), MEAN).own is Verdict.CHANGED


def test_a_report_signed_again_over_a_changed_number_contradicts_its_run(page: Path) -> None:
    report = open_report(page.read_bytes())
    body = report.data.model_dump(mode="json")
    body["runs"][0]["series"][0]["cells"][0]["numbers"]["output_tok_s"]["mean"] = 5816.0
    page.write_bytes(render_page(type(report.data).model_validate(body)))
    _sign(page)
    node = _judged(page)
    assert _find(node, "report (").verdict is Verdict.VALID
    assert node.verdict is Verdict.CHANGED
    assert _find(_find(node, "numbers of the report"), MEAN).own is Verdict.CHANGED


@pytest.mark.parametrize("file", [RUN_FILE, REQUESTS_FILE])
def test_a_run_that_was_changed_under_its_report_is_found(file: str, page: Path) -> None:
    path = page.parent / "run" / file
    old, new = {
        RUN_FILE: (b'"ended":"2026-11-02T08:01', b'"ended":"2026-11-02T08:02'),
        REQUESTS_FILE: (b'"chunks":8', b'"chunks":9'),
    }[file]
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    node = _judged(page)
    assert node.verdict is Verdict.CHANGED
    assert _find(node, "run ").verdict is Verdict.CHANGED


def test_a_run_that_is_not_here_is_missing_and_can_be_looked_for(page: Path) -> None:
    away = page.parent / "far" / "away" / "from"
    shutil.move(page.parent / "run", away / "here")
    node = _judged(page)
    assert _find(node, "run ").own is Verdict.INCOMPLETE
    found = _judged(page, RunInputs(None, [away]))
    assert _find(found, "numbers of the report").verdict is Verdict.VALID


def test_two_runs_of_one_name_are_each_as_in_their_run(page: Path) -> None:
    shutil.copytree(page.parent / "run", page.parent / "again")
    runs = [read_run_data(page.parent / name) for name in ("run", "again")]
    data = report_data(runs, [], [], made="2026-05-31T08:00:00Z", title=None)
    page.write_bytes(render_page(data))
    _sign(page)
    node = _judged(page)
    compared = [n for n in _all(node) if n.title == "numbers of the report"]
    assert [n.verdict for n in compared] == [Verdict.VALID, Verdict.VALID]


def test_of_two_equal_runs_the_one_that_was_named_is_shown(page: Path) -> None:
    shutil.copytree(page.parent / "run", page.parent / "mine" / "example")
    shutil.copytree(page.parent / "run", page.parent / "bak" / "example")
    shutil.rmtree(page.parent / "run")
    runs = [read_run_data(page.parent / "mine" / "example")]
    data = report_data(runs, [], [], made="2026-05-31T08:00:00Z", title=None)
    page.write_bytes(render_page(data))
    assert _find(_judged(page), str(page.parent / "mine" / "example"))
    shutil.rmtree(page.parent / "mine")
    assert _find(_judged(page), str(page.parent / "bak" / "example"))


def test_a_run_two_folders_below_is_found(page: Path) -> None:
    shutil.move(page.parent / "run", page.parent / "bench" / "example")
    assert _find(_judged(page), "numbers of the report").verdict is Verdict.VALID


def test_a_report_signed_by_a_stranger_is_broken(page: Path) -> None:
    _change_data(page)
    _sign(page, make_private_key())
    assert _judged(page).verdict is Verdict.BROKEN


def test_a_statement_about_something_else_is_broken(page: Path) -> None:
    run = page.parent / "run" / f"{RUN_FILE}{SUFFIX}"
    shutil.copy(run, page.with_name(f"{page.name}{SUFFIX}"))
    node = _judged(page)
    assert _find(node, "benchmark-run (report.html").verdict is Verdict.BROKEN


@pytest.mark.parametrize("data", [b"", b"<!doctype html>", b"\xff\xfe", b"<html></html>"])
def test_what_is_no_report_is_broken(data: bytes, page: Path) -> None:
    page.write_bytes(data)
    assert _judged(page).verdict is Verdict.BROKEN


def test_data_of_another_form_is_broken(page: Path) -> None:
    text = page.read_text()
    page.write_text(text.replace('"format":"sm120-report/1"', '"format":"sm120-report/9"', 1))
    assert _judged(page).verdict is Verdict.BROKEN
    assert json.dumps("sm120-report/9")[1:-1] in page.read_text()

"""A report that was changed: one digit anywhere is found, and its place is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ReportInvalid
from pipeline.core.model import canonical_json, sha256_of
from pipeline.serving.report.build import report_data
from pipeline.serving.report.check import check_run, json_differences, open_report
from pipeline.serving.report.from_run import read_run_data
from pipeline.serving.report.markup import is_report
from pipeline.serving.report.page import render_page
from pipeline.serving.report.redact import redact_report
from tests.unit.bench.example_run import FOLDER
from tests.unit.report.reports import MADE, of_example, published

PAGE = render_page(published("kimi-k2-sm120"))


def edited(page: bytes, change: Any, *, restate: bool) -> bytes:
    """A page whose embedded data was changed; `restate` also gives it the digest to match."""
    start = page.index(b'id="report-data"')
    begin, end = page.index(b">", start) + 1, page.index(b"</script>", start)
    value = json.loads(page[begin:end])
    before = sha256_of(canonical_json(value))
    change(value)
    data = canonical_json(value).replace(b"<", b"\\u003c")
    whole = page[:begin] + data + page[end:]
    return (
        whole.replace(before.encode(), sha256_of(canonical_json(value)).encode())
        if restate
        else whole
    )


def test_a_report_as_it_was_made_has_no_problem() -> None:
    assert open_report(PAGE).problem() == ""
    assert open_report(render_page(of_example())).problem() == ""


@pytest.mark.parametrize("at", ["made", "title", "tool"])
def test_data_that_has_another_digest_than_stated_is_found(at: str) -> None:
    def change(value: Any) -> None:
        value[at] = "2026-11-16T12:00:01Z"

    assert "the page states sha256:" in open_report(edited(PAGE, change, restate=False)).problem()
    assert open_report(edited(PAGE, change, restate=True)).problem() == ""


def test_data_without_a_digest_is_found() -> None:
    start = PAGE.index(b" data-digest=")
    page = PAGE[:start] + PAGE[PAGE.index(b">", start) :]
    assert "the page states none" in open_report(page).problem()


def test_of_two_sets_of_data_none_is_chosen() -> None:
    start = PAGE.index(b'<script type="application/json"')
    data = PAGE[start : PAGE.index(b"</script>", start) + 9]
    with pytest.raises(ReportInvalid, match="embeds 2 data"):
        open_report(PAGE.replace(data, data + data))
    with pytest.raises(ReportInvalid, match="embeds no data"):
        open_report(PAGE.replace(data, b""))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "example"))


def run_problems(page: bytes, folder: Path) -> list[tuple[str, str]]:
    return [(p.where, p.message) for p in check_run(open_report(page), 0, folder)]


def test_a_report_agrees_with_its_run(folder: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    assert run_problems(page, folder) == []


def test_a_redacted_report_still_agrees_with_its_run(folder: Path) -> None:
    data = report_data([read_run_data(folder)], [], [], made=MADE)
    page = render_page(redact_report(data, ["example-model"]))
    assert b"example-model" not in page
    assert open_report(page).problem() == ""
    assert run_problems(page, folder) == []


def _cell(value: Any) -> Any:
    return value["runs"][0]["series"][0]["cells"][0]


CELL = "/runs/0/series/0/cells/0"
LIES: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        f"{CELL}/numbers/output_tok_s/mean",
        lambda v: _cell(v)["numbers"]["output_tok_s"].update(mean=1060.0),
        "the report has 1060.0, the run 6",
    ),
    (
        f"{CELL}/numbers/output_tok_s/low",
        lambda v: _cell(v)["numbers"]["output_tok_s"].update(low=66.0),
        "the report has 66.0",
    ),
    (
        f"{CELL}/numbers/acceptance_length",
        lambda v: _cell(v)["numbers"].update(acceptance_length={"mean": 3.0}),
        "the run null",
    ),
    (f"{CELL}/notes", lambda v: _cell(v)["notes"].clear(), "the report has []"),
    (
        "/runs/0/series/0/cells/1/state",
        lambda v: v["runs"][0]["series"][0]["cells"][1].update(state="good"),
        'the run "void"',
    ),
    (
        "/runs/0/series/0/cells",
        lambda v: v["runs"][0]["series"][0]["cells"].pop(),
        "the report has 1, the run 2",
    ),
    (f"{CELL}/concurrency", lambda v: _cell(v).update(concurrency=64), "the report has 64"),
]


@pytest.mark.parametrize("is_redacted", [False, True])
@pytest.mark.parametrize(("place", "change", "reason"), LIES)
def test_a_report_that_differs_from_its_run_is_named_with_both_values(
    folder: Path, is_redacted: bool, place: str, change: Callable[[Any], Any], reason: str
) -> None:
    data = report_data([read_run_data(folder)], [], [], made=MADE)
    page = render_page(redact_report(data) if is_redacted else data)
    where, message = run_problems(edited(page, change, restate=True), folder)[0]
    assert where == place
    assert reason in message


def test_a_number_that_this_version_added_is_not_missed_in_an_older_report(folder: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    older = edited(page, lambda v: _cell(v)["numbers"].pop("itl_ms.p99"), restate=True)
    assert run_problems(older, folder) == []


def test_a_run_that_was_changed_since_is_found(folder: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    file = folder / "bench.json"
    file.write_bytes(file.read_bytes().replace(b'"open_files":65536', b'"open_files":65537'))
    assert [where for where, _ in run_problems(page, folder)] == ["/runs/0/digest"]


def test_requests_that_were_changed_since_are_found(folder: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    with (folder / "requests.jsonl").open("ab") as file:
        file.write(b"\n")
    ((where, message),) = run_problems(page, folder)
    assert (where, "9876 bytes, the run names 9875" in message) == ("/runs/0", True)


def test_a_run_that_is_gone_is_a_problem_and_no_crash(folder: Path, tmp_path: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    ((where, message),) = run_problems(page, tmp_path / "nowhere")
    assert where == "/runs/0"
    assert "cannot be read" in message


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<!doctype html><p>hello",
        b"\xff\xfe",
        b'<script type="application/json" id="report-data">{}</script>',
        b'<script type="application/json" id="report-data">' + b"[" * 10_000 + b"</script>",
        b'<script type="application/json" id="report-data">{"a":1,"a":2}</script>',
    ],
)
def test_what_is_no_report_is_refused(page: bytes) -> None:
    with pytest.raises(ReportInvalid):
        open_report(page)


def test_a_report_is_told_from_another_page() -> None:
    assert is_report(PAGE[:4096])
    assert not is_report(b"<!doctype html><html><head><title>x</title>")
    assert not is_report(b'{"format":"sm120-bench/1"}')


def test_differences_name_the_place_and_both_values() -> None:
    want, got = {"a": [1, {"b/c": 2.0}]}, {"a": [1, {"b/c": 3.0}]}
    assert json_differences(want, got) == [("/a/1/b~1c", 2.0, 3.0)]


@pytest.mark.parametrize(("want", "got"), [(1, True), ([1], [1, 2]), ({"a": 1}, {}), ("1", 1)])
def test_values_of_another_kind_or_length_differ(want: Any, got: Any) -> None:
    assert json_differences(want, got)


def test_the_same_number_written_in_two_ways_is_no_difference() -> None:
    assert json_differences({"a": 5}, {"a": 5.0}) == []

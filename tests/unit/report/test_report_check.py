"""A report that was changed: one digit anywhere is found, and its place is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ReportInvalid
from pipeline.model import canonical_json, sha256_of
from pipeline.report.build import report_data
from pipeline.report.check import check_report, check_run, open_report
from pipeline.report.from_run import read_run_data
from pipeline.report.head import is_report
from pipeline.report.page import render_page
from pipeline.report.pointer import differences, look_up, step
from pipeline.report.redact import redact
from tests.unit.bench.example_run import FOLDER
from tests.unit.report.reports import MADE, of_example, published

PAGE = render_page(published("kimi-k2-sm120"))
CELL = "/references/0/series/0/cells/4/numbers/output_tok_s/mean"


def problems(page: bytes) -> list[tuple[str, str]]:
    return [(problem.where, problem.message) for problem in check_report(open_report(page))]


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


def set_output(value: Any) -> None:
    value["references"][0]["series"][0]["cells"][4]["numbers"]["output_tok_s"]["mean"] = 1651.0


def test_a_report_as_it_was_made_has_no_problem() -> None:
    assert problems(PAGE) == []
    assert problems(render_page(of_example())) == []


def test_a_digit_changed_in_what_is_shown_is_named() -> None:
    at = PAGE.index(f'data-ref="{CELL}"'.encode())
    digit = PAGE.index(b"1,650", at)
    found = problems(PAGE[:digit] + b"1,850" + PAGE[digit + 5 :])
    assert found == [(CELL, "shows '1,850', the data has '1,650'")]


@pytest.mark.parametrize("restate", [False, True])
def test_a_digit_changed_in_the_data_is_named(restate: bool) -> None:
    found = problems(edited(PAGE, set_output, restate=restate))
    assert (CELL, "shows '1,650', the data has '1,651'") in found
    assert (CELL, "the report has 1651.0, as published it is 1650.0") in found


def test_a_digit_that_rounding_hides_is_found() -> None:
    def change(value: Any) -> None:
        value["references"][0]["series"][0]["cells"][4]["numbers"]["output_tok_s"]["mean"] = (
            1650.0001
        )

    found = problems(edited(PAGE, change, restate=True))
    assert (CELL, "the report has 1650.0001, as published it is 1650.0") in found


def test_a_finding_that_does_not_follow_is_found() -> None:
    def change(value: Any) -> None:
        value["findings"] = value["findings"][1:]

    assert any(
        where.startswith("/findings") for where, _ in problems(edited(PAGE, change, restate=True))
    )


def test_data_that_has_another_digest_than_stated_is_found() -> None:
    def change(value: Any) -> None:
        value["made"] = "2026-11-16T12:00:01Z"

    (_, shown), (_, digest) = problems(edited(PAGE, change, restate=False))
    assert shown == "shows '2026-11-16T12:00:00Z', the data has '2026-11-16T12:00:01Z'"
    assert "the page states sha256:" in digest


def test_a_point_that_was_moved_in_a_chart_is_found() -> None:
    at = PAGE.index(b'class="line"')
    start = PAGE.rindex(b'd="M', 0, at)
    moved = PAGE[: start + 4] + b"9" + PAGE[start + 5 :]
    ((where, message),) = problems(moved)
    assert where == ""
    assert re.match(
        r"the chart '.*throughput vs concurrency' has '.*M98 .*', by its data it is '.*M78 ",
        message,
    )


def test_a_digit_changed_in_a_chart_s_text_is_named_with_its_chart_and_both_values() -> None:
    text = re.search(rb"<svg.*?<text[^>]*>([0-9][0-9,]*)</text>", PAGE, re.S)
    assert text
    was = text[1].decode()
    moved = PAGE[: text.start(1)] + b"7" + PAGE[text.start(1) + 1 :]
    ((_, message),) = problems(moved)
    assert f"has {'7' + was[1:]!r}, by its data it is {was!r}; the page was made by" in message
    assert message.startswith("the chart '")


def test_a_word_changed_outside_of_the_charts_is_named_with_its_section() -> None:
    at = PAGE.index(b"output tokens", PAGE.index(b'id="definitions-h"'))
    ((_, message),) = problems(PAGE[:at] + b"input" + PAGE[at + 6 :])
    assert message.startswith("the section 'Definitions' has '")
    assert "input tokens" in message


def test_a_page_that_was_cut_or_styled_otherwise_is_found() -> None:
    ((_, cut),) = problems(PAGE[:-8])
    assert "by its data it is" in cut
    ((_, styled),) = problems(PAGE.replace(b"<style>", b"<style>*{color:red}", 1))
    assert styled.startswith("the page's head has '*{color:red}")


def test_a_place_that_is_not_in_the_data_is_found() -> None:
    wrong = PAGE.replace(CELL.encode(), CELL.replace("/4/", "/9/").encode(), 1)
    assert (
        CELL.replace("/4/", "/9/"),
        "shows '1,650', and the data has no such place",
    ) in problems(wrong)


def test_a_table_of_nobody_is_found() -> None:
    def change(value: Any) -> None:
        value["references"][0]["name"] = "my-own"

    found = problems(edited(PAGE, change, restate=True))
    assert ("/references/0", "my-own is no document that ships with this tool") in found


def numbers_in(value: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every number, with what holds it and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, dict | list):
            yield from numbers_in(each, step(at, key))
        elif isinstance(each, int | float) and not isinstance(each, bool):
            yield step(at, key), value, key


ALL_NUMBERS = [
    at for at, _, _ in numbers_in(json.loads(published("kimi-k2-sm120").model_dump_json()))
]


# some of them, evenly spread: each takes a tenth of a second
@pytest.mark.parametrize("place", ALL_NUMBERS[::9])
def test_any_number_of_the_data_that_is_changed_is_named(place: str) -> None:
    def change(value: Any) -> None:
        holder, key = next((h, k) for at, h, k in numbers_in(value) if at == place)
        holder[key] += 1

    assert place in [where for where, _ in problems(edited(PAGE, change, restate=True))]


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
    page = render_page(redact(data, ["example-model"]))
    assert b"example-model" not in page
    assert problems(page) == []
    assert run_problems(page, folder) == []


@pytest.mark.parametrize("is_redacted", [False, True])
def test_a_number_that_differs_from_the_run_is_named_with_both_values(
    folder: Path, is_redacted: bool
) -> None:
    data = report_data([read_run_data(folder)], [], [], made=MADE)
    page = render_page(redact(data) if is_redacted else data)

    def change(value: Any) -> None:
        value["runs"][0]["series"][0]["cells"][0]["numbers"]["output_tok_s"]["mean"] += 1000

    where, message = run_problems(edited(page, change, restate=True), folder)[0]
    assert where == "/runs/0/series/0/cells/0/numbers/output_tok_s/mean"
    assert message.startswith("the report has 106")


def test_a_run_that_was_changed_since_is_found(folder: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    file = folder / "bench.json"
    file.write_bytes(file.read_bytes().replace(b'"open_files":65536', b'"open_files":65537'))
    assert [where for where, _ in run_problems(page, folder)] == ["/runs/0/digest"]


def test_requests_that_were_changed_since_are_found(folder: Path) -> None:
    page = render_page(report_data([read_run_data(folder)], [], [], made=MADE))
    with (folder / "requests.jsonl").open("ab") as file:
        file.write(b"\n")
    assert [where for where, _ in run_problems(page, folder)] == ["/runs/0/requests"]


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
    assert differences(want, got) == [("/a/1/b~1c", 2.0, 3.0)]
    assert look_up(want, "/a/1/b~1c") == 2.0


@pytest.mark.parametrize(("want", "got"), [(1, True), ([1], [1, 2]), ({"a": 1}, {}), ("1", 1)])
def test_values_of_another_kind_or_length_differ(want: Any, got: Any) -> None:
    assert differences(want, got)


def test_the_same_number_written_in_two_ways_is_no_difference() -> None:
    assert differences({"a": 5}, {"a": 5.0}) == []

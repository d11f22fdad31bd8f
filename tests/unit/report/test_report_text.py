from __future__ import annotations

import csv
import io

from pipeline.serving.report.build import report_data
from pipeline.serving.report.model import AttemptRow
from pipeline.serving.report.text import render_csv, render_markdown
from pipeline.serving.serve.attempts import Attempt, Begun, Ended
from tests.unit.report.reports import DIGEST, MADE, as_data, of_example, published, sweep


def rows(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode())))


def test_csv_has_a_row_for_each_number_with_the_metric_in_full() -> None:
    found = [
        row["mean"]
        for row in rows(render_csv(published("kimi-k2-sm120")))
        if (row["series"], row["concurrency"]) == ("K2-Thinking NVFP4", "2048")
        and row["metric"] in ("output_tok_s", "total_tok_s")
    ]
    assert found == ["1650.0", "5816.0"]


def test_csv_keeps_intervals_and_void_cells() -> None:
    table = rows(render_csv(of_example()))
    output = next(row for row in table if row["metric"] == "output_tok_s")
    assert float(output["low"]) < float(output["mean"]) < float(output["high"])
    assert [row["state"] for row in table if row["cell"] == "c2"] == ["void"]


def test_no_text_of_a_run_is_a_formula_in_a_spreadsheet() -> None:
    run = as_data(sweep(1)).model_copy(update={"name": "=1+1"})
    data = report_data([run], [], [], made=MADE)
    assert rows(render_csv(data))[0]["source"] == "'=1+1"


def test_markdown_has_the_table_of_the_document() -> None:
    text = render_markdown(published("kimi-k2-sm120")).decode()
    assert "| 2,048 | 1,650 | 5,816 | 3,507 | 1.74 | 12,406 | 576 |" in text
    assert "| 6 | K2.5 INT4 | Main + SM120 Patch | SUCCESS | 985 tok/s peak |" in text


def test_text_of_a_run_cannot_break_out_of_a_markdown_table() -> None:
    run = as_data(sweep(1)).model_copy(update={"title": "a | b\n# <b>c</b> [x](http://y)"})
    text = render_markdown(report_data([run], [], [], made=MADE)).decode()
    assert "## a \\| b \\# \\<b\\>c\\</b\\> \\[x\\](http://y)" in text


def attempt(outcome: str, failure: str = "", recipe: str = "tiny-cpu") -> Attempt:
    name = "20261116T120000-abcdef"
    begun = Begun(id=name, kind="serve", recipe=recipe, recipe_digest=DIGEST, at=MADE)
    end = {"id": name, "outcome": outcome, "failure": failure, "seconds": 2.5, "at": MADE}
    return Attempt(begun, (Ended.model_validate(end),))


def shown_attempts(*tried: Attempt) -> list[AttemptRow]:
    run = as_data(sweep(1))
    series = [each.model_copy(update={"recipe": "tiny-cpu"}) for each in run.series]
    measured = run.model_copy(update={"series": series})
    return report_data([measured], [], tried, made=MADE).attempts


def test_a_failed_attempt_is_shown_with_its_reason() -> None:
    row, good = shown_attempts(attempt("failed", "out of memory"), attempt("serving"))
    assert (row.is_good, row.outcome, row.message) == (False, "failed", "out of memory")
    assert good.is_good


def test_only_attempts_of_measured_recipes_are_shown() -> None:
    rows = shown_attempts(attempt("failed"), attempt("failed", recipe="other"))
    assert [row.model for row in rows] == ["tiny-cpu"]


def test_two_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    first = as_data(sweep(1))
    second = first.model_copy(update={"file": "evening/bench.json"})
    data = report_data([first, second], [], [], made=MADE)
    assert [run.series[0].name for run in data.runs] == [
        "example-model (run)",
        "example-model (evening)",
    ]

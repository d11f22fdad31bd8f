from __future__ import annotations

from pipeline.serving.bench.model import Mark
from pipeline.serving.report.build import named_reference, report_data
from pipeline.serving.report.findings import _is_apart
from pipeline.serving.report.model import (
    Lengths,
    Measure,
    ReportCell,
    ReportFinding,
    RunData,
    Series,
)
from tests.unit.report.reports import MADE, as_data, of_example, published, sweep


def told(findings: list[ReportFinding], kind: str) -> list[str]:
    return [f"{f.about}: {f.sentence()}" for f in findings if f.kind == kind]


def test_a_headline_of_total_throughput_that_does_not_say_so_is_flagged() -> None:
    flags = told(published("kimi-k2-sm120").findings, "flag")
    assert flags[0] == (
        "K2-Thinking NVFP4: The headline 5,816 tok/s, printed as “Peak tok/s (K2-Thinking)”, is"
        " total throughput: input and output tokens together, at concurrency 2,048. Output"
        " throughput there was 1,650 tok/s. The largest peak over one second in its table is 4,941"
        " tok/s, at concurrency 1,024."
    )
    assert flags[1].startswith("K2.5 INT4: The headline 985 tok/s")


def test_a_headline_that_says_total_is_not_flagged() -> None:
    flags = told(published("kimi-k26-b200").findings, "flag")
    assert not any("7,046" in flag for flag in flags)
    assert not any("1,408" in flag for flag in flags)


def test_speed_per_user_that_includes_waiting_is_flagged() -> None:
    flags = told(published("kimi-k26-b200").findings, "flag")
    assert any("divided by 32 requests" in flag and "47.3 tok/s" in flag for flag in flags)


def test_a_load_that_was_never_reached_is_flagged() -> None:
    flags = told(published("kimi-k2-sm120").findings, "flag")
    assert any("At concurrency 2,048 only 1,146 requests were under way" in f for f in flags)


def test_rows_of_other_lengths_than_stated_are_flagged() -> None:
    flags = told(published("kimi-k2-sm120").findings, "flag")
    assert [f for f in flags if "not every row" in f] == [
        "K2.5 INT4: Total is 3.43 to 4.16 times output in the rows, where 256 input and 100 output"
        " tokens give 3.56: not every row had these lengths."
    ]


def test_the_advice_is_where_more_load_brings_only_waiting() -> None:
    advice = told(published("kimi-k2-sm120").findings, "advice")
    assert advice[0] == (
        "K2-Thinking NVFP4: Stay at concurrency 1,024 or below: 2,048 changes output by 2.5 % and"
        " makes the first token take 3.5 times as long."
    )


def test_idle_memory_is_counted_in_tokens() -> None:
    facts = told(published("kimi-k2-sm120").findings, "fact")
    assert any("19.71 GB" in fact and "300,775 tokens" in fact for fact in facts)


def test_a_void_cell_is_flagged_with_its_reason_and_has_no_number() -> None:
    data = of_example()
    assert data.runs[0].series[0].cells[1].numbers == {}
    assert "example-model: c2 counts for nothing: 1 of 6 requests failed: lost" in told(
        data.findings, "flag"
    )


def test_a_mark_of_many_cells_is_said_once() -> None:
    limited = Mark(kind="client-limited", message="the client was the limit")
    data = report_data([as_data(sweep(1, 2, 3, marks=(limited,)))], [], [], made=MADE)
    assert told(data.findings, "flag") == [
        "example-model: client-limited, c1 (and 2 more cells): the client was the limit"
    ]


def test_a_good_run_has_no_flags() -> None:
    data = report_data([as_data(sweep(1, 2))], [], [], made=MADE)
    assert told(data.findings, "flag") == []


def series(*cells: tuple[int, float, float]) -> Series:
    """Cells of concurrency, output and TTFT."""
    made = [
        ReportCell(
            name=f"c{c}",
            concurrency=c,
            numbers={"output_tok_s": Measure(mean=o), "ttft_ms.mean": Measure(mean=t)},
        )
        for c, o, t in cells
    ]
    return Series(
        name="s", model="m", workload="w", lengths=Lengths(input=256, output=100), cells=made
    )


def run_of(each: Series) -> RunData:
    return as_data(sweep(1)).model_copy(update={"series": [each]})


def test_no_advice_where_more_load_still_brings_more() -> None:
    run = run_of(series((1, 10, 50), (2, 19, 100)))
    assert told(report_data([run], [], [], made=MADE).findings, "advice") == []


def test_no_advice_where_users_do_not_wait_longer() -> None:
    run = run_of(series((1, 10, 50), (2, 10.1, 55)))
    assert told(report_data([run], [], [], made=MADE).findings, "advice") == []


def test_a_run_is_told_beside_a_document_only_at_the_same_load() -> None:
    kimi = named_reference("kimi-k2-sm120")
    beside = report_data([run_of(series((128, 600, 50)))], [kimi], [], made=MADE)
    facts = told(beside.findings, "fact")
    assert any(
        "At concurrency 128: 600 tok/s output, where K2-Thinking NVFP4 states 524" in f
        for f in facts
    )
    alone = report_data([run_of(series((100, 600, 50)))], [kimi], [], made=MADE)
    assert not any("where K2-Thinking" in f for f in told(alone.findings, "fact"))


def test_what_is_wrong_stands_first() -> None:
    kinds = [finding.kind for finding in published("kimi-k2-sm120").findings]
    assert kinds == sorted(kinds, key=["flag", "fact", "advice"].index)


def _noisy(mean: float, half: float) -> Measure:
    return Measure(mean=mean, low=mean - half, high=mean + half, trials=3)


def _advice(output: tuple[float, float], half: float) -> list[str]:
    cells = [
        ReportCell(
            name=f"c{load}",
            concurrency=load,
            numbers={"output_tok_s": _noisy(tok_s, half), "ttft_ms.mean": _noisy(ttft, ttft / 50)},
        )
        for load, tok_s, ttft in ((1, output[0], 100.0), (2, output[1], 300.0))
    ]
    run = as_data(sweep(1))
    series = run.series[0].model_copy(update={"cells": cells})
    data = report_data([run.model_copy(update={"series": [series]})], [], [], made=MADE)
    return told(data.findings, "advice")


def test_nothing_is_recommended_from_noise() -> None:
    assert "Stay at concurrency 1" in _advice((100.0, 50.0), 5.0)[0]
    assert _advice((100.0, 50.0), 60.0) == []


def test_one_trial_recommends_nothing() -> None:
    assert _advice((100.0, 50.0), 0.0) != []
    cell = Measure(mean=100.0, trials=1)
    apart = ReportCell(name="a", numbers={"ttft_ms.mean": cell})
    assert not _is_apart(apart, apart, "ttft_ms.mean")

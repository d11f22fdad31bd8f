from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from pipeline.serving.report.build import report_data
from pipeline.serving.report.check import open_report
from pipeline.serving.report.model import Measure, ReportData
from pipeline.serving.report.page import render_page
from tests.unit.report.reports import MADE, as_data, of_example, published, sweep


class Page(HTMLParser):
    """Elements, and whether every one is closed."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


KIMI = published("kimi-k2-sm120")


def test_every_element_is_closed_and_every_id_is_there_once() -> None:
    page = Page(render_page(published("kimi-k2-sm120", "kimi-k26-b200", "kimi-k26-ik-llama")))
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing_and_forbids_it_too() -> None:
    text = render_page(KIMI).decode()
    assert not re.search(r"(?i)(src|href)=\"(?!#|data:,\")", text)
    assert not re.search(r"(?i)url\(|@import|fetch\(|XMLHttpRequest", text)
    policies = [a for a in Page(text.encode()).named("meta") if "http-equiv" in a]
    assert "default-src 'none'" in (policies[0]["content"] or "")
    assert "unsafe" not in (policies[0]["content"] or "")


def test_no_element_has_a_style_of_its_own_for_the_policy_forbids_it() -> None:
    tags = Page(render_page(KIMI)).tags
    assert not any("style" in attributes or "onclick" in attributes for _, attributes in tags)


def test_a_page_of_published_tables_stays_small() -> None:
    assert len(render_page(KIMI)) < 150_000


def test_the_same_data_gives_the_same_bytes() -> None:
    assert render_page(KIMI) == render_page(ReportData.model_validate(KIMI.model_dump()))


def test_the_tables_of_the_document_are_shown() -> None:
    rows = re.findall(r"<tr><th [^>]*>2,048</th>(.*?)</tr>", render_page(KIMI).decode())
    assert re.findall(r">([\d,.]+)<", rows[0])[:2] == ["1,650", "5,816"]
    assert any("12,406" in row for row in rows)


def test_everything_that_the_document_drew_is_drawn() -> None:
    titles = re.findall(r"<h4>(.*?)</h4>", render_page(KIMI).decode())
    assert titles == [
        "K2-Thinking NVFP4: throughput vs concurrency",
        "K2.5 INT4: throughput vs concurrency",
        "Output throughput vs concurrency",
        "Total throughput vs concurrency",
        "Time to first token vs concurrency",
        "Time per output token vs concurrency",
        "Speed for a user against speed of the box",
        "Memory per GPU",
    ]


def test_throughput_always_says_output_or_total() -> None:
    page = Page(render_page(published("kimi-k2-sm120", "kimi-k26-b200")))
    heads = re.findall(r"<th [^>]*>([^<]*tok/s[^<]*)</th>", render_page(KIMI).decode())
    assert heads
    for head in heads:
        assert re.search(r"Output|Total|output", head), head
    assert page.text


def test_a_headline_that_was_flagged_shows_output_first() -> None:
    text = render_page(KIMI).decode()
    card = text[text.index('class="card flagged"') :]
    assert re.search(r"<b>1,650</b><p>tok/s output", card)
    assert "5,816" in card[:1500]


def test_a_run_with_a_void_cell_shows_it_without_numbers() -> None:
    text = render_page(of_example()).decode()
    assert '<tr class="void">' in text
    assert "1 of 6 requests failed: lost" in text


def test_charts_compare_only_what_had_the_same_lengths() -> None:
    run = as_data(sweep(1, 2, 4))
    data = report_data([run], published("kimi-k2-sm120").references, [], made=MADE)
    groups = re.findall(r"<h3>(\d[^<]*tokens)</h3>", render_page(data).decode())
    assert groups == ["32 input, 8 output tokens", "256 input, 100 output tokens"]


@pytest.mark.parametrize(
    "name",
    ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "{0} {9} {x}", "a|b`c"],
)
def test_text_of_a_run_stays_text(name: str) -> None:
    run = as_data(sweep(1, 2, 4))
    series = run.series[0].model_copy(update={"name": name, "model": name})
    hostile = run.model_copy(update={"name": name, "title": name, "series": [series]})
    page = render_page(report_data([hostile], [], [], made=MADE))
    assert Page(page).open == []
    assert len(Page(page).named("script")) == 2
    assert Page(page).named("img") == []
    assert open_report(page).problem() == ""


def test_every_table_has_a_caption_and_heads_for_its_columns_and_rows() -> None:
    text = render_page(KIMI).decode()
    assert text.count("<table") == text.count("<caption>")
    assert 'scope="col"' in text
    assert 'scope="row"' in text


def test_a_report_without_memory_or_attempts_has_no_empty_parts() -> None:
    text = render_page(published("kimi-k26-b200")).decode()
    assert 'id="memory"' not in text
    assert 'id="attempts"' not in text


def by_rate() -> ReportData:
    """A sweep of request rates under one cap of concurrency."""
    run = as_data(sweep(1, 2, 4))
    cells = [
        cell.model_copy(update={"name": f"r{rate}", "rate_per_s": rate, "concurrency": 64})
        for cell, rate in zip(run.series[0].cells, (0.5, 1.0, 2.0), strict=True)
    ]
    series = run.series[0].model_copy(update={"cells": cells})
    return report_data([run.model_copy(update={"series": [series]})], [], [], made=MADE)


def test_a_sweep_of_rates_is_drawn_over_its_rates() -> None:
    page = render_page(by_rate())
    titles = re.findall(r"<h4>(.*?)</h4>", page.decode())
    assert titles[0] == "example-model: throughput vs requests/s sent"
    heads = re.findall(r'<th class="n" scope="row">([^<]*)</th>', page.decode())
    assert (heads[0], heads[2]) == ("0.50", "2")


def test_a_cap_of_concurrency_is_not_taken_for_the_load() -> None:
    assert [finding.text for finding in by_rate().findings if finding.kind == "flag"] == []


def test_configurations_are_drawn_as_bars_in_the_order_of_their_document() -> None:
    text = render_page(published("kimi-k26-ik-llama")).decode()
    rows = re.findall(r'<text [^>]*class="row">(.*?)</text>', text)
    assert rows[:2] == ["Baseline (--cpu-moe), 0 layers", "6-layer head/tail split (3+3)"]
    values = re.findall(r'<th class="wide"[^>]*>([^<]*)</th>', text)
    assert values[:2] == rows[:2]


def test_no_interval_goes_below_zero_and_no_peak_is_below_the_mean() -> None:
    run = as_data(sweep(1, 2))
    wide = Measure(mean=50.0, low=-20.0, high=120.0, trials=3)
    numbers = {"output_tok_s": wide, "peak_output_tok_s": Measure(mean=20.0, trials=3)}
    cells = [cell.model_copy(update={"numbers": numbers}) for cell in run.series[0].cells]
    series = run.series[0].model_copy(update={"cells": cells})
    data = report_data([run.model_copy(update={"series": [series]})], [], [], made=MADE)
    text = render_page(data).decode()
    shown = text[: text.index('id="report-data"')]
    assert "-20" not in shown
    assert '<span class="ci">0–120</span>' in shown
    assert "± 70" in shown
    assert "Peak output tok/s (1 s)</th>" not in shown


def test_a_printed_page_has_its_number() -> None:
    assert b"counter(page)" in render_page(KIMI)

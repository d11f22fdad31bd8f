"""The parts of a page, in its order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pipeline import log
from pipeline.bench.metrics import DEFINITIONS
from pipeline.report.cells import METRICS, digits, series_tables
from pipeline.report.figures import charts, memory_chart
from pipeline.report.findings import claimed, flags
from pipeline.report.markup import Markup, element, join
from pipeline.report.model import (
    AttemptRow,
    Claim,
    Finding,
    Measured,
    Reference,
    RunData,
    Series,
    shown,
)
from pipeline.report.view import Column, Row, View, table, tag

_STATE_KIND = {
    **{"valid": "good", "unsigned": "warn", "named": "warn", "stale": "warn"},
    **{"incomplete": "warn", "unknown": "bad", "moved": "bad", "changed": "bad"},
    "broken": "bad",
}

# Warnings that stand beside the headline; all are among the findings.
_FIRST = 3


def summary(view: View) -> Markup:
    """The numbers that people quote, each with what it is."""
    runs = [card for i in range(len(view.data.runs)) for card in _run_cards(view, i)]
    claims = [card for i in range(len(view.data.references)) for card in _claim_cards(view, i)]
    first = flags(view.data.findings)[:_FIRST]
    numbered = {id(finding): i for i, finding in enumerate(view.data.findings)}
    warnings = [_finding(view, numbered[id(finding)], finding) for finding in first]
    more = element("a", log.count(len(view.data.findings), "finding"), href="#findings")
    return join(
        element("div", *(runs or claims), class_="cards"),
        element("ul", *warnings, class_="findings"),
        element("p", "All ", more, ", computed from the numbers below."),
    )


def _run_cards(view: View, index: int) -> Iterable[Markup]:
    for i, series in enumerate(view.data.runs[index].series):
        at = f"/runs/{index}/series/{i}"
        best = _best(series, "output_tok_s")
        alone = _best(series, "user_tok_s")
        if best is not None:
            yield _card(
                view,
                f"{at}/cells/{best}",
                series,
                "output_tok_s",
                "tok/s output of all users together, waiting included; most of all cells",
            )
        if alone is not None:
            yield _card(
                view,
                f"{at}/cells/{alone}",
                series,
                "user_tok_s",
                "tok/s while one user's answer streams (1 / TPOT), waiting apart",
            )


def _best(series: Series, name: str) -> int | None:
    known = [(value, i) for i, cell in enumerate(series.cells) if (value := cell.mean(name))]
    return max(known)[1] if known else None


def _card(view: View, at: str, series: Series, name: str, label: str) -> Markup:
    decimals = digits(series, name, is_exact=False)
    index = int(at.rsplit("/", 1)[1])
    cell, lines = series.cells[index], []
    if cell.rate_per_s:
        lines.append(join(view.show(f"{at}/rate_per_s", 2), " requests/s sent"))
    elif cell.concurrency:
        lines.append(join("concurrency ", view.show(f"{at}/concurrency", 0)))
    for other, text in (
        ("total_tok_s", "tok/s total (in + out)"),
        ("ttft_ms.mean", "ms TTFT mean"),
    ):
        if other in cell.numbers:
            places = digits(series, other, is_exact=False)
            lines.append(join(view.show(f"{at}/numbers/{other}/mean", places), f" {text}"))
    measure, error = cell.numbers[name], None
    if measure.low is not None and measure.high is not None:
        # a headline without it makes two runs look different that are not
        error = f" ± {shown((measure.high - measure.low) / 2, decimals)}"
    return element(
        "div",
        element("b", view.show(f"{at}/numbers/{name}/mean", decimals)),
        element("span", error, class_="ci") if error else None,
        element("p", label),
        element("p", series.name, ": ", *_separated(lines), class_="soft"),
        class_="card",
    )


def _separated(parts: Sequence[Markup]) -> list[Markup]:
    return [join(", " if i else None, part) for i, part in enumerate(parts)]


def _claim_cards(view: View, index: int) -> Iterable[Markup]:
    reference = view.data.references[index]
    for i, claim in enumerate(reference.claims):
        yield _claim_card(view, f"/references/{index}", reference, i, claim)


def _claim_card(view: View, at: str, reference: Reference, index: int, claim: Claim) -> Markup:
    """A headline; where it is input and output together, output stands first."""
    printed = view.show(f"{at}/claims/{index}/value", 0 if claim.value == int(claim.value) else 1)
    text = view.show(f"{at}/claims/{index}/text")
    place = claimed(reference, claim)
    if place is None or not place.is_mislabelled:
        label = element("p", view.show(f"{at}/claims/{index}/unit"), ": ", text)
        return element("div", element("b", printed), label, class_="card")
    cell = f"{at}/series/{place.series}/cells/{place.cell}"
    output = view.show(f"{cell}/numbers/output_tok_s/mean", 0)
    load = view.show(f"{cell}/concurrency", 0)
    return element(
        "div",
        element("b", output),
        element("p", "tok/s output, concurrency ", load),
        element(
            "p",
            tag("headline", "bad"),
            " printed as ",
            printed,
            " “",
            text,
            "”: total, input and output.",
        ),
        class_="card flagged",
    )


_KINDS = (("flag", "Warnings"), ("fact", "Facts"), ("advice", "Recommendations"))


def findings(view: View) -> Markup:
    """Everything that was computed, what is wrong first."""
    numbered = list(enumerate(view.data.findings))
    parts = []
    for kind, title in _KINDS:
        items = [_finding(view, i, each) for i, each in numbered if each.kind == kind]
        if items:
            parts += [element("h3", title), element("ul", *items, class_="findings")]
    return join(*parts) if parts else element("p", "Nothing follows from the data.")


def _finding(view: View, index: int, finding: Finding) -> Markup:
    about = view.show(f"/findings/{index}/about")
    return element(
        "li",
        element("span", about, class_="about"),
        ": ",
        sentence(view, index, finding),
        class_=finding.kind,
    )


def sentence(view: View, index: int, finding: Finding) -> Markup:
    """A finding's text with its numbers in their places."""
    parts: list[str | Markup] = []
    for piece in re.split(r"(\{\d\})", finding.text) if finding.numbers else [finding.text]:
        if match := re.fullmatch(r"\{(\d)\}", piece):
            quantity = finding.numbers[int(match[1])]
            at = f"/findings/{index}/numbers/{match[1]}/value"
            parts.append(view.show(at, quantity.decimals))
        else:
            parts.append(piece)
    return join(*parts)


def setup(view: View) -> Markup:
    """Hardware, software and models of each source."""
    parts = []
    for pointer, measured in view.data.measured:
        tables = [
            _facts(view, f"{pointer}/{name}", title)
            for name, title in (("hardware", "Hardware"), ("software", "Software"))
            if getattr(measured, name)
        ]
        parts += [_source(view, pointer, measured), element("div", *tables, class_="two")]
        if measured.models:
            parts.append(_models(view, pointer, measured))
    return join(*parts)


def _source(view: View, pointer: str, measured: Measured) -> Markup:
    title = element("h3", view.show(f"{pointer}/title"))
    if isinstance(measured, Reference):
        link = [" ", view.show(f"{pointer}/link")] if measured.link else []
        where = join("Published ", view.show(f"{pointer}/published"), ".", *link)
    else:
        when = [", ", view.show(f"{pointer}/started")] if _has_start(measured) else []
        where = join(view.show(f"{pointer}/tool"), ", ", view.show(f"{pointer}/file"), *when)
    return join(title, element("p", where, class_="soft"))


def _has_start(measured: Measured) -> bool:
    return isinstance(measured, RunData) and measured.started is not None


def _facts(view: View, pointer: str, title: str) -> Markup:
    rows = [
        Row([view.show(f"{pointer}/{i}/name"), view.show(f"{pointer}/{i}/value")])
        for i in range(view.count(pointer))
    ]
    return table(title, [Column("What"), Column("Value")], rows)


def _models(view: View, pointer: str, measured: Measured) -> Markup:
    fields = ("name", "quantization", "size", "experts", "status")
    known = [f for f in fields if any(getattr(model, f) for model in measured.models)]
    rows = [
        Row([view.show(f"{pointer}/models/{i}/{field}") for field in known])
        for i in range(len(measured.models))
    ]
    titles = {"name": "Model"}
    columns = [Column(titles.get(field, field.capitalize())) for field in known]
    return table("Models", columns, rows)


def performance(view: View) -> Markup:
    """All charts."""
    return charts(view)


def tables(view: View) -> Markup:
    """All numbers, and how well the client reads."""
    about = "A small range below a number is its 95 % confidence interval over the trials."
    parts = [element("p", about, class_="soft")] if view.data.runs else []
    for pointer, measured in view.data.measured:
        parts.append(element("h3", view.show(f"{pointer}/title")))
        for i, series in enumerate(measured.series):
            is_exact = isinstance(measured, Reference)
            parts.append(series_tables(view, f"{pointer}/series/{i}", series, is_exact=is_exact))
    parts += [_self_tests(view, i) for i, run in enumerate(view.data.runs) if run.self_tests]
    return join(*parts)


def _self_tests(view: View, index: int) -> Markup:
    at = f"/runs/{index}/self_tests"
    fields = (
        *(("concurrency", 0), ("true_ttft_ms", 1), ("read_ttft_ms", 1), ("true_tpot_ms", 2)),
        *(("read_tpot_ms", 2), ("ceiling_tok_s", 0), ("cpu_us_per_token", 1)),
    )
    titles = (
        *("Concurrency", "True TTFT ms", "Read TTFT ms", "True TPOT ms", "Read TPOT ms"),
        *("Ceiling, output tok/s", "CPU µs per token", "Trusted"),
    )
    rows = []
    for i, test in enumerate(view.data.runs[index].self_tests):
        values = [view.show(f"{at}/{i}/{name}", decimals) for name, decimals in fields]
        trusted = tag("yes", "good") if test.trusted else tag("no", "bad")
        rows.append(Row([*values, trusted]))
    columns = [Column(title, is_number=title != "Trusted") for title in titles]
    return table(f"{view.data.runs[index].name}: the client against its own stub", columns, rows)


def memory(view: View) -> Markup | None:
    """How each card's memory is used."""
    parts = []
    for n, (pointer, measured) in enumerate(view.data.measured):
        if measured.memory:
            chart = memory_chart(view, f"m{n}", pointer, measured)
            parts += [
                element("h3", view.show(f"{pointer}/title")),
                element("div", chart, class_="two"),
            ]
    return join(*parts) if parts else None


def attempts(view: View) -> Markup | None:
    """What was tried, with what failed."""
    parts = []
    if view.data.attempts:
        parts.append(_timeline(view, "/attempts", view.data.attempts))
    for pointer, measured in view.data.measured:
        if measured.attempts:
            parts.append(element("h3", view.show(f"{pointer}/title")))
            parts.append(_timeline(view, f"{pointer}/attempts", measured.attempts))
    return join(*parts) if parts else None


def _timeline(view: View, pointer: str, rows: Sequence[AttemptRow]) -> Markup:
    return element(
        "ol", *(_attempt(view, f"{pointer}/{i}", r) for i, r in enumerate(rows)), class_="timeline"
    )


def _attempt(view: View, at: str, row: AttemptRow) -> Markup:
    kind = "good" if row.is_good else "bad"
    when = [" ", view.show(f"{at}/at")] if row.at else []
    took = [", ", view.show(f"{at}/seconds", 1), " s"] if row.seconds is not None else []
    head = element(
        "p",
        tag(view.show(f"{at}/outcome"), kind),
        " ",
        element("b", view.show(f"{at}/model")),
        " · ",
        view.show(f"{at}/configuration"),
    )
    more = element("p", "attempt ", view.show(f"{at}/name"), *when, *took, class_="soft")
    message = element("p", view.show(f"{at}/message")) if row.message else None
    return element("li", head, message, more, class_=kind)


def evidence(view: View) -> Markup:
    """What stands behind each source, and how far it was checked."""
    parts = []
    for pointer, measured in view.data.measured:
        rows = [
            _evidence_row(view, f"{pointer}/evidence/{i}", link.state, bool(link.digest))
            for i, link in enumerate(measured.evidence)
        ]
        columns = [Column("What"), Column("State"), Column("Digest"), Column("Message")]
        if pointer.startswith("/runs"):
            run = Row(
                [
                    "this run",
                    tag("embedded", "good"),
                    element("code", view.show(f"{pointer}/digest")),
                    view.show(f"{pointer}/file"),
                ]
            )
            rows = [run, *rows]
        parts.append(table(measured.title, columns, rows))
    return join(*parts)


def _evidence_row(view: View, at: str, state: str, has_digest: bool) -> Row:
    digest = element("code", view.show(f"{at}/digest")) if has_digest else "–"
    shown_state = tag(view.show(f"{at}/state"), _STATE_KIND[state])
    return Row([view.show(f"{at}/name"), shown_state, digest, view.show(f"{at}/message")])


def definitions(view: View) -> Markup:
    """What each shown metric means."""
    names = {
        name.split(".")[0]
        for _, measured in view.data.measured
        for series in measured.series
        for cell in series.cells
        for name in cell.numbers
    }
    asked = dict.fromkeys(metric.name.split(".")[0] for metric in METRICS)
    rows = [
        Row([DEFINITIONS[name].title, DEFINITIONS[name].unit, DEFINITIONS[name].text])
        for name in asked
        if name in names and name in DEFINITIONS
    ]
    own = Row(
        ["Output per user", "tok/s", "1 / mean TPOT: what one user reads while an answer streams."]
    )
    rows += [own] if "user_tok_s" in names else []
    return table("Metrics", [Column("Metric"), Column("Unit"), Column("Definition")], rows)

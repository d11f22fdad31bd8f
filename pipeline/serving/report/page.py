"""One HTML file that needs nothing else: no network, no server, no other file.

A policy in its head forbids every request, and every script but its own; its data is embedded with
a digest. Its parts stand here in their order.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.attest.names import REPORT
from pipeline.artifacts.attest.predicates import Report
from pipeline.artifacts.attest.statement import Moment, Statement, make_statement
from pipeline.artifacts.attest.strict import plain
from pipeline.core import log
from pipeline.core.model import canonical_json, sha256_of
from pipeline.serving.bench.metrics import DEFINITIONS
from pipeline.serving.report.cells import METRICS, digits, series_tables
from pipeline.serving.report.figures import charts, memory_chart
from pipeline.serving.report.findings import claimed
from pipeline.serving.report.markup import Child, Column, Markup, element, html_table, join, tag
from pipeline.serving.report.model import (
    AttemptRow,
    PublishedReference,
    ReportData,
    ReportFinding,
    RunData,
    shown_value,
)

DATA_ID = "report-data"
_STATE_KIND = {
    **{"valid": "good", "unsigned": "warn", "named": "warn", "stale": "warn"},
    **{"incomplete": "warn", "unknown": "bad", "moved": "bad", "changed": "bad"},
    "broken": "bad",
}
# Warnings that stand beside the headline; all are among the findings.
_FIRST = 3
_CARDS = (
    ("output_tok_s", "tok/s output of all users together, waiting included; most of all cells"),
    ("user_tok_s", "tok/s while one user's answer streams (1 / TPOT), waiting apart"),
)
_OTHERS = (("total_tok_s", "tok/s total (in + out)"), ("ttft_ms.mean", "ms TTFT mean"))
_KINDS = (("flag", "Warnings"), ("fact", "Facts"), ("advice", "Recommendations"))


def summary(data: ReportData) -> Markup:
    """The numbers that people quote, each with what it is."""
    cards = []
    for series in (series for run in data.runs for series in run.series):
        for name, label in _CARDS:
            known = [(value, i) for i, c in enumerate(series.cells) if (value := c.mean(name))]
            if not known:
                continue
            cell, lines, error = series.cells[max(known)[1]], [], None
            if cell.rate_per_s:
                lines.append(f"{shown_value(cell.rate_per_s, 2)} requests/s sent")
            elif cell.concurrency:
                lines.append(f"concurrency {shown_value(cell.concurrency, 0)}")
            for other, text in _OTHERS:
                if other in cell.numbers:
                    places = digits(series, other, is_exact=False)
                    lines.append(f"{shown_value(cell.mean(other), places)} {text}")
            decimals, measure = digits(series, name, is_exact=False), cell.numbers[name]
            if measure.low is not None and measure.high is not None:
                # a headline without it makes two runs look different that are not
                half = shown_value((measure.high - measure.low) / 2, decimals)
                error = element("span", f" ± {half}", class_="ci")
            number = element("b", shown_value(measure.mean, decimals))
            about = element("p", series.name, ": ", ", ".join(lines), class_="soft")
            cards.append(element("div", number, error, element("p", label), about, class_="card"))
    claims = [] if cards else [(each, claim) for each in data.references for claim in each.claims]
    for reference, claim in claims:
        printed = shown_value(claim.value, 0 if claim.value == int(claim.value) else 1)
        number, about = element("b", printed), element("p", claim.unit, ": ", claim.text)
        why, look = None, "card"
        found = claimed(reference, claim)
        if found and found[1]:
            # where it is input and output together, output stands first
            number = element("b", shown_value(found[0].mean("output_tok_s"), 0))
            load = shown_value(found[0].concurrency, 0)
            about = element("p", "tok/s output, concurrency ", load)
            text = f" printed as {printed} “{claim.text}”: total, input and output."
            why, look = element("p", tag("headline", "bad"), text), "card flagged"
        cards.append(element("div", number, about, why, class_=look))
    # what is wrong stands beside the headline, and not only at the end
    flags = [finding for finding in data.findings if finding.kind == "flag"]
    more = element("a", log.count(len(data.findings), "finding"), href="#findings")
    return join(
        element("div", *cards, class_="cards"),
        element("ul", *map(_finding, flags[:_FIRST]), class_="findings"),
        element("p", "All ", more, ", computed from the numbers below."),
    )


def findings_section(data: ReportData) -> Markup:
    """Everything that was computed, what is wrong first."""
    parts = []
    for kind, title in _KINDS:
        if items := [_finding(each) for each in data.findings if each.kind == kind]:
            parts += [element("h3", title), element("ul", *items, class_="findings")]
    return join(*parts) if parts else element("p", "Nothing follows from the data.")


def _finding(finding: ReportFinding) -> Markup:
    about = element("span", finding.about, class_="about")
    return element("li", about, ": ", finding.sentence(), class_=finding.kind)


def setup(data: ReportData) -> Markup:
    """Hardware, software and models of each source."""
    parts: list[Markup] = []
    for measured in data.measured:
        if isinstance(measured, PublishedReference):
            where = f"Published {measured.published}."
            where += f" {measured.link}" if measured.link else ""
        else:
            assert isinstance(measured, RunData)
            when = [measured.started] if measured.started else []
            where = ", ".join([measured.tool, measured.file, *when])
        tables = [
            html_table(title, [Column("What"), Column("Value")], [(f.name, f.value) for f in facts])
            for title, facts in (("Hardware", measured.hardware), ("Software", measured.software))
            if facts
        ]
        parts += [element("h3", measured.title), element("p", where, class_="soft")]
        parts.append(element("div", *tables, class_="two"))
        if measured.models:
            fields = ("name", "quantization", "size", "experts", "status")
            # a column that is empty in all rows only takes room
            known = [f for f in fields if any(getattr(model, f) for model in measured.models)]
            rows = [[getattr(model, field) for field in known] for model in measured.models]
            titles = ["Model" if field == "name" else field.capitalize() for field in known]
            parts.append(html_table("Models", [Column(title) for title in titles], rows))
    return join(*parts)


# Of the self-tests: field, title, digits after the point.
_SELF_TEST = (
    *(("concurrency", "Concurrency", 0), ("true_ttft_ms", "True TTFT ms", 1)),
    *(("read_ttft_ms", "Read TTFT ms", 1), ("true_tpot_ms", "True TPOT ms", 2)),
    *(("read_tpot_ms", "Read TPOT ms", 2), ("ceiling_tok_s", "Ceiling, output tok/s", 0)),
    ("cpu_us_per_token", "CPU µs per token", 1),
)


def tables(data: ReportData) -> Markup:
    """All numbers, and how well the client reads."""
    about = "A small range below a number is its 95 % confidence interval over the trials."
    parts = [element("p", about, class_="soft")] if data.runs else []
    for measured in data.measured:
        parts.append(element("h3", measured.title))
        is_exact = isinstance(measured, PublishedReference)
        parts += [series_tables(series, is_exact=is_exact) for series in measured.series]
    columns = [*(Column(title, is_number=True) for _, title, _ in _SELF_TEST), Column("Trusted")]
    for run in (run for run in data.runs if run.self_tests):
        rows: list[list[Child]] = [
            [
                *(shown_value(getattr(test, name), d) for name, _, d in _SELF_TEST),
                tag("yes", "good") if test.trusted else tag("no", "bad"),
            ]
            for test in run.self_tests
        ]
        parts.append(html_table(f"{run.name}: the client against its own stub", columns, rows))
    return join(*parts)


def memory_section(data: ReportData) -> Markup | None:
    """How each card's memory is used."""
    parts = []
    for number, measured in enumerate(data.measured):
        if measured.memory:
            chart = element("div", memory_chart(f"m{number}", measured), class_="two")
            parts += [element("h3", measured.title), chart]
    return join(*parts) if parts else None


def quality_section(data: ReportData) -> Markup | None:
    """Counts, tool calls and probabilities, beside what they should be."""
    if not data.quality:
        return None
    names = ("Model", "Part", "Verdict", "What", "Value, 95 % interval", "Bar", "Vendor", "Result")
    kinds = {"passed": "good", "failed": "bad"}
    rows: list[list[Child]] = [
        [
            *(line.model, line.part, tag(line.verdict, kinds.get(line.verdict, ""))),
            *(line.what, line.value, line.bar, line.vendor or "–", element("code", line.digest)),
        ]
        for line in data.quality
    ]
    return html_table("Quality", [Column(name) for name in names], rows)


def attempts_section(data: ReportData) -> Markup | None:
    """What was tried, with what failed."""
    parts = [_timeline(data.attempts)] if data.attempts else []
    for measured in data.measured:
        if measured.attempts:
            parts += [element("h3", measured.title), _timeline(measured.attempts)]
    return join(*parts) if parts else None


def _timeline(rows: Sequence[AttemptRow]) -> Markup:
    items = []
    for row in rows:
        kind = "good" if row.is_good else "bad"
        name = element("b", row.model)
        head = element("p", tag(row.outcome, kind), " ", name, " · ", row.configuration)
        when = f" {row.at}" if row.at else ""
        took = f", {shown_value(row.seconds, 1)} s" if row.seconds is not None else ""
        message = element("p", row.message) if row.message else None
        more = element("p", f"attempt {row.name}{when}{took}", class_="soft")
        items.append(element("li", head, message, more, class_=kind))
    return element("ol", *items, class_="timeline")


def evidence(data: ReportData) -> Markup:
    """The evidence of each source, and how far it was checked."""
    columns = [Column("What"), Column("State"), Column("Digest"), Column("Message")]
    parts = []
    for measured in data.measured:
        rows: list[list[Child]] = []
        if isinstance(measured, RunData):
            digest = element("code", measured.digest)
            rows.append(["this run", tag("embedded", "good"), digest, measured.file])
        for link in measured.evidence:
            shown_digest = element("code", link.digest) if link.digest else "–"
            state = tag(link.state, _STATE_KIND[link.state])
            rows.append([link.name, state, shown_digest, link.message])
        parts.append(html_table(measured.title, columns, rows))
    return join(*parts)


def definitions(data: ReportData) -> Markup:
    """What each shown metric means."""
    names = {
        name.split(".")[0]
        for measured in data.measured
        for series in measured.series
        for cell in series.cells
        for name in cell.numbers
    }
    # each metric once, in the order of the tables
    metrics = dict.fromkeys(metric.name.split(".")[0] for metric in METRICS)
    known = [DEFINITIONS[name] for name in metrics if name in names and name in DEFINITIONS]
    rows = [(each.title, each.unit, each.text) for each in known]
    if "user_tok_s" in names:
        text = "1 / mean TPOT: what one user reads while an answer streams."
        rows.append(("Output per user", "tok/s", text))
    return html_table("Metrics", [Column("Metric"), Column("Unit"), Column("Definition")], rows)


_SECTIONS = (
    ("summary", "Summary", summary),
    ("setup", "Hardware, software, models", setup),
    ("performance", "Throughput and latency", charts),
    ("memory", "Memory", memory_section),
    ("tables", "Tables", tables),
    ("quality", "Quality", quality_section),
    ("attempts", "Attempts", attempts_section),
    ("findings", "Findings and recommendations", findings_section),
    ("evidence", "Evidence", evidence),
    ("definitions", "Definitions", definitions),
)


def render_page(data: ReportData) -> bytes:
    """The whole file; the same data gives the same bytes."""
    links, parts = [], []
    for key, title, make in _SECTIONS:
        if body := make(data):
            links.append(element("li", element("a", title, href=f"#{key}")))
            heading = element("h2", title, id=f"{key}-h")
            parts.append(element("section", heading, body, id=key, aria_labelledby=f"{key}-h"))
    embedded = canonical_json(data.model_dump(mode="json"))
    digest = data_digest(data)
    # `</script` inside of a text must not end the element; JSON knows this spelling of `<`
    text = Markup(embedded.decode().replace("<", "\\u003c"))
    json = {"type": "application/json", "id": DATA_ID, "data_digest": digest}
    check = "compares the page with what was signed, and its data with the runs."
    redacted = " Names, addresses and serial numbers are left out." if data.redacted else None
    button = element("button", "Dark", id="theme", type="button", class_="screen", hidden=True)
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        element(
            "header",
            element("h1", data.title),
            element("p", f"Made {data.made} by {data.tool}.", redacted, " ", button, class_="meta"),
            element("nav", element("ul", *links), aria_label="Sections"),
        ),
        element("main", *parts, id="content"),
        element(
            "footer",
            element(
                "p",
                *("Data of this page: ", element("code", digest), ". "),
                *(element("code", "sm120 verify"), f" {check}"),
            ),
        ),
        element("script", text, **json),
        element("script", _asset("page.js")),
    )
    page = join(
        Markup("<!doctype html>\n"),
        element("html", _head(data.title, data.tool), body, lang="en"),
        "\n",
    )
    return page.encode()


def _asset(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text("utf-8"))


def table_page(title: str, made: str, tables: Sequence[Markup]) -> bytes:
    """Tables of a command as a file that looks like a report; no script and no data of its own."""
    header = element("header", element("h1", title), element("p", made, class_="meta"))
    body = element("body", header, element("main", *tables, id="content"))
    page = element("html", _head(title, "sm120 tables"), body, lang="en")
    return join(Markup("<!doctype html>\n"), page, "\n").encode()


def _head(title: str, tool: str) -> Markup:
    style, script = _asset("page.css"), _asset("page.js")
    style_hash, script_hash = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (style, script)
    )
    # nothing is loaded, and no text of a run can become a script
    policy = (
        f"default-src 'none'; style-src {style_hash}; script-src {script_hash};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="generator", content=tool),
        element("title", title),
        # or browsers ask for a favicon
        element("link", rel="icon", href="data:,"),
        element("style", style),
    )


def data_digest(data: ReportData) -> str:
    """The digest of the embedded data, however it is spelled."""
    return sha256_of(canonical_json(data.model_dump(mode="json")))


def report_statement(
    name: str, page: bytes, data: ReportData, when: Moment | None = None
) -> Statement:
    """States a page: its digest, and the runs that its numbers came from."""
    runs = [run.digest for run in data.runs]
    claims = Report(title=plain(data.title), runs=runs, data=data_digest(data))
    body = claims.model_dump(mode="json", exclude_unset=True)
    return make_statement(name, sha256_of(page), REPORT, body, when)

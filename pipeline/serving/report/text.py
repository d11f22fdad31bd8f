"""Writes the same report as Markdown, to paste, and its numbers as CSV, to calculate with."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.core import log
from pipeline.serving.report.cells import digits, known_metrics, load_of
from pipeline.serving.report.model import (
    AttemptRow,
    PublishedReference,
    ReportData,
    RunData,
    Series,
    shown_value,
)
from pipeline.serving.report.redact import Redactor

_CSV = (
    *("source", "kind", "series", "model", "workload", "input_tokens", "output_tokens", "cell"),
    *("concurrency", "rate_per_s", "state", "metric", "mean", "low", "high", "trials"),
)
# Digits after the point of each part of a card's memory.
_MEMORY = {"total": 2, "weights": 2, "kv": 2, "used": 2, "free": 2, "kv_tokens": 0}


def render_csv(data: ReportData) -> bytes:
    """A row for each number, with its name in full: `output_tok_s` is never `total_tok_s`."""
    out = io.StringIO()
    # the same bytes on every system; spreadsheets read both ends of lines
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for measured, series in ((each, series) for each in data.measured for series in each.series):
        kind = "document" if isinstance(measured, PublishedReference) else "run"
        sizes = (series.lengths.input, series.lengths.output) if series.lengths else ("", "")
        head = [measured.name, kind, series.name, series.model, series.workload, *sizes]
        for cell in series.cells:
            loads = (cell.concurrency or "", cell.rate_per_s or "")
            about = [*map(_plain, head), _plain(cell.name), *loads, cell.state]
            # a void cell is a row, too: leaving it out would make a sweep look whole
            if not cell.numbers:
                writer.writerow([*about, "", "", "", "", ""])
            for name, m in cell.numbers.items():
                values = ("" if v is None else v for v in (m.mean, m.low, m.high, m.trials))
                writer.writerow([*about, name, *values])
    return out.getvalue().encode()


def _plain(value: object) -> object:
    """A text that no spreadsheet takes for a formula."""
    # owasp.org/www-community/attacks/CSV_Injection
    if not isinstance(value, str):
        return value
    is_formula = value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return log.printable(f"'{value}" if is_formula else value)


def render_markdown(data: ReportData) -> bytes:
    """Tables and findings; charts are in the page."""
    parts = [f"# {_escaped(data.title)}", f"Made {data.made} by {_escaped(data.tool)}."]
    for kind, title in (("flag", "Warnings"), ("fact", "Facts"), ("advice", "Recommendations")):
        lines = [
            f"- **{_escaped(f.about)}**: {_escaped(f.sentence())}"
            for f in data.findings
            if f.kind == kind
        ]
        parts += [f"## {title}", "\n".join(lines)] if lines else []
    for measured in data.measured:
        if isinstance(measured, RunData):
            source = f"Run {_escaped(measured.file)}, `{measured.digest}`"
        else:
            assert isinstance(measured, PublishedReference)
            link = f" {_escaped(measured.link)}" if measured.link else ""
            source = f"Published {_escaped(measured.published)}.{link}"
        parts += [f"## {_escaped(measured.title)}", source]
        for title, facts in (("Hardware", measured.hardware), ("Software", measured.software)):
            rows = [(_escaped(fact.name), _escaped(fact.value)) for fact in facts]
            parts += [_table((title, ""), rows)] if facts else []
        for series in measured.series:
            parts.append(f"### {_escaped(series.name)} ({_escaped(series.workload)})")
            head, numbers = series_rows(series, is_exact=isinstance(measured, PublishedReference))
            cells = [[_escaped(cell) for cell in row] for row in numbers]
            parts.append(_table(head, cells, len(known_metrics(series))))
        if measured.memory:
            unit = measured.memory[0].unit
            known = [n for n in _MEMORY if any(getattr(m, n) is not None for m in measured.memory)]
            titles = ["Memory per GPU", *(n if n == "kv_tokens" else f"{n} {unit}" for n in known)]
            amounts = [
                [_escaped(m.name), *(shown_value(getattr(m, n), _MEMORY[n]) for n in known)]
                for m in measured.memory
            ]
            parts.append(_table(titles, amounts, len(known)))
        if measured.attempts:
            parts += ["### Attempts", _attempts(measured.attempts)]
        links = [
            (_escaped(link.name), link.state, link.digest or "–", _escaped(link.message))
            for link in measured.evidence
        ]
        parts += ["### Evidence", _table(("What", "State", "Digest", "Message"), links)]
    if data.quality:
        titles = ["model", "part", "verdict", "what", "value, 95 % interval", "bar", "vendor"]
        values = (
            (q.model, q.part, q.verdict, q.what, q.value, q.bar, q.vendor) for q in data.quality
        )
        parts += ["## Quality", _table(titles, [[_escaped(v) for v in row] for row in values])]
    if data.attempts:
        parts += ["## Attempts", _attempts(data.attempts)]
    return ("\n\n".join(parts) + "\n").encode()


def _escaped(text: str) -> str:
    """Escapes text of a run, which then cannot end a cell, or become HTML or a link."""
    # the backslash first: those of the others stay
    for sign in "\\`*_[]<>|#":
        text = text.replace(sign, f"\\{sign}")
    return log.printable(" ".join(text.split()))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table whose last `numbers` columns stand at their right edge."""
    aligned = [*["---"] * (len(head) - numbers), *["--:"] * numbers]
    lines = [head, aligned, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def series_rows(series: Series, *, is_exact: bool) -> tuple[list[str], list[list[str]]]:
    """The numbers of a series as a table: its head, and a row for each cell."""
    metrics, by = known_metrics(series), load_of(series)
    places = {m.name: digits(series, m.name, is_exact=is_exact) for m in metrics}
    # a column that is the same in all rows only takes room
    has_states = any(cell.state != "good" for cell in series.cells)
    head = [by.title if by else "Cell", *(["State"] if has_states else [])]
    rows = []
    for cell in series.cells:
        load = by.text(cell) if by else cell.name
        values = [shown_value(cell.mean(m.name), places[m.name]) for m in metrics]
        rows.append([load, *([cell.state] if has_states else []), *values])
    return [*head, *(metric.title for metric in metrics)], rows


def _attempts(rows: Sequence[AttemptRow]) -> str:
    fields = ("name", "model", "configuration", "outcome", "message")
    cells = [[_escaped(getattr(row, field)) for field in fields] for row in rows]
    return _table(("Attempt", "Model", "Configuration", "Result", "Message"), cells)


# GitHub takes 65,536 characters in an issue; the rest is for the words around the block.
_MOST_CHARACTERS, _MOST_ROWS, _MOST_CELL = 60_000, 40, 400
_MOST_READ = 4000  # of a cell; what is cut here is far beyond what is shown


class PasteSection(NamedTuple):
    """A part of what is pasted: rows of texts, the first of them a head where it has one."""

    title: str
    rows: Sequence[Sequence[str]]
    has_head: bool = False


def render_paste(title: str, sections: Sequence[PasteSection], redactor: Redactor) -> str:
    """One folded block for an issue tracker, in which every text is redacted.

    It is a code block: names and numbers in it address nobody, link nothing and are no HTML.
    """
    redactor.learn([title, *(section.title for section in sections)])
    redactor.learn([cell for section in sections for row in section.rows for cell in row])
    lines: list[str] = []
    for section in (each for each in sections if each.rows):
        # redacted before it is cut: no pattern finds half a secret
        shown = [
            [
                log.printable(" ".join(redactor.text(cell[:_MOST_READ]).split()))[:_MOST_CELL]
                for cell in row
            ]
            for row in section.rows[:_MOST_ROWS]
        ]
        widths = [max(len(row[at]) for row in shown) for at in range(len(shown[0]) - 1)]
        lines += ["", redactor.text(section.title)]
        for at, row in enumerate(shown):
            cells = [*map(str.ljust, row[:-1], widths), row[-1]]
            lines.append(f"  {'  '.join(cells)}".rstrip())
            if section.has_head and not at:
                lines.append(f"  {'  '.join('-' * len(cell) for cell in cells)}")
        lines += [f"  … and {more} more"] if (more := len(section.rows) - len(shown)) else []
    count, room = 0, _MOST_CHARACTERS
    while count < len(lines) and (room := room - len(lines[count]) - 1) > 0:
        count += 1
    cut = [f"… {log.count(len(lines) - count, 'line')} cut"] if count < len(lines) else []
    text = "\n".join([*lines[1:count], *cut])
    # longer than any run of backticks inside, so that no text ends the block
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    head = _escaped(redactor.text(title))
    return f"<details><summary>{head}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>\n"

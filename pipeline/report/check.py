"""Whether a report is what it was: its data, what it shows of it, and the runs behind it.

`sm120 verify` asks these; each problem names the place and both values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.bench.place import is_run
from pipeline.errors import ReportInvalid, RunInvalid
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import canonical_json, sha256_of
from pipeline.report.build import renamed
from pipeline.report.findings import find
from pipeline.report.from_foreign import read_foreign_data
from pipeline.report.from_run import read_run_data
from pipeline.report.model import ReportData, RunData, shown
from pipeline.report.page import DATA_ID, render_page
from pipeline.report.pointer import differences, look_up, step
from pipeline.report.reference import all_references

_MOST_BYTES = 64 << 20
_SHOWN_AROUND = 40  # bytes on either side of a difference
_TITLE = re.compile(rb"<title[^>]*>([^<]*)</title>")
_HEADING = re.compile(rb"<h2[^>]*>([^<]*)</h2>")
# What a run alone decides; hardware, memory and evidence may also come from other files.
_OF_THE_RUN = ("digest", "requests", "started", "tool", "series", "self_tests", "notes")


@dataclass(frozen=True)
class Problem:
    """A place in the data of a report, and what is wrong there."""

    where: str
    message: str


@dataclass(frozen=True)
class ShownValue:
    """A value as the page prints it, with the place that it names."""

    pointer: str
    decimals: int | None
    text: str


@dataclass(frozen=True)
class OpenedReport:
    """A page as it was read: nothing of it is believed yet."""

    page: bytes
    data: ReportData
    json: Any
    digest: str  # of the embedded data, as the page states it
    shown: list[ShownValue]


@dataclass
class _Reader(HTMLParser):
    """Finds the embedded data, and every element that names a place."""

    data: list[str] = field(default_factory=list)
    digest: str = ""
    found: list[ShownValue] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._in_data = False
        # elements that are open: the place that each names, and its text so far
        self._open: list[tuple[str, ShownValue | None, list[str]]] = []
        self._bases: list[tuple[int, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "script" and given.get("id") == DATA_ID:
            self._in_data, self.digest = True, given.get("data-digest", "")
        if tag in ("br", "col", "hr", "input", "link", "meta"):
            return
        value = None
        if "data-ref" in given:
            decimals = given.get("data-decimals", "")
            place = self._place(given["data-ref"])
            value = ShownValue(place, int(decimals) if decimals.isdigit() else None, "")
        self._open.append((tag, value, []))
        if "data-base" in given:
            self._bases.append((len(self._open), given["data-base"]))

    def _place(self, ref: str) -> str:
        """A place that does not begin at the top begins where its table does."""
        return ref if ref.startswith("/") or not self._bases else f"{self._bases[-1][1]}/{ref}"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data.append(data)
        for _, value, texts in self._open:
            if value is not None:
                texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._in_data = False
        while self._open:
            name, value, texts = self._open.pop()
            if self._bases and self._bases[-1][0] > len(self._open):
                self._bases.pop()
            if value is not None:
                self.found.append(ShownValue(value.pointer, value.decimals, "".join(texts)))
            if name == tag:
                return


def open_report(page: bytes) -> OpenedReport:
    """A page of ours, read; one that is not is refused."""
    if len(page) > _MOST_BYTES:
        raise ReportInvalid(f"larger than {_MOST_BYTES} bytes")
    reader = _Reader()
    try:
        reader.feed(page.decode("utf-8"))
        reader.close()
        value = read_json("".join(reader.data).encode(), most_bytes=_MOST_BYTES)
        data = ReportData.model_validate(value)
    except UnicodeDecodeError as error:
        raise ReportInvalid("is not UTF-8") from error
    except JsonInvalid as error:
        raise ReportInvalid(f"its embedded data {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(str(part) for part in first["loc"])
        raise ReportInvalid(f"its embedded data: {place}: {first['msg']}") from error
    return OpenedReport(page, data, value, reader.digest, reader.found)


def check_report(report: OpenedReport) -> list[Problem]:
    """All that can be seen from the page alone, what decides first."""
    problems = [
        *_check_shown(report),
        *_check_references(report),
        *_check_findings(report),
    ]
    actual = sha256_of(canonical_json(report.json))
    if actual != report.digest:
        problems.append(
            Problem("", f"the embedded data has {actual}, the page states {report.digest}")
        )
    if not problems and (drawn := render_page(report.data)) != report.page:
        # last: another version of this tool draws otherwise
        problems.append(_redrawn(report, drawn))
    return problems


def _redrawn(report: OpenedReport, drawn: bytes) -> Problem:
    """The first text or drawing that differs, with the chart or section that it is in."""
    page = report.page
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(page, drawn, strict=False)))
    values = f"has {_around(page, at)!r}, by its data it is {_around(drawn, at)!r}"
    return Problem("", f"{_part(drawn, at)} {values}; the page was made by {report.data.tool}")


def _around(page: bytes, at: int) -> str:
    """The text that a place is in, or of a tag the few characters that count."""
    start = max(page.rfind(b">", 0, at), page.rfind(b"<", 0, at), at - _SHOWN_AROUND - 1) + 1
    ends = [end for mark in (b"<", b">") if (end := page.find(mark, at)) >= 0]
    text = page[start : min([*ends, at + _SHOWN_AROUND])]
    return unescape(text.decode(errors="replace"))


def _part(drawn: bytes, at: int) -> str:
    before = drawn[: at + 1]
    svg = before.rfind(b"<svg")
    if svg > before.rfind(b"</svg>") and (title := _TITLE.search(drawn, svg)):
        return f"the chart {unescape(title[1].decode())!r}"
    headings = _HEADING.findall(before)
    return f"the section {unescape(headings[-1].decode())!r}" if headings else "the page's head"


def _check_shown(report: OpenedReport) -> Iterator[Problem]:
    if not report.shown:
        yield Problem("", "the page shows no value of its data")
    for value in report.shown:
        try:
            want = shown(look_up(report.json, value.pointer), value.decimals)
        except KeyError:
            yield Problem(value.pointer, f"shows {value.text!r}, and the data has no such place")
            continue
        if want != value.text:
            yield Problem(value.pointer, f"shows {value.text!r}, the data has {want!r}")


def _check_references(report: OpenedReport) -> Iterator[Problem]:
    """Published tables against those that ship with this tool."""
    shipped = {reference.name: reference for reference in all_references()}
    for index, reference in enumerate(report.data.references):
        at = f"/references/{index}"
        if reference.name not in shipped:
            yield Problem(at, f"{reference.name} is no document that ships with this tool")
            continue
        want = shipped[reference.name].model_dump(mode="json")
        yield from _told(differences(want, report.json["references"][index], at), "as published")


def _check_findings(report: OpenedReport) -> Iterator[Problem]:
    if report.data.redacted:
        # computed before names were taken out of their texts
        return
    want = [finding.model_dump(mode="json") for finding in find(report.data)]
    yield from _told(differences(want, report.json["findings"], "/findings"), "as computed")


def _told(found: Iterable[tuple[str, Any, Any]], what: str) -> Iterator[Problem]:
    for where, want, got in found:
        yield Problem(where, f"the report has {_short(got)}, {what} it is {_short(want)}")


def _short(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}…"


def check_run(report: OpenedReport, index: int, path: Path) -> list[Problem]:
    """One run of a report against its folder, or another program's result against its file."""
    at = f"/runs/{index}"
    try:
        want = read_run_data(path) if is_run(path) else read_foreign_data(path)
    except RunInvalid as error:
        return [Problem(at, str(error))]
    got = report.data.runs[index]
    # of several runs of one name, each has its folder in it
    apart = renamed(want.model_copy(update={"file": got.file}))
    want = apart if apart.name == got.name else want
    problems = [
        Problem(where, f"the report has {_short(was)}, the run {_short(should)}")
        for name in _OF_THE_RUN
        for where, should, was in differences(
            _dumped(want, name), _dumped(got, name), step(at, name)
        )
        if not (report.data.redacted and isinstance(was, str) and isinstance(should, str))
        or name in ("digest", "requests")
    ]
    # numbers first: a changed run changes its digest, too, which says less
    return sorted(problems, key=lambda p: p.where.rsplit("/", 1)[1] in ("digest", "requests"))


def _dumped(run: RunData, name: str) -> Any:
    return run.model_dump(mode="json").get(name)

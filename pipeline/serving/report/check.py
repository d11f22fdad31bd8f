"""The data of a page, and the numbers of its runs against their folders.

`sm120 verify` asks for both. Neither depends on how this version of the tool draws a page, chooses
metrics or words a finding: a page that a release signed stays valid with every later one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.core.errors import ReportInvalid, RunInvalid
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import canonical_json, sha256_of
from pipeline.serving.bench.place import is_run
from pipeline.serving.report.from_run import read_foreign_data, read_run_data
from pipeline.serving.report.model import ReportData
from pipeline.serving.report.page import DATA_ID

# A page with some hundred runs has a few megabytes.
_MOST_BYTES = 64 << 20
# A text of the data or of the page cannot hold this: quotes are escaped in both.
_DATA = re.compile(rb'<script[^>]* id="%b"[^>]*>([^<]*)</script>' % DATA_ID.encode())
_DIGEST = re.compile(rb' data-digest="([^"]*)"')


class ReportProblem(NamedTuple):
    """A place in the data of a report, and what is wrong there."""

    where: str
    message: str


class OpenedReport(NamedTuple):
    """A page as it was read: nothing of it is believed yet."""

    data: ReportData
    json: Any
    digest: str  # of the embedded data, as the page states it

    def problem(self) -> str:
        """Why the embedded data is not the data that the page was made with, or nothing."""
        actual = sha256_of(canonical_json(self.json))
        if actual == self.digest:
            return ""
        return f"the embedded data has {actual}, the page states {self.digest or 'none'}"


def open_report(page: bytes) -> OpenedReport:
    """Reads a page of ours; refuses anything else."""
    if len(page) > _MOST_BYTES:
        raise ReportInvalid(f"larger than {_MOST_BYTES} bytes")
    found = list(_DATA.finditer(page))
    if len(found) != 1:
        raise ReportInvalid(f"it embeds {len(found) or 'no'} data of a report, a page has one")
    try:
        value = read_json(found[0][1], most_bytes=_MOST_BYTES)
        data = ReportData.model_validate(value)
    except JsonInvalid as error:
        raise ReportInvalid(f"its embedded data {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(str(part) for part in first["loc"])
        raise ReportInvalid(f"its embedded data: {place}: {first['msg']}") from error
    stated = _DIGEST.search(found[0][0][: -len(found[0][1]) or None])
    return OpenedReport(data, value, stated[1].decode(errors="replace") if stated else "")


def check_run(report: OpenedReport, index: int, path: Path) -> list[ReportProblem]:
    """Compares a run of a report with its folder, or another program's result with its file."""
    at, got = f"/runs/{index}", report.data.runs[index]
    try:
        want = read_run_data(path) if is_run(path) else read_foreign_data(path)
    except RunInvalid as error:
        return [ReportProblem(at, str(error))]
    # numbers first: a changed run changes its digest, too, which says less; a shorter list would
    # otherwise hide what it leaves out
    pairs = json_differences(len(want.series), len(got.series), f"{at}/series")
    for s, (run, page) in enumerate(zip(want.series, got.series, strict=False)):
        place = f"{at}/series/{s}/cells"
        # a redacted page has other names, so cells go by their order
        pairs += json_differences(len(run.cells), len(page.cells), place)
        for c, (is_, shown) in enumerate(zip(run.cells, page.cells, strict=False)):
            cell = f"{place}/{c}"
            for name in ("concurrency", "rate_per_s", "state"):
                values = getattr(is_, name), getattr(shown, name)
                pairs += json_differences(*values, f"{cell}/{name}")
            have, on_page = (sorted({note.kind for note in each.notes}) for each in (is_, shown))
            pairs += json_differences(have, on_page, f"{cell}/notes")
            known = {n: m.model_dump(mode="json") for n, m in is_.numbers.items()}
            # a later version may know more numbers of a run than the page shows
            for name, measure in shown.numbers.items():
                number = _step(f"{cell}/numbers", name)
                pairs += json_differences(known.get(name), measure.model_dump(mode="json"), number)
    for name in ("started", "digest", "requests"):
        pairs += json_differences(getattr(want, name), getattr(got, name), f"{at}/{name}")
    problems = []
    for where, *both in pairs:
        texts = (canonical_json(value).decode() for value in both)
        should, was = (text if len(text) <= 60 else f"{text[:57]}…" for text in texts)
        problems.append(ReportProblem(where, f"the report has {was}, the run {should}"))
    return problems


def _step(pointer: str, key: str | int) -> str:
    """One level deeper in JSON: RFC 6901."""
    return f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"


def json_differences(want: Any, got: Any, pointer: str = "") -> list[tuple[str, Any, Any]]:
    """Every place where two values of JSON differ, with both."""
    if isinstance(want, dict) and isinstance(got, dict):
        keys = sorted(want.keys() | got.keys())
        pairs = [(_step(pointer, key), want.get(key), got.get(key)) for key in keys]
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        both = zip(want, got, strict=True)
        pairs = [(_step(pointer, i), *pair) for i, pair in enumerate(both)]
    else:
        # 5 and 5.0 are one number of JSON, true is none
        same = want == got and isinstance(want, bool) == isinstance(got, bool)
        return [] if same else [(pointer, want, got)]
    return [each for at, a, b in pairs for each in json_differences(a, b, at)]

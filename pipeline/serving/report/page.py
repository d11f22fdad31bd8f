"""One HTML file that needs nothing else: no network, no server, no other file.

A policy in its head forbids every request, and every script but its own; its data is embedded with
a digest.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from pipeline.artifacts.attest.names import REPORT
from pipeline.artifacts.attest.predicates import Report
from pipeline.artifacts.attest.statement import Moment, Statement, make_statement
from pipeline.artifacts.attest.strict import plain
from pipeline.core.model import canonical_json, sha256_of
from pipeline.serving.report import sections
from pipeline.serving.report.figures import charts
from pipeline.serving.report.markup import Markup, element, join
from pipeline.serving.report.model import ReportData

DATA_ID = "report-data"
_SECTIONS = (
    ("summary", "Summary", sections.summary),
    ("setup", "Hardware, software, models", sections.setup),
    ("performance", "Throughput and latency", charts),
    ("memory", "Memory", sections.memory),
    ("tables", "Tables", sections.tables),
    ("attempts", "Attempts", sections.attempts),
    ("findings", "Findings and recommendations", sections.findings),
    ("evidence", "Evidence", sections.evidence),
    ("definitions", "Definitions", sections.definitions),
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
    page = join(Markup("<!doctype html>\n"), element("html", _head(data), body, lang="en"), "\n")
    return page.encode()


def _asset(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text("utf-8"))


def _head(data: ReportData) -> Markup:
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
        element("meta", name_="generator", content=data.tool),
        element("title", data.title),
        # or browsers ask for a favicon
        element("link", rel="icon", href="data:,"),
        element("style", style),
    )


def data_digest(data: ReportData) -> str:
    """Of the embedded data, however it is spelled."""
    return sha256_of(canonical_json(data.model_dump(mode="json")))


def report_statement(
    name: str, page: bytes, data: ReportData, when: Moment | None = None
) -> Statement:
    """What is claimed of a page: its digest, and the runs that its numbers came from."""
    runs = [run.digest for run in data.runs]
    claims = Report(title=plain(data.title), runs=runs, data=data_digest(data))
    body = claims.model_dump(mode="json", exclude_unset=True)
    return make_statement(name, sha256_of(page), REPORT, body, when)

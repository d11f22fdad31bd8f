"""One HTML file that needs nothing else: no network, no server, no other file.

A policy in its head forbids every request, and every script but its own; its data is embedded with
a digest.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from pipeline.model import canonical_json, sha256_of
from pipeline.report import sections
from pipeline.report.markup import Markup, element, join
from pipeline.report.model import ReportData
from pipeline.report.view import View

_HERE = Path(__file__).parent
DATA_ID = "report-data"
_SECTIONS = (
    ("summary", "Summary", sections.summary),
    ("setup", "Hardware, software, models", sections.setup),
    ("performance", "Throughput and latency", sections.performance),
    ("memory", "Memory", sections.memory),
    ("tables", "Tables", sections.tables),
    ("attempts", "Attempts", sections.attempts),
    ("findings", "Findings and recommendations", sections.findings),
    ("evidence", "Evidence", sections.evidence),
    ("definitions", "Definitions", sections.definitions),
)


def render_page(data: ReportData) -> bytes:
    """The whole file; the same data gives the same bytes."""
    view = View(data)
    parts = [(key, title, make(view)) for key, title, make in _SECTIONS]
    shown = [(key, title, body) for key, title, body in parts if body]
    head, script = _head(data), _asset("page.js")
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        _header(view, [(key, title) for key, title, _ in shown]),
        element("main", *(_section(*each) for each in shown), id="content"),
        _footer(view),
        _embedded(view),
        element("script", script),
    )
    page = join(Markup("<!doctype html>\n"), element("html", head, body, lang="en"), "\n")
    return page.encode()


def _asset(name: str) -> Markup:
    return Markup((_HERE / name).read_text("utf-8"))


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _head(data: ReportData) -> Markup:
    style, script = _asset("page.css"), _asset("page.js")
    # nothing is loaded, and no text of a run can become a script
    policy = (
        f"default-src 'none'; style-src {_source_hash(style)}; script-src {_source_hash(script)};"
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


def _header(view: View, shown: list[tuple[str, str]]) -> Markup:
    links = [element("li", element("a", title, href=f"#{key}")) for key, title in shown]
    made = join("Made ", view.show("/made"), " by ", view.show("/tool"), ".")
    redacted = " Names, addresses and serial numbers are left out." if view.data.redacted else None
    button = element("button", "Dark", id="theme", type="button", class_="screen", hidden=True)
    return element(
        "header",
        element("h1", view.show("/title")),
        element("p", made, redacted, " ", button, class_="meta"),
        element("nav", element("ul", *links), aria_label="Sections"),
    )


def _section(key: str, title: str, body: Markup) -> Markup:
    heading = element("h2", title, id=f"{key}-h")
    return element("section", heading, body, id=key, aria_labelledby=f"{key}-h")


def _footer(view: View) -> Markup:
    digest = element("code", data_digest(view.data))
    check = element("code", "sm120 verify")
    return element(
        "footer",
        element(
            "p",
            "Data of this page: ",
            digest,
            ". ",
            check,
            " compares the page with what was signed, and its data with the runs.",
        ),
    )


def data_digest(data: ReportData) -> str:
    """Of the embedded data, however it is spelled."""
    return sha256_of(canonical_json(data.model_dump(mode="json")))


def _embedded(view: View) -> Markup:
    # `</script` inside of a text must not end the element; JSON knows this spelling of `<`
    text = canonical_json(view.json).decode().replace("<", "\\u003c")
    return element(
        "script",
        Markup(text),
        type="application/json",
        id=DATA_ID,
        data_digest=sha256_of(canonical_json(view.json)),
    )

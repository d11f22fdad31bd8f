"""HTML and SVG as values: all text is escaped, unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

# Elements without content: html.spec.whatwg.org/multipage/syntax.html#void-elements
_VOID = {"br", "col", "hr", "input", "link", "meta"}


# Who made a page that holds tables and no data.
TABLES = b'content="sm120 tables"'


class Markup(str):
    """Text that is markup already."""

    # a subclass, so that only this module decides what is escaped


Child: TypeAlias = "str | Markup | None"
Attribute: TypeAlias = "str | float | bool | None"


def element(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element; `data_for` becomes `data-for`, `class_` becomes `class`; None is left out."""
    start = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        start += f" {key.rstrip('_').replace('_', '-')}"
        if value is not True:
            start += f'="{escape(value if isinstance(value, str) else plain_number(value))}"'
    # an end tag of such an element is an error of HTML
    if name in _VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Several pieces in a row."""
    pieces = (
        child if isinstance(child, Markup) else escape(child, quote=False)
        for child in children
        if child is not None
    )
    return Markup("".join(pieces))


def plain_number(value: float) -> str:
    """A coordinate or another attribute: short, never in exponents."""
    # a hundredth of a pixel is below what people see
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


class Column(NamedTuple):
    """The head of a column; numbers stand at its right edge."""

    title: str
    is_number: bool = False
    is_wide: bool = False


def html_table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Child]],
    styles: Sequence[str | None] = (),
) -> Markup:
    """A table that can be scrolled by itself where the screen is narrow.

    The first cell of a row is its head; `styles` are the classes of the rows, where they have any.
    """
    kinds = ["n" if c.is_number else "wide" if c.is_wide else None for c in columns]
    heads = [
        element("th", column.title, scope="col", class_="n" if column.is_number else None)
        for column in columns
    ]
    lines = []
    # most tables have no styles at all
    for row, style in zip_longest(rows, styles):
        first, *rest = zip(row, kinds, strict=True)
        cells = [element("td", cell, class_=kind) for cell, kind in rest]
        head = element("th", first[0], class_=first[1], scope="row")
        lines.append(element("tr", head, *cells, class_=style))
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *lines),
    )
    # focusable, so that it can be scrolled with the keyboard
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def tag(text: Child, kind: str = "") -> Markup:
    """A short coloured word."""
    return element("span", text, class_=f"tag {kind}".strip())


def is_report(head: bytes) -> bool:
    """Whether a file's first bytes look like a report of ours; a page of tables alone is none."""
    is_page = head.startswith(b"<!doctype html>") and b"Content-Security-Policy" in head[:2000]
    return is_page and TABLES not in head[:2000]

"""The data of a report while a page is made of it, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.report.markup import Child, Markup, element, join
from pipeline.report.model import ReportData, shown
from pipeline.report.pointer import look_up


@dataclass(frozen=True)
class View:
    """A report's data, as a value and as the JSON that its page embeds."""

    data: ReportData
    json: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", self.data.model_dump(mode="json"))

    def show(self, pointer: str, decimals: int | None = None) -> Markup:
        """A value by its place in the data: what is shown cannot be another number."""
        return join(shown(look_up(self.json, pointer), decimals))

    def count(self, pointer: str) -> int:
        """How many items a list of the data has."""
        return len(look_up(self.json, pointer))


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers stand at its right edge."""

    title: str
    is_number: bool = False
    is_wide: bool = False


@dataclass(frozen=True)
class Row:
    """A line of a table; its first cell is its head."""

    cells: Sequence[Child]
    style: str = ""


def table(caption: str, columns: Sequence[Column], rows: Sequence[Row]) -> Markup:
    """A table that can be scrolled by itself where the screen is narrow."""
    head = element(
        "tr",
        *(
            element("th", c.title, scope="col", class_="n" if c.is_number else None)
            for c in columns
        ),
    )
    body = [_row(row, columns) for row in rows]
    whole = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )
    # focusable, so that it can be scrolled with the keyboard
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _row(row: Row, columns: Sequence[Column]) -> Markup:
    cells = []
    for index, (cell, column) in enumerate(zip(row.cells, columns, strict=True)):
        style = "n" if column.is_number else "wide" if column.is_wide else None
        kind, scope = ("td", None) if index else ("th", "row")
        cells.append(element(kind, cell, class_=style, scope=scope))
    return element("tr", *cells, class_=row.style or None)


def tag(text: Child, kind: str = "") -> Markup:
    """A short coloured word."""
    return element("span", text, class_=f"tag {kind}".strip())

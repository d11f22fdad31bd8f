"""The data of a report while a page is made of it: every shown value names its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from posixpath import commonpath
from typing import Any

from pipeline.report.markup import Attribute, Child, Markup, element
from pipeline.report.model import ReportData, shown
from pipeline.report.pointer import look_up


class Shown(Markup):
    """A value with its place; in a table, the cell itself carries both."""

    text: str
    attributes: dict[str, Attribute]


@dataclass(frozen=True)
class View:
    """A report's data, as a value and as the JSON that its page embeds."""

    data: ReportData
    json: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", self.data.model_dump(mode="json"))

    def show(self, pointer: str, decimals: int | None = None) -> Shown:
        """A value of the data, with its place; `sm120 verify` compares both."""
        text = shown(look_up(self.json, pointer), decimals)
        # whole numbers are the rule, and a page has many
        attributes: dict[str, Attribute] = {"data_ref": pointer, "data_decimals": decimals or None}
        value = Shown(element("span", text, **attributes))
        value.text, value.attributes = text, attributes
        return value

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
    base = _base([cell for row in rows for cell in row.cells if isinstance(cell, Shown)])
    head = element(
        "tr",
        *(
            element("th", c.title, scope="col", class_="n" if c.is_number else None)
            for c in columns
        ),
    )
    body = [_row(row, columns, base) for row in rows]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
        data_base=base or None,
    )
    # focusable, so that it can be scrolled with the keyboard
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _base(values: Sequence[Shown]) -> str:
    """Where all values of a table are: said once, for there are many."""
    places = [str(value.attributes["data_ref"]).rpartition("/")[0] for value in values]
    return commonpath(places).rstrip("/") if places else ""


def _row(row: Row, columns: Sequence[Column], base: str) -> Markup:
    cells = []
    for index, (cell, column) in enumerate(zip(row.cells, columns, strict=True)):
        style = "n" if column.is_number else "wide" if column.is_wide else None
        more: dict[str, Attribute] = {"class_": style, "scope": None if index else "row"}
        if isinstance(cell, Shown):
            place = str(cell.attributes["data_ref"]).removeprefix(f"{base}/" if base else "")
            more |= {**cell.attributes, "data_ref": place}
        text = cell.text if isinstance(cell, Shown) else cell
        cells.append(element("td" if index else "th", text, **more))
    return element("tr", *cells, class_=row.style or None)


def tag(text: Child, kind: str = "") -> Markup:
    """A short coloured word."""
    return element("span", text, class_=f"tag {kind}".strip())

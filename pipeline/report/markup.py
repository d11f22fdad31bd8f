"""HTML and SVG as values: all text is escaped, unless it is markup already."""

from __future__ import annotations

from html import escape
from typing import TypeAlias

# Elements without content: html.spec.whatwg.org/multipage/syntax.html#void-elements
_VOID = {"br", "col", "hr", "input", "link", "meta"}


class Markup(str):
    """Text that is markup already."""


Child: TypeAlias = "str | Markup | None"
Attribute: TypeAlias = "str | float | bool | None"


def element(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element; `data_for` becomes `data-for`, `class_` becomes `class`; None is left out."""
    start = "".join([name, *(_attribute(n, v) for n, v in attributes.items())])
    if name in _VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Several pieces in a row."""
    return Markup("".join(_piece(child) for child in children if child is not None))


def _piece(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child, quote=False)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value if isinstance(value, str) else plain_number(value))}"'


def plain_number(value: float) -> str:
    """A coordinate or another attribute: short, never in exponents."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"

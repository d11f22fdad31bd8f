"""One page from one description, as Markdown for reviews and as HTML for browsers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.core.files import write_bytes
from pipeline.core.log import printable
from pipeline.serving.report.markup import Column, Markup, element, html_table, join
from pipeline.serving.report.page import table_page


class Block(NamedTuple):
    """A part of a page: a title, sentences, and a table where it has rows."""

    title: str
    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    level: int = 2


def write_pages(target: Path, title: str, made: str, blocks: Sequence[Block]) -> list[Path]:
    """Write TARGET.md and TARGET.html, which say the same; returns both."""
    text = [f"# {title}", "", made]
    parts: list[Markup] = []
    for block in blocks:
        # names of packages and words of resolvers are foreign: nothing of them acts here
        lines = [printable(line) for line in block.lines]
        rows = [[printable(str(cell)) for cell in row] for row in block.rows]
        text += ["", f"{'#' * block.level} {printable(block.title)}"]
        if lines:
            text += ["", *(lines if len(lines) == 1 else [f"- {line}" for line in lines])]
        if rows:
            cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
            marks = ["---"] * len(block.head)
            text += ["", *(f"| {' | '.join(row)} |" for row in [block.head, marks, *cells])]
        parts.append(element(f"h{block.level}", block.title))
        several = [element("li", line) for line in lines]
        if lines:
            parts.append(element("p", *lines) if len(lines) == 1 else element("ul", *several))
        if rows:
            columns = [Column(name) for name in block.head]
            parts.append(html_table(block.title, columns, rows))
    files = [target.with_name(f"{target.name}{ending}") for ending in (".md", ".html")]
    write_bytes(files[0], "\n".join([*text, ""]).encode())
    write_bytes(files[1], table_page(title, made, [join(*parts)]))
    return files

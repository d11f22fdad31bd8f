"""The pages: their code blocks, the commands and paths they name, and where their links lead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.S | re.M
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# `sm120 image lock IMAGE` (`--dry-run` shows it first)
_OPTION_OF = re.compile(r"`(?P<command>sm120 [^`\n]+)`\s\(`(?P<option>--[^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is the comment above it, `start` and `end` where its text stands."""

    kind: str
    text: str
    mark: str
    start: int
    end: int


@dataclass(frozen=True)
class Page:
    """One page of the documentation."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return [
            Block(m["kind"], m["text"], m["mark"] or "", m.start("text"), m.end("text"))
            for m in _FENCE.finditer(self.text)
        ]

    @property
    def prose(self) -> str:
        """The page without its fenced blocks."""
        return _FENCE.sub("", self.text)

    @property
    def spans(self) -> list[str]:
        """What stands between single backticks."""
        return _SPAN.findall(self.prose)

    @property
    def links(self) -> list[str]:
        return _LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """The headings, as GitHub names them in links."""
        return {anchor(heading) for heading in _HEADING.findall(self.prose)}

    def commands(self) -> Iterator[list[str]]:
        """Every command line in blocks of shell and between backticks, as words."""
        yield from self.typed()
        for span in self.spans:
            if span.startswith(("sm120 ", "nox -s ", "python3 noxfile.py ")):
                yield _words(span)
        for match in _OPTION_OF.finditer(self.prose):
            yield _words(f"{match['command']} {match['option']}")

    def typed(self) -> Iterator[list[str]]:
        """Every command line in blocks of shell, as words: what a reader types as it stands."""
        for block in self.blocks:
            if block.kind in ("sh", "console"):
                yield from _in_block(block)

    def bare_options(self) -> list[str]:
        """Options between backticks that stand there without their command."""
        return [re.split(r"[ =\[]", span)[0] for span in self.spans if re.match(r"--\w", span)]


def pages() -> list[Page]:
    """README, CONTRIBUTING, CHANGELOG, the page about the roles and docs/, in this order."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ansible/README.md")
    top = [ROOT / name for name in names]
    return [Page(path) for path in [*top, *sorted(DOCS.glob("*.md"))]]


def anchor(heading: str) -> str:
    """A heading, as GitHub names it in links."""
    plain = re.sub(r"[^\w\- ]", "", heading.lower())
    return plain.replace(" ", "-")


def _in_block(block: Block) -> Iterator[list[str]]:
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        if block.kind == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        for part in re.split(r" && |; | \| ", line):
            yield _words(part)


def _words(line: str) -> list[str]:
    """A line as a shell splits it, without comments; prose that is no command gives what it can."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()

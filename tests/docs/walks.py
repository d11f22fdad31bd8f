"""Walks: the console blocks of a page run one after another, and their output compared.

A block is part of a walk when the comment above it says so: `<!-- walk: WORLD -->`. Lines that
begin with `$ ` are run, in one world for each page and walk; what follows must come out.
A line `…` stands for any lines. Times, temporary paths and random digests are not compared, nor how
many answers a gate had kept.

A block below `<!-- recorded -->` needs the built engine images, so it is run only on request:
`python -m tests.docs --record` in a checkout whose store holds them, and `pytest --big`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import ROOT, Block, Page
from tests.unit.support import Command

# read before the unit tests clear SM120_ from the environment
RECORDED = "recorded"
WRITE = bool(os.environ.get("SM120_WRITE_DOCS"))

_ANY_LINES = r"^[ │├└─]*…[ ]*\n"
_SECONDS = re.compile(r"\b\d+(\.\d+)? (ms|s|min|h)( \d+ (s|min))?\b")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?( UTC|Z)?")
_RATE = re.compile(r"\d+(\.\d+)? [kMG]?B/s")
# of a gate: how much of it an earlier run answered
_KEPT = re.compile(r", (all|\d+) judged before\b")
_HEX = re.compile(r"(?<![0-9a-f])[0-9a-f]{12,64}(?![0-9a-f])")
_SPACES = re.compile(r"(?<=\S) {2,}|-{3,}")


@dataclass
class World:
    """Where a walk happens: the command, and what stands here for names that a page uses."""

    sm120: Command
    names: Mapping[str, str] = field(default_factory=dict)
    code: int = 0

    def run(self, line: str) -> str:
        """What a person would see after typing the line, with the page's own names in it."""
        for on_page, here in self.names.items():
            line = line.replace(on_page, here)
        output = self._sm120(line) if line.startswith("sm120 ") else self._shell(line)
        for on_page, here in self.names.items():
            output = output.replace(here, on_page)
        return output

    def _sm120(self, line: str) -> str:
        line, _, target = line.replace(" > ", " >> ").partition(" >> ")
        ended = self.sm120(*shlex.split(line, comments=True)[1:])
        self.code = ended.code
        if target:
            with (self.sm120.cwd / target.strip()).open("a", encoding="utf-8") as file:
                file.write(ended.out)
            return ""
        return ended.out + _error_in(ended.err, ended.code)

    def _shell(self, line: str) -> str:
        if line == "echo $?":
            return f"{self.code}\n"
        ended = subprocess.run(
            ["sh", "-c", line], cwd=self.sm120.cwd, capture_output=True, text=True, check=False
        )
        self.code = ended.returncode
        return ended.stdout + ended.stderr


class RealWorld(World):
    """This checkout and the store of whoever runs it, or another one, in processes of their own."""

    def __init__(self, store: Path, **env: str) -> None:
        self.names = {"/home/you/.cache/sm120": str(store)}
        self._env = {**os.environ, "SM120_STORE": str(store), **env}

    def _sm120(self, line: str) -> str:
        command = [sys.executable, "-m", "pipeline", *shlex.split(line, comments=True)[1:]]
        ended = subprocess.run(
            command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False
        )
        self.code = ended.returncode
        return ended.stdout + _error_in(ended.stderr, ended.returncode)


@dataclass(frozen=True)
class Typed:
    """One line that is typed, as the page has it, and what the page shows after it."""

    source: str
    output: str

    @property
    def line(self) -> str:
        return re.sub(r"\\\n\s*", "", self.source)

    @property
    def is_shortened(self) -> bool:
        return re.search(_ANY_LINES, self.output, re.M) is not None

    def showing(self, output: str) -> Typed:
        """The same line with its real output; an empty line before the next command stays."""
        gap = "\n" if self.output.endswith("\n\n") or self.output == "\n" else ""
        return Typed(self.source, output.rstrip("\n") + "\n" + gap if output else gap)


def walks(page: Page) -> dict[str, list[Block]]:
    """The blocks of each walk of a page, by the name of its world."""
    by_world: dict[str, list[Block]] = {}
    for block in page.blocks:
        if block.mark == RECORDED or block.mark.startswith("walk: "):
            by_world.setdefault(block.mark.removeprefix("walk: "), []).append(block)
    return by_world


def typed(text: str) -> list[Typed]:
    """The lines of a block with their outputs."""
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    matches = [re.match(r"((?:.*\\\n)*.*)\n", part) for part in parts]
    return [Typed(m[1], part[m.end() :]) for m, part in zip(matches, parts, strict=True) if m]


def walk(page: Page, name: str, world: World, write: bool = WRITE) -> list[str]:
    """Run a walk and report each difference; or mend what was not shortened by hand."""
    wrong: list[tuple[Typed, str]] = []
    blocks: list[tuple[Block, list[tuple[Typed, str]]]] = []
    for block in walks(page)[name]:
        lines = [(one, world.run(one.line)) for one in typed(block.text)]
        wrong += [(one, real) for one, real in lines if not same(one.output, real)]
        blocks.append((block, lines))
    if write and wrong:
        # all of the walk, so that digests and times on a page are those of one run
        _write(page, [(block, "".join(map(_mended, lines))) for block, lines in blocks])
        wrong = [(one, real) for one, real in wrong if one.is_shortened]
    return [
        f"{page.name}: $ {one.line}\n--- page\n{one.output}--- real\n{real}" for one, real in wrong
    ]


def _mended(line: tuple[Typed, str]) -> str:
    one, real = line
    shown = one if one.is_shortened else one.showing(real)
    return f"$ {shown.source}\n{shown.output}"


def _error_in(stderr: str, code: int) -> str:
    """The two lines of an error; steps and progress are not what a page shows."""
    return stderr[stderr.rfind("sm120: ") :] if code else ""


def same(shown: str, real: str) -> bool:
    """Whether an output is the one that a page shows, but for what differs between any two runs."""
    shown, real = shown.rstrip() + "\n", real.rstrip() + "\n"
    parts = re.split(_ANY_LINES, shown, flags=re.M)
    if len(parts) == 1:
        return plain(shown) == plain(real)
    pattern = "(?:.*\n)*?".join(re.escape(_flat(part)) for part in parts)
    return re.fullmatch(pattern, _flat(real)) is not None


def plain(text: str) -> str:
    """A text without what differs between any two runs; equal digests stay equal."""
    seen: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return seen.setdefault(match[0][:12], f"#{len(seen) + 1}")

    return _HEX.sub(number, _flat(text, keep_hex=True))


def _flat(text: str, keep_hex: bool = False) -> str:
    for pattern in (_RATE, _SECONDS, _MOMENT):
        text = pattern.sub("#", text)
    text = _KEPT.sub("", text)
    text = text if keep_hex else _HEX.sub("#", text)
    return _SPACES.sub("  ", text)


def _write(page: Page, blocks: list[tuple[Block, str]]) -> None:
    text = page.text
    for block, new in reversed(blocks):
        text = text[: block.start] + new + text[block.end :]
    page.path.write_text(text, encoding="utf-8")

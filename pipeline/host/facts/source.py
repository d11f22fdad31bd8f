"""A captured machine, asked for files and for what programs said."""

from __future__ import annotations

import base64
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import FactsUnreadable
from pipeline.host.facts.capture import take
from pipeline.known import Known, unknown
from pipeline.model import Frozen


class FileSaid(Frozen):
    """A file's text or bytes, or why it could not be read."""

    text: str | None = None
    base64: str | None = None
    unknown: str | None = None


class ProgramSaid(Frozen):
    """How a program ended and what it said, or why it was not asked."""

    code: int | None = None
    out: str = ""
    err: str = ""
    unknown: str | None = None


class Capture(Frozen):
    """What capture.py writes."""

    version: int
    taken_at: int
    root: str
    files: dict[str, FileSaid]
    links: dict[str, str]
    commands: dict[str, ProgramSaid]

    def text(self, path: str) -> Known[str]:
        """A file's text, without the blanks around it."""
        said = self.files.get(path)
        if said is None or (said.text is None and said.unknown is None):
            return unknown(f"{path}: was not captured")
        if said.text is None:
            return unknown(f"{path}: {said.unknown}")
        return said.text.strip() if said.text.strip() else unknown(f"{path}: is empty")

    def data(self, path: str) -> Known[bytes]:
        """A file's bytes."""
        said = self.files.get(path)
        if said is None or said.base64 is None:
            return unknown(f"{path}: {(said and said.unknown) or 'was not captured'}")
        try:
            return base64.b64decode(said.base64, validate=True)
        except ValueError as error:
            return unknown(f"{path}: {error}")

    def words(self, name: str) -> Known[str]:
        """What a program said, where it ended well."""
        said = self.commands.get(name)
        if said is None:
            return unknown(f"{name}: was not asked")
        if said.unknown is not None:
            return unknown(said.unknown)
        if said.code != 0:
            first = (said.err or said.out).strip().splitlines()[:1]
            return unknown(f"{name} ended with code {said.code}: {' '.join(first) or 'no words'}")
        return said.out if said.out.strip() else unknown(f"{name}: said nothing")

    def matching(self, pattern: str) -> list[str]:
        """Captured paths that match a pattern."""
        return sorted(p for p in self.files if fnmatchcase(p, pattern))


def read_capture(place: Path | None) -> Capture:
    """This machine, a copied tree (a folder), or a capture that was kept (a file)."""
    if place is None or place.is_dir():
        return Capture.model_validate(take(str(place or "/")))
    try:
        value: Any = json.loads(place.read_bytes())
        return Capture.model_validate(value)
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        words = str(error).splitlines()[0]
        raise FactsUnreadable(f"{place}: is no capture: {words}") from error

"""A captured machine: its files and its programs' output, each read or with a reason why not."""

from __future__ import annotations

import base64
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from pipeline.core.errors import FactsUnreadable
from pipeline.core.files import read_plain
from pipeline.core.known import Known, unknown
from pipeline.core.model import Frozen
from pipeline.hosts.facts.capture import take

# A captured machine with eight cards has some two megabytes, its facts some hundred kilobytes.
MOST_BYTES = 64 << 20
Model = TypeVar("Model", bound=Frozen)


class CapturedFile(Frozen):
    """A file's text or bytes, or why it could not be read."""

    text: str | None = None
    base64: str | None = None
    unknown: str | None = None


_MISSING = CapturedFile()


class CapturedCommand(Frozen):
    """Exit code and output of a program, or why it did not run."""

    code: int | None = None
    out: str = ""
    err: str = ""
    unknown: str | None = None


class Capture(Frozen):
    """What capture.py writes."""

    version: int
    taken_at: int
    root: str
    files: dict[str, CapturedFile]
    links: dict[str, str]
    commands: dict[str, CapturedCommand]

    def text(self, path: str) -> Known[str]:
        """A file's text, without the blanks around it."""
        file = self.files.get(path, _MISSING)
        if file.text is None:
            return unknown(f"{path}: {file.unknown or 'was not captured'}")
        return file.text.strip() or unknown(f"{path}: is empty")

    def data(self, path: str) -> Known[bytes]:
        """A file's bytes."""
        file = self.files.get(path, _MISSING)
        if file.base64 is None:
            return unknown(f"{path}: {file.unknown or 'was not captured'}")
        try:
            return base64.b64decode(file.base64, validate=True)
        except ValueError as error:
            return unknown(f"{path}: {error}")

    def output(self, name: str) -> Known[str]:
        """The output of a program that succeeded."""
        command = self.commands.get(name)
        if command is None:
            return unknown(f"{name}: was not run")
        if command.unknown is not None:
            return unknown(command.unknown)
        if command.code != 0:
            # programs name the error first and then print their help
            first = " ".join((command.err or command.out).strip().splitlines()[:1])
            return unknown(f"{name} ended with code {command.code}: {first or 'no output'}")
        return command.out if command.out.strip() else unknown(f"{name}: no output")

    def matching(self, pattern: str) -> list[str]:
        """Captured paths that match a pattern."""
        return sorted(p for p in self.files if fnmatchcase(p, pattern))


def read_capture(place: Path | None) -> Capture:
    """Capture this machine or a copied tree (a folder), or read a capture (a file)."""
    if place is None or place.is_dir():
        return Capture.model_validate(take(str(place or "/")))
    hint = "Make one with `sm120 host facts --capture`."
    return read_model(place, Capture, "a capture of a machine", hint)


def read_model(path: Path, model: type[Model], what: str, hint: str = "") -> Model:
    """Read a file that anybody may have written: limit its size, and check it."""
    cause: Exception | None = None
    try:
        data = read_plain(path, MOST_BYTES)
        if data is not None:
            return model.model_validate_json(data)
        reason = f"it is larger than {MOST_BYTES} bytes"
    except OSError as error:
        cause, reason = error, str(error.strerror)
    except ValidationError as error:
        # without the names of our classes
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "its contents"
        not_json = first["type"] == "json_invalid"
        cause, reason = error, "it is not JSON" if not_json else f"{place}: {first['msg']}"
    except RecursionError as error:
        cause, reason = error, str(error).splitlines()[0]
    raise FactsUnreadable(f"{path}: not {what}: {reason}", hint) from cause

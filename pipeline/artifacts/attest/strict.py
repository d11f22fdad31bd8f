"""Reading evidence of unknown origin: JSON and base64 that every reader understands alike."""

from __future__ import annotations

import base64
import unicodedata
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.core import foreign_json
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import Frozen

Model = TypeVar("Model", bound=Frozen)
# bills of materials are the largest statements: a few megabytes
MAX_BYTES = 16 << 20
MAX_DEPTH = 48
MAX_STRING = 16 << 20
_LINE_ENDS = "\n\t"
# Unicode categories that people cannot see or that change how a text looks: control, format,
# surrogate, private, unassigned, line and paragraph separators.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def read_signed_json(data: bytes, what: str, max_bytes: int = MAX_BYTES) -> Any:
    """A JSON value that every reader understands alike, or an error that names the problem."""
    try:
        value = foreign_json.read_json(data, most_bytes=max_bytes, most_depth=MAX_DEPTH)
    except foreign_json.JsonInvalid as error:
        raise RecordInvalid(f"{what}: {error}") from error
    # keys are ASCII and strings hold no invisible characters; a loop, as depth may be large
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            for key in item:
                if not (key.isascii() and key.isprintable()):
                    raise RecordInvalid(f"{what}: the key {ascii(key)[:60]} is not plain ASCII")
            todo += item.values()
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, str):
            if len(item) <= MAX_STRING and item.isascii() and item.isprintable():
                continue
            # it may look different from what it is
            text = f"{what}: the text {ascii(item)[:60]}"
            if len(item) > MAX_STRING:
                raise RecordInvalid(f"{text} is longer than {MAX_STRING} characters")
            for char in set(item) - {*_LINE_ENDS}:
                if unicodedata.category(char) in _HIDDEN:
                    raise RecordInvalid(
                        f"{text} contains the invisible character U+{ord(char):04X}"
                    )
            if not unicodedata.is_normalized("NFC", item):
                raise RecordInvalid(f"{text} is not in Unicode normal form C")
    return value


def as_model(
    model: type[Model], value: Any, what: str, whole: str = "the file", *, strict: bool = False
) -> Model:
    """Reads a value of unknown origin as a closed model; the error names its first mistake."""
    try:
        return model.model_validate(value, strict=strict or None)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"]) or whole
        raise RecordInvalid(f"{what}: {field}: {first['msg']}") from error


def plain(text: str) -> str:
    """Makes a foreign text fit for a statement: normal form, no invisible characters."""
    shown = (
        c if c in _LINE_ENDS or unicodedata.category(c) not in _HIDDEN else " "
        for c in unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
    )
    return "".join(shown)


def read_base64(text: str, what: str) -> bytes:
    """Base64 in its canonical form: no line ends, standard alphabet, no spare bits set."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    # UnicodeEncodeError and binascii.Error are ValueErrors
    except ValueError as error:
        raise RecordInvalid(f"{what}: is not base64") from error
    # two spellings of one payload would be two digests of one statement
    if base64.b64encode(data).decode() != text:
        raise RecordInvalid(f"{what}: is not base64 in its canonical form")
    return data

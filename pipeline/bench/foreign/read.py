"""Recognises which program wrote a file, and reads it. The file may be hostile: all is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.bench.foreign.model import ForeignCell, ForeignRun
from pipeline.bench.foreign.programs import AIPERF_FILE, READERS
from pipeline.errors import RunInvalid
from pipeline.files import read_plain
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import sha256_of

# A file may hold every text and gap of thousands of requests.
_MOST_BYTES = 64 << 20
_MOST_RESULTS = 10_000  # lines of a file, or runs of a sweep
_SWEEP = "run=*.json"
_HINT = (
    "A RUN is a folder that `sm120 bench` made: it holds bench.json. Of other programs, sm120 reads"
    " results of vllm bench serve and sweep, sglang.bench_serving and aiperf."
)


def read_foreign(path: Path) -> ForeignRun:
    """The result of another program, by its file or folder."""
    files = _files(path)
    values, digests = [], []
    for file in files:
        try:
            data = read_plain(file, _MOST_BYTES)
        except OSError as error:
            raise RunInvalid(f"{file}: cannot be read: {error.strerror or error}") from error
        if data is None:
            raise RunInvalid(f"{file}: larger than {_MOST_BYTES} bytes")
        digests.append(sha256_of(data))
        values += _values(file, data)
    # of a folder: all of its files in order
    digest = digests[0] if len(files) == 1 else sha256_of("".join(digests).encode())
    objects = [value for value in values if isinstance(value, dict)]
    for reader in READERS if objects and objects[0] is values[0] else ():
        if reader.is_of(objects[0]):
            cells = [reader.cell(each) for each in objects if reader.is_of(each)]
            if not any(cell.numbers for cell in cells):
                raise RunInvalid(f"{path}: is of {reader.program}, but holds no numbers")
            return ForeignRun(
                program=reader.program, file=path.name, digest=digest, cells=_merged(cells)
            )
    raise RunInvalid(f"{path}: is not a result of a program that is known here", _HINT)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / AIPERF_FILE).is_file():
        return [path / AIPERF_FILE]
    runs = []
    for file in path.rglob(_SWEEP):
        runs.append(file)
        if len(runs) > _MOST_RESULTS:
            raise RunInvalid(f"{path}: has more than {_MOST_RESULTS} results")
    if not runs:
        raise RunInvalid(f"{path}: holds no result that is known here", _HINT)
    return sorted(runs)


def _values(file: Path, data: bytes) -> list[Any]:
    """A list, one object, or an object on each line."""
    lines = data.strip().split(b"\n", _MOST_RESULTS)
    if len(lines) > _MOST_RESULTS and lines[0].rstrip().endswith(b"}"):
        raise RunInvalid(f"{file}: has more than {_MOST_RESULTS} lines")
    try:
        # the first line of an indented file is one bracket
        is_object_per_line = len(lines) > 1 and isinstance(_json(lines[0]), dict)
    except JsonInvalid:
        is_object_per_line = False
    try:
        if is_object_per_line:
            return [_json(line) for line in lines if line.strip()]
        value = _json(data)
    except JsonInvalid as error:
        raise RunInvalid(f"{file}: {error}", _HINT) from error
    return value if isinstance(value, list) else [value]


def _json(data: bytes) -> Any:
    # any_int: nanoseconds of clocks and the like; Infinity: sglang's default rate
    return read_json(data, most_bytes=_MOST_BYTES, any_int=True, no_number_is_null=True)


def _merged(cells: Iterable[ForeignCell]) -> list[ForeignCell]:
    """Repeats of one cell as one; cells of one name with other settings get names of their own."""
    merged: dict[str, ForeignCell] = {}
    for cell in cells:
        name, number = cell.name, 2
        while name in merged and merged[name].settings != cell.settings:
            name, number = f"{cell.name}-{number}", number + 1
        numbers = {each.name: each for each in merged[name].numbers} if name in merged else {}
        for each in cell.numbers:
            before = numbers[each.name].values if each.name in numbers else []
            numbers[each.name] = each.model_copy(update={"values": [*before, *each.values]})
        update = {"name": name, "numbers": list(numbers.values())}
        merged[name] = cell.model_copy(update=update)
    return list(merged.values())

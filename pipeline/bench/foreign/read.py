"""Which program wrote a file, and its numbers. Files may be anybody's: all is bounded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.bench.foreign import aiperf, guidellm
from pipeline.bench.foreign.aiperf import is_aiperf, read_aiperf
from pipeline.bench.foreign.guidellm import is_guidellm, read_guidellm
from pipeline.bench.foreign.lil_bench import is_lil_bench, read_lil_bench
from pipeline.bench.foreign.llama_bench import is_llama_bench, read_llama_bench
from pipeline.bench.foreign.model import ForeignCell, ForeignRun, Program, merged
from pipeline.bench.foreign.sglang import is_sglang, read_sglang
from pipeline.bench.foreign.vllm import is_vllm, read_vllm
from pipeline.errors import RunInvalid
from pipeline.files import read_plain
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import sha256_of

_IsOf: TypeAlias = Callable[[Any], bool]
_Read: TypeAlias = Callable[[list[Any]], list[ForeignCell]]
# with every text and gap of thousands of requests in it
_MOST_BYTES = 64 << 20
_MOST_RESULTS = 10_000  # lines of a file, or runs of a sweep
_TEST = b'"avg_ts"'  # only llama-bench has it
_JSON_STARTS = (b"[", b"]", b"{", b"}", b'"')  # of a line; it writes a field on each
_GZIP = b"\x1f\x8b"
_SWEEP = "run=*.json"
_READERS: tuple[tuple[Program, _IsOf, _Read], ...] = (
    ("vllm bench", is_vllm, read_vllm),
    ("sglang.bench_serving", is_sglang, read_sglang),
    ("aiperf", is_aiperf, read_aiperf),
    ("guidellm", is_guidellm, read_guidellm),
    ("llama-bench", is_llama_bench, read_llama_bench),
    ("lil-bench", is_lil_bench, read_lil_bench),
)
_HINT = (
    "A RUN is a folder that `sm120 bench` made: it holds bench.json. Known of other programs are"
    " results of vllm bench serve and sweep, sglang.bench_serving, aiperf, guidellm, llama-bench"
    " (-o json, -o jsonl) and lil-bench."
)


def read_foreign(path: Path) -> ForeignRun:
    """The result of another program, by its file or folder."""
    files = _files(path)
    contents = [_read(file) for file in files]
    # of a folder: all of its files in order
    digest = sha256_of(b"".join(sha256_of(data).encode() for data in contents))
    digest = sha256_of(contents[0]) if len(contents) == 1 else digest
    values = [v for file, data in zip(files, contents, strict=True) for v in _values(file, data)]
    program, cells = _recognised(path, values)
    return ForeignRun(program=program, file=path.name, digest=digest, cells=cells)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for name in (aiperf.FILE, guidellm.FILE):
        if (path / name).is_file():
            return [path / name]
    runs = []
    for file in path.rglob(_SWEEP):
        runs.append(file)
        if len(runs) > _MOST_RESULTS:
            raise RunInvalid(f"{path}: has more than {_MOST_RESULTS} results")
    if not runs:
        raise RunInvalid(f"{path}: holds no result that is known here", _HINT)
    return sorted(runs)


def _read(file: Path) -> bytes:
    try:
        data = read_plain(file, _MOST_BYTES)
    except OSError as error:
        raise RunInvalid(f"{file}: cannot be read: {error.strerror or error}") from error
    if data is not None and data.startswith(_GZIP):
        data = _unpacked(file, data)
    if data is None:
        raise RunInvalid(f"{file}: larger than {_MOST_BYTES} bytes")
    return data


def _unpacked(file: Path, data: bytes) -> bytes | None:
    """A gzip file; none where it holds more than anybody reads."""
    inflate = zlib.decompressobj(wbits=31)
    try:
        text = inflate.decompress(data, _MOST_BYTES + 1)
    except zlib.error as error:
        raise RunInvalid(f"{file}: is a damaged gzip file ({error})") from error
    return None if len(text) > _MOST_BYTES else text


def _values(file: Path, data: bytes) -> list[Any]:
    """A list, one object, or an object on each line."""
    lines = data.strip().split(b"\n", _MOST_RESULTS)
    if len(lines) > _MOST_RESULTS and lines[0].rstrip().endswith(b"}"):
        raise RunInvalid(f"{file}: has more than {_MOST_RESULTS} lines")
    try:
        if len(lines) > 1 and _is_whole(lines[0]):
            return [_json(line) for line in lines if line.strip()]
        value = _json(_without_log(data) if _TEST in data else data)
    except JsonInvalid as error:
        raise RunInvalid(f"{file}: {error}", _HINT) from error
    return value if isinstance(value, list) else [value]


def _without_log(data: bytes) -> bytes:
    """ik_llama.cpp prints lines of its log into what llama-bench writes."""
    lines = data.splitlines(keepends=True)
    return b"".join(line for line in lines if line.lstrip()[:1] in _JSON_STARTS)


def _is_whole(line: bytes) -> bool:
    """Whether a line is an object by itself; of an indented file it is one bracket."""
    try:
        return isinstance(_json(line), dict)
    except JsonInvalid:
        return False


def _json(data: bytes) -> Any:
    # any_int: nanoseconds of clocks and the like; Infinity: sglang's default rate
    return read_json(data, most_bytes=_MOST_BYTES, any_int=True, no_number_is_null=True)


def _recognised(path: Path, values: list[Any]) -> tuple[Program, list[ForeignCell]]:
    for program, is_of, read in _READERS:
        if values and is_of(values[0]):
            cells = read([value for value in values if is_of(value)])
            if not any(cell.numbers for cell in cells):
                raise RunInvalid(f"{path}: is of {program}, but holds no numbers")
            return program, merged(cells)
    raise RunInvalid(f"{path}: is not a result of a program that is known here", _HINT)

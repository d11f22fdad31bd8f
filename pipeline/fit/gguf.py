"""The head of a GGUF file: its metadata and its table of tensors, and nothing of the tensors.

The `gguf` package maps whole files and trusts their counts; this reader stays below a stated size,
trusts no length before it has compared it with the file, and needs nothing installed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import ModelUnreadable
from pipeline.fit.ggml import BY_NUMBER, GgmlType

# Version 1 had 32-bit counts and no file of today has it (ggml/docs/gguf.md).
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Far above any model (Kimi K2.6 has 1,096 tensors), far below what would fill the memory.
_MOST_TENSORS, _MOST_KEYS, _MOST_DIMENSIONS = 200_000, 20_000, 4
_MOST_NAME, _MOST_STRING, _MOST_ARRAY = 256, 16 << 20, 4_000_000
_MOST_LAYERS = 1024
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """One tensor as its file lists it."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    n_bytes: int

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Skipped:
    """An array that was passed over; it is never mistaken for a number."""

    length: int


@dataclass(frozen=True)
class GgufHeader:
    """The metadata and tensors of one file."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[Tensor]


class _HeaderReader:
    def __init__(self, handle: BinaryIO, path: Path, size: int) -> None:
        self._handle, self._path, self._size = handle, path, size

    def fail(self, what: str) -> ModelUnreadable:
        return ModelUnreadable(
            f"{self._path.name}: {what}",
            "Compare it with its lock (`sm120 weights verify`); it may be cut short.",
        )

    @property
    def left(self) -> int:
        return self._size - self._handle.tell()

    @property
    def at(self) -> int:
        return self._handle.tell()

    def take(self, n: int, what: str) -> bytes:
        # compared first: read() would try to allocate a claimed length of exabytes
        data = self._handle.read(n) if n <= self.left else b""
        if len(data) != n:
            raise self.fail(f"{what} lies beyond the end of the file")
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str, most: int = _MOST_STRING) -> str:
        length = self.number("Q", what)
        if length > most:
            raise self.fail(f"{what} claims {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not text") from None

    def value(self, key: str) -> Any:
        kind = self.number("I", key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key} is of type {kind}, which GGUF does not have")
        return self.number(_SCALARS[kind], key)

    def array(self, key: str) -> Skipped | list[Any]:
        """Numbers, one for each layer; vocabularies are large, and are passed over."""
        kind, count = self.number("I", key), self.number("Q", key)
        if count > _MOST_ARRAY:
            raise self.fail(f"{key} claims {count} values")
        if kind == _STRING:
            for _ in range(count):
                length = self.number("Q", key)
                self.skip(length, key)
        elif kind in _SCALARS and count <= _MOST_LAYERS:
            size = count * struct.calcsize(f"<{_SCALARS[kind]}")
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(size, key)))
        elif kind in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[kind]}"), key)
        else:
            raise self.fail(f"{key} is an array of type {kind}")
        return Skipped(count)

    def skip(self, n: int, what: str) -> None:
        if n > self.left:
            raise self.fail(f"{what} lies beyond the end of the file")
        self._handle.seek(n, 1)


def read_header(path: Path) -> GgufHeader:
    """The head of one file, every claim of which the file can hold."""
    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            return _read(_HeaderReader(handle, path, size), path, size)
    except OSError as error:
        raise ModelUnreadable(
            f"{path}: cannot be read: {error.strerror}",
            "Change its owner or mode, or name another file.",
        ) from error


def _read(reader: _HeaderReader, path: Path, size: int) -> GgufHeader:
    if reader.take(4, "the magic") != _MAGIC:
        raise reader.fail("is not a GGUF file (it does not begin with GGUF)")
    version = reader.number("I", "the version")
    if version not in _VERSIONS:
        raise reader.fail(f"is GGUF version {version}; 2 and 3 are known")
    n_tensors, n_keys = reader.number("Q", "a count"), reader.number("Q", "a count")
    if n_tensors > _MOST_TENSORS or n_keys > _MOST_KEYS:
        raise reader.fail(f"claims {n_tensors} tensors and {n_keys} keys")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = reader.string("a key", _MOST_NAME)
        if key in metadata:
            raise reader.fail(f"has the key {key!r} twice")
        metadata[key] = reader.value(key)
    listed = [_listed(reader) for _ in range(n_tensors)]
    return GgufHeader(path, metadata, list(_placed(reader, listed, metadata, size)))


def _listed(reader: _HeaderReader) -> tuple[Tensor, int]:
    """A tensor without what its rows may carry, and where it begins."""
    name = reader.string("a tensor's name", _MOST_NAME)
    n = reader.number("I", name)
    if not 1 <= n <= _MOST_DIMENSIONS:
        raise reader.fail(f"{name} has {n} dimensions")
    shape = struct.unpack(f"<{n}Q", reader.take(8 * n, name))
    number, offset = reader.number("I", name), reader.number("Q", name)
    kind = BY_NUMBER.get(number)
    if kind is None:
        raise reader.fail(f"{name} is of type {number}, which is not supported")
    # blocks run along the first dimension, which GGUF lists as the fastest
    if min(shape) < 1 or math.prod(shape) > 1 << 50 or shape[0] % kind.values:
        raise reader.fail(f"{name} of shape {list(shape)} cannot be {kind.name}")
    return Tensor(name, shape, kind, kind.size(math.prod(shape))), offset


def _placed(
    reader: _HeaderReader, listed: list[tuple[Tensor, int]], metadata: dict[str, Any], size: int
) -> Iterator[Tensor]:
    """Tensors with their bytes: none outside the file, none inside another."""
    alignment = metadata.get("general.alignment", 32)  # 32 is the format's default
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
        raise reader.fail(f"general.alignment is {alignment!r}")
    if len({tensor.name for tensor, _ in listed}) != len(listed):
        raise reader.fail("lists a tensor twice")
    # tensors begin at the next border after the head; their offsets count from there
    begin = -(-reader.at // alignment) * alignment
    ordered = sorted(listed, key=lambda pair: pair[1])
    ends = [*(start for _, start in ordered), max(0, size - begin)][1:]  # a first part may be empty
    for (tensor, start), end in zip(ordered, ends, strict=True):
        if start % alignment:
            raise reader.fail(f"{tensor.name} begins at {start}, which is not aligned")
        if start + tensor.n_bytes > end:
            raise reader.fail(f"{tensor.name} does not fit at its offset")
        # their rows carry a few bytes more than the blocks: the next tensor's offset shows how many
        yield replace(tensor, n_bytes=end - start) if tensor.kind.row_scaled else tensor

"""One model from the heads of all parts of its GGUF file: metadata, and the table of tensors.

The `gguf` package maps whole files and trusts their counts; this reader stays below a stated size,
trusts no length before it has compared it with the file, and needs nothing installed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.core.errors import ModelUnreadable
from pipeline.core.model import Frozen
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.fit.fields import describe_value

# Version 1 had 32-bit counts and no file of today has it (ggml/docs/gguf.md).
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Far above any model (Kimi K2.6 has 1,096 tensors), far below what would fill the memory.
_MOST_TENSORS, _MOST_KEYS, _MOST_DIMENSIONS = 200_000, 20_000, 4
_MOST_NAME, _MOST_STRING, _MOST_ARRAY = 256, 16 << 20, 4_000_000
_MOST_LAYERS = 1024
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_LONGEST_NAME = 64  # of an architecture; those of llama.cpp have up to 20 letters
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # llama.cpp: llama_split_path


@dataclass(frozen=True)
class GgmlType:
    """A type of tensors: so many values in a block of so many bytes."""

    name: str
    values: int
    n_bytes: int
    row_scaled: bool = False  # a few bytes more for each row; the file's own offsets show how many

    def size(self, weights: int) -> int:
        """Bytes of that many weights, without what rows may carry."""
        return weights // self.values * self.n_bytes  # a row is a whole number of blocks


class _GgmlTypes(Frozen):
    """`ggml_types.yaml`: name, values and bytes of a block, by number."""

    mainline: dict[int, tuple[str, int, int]]
    ik_llama: dict[int, tuple[str, int, int]]
    row_scaled: dict[int, tuple[str, int, int]]


_TYPES = read_yaml(Path(__file__).with_name("ggml_types.yaml"), _GgmlTypes)
BY_NUMBER = {
    number: GgmlType(*row, table is _TYPES.row_scaled)
    for table in (_TYPES.mainline, _TYPES.ik_llama, _TYPES.row_scaled)
    for number, row in table.items()
}
BY_NAME = {kind.name: kind for kind in BY_NUMBER.values()}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as its file lists it."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The metadata and tensors of one file."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


class _HeaderReader:
    """Reads the head of one file, every claim of which the file can hold."""

    def __init__(self, handle: BinaryIO, path: Path, kept: Collection[str] = ()) -> None:
        self._handle, self._path, self._size = handle, path, path.stat().st_size
        self._kept = kept  # keys whose lists of texts are wanted

    def fail(self, what: str) -> ModelUnreadable:
        hint = "Compare it with its lock (`sm120 weights verify`); it may be cut short."
        return ModelUnreadable(f"{self._path.name}: {what}", hint)

    def require(self, good: object, what: str) -> None:
        if not good:
            raise self.fail(what)

    def take(self, n: int, what: str) -> bytes:
        # compared first: read() would try to allocate a claimed length of exabytes
        data = self._handle.read(n) if n <= self._size - self._handle.tell() else b""
        if len(data) != n:
            raise self.fail(f"{what} lies beyond the end of the file")
        return data

    def skip(self, n: int, what: str) -> None:
        if n > self._size - self._handle.tell():
            raise self.fail(f"{what} lies beyond the end of the file")
        self._handle.seek(n, 1)

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str, most: int = _MOST_STRING) -> str:
        length = self.number("Q", what)
        self.require(length <= most, f"{what} claims {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not text") from None

    def value(self, key: str) -> Any:
        kind = self.number("I", key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            self.require(kind in _SCALARS, f"{key} is of type {kind}, which GGUF does not have")
            return self.number(_SCALARS[kind], key)
        # numbers, one for each layer; vocabularies are large, and are passed over: None
        kind, count = self.number("I", key), self.number("Q", key)
        self.require(count <= _MOST_ARRAY, f"{key} claims {count} values")
        if kind == _STRING and key in self._kept:
            return [self.string(key) for _ in range(count)]
        if kind == _STRING:
            for _ in range(count):
                self.skip(self.number("Q", key), key)
            return None
        self.require(kind in _SCALARS, f"{key} is an array of type {kind}")
        form = f"<{count}{_SCALARS[kind]}"
        if count <= _MOST_LAYERS:
            return list(struct.unpack(form, self.take(struct.calcsize(form), key)))
        self.skip(struct.calcsize(form), key)
        return None

    def tensor(self) -> tuple[GgufTensor, int]:
        """Reads a tensor without the extra bytes of its rows, and where it begins."""
        name = self.string("a tensor's name", _MOST_NAME)
        n = self.number("I", name)
        self.require(1 <= n <= _MOST_DIMENSIONS, f"{name} has {n} dimensions")
        shape = struct.unpack(f"<{n}Q", self.take(8 * n, name))
        number, offset = self.number("I", name), self.number("Q", name)
        self.require(number in BY_NUMBER, f"{name} is of type {number}, which is not supported")
        kind, values = BY_NUMBER[number], math.prod(shape)
        # blocks run along the first dimension, which GGUF lists as the fastest
        fits = min(shape) >= 1 and values <= 1 << 50 and shape[0] % kind.values == 0
        self.require(fits, f"{name} of shape {list(shape)} cannot be {kind.name}")
        return GgufTensor(name, shape, kind, kind.size(values)), offset

    def header(self) -> GgufHeader:
        magic = self.take(4, "the magic")
        self.require(magic == _MAGIC, "is not a GGUF file (it does not begin with GGUF)")
        version = self.number("I", "the version")
        self.require(version in _VERSIONS, f"is GGUF version {version}; 2 and 3 are known")
        n_tensors, n_keys = self.number("Q", "a count"), self.number("Q", "a count")
        few = n_tensors <= _MOST_TENSORS and n_keys <= _MOST_KEYS
        self.require(few, f"claims {n_tensors} tensors and {n_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.string("a key", _MOST_NAME)
            self.require(key not in metadata, f"has the key {key!r} twice")
            metadata[key] = self.value(key)
        listed = sorted((self.tensor() for _ in range(n_tensors)), key=lambda pair: pair[1])
        unit = metadata.get("general.alignment", 32)  # 32 is the format's default
        aligned = isinstance(unit, int) and 1 <= unit <= 1 << 20 and not unit & unit - 1
        self.require(aligned, f"general.alignment is {unit!r}")
        unique = len({tensor.name for tensor, _ in listed}) == len(listed)
        self.require(unique, "lists a tensor twice")
        # tensors begin at the next border after the head; their offsets count from that
        begin = -(-self._handle.tell() // unit) * unit
        # no tensor is outside the file, none inside another; a first part may be empty
        ends = [*(start for _, start in listed), max(0, self._size - begin)][1:]
        tensors = []
        for (tensor, start), end in zip(listed, ends, strict=True):
            name = tensor.name
            self.require(start % unit == 0, f"{name} begins at {start}, which is not aligned")
            self.require(start + tensor.n_bytes <= end, f"{name} does not fit at its offset")
            # rows may carry a few bytes more than the blocks: the next offset shows how many
            more = tensor.kind.row_scaled
            tensors.append(replace(tensor, n_bytes=end - start) if more else tensor)
        return GgufHeader(self._path, metadata, tensors)


@dataclass(frozen=True)
class GgufModel:
    """What placing a model needs: its tensors, and the sizes that buffers follow from."""

    tensors: list[GgufTensor]
    layers: int
    hidden: int
    vocabulary: int
    context: int
    kv_values: list[int]  # a token's, in each layer
    is_mla: bool
    experts: int
    active: int
    expert_width: int
    # of an MLA model whose keys and values are spelled out; 0 where its file does not say
    heads: int = 0
    head_values: int = 0  # a head's key and value
    bounds: tuple[str, ...] = ()  # what was not understood, and on which side it is counted

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


def gguf_header(path: Path, kept: Collection[str] = ()) -> GgufHeader:
    """Reads the head of one file; lists of texts only for the `kept` keys."""
    try:
        with path.open("rb") as handle:
            return _HeaderReader(handle, path, kept).header()
    except OSError as error:
        raise ModelUnreadable(
            f"{path}: cannot be read: {error.strerror}",
            "Change its owner or mode, or name another file.",
        ) from error


def read_gguf(path: Path) -> GgufModel:
    """Reads a model from any of its parts; all of them must exist."""
    heads = [gguf_header(part) for part in gguf_parts(path)]
    for number, head in enumerate(heads):
        count, position = head.metadata.get("split.count", 1), head.metadata.get("split.no")
        # a file that was never split may have a count of 0
        if count != len(heads) and (count, len(heads)) != (0, 1):
            raise ModelUnreadable(f"{head.path.name}: is one of {count} parts, not {len(heads)}")
        if len(heads) > 1 and position != number:
            raise ModelUnreadable(f"{head.path.name}: is numbered as part {position}")
    tensors = [tensor for head in heads for tensor in head.tensors]
    want, got = heads[0].metadata.get("split.tensors.count"), len(tensors)
    if len(heads) > 1 and want is not None and want != got:
        raise ModelUnreadable(f"{heads[0].path.name}: {want} tensors announced, {got} listed")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelUnreadable(f"{path.name}: two of its parts list the same tensor")
    return _model(path.name, heads[0].metadata, tensors)


def gguf_parts(path: Path) -> list[Path]:
    """All files of a split model, in order; else the file alone."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, number, count = named[1], int(named[2]), int(named[3])
    if not 1 <= number <= count:
        raise ModelUnreadable(f"{path.name}: is part {number} of {count}")
    parts = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelUnreadable(
            f"{path.name}: {len(missing)} of {count} parts are missing, {missing[0]} first",
            "Fetch the whole set with `sm120 weights fetch`.",
        )
    return parts


def _model(name: str, metadata: dict[str, Any], tensors: list[GgufTensor]) -> GgufModel:
    family = metadata.get("general.architecture")
    if not isinstance(family, str) or len(family) > _LONGEST_NAME:
        raise ModelUnreadable(
            f"{name}: general.architecture: {describe_value(family)} is not a name"
        )

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{family}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise ModelUnreadable(f"{name}: {family}.{key}: {describe_value(value)} is not a count")
        return value

    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelUnreadable(f"{name}: has no token_embd.weight")
    hidden, layers = number("embedding_length"), number("block_count")
    # the vocabulary is read from this tensor, so its shape must be believable
    if embedding.shape[0] != hidden:
        raise ModelUnreadable(f"{name}: embedding_length {hidden}, token_embd {embedding.shape[0]}")
    # a sum over missing layers would promise room that does not exist
    blocks = [m for t in tensors if (m := re.match(r"blk\.(\d{1,6})\.(ssm_)?", t.name))]
    held = {int(m[1]) for m in blocks}
    if len(held) != layers or max(held, default=-1) != layers - 1:
        raise ModelUnreadable(f"{name}: block_count is {layers}, but it holds {len(held)} layers")
    # layers of linear attention keep a state instead of tokens
    states = {int(m[1]) for m in blocks if m[2]}
    bounds = []
    if metadata.get(f"{family}.attention.sliding_window"):
        bounds.append(
            "Some layers have a window; all are counted as keeping all tokens, which is the most"
            " they can need."
        )
    if states:
        bounds.append(
            f"The states of {len(states)} layers of linear attention are not counted: some MiB."
        )
    # Kimi K2 is converted as deepseek2, too; newer models have the same keys under other names
    is_mla, heads, head_values = f"{family}.attention.kv_lora_rank" in metadata, 0, 0
    if is_mla:
        latent = number("attention.kv_lora_rank") + number("rope.dimension_count")
        kv_values, heads = [latent] * layers, number("attention.head_count", 0)
        # newer files have the latent's sizes under the older names
        head_values = sum(
            number(f"attention.{what}_length_mla", number(f"attention.{what}_length", 0))
            for what in ("key", "value")
        )
    else:
        listed = _per_layer(metadata, f"{family}.attention.head_count", layers)
        most = max(listed) if listed else number("attention.head_count")
        if not most or (hidden % most and not number("attention.key_length", 0)):
            raise ModelUnreadable(f"attention.head_count: {most} heads for {hidden}")
        head = hidden // most
        sizes = number("attention.key_length", head) + number("attention.value_length", head)
        kv_heads = _per_layer(metadata, f"{family}.attention.head_count_kv", layers)
        kv_heads = kv_heads or [number("attention.head_count_kv", most)] * layers
        kv_values = [n * sizes for n in kv_heads]
    experts = number("expert_count", 0)
    return GgufModel(
        tensors=tensors,
        layers=layers,
        hidden=hidden,
        vocabulary=embedding.shape[1],
        context=number("context_length"),
        kv_values=[0 if i in states else values for i, values in enumerate(kv_values)],
        is_mla=is_mla,
        experts=experts,
        active=number("expert_used_count") if experts else 0,
        expert_width=number("expert_feed_forward_length") if experts else 0,
        heads=heads,
        head_values=head_values,
        bounds=tuple(bounds),
    )


def _per_layer(metadata: dict[str, Any], key: str, layers: int) -> list[int]:
    """A count for each layer; empty where the file has one for all of them."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return []
    if len(value) != layers or not all(type(n) is int and 0 <= n < 1 << 20 for n in value):
        raise ModelUnreadable(f"{key}: is not a count for each of {layers} layers")
    return value

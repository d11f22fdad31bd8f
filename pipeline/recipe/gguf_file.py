"""A GGUF file, written with nothing but the standard library.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
# The format's numbers for kinds of values; arrays have one for themselves and one for their items.
_KINDS = {"u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8}
_ARRAY = 9
_FORMATS = {"u32": "<I", "i32": "<i", "f32": "<f", "bool": "<?"}
# ggml's numbers for kinds of tensors, and how Python packs one item
_TENSOR_KINDS = {"f32": (0, "f"), "f16": (1, "e")}

Kind: TypeAlias = Literal["u32", "i32", "f32", "bool", "str"]
Item: TypeAlias = str | int | float | bool


class Field(NamedTuple):
    """A value of the head; a list is an array of its kind."""

    kind: Kind
    value: Item | Sequence[Item]


class Tensor(NamedTuple):
    """A tensor: its shape with the outermost dimension first, and its numbers in that order."""

    shape: tuple[int, ...]
    values: Sequence[float]
    kind: Literal["f32", "f16"] = "f16"

    def data(self) -> bytes:
        """As it lies in the file."""
        code = _TENSOR_KINDS[self.kind][1]
        return struct.pack(f"<{math.prod(self.shape)}{code}", *self.values)


def dump_gguf(fields: Mapping[str, Field], tensors: Mapping[str, Tensor]) -> bytes:
    """The whole file; the same bytes for the same values."""
    head = _MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(fields))
    head += b"".join(_text(key) + _field(field) for key, field in fields.items())
    data, infos = b"", b""
    for name, tensor in tensors.items():
        infos += _info(name, tensor, len(data))
        data += _padded(tensor.data())
    return _padded(head + infos) + data


def _info(name: str, tensor: Tensor, offset: int) -> bytes:
    # ggml names the innermost dimension first
    sizes = tensor.shape[::-1]
    number = _TENSOR_KINDS[tensor.kind][0]
    return _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)


def _field(field: Field) -> bytes:
    kind, value = field
    if isinstance(value, str) or not isinstance(value, Sequence):
        return struct.pack("<I", _KINDS[kind]) + _item(kind, value)
    head = struct.pack("<IIQ", _ARRAY, _KINDS[kind], len(value))
    return head + b"".join(_item(kind, each) for each in value)


def _item(kind: Kind, value: Item) -> bytes:
    return _text(str(value)) if kind == "str" else struct.pack(_FORMATS[kind], value)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)

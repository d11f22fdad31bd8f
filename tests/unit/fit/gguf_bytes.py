"""GGUF files written byte by byte, so that any of them can be wrong."""

from __future__ import annotations

import struct
from typing import Any

F32, Q8_0, IQ4_KS = 0, 8, 144


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return text(key) + struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
    if isinstance(value, list):
        strings = b"".join(map(text, value))
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + strings
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def gguf(
    metadata: dict[str, Any],
    tensors: list[bytes],
    data: int,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file with that many bytes of tensors behind its head."""
    n_tensors, n_keys = counts or (len(tensors), len(metadata))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys)
    head += b"".join(entry(key, value) for key, value in metadata.items()) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 64,
    "llama.context_length": 4096,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "bb", "ccc"],
}
TENSORS = [
    tensor("token_embd.weight", (64, 3), F32, 0),
    tensor("blk.0.attn_q.weight", (64, 64), Q8_0, 768),
]
DATA = 768 + 64 * 64 // 32 * 34

"""A model of 1 MB that is made on the spot, so that everything can be tried on any machine.

It has the shape of Kimi-K2 and DeepSeek-V3 (`deepseek2`: MLA attention, routed and shared experts)
in mainline's tensor layout, so the engine's real code paths run. The blocks hold small random
weights that only perturb the residual stream; a table planted in `token_embd` and `output` makes
each of WORDS be followed by the next, and anything else by the first: its greedy answer is known.

The file format is GGUF, version 3: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from random import Random
from typing import Literal, NamedTuple, TypeAlias

FILE = "tiny.gguf"
WORDS = tuple(
    f" {word}"
    for word in (
        *("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel"),
        *("india", "juliet", "kilo", "lima", "mike", "november", "oscar", "papa"),
    )
)
_BOS, _EOS, _PAD, _END_OF_TURN = "<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_end|>"
_SPECIAL = (
    *(_BOS, _EOS, _PAD, _END_OF_TURN),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
)
_CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
_LAYERS, _DENSE_LAYERS = 2, 1
_EMBEDDING, _CONTEXT, _ORIGINAL_CONTEXT = 64, 32768, 4096
# ik_llama.cpp insists on rope 64, latent 512 and a head count divisible by 4.
_HEADS, _ROPE, _KV_RANK, _Q_RANK = 4, 64, 512, 32
_NOPE, _VALUE = 32, 32
_EXPERTS, _EXPERTS_USED = 8, 2
_DENSE_WIDTH, _EXPERT_WIDTH = 64, 32
# The residual stream: one constant channel, one channel for each word, the rest random.
_BIAS_CHANNEL, _FIRST_WORD_CHANNEL = 0, 1
_FREE_CHANNEL = _FIRST_WORD_CHANNEL + len(WORDS)
_PERTURBATION = 0.05
_NORMAL, _CONTROL = 1, 3  # kinds of tokens
_SEED = 7
_SPREAD = math.sqrt(3)  # of four numbers between 0 and 1: their sum has a variance of 1/3
_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
# The format's number for each kind of value, and how Python packs one. A text has its length first.
_KINDS = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?"), str: (8, "")}
_ARRAY, _ITEM_KINDS = 9, {int: (5, "<i"), str: (8, "")}
# ggml's numbers for kinds of tensors, and how Python packs one item
_TENSOR_KINDS = {"f32": (0, "f"), "f16": (1, "e")}

Value: TypeAlias = str | int | float | bool | list[int] | list[str]


class Tensor(NamedTuple):
    """A tensor: its shape with the outermost dimension first, and its numbers in that order."""

    shape: tuple[int, ...]
    values: Sequence[float]
    kind: Literal["f32", "f16"] = "f16"


def dump_gguf(fields: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> bytes:
    """The whole file; the same bytes for the same values."""
    head = _MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(fields))
    for key, value in fields.items():
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list):
            number, code = _ITEM_KINDS[type(value[0])]
            head += _text(key) + struct.pack("<IIQ", _ARRAY, number, len(value))
        else:
            number, code = _KINDS[type(value)]
            head += _text(key) + struct.pack("<I", number)
        head += b"".join(struct.pack(code, each) if code else _text(str(each)) for each in items)
    data = b""
    for name, tensor in tensors.items():
        # ggml names the innermost dimension first
        sizes, (number, code) = tensor.shape[::-1], _TENSOR_KINDS[tensor.kind]
        head += _text(name)
        head += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, len(data))
        data += _padded(struct.pack(f"<{math.prod(sizes)}{code}", *tensor.values))
    return _padded(head) + data


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


@cache
def tiny_gguf() -> bytes:
    """The model; the same bytes every time and everywhere."""
    tokens, merges = _vocabulary()
    random = Random(_SEED)  # noqa: S311 -- weights, not secrets
    # embeddings and output rows that make each word call the next one
    size = len(tokens), _EMBEDDING
    embedding = [_bell(random) for _ in range(math.prod(size))]
    output = [0.0] * math.prod(size)
    for row in range(0, math.prod(size), _EMBEDDING):
        embedding[row + _FIRST_WORD_CHANNEL : row + _FREE_CHANNEL] = [0.0] * len(WORDS)
        embedding[row + _BIAS_CHANNEL] = 4.0
    rows = [tokens.index("".join(_spelled(word.encode()))) * _EMBEDDING for word in WORDS]
    output[rows[0] + _BIAS_CHANNEL] = 2.5
    for i, row in enumerate(rows):
        channel = _FIRST_WORD_CHANNEL + i
        embedding[row + channel] = 8.0
        output[rows[(i + 1) % len(rows)] + channel] = 8.0
    tensors = {
        "token_embd.weight": Tensor(size, embedding),
        "output_norm.weight": _ones(_EMBEDDING),
        "output.weight": Tensor(size, output),
    }
    for layer in range(_LAYERS):
        parts = _block(random, is_dense=layer < _DENSE_LAYERS)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return dump_gguf(_head(tokens, merges), tensors)


def _spelled(data: bytes) -> list[str]:
    """GPT-2's printable letter for each byte, which stands for it in a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in data]


def _vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (bytes, then growing prefixes of each word, then special ones) and their merges."""
    tokens = _spelled(bytes(range(256)))
    merges: dict[str, None] = {}
    for word in WORDS:
        letters = _spelled(word.encode())
        prefixes = list(accumulate(letters))
        tokens += [prefix for prefix in prefixes if prefix not in tokens]
        pairs = zip(prefixes, letters[1:], strict=False)
        merges |= {f"{prefix} {letter}": None for prefix, letter in pairs}
    return [*tokens, *_SPECIAL], list(merges)


def _head(tokens: list[str], merges: list[str]) -> dict[str, Value]:
    """The hyperparameters as a published Kimi-K2 file has them, and GPT-2's byte-level BPE."""
    sizes = {
        "block_count": _LAYERS,
        "context_length": _CONTEXT,
        "embedding_length": _EMBEDDING,
        "feed_forward_length": _DENSE_WIDTH,
        "vocab_size": len(tokens),
        # MLA: one latent key/value head, with the sizes of each head beside it
        "attention.head_count": _HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": _KV_RANK + _ROPE,
        "attention.value_length": _KV_RANK,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": _VALUE,
        "attention.q_lora_rank": _Q_RANK,
        "attention.kv_lora_rank": _KV_RANK,
        "rope.dimension_count": _ROPE,
        "rope.scaling.original_context_length": _ORIGINAL_CONTEXT,
        "leading_dense_block_count": _DENSE_LAYERS,
        "expert_count": _EXPERTS,
        "expert_used_count": _EXPERTS_USED,
        "expert_shared_count": 1,
        "expert_feed_forward_length": _EXPERT_WIDTH,
        "expert_gating_func": 2,  # sigmoid
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 50000.0,
        "rope.scaling.factor": _CONTEXT / _ORIGINAL_CONTEXT,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "expert_weights_scale": 2.827,
    }
    n_normal = len(tokens) - len(_SPECIAL)
    return {
        "general.architecture": "deepseek2",
        "general.name": "tiny-mla-moe",
        "general.type": "model",
        "general.file_type": 1,  # mostly f16
        "general.quantization_version": 2,
        **{f"deepseek2.{key}": value for key, value in sizes.items()},
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.expert_weights_norm": True,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * n_normal + [_CONTROL] * len(_SPECIAL),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(_BOS),
        "tokenizer.ggml.eos_token_id": tokens.index(_EOS),
        "tokenizer.ggml.eot_token_id": tokens.index(_END_OF_TURN),
        "tokenizer.ggml.padding_token_id": tokens.index(_PAD),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def _block(random: Random, *, is_dense: bool) -> dict[str, Tensor]:
    """MLA attention, then a dense feed-forward part or experts."""
    attention = {
        "attn_norm.weight": _ones(_EMBEDDING),
        "attn_q_a.weight": _matrix(random, _Q_RANK, _EMBEDDING),
        "attn_q_a_norm.weight": _ones(_Q_RANK),
        "attn_q_b.weight": _matrix(random, _HEADS * (_NOPE + _ROPE), _Q_RANK),
        "attn_kv_a_mqa.weight": _matrix(random, _KV_RANK + _ROPE, _EMBEDDING),
        "attn_kv_a_norm.weight": _ones(_KV_RANK),
        # transposed, as mainline wants it
        "attn_k_b.weight": _matrix(random, _HEADS, _KV_RANK, _NOPE),
        "attn_v_b.weight": _matrix(random, _HEADS, _VALUE, _KV_RANK),
        "attn_output.weight": _residual(random, _EMBEDDING, _HEADS * _VALUE),
        "ffn_norm.weight": _ones(_EMBEDDING),
    }
    if is_dense:
        return {
            **attention,
            "ffn_gate.weight": _matrix(random, _DENSE_WIDTH, _EMBEDDING),
            "ffn_up.weight": _matrix(random, _DENSE_WIDTH, _EMBEDDING),
            "ffn_down.weight": _residual(random, _EMBEDDING, _DENSE_WIDTH),
        }
    bias = [0.01 * _bell(random) for _ in range(_EXPERTS)]
    return {
        **attention,
        # converters leave the router and its bias exact
        "ffn_gate_inp.weight": _matrix(random, _EXPERTS, _EMBEDDING, scale=4.0, kind="f32"),
        "exp_probs_b.bias": Tensor((_EXPERTS,), bias, "f32"),
        "ffn_gate_exps.weight": _matrix(random, _EXPERTS, _EXPERT_WIDTH, _EMBEDDING),
        "ffn_up_exps.weight": _matrix(random, _EXPERTS, _EXPERT_WIDTH, _EMBEDDING),
        "ffn_down_exps.weight": _residual(random, _EXPERTS, _EMBEDDING, _EXPERT_WIDTH),
        "ffn_gate_shexp.weight": _matrix(random, _EXPERT_WIDTH, _EMBEDDING),
        "ffn_up_shexp.weight": _matrix(random, _EXPERT_WIDTH, _EMBEDDING),
        "ffn_down_shexp.weight": _residual(random, _EMBEDDING, _EXPERT_WIDTH),
    }


def _bell(random: Random) -> float:
    """A number of mean 0 and variance 1, the same on every machine.

    Not `gauss`: logarithms and cosines differ in their last bit from one C library to another.
    """
    return (random.random() + random.random() + random.random() + random.random() - 2) * _SPREAD


def _ones(size: int) -> Tensor:
    """The weights of a norm that does nothing."""
    return Tensor((size,), [1.0] * size, "f32")


def _matrix(
    random: Random, *shape: int, scale: float = 1.0, kind: Literal["f32", "f16"] = "f16"
) -> Tensor:
    """Random weights that keep the size of what they multiply."""
    factor = scale / math.sqrt(shape[-1])
    values = [factor * _bell(random) for _ in range(math.prod(shape))]
    return Tensor(shape, values, kind)


def _residual(random: Random, *shape: int) -> Tensor:
    """Small weights that write to the residual stream, but never to its constant channel."""
    sizes, values, kind = _matrix(random, *shape, scale=_PERTURBATION)
    numbers, inner = list(values), shape[-1]
    # a block of the last two dimensions for each expert; its first row is the constant channel
    for block in range(0, len(numbers), shape[-2] * inner):
        start = block + _BIAS_CHANNEL * inner
        numbers[start : start + inner] = [0.0] * inner
    return Tensor(sizes, numbers, kind)

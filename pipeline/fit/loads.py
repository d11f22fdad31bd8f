"""What lies on every card and on the host when ik_llama.cpp runs a model on both.

Attention, norms, shared experts and the KV cache are spread over the cards by layer. What a card
needs besides is estimated from the shapes of the largest batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import ModelUnreadable
from pipeline.fit.cache import KV_BYTES, Kv
from pipeline.fit.gguf import Tensor
from pipeline.fit.gguf_model import GgufModel
from pipeline.fit.override import CPU, TensorRule, device_of, device_sums, home_of
from pipeline.fit.units import GIB, MIB, share

# our estimate of a CUDA context with cuBLAS, without a source; sglang's process takes 1.17 GiB
CONTEXT_BYTES = 512 * MIB
ATTENTION_BATCH_MIB = 512  # -amb, as in the command of "Running Kimi-K2.6 Locally"
_CACHE_STEP = 256  # the engine rounds a context up to this
# ik_llama.cpp #520: experts on the host are copied to a card for batches of at least this many
# tokens, times all experts over active ones
_OFFLOAD_TOKENS = 32


@dataclass(frozen=True)
class Machine:
    """What there is, and how much of it stays free."""

    cards: int
    card_bytes: int  # as the driver shows it
    headroom_bytes: int = 2 * GIB
    host_bytes: int | None = None  # None: not judged

    @property
    def devices(self) -> list[str]:
        return [f"CUDA{i}" for i in range(self.cards)]

    @property
    def usable_bytes(self) -> int:
        return self.card_bytes - self.headroom_bytes


@dataclass(frozen=True)
class Batch:
    """The launch options that buffers follow from."""

    context: int
    kv: Kv
    ubatch: int = 512
    batch: int = 2048
    mla: Literal[0, 1, 2, 3] = 3  # the engine's default


@dataclass(frozen=True)
class Load:
    """One device, and what lies on it."""

    device: str
    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.buffer_bytes


def offload_from(model: GgufModel) -> int:
    """The batch from which experts on the host are computed on a card."""
    return _OFFLOAD_TOKENS * share(model.experts, model.active) if model.active else _OFFLOAD_TOKENS


def kv_token_bytes(model: GgufModel, batch: Batch) -> int:
    """What a token costs on all cards together; `fp8` is q8_0 here: 34 bytes for 32 values."""
    return _kept_bytes(sum(_kept_values(model, batch)), batch.kv)


def _kept_values(model: GgufModel, batch: Batch) -> list[int]:
    """What each layer keeps of a token.

    MLA's latent, or with -mla 0 a key and a value for each head. -mla 1, 2 and 3 keep the same:
    with flash attention, which is the default, -mla 1 needs no transposed copy (ik_llama.cpp:
    llama_model::cache_size).
    """
    if batch.mla or not model.is_mla:
        return model.kv_values
    if not model.heads or not model.head_values:
        raise ModelUnreadable(
            "-mla 0: the file does not say how many heads the model has, or how large they are",
            "Ask for -mla 1 or 3, which keep the latent.",
        )
    return [model.heads * model.head_values if values else 0 for values in model.kv_values]


def _kept_bytes(values: int, kv: Kv) -> int:
    return values * KV_BYTES[kv] if kv == "bf16" else values * 34 // 32


def buffer_bytes(model: GgufModel, batch: Batch, *, last: bool, host_experts: int) -> int:
    """The largest moment of a step on a card, in float32 where the engine computes in it.

    All through a step there are four hidden states and the mask of every token against every
    position (float16 with flash attention: build_inp_KQ_mask). The graph's allocator then gives
    the same bytes to one moment after the other: MLA's keys and values spelled out for as many
    heads as -amb allows, with their float16 copy; the active experts' inner states and outputs,
    with one layer of the host's experts where the batch is large enough to copy them; the logits.
    -mla 1 spells nothing out, and its queries and their results are as wide as the latent; -mla 0
    has the keys and values of the step alone.
    """
    tokens, context = batch.ubatch, share(batch.context, _CACHE_STEP) * _CACHE_STEP
    always = context * tokens * 2 + tokens * model.hidden * 4 * 4
    attention = 0
    if model.is_mla:
        attention = {
            0: tokens * model.heads * model.head_values * 4,
            1: tokens * model.heads * 2 * max(model.kv_values, default=0) * 4,
        }.get(batch.mla, ATTENTION_BATCH_MIB * MIB * 3 // 2)
    experts = tokens * model.active * (model.hidden + 3 * model.expert_width) * 4
    copied = host_experts if tokens >= offload_from(model) else 0
    logits = model.vocabulary * tokens * 4 if last else 0
    return always + max(attention, experts + copied, logits)


def loads_of(
    model: GgufModel, machine: Machine, batch: Batch, rules: list[TensorRule]
) -> tuple[list[Load], int]:
    """What rules come to on every card and on the host, from the table of tensors."""
    devices = machine.devices
    sums = device_sums(model.tensors, rules, model.layers, devices)
    context = share(batch.context, _CACHE_STEP) * _CACHE_STEP
    on_host = (t for t in model.tensors if device_of(t.name, rules, model.layers, devices) == CPU)
    staged = max(expert_bytes(on_host).values(), default=0)
    loads = []
    for device in devices:
        own = sum(
            values
            for i, values in enumerate(_kept_values(model, batch))
            if home_of(f"blk.{i}.", model.layers, devices) == device
        )
        last = device == devices[-1]
        buffers = buffer_bytes(model, batch, last=last, host_experts=staged) + CONTEXT_BYTES
        kept = _kept_bytes(own, batch.kv) * context
        loads.append(Load(device, sums[device], kept, buffers))
    return loads, sums[CPU]


def expert_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Routed experts of every layer that has some."""
    layers: dict[int, int] = {}
    for tensor in tensors:
        if match := re.match(r"blk\.(\d+)\.ffn_\w+_exps\.", tensor.name):
            layers[int(match[1])] = layers.get(int(match[1]), 0) + tensor.n_bytes
    return layers

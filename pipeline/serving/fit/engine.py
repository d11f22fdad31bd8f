"""How sglang and vLLM turn a card's memory into room for the KV cache. They differ.

sglang's --mem-fraction-static is the share, of what is free once CUDA and NCCL are up, that weights
and KV cache may take together; activations, CUDA graphs and the table of requests live in the rest
(0.5.8 model_runner_kv_cache_mixin.py: rest = available - total * (1 - fraction)).

vLLM's --gpu-memory-utilization is the share of the whole card that everything of the engine may
take; it measures activations by a trial run and subtracts them as well (worker/gpu_worker.py:
requested = total * utilization; KV cache = requested - weights - peak activations - non-torch).

So the same number means less KV cache in vLLM by its activations, and more by what CUDA had taken.

In that cache most layers keep something of every token. Layers with a window keep the last tokens
of a request, and linear attention keeps a state of one size, however long a request is.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pipeline.core.model import Frozen
from pipeline.serving.fit.shape import Architecture, Compressed, Gqa, Linear, Mixer, Mla
from pipeline.serving.fit.units import GIB, MIB, share

Engine = Literal["sglang", "vllm", "ik_llama"]
Kv = Literal["bf16", "fp8"]
KV_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}
_STATE_BYTES = 4  # both engines keep states of linear attention in float32 by default
_SCALE_RUN, _SCALE_BYTES = 128, 4  # of fp8 beside sparse attention: a float32 for 128 values

# The measured numbers are of github.com/magik6k/glm-kimi-sm120-rtx6000bw (configs, server logs).
# nvidia-smi shows 97,887 of the 98,304 MiB of an RTX PRO 6000 (configs/gpu-info.txt); of the 32,768
# of a 5090 it shows 32,607, which is nearly the same part
_SHOWN = 97_887 / 98_304
# 95.59 GiB of the card, 94.42 free when sglang's process is up (K2.5 log: 94.14 + 0.28)
CUDA_CONTEXT_BYTES = round(1.17 * GIB)
# "Init torch distributed ends. mem usage=0.28 GB" with NCCL 2.27.5 and 8 cards (both logs)
NCCL_BYTES = round(0.28 * GIB)
# Kernels and their workspaces, which no sum of tensors has: vLLM logs "non_torch_memory takes" 0.16
# to 0.35 GiB (vllm-project/vllm#10517, #12126, #14452); sglang's "Load weight end" was 0.27 and
# 0.31 GiB above our sum of tensors in two logs of 8 cards
KERNELS_BYTES = round(0.33 * GIB)
# what two published runs of vLLM on 8 cards have less than the rest of this sum (kimi-k26-v4 of
# local-inference-lab/rtx6kpro); probably communicators and all-reduce buffers beside torch's
VLLM_GROUP_BYTES = round(0.18 * GIB)
# vLLM's MLA keeps rows for 64k tokens of a long prompt (MLACommonMetadataBuilder)
_MLA_ROWS = 64 * 1024
# how far a calculated card may be off, on either side: about the largest error of published runs
MARGIN_BYTES, MARGIN_PART = round(0.35 * GIB), 0.005
# sglang's --mamba-full-memory-ratio and --swa-full-tokens-ratio: states of linear attention get 0.9
# of what the KV cache gets (7.42 beside 8.30 GB in kvcache-ai/ktransformers#1870), and a window's
# layers hold 0.8 of the tokens
_STATES_TO_KV, _WINDOW_TO_FULL = 0.9, 0.8
VLLM_DEFAULT_UTILIZATION = 0.92  # 0.32.0, config/cache.py; earlier releases: 0.9


class _Defaults(NamedTuple):
    """What an engine chooses by the memory of a card, unless a user chooses it."""

    below_gib: float
    prefill_tokens: int
    few: int  # sglang: largest batch of CUDA graphs under 4 cards; vLLM: sequences
    many: int


# sglang 0.5.8 server_args.py: _handle_gpu_memory_settings
_SGLANG = [
    *(_Defaults(20, 2048, 8, 8), _Defaults(35, 2048, 24, 80), _Defaults(60, 4096, 32, 160)),
    *(_Defaults(160, 8192, 256, 512), _Defaults(math.inf, 16384, 512, 512)),
]
# vLLM 0.32.0 engine/arg_utils.py: _set_default_max_num_seqs_and_batched_tokens_args
_VLLM = [
    *(_Defaults(70, 2048, 256, 256), _Defaults(160, 8192, 1024, 1024)),
    _Defaults(math.inf, 16384, 1024, 1024),
]


def shown_bytes(vram_bytes: int) -> int:
    """What the driver shows of a card that is sold with this much."""
    return round(vram_bytes * _SHOWN / MIB) * MIB


def kv_token_bytes(model: Architecture, tp: int, kv: Kv) -> int:
    """What one more token costs in the layers that keep all of them."""
    total = 0.0
    for mixer in model.mixers:
        indexer, attention = mixer.indexer, mixer.attention
        if isinstance(attention, Compressed):
            index = attention.index_head + _SCALE_BYTES if attention.index_head else 0
            entry = _entry(model, mixer, tp, kv) + index
            total += mixer.layers * entry / attention.ratio if attention.ratio else 0
        else:
            if indexer:
                scales = share(indexer.head, _SCALE_RUN) * _SCALE_BYTES
                total += mixer.layers * (indexer.head + scales)
            total += 0 if mixer.window else mixer.layers * _entry(model, mixer, tp, kv)
    return math.ceil(total)


def request_bytes(
    model: Architecture, tp: int, kv: Kv, context: int, *, in_flight: int = 1, states: int = 1
) -> int:
    """What a request costs besides: its windows and its states.

    vLLM keeps all tokens of a prefill step beside a window, and a state more for its prefix cache.
    """
    total = 0
    for mixer in model.mixers:
        if mixer.window:
            tokens = min(mixer.window - 1 + in_flight, context)
            total += mixer.layers * tokens * _entry(model, mixer, tp, kv)
        csa = mixer.attention
        if isinstance(csa, Compressed) and csa.ratio:
            # keys and scores of runs that are not full yet, in float32 (vLLM: CompressorStateCache)
            overlap = 2 if csa.ratio == 4 else 1  # runs of 4 overlap
            tokens = min(overlap * csa.ratio - 1 + in_flight, context)
            values = tokens * 2 * overlap * (csa.head + csa.index_head)
            total += mixer.layers * values * _STATE_BYTES
    return total + states * state_bytes(model, tp)


def state_bytes(model: Architecture, tp: int) -> int:
    """A state of linear attention, in all layers."""
    total = 0
    for mixer in model.mixers:
        if isinstance(linear := mixer.attention, Linear):
            conv = linear.conv * model.precision.base.bits // 8
            total += mixer.layers * share(linear.state * _STATE_BYTES + conv, tp)
    return total


def _entry(model: Architecture, mixer: Mixer, tp: int, kv: Kv) -> int:
    """One token in one layer: MLA's latent is on every card, heads are divided.

    fp8 caches of both engines have one scale for a whole tensor, so a token costs one byte a value;
    sparse attention has scales of its own and keeps positions in 16 bits (vLLM: fp8_ds_mla, 656
    bytes, and 584 in DeepSeek V4).
    """
    match mixer.attention:
        case Mla() as mla if kv == "fp8" and any(m.indexer for m in model.mixers):
            scales = share(mla.kv_rank, _SCALE_RUN) * _SCALE_BYTES
            return mla.kv_rank + scales + 2 * mla.rope
        case Mla() as mla:
            return (mla.kv_rank + mla.rope) * KV_BYTES[kv]
        case Gqa() as gqa:
            return share(gqa.kv_heads, tp) * (gqa.head + gqa.value) * KV_BYTES[kv]
        case Compressed() as csa:
            return csa.head + 72 if kv == "fp8" else 2 * csa.head
    return 0


class FitQuestion(Frozen):
    """What a user wants to run, and on what; the defaults are those of the engines."""

    engine: Engine
    card_bytes: int  # of one card, as the driver shows it
    tp: int
    dcp: int = 1  # vLLM: decode context parallelism, over which the tokens are divided
    context: int
    kv: Kv | None = None  # None: as the checkpoint asks
    fraction: float | None = None
    prefill_given: int | None = None  # sglang: chunked prefill; vLLM: max-num-batched-tokens
    sequences_given: int | None = None  # vLLM: max-num-seqs
    graph_batch_given: int | None = None  # sglang: cuda-graph-max-bs
    measured_bytes: int | None = None  # weights on a card, from an engine's log

    @property
    def prefill_tokens(self) -> int:
        return self.prefill_given or self._defaults.prefill_tokens

    @property
    def batch(self) -> int:
        """The most sequences whose logits are computed at once: a CUDA graph, or vLLM's limit."""
        given = self.graph_batch_given if self.engine == "sglang" else self.sequences_given
        return given or (self._defaults.few if self.tp < 4 else self._defaults.many)

    @property
    def _defaults(self) -> _Defaults:
        tiers = _SGLANG if self.engine == "sglang" else _VLLM
        return next(tier for tier in tiers if self.card_bytes < tier.below_gib * GIB)

    def kv_of(self, model: Architecture) -> Kv:
        """The type of the KV cache."""
        return self.kv or ("fp8" if model.precision.kv_fp8 else "bf16")


class MemoryBudget(Frozen):
    """One card's memory, and where it goes."""

    card_bytes: int
    taken_bytes: int  # by CUDA and NCCL before the first weight
    fraction: float
    weights_bytes: int
    kernels_bytes: int
    activation_bytes: int
    requests_bytes: int = 0
    kv_bytes: int  # may be negative: then the weights alone do not fit
    kv_part: float = 1.0  # of it for tokens; the rest is for states of linear attention
    kv_token_bytes: int
    request_bytes: int = 0  # what a request costs besides its tokens
    context: int
    left_bytes: int  # outside the engine's share

    @property
    def kv_tokens(self) -> int:
        return self.tokens_at(0)

    def tokens_at(self, more_bytes: int) -> int:
        """Tokens, had everything else come out that much larger (or, below zero, smaller)."""
        room = max(0, self.kv_bytes - more_bytes) * self.kv_part
        request = self.kv_token_bytes * self.context + self.request_bytes
        return int(room * self.context // request)


def margin_bytes(question: FitQuestion, weights: int) -> int:
    """By how much a card may be off; measured weights leave nothing to doubt but rounding."""
    return 0 if question.measured_bytes else max(MARGIN_BYTES, round(weights * MARGIN_PART))


def sglang_default_fraction(model: Architecture, question: FitQuestion) -> float:
    """What sglang chooses itself (0.5.8 server_args.py), in its own MiB arithmetic."""
    reserved = 512 + max(question.prefill_tokens, 2048) * 1.5 + question.batch * 2
    return _fraction(model, question, reserved)


def later_sglang_fraction(model: Architecture, question: FitQuestion) -> float:
    """What 0.5.23 chooses: more for graphs of prefill steps, and larger ones on small cards."""
    small = 20 * GIB <= question.card_bytes < 35 * GIB
    tokens = question.prefill_given or (4096 if small else question.prefill_tokens)
    batch = question.graph_batch_given or (question.batch * 2 if small else question.batch)
    reserved = 512 + max(tokens, 2048) * 1.5 + min(batch, 160 if small else batch) * 2
    # arg_groups/memory_hook.py: reserve_for_graph_mb
    if isinstance(model.attention, Mla):
        return _fraction(model, question, reserved + 1536)
    # as many graphs as it captures lengths of a prefill step (arg_groups/cuda_graph_hook.py)
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
    lengths = [n for first, last, by in steps for n in range(first, last + 1, by)]
    graphs = sum(n <= tokens for n in [*lengths, *range(4608, tokens + 1, 512)])
    return _fraction(model, question, reserved + 8 * graphs)


def _fraction(model: Architecture, question: FitQuestion, reserved_mib: float) -> float:
    card = question.card_bytes / MIB
    reserved_mib += question.tp / 8 * 1024
    if card > 60 * 1024:
        reserved_mib = max(reserved_mib, 10 * 1024)
    # what must stay free may be more than a small card has
    fraction = max(0.0, round((card - reserved_mib) / card, 3))
    if model.vision is None:
        return fraction
    # adjust_mem_fraction_for_vlm: compared with a ViT-L/14 of 24 layers of 1024
    ratio = model.vision.rated_layers * model.vision.hidden**2 / (24 * 1024**2)
    return fraction * 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))


def room_of(model: Architecture, weights: int, question: FitQuestion) -> MemoryBudget:
    """Room under sglang's --mem-fraction-static or vLLM's --gpu-memory-utilization."""
    card, tp, context = question.card_bytes, question.tp, question.context
    kv_type, fraction = question.kv_of(model), question.fraction
    is_sglang = question.engine == "sglang"
    if fraction is None:
        fraction = VLLM_DEFAULT_UTILIZATION
        if is_sglang:
            fraction = sglang_default_fraction(model, question)
    nccl = NCCL_BYTES if tp > 1 else 0
    taken, activations = CUDA_CONTEXT_BYTES + nccl, activation_bytes(model, question)
    token, part, requests, request = kv_token_bytes(model, tp, kv_type), 1.0, 0, 0
    if is_sglang:
        # what the log calls weights is all that loading them takes
        kernels = 0 if question.measured_bytes else KERNELS_BYTES
        # what a token costs in the layers with a window, while it is inside
        windows = (m for m in model.mixers if m.window)
        inside = sum(m.layers * _entry(model, m, tp, kv_type) for m in windows)
        token = max(1, token + round(inside * _WINDOW_TO_FULL))
        part = 1 / (1 + _STATES_TO_KV) if state_bytes(model, tp) else 1.0
        kv = round(max(0, card - taken) * fraction) - weights - kernels
        # req_to_token: an int32 for each position of 2,048 to 4,096 requests (init_memory_pool)
        tokens = round(max(0, kv) * part) // token
        requests = min(max(int(tokens / context * 512), 2048), 4096) * (context + 4) * 4
    else:
        kernels = KERNELS_BYTES + (VLLM_GROUP_BYTES if tp > 1 else 0)
        if isinstance(mla := model.attention, Mla):
            # with decode context parallelism another buffer as large gathers the rows of all cards
            rows = min(_MLA_ROWS, 8 * context) * (2 if question.dcp > 1 else 1)
            kernels += rows * (mla.kv_rank + mla.rope) * 2
        kv = round(card * fraction) - weights - activations - nccl - kernels
        token, step = max(1, share(token, question.dcp)), question.prefill_tokens
        # 0.32.0 kv_cache_interface.py: SlidingWindowSpec, and MambaSpec as prefix caching has it
        request = request_bytes(model, tp, kv_type, context, in_flight=step, states=2)
    beside = requests if is_sglang else activations
    return MemoryBudget(
        card_bytes=card,
        taken_bytes=taken,
        fraction=fraction,
        weights_bytes=weights,
        kernels_bytes=kernels,
        activation_bytes=activations,
        requests_bytes=requests,
        kv_bytes=kv,
        kv_part=part,
        kv_token_bytes=token,
        request_bytes=request,
        context=context,
        left_bytes=card - taken - weights - kernels - max(0, kv) - beside,
    )


def activation_bytes(model: Architecture, question: FitQuestion) -> int:
    """The largest moment of a prefill step in bf16, or the logits of the last tokens in float32.

    At the experts' output a token has its hidden state once for each active expert, beside the
    residual, the normed input, the shared expert's output and the sum: that is the peak. Logits are
    gathered from all cards and copied once for sampling, when the rest has been given back.
    """
    wide = 2 * share(model.dense_width, model.hidden)
    copies = 4 + (model.moe.active if model.moe else wide)
    states = question.prefill_tokens * model.hidden * 2 * copies
    return max(states, 2 * question.batch * model.vocabulary * 4)

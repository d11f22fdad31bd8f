"""What each layer of a model does, read from a config.json by its fields and not by its name.

Layers mix tokens: the same parts come back under new names, such as latents (kv_lora_rank), groups
of heads, windows, states of linear attention, an indexer in front. Layers also compute: with a
dense feed-forward part or with experts. Which layer has which stands in `layer_types`, in a pattern
of letters, in lists of layers, or in an interval.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import TypeAlias

from pipeline.core.errors import ModelUnreadable
from pipeline.serving.fit.fields import (
    Table,
    count_field,
    describe_value,
    few,
    flag_field,
    names,
    numbers,
    table_field,
)
from pipeline.serving.fit.shape import Compressed, Gqa, Indexer, Linear, Mixer, Mla, Moe

_FULL, _WINDOW, _LINEAR, _NONE = "full", "window", "linear", "none"
_KINDS = {
    **dict.fromkeys(("full_attention", "indexed_attention", "attention"), _FULL),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), _WINDOW),
    **dict.fromkeys(("linear_attention", "mamba", "conv"), _LINEAR),
    # of Nemotron-H, whose layers either mix tokens or compute
    **dict.fromkeys(("mlp", "moe"), _NONE),
}
_WINDOWS = ("sliding_window", "attention_chunk_size")
_KV_HEADS = ("num_key_value_heads", "num_attention_groups", "num_kv_heads")
_PAGES = (
    "Compressed attention: vLLM's caches of several kinds share pages of one size, which takes more"
    " than this sum, by a sixth in one report and twice in another (vllm-project/vllm#51041)."
)
_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# Names that say which layers are of which kind; the second set includes those without effect on
# sizes.
_PATTERN = re.compile(
    r"(layers?|blocks?)_(types?|kinds?|pattern|period|interval|freq|frequency|step|offset|layout"
    r"|map|idx|ids|indices|indexes|list)$|(pattern|interval|period|schedule)$"
)
_KNOWN_PATTERNS = {
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern"),
    *("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset"),
    *("full_attention_interval", "mlp_layer_types", "moe_layer_freq", "moe_layer_interval"),
    *("moe_layer_start_index", "moe_layer_end_index", "interleave_moe_layer_step"),
    *("sliding_window_pattern", "index_topk_pattern", "no_rope_layer_interval"),
    "nope_layer_interval",
}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    *("top_k_experts", "experts_per_token"),
)
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)
_NUMBER_OF_EXPERTS = re.compile(
    r"(n|num|number)_(\w+_)?experts|experts?_(num|count)|\w+_num_experts"
)


def layer_names(text: Table) -> list[str]:
    """What a config calls each of its layers; empty where all are alike."""
    if pattern := text.get("hybrid_override_pattern"):
        unknown = set(str(pattern)) - set(_LETTERS)
        if unknown:
            raise ModelUnreadable(f"hybrid_override_pattern: {min(unknown)!r} is not known")
        return [_LETTERS[letter] for letter in str(pattern)]
    if listed := names(text, "layers_block_type") or names(text, "layer_types"):
        return listed
    if step := few(text, "sliding_window_pattern"):  # Gemma 3 (transformers: gemma3)
        layers = range(count_field(text, "num_hidden_layers"))
        return ["sliding_attention" if (i + 1) % step else "full_attention" for i in layers]
    if period := few(text, "attn_layer_period"):  # Jamba (transformers: jamba)
        offset = few(text, "attn_layer_offset")
        layers = range(count_field(text, "num_hidden_layers"))
        return ["attention" if i % period == offset else "mamba" for i in layers]
    return []


def layer_count(text: Table) -> int:
    """The number of layers; configs with a pattern may leave it out."""
    listed = layer_names(text)
    if not listed or "num_hidden_layers" in text:
        return count_field(text, "num_hidden_layers")
    return len(listed)


def read_mixers(text: Table, bounds: list[str]) -> list[Mixer]:
    """Reads groups of layers of one kind; adds what it does not understand to the bounds."""
    for key in sorted(set(text) - _KNOWN_PATTERNS):
        # a list, a text or a number above 1 of this name makes layers differ
        if _PATTERN.search(key) and text[key] not in (None, False, 0, 1, "", [], {}):
            bounds.append(
                f"{describe_value(key)}: looks like a pattern of layers that is not understood;"
                " they are counted as if it were not there."
            )
    # DeepSeek V4: every layer has a window, most have runs of 4 or 128 tokens besides. `ratios` is
    # how many tokens are a run, in each layer; a checkpoint may list them for MTP layers too
    if ratios := numbers(text, "compress_ratios"):
        ratios = ratios[: count_field(text, "num_hidden_layers")]
    else:
        listed, given = names(text, "layer_types"), table_field(text, "compress_rates")
        rates = _RATIOS | {kind: count_field(given, kind) for kind in _RATIOS if kind in given}
        ratios = [rates.get(kind, 0) for kind in listed] if set(listed) & set(_RATIOS) else []
    mixers: list[Mixer] = []
    for ratio, layers in sorted(Counter(ratios).items()):
        indexes = ratio == 4  # runs of 128 are few enough to be looked at whole
        compressed = Compressed(
            heads=count_field(text, "num_attention_heads"),
            head=count_field(text, "head_dim"),
            q_rank=count_field(text, "q_lora_rank"),
            groups=count_field(text, "o_groups"),
            o_rank=count_field(text, "o_lora_rank"),
            ratio=ratio,
            index_heads=count_field(text, "index_n_heads") if indexes else 0,
            index_head=count_field(text, "index_head_dim") if indexes else 0,
        )
        window = count_field(text, "sliding_window")
        mixers.append(Mixer(layers=layers, attention=compressed, window=window))
    if mixers:
        bounds.append(_PAGES)
        return mixers
    kinds = Counter(_kinds(text, bounds))
    mixers = _full(text, kinds[_FULL], bounds) if kinds[_FULL] else []
    if layers := kinds[_WINDOW]:
        # layers with a window may have heads of their own (MiMo-V2, Step 3.5)
        swa = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        own = {key: text.get(f"swa_{key}") for key in swa}
        attention = _gqa(text, own | dict(table_field(text, "attention_other_setting")))
        window = count_field(text, *_WINDOWS)
        mixers.append(Mixer(layers=layers, attention=attention, window=window))
    if layers := kinds[_LINEAR]:
        known = (reader for fields, reader in _LINEAR_KINDS if any(map(text.get, fields)))
        if (reader := next(known, None)) is None:
            raise ModelUnreadable(
                "layer_types: linear attention without the numbers of a known kind"
            )
        mixers.append(Mixer(layers=layers, attention=reader(text)))
    return mixers


def _kinds(text: Table, bounds: list[str]) -> list[str]:
    layers = layer_count(text)
    if listed := layer_names(text):
        if len(listed) != layers:
            raise ModelUnreadable(f"layer_types: {len(listed)} are listed, of {layers} layers")
        for name in sorted(set(listed) - set(_KINDS)):
            bounds.append(
                f"Layers of the kind {describe_value(name)} are not known: counted as attention"
                " that keeps all tokens, which is the most they can need."
            )
        return [_KINDS.get(name, _FULL) for name in listed]
    if own := table_field(text, "linear_attn_config"):
        linear = set(numbers(own, "kda_layers"))  # counted from 1
        return [_LINEAR if i + 1 in linear else _FULL for i in range(layers)]
    if pattern := numbers(text, "hybrid_layer_pattern"):  # MiMo-V2
        if len(pattern) != layers:
            raise ModelUnreadable(f"hybrid_layer_pattern: {len(pattern)} of {layers} layers")
        return [_WINDOW if each else _FULL for each in pattern]
    if text.get("linear_num_value_heads"):
        step = few(text, "full_attention_interval") or 4
        return [_LINEAR if (i + 1) % step else _FULL for i in range(layers)]
    if flag_field(text, "use_sliding_window"):  # Qwen2
        first = few(text, "max_window_layers")
        return [_WINDOW if i >= first else _FULL for i in range(layers)]
    named = next((key for key in _WINDOWS if few(text, key)), "")
    if named and "use_sliding_window" not in text:
        bounds.append(
            f"{named}: which layers have it is not said; all are counted as keeping all tokens,"
            " which is the most they can need."
        )
    return [_FULL] * layers


def _full(text: Table, layers: int, bounds: list[str]) -> list[Mixer]:
    """Layers that keep all tokens; some of them may have an indexer in front."""
    attention: Mla | Gqa
    if text.get("kv_lora_rank") is not None:
        attention = Mla(
            heads=count_field(text, "num_attention_heads"),
            q_rank=0 if text.get("q_lora_rank") is None else count_field(text, "q_lora_rank"),
            kv_rank=count_field(text, "kv_lora_rank"),
            rope=few(text, "qk_rope_head_dim"),
            nope=count_field(text, "qk_nope_head_dim"),
            value=count_field(text, "v_head_dim"),
            gate=bool(text.get("mla_use_output_gate")),
        )
    else:
        # Gemma 4: heads of their own, with one matrix for keys and values. That of the values is
        # counted all the same, because engines keep both in the cache.
        own = {"head_dim": text.get("global_head_dim")}
        if text.get("attention_k_eq_v"):
            own["num_key_value_heads"] = text.get("num_global_key_value_heads")
        attention = _gqa(text, own)
    if text.get("index_n_heads") is None:
        return [Mixer(layers=layers, attention=attention)]
    indexer = Indexer(
        heads=count_field(text, "index_n_heads"), head=count_field(text, "index_head_dim")
    )
    if few(text, "index_kpool") > 1:
        bounds.append("index_kpool: the indexer's cache is counted for every token, not for pools.")
    # some layers take the choice of the layer before them (GLM-5.2; transformers' glm_moe_dsa)
    if listed := names(text, "indexer_types"):
        indexed = max(1, listed.count("full"))
    elif isinstance(pattern := text.get("index_topk_pattern"), str):
        indexed = max(1, pattern.count("F"))
    else:
        skipped = text.get("index_skip_topk_offset") is not None
        offset = few(text, "index_skip_topk_offset") if skipped else 2
        step = few(text, "index_topk_freq") or 1
        indexed = sum(max(i - offset + 1, 0) % step == 0 for i in range(layers))
    indexed = min(layers, indexed)
    groups = [Mixer(layers=indexed, attention=attention, indexer=indexer)]
    rest = layers - indexed
    return groups + ([Mixer(layers=rest, attention=attention)] if rest else [])


def _gqa(text: Table, own: Table) -> Gqa:
    """Groups of heads; `own` has the numbers in which these layers differ from others."""
    text = {**text, **{key: value for key, value in own.items() if value is not None}}
    heads, hidden = count_field(text, "num_attention_heads"), count_field(text, "hidden_size")
    kv_heads = few(text, *_KV_HEADS) or heads
    if heads % kv_heads:
        raise ModelUnreadable(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
    if text.get("head_dim") is None and hidden % heads:
        raise ModelUnreadable(f"head_dim: is missing, and {heads} heads do not divide {hidden}")
    head = count_field(text, "head_dim") if text.get("head_dim") is not None else hidden // heads
    # Qwen3-Next and its successors have the gate always, and a field for it only since 3.5
    gate = flag_field(
        text, "attn_output_gate", default=text.get("linear_num_value_heads") is not None
    )
    value, bias = few(text, "v_head_dim") or head, flag_field(text, "attention_bias")
    return Gqa(heads=heads, kv_heads=kv_heads, head=head, value=value, bias=bias, gate=gate)


Reader: TypeAlias = Callable[[Table], Linear]
_LINEAR_KINDS: list[tuple[tuple[str, ...], Reader]] = []


def _known_by(*fields: str) -> Callable[[Reader], Reader]:
    """Adds a reader of linear attention; the first whose field a config has reads it."""

    def add(reader: Reader) -> Reader:
        _LINEAR_KINDS.append((fields, reader))
        return reader

    return add


@_known_by("linear_num_value_heads")
def _delta_net(text: Table) -> Linear:
    """Gated delta nets of Qwen3-Next and Qwen3.5 (transformers: qwen3_next)."""
    hidden, kernel = count_field(text, "hidden_size"), count_field(text, "linear_conv_kernel_dim")
    heads = count_field(text, "linear_num_value_heads")
    value = count_field(text, "linear_value_head_dim")
    key_width = count_field(text, "linear_num_key_heads") * count_field(text, "linear_key_head_dim")
    values, mixed = heads * value, 2 * key_width + heads * value
    into = hidden * (mixed + values + 2 * heads)  # with the gate z, and b and a of every head
    divided = into + values * hidden + mixed * kernel + 2 * heads
    state = heads * count_field(text, "linear_key_head_dim") * value
    conv = mixed * (kernel - 1)
    return Linear(heads=heads, divided=divided, whole=value, state=state, conv=conv)


@_known_by("mamba_num_heads", "mamba_n_heads")
def _mamba(text: Table) -> Linear:
    """Mamba-2 of Nemotron-H and Granite 4 (transformers: nemotron_h, granitemoehybrid)."""
    hidden = count_field(text, "hidden_size")
    kernel = count_field(text, "conv_kernel", "mamba_d_conv")
    heads = count_field(text, "mamba_num_heads", "mamba_n_heads")
    state = count_field(text, "ssm_state_size", "mamba_d_state")
    inner = heads * count_field(text, "mamba_head_dim", "mamba_d_head")
    mixed = inner + 2 * count_field(text, "n_groups", "mamba_n_groups") * state
    into = hidden * (inner + mixed + heads)
    divided = into + inner * hidden + mixed * (kernel + 1) + 3 * heads + inner
    conv = mixed * (kernel - 1)
    return Linear(heads=heads, divided=divided, whole=0, state=inner * state, conv=conv)


@_known_by("mamba_dt_rank")
def _mamba_1(text: Table) -> Linear:
    """The first Mamba, of Jamba, with norms of its own (transformers: jamba)."""
    hidden, kernel = count_field(text, "hidden_size"), count_field(text, "mamba_d_conv")
    state, rank = count_field(text, "mamba_d_state"), count_field(text, "mamba_dt_rank")
    inner = count_field(text, "mamba_expand") * hidden
    bias = inner if flag_field(text, "mamba_conv_bias") else 0
    # into both halves, the convolution, what depends on the input, its step, A and D, and out
    divided = 2 * hidden * inner + inner * kernel + bias + inner * (rank + 2 * state)
    divided += rank * inner + inner + inner * state + inner + inner * hidden
    whole, conv = rank + 2 * state, inner * (kernel - 1)
    return Linear(heads=inner, divided=divided, whole=whole, state=inner * state, conv=conv)


@_known_by("conv_L_cache")
def _convolution(text: Table) -> Linear:
    """A gated convolution over a few tokens (transformers: lfm2)."""
    hidden, kernel = count_field(text, "hidden_size"), count_field(text, "conv_L_cache")
    divided, conv = 4 * hidden * hidden + hidden * kernel, hidden * (kernel - 1)
    return Linear(heads=hidden, divided=divided, whole=0, state=0, conv=conv)


@_known_by("linear_attn_config", "linear_num_heads")
def _kda(text: Table) -> Linear:
    """Kimi delta attention (vLLM: models/kimi_k3/nvidia/kda.py; transformers: kimi_linear)."""
    own, hidden = table_field(text, "linear_attn_config"), count_field(text, "hidden_size")
    both = {**text, **own}
    heads = count_field(both, "num_heads", "linear_num_heads")
    head = count_field(both, "head_dim" if own else "linear_head_dim")
    kernel = count_field(both, "short_conv_kernel_size", "linear_conv_kernel_dim")
    wide, whole_gate = heads * head, bool(own.get("use_full_rank_gate"))
    # queries, keys, values and output; the second step of the decay; b of every head
    divided = 4 * hidden * wide + head * wide + hidden * heads + 3 * wide * kernel + 2 * wide
    # the output's gate is one matrix in Kimi-K3, and two narrow ones before it
    divided += hidden * wide if whole_gate else head * wide
    whole = hidden * head * (1 if whole_gate else 2) + head
    state, conv = heads * head * head, 3 * wide * (kernel - 1)
    return Linear(heads=heads, divided=divided, whole=whole, state=state, conv=conv)


def read_feed_forward(text: Table, bounds: list[str]) -> tuple[int, Moe | None]:
    """How many layers are dense, and the experts of the others."""
    layers = layer_count(text)
    if not few(text, *_EXPERTS):
        # experts under an unknown name must not be taken for a model without any
        for key in sorted(set(text) - {*_EXPERTS, *_ACTIVE, *_SHARED}):
            if type(text[key]) is int and text[key] > 1 and _NUMBER_OF_EXPERTS.fullmatch(key):
                raise ModelUnreadable(f"{key}: experts are not known under this name")
        return _feed_forward_kinds(text, layers).count("mlp"), None
    kinds = _feed_forward_kinds(text, layers)
    sparse = kinds.count("moe")
    if not sparse or len(kinds) != layers:
        raise ModelUnreadable(f"{sparse} of {len(kinds)} layers have experts, of {layers} in all")
    # some models have no width but that of their experts under this name (MiniMax-M2, gpt-oss)
    width = count_field(text, "moe_intermediate_size", "intermediate_size")
    shared = next((text[key] for key in _SHARED if key in text), None) or 0
    if not isinstance(shared, int) or shared < 0:
        value = describe_value(shared)
        raise ModelUnreadable(f"n_shared_experts: {value} is not a number of shared experts")
    # Llama 4 has one always, and no field for it
    if "interleave_moe_layer_step" in text and not shared:
        shared = 1
    latent = few(text, "moe_latent_size", "routed_expert_hidden_size")
    moe = Moe(
        experts=count_field(text, *_EXPERTS),
        active=count_field(text, *_ACTIVE),
        width=width,
        layers=sparse,
        hidden=latent or count_field(text, "hidden_size"),
        shared_width=few(text, *_SHARED_WIDTH) * max(1, shared) or shared * width,
        # gpt-oss: no field says so, its experts are known by their clamp and a bias in attention
        bias=bool(text.get("swiglu_limit") and text.get("attention_bias")),
    )
    if moe.active > moe.experts:
        raise ModelUnreadable(f"num_experts_per_tok: {moe.active} of only {moe.experts} experts")
    if few(text, "num_hash_layers"):
        bounds.append(
            "num_hash_layers: the tables of hashed experts are not counted; they are small."
        )
    # Grok-2 and Gemma 4 have a dense part beside the experts, in every layer
    has_both = flag_field(text, "residual_moe") or flag_field(text, "enable_moe_block")
    return layers if has_both else kinds.count("mlp"), moe


def _feed_forward_kinds(text: Table, layers: int) -> list[str]:
    """`mlp`, `moe` or nothing, for each layer."""
    listed = layer_names(text)
    if "mlp" in listed or "moe" in listed:
        return [name if name in ("mlp", "moe") else "" for name in listed]
    if not few(text, *_EXPERTS):
        return ["mlp"] * layers
    if kinds := names(text, "mlp_layer_types"):
        return ["mlp" if kind == "dense" else "moe" for kind in kinds]
    sparse: Collection[int] | None = None
    if isinstance(listing := text.get("moe_layers_enum"), str):  # Step
        found = [part.strip() for part in listing.split(",")]
        if not all(re.fullmatch(r"\d{1,4}", part) for part in found):
            raise ModelUnreadable("moe_layers_enum: is not a list of numbers")
        sparse = {int(part) for part in found}
    elif numbered := numbers(text, "moe_layers_enum") or numbers(text, "moe_layers"):
        sparse = set(numbered)
    elif step := few(text, "interleave_moe_layer_step"):  # Llama 4
        sparse = range(step - 1, layers, step)
    elif period := few(text, "expert_layer_period"):  # Jamba
        sparse = range(few(text, "expert_layer_offset"), layers, period)
    elif text.get("moe_layer_start_index") is not None:  # ERNIE 4.5
        begin, step = few(text, "moe_layer_start_index"), few(text, "moe_layer_interval") or 1
        end = few(text, "moe_layer_end_index") or layers - 1
        sparse = {i for i in range(begin, end + 1) if (i + 1) % step == 0}
    if sparse is not None:
        return ["moe" if i in sparse else "mlp" for i in range(layers)]
    frequency = text.get("moe_layer_freq", text.get("is_moe_layer", 1))
    if isinstance(frequency, list):  # a 0 or 1 for every layer
        return ["moe" if each else "mlp" for each in frequency]
    if frequency != 1 or text.get("decoder_sparse_step", 1) != 1:
        raise ModelUnreadable(
            "moe_layer_freq: only models with experts in every layer are supported"
        )
    first = text.get("first_k_dense_replace", text.get("num_dense_layers", 0))
    only = text.get("mlp_only_layers") or []
    if not isinstance(first, int) or not isinstance(only, list):
        raise ModelUnreadable("first_k_dense_replace: is not a number of layers")
    dense = first + len(only)
    if not 0 <= dense < layers:
        raise ModelUnreadable(f"first_k_dense_replace: {dense} dense layers of {layers}")
    return ["mlp"] * dense + ["moe"] * (layers - dense)

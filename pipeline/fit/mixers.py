"""How a model's layers mix tokens, read from a config.json by its fields and not by its name.

The same parts come back under new names: latents (kv_lora_rank), groups of heads, windows, states
of linear attention, an indexer in front. Which layer has which stands in `layer_types`, in a
pattern of letters, in lists of layers, or in an interval.
"""

from __future__ import annotations

import re
from collections import Counter

from pipeline.errors import ModelUnreadable
from pipeline.fit.fields import Table, count, few, flag, names, numbers, table, told
from pipeline.fit.shape import Compressed, Gqa, Indexer, Linear, Mixer, Mla

_FULL, _WINDOW, _LINEAR, _NONE = "full", "window", "linear", "none"
_KINDS = {
    "full_attention": _FULL,
    "indexed_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _WINDOW,
    "linear_attention": _LINEAR,
    "mamba": _LINEAR,
    "conv": _LINEAR,
    # of Nemotron-H, whose layers either mix tokens or compute
    "mlp": _NONE,
    "moe": _NONE,
}
_WINDOWS = ("sliding_window", "attention_chunk_size")
_KV_HEADS = ("num_key_value_heads", "num_attention_groups", "num_kv_heads")
_PAGES = (
    "Compressed attention: vLLM's caches of several kinds share pages of one size, which takes more"
    " than this sum, by a sixth in one report and twice in another (vllm-project/vllm#51041)."
)
_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# Names that say which layers are of which kind; those without effect on sizes stand with them.
_PATTERN = re.compile(
    r"(layers?|blocks?)_(types?|kinds?|pattern|period|interval|freq|frequency|step|offset|layout"
    r"|map|idx|ids|indices|indexes|list)$|(pattern|interval|period|schedule)$"
)
_KNOWN_PATTERNS = {
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern"),
    *("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset"),
    *("full_attention_interval", "mlp_layer_types", "moe_layer_freq", "moe_layer_interval"),
    *("moe_layer_start_index", "moe_layer_end_index", "interleave_moe_layer_step"),
    *(
        "sliding_window_pattern",
        "index_topk_pattern",
        "no_rope_layer_interval",
        "nope_layer_interval",
    ),
}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


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
        layers = range(count(text, "num_hidden_layers"))
        return ["sliding_attention" if (i + 1) % step else "full_attention" for i in layers]
    if period := few(text, "attn_layer_period"):  # Jamba (transformers: jamba)
        offset = few(text, "attn_layer_offset")
        layers = range(count(text, "num_hidden_layers"))
        return ["attention" if i % period == offset else "mamba" for i in layers]
    return []


def layer_count(text: Table) -> int:
    """Configs with a pattern may leave the number out."""
    listed = layer_names(text)
    if not listed or "num_hidden_layers" in text:
        return count(text, "num_hidden_layers")
    return len(listed)


def read_mixers(text: Table, bounds: list[str]) -> list[Mixer]:
    """Groups of layers of one kind; what is not understood is added to the bounds."""
    for key in sorted(set(text) - _KNOWN_PATTERNS):
        # a list, a text or a number above 1 of this name makes layers differ
        if _PATTERN.search(key) and text[key] not in (None, False, 0, 1, "", [], {}):
            bounds.append(
                f"{told(key)}: looks like a pattern of layers that is not understood; they are"
                " counted as if it were not there."
            )
    if ratios := _ratios(text):
        bounds.append(_PAGES)
        return _compressed(text, ratios)
    kinds = Counter(_kinds(text, bounds))
    mixers = []
    if layers := kinds[_FULL]:
        mixers += _full(text, layers, bounds)
    if layers := kinds[_WINDOW]:
        tokens = count(text, *_WINDOWS)
        mixers.append(Mixer(layers=layers, attention=_windowed(text), window=tokens))
    if layers := kinds[_LINEAR]:
        mixers.append(Mixer(layers=layers, attention=_linear(text)))
    return mixers


def _kinds(text: Table, bounds: list[str]) -> list[str]:
    layers = layer_count(text)
    if listed := layer_names(text):
        if len(listed) != layers:
            raise ModelUnreadable(f"layer_types: {len(listed)} are listed, of {layers} layers")
        for name in sorted(set(listed) - set(_KINDS)):
            bounds.append(
                f"Layers of the kind {told(name)} are not known: counted as attention that keeps"
                " all tokens, which is the most they can need."
            )
        return [_KINDS.get(name, _FULL) for name in listed]
    if own := table(text, "linear_attn_config"):
        linear = set(numbers(own, "kda_layers"))  # counted from 1
        return [_LINEAR if i + 1 in linear else _FULL for i in range(layers)]
    if pattern := numbers(text, "hybrid_layer_pattern"):  # MiMo-V2
        if len(pattern) != layers:
            raise ModelUnreadable(f"hybrid_layer_pattern: {len(pattern)} of {layers} layers")
        return [_WINDOW if each else _FULL for each in pattern]
    if text.get("linear_num_value_heads"):
        step = few(text, "full_attention_interval") or 4
        return [_LINEAR if (i + 1) % step else _FULL for i in range(layers)]
    return _plain(text, layers, bounds)


def _plain(text: Table, layers: int, bounds: list[str]) -> list[str]:
    """Models without a list of layers: all alike, but for the windows of Qwen2."""
    if flag(text, "use_sliding_window"):
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
    attention = _mla(text) if text.get("kv_lora_rank") is not None else _global(text)
    if text.get("index_n_heads") is None:
        return [Mixer(layers=layers, attention=attention)]
    indexer = Indexer(heads=count(text, "index_n_heads"), head=count(text, "index_head_dim"))
    if few(text, "index_kpool") > 1:
        bounds.append("index_kpool: the indexer's cache is counted for every token, not for pools.")
    own = min(layers, _own_indexers(text, layers))
    groups = [Mixer(layers=own, attention=attention, indexer=indexer)]
    return groups + ([Mixer(layers=layers - own, attention=attention)] if layers > own else [])


def _own_indexers(text: Table, layers: int) -> int:
    """Some layers take the choice of the layer before them (GLM-5.2; transformers' glm_moe_dsa)."""
    if listed := names(text, "indexer_types"):
        return max(1, listed.count("full"))
    if isinstance(pattern := text.get("index_topk_pattern"), str):
        return max(1, pattern.count("F"))
    step, offset = few(text, "index_topk_freq") or 1, 2
    if text.get("index_skip_topk_offset") is not None:
        offset = few(text, "index_skip_topk_offset")
    return sum(max(i - offset + 1, 0) % step == 0 for i in range(layers))


def _mla(text: Table) -> Mla:
    return Mla(
        heads=count(text, "num_attention_heads"),
        q_rank=0 if text.get("q_lora_rank") is None else count(text, "q_lora_rank"),
        kv_rank=count(text, "kv_lora_rank"),
        rope=few(text, "qk_rope_head_dim"),
        nope=count(text, "qk_nope_head_dim"),
        value=count(text, "v_head_dim"),
        gate=bool(text.get("mla_use_output_gate")),
    )


def _gqa(text: Table) -> Gqa:
    heads, hidden = count(text, "num_attention_heads"), count(text, "hidden_size")
    kv_heads = few(text, *_KV_HEADS) or heads
    if heads % kv_heads:
        raise ModelUnreadable(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
    if text.get("head_dim") is None and hidden % heads:
        raise ModelUnreadable(f"head_dim: is missing, and {heads} heads do not divide {hidden}")
    head = count(text, "head_dim") if text.get("head_dim") is not None else hidden // heads
    # Qwen3-Next and its successors have the gate always, and a field for it only since 3.5
    gate = flag(text, "attn_output_gate", default=text.get("linear_num_value_heads") is not None)
    return Gqa(
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        value=few(text, "v_head_dim") or head,
        bias=flag(text, "attention_bias"),
        gate=gate,
    )


def _global(text: Table) -> Gqa:
    """Layers without a window may have heads of their own, with one matrix for keys and values.

    That of the values is counted all the same: engines keep both in the cache (Gemma 4).
    """
    own = {"head_dim": text.get("global_head_dim")}
    if text.get("attention_k_eq_v"):
        own["num_key_value_heads"] = text.get("num_global_key_value_heads")
    return _gqa({**text, **{key: value for key, value in own.items() if value is not None}})


def _windowed(text: Table) -> Gqa:
    """Layers with a window may have heads of their own (MiMo-V2, Step 3.5)."""
    own = {
        "num_attention_heads": text.get("swa_num_attention_heads"),
        "num_key_value_heads": text.get("swa_num_key_value_heads"),
        "head_dim": text.get("swa_head_dim"),
        "v_head_dim": text.get("swa_v_head_dim"),
    }
    own |= table(text, "attention_other_setting")
    return _gqa({**text, **{key: value for key, value in own.items() if value is not None}})


def _linear(text: Table) -> Linear:
    if text.get("linear_num_value_heads"):
        return _delta_net(text)
    if text.get("mamba_num_heads") or text.get("mamba_n_heads"):
        return _mamba(text)
    if text.get("mamba_dt_rank"):
        return _mamba_1(text)
    if text.get("conv_L_cache"):
        return _short_conv(text)
    if text.get("linear_attn_config") or text.get("linear_num_heads"):
        return _kda(text)
    raise ModelUnreadable("layer_types: linear attention without the numbers of a known kind")


def _delta_net(text: Table) -> Linear:
    """Gated delta nets of Qwen3-Next and Qwen3.5 (transformers: qwen3_next)."""
    hidden, kernel = count(text, "hidden_size"), count(text, "linear_conv_kernel_dim")
    heads, value = count(text, "linear_num_value_heads"), count(text, "linear_value_head_dim")
    key_width = count(text, "linear_num_key_heads") * count(text, "linear_key_head_dim")
    values, mixed = heads * value, 2 * key_width + heads * value
    into = hidden * (mixed + values + 2 * heads)  # with the gate z, and b and a of every head
    return Linear(
        heads=heads,
        divided=into + values * hidden + mixed * kernel + 2 * heads,
        whole=value,
        state=heads * count(text, "linear_key_head_dim") * value,
        conv=mixed * (kernel - 1),
    )


def _kda(text: Table) -> Linear:
    """Kimi delta attention (vLLM: models/kimi_k3/nvidia/kda.py; transformers: kimi_linear)."""
    own = table(text, "linear_attn_config")
    hidden = count(text, "hidden_size")
    heads = count({**text, **own}, "num_heads", "linear_num_heads")
    head = count({**text, **own}, "head_dim" if own else "linear_head_dim")
    kernel = count({**text, **own}, "short_conv_kernel_size", "linear_conv_kernel_dim")
    wide, whole_gate = heads * head, bool(own.get("use_full_rank_gate"))
    # queries, keys, values and output; the second step of the decay; b of every head
    divided = 4 * hidden * wide + head * wide + hidden * heads + 3 * wide * kernel + 2 * wide
    # the output's gate is one matrix in Kimi-K3, and two narrow ones before it
    divided += hidden * wide if whole_gate else head * wide
    return Linear(
        heads=heads,
        divided=divided,
        whole=hidden * head * (1 if whole_gate else 2) + head,
        state=heads * head * head,
        conv=3 * wide * (kernel - 1),
    )


def _mamba(text: Table) -> Linear:
    """Mamba-2 of Nemotron-H and Granite 4 (transformers: nemotron_h, granitemoehybrid)."""
    hidden, kernel = count(text, "hidden_size"), count(text, "conv_kernel", "mamba_d_conv")
    heads = count(text, "mamba_num_heads", "mamba_n_heads")
    state = count(text, "ssm_state_size", "mamba_d_state")
    inner = heads * count(text, "mamba_head_dim", "mamba_d_head")
    mixed = inner + 2 * count(text, "n_groups", "mamba_n_groups") * state
    into = hidden * (inner + mixed + heads)
    return Linear(
        heads=heads,
        divided=into + inner * hidden + mixed * (kernel + 1) + 3 * heads + inner,
        whole=0,
        state=inner * state,
        conv=mixed * (kernel - 1),
    )


def _mamba_1(text: Table) -> Linear:
    """The first Mamba, of Jamba, with norms of its own (transformers: jamba)."""
    hidden, kernel = count(text, "hidden_size"), count(text, "mamba_d_conv")
    state, rank = count(text, "mamba_d_state"), count(text, "mamba_dt_rank")
    inner = count(text, "mamba_expand") * hidden
    bias = inner if flag(text, "mamba_conv_bias") else 0
    # into both halves, the convolution, what depends on the input, its step, A and D, and out
    divided = 2 * hidden * inner + inner * kernel + bias + inner * (rank + 2 * state)
    divided += rank * inner + inner + inner * state + inner + inner * hidden
    return Linear(
        heads=inner,
        divided=divided,
        whole=rank + 2 * state,
        state=inner * state,
        conv=inner * (kernel - 1),
    )


def _short_conv(text: Table) -> Linear:
    """A gated convolution over a few tokens (transformers: lfm2)."""
    hidden, kernel = count(text, "hidden_size"), count(text, "conv_L_cache")
    return Linear(
        heads=hidden,
        divided=4 * hidden * hidden + hidden * kernel,
        whole=0,
        state=0,
        conv=hidden * (kernel - 1),
    )


def _ratios(text: Table) -> list[int]:
    """How many tokens are a run, in each layer; a checkpoint may list them for MTP layers too."""
    if listed := numbers(text, "compress_ratios"):
        return listed[: count(text, "num_hidden_layers")]
    kinds, given = names(text, "layer_types"), table(text, "compress_rates")
    rates = _RATIOS | {kind: count(given, kind) for kind in _RATIOS if kind in given}
    return [rates.get(kind, 0) for kind in kinds] if set(kinds) & set(_RATIOS) else []


def _compressed(text: Table, ratios: list[int]) -> list[Mixer]:
    """DeepSeek V4: every layer has a window, most have runs of 4 or 128 tokens besides."""
    window = count(text, "sliding_window")
    groups = []
    for ratio, layers in sorted(Counter(ratios).items()):
        indexes = ratio == 4  # runs of 128 are few enough to be looked at whole
        attention = Compressed(
            heads=count(text, "num_attention_heads"),
            head=count(text, "head_dim"),
            q_rank=count(text, "q_lora_rank"),
            groups=count(text, "o_groups"),
            o_rank=count(text, "o_lora_rank"),
            ratio=ratio,
            index_heads=count(text, "index_n_heads") if indexes else 0,
            index_head=count(text, "index_head_dim") if indexes else 0,
        )
        groups.append(Mixer(layers=layers, attention=attention, window=window))
    return groups

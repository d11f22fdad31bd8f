"""A GGUF model of 1 MB whose greedy answer is known text.

It has the shape of Kimi-K2 and DeepSeek-V3 (`deepseek2`: MLA attention, routed and shared experts)
in mainline's tensor layout, so the engine's real code paths run. The blocks hold small random
weights that only perturb the residual stream; a table planted in `token_embd` and `output` makes
each word of WORDS be followed by the next, and anything else by the first.

Tried with gguf 0.19.0 and numpy 2.4.6.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
)
from numpy.typing import NDArray

Weights = NDArray[np.float32]

SPELLING = """
    alpha bravo charlie delta echo foxtrot golf hotel
    india juliet kilo lima mike november oscar papa
"""
WORDS = tuple(f" {word}" for word in SPELLING.split())

BOS, EOS, PAD, END_OF_TURN = "<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_end|>"
SPECIAL = (
    BOS,
    EOS,
    PAD,
    END_OF_TURN,
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)

LAYERS, DENSE_LAYERS = 2, 1
EMBEDDING, CONTEXT, ORIGINAL_CONTEXT = 64, 32768, 4096
# ik_llama.cpp insists on rope 64, latent 512 and a head count divisible by 4.
HEADS, ROPE, KV_RANK, Q_RANK = 4, 64, 512, 32
NOPE, VALUE = 32, 32
EXPERTS, EXPERTS_USED, SHARED_EXPERTS = 8, 2, 1
DENSE_WIDTH, EXPERT_WIDTH = 64, 32

# The residual stream: one constant channel, one channel per word, the rest random.
BIAS_CHANNEL, FIRST_WORD_CHANNEL = 0, 1
FREE_CHANNEL = FIRST_WORD_CHANNEL + len(WORDS)
PERTURBATION = 0.05


def write_tiny_gguf(path: Path) -> None:
    """Write the model; the same bytes every time."""
    tokens, merges = make_vocabulary()
    writer = GGUFWriter(path, "deepseek2")
    add_shape(writer)
    add_tokenizer(writer, tokens, merges)
    for name, weights in make_weights(tokens).items():
        add_tensor(writer, name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expected_text(n_tokens: int) -> str:
    """What the model answers, greedily, to any chat in that many tokens."""
    return "".join(WORDS[i % len(WORDS)] for i in range(n_tokens))


def byte_letters() -> dict[int, str]:
    """GPT-2's table from a byte to the printable letter that stands for it in a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def as_token(word: str) -> str:
    """The spelling of a word in the vocabulary."""
    letters = byte_letters()
    return "".join(letters[byte] for byte in word.encode())


def make_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (bytes, then growing prefixes of each word, then special ones) and their merges."""
    letters = byte_letters()
    tokens = [letters[byte] for byte in range(256)]
    merges: dict[str, None] = {}
    for spelled in map(as_token, WORDS):
        prefixes = list(accumulate(spelled))
        tokens += [prefix for prefix in prefixes if prefix not in tokens]
        merges |= {
            f"{prefix} {letter}": None
            for prefix, letter in zip(prefixes, spelled[1:], strict=False)
        }
    return [*tokens, *SPECIAL], list(merges)


def add_shape(writer: GGUFWriter) -> None:
    """The hyperparameters, as a published Kimi-K2 file has them."""
    writer.add_name("tiny-mla-moe")
    writer.add_type("model")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(DENSE_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    add_attention_shape(writer)
    add_expert_shape(writer)


def add_attention_shape(writer: GGUFWriter) -> None:
    """MLA: one latent key/value head, with the per-head sizes beside it."""
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(KV_RANK + ROPE)
    writer.add_value_length(KV_RANK)
    writer.add_key_length_mla(NOPE + ROPE)
    writer.add_value_length_mla(VALUE)
    writer.add_q_lora_rank(Q_RANK)
    writer.add_kv_lora_rank(KV_RANK)
    writer.add_rope_dimension_count(ROPE)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(CONTEXT / ORIGINAL_CONTEXT)
    writer.add_rope_scaling_orig_ctx_len(ORIGINAL_CONTEXT)
    writer.add_rope_scaling_yarn_log_mul(0.1)


def add_expert_shape(writer: GGUFWriter) -> None:
    """Routed experts with sigmoid gating, and one shared expert."""
    writer.add_leading_dense_block_count(DENSE_LAYERS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)
    writer.add_expert_shared_count(SHARED_EXPERTS)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_expert_weights_scale(2.827)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def add_tokenizer(writer: GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    """GPT-2's byte-level BPE, in which each of WORDS is one token."""
    n_normal = len(tokens) - len(SPECIAL)
    kinds = [TokenType.NORMAL] * n_normal + [TokenType.CONTROL] * len(SPECIAL)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(BOS))
    writer.add_eos_token_id(tokens.index(EOS))
    writer.add_eot_token_id(tokens.index(END_OF_TURN))
    writer.add_pad_token_id(tokens.index(PAD))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_tensor(writer: GGUFWriter, name: str, weights: Weights) -> None:
    """Matrices as f16; norms, biases and the router stay f32, as converters leave them."""
    exact = weights.ndim == 1 or "ffn_gate_inp" in name
    kind = GGMLQuantizationType.F32 if exact else GGMLQuantizationType.F16
    writer.add_tensor(name, weights.astype(np.float32 if exact else np.float16), raw_dtype=kind)


def make_weights(tokens: list[str]) -> dict[str, Weights]:
    """Every tensor by name; numpy's (out, in) is ggml's {in, out}."""
    random = np.random.default_rng(7)
    weights = plant_words(random, tokens)
    for layer in range(LAYERS):
        parts = attention_weights(random)
        parts |= dense_weights(random) if layer < DENSE_LAYERS else expert_weights(random)
        weights |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return weights


def plant_words(random: np.random.Generator, tokens: list[str]) -> dict[str, Weights]:
    """Embeddings and output rows that make each word call the next one."""
    words = [tokens.index(as_token(word)) for word in WORDS]
    embedding = random.standard_normal((len(tokens), EMBEDDING), dtype=np.float32)
    embedding[:, FIRST_WORD_CHANNEL:FREE_CHANNEL] = 0.0
    embedding[:, BIAS_CHANNEL] = 4.0
    output = np.zeros((len(tokens), EMBEDDING), dtype=np.float32)
    output[words[0], BIAS_CHANNEL] = 2.5
    for i, word in enumerate(words):
        channel = FIRST_WORD_CHANNEL + i
        embedding[word, channel] = 8.0
        output[words[(i + 1) % len(words)], channel] = 8.0
    return {
        "token_embd.weight": embedding,
        "output_norm.weight": ones(EMBEDDING),
        "output.weight": output,
    }


def attention_weights(random: np.random.Generator) -> dict[str, Weights]:
    """One MLA block; `attn_k_b` is stored transposed, as mainline wants it."""
    return {
        "attn_norm.weight": ones(EMBEDDING),
        "attn_q_a.weight": matrix(random, Q_RANK, EMBEDDING),
        "attn_q_a_norm.weight": ones(Q_RANK),
        "attn_q_b.weight": matrix(random, HEADS * (NOPE + ROPE), Q_RANK),
        "attn_kv_a_mqa.weight": matrix(random, KV_RANK + ROPE, EMBEDDING),
        "attn_kv_a_norm.weight": ones(KV_RANK),
        "attn_k_b.weight": matrix(random, HEADS, KV_RANK, NOPE),
        "attn_v_b.weight": matrix(random, HEADS, VALUE, KV_RANK),
        "attn_output.weight": residual(random, EMBEDDING, HEADS * VALUE),
        "ffn_norm.weight": ones(EMBEDDING),
    }


def dense_weights(random: np.random.Generator) -> dict[str, Weights]:
    """The feed-forward part of a leading dense layer."""
    return {
        "ffn_gate.weight": matrix(random, DENSE_WIDTH, EMBEDDING),
        "ffn_up.weight": matrix(random, DENSE_WIDTH, EMBEDDING),
        "ffn_down.weight": residual(random, EMBEDDING, DENSE_WIDTH),
    }


def expert_weights(random: np.random.Generator) -> dict[str, Weights]:
    """Router, routed experts and the shared expert."""
    shared = EXPERT_WIDTH * SHARED_EXPERTS
    return {
        "ffn_gate_inp.weight": 4.0 * matrix(random, EXPERTS, EMBEDDING),
        "exp_probs_b.bias": 0.01 * random.standard_normal(EXPERTS, dtype=np.float32),
        "ffn_gate_exps.weight": matrix(random, EXPERTS, EXPERT_WIDTH, EMBEDDING),
        "ffn_up_exps.weight": matrix(random, EXPERTS, EXPERT_WIDTH, EMBEDDING),
        "ffn_down_exps.weight": residual(random, EXPERTS, EMBEDDING, EXPERT_WIDTH),
        "ffn_gate_shexp.weight": matrix(random, shared, EMBEDDING),
        "ffn_up_shexp.weight": matrix(random, shared, EMBEDDING),
        "ffn_down_shexp.weight": residual(random, EMBEDDING, shared),
    }


def ones(size: int) -> Weights:
    """The weights of a norm that does nothing."""
    return np.ones(size, dtype=np.float32)


def matrix(random: np.random.Generator, *shape: int) -> Weights:
    """Random weights that keep the size of what they multiply."""
    scale = np.float32(1 / np.sqrt(shape[-1]))
    return random.standard_normal(shape, dtype=np.float32) * scale


def residual(random: np.random.Generator, *shape: int) -> Weights:
    """Small weights that write to the residual stream, but never to its constant channel."""
    weights = PERTURBATION * matrix(random, *shape)
    weights[..., BIAS_CHANNEL, :] = 0.0
    return weights

"""A config.json as an architecture: by the parts it names, not by the model's name.

A part that is not understood is counted on the side that needs more, with the reason; a number
that is missing or cannot be is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.core.errors import ModelUnreadable
from pipeline.core.files import read_at_most
from pipeline.serving.fit.fields import count, describe, few, flag
from pipeline.serving.fit.layers import layer_count, read_feed_forward, read_mixers
from pipeline.serving.fit.quant import read_precision
from pipeline.serving.fit.shape import Architecture, Vision

MOST_BYTES = 16 << 20  # of a config.json; real ones have some kilobytes
CONFIG_FILE = "config.json"
QUANT_FILE = "hf_quant_config.json"  # NVIDIA's modelopt may describe its quantisation only in it
_WHOLE = "It must be the whole config.json of a model, as its page on the Hub has it."
# where models with a vision tower keep the language model's numbers
_TEXT = ("text_config", "llm_config", "language_config")
_DENSE_WIDTH = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
_PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
# activations of feed-forward parts without a gate: Nemotron, Apertus
_WITHOUT_GATE = ("relu2", "xielu")
# what sglang takes for a vision tower's layers where it does not find its field
_RATED_LAYERS = 24


def read_config(path: Path) -> Architecture:
    """The architecture that a config.json describes, and hf_quant_config.json beside it."""
    beside = path.with_name(QUANT_FILE)
    try:
        quant = _file_bytes(beside) if beside.is_file() else None
        return parse_config(_file_bytes(path), quant)
    except ModelUnreadable as error:
        raise ModelUnreadable(f"{path}: {error}", error.hint or _WHOLE) from error


def parse_config(data: bytes, quant: bytes | None = None) -> Architecture:
    """The architecture that the bytes of both files describe."""
    config = _parsed(data)
    if "quantization_config" not in config and quant is not None:
        quantization = _parsed(quant).get("quantization")
        if not isinstance(quantization, dict):
            raise ModelUnreadable(f"{QUANT_FILE}: quantization: is missing")
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return architecture_of(config)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """A parsed config.json as an architecture."""
    families, bounds = config.get("architectures"), list[str]()
    if not isinstance(families, list) or len(families) != 1:
        raise ModelUnreadable("architectures: must name exactly one model class")
    inner = next((key for key in _TEXT if key in config), None)
    text = config[inner] if inner else config
    if not isinstance(text, Mapping):
        raise ModelUnreadable(f"{inner}: is not a JSON object")
    # engines differ in which of the two they read, so a contradiction has no right answer
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        if key in config and key in text and config[key] != text[key]:
            values = f"{describe(config[key])} at the top and {describe(text[key])} in text_config"
            raise ModelUnreadable(f"{key}: is {values}")
    tying = next((t for t in (text, config) if t.get("tie_word_embeddings") is not None), None)
    # a class's default is often missing from the file
    kind = str(text.get("model_type") or config.get("model_type") or "")
    tied = flag(tying, "tie_word_embeddings") if tying else kind.startswith(("gemma", "cohere"))
    # Gemma 3n and 4: every layer has a table of its own, with a row for each token
    rows = few(text, "vocab_size_per_layer_input", "vocab_size")
    try:
        dense_layers, moe = read_feed_forward(text, bounds)
        return Architecture(
            family=str(families[0]),
            layers=layer_count(text),
            hidden=count(text, "hidden_size"),
            vocabulary=count(text, "vocab_size"),
            context=count(text, "max_position_embeddings", "model_max_length"),
            mixers=read_mixers(text, bounds),
            dense_layers=dense_layers,
            dense_width=count(text, *_DENSE_WIDTH) if dense_layers else 0,
            gated=text.get("mlp_hidden_act", text.get("hidden_act")) not in _WITHOUT_GATE,
            tied=tied,
            lookup=rows * few(text, "hidden_size_per_layer_input") * layer_count(text),
            predictors=next((text[key] for key in _PREDICTORS if text.get(key)), 0),
            moe=moe,
            vision=_vision(config, bounds),
            precision=read_precision(config, text, bounds),
            bounds=bounds,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelUnreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _vision(config: Mapping[str, Any], bounds: list[str]) -> Vision | None:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    try:
        if "vt_hidden_size" not in vision:  # Qwen and others
            return Vision(
                layers=count(vision, "depth", "num_hidden_layers"),
                hidden=count(vision, "hidden_size"),
                width=count(vision, "intermediate_size"),
                patch=count(vision, "patch_size"),
                positions=few(vision, "num_position_embeddings") or 1,
                merge=(few(vision, "spatial_merge_size") or 1) ** 2,
                frames=few(vision, "temporal_patch_size") or 1,
                rated_layers=few(vision, "num_hidden_layers") or _RATED_LAYERS,
            )
        # Kimi. Patches that become one token: the projector is as wide as all of them together
        merge = vision.get("merge_kernel_size")
        if not isinstance(merge, list) or len(merge) != 2 or not all(type(n) is int for n in merge):
            raise ModelUnreadable("merge_kernel_size: is not a pair")
        return Vision(
            layers=count(vision, "vt_num_hidden_layers"),
            hidden=count(vision, "vt_hidden_size"),
            width=count(vision, "vt_intermediate_size"),
            patch=count(vision, "patch_size"),
            positions=count(vision, "init_pos_emb_height") * count(vision, "init_pos_emb_width"),
            merge=merge[0] * merge[1],
            rated_layers=count(vision, "vt_num_hidden_layers"),
        )
    except ModelUnreadable as error:
        bounds.append(f"The vision tower is not counted: vision_config: {error}.")
        return None


def _file_bytes(path: Path) -> bytes:
    try:
        data = read_at_most(path, MOST_BYTES)
    except OSError as error:
        raise ModelUnreadable(
            f"cannot be read: {error.strerror}", "Change its owner or mode, or name another file."
        ) from error
    if data is None:
        raise ModelUnreadable("is larger than 16 MiB")
    if not data:
        raise ModelUnreadable("is empty")
    return data


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        # as engines read it, not strictly: published configs do hold Infinity and 10**30
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelUnreadable(f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnreadable("is not a JSON object")
    return value

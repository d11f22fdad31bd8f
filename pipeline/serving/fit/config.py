"""A config.json as an architecture: by the parts it names, not by the model's name.

It counts a part that it does not understand on the side that needs more, with the reason; it
refuses a number that is missing or impossible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from pipeline.core.errors import ModelUnreadable
from pipeline.core.files import read_at_most
from pipeline.core.yaml_file import mistakes
from pipeline.serving.fit.fields import count_field, describe_value, few, flag_field, table_field
from pipeline.serving.fit.layers import layer_count, read_feed_forward, read_mixers
from pipeline.serving.fit.shape import Architecture, Precision, Scheme, Vision

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
_FLOATS = {"bfloat16": 16, "float16": 16, "float32": 32}
# Modules of each kind, as checkpoints name them: whether they are quantised is asked by name,
# because the lists of exceptions are patterns. Hybrid models have attention in every fourth layer
# or so, and their lists may name just these.
_MODULES = {
    "attention": [f"model.layers.{i}.self_attn.o_proj" for i in range(1, 9)],
    "linear": [f"model.layers.{i}.linear_attn.out_proj" for i in range(1, 9)],
    "experts": ["model.layers.1.mlp.experts.0.down_proj"],
    "shared": [f"model.layers.1.mlp.{x}.down_proj" for x in ("shared_experts", "shared_expert")],
    "dense": ["model.layers.0.mlp.down_proj"],
    "head": ["lm_head"],
}
_MXFP4 = Scheme(name="mxfp4", bits=4, group=32, group_bytes=1)
_FP8 = Scheme(name="fp8", bits=8)


def read_model_config(path: Path) -> Architecture:
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
            outer, inner = describe_value(config[key]), describe_value(text[key])
            raise ModelUnreadable(f"{key}: is {outer} at the top and {inner} in text_config")
    tying = next((t for t in (text, config) if t.get("tie_word_embeddings") is not None), None)
    # a class's default is often missing from the file
    kind = str(text.get("model_type") or config.get("model_type") or "")
    tied = (
        flag_field(tying, "tie_word_embeddings") if tying else kind.startswith(("gemma", "cohere"))
    )
    # Gemma 3n and 4: every layer has a table of its own, with a row for each token
    rows = few(text, "vocab_size_per_layer_input", "vocab_size")
    try:
        dense_layers, moe = read_feed_forward(text, bounds)
        return Architecture(
            family=str(families[0]),
            layers=layer_count(text),
            hidden=count_field(text, "hidden_size"),
            vocabulary=count_field(text, "vocab_size"),
            context=count_field(text, "max_position_embeddings", "model_max_length"),
            mixers=read_mixers(text, bounds),
            dense_layers=dense_layers,
            dense_width=count_field(text, *_DENSE_WIDTH) if dense_layers else 0,
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
        raise ModelUnreadable(mistakes(error)) from error


def _vision(config: Mapping[str, Any], bounds: list[str]) -> Vision | None:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    try:
        if "vt_hidden_size" not in vision:  # Qwen and others
            return Vision(
                layers=count_field(vision, "depth", "num_hidden_layers"),
                hidden=count_field(vision, "hidden_size"),
                width=count_field(vision, "intermediate_size"),
                patch=count_field(vision, "patch_size"),
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
            layers=count_field(vision, "vt_num_hidden_layers"),
            hidden=count_field(vision, "vt_hidden_size"),
            width=count_field(vision, "vt_intermediate_size"),
            patch=count_field(vision, "patch_size"),
            positions=count_field(vision, "init_pos_emb_height")
            * count_field(vision, "init_pos_emb_width"),
            merge=merge[0] * merge[1],
            rated_layers=count_field(vision, "vt_num_hidden_layers"),
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


class _UnknownMethod(Exception):
    """A method that this module does not know; the unquantised size is still a bound."""


def read_precision(
    config: Mapping[str, Any], text: Mapping[str, Any], bounds: list[str]
) -> Precision:
    """The storage of each kind of weight, from the outer config or the text model's own."""
    named = (text.get("dtype"), text.get("torch_dtype"), config.get("dtype"))
    dtype = str(next(filter(None, [*named, config.get("torch_dtype")]), ""))
    dtype = dtype.removeprefix("torch.")
    if dtype not in _FLOATS:
        raise ModelUnreadable(
            f"dtype: {describe_value(dtype or 'missing')} is not one of {', '.join(_FLOATS)}"
        )
    base = Scheme(name=dtype, bits=_FLOATS[dtype])
    schemes = dict.fromkeys(("base", *_MODULES), base)
    given = [c["quantization_config"] for c in (config, text) if c.get("quantization_config")]
    if len(given) == 2 and given[0] != given[1]:
        raise ModelUnreadable("quantization_config: the model and its text_config disagree")
    if not given:
        return Precision.model_validate(schemes)
    quant = given[0]
    if not isinstance(quant, Mapping):
        raise ModelUnreadable("quantization_config: is not a JSON object")
    method = str(quant.get("quant_method", quant.get("quant_algo", ""))).lower()
    try:
        if method not in _READERS:
            raise _UnknownMethod(f"the method {describe_value(method)} is not known")
        scheme = _READERS[method](quant)
    except _UnknownMethod as error:
        bounds.append(
            f"quantization_config: {error}; weights are counted as {base.name}, the most they need."
        )
        return Precision.model_validate(schemes)
    listed = (quant.get(k) for k in ("ignore", "exclude_modules", "modules_to_not_convert"))
    names: Any = next(filter(None, listed), [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ModelUnreadable("quantization_config: unquantised modules: not a list of names")
    matches = [_matcher(name) for name in names]
    for kind, modules in _MODULES.items():
        # exporters differ in whether the outer model's prefix is part of the name
        bare = [(module, module.replace("model.", "", 1)) for module in modules]
        spelled = [(m, f"language_model.{m}", f"model.language_model.{b}", b) for m, b in bare]
        if not any(match(name) for match in matches for each in spelled for name in each):
            schemes[kind] = scheme
    # only compressed-tensors and modelopt quantise the head, where they do not ignore it
    if method in ("fp8", "awq", "gptq", "mxfp4"):
        schemes["head"] = base
    # DeepSeek V4: blocks of fp8, but for the experts (vLLM: models/deepseek_v4/quant_config.py)
    if "fp4" in (text.get("expert_dtype"), quant.get("expert_dtype")):
        schemes["experts"] = _MXFP4
    cache = quant.get("kv_cache_scheme")
    kv_fp8 = isinstance(cache, Mapping) and cache.get("num_bits") == 8
    kv_fp8 = kv_fp8 or str(quant.get("kv_cache_quant_algo", "")).upper() == "FP8"
    return Precision.model_validate({**schemes, "kv_fp8": kv_fp8})


def _matcher(name: str) -> Callable[[str], object]:
    """Whether an entry of a list of exceptions means a module."""
    if name.startswith("re:"):
        try:
            return re.compile(name[3:]).match
        except re.error as error:
            message = f"quantization_config: ignore: {describe_value(name)}: {error}"
            raise ModelUnreadable(message) from error
    if any(c in name for c in "*?["):
        return lambda module: fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*")
    return lambda module: module == name or module.startswith(f"{name}.") or f".{name}." in module


Reader: TypeAlias = Callable[[Mapping[str, Any]], Scheme]
_READERS: dict[str, Reader] = {"mxfp4": lambda _: _MXFP4}


def _reads(*methods: str) -> Callable[[Reader], Reader]:
    def add(reader: Reader) -> Reader:
        _READERS.update(dict.fromkeys(methods, reader))
        return reader

    return add


@_reads("compressed-tensors")
def _compressed_tensors(quant: Mapping[str, Any]) -> Scheme:
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelUnreadable("quantization_config: config_groups: is missing")
    # with several, patterns choose each module's group, and we would have to imitate them
    if len(groups) != 1:
        raise _UnknownMethod(f"config_groups has {len(groups)} groups")
    weights = table_field(table_field(groups, next(iter(groups))), "weights")
    bits, group, kind = weights.get("num_bits"), weights.get("group_size"), weights.get("type")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if kind == "float" and bits == 8:
        return _fp8({"weight_block_size": block or None})
    if kind == "float" and bits == 4 and group == 16:
        return Scheme(name="nvfp4", bits=4, group=16, group_bytes=1)
    if kind == "float" and bits == 4 and group == 32:
        return _MXFP4
    if kind != "int" or bits not in (4, 8) or strategy not in ("channel", "tensor", "group"):
        raise _UnknownMethod(
            f"weights of {describe_value(kind)} {describe_value(bits)} are not known"
        )
    if strategy != "group":
        return Scheme(name=f"int{bits}", bits=bits)
    # each group has a 16-bit scale, and unless it is symmetric a zero point as wide as a weight
    zero = 0.0 if weights.get("symmetric") else bits / 8
    return Scheme(name=f"int{bits}", bits=bits, group=_group(group), group_bytes=2 + zero)


@_reads("modelopt", "modelopt_fp4", "nvfp4")
def _modelopt(quant: Mapping[str, Any]) -> Scheme:
    algorithm = str(quant.get("quant_algo", "")).upper()
    if algorithm == "NVFP4":
        group = quant.get("group_size", 16)
        return Scheme(name="nvfp4", bits=4, group=_group(group), group_bytes=1)
    if algorithm == "FP8":
        return _FP8
    raise _UnknownMethod(f"quant_algo {describe_value(algorithm)} is not known")


@_reads("fp8")
def _fp8(quant: Mapping[str, Any]) -> Scheme:
    block = quant.get("weight_block_size")
    # a scale for each tensor or row: too little to count
    if block is None:
        return _FP8
    if not isinstance(block, list) or len(block) != 2:
        raise ModelUnreadable("quantization_config: weight_block_size: is not a pair")
    rows, columns = _group(block[0]), _group(block[1])
    side = rows if rows == columns else 0
    return Scheme(name="fp8", bits=8, group=rows * columns, group_bytes=4, block=side)


# GPTQ packs the same numbers as AWQ, in another order
@_reads("awq", "gptq")
def _awq(quant: Mapping[str, Any]) -> Scheme:
    bits = quant.get("bits", quant.get("w_bit"))
    if bits not in (4, 8):
        raise _UnknownMethod(f"{bits} bits are not known")
    # AutoAWQ's default is a zero point for each group
    zero = bits / 8 if quant.get("zero_point", True) else 0.0
    group = _group(quant.get("group_size", quant.get("q_group_size")))
    return Scheme(name=f"awq{bits}", bits=bits, group=group, group_bytes=2 + zero)


def _group(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 14:
        raise ModelUnreadable(f"quantization_config: {describe_value(value)} is not a group size")
    return value

"""A checkpoint's quantization_config: which modules are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pipeline.core.errors import ModelUnreadable
from pipeline.serving.fit.fields import describe, table
from pipeline.serving.fit.shape import Precision, Scheme

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
            f"dtype: {describe(dtype or 'missing')} is not one of {', '.join(_FLOATS)}"
        )
    base = Scheme(name=dtype, bits=_FLOATS[dtype])
    unquantised = Precision.model_validate(dict.fromkeys(("base", *_MODULES), base))
    given = [c["quantization_config"] for c in (config, text) if c.get("quantization_config")]
    if len(given) == 2 and given[0] != given[1]:
        raise ModelUnreadable("quantization_config: the model and its text_config disagree")
    if not given:
        return unquantised
    try:
        precision = _quantised(given[0], base)
    except _UnknownMethod as error:
        bounds.append(
            f"quantization_config: {error}; weights are counted as {base.name}, the most they need."
        )
        return unquantised
    # DeepSeek V4: blocks of fp8, but for the experts (vLLM: models/deepseek_v4/quant_config.py)
    if "fp4" in (text.get("expert_dtype"), given[0].get("expert_dtype")):
        return precision.model_copy(update={"experts": _MXFP4})
    return precision


def _quantised(quant: Any, base: Scheme) -> Precision:
    if not isinstance(quant, Mapping):
        raise ModelUnreadable("quantization_config: is not a JSON object")
    method = str(quant.get("quant_method", quant.get("quant_algo", ""))).lower()
    if method not in _READERS:
        raise _UnknownMethod(f"the method {describe(method)} is not known")
    scheme = _READERS[method](quant)
    names = quant.get("ignore") or quant.get("exclude_modules") or []
    names = names or quant.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ModelUnreadable("quantization_config: unquantised modules: not a list of names")
    matches = [_matcher(name) for name in names]

    def is_ignored(module: str) -> bool:
        # exporters differ in whether the outer model's prefix is part of the name
        bare = module.replace("model.", "", 1)
        spelled = (module, f"language_model.{module}", f"model.language_model.{bare}", bare)
        return any(match(s) for match in matches for s in spelled)

    schemes = {kind: base if any(map(is_ignored, m)) else scheme for kind, m in _MODULES.items()}
    # only compressed-tensors and modelopt quantise the head, where they do not ignore it
    if method in ("fp8", "awq", "gptq", "mxfp4"):
        schemes["head"] = base
    cache = quant.get("kv_cache_scheme")
    kv_fp8 = isinstance(cache, Mapping) and cache.get("num_bits") == 8
    kv_fp8 = kv_fp8 or str(quant.get("kv_cache_quant_algo", "")).upper() == "FP8"
    return Precision(base=base, **schemes, kv_fp8=kv_fp8)


def _matcher(name: str) -> Callable[[str], object]:
    """Whether a module is meant by an entry of a list of exceptions."""
    if name.startswith("re:"):
        try:
            return re.compile(name[3:]).match
        except re.error as error:
            message = f"quantization_config: ignore: {describe(name)}: {error}"
            raise ModelUnreadable(message) from error
    if any(c in name for c in "*?["):
        return lambda module: fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*")
    return lambda module: module == name or module.startswith(f"{name}.") or f".{name}." in module


def _compressed_tensors(quant: Mapping[str, Any]) -> Scheme:
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelUnreadable("quantization_config: config_groups: is missing")
    # with several, each module's group is found by patterns that we would have to imitate
    if len(groups) != 1:
        raise _UnknownMethod(f"config_groups has {len(groups)} groups")
    weights = table(table(groups, next(iter(groups))), "weights")
    bits, group, kind = weights.get("num_bits"), weights.get("group_size"), weights.get("type")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if kind == "float" and bits == 8:
        return _fp8({"weight_block_size": block or None})
    if kind == "float" and bits == 4 and group == 16:
        return Scheme(name="nvfp4", bits=4, group=16, group_bytes=1)
    if kind == "float" and bits == 4 and group == 32:
        return _MXFP4
    if kind != "int" or bits not in (4, 8) or strategy not in ("channel", "tensor", "group"):
        raise _UnknownMethod(f"weights of {describe(kind)} {describe(bits)} are not known")
    if strategy != "group":
        return Scheme(name=f"int{bits}", bits=bits)
    # each group has a 16-bit scale, and unless it is symmetric a zero point as wide as a weight
    zero = 0.0 if weights.get("symmetric") else bits / 8
    return Scheme(name=f"int{bits}", bits=bits, group=_group(group), group_bytes=2 + zero)


def _modelopt(quant: Mapping[str, Any]) -> Scheme:
    algorithm = str(quant.get("quant_algo", "")).upper()
    if algorithm == "NVFP4":
        group = quant.get("group_size", 16)
        return Scheme(name="nvfp4", bits=4, group=_group(group), group_bytes=1)
    if algorithm == "FP8":
        return _FP8
    raise _UnknownMethod(f"quant_algo {describe(algorithm)} is not known")


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
        raise ModelUnreadable(f"quantization_config: {describe(value)} is not a group size")
    return value


_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "nvfp4"), _modelopt),
    "fp8": _fp8,
    # GPTQ packs the same numbers as AWQ, in another order
    **dict.fromkeys(("awq", "gptq"), _awq),
    "mxfp4": lambda _: _MXFP4,
}

"""A checkpoint's quantization_config: which modules are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pipeline.errors import ModelUnreadable
from pipeline.fit.fields import table, told
from pipeline.fit.shape import Precision, Scheme

_FLOATS = {"bfloat16": 16, "float16": 16, "float32": 32}
# Modules of each kind, as checkpoints name them: whether they are quantised is asked by name, for
# the lists of exceptions are patterns. Hybrid models have attention in every fourth layer or so,
# and their lists may name just these.
_LAYERS = range(1, 9)
_ATTENTION = [f"model.layers.{i}.self_attn.o_proj" for i in _LAYERS]
_LINEAR = [f"model.layers.{i}.linear_attn.out_proj" for i in _LAYERS]
_EXPERT = ["model.layers.1.mlp.experts.0.down_proj"]
_SHARED = [f"model.layers.1.mlp.{name}.down_proj" for name in ("shared_experts", "shared_expert")]
_DENSE = ["model.layers.0.mlp.down_proj"]
_HEAD = ["lm_head"]
_MXFP4 = Scheme(name="mxfp4", bits=4, group=32, group_bytes=1)


def read_precision(
    config: Mapping[str, Any], text: Mapping[str, Any], bounds: list[str]
) -> Precision:
    """The storage of each kind of weight, from the outer config or the text model's own."""
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "")
    dtype = dtype or str(config.get("torch_dtype") or "")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _FLOATS:
        raise ModelUnreadable(
            f"dtype: {told(dtype or 'missing')} is not one of {', '.join(_FLOATS)}"
        )
    base = Scheme(name=dtype, bits=_FLOATS[dtype])
    given = [c["quantization_config"] for c in (config, text) if c.get("quantization_config")]
    if len(given) == 2 and given[0] != given[1]:
        raise ModelUnreadable("quantization_config: the model and its text_config disagree")
    if not given:
        return Precision.model_validate(dict.fromkeys(_KINDS, base))
    try:
        precision = _quantised(given[0], base)
    except _Unknown as error:
        bounds.append(
            f"quantization_config: {error}; weights are counted as {base.name}, the most they need."
        )
        return Precision.model_validate(dict.fromkeys(_KINDS, base))
    # DeepSeek V4: blocks of fp8, but for the experts (vLLM: models/deepseek_v4/quant_config.py)
    if "fp4" in (text.get("expert_dtype"), given[0].get("expert_dtype")):
        return precision.model_copy(update={"experts": _MXFP4})
    return precision


class _Unknown(Exception):
    """A method that nobody here knows; a bound can still be told."""


_KINDS = ("base", "attention", "linear", "experts", "shared", "dense", "head")


def _quantised(quant: Any, base: Scheme) -> Precision:
    if not isinstance(quant, Mapping):
        raise ModelUnreadable("quantization_config: is not a JSON object")
    method = str(quant.get("quant_method", quant.get("quant_algo", ""))).lower()
    reader = _READERS.get(method)
    if reader is None:
        raise _Unknown(f"the method {told(method)} is not known")
    scheme = reader(quant)
    ignored = _ignored(quant)

    def of(modules: list[str]) -> Scheme:
        return base if any(map(ignored, modules)) else scheme

    # only compressed-tensors and modelopt quantise the head, where they do not ignore it
    keep_head = method in ("fp8", "awq", "gptq", "mxfp4")
    return Precision(
        base=base,
        attention=of(_ATTENTION),
        linear=of(_LINEAR),
        experts=of(_EXPERT),
        shared=of(_SHARED),
        dense=of(_DENSE),
        head=base if keep_head else of(_HEAD),
        kv_fp8=_wants_fp8_cache(quant),
    )


def _ignored(quant: Mapping[str, Any]) -> Callable[[str], bool]:
    names = quant.get("ignore") or quant.get("exclude_modules") or []
    names = names or quant.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ModelUnreadable("quantization_config: unquantised modules: not a list of names")
    tests = [_test(name) for name in names]

    def is_ignored(module: str) -> bool:
        # exporters differ in whether the outer model's prefix is part of the name
        bare = module.replace("model.", "", 1)
        spelled = (module, f"language_model.{module}", f"model.language_model.{bare}", bare)
        return any(test(s) for test in tests for s in spelled)

    return is_ignored


def _test(name: str) -> Callable[[str], bool]:
    if name.startswith("re:"):
        try:
            return re.compile(name[3:]).match  # type: ignore[return-value]
        except re.error as error:
            raise ModelUnreadable(f"quantization_config: ignore: {told(name)}: {error}") from error
    if any(c in name for c in "*?["):
        return lambda module: fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*")
    return lambda module: module == name or module.startswith(f"{name}.") or f".{name}." in module


def _compressed_tensors(quant: Mapping[str, Any]) -> Scheme:
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelUnreadable("quantization_config: config_groups: is missing")
    # with several, each module's group is found by patterns that we would have to imitate
    if len(groups) != 1:
        raise _Unknown(f"config_groups has {len(groups)} groups")
    weights = table(table(groups, next(iter(groups))), "weights")
    bits, group, kind = weights.get("num_bits"), weights.get("group_size"), weights.get("type")
    block = weights.get("block_structure")
    if kind == "float" and bits == 8 and block:
        return _fp8({"weight_block_size": block})
    if kind == "float" and bits == 4 and group == 16:
        return Scheme(name="nvfp4", bits=4, group=16, group_bytes=1)
    if kind == "float" and bits == 4 and group == 32:
        return _MXFP4
    if kind == "float" and bits == 8:
        return Scheme(name="fp8", bits=8)
    if kind == "int" and bits in (4, 8) and weights.get("strategy") in ("channel", "tensor"):
        return Scheme(name=f"int{bits}", bits=bits)
    if kind != "int" or bits not in (4, 8) or weights.get("strategy") != "group":
        raise _Unknown(f"weights of {told(kind)} {told(bits)} are not known")
    # each group has a 16-bit scale, and unless it is symmetric a zero point as wide as a weight
    zero = 0.0 if weights.get("symmetric") else bits / 8
    return Scheme(name=f"int{bits}", bits=bits, group=_group(group), group_bytes=2 + zero)


def _modelopt(quant: Mapping[str, Any]) -> Scheme:
    algorithm = str(quant.get("quant_algo", "")).upper()
    if algorithm == "NVFP4":
        group = quant.get("group_size", 16)
        return Scheme(name="nvfp4", bits=4, group=_group(group), group_bytes=1)
    if algorithm == "FP8":
        return Scheme(name="fp8", bits=8)
    raise _Unknown(f"quant_algo {told(algorithm)} is not known")


def _fp8(quant: Mapping[str, Any]) -> Scheme:
    block = quant.get("weight_block_size")
    # a scale for each tensor or row: too little to count
    if block is None:
        return Scheme(name="fp8", bits=8)
    if not isinstance(block, list) or len(block) != 2:
        raise ModelUnreadable("quantization_config: weight_block_size: is not a pair")
    rows, columns = _group(block[0]), _group(block[1])
    side = rows if rows == columns else 0
    return Scheme(name="fp8", bits=8, group=rows * columns, group_bytes=4, block=side)


def _awq(quant: Mapping[str, Any]) -> Scheme:
    bits = quant.get("bits", quant.get("w_bit"))
    if bits not in (4, 8):
        raise _Unknown(f"{bits} bits are not known")
    # AutoAWQ's default is a zero point for each group
    zero = bits / 8 if quant.get("zero_point", True) else 0.0
    group = _group(quant.get("group_size", quant.get("q_group_size")))
    return Scheme(name=f"awq{bits}", bits=bits, group=group, group_bytes=2 + zero)


def _group(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 14:
        raise ModelUnreadable(f"quantization_config: {told(value)} is not a group size")
    return value


def _wants_fp8_cache(quant: Mapping[str, Any]) -> bool:
    scheme = quant.get("kv_cache_scheme")
    asks = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8
    return asks or str(quant.get("kv_cache_quant_algo", "")).upper() == "FP8"


_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "nvfp4": _modelopt,
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _awq,  # packs the same numbers another way
    "mxfp4": lambda _: _MXFP4,
}

"""Whether a recipe reads a table for its experts' kernel, and the shape that the table is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.core.known import Known, unknown
from pipeline.core.model import Frozen
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.serving.fit.gguf import GgufModel
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.recipe.flags import SglangFlags, VllmFlags
from pipeline.serving.recipe.model import Recipe, merged_flags

KERNEL = "fused_moe_kernel"
# What an engine sets to find tables that are not its own (vLLM 0.32.0: fused_moe.py,
# get_moe_configs; SGLang 0.5.8 and 0.5.23: fused_moe_triton_config.py).
FOLDER_VARIABLES = {"vllm": "VLLM_TUNED_CONFIG_FOLDER", "sglang": "SGLANG_MOE_CONFIG_DIR"}
# Weights whose kernels are not Triton's fused_moe_kernel, and read no table of it.
_OTHER_KERNELS = {
    "nvfp4": "FlashInfer's, CUTLASS's or Marlin's",
    "mxfp4": "triton_kernels', FlashInfer's or Marlin's",
    "int": "Marlin's",
    "awq": "Marlin's",
}


class MoeShape(Frozen):
    """A layer of experts as one card sees it."""

    experts: int
    active: int  # of them, for each token
    width: int  # of an expert, on one card
    hidden: int
    dtype: str | None  # as the engines name it in a table's file name
    block: int = 0  # the side of a block with a scale of its own; 0: none


def find_shape(recipe: Recipe, model: Architecture | GgufModel) -> Known[MoeShape]:
    """The shape that a recipe's engine looks up in a table, or why it reads none."""
    flags = merged_flags(recipe)
    if not isinstance(flags, (VllmFlags, SglangFlags)):
        return unknown(f"{recipe.engine} has no such table")
    if not isinstance(model, Architecture) or model.moe is None:
        return unknown("its model has no experts")
    given = flags.given()
    backend = given.get("moe_backend") or given.get("moe_runner_backend") or "auto"
    if backend not in ("auto", "triton"):
        return unknown(f"the {backend} backend of its experts reads no table")
    scheme = model.precision.experts
    for kind, whose in _OTHER_KERNELS.items():
        if scheme.name.startswith(kind):
            return unknown(
                f"its experts are {scheme.name}: their kernels are {whose}, and read none"
            )
    if scheme.name == "fp8" and not scheme.block:
        return unknown("fp8 experts without blocks are not tuned yet")
    spread = {"enable_expert_parallel", "expert_parallel_size", "ep_size", "data_parallel_size"}
    if used := [name for name in sorted(spread) if given.get(name) not in (None, False, 1)]:
        return unknown(f"{flags.flag(used[0])}: experts spread over cards are not tuned yet")
    cards = given.get("tensor_parallel_size") or 1
    moe = model.moe
    if moe.width % cards:
        return unknown(f"experts of width {moe.width} are not divided by {cards} cards")
    return MoeShape(
        experts=moe.experts,
        active=moe.active,
        width=moe.width // cards,
        hidden=moe.hidden,
        dtype="fp8_w8a8" if scheme.name == "fp8" else None,
        block=scheme.block,
    )


def case_for(cases: Sequence[KernelCase], shape: MoeShape) -> dict[str, Any] | None:
    """The gate's case that calls the kernel with such weights, its look-up made for the shape."""
    block = [{"value": shape.block}] * 2 if shape.block else None
    for case in cases:
        config = case.arguments.get("config", {}).get("call")
        if case.kernels != [KERNEL] or not config:
            continue
        asked = config["arguments"]
        blocks = asked["block_shape"].get("items")
        if asked["dtype"].get("value") != shape.dtype or blocks != block:
            continue
        found = case.model_dump()
        look_up = found["arguments"]["config"]["call"]["arguments"]
        sizes = {
            "w1_shape": (shape.experts, 2 * shape.width, shape.hidden),
            "w2_shape": (shape.experts, shape.hidden, shape.width),
        }
        for name, numbers in sizes.items():
            look_up[name] = {"items": [{"value": number} for number in numbers]}
        look_up["top_k"] = {"value": shape.active}
        return found
    return None

"""Published architectures and GGUF recipes, shipped so that `fit` answers before a fetch."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pipeline.core.errors import ModelUnreadable
from pipeline.core.model import Frozen
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.fit.config import architecture_of
from pipeline.serving.fit.gguf import BY_NAME, GgufModel, GgufTensor
from pipeline.serving.fit.shape import Architecture, Mla

_FOLDER = Path(__file__).parent / "facts"


class GgufTypeRule(Frozen):
    """Tensors whose name matches are stored in this type; the first rule that matches counts."""

    names: str
    type: str


class GgufRecipe(Frozen):
    """How a GGUF of this architecture was quantised."""

    repository: str
    quant: str
    types: list[GgufTypeRule] = Field(min_length=1)
    source: Annotated[str, StringConstraints(min_length=20)]


class ModelFact(Frozen):
    """An excerpt of a config.json, whose it is, and where it was read."""

    repositories: list[str] = Field(min_length=1)
    source: Annotated[str, StringConstraints(min_length=20)]
    config: dict[str, Any]
    gguf: list[GgufRecipe] = []

    def architecture(self) -> Architecture:
        return architecture_of(self.config)


def all_facts() -> list[ModelFact]:
    """All shipped facts."""
    return [read_yaml(path, ModelFact) for path in sorted(_FOLDER.glob("*.yaml"))]


def shipped_repositories() -> list[str]:
    """The repositories that `fit` knows without the Hub."""
    return sorted((name for f in all_facts() for name in f.repositories), key=str.casefold)


def fact_of(repository: str) -> ModelFact | None:
    """The architecture of a repository in a checkpoint's own format."""
    return next((f for f in all_facts() if repository in f.repositories), None)


def recipe_of(repository: str, quant: str) -> tuple[ModelFact, GgufRecipe] | None:
    """The architecture and the types of a repository of GGUF files."""
    pairs = ((f, r) for f in all_facts() for r in f.gguf)
    return next(((f, r) for f, r in pairs if (r.repository, r.quant) == (repository, quant)), None)


def from_recipe(model: Architecture, recipe: GgufRecipe) -> GgufModel:
    """The tensors that a published recipe gives for a DeepSeek-like model."""
    # the names and shapes below are those of DeepSeek's architecture, which Kimi shares
    if not isinstance(model.attention, Mla) or model.moe is None:
        raise ModelUnreadable(f"{recipe.repository}: recipes need an MLA model with experts")
    tensors = [
        GgufTensor(name, shape, BY_NAME[kind], BY_NAME[kind].size(math.prod(shape)))
        for name, shape in _deepseek2(model, model.attention)
        if (kind := next(r.type for r in recipe.types if re.search(r.names, name)))
    ]
    return GgufModel(
        tensors=tensors,
        layers=model.layers,
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        context=model.context,
        kv_values=[model.attention.kv_rank + model.attention.rope] * model.layers,
        is_mla=True,
        experts=model.moe.experts,
        active=model.moe.active,
        expert_width=model.moe.width,
        heads=model.attention.heads,
        head_values=model.attention.nope + model.attention.rope + model.attention.value,
    )


def _deepseek2(model: Architecture, mla: Mla) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as the converter of llama.cpp and ik_llama.cpp writes them."""
    h, moe = model.hidden, model.moe
    listed: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (h, model.vocabulary)),
        ("output_norm.weight", (h,)),
        ("output.weight", (h, model.vocabulary)),
    ]
    for i in range(model.layers):
        blk = f"blk.{i}."
        listed += [
            (f"{blk}attn_norm.weight", (h,)),
            (f"{blk}attn_q_a.weight", (h, mla.q_rank)),
            (f"{blk}attn_q_a_norm.weight", (mla.q_rank,)),
            (f"{blk}attn_q_b.weight", (mla.q_rank, mla.heads * (mla.nope + mla.rope))),
            (f"{blk}attn_kv_a_mqa.weight", (h, mla.kv_rank + mla.rope)),
            (f"{blk}attn_kv_a_norm.weight", (mla.kv_rank,)),
            # kv_b in two: engines absorb one half into the queries, the other into the output
            (f"{blk}attn_k_b.weight", (mla.nope, mla.kv_rank, mla.heads)),
            (f"{blk}attn_v_b.weight", (mla.kv_rank, mla.value, mla.heads)),
            (f"{blk}attn_output.weight", (mla.heads * mla.value, h)),
            (f"{blk}ffn_norm.weight", (h,)),
        ]
        if moe is None or i < model.dense_layers:
            listed += [
                (f"{blk}ffn_gate.weight", (h, model.dense_width)),
                (f"{blk}ffn_up.weight", (h, model.dense_width)),
                (f"{blk}ffn_down.weight", (model.dense_width, h)),
            ]
            continue
        listed += [
            (f"{blk}ffn_gate_inp.weight", (h, moe.experts)),
            (f"{blk}exp_probs_b.bias", (moe.experts,)),
            (f"{blk}ffn_gate_exps.weight", (h, moe.width, moe.experts)),
            (f"{blk}ffn_up_exps.weight", (h, moe.width, moe.experts)),
            (f"{blk}ffn_down_exps.weight", (moe.width, h, moe.experts)),
            (f"{blk}ffn_gate_shexp.weight", (h, moe.shared_width)),
            (f"{blk}ffn_up_shexp.weight", (h, moe.shared_width)),
            (f"{blk}ffn_down_shexp.weight", (moe.shared_width, h)),
        ]
    return listed

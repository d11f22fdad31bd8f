"""Whether a recipe's model, with its flags and its context, fits the cards of a machine."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipeline.core.errors import DoesNotFit, PipelineError
from pipeline.core.known import Known, Unknown, unknown
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit import placement
from pipeline.serving.fit.answer import answer
from pipeline.serving.fit.engine import FitQuestion, Kv
from pipeline.serving.fit.gguf import GgufModel
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.source import find_source
from pipeline.serving.recipe.flags import Flags, LlamaFlags, SglangFlags, VllmFlags
from pipeline.serving.recipe.launch import Overrides, launch_flags, speculates
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.weights import WeightsFolder

Model: TypeAlias = Architecture | GgufModel
# Flags that put a part of the model or of its memory where no calculation follows it.
_ELSEWHERE = (
    *("data_parallel_size", "pipeline_parallel_size", "cpu_offload_gb", "engram_config"),
    *("ple_offload_embedding", "hf_overrides"),
)
_KV: dict[str, Kv] = {"bfloat16": "bf16", "bf16": "bf16", "f16": "bf16", "q8_0": "fp8"}


@dataclass(frozen=True)
class FitPlan:
    """What must fit: the model, and all that decides how much room it takes."""

    model: Known[Model]
    flags: Flags
    speculates: bool = False


def plan_fit(recipe: Recipe, overrides: Overrides, model: Known[Model]) -> FitPlan:
    """The question that a start asks."""
    return FitPlan(
        model, launch_flags(recipe, overrides), speculates(recipe, overrides) is not None
    )


def model_in(recipe: Recipe, weights: WeightsFolder | None, checkout: Checkout) -> Known[Model]:
    """The shape of a recipe's model, from its weights if they can be read."""
    if weights is None or (weights.proof is not None and weights.config is None):
        return find_served_model(recipe, None, checkout)
    if weights.config is None:
        return find_served_model(recipe, weights.folder / weights.file, checkout)
    # another host sent its config.json
    with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
        path = Path(folder, "config.json")
        path.write_text(weights.config, encoding="utf-8")
        return find_served_model(recipe, path, checkout)


def find_served_model(recipe: Recipe, place: Path | None, checkout: Checkout) -> Known[Model]:
    """The model's shape: from its files, else from the facts that we ship."""
    reason = unknown("nothing is known about the model's shape")
    for name in (place, recipe.model.weights):
        if name:
            try:
                return find_source(str(name), lambda: checkout).model
            except PipelineError as error:
                reason = unknown(f"the model's shape cannot be read: {error}")
    return reason


def shortfall(plan: FitPlan, room: placement.FitMachine) -> Known[str]:
    """What is short; empty if it fits, and a reason if nobody can calculate that."""
    model, flags, given = plan.model, plan.flags, plan.flags.given()
    if isinstance(model, Unknown):
        return model
    if elsewhere := [name for name in _ELSEWHERE if given.get(name) not in (None, False, 1)]:
        return unknown(f"{flags.flag(elsewhere[0])} is not part of the calculation")
    if isinstance(model, GgufModel) != isinstance(flags, LlamaFlags):
        a_or_no = "a" if isinstance(model, GgufModel) else "no"
        return unknown(f"the model is {a_or_no} GGUF file")
    try:
        if isinstance(model, Architecture):
            short = _short(model, flags, room)
        else:
            assert isinstance(flags, LlamaFlags)
            kinds = {_KV.get(word or "f16") for word in (flags.cache_type_k, flags.cache_type_v)}
            kv = kinds.pop()
            if kinds or kv is None:
                return unknown("the types of this KV cache are not part of the calculation")
            if (flags.gpu_layers or 0) < model.layers:
                most = f"all {model.layers} layers on the cards"
                return unknown(f"only layouts with {most} are calculated")
            context = flags.ctx_size or model.context
            if context > model.context:
                return f"{context} tokens: the model knows only {model.context} positions"
            # llama.cpp's own defaults: github.com/ggml-org/llama.cpp
            mla = 3 if flags.mla is None else flags.mla
            sizes = flags.ubatch_size or 512, flags.batch_size or 2048
            batch = placement.Batch(context, kv, *sizes, mla)
            placed = flags.override_tensor
            rules = placement.read_placement_overrides(placed, room.devices) if placed else []
            if flags.cpu_moe:
                rules.append(placement.TensorRule("exps", placement.CPU))
            short = placement.shortage(placement.checked_layout(model, room, batch, rules), room)
    except DoesNotFit as error:
        return str(error)
    except (PipelineError, ValueError) as error:
        return unknown(f"it cannot be calculated: {error}")
    # a model that does not fit alone does not fit with a draft either
    if not short and plan.speculates:
        return unknown("it fits without speculation; what a draft needs is not calculated")
    return short


def _short(model: Architecture, flags: Flags, room: placement.FitMachine) -> Known[str]:
    question = question_of(flags, model, room)
    if isinstance(question, Unknown):
        return question
    found = answer(model, question)
    if isinstance(flags, SglangFlags) and flags.context_length is None and found.room.kv_tokens:
        # SGLang then serves as many tokens as there is room for; vLLM would not start
        fewer = min(model.context, found.room.kv_tokens)
        used = found.room.weights_bytes + found.room.kernels_bytes
        as_it_comes = {"context": fewer, "measured_bytes": used}
        return answer(model, question.model_copy(update=as_it_comes)).short
    return found.short


def question_of(
    flags: Flags, model: Architecture, room: placement.FitMachine
) -> Known[FitQuestion]:
    """What the flags of vLLM or SGLang ask for."""
    word = getattr(flags, "kv_cache_dtype", None) or "auto"
    kv = "fp8" if word.startswith("fp8") else _KV.get(word)
    if kv is None and word != "auto":
        return unknown(f"a KV cache of {word} is not part of the calculation")
    values: dict[str, object] = {"kv": kv, "card_bytes": room.card_bytes}
    if isinstance(flags, VllmFlags):
        values |= {
            "engine": "vllm",
            "tp": flags.tensor_parallel_size or 1,
            "dcp": flags.decode_context_parallel_size,
            "context": flags.max_model_len,
            "fraction": flags.gpu_memory_utilization,
            "prefill_given": flags.max_num_batched_tokens,
            "sequences_given": flags.max_num_seqs,
        }
    elif isinstance(flags, SglangFlags):
        values |= {
            "engine": "sglang",
            "tp": flags.tensor_parallel_size or 1,
            "context": flags.context_length,
            "fraction": flags.mem_fraction_static,
            "prefill_given": flags.chunked_prefill_size,
            "graph_batch_given": flags.cuda_graph_max_bs_decode or flags.cuda_graph_max_bs,
        }
    # what is not named has the engine's default, and a context that of the model
    named = {name: value for name, value in values.items() if value is not None}
    question = FitQuestion.model_validate({"context": model.context, **named})
    if question.tp > room.cards:
        raise DoesNotFit(f"the model is divided among {question.tp} cards, there are {room.cards}")
    return question

"""What would make a model fit. Names an option only after the same sum was made with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pipeline.core.errors import DoesNotFit
from pipeline.serving.fit.answer import FitAnswer, answer, needed_fraction
from pipeline.serving.fit.engine import Question
from pipeline.serving.fit.gguf_model import GgufModel
from pipeline.serving.fit.placement import Batch, Layout, Machine, place, shortage
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.units import GIB

_MOST_CARDS = 64  # eight servers with eight cards each
_MOST_LLAMA_CARDS = 16  # GGML_CUDA_MAX_DEVICES of github.com/ggml-org/llama.cpp
_LEAST_CONTEXT = 1024  # a server with less room is of no use
_SMALL_STEPS = (4096, 2048, 1024)  # of prefill, below the defaults of large cards
_FEWER_BITS = "A checkpoint with fewer bits per weight"


def parallel_hint(model: Architecture, question: Question, result: FitAnswer, cards: int) -> str:
    """What to change where sglang or vLLM has too little room."""
    options = _sentence(list(_parallel_options(model, question, result, cards)))
    if result.room.kv_bytes > 0:
        return f"{options} {_FEWER_BITS} needs less."
    hybrid = "; ik_llama runs GGUF files with experts in the host's memory" if model.moe else ""
    return f"Fewer tokens do not help. {options} {_FEWER_BITS} needs less{hybrid}."


def _parallel_options(
    model: Architecture, question: Question, result: FitAnswer, cards: int
) -> Iterator[str]:
    def fits(**changes: object) -> bool:
        try:
            return not answer(model, question.model_copy(update=changes)).short
        except DoesNotFit:  # the model cannot be divided like that
            return False

    room, is_sglang = result.room, question.engine == "sglang"
    fraction = needed_fraction(room, question)
    if not fraction:  # the share of sglang that leaves activations their room
        lacking = room.activation_bytes - room.left_bytes
        share = room.fraction - lacking / (room.card_bytes - room.taken_bytes)
        fraction = math.floor(1000 * share) / 1000
    if 0 < fraction < 1 and fits(fraction=fraction):
        yield f"{'--mem-fraction' if is_sglang else '--gpu-util'} {fraction:.3f}"
    if result.kv == "bf16" and fits(kv="fp8"):
        yield "--kv fp8"
    fewer = _halves(min(result.low_tokens, question.context - 1))
    if tokens := _first(fewer, lambda n: fits(context=n)):
        yield f"--ctx {tokens // 1024}k"
    smaller = (n for n in _SMALL_STEPS if n < question.prefill_tokens)
    if prefill := _first(smaller, lambda n: fits(prefill_given=n)):
        yield f"--prefill {prefill}"
    # measured weights are those of as many cards as they were measured with
    more = range(question.tp + 1, 1 if question.measured_bytes else _MOST_CARDS + 1)
    if tp := _first((n for n in more if n % question.dcp == 0), lambda n: fits(tp=n)):
        gpus = f"--gpus {tp}" if tp > cards else ""
        flags = [gpus, "" if gpus and question.tp == cards else f"--tp {tp}"]
        yield " ".join(filter(None, flags))


def hybrid_hint(model: GgufModel, machine: Machine, batch: Batch, layout: Layout) -> str:
    """What to change where ik_llama has too little room on cards or host."""

    def fits(on: Machine = machine, asked: Batch = batch) -> bool:
        return not shortage(place(model, on, asked), on)

    if fits():
        return "The -ot rules are at fault: the placement that is calculated without them fits."
    options: list[str] = []
    host = math.ceil(layout.host_bytes / GIB)
    if machine.host_bytes is not None and fits(replace(machine, host_bytes=host * GIB)):
        options.append(f"--ram {host}GiB")
    if batch.kv == "bf16" and fits(asked=replace(batch, kv="fp8")):
        options.append("--kv fp8")
    if batch.mla != 1 and fits(asked=replace(batch, mla=1)):
        options.append("--mla 1")
    fewer = _halves(batch.context // 2)
    if tokens := _first(fewer, lambda n: fits(asked=replace(batch, context=n))):
        options.append(f"--ctx {tokens // 1024}k")
    more = range(machine.cards + 1, _MOST_LLAMA_CARDS + 1)
    if cards := _first(more, lambda n: fits(replace(machine, cards=n))):
        options.append(f"--gpus {cards}")
    return f"{_sentence(options)} A smaller quant needs less."


def _sentence(options: list[str]) -> str:
    if not options:
        return "No single option makes it fit."
    return f"It fits with {' or '.join(filter(None, [', '.join(options[:-1]), options[-1]]))}."


def _first(values: Iterable[int], does: Callable[[int], bool]) -> int | None:
    return next((value for value in values if does(value)), None)


def _halves(tokens: int) -> Iterator[int]:
    """Round numbers of tokens, each about half of the one before."""
    while tokens >= _LEAST_CONTEXT:
        tokens -= tokens % _LEAST_CONTEXT
        yield tokens
        tokens //= 2

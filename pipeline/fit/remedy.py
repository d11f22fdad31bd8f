"""What would make a model fit. Each way is named only after the same sum was made with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pipeline.errors import DoesNotFit
from pipeline.fit.answer import FitAnswer, answer, needed_fraction
from pipeline.fit.engine import Question
from pipeline.fit.gguf_model import GgufModel
from pipeline.fit.loads import Batch, Machine
from pipeline.fit.placement import Layout, place, shortage
from pipeline.fit.shape import Architecture
from pipeline.fit.units import GIB

_MOST_CARDS = 64  # eight servers with eight cards each
_MOST_LLAMA_CARDS = 16  # GGML_CUDA_MAX_DEVICES of github.com/ggml-org/llama.cpp
_LEAST_CONTEXT = 1024  # a server with less room is of no use
_SMALL_STEPS = (4096, 2048, 1024)  # of prefill, below the defaults of large cards
_FEWER_BITS = "A checkpoint with fewer bits per weight"


def parallel_hint(model: Architecture, question: Question, result: FitAnswer, cards: int) -> str:
    """What to change where sglang or vLLM has too little room."""
    ways = _sentence(list(_parallel_ways(model, question, result, cards)))
    if result.room.kv_bytes > 0:
        return f"{ways} {_FEWER_BITS} needs less."
    hybrid = "; ik_llama runs GGUF files with experts in the host's memory" if model.moe else ""
    return f"Fewer tokens do not help. {ways} {_FEWER_BITS} needs less{hybrid}."


def _parallel_ways(
    model: Architecture, question: Question, result: FitAnswer, cards: int
) -> Iterator[str]:
    def fits(**changes: object) -> bool:
        return _fits(model, question.model_copy(update=changes))

    share = "--mem-fraction" if question.engine == "sglang" else "--gpu-util"
    fraction = needed_fraction(result.room, question) or _lower_fraction(result)
    if 0 < fraction < 1 and fits(fraction=fraction):
        yield f"{share} {fraction:.3f}"
    if result.kv == "bf16" and fits(kv="fp8"):
        yield "--kv fp8"
    fewer = _halves(min(result.low_tokens, question.context - 1))
    if tokens := _first(fewer, lambda n: fits(context=n)):
        yield f"--ctx {_tokens(tokens)}"
    smaller = (n for n in _SMALL_STEPS if n < question.prefill_tokens)
    if prefill := _first(smaller, lambda n: fits(prefill_given=n)):
        yield f"--prefill {prefill}"
    # measured weights are those of as many cards as they were measured with
    more = range(question.tp + 1, 1 if question.measured_bytes else _MOST_CARDS + 1)
    if tp := _first((n for n in more if n % question.dcp == 0), lambda n: fits(tp=n)):
        yield _cards_flag(tp, question.tp, cards)


def _fits(model: Architecture, question: Question) -> bool:
    try:
        return not answer(model, question).short
    except DoesNotFit:  # the model cannot be divided like that
        return False


def _lower_fraction(result: FitAnswer) -> float:
    """The share of sglang that leaves activations their room."""
    room = result.room
    lacking = room.activation_bytes - room.left_bytes
    whole = room.card_bytes - room.taken_bytes
    return math.floor(1000 * (room.fraction - lacking / whole)) / 1000


def _cards_flag(wanted: int, tp: int, cards: int) -> str:
    if wanted <= cards:
        return f"--tp {wanted}"
    return f"--gpus {wanted}" if tp == cards else f"--gpus {wanted} --tp {wanted}"


def hybrid_hint(model: GgufModel, machine: Machine, batch: Batch, layout: Layout) -> str:
    """What to change where ik_llama has too little room on cards or host."""

    def fits(there: Machine = machine, asked: Batch = batch) -> bool:
        return not shortage(place(model, there, asked), there)

    if fits():
        return "The -ot rules are at fault: the placement that is calculated without them fits."
    return (
        f"{_sentence(list(_hybrid_ways(machine, batch, layout, fits)))} A smaller quant needs less."
    )


def _hybrid_ways(
    machine: Machine, batch: Batch, layout: Layout, fits: Callable[..., bool]
) -> Iterator[str]:
    host = math.ceil(layout.host_bytes / GIB)
    if machine.host_bytes is not None and fits(replace(machine, host_bytes=host * GIB)):
        yield f"--ram {host}GiB"
    if batch.kv == "bf16" and fits(asked=replace(batch, kv="fp8")):
        yield "--kv fp8"
    if batch.mla != 1 and fits(asked=replace(batch, mla=1)):
        yield "--mla 1"
    fewer = _halves(batch.context // 2)
    if tokens := _first(fewer, lambda n: fits(asked=replace(batch, context=n))):
        yield f"--ctx {_tokens(tokens)}"
    more = range(machine.cards + 1, _MOST_LLAMA_CARDS + 1)
    if cards := _first(more, lambda n: fits(replace(machine, cards=n))):
        yield f"--gpus {cards}"


def _sentence(ways: list[str]) -> str:
    if not ways:
        return "No single option makes it fit."
    return f"It fits with {' or '.join(filter(None, [', '.join(ways[:-1]), ways[-1]]))}."


def _first(values: Iterable[int], does: Callable[[int], bool]) -> int | None:
    return next((value for value in values if does(value)), None)


def _halves(tokens: int) -> Iterator[int]:
    """Round numbers of tokens, each about half of the one before."""
    while tokens >= _LEAST_CONTEXT:
        tokens -= tokens % _LEAST_CONTEXT
        yield tokens
        tokens //= 2


def _tokens(tokens: int) -> str:
    return f"{tokens // 1024}k"

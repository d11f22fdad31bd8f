"""Does a model fit on equal cards? The table of one card, the verdict, and what would make it fit.

Names an option only after the same sum was made with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pipeline.core.errors import DoesNotFit
from pipeline.core.model import Frozen
from pipeline.serving.fit import engine as eng
from pipeline.serving.fit.engine import Engine, FitQuestion, Kv, MemoryBudget, state_bytes
from pipeline.serving.fit.gguf import GgufModel
from pipeline.serving.fit.parts import require_context_parallel, require_divisible, tensor_parts
from pipeline.serving.fit.placement import Batch, FitMachine, Layout, place, shortage
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.units import GIB, MIB, gib

_MOST_CARDS = 64  # eight servers with eight cards each
_MOST_LLAMA_CARDS = 16  # GGML_CUDA_MAX_DEVICES of github.com/ggml-org/llama.cpp
_LEAST_CONTEXT = 1024  # a server with less room is of no use
_SMALL_STEPS = (4096, 2048, 1024)  # of prefill, below the defaults of large cards
_FLAGS = {"sglang": "--mem-fraction", "vllm": "--gpu-util"}
_FEWER_BITS = "A checkpoint with fewer bits per weight"


class TableRow(Frozen):
    """One line of the table."""

    what: str
    n_bytes: int


class FitAnswer(Frozen):
    """What fits, how it was computed, and what is short."""

    engine: Engine
    kv: Kv
    rows: list[TableRow]
    room: MemoryBudget
    low_tokens: int  # had everything else come out larger by our known error
    high_tokens: int
    margin_bytes: int
    notes: list[str]
    short: str = ""  # empty: it fits


def answer(model: Architecture, question: FitQuestion) -> FitAnswer:
    """Answers for a model under tensor parallelism on equal cards."""
    if question.context > model.context:
        raise DoesNotFit(
            f"--ctx {question.context}: the model has only {model.context} positions",
            f"Ask for at most {model.context}.",
        )
    require_divisible(model, question.tp)
    require_context_parallel(model, question.tp, question.dcp)
    groups: dict[str, int] = {}
    for part in tensor_parts(model, question.engine, question.tp):
        # the table shows `attention`, not each of its matrices
        group = part.name.partition(",")[0]
        groups[group] = groups.get(group, 0) + part.card_bytes(question.tp)
    weights = question.measured_bytes or sum(groups.values())
    is_sglang = question.engine == "sglang"
    room = eng.room_of(model, weights, question)
    error = eng.margin_bytes(question, weights)
    rows = {} if question.measured_bytes else {f"  {what}": n for what, n in groups.items()}
    rows |= {"weights": room.weights_bytes, "CUDA and NCCL": room.taken_bytes}
    if room.kernels_bytes:
        rows["kernels and workspaces"] = room.kernels_bytes
    if not is_sglang:
        rows["activations"] = room.activation_bytes
    rows["KV cache"] = room.kv_bytes
    if room.requests_bytes:
        rows["table of requests"] = room.requests_bytes
    rows["left for activations" if is_sglang else "left to others"] = room.left_bytes
    rows["the card"] = room.card_bytes
    return FitAnswer(
        engine=question.engine,
        kv=question.kv_of(model),
        rows=[TableRow(what=what, n_bytes=n) for what, n in rows.items()],
        room=room,
        low_tokens=room.tokens_at(error),
        high_tokens=room.tokens_at(-error),
        margin_bytes=error,
        notes=_notes(model, question, room),
        short=_short(room, error, question),
    )


def _short(room: MemoryBudget, error: int, question: FitQuestion) -> str:
    low_tokens = room.tokens_at(error)
    if room.kv_bytes <= 0:
        return f"the weights alone exceed the engine's share of a card by {gib(-room.kv_bytes)}"
    if room.kv_tokens < question.context:
        return f"room for {room.kv_tokens:,} tokens, {question.context:,} asked for"
    # a server that fails to start after hours of loading is worse than a cautious no
    if low_tokens < question.context:
        return (
            f"too close to promise: {room.kv_tokens:,} tokens by our sum, {low_tokens:,} if it is "
            f"off by {gib(error)}, {question.context:,} asked for"
        )
    if room.left_bytes < (room.activation_bytes if question.engine == "sglang" else 0):
        return f"activations need {gib(room.activation_bytes)}, {gib(room.left_bytes)} are left"
    return ""


def _notes(model: Architecture, question: FitQuestion, room: MemoryBudget) -> list[str]:
    notes = [_SHARES[question.engine]]
    if question.engine == "sglang":
        own = eng.sglang_default_fraction(model, question)
        if question.fraction is None:
            later = eng.later_sglang_fraction(model, question)
            notes.append(
                f"--mem-fraction-static {own:.3f} is what sglang 0.5.8 chooses by itself here;"
                f" 0.5.23 chooses {later:.3f}. To have one of them for sure, give the flag."
            )
        elif question.fraction > own:
            notes.append(
                f"sglang by itself would choose {own:.3f}: above it, long prompts or images may"
                " run out of memory although the server starts."
            )
    elif question.fraction is None:
        notes.append(f"--gpu-memory-utilization {room.fraction} is the default of vLLM 0.32.")
    if (needed := needed_fraction(room, question)) and needed > room.fraction:
        flag = _FLAGS[question.engine]
        notes.append(f"{flag} {needed:.3f} would give {question.context:,} tokens their room.")
    if room.kv_part < 1:
        notes.append(
            f"A request has a state of {state_bytes(model, question.tp) / MIB:,.1f} MiB on each"
            f" card, for which sglang sets {1 - room.kv_part:.0%} of the cache aside."
        )
    elif room.request_bytes:
        notes.append(
            f"Windows and states cost a request {room.request_bytes / MIB:,.1f} MiB on each card,"
            f" at any length; tokens are counted in requests of {question.context:,}."
        )
    notes += model.bounds
    # engines load them only for speculative decoding
    if model.predictors:
        notes.append("The layers for multi-token prediction are not counted, on cards or disk.")
    if model.precision.kv_fp8 and question.kv == "bf16":
        notes.append("The checkpoint asks for an fp8 KV cache; bf16 was asked for here.")
    return notes


_SHARES = {
    "sglang": "sglang's share is of what is free beside CUDA, for weights and KV cache alone;"
    " activations and CUDA graphs use what it leaves.",
    "vllm": "vLLM's share is of the whole card, for everything it has; the same number in sglang"
    " means something else. Since 0.21 it also takes off what it estimates for CUDA graphs, mostly"
    " 0.2 to 0.7 GiB and not in this sum (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0: nothing).",
}


def needed_fraction(room: MemoryBudget, question: FitQuestion) -> float | None:
    """The share with which one request fits, if it leaves enough for the rest."""
    needed = (question.context * room.kv_token_bytes + room.request_bytes) / room.kv_part
    lacking = math.ceil(needed) - room.kv_bytes
    lacking += eng.margin_bytes(question, room.weights_bytes)
    reserve = room.activation_bytes if question.engine == "sglang" else 0
    if room.left_bytes - max(0, lacking + min(0, room.kv_bytes)) < reserve:
        return None
    whole = room.card_bytes - (room.taken_bytes if question.engine == "sglang" else 0)
    return math.ceil(1000 * (room.fraction + lacking / whole)) / 1000


def parallel_hint(
    model: Architecture, question: FitQuestion, result: FitAnswer, cards: int, nodes: int = 1
) -> str:
    """What to change where sglang or vLLM has too little room on the cards of all nodes."""

    def fits(**changes: object) -> bool:
        try:
            return not answer(model, question.model_copy(update=changes)).short
        except DoesNotFit:  # the model cannot be divided like that
            return False

    room, options = result.room, list[str]()
    fraction = needed_fraction(room, question)
    if not fraction:  # the share of sglang that leaves activations their room
        lacking = room.activation_bytes - room.left_bytes
        share = room.fraction - lacking / (room.card_bytes - room.taken_bytes)
        fraction = math.floor(1000 * share) / 1000
    if 0 < fraction < 1 and fits(fraction=fraction):
        options.append(f"{_FLAGS[question.engine]} {fraction:.3f}")
    if result.kv == "bf16" and fits(kv="fp8"):
        options.append("--kv fp8")
    fewer = _halves(min(result.low_tokens, question.context - 1))
    if tokens := _first(fewer, lambda n: fits(context=n)):
        options.append(f"--ctx {tokens // 1024}k")
    smaller = (n for n in _SMALL_STEPS if n < question.prefill_tokens)
    if prefill := _first(smaller, lambda n: fits(prefill_given=n)):
        options.append(f"--prefill {prefill}")
    # measured weights are those of as many cards as they were measured with
    more = range(question.tp + 1, 1 if question.measured_bytes else _MOST_CARDS + 1)
    even = (n for n in more if n % question.dcp == n % nodes == 0)
    if tp := _first(even, lambda n: fits(tp=n)):
        gpus = f"--gpu-count {tp // nodes}" if tp > cards else ""
        flags = [gpus, "" if gpus and question.tp == cards else f"--tp {tp}"]
        options.append(" ".join(filter(None, flags)))
    if room.kv_bytes > 0:
        return f"{_sentence(options)} {_FEWER_BITS} needs less."
    hybrid = "; ik_llama runs GGUF files with experts in the host's memory" if model.moe else ""
    return f"Fewer tokens do not help. {_sentence(options)} {_FEWER_BITS} needs less{hybrid}."


def hybrid_hint(model: GgufModel, machine: FitMachine, batch: Batch, layout: Layout) -> str:
    """What to change where ik_llama has too little room on cards or host."""

    def fits(on: FitMachine = machine, asked: Batch = batch) -> bool:
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
        options.append(f"--gpu-count {cards}")
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

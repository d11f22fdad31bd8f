"""Where ik_llama.cpp puts a GGUF model's tensors: which experts on which card, and the sums.

Attention, norms, shared experts and the KV cache are spread over the cards by layer. Routed experts
are most of a model's bytes and least of its work, so they fill the room that remains on the cards,
and the host takes the rest. What a card needs besides is estimated from the shapes of the largest
batch.

llama.cpp and ik_llama.cpp go through `-ot` rules in the order given and take the first whose
regular expression matches anywhere in the tensor's name (ik_llama.cpp:
create_tensors_helper::get_context_for_tensor, std::regex_search and break). A tensor that no rule
names goes with its layer. The flags of the command and the table of the cards follow from a layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.core.errors import ModelUnreadable
from pipeline.serving.fit.engine import KV_BYTES, Kv
from pipeline.serving.fit.gguf import GgufModel, GgufTensor
from pipeline.serving.fit.units import GIB, MIB, gib, share

CPU = "CPU"
# constructs of Python that std::regex (ECMAScript) does not have, or reads otherwise
_NOT_ECMA = re.compile(r"\(\?(?![:=!])|\\[AZ]|\\p|[*+?}]\+")
_LONGEST = 2000  # of one rule: a line for 60 layers has some 250 characters
# our estimate of a CUDA context with cuBLAS, without a source; sglang's process takes 1.17 GiB
CONTEXT_BYTES = 512 * MIB
ATTENTION_BATCH_MIB = 512  # -amb, as in the command of "Running Kimi-K2.6 Locally"
_CACHE_STEP = 256  # the engine rounds a context up to this
# ik_llama.cpp #520: experts on the host are copied to a card for batches of at least this many
# tokens, times all experts over active ones
_OFFLOAD_TOKENS = 32


@dataclass(frozen=True)
class TensorRule:
    """A rule of `-ot`: tensors whose name matches go to this device."""

    pattern: str
    device: str

    def matches(self, tensor: str) -> bool:
        return re.search(self.pattern, tensor) is not None

    def flag(self) -> str:
        """The rule as a shell takes it."""
        return f'-ot "{self.pattern}={self.device}"'


@dataclass(frozen=True)
class FitMachine:
    """Equal cards and a host, and how much of them stays free."""

    cards: int
    card_bytes: int  # as the driver shows it
    headroom_bytes: int = 2 * GIB
    host_bytes: int | None = None  # None: not judged

    @property
    def devices(self) -> list[str]:
        return [f"CUDA{i}" for i in range(self.cards)]

    @property
    def usable_bytes(self) -> int:
        return self.card_bytes - self.headroom_bytes


@dataclass(frozen=True)
class Batch:
    """The launch options that buffers follow from."""

    context: int
    kv: Kv
    ubatch: int = 512
    batch: int = 2048
    mla: Literal[0, 1, 2, 3] = 3  # the engine's default


@dataclass(frozen=True)
class CardLoad:
    """What one card has to hold."""

    device: str
    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Layout:
    """Rules, and what each card then holds."""

    rules: list[TensorRule]
    loads: list[CardLoad]
    host_bytes: int
    expert_layers: int  # how many have their experts on a card


def read_placement_overrides(texts: Iterable[str], devices: Iterable[str]) -> list[TensorRule]:
    """Rules as a user gives them, several in one with commas."""
    known = [*devices, CPU]
    rules: list[TensorRule] = []
    for text in (text for given in texts for text in given.split(",")):
        pattern, sign, device = text.strip().removeprefix("-ot ").strip("\"' ").partition("=")
        if not sign or not pattern or len(text) > _LONGEST:
            raise ValueError(f"{text!r} is not a rule; write it like exps=CPU")
        if device not in known:
            raise ValueError(f"{text!r}: there is no device {device!r} (only {', '.join(known)})")
        # a rule that only Python understands would match here and not in the engine
        if _NOT_ECMA.search(pattern):
            raise ValueError(
                f"{text!r}: the engine's regular expressions do not have this construct"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{text!r}: {error}") from error
        rules.append(TensorRule(pattern, device))
    if not rules:
        raise ValueError("no rule was given")
    return rules


def home_of(tensor: str, layers: int, devices: list[str]) -> str:
    """Where -ngl 999 puts a tensor: layers in equal runs, the output with the last of them.

    The engine divides layers + 1 among the cards by their free memory (llama_model_load: splits);
    on cards of one size that is in equal parts. Token embeddings stay with the host.
    """
    if tensor.startswith("token_embd"):
        return CPU
    layer = re.match(r"blk\.(\d+)\.", tensor)
    # the output head and its norm count as one layer more
    place = int(layer[1]) if layer else layers
    return devices[min(place * len(devices) // (layers + 1), len(devices) - 1)]


def device_of(tensor: str, rules: list[TensorRule], layers: int, devices: list[str]) -> str:
    """The device of a tensor: by the first rule that matches its name, else with its layer."""
    rule = next((r for r in rules if r.matches(tensor)), None)
    return rule.device if rule else home_of(tensor, layers, devices)


def expert_bytes(tensors: Iterable[GgufTensor]) -> dict[int, int]:
    """Routed experts of every layer that has some."""
    layers: dict[int, int] = {}
    for tensor in tensors:
        if match := re.match(r"blk\.(\d+)\.ffn_\w+_exps\.", tensor.name):
            layers[int(match[1])] = layers.get(int(match[1]), 0) + tensor.n_bytes
    return layers


def offload_from(model: GgufModel) -> int:
    """The batch from which experts on the host are computed on a card."""
    return _OFFLOAD_TOKENS * share(model.experts, model.active) if model.active else _OFFLOAD_TOKENS


def llama_token_bytes(model: GgufModel, batch: Batch) -> int:
    """What a token costs on all cards together."""
    return _kv_bytes(sum(_kv_values(model, batch)), batch.kv)


def _kv_values(model: GgufModel, batch: Batch) -> list[int]:
    """What each layer keeps of a token.

    MLA's latent, or with -mla 0 a key and a value for each head. -mla 1, 2 and 3 keep the same:
    with flash attention, which is the default, -mla 1 needs no transposed copy (ik_llama.cpp:
    llama_model::cache_size).
    """
    if batch.mla or not model.is_mla:
        return model.kv_values
    if not model.heads or not model.head_values:
        raise ModelUnreadable(
            "-mla 0: the file does not say how many heads the model has, or how large they are",
            "Ask for -mla 1 or 3, which keep the latent.",
        )
    return [model.heads * model.head_values if values else 0 for values in model.kv_values]


def _kv_bytes(values: int, kv: Kv) -> int:
    """`fp8` is q8_0 for this engine: 34 bytes for 32 values."""
    return values * KV_BYTES[kv] if kv == "bf16" else values * 34 // 32


def _loads(
    model: GgufModel, machine: FitMachine, batch: Batch, rules: list[TensorRule]
) -> list[CardLoad]:
    """What each card holds under these rules, by the table of tensors; the host comes last."""
    devices = machine.devices
    # by what the rules do, and not by what somebody meant
    held: dict[str, list[GgufTensor]] = {device: [] for device in [*devices, CPU]}
    for tensor in model.tensors:
        held[device_of(tensor.name, rules, model.layers, devices)].append(tensor)
    sums = {device: sum(t.n_bytes for t in tensors) for device, tensors in held.items()}
    context = share(batch.context, _CACHE_STEP) * _CACHE_STEP
    kv = dict.fromkeys(devices, 0)
    for i, values in enumerate(_kv_values(model, batch)):
        kv[home_of(f"blk.{i}.", model.layers, devices)] += values
    # Buffers are the largest moment of a step, in float32 where the engine computes in it. All
    # through a step there are four hidden states and the mask of every token against every
    # position (float16 with flash attention: build_inp_KQ_mask).
    tokens = batch.ubatch
    always = context * tokens * 2 + tokens * model.hidden * 4 * 4
    # The graph's allocator then gives the same bytes to one moment after the other: MLA's keys and
    # values spelled out for as many heads as -amb allows, with their float16 copy (-mla 1 spells
    # nothing out, and its queries and their results are as wide as the latent; -mla 0 has the keys
    # and values of the step alone);
    attention = 0
    if model.is_mla:
        attention = {
            0: tokens * model.heads * model.head_values * 4,
            1: tokens * model.heads * 2 * max(model.kv_values, default=0) * 4,
        }.get(batch.mla, ATTENTION_BATCH_MIB * MIB * 3 // 2)
    # the active experts' inner states and outputs, with one layer of the host's experts where the
    # batch is large enough to copy them; the logits on the last card.
    experts = tokens * model.active * (model.hidden + 3 * model.expert_width) * 4
    if tokens >= offload_from(model):
        experts += max(expert_bytes(held[CPU]).values(), default=0)
    loads = []
    for device in devices:
        logits = model.vocabulary * tokens * 4 if device == devices[-1] else 0
        buffers = always + max(attention, experts, logits) + CONTEXT_BYTES
        cache = _kv_bytes(kv[device], batch.kv) * context
        loads.append(CardLoad(device, sums[device], cache, buffers))
    return [*loads, CardLoad(CPU, sums[CPU], 0, 0)]


def place(model: GgufModel, machine: FitMachine, batch: Batch) -> Layout:
    """Puts as many layers of experts on the cards as fit beside everything else."""
    experts, devices = expert_bytes(model.tensors), machine.devices
    # a dense model has nothing to place: the engine puts each layer on its card
    if not experts:
        return checked_layout(model, machine, batch, [])
    rules: list[TensorRule] = []
    chosen = 0
    # first with all experts on the host: the rest of each card is room for experts
    for load in _loads(model, machine, batch, [TensorRule("exps", CPU)])[:-1]:
        own = [
            i for i in sorted(experts) if home_of(f"blk.{i}.", model.layers, devices) == load.device
        ]
        # from the first layer on, but from the end on the last of several cards: the head and tail
        # split of "Running Kimi-K2.6 Locally"
        if load.device == devices[-1] and len(devices) > 1:
            own.reverse()
        room = machine.usable_bytes - load.n_bytes
        layers: list[int] = []
        for layer in own:
            # in a row without gaps: such a rule stays short, and people can follow it
            room -= experts[layer]
            if room < 0:
                break
            layers.append(layer)
        if layers:
            numbers = "|".join(map(str, sorted(layers)))
            rules.append(TensorRule(rf"blk\.({numbers})\.ffn_.*_exps", load.device))
            chosen += len(layers)
    # without a rule for the rest the engine would put it on the card of its layer
    if chosen < len(experts):
        rules.append(TensorRule("exps", CPU))
    return checked_layout(model, machine, batch, rules)


def checked_layout(
    model: GgufModel, machine: FitMachine, batch: Batch, rules: list[TensorRule]
) -> Layout:
    """A layout with the sums that its rules really give."""
    *loads, host = _loads(model, machine, batch, rules)

    experts = expert_bytes(model.tensors)
    names = [f"blk.{i}.ffn_{part}_exps.weight" for i in experts for part in ("gate", "up", "down")]
    devices = machine.devices
    on_host = (name for name in names if device_of(name, rules, model.layers, devices) == CPU)
    # a layer with one of its matrices on the host still waits for the host
    waiting = {name.split(".")[1] for name in on_host}
    return Layout(rules, loads, host.n_bytes, len(experts) - len(waiting))


def shortage(layout: Layout, machine: FitMachine) -> str:
    """The first device that is short, as a message; empty where all have room."""
    for load in layout.loads:
        short = load.n_bytes - machine.usable_bytes
        if short > 0:
            return (
                f"{load.device} is short of {gib(short)} ({gib(machine.headroom_bytes)} kept free)"
            )
    if machine.host_bytes is not None and layout.host_bytes > machine.host_bytes:
        return f"the host is short of {gib(layout.host_bytes - machine.host_bytes)}"
    return ""


def launch_lines(model: GgufModel, batch: Batch, layout: Layout) -> list[str]:
    """Flags for llama-server; a rule stands before the one it is an exception to."""
    cache = [] if batch.kv == "bf16" else ["-ctk q8_0", "-ctv q8_0"]
    attention = [f"-mla {batch.mla}"] if model.is_mla else ["-fa on"]
    if model.is_mla and batch.mla > 1:  # the others have nothing that this limits
        attention.append(f"-amb {ATTENTION_BATCH_MIB}")
    return [
        # all layers on the cards; the -ot rules below take the experts back to the host
        "-ngl 999",
        f"--ctx-size {batch.context}",
        # the engine lowers -ub to -b where it is larger
        f"-b {max(batch.batch, batch.ubatch)}",
        f"-ub {batch.ubatch}",
        *attention,
        *cache,
        *(rule.flag() for rule in layout.rules),
    ]


def layout_rows(layout: Layout, machine: FitMachine) -> list[list[str]]:
    """One line for each card, and one for the host."""
    rows = [
        [
            load.device,
            *(f"{n / GIB:.2f}" for n in (load.weights_bytes, load.kv_bytes, load.buffer_bytes)),
            f"{load.n_bytes / GIB:.2f}",
            f"{(machine.usable_bytes - load.n_bytes) / GIB:.2f}",
        ]
        for load in layout.loads
    ]
    left = "" if machine.host_bytes is None else machine.host_bytes - layout.host_bytes
    free = f"{left / GIB:.2f}" if isinstance(left, int) else "not judged"
    weights = f"{layout.host_bytes / GIB:.2f}"
    return [*rows, ["host", weights, "", "", weights, free]]


def layout_notes(model: GgufModel, batch: Batch, layout: Layout) -> list[str]:
    """What a person should know about a layout."""
    notes = [
        f"{layout.expert_layers} layers have their experts on the cards; layers before the first"
        " with experts are dense and stay on theirs."
        if model.experts
        else "A dense model: every layer lies whole on one card, the embedding on the host.",
        f"KV cache: {llama_token_bytes(model, batch):,} bytes a token,"
        f" {gib(llama_token_bytes(model, batch) * batch.context)} for {batch.context:,} tokens.",
    ]
    if model.experts and batch.ubatch >= offload_from(model):
        notes.append(
            f"From -ub {offload_from(model)} on, prompts bring a layer of the host's experts to the"
            " card at a time: faster, and a buffer as large as that layer."
        )
    notes += model.bounds
    working = {
        next((i for i, rule in enumerate(layout.rules) if rule.matches(tensor.name)), None)
        for tensor in model.tensors
    }
    notes += [
        f"{rule.flag()} does nothing: earlier rules, or none of the tensors, match it."
        for i, rule in enumerate(layout.rules)
        if i not in working
    ]
    return notes


def layout_json(
    model: GgufModel, batch: Batch, layout: Layout, machine: FitMachine
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "engine": "ik_llama",
        "rules": [f"{rule.pattern}={rule.device}" for rule in layout.rules],
        "cards": [
            asdict(load) | {"free_bytes": machine.usable_bytes - load.n_bytes}
            for load in layout.loads
        ],
        "host_bytes": layout.host_bytes,
        "expert_layers": layout.expert_layers,
        "kv_token_bytes": llama_token_bytes(model, batch),
        "launch": launch_lines(model, batch, layout),
        "notes": layout_notes(model, batch, layout),
    }

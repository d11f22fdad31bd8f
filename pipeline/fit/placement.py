"""Which experts go on which card.

Routed experts are most of a model's bytes and least of its work, so they fill the room that is left
on the cards, and the host takes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.fit.gguf_model import GgufModel
from pipeline.fit.loads import Batch, Load, Machine, expert_bytes, loads_of
from pipeline.fit.override import CPU, TensorRule, device_of, home_of
from pipeline.fit.units import gib


@dataclass(frozen=True)
class Layout:
    """Rules, and what they come to."""

    rules: list[TensorRule]
    loads: list[Load]
    host_bytes: int
    expert_layers: int  # how many have their experts on a card


def place(model: GgufModel, machine: Machine, batch: Batch) -> Layout:
    """As many layers of experts on the cards as fit beside everything else."""
    experts = expert_bytes(model.tensors)
    # a dense model has nothing to place: the engine puts each layer on its card
    if not experts:
        return checked(model, machine, batch, [])
    # first with all experts on the host: what is left on each card is room for experts
    none = [TensorRule("exps", CPU)]
    loads, _ = loads_of(model, machine, batch, none)
    chosen: dict[str, list[int]] = {}
    for load in loads:
        room = machine.usable_bytes - load.n_bytes
        chosen[load.device] = _fill(
            _candidates(model, machine, load.device, experts), experts, room
        )
    return checked(model, machine, batch, _rules(chosen, experts))


def _candidates(
    model: GgufModel, machine: Machine, device: str, experts: dict[int, int]
) -> list[int]:
    """A card's own layers: from the first on, but from the end on the last of several cards."""
    devices = machine.devices
    own = [i for i in sorted(experts) if home_of(f"blk.{i}.", model.layers, devices) == device]
    # the head and tail split of "Running Kimi-K2.6 Locally"
    return own[::-1] if device == devices[-1] and len(devices) > 1 else own


def _fill(candidates: list[int], experts: dict[int, int], room: int) -> list[int]:
    chosen: list[int] = []
    for layer in candidates:
        # in a row without gaps: such a rule stays short, and people can follow it
        room -= experts[layer]
        if room < 0:
            break
        chosen.append(layer)
    return sorted(chosen)


def _rules(chosen: dict[str, list[int]], experts: dict[int, int]) -> list[TensorRule]:
    rules = [
        TensorRule(rf"blk\.({'|'.join(map(str, layers))})\.ffn_.*_exps", device)
        for device, layers in chosen.items()
        if layers
    ]
    # without a rule for the rest the engine would put it on the card of its layer
    everything = sum(map(len, chosen.values())) == len(experts)
    return rules if everything else [*rules, TensorRule("exps", CPU)]


def checked(model: GgufModel, machine: Machine, batch: Batch, rules: list[TensorRule]) -> Layout:
    """A layout with the sums that its rules really give."""
    loads, host = loads_of(model, machine, batch, rules)
    experts = expert_bytes(model.tensors)

    def on_card(layer: int, part: str) -> bool:
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        return device_of(name, rules, model.layers, machine.devices) != CPU

    # a layer with one of its matrices on the host still waits for the host
    on_cards = sum(all(on_card(i, part) for part in ("gate", "up", "down")) for i in experts)
    return Layout(rules, loads, host, on_cards)


def shortage(layout: Layout, machine: Machine) -> str:
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

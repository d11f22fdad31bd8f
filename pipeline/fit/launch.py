"""The part of an ik_llama.cpp command that a layout decides, and the table beside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.fit.gguf_model import GgufModel
from pipeline.fit.placement import (
    ATTENTION_BATCH_MIB,
    Batch,
    Layout,
    Machine,
    idle_rules,
    llama_token_bytes,
    offload_from,
)
from pipeline.fit.units import GIB, gib


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


def layout_rows(layout: Layout, machine: Machine) -> list[list[str]]:
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
    notes += [
        f"{rule.flag()} does nothing: earlier rules, or none of the tensors, match it."
        for rule in idle_rules(model.tensors, layout.rules)
    ]
    return notes


def layout_json(model: GgufModel, batch: Batch, layout: Layout, machine: Machine) -> dict[str, Any]:
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

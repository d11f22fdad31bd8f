"""The answer of `sm120 weights fit` as text."""

from __future__ import annotations

from typing import Any

from pipeline import log
from pipeline.fit.answer import FitAnswer
from pipeline.fit.engine import Question
from pipeline.fit.gguf_model import GgufModel
from pipeline.fit.placement import (
    Batch,
    Layout,
    Machine,
    launch_lines,
    layout_notes,
    layout_rows,
)
from pipeline.fit.source import Source
from pipeline.fit.units import GIB, gib


def answer_text(result: FitAnswer, question: Question) -> str:
    """The table of a card, the KV cache and what to know."""
    rows = [[row.what, _gib_text(row.n_bytes)] for row in result.rows]
    measured = question.measured_bytes is not None
    # the KV cache is what everything else leaves: the error of that sum is its uncertainty
    between = (
        f"{result.low_tokens:,} to {result.high_tokens:,} if the rest is off by"
        f" {gib(result.margin_bytes)}"
    )
    return "\n".join(
        [
            log.table(["on each card", "       GiB"], rows),
            "",
            f"KV cache in {result.kv}: {result.room.kv_token_bytes:,} bytes a token on each card,"
            f" room for {result.room.kv_tokens:,} tokens{'' if measured else f' ({between})'}.",
            *result.notes,
        ]
    )


def _gib_text(n_bytes: float) -> str:
    """A column of the table; less than nothing is what the card is short of."""
    return f"{n_bytes / GIB:10.2f}" if n_bytes >= 0 else f"none, {-n_bytes / GIB:.2f} short"


def room_text(result: FitAnswer, question: Question) -> str:
    """How much of what was asked for has room."""
    # by the low estimate: a promise that holds if the weights turn out larger
    times = result.low_tokens // question.context
    return f"room for at least {log.count(times, 'request')} of {question.context:,} tokens"


def layout_lines(model: GgufModel, batch: Batch, layout: Layout, machine: Machine) -> list[str]:
    """The table of cards and host, what to know, and the flags."""
    head = ["GiB", "weights", "KV cache", "buffers", "together", "still free"]
    flags = " \\\n  ".join(launch_lines(model, batch, layout))
    rows = layout_rows(layout, machine)
    return [log.table(head, rows), "", *layout_notes(model, batch, layout), "", f"  {flags}"]


def heading(source: Source, engine: str, options: dict[str, Any]) -> str:
    """What is asked, and where the answer comes from."""
    cards = f"{log.count(options['gpus'], 'card')} of {gib(options['vram'])}"
    return f"{source.name} on {cards} with {engine}\nread from: {source.origin}\n"


def disk_lines(source: Source, options: dict[str, Any]) -> list[str]:
    """What it takes on a disk, and how long to bring it."""
    about = " by the sum of its tensors" if source.is_estimate else ""
    lines = [f"Disk: {log.size(source.disk_bytes)} ({gib(source.disk_bytes)}){about}."]
    if options["mbps"]:
        seconds = source.disk_bytes / options["mbps"] / 1e6
        hours, minutes = divmod(round(seconds / 60), 60)
        lines.append(f"Download at {options['mbps']:g} MB/s: {hours} h {minutes:02} min.")
    return lines

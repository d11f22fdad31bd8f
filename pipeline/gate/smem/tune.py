"""Other block sizes, warps and stages for one case's kernel, ranked by how well they fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pipeline.errors import GateUnknown
from pipeline.gate.smem.cases import Case, Override
from pipeline.gate.smem.image_gate import ImageGate
from pipeline.gate.smem.limits import Card
from pipeline.gate.smem.results import CaseResult, Record, WorkerAnswer
from pipeline.gate.smem.run import answered, judge_all
from pipeline.model import Frozen

# Launch parameters that shape a tile; `tl.dot` needs at least 16 of each.
SWEPT = ("BLOCK_M", "BLOCK_N", "BLOCK_H", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
SIZES = (16, 32, 64, 128)
# Tiles much larger than anyone chose never fit, and take ptxas minutes to give up on.
LARGER = 2


class Choice(Frozen):
    """One configuration, and what it costs."""

    values: dict[str, int]
    fits: bool
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    tile: int
    blocks_per_sm: int | None = None
    who: list[str] = []  # whose choice it is: upstream's, the patched engine's
    message: str = ""

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Fits, then spills little, then works on much at once, then uses few registers."""
        # what ptxas did not report ranks behind everything that it did
        spills = 1 << 30 if self.spill_bytes is None else self.spill_bytes
        return (not self.fits, spills, -self.tile, self.registers or 0)


class CaseTuning(Frozen):
    """All configurations of one kernel in one case, best first."""

    case: str
    kernel: str
    limit_bytes: int
    choices: list[Choice]


def tune(
    gate: ImageGate, card: Card, case: Case, warps: Sequence[int], stages: Sequence[int]
) -> CaseTuning:
    """Sweep what the kernel is launched with, under the engine as the image holds it."""
    target = gate.target(gate.patched(), card)
    ours = _hungriest(judge_all(target, gate.gates, [case])[0])
    theirs = _hungriest(judge_all(gate.target(gate.tree, card), gate.gates, [case])[0])
    names = [name for name in ours.blocks if name in SWEPT]
    kernel = ours.kernel
    known = [("image", _values(ours, names)), ("upstream", _values(theirs, names))]
    # patches that others published for the same kernel are worth comparing with
    for other, series in gate.context.checkout.other_series(gate.plan.spec).items():
        result = judge_all(gate.target(gate.patched(series), card), gate.gates, [case])[0]
        known.append((other, _values(_hungriest(result), names)))
    largest = LARGER * max(_tile(values) for _, values in known)
    variants = []
    for sizes in itertools.product(*([SIZES] * len(names)), warps, stages):
        values = dict(zip([*names, "num_warps", "num_stages"], sizes, strict=True))
        if _tile(values) > largest:
            continue
        label = "-".join(map(str, sizes))
        override = Override(kernel=kernel, values=values)
        variants.append(
            case.model_copy(update={"name": f"{case.name}@{label}", "override": override})
        )
    choices = [_choice(v, a, kernel, card, known) for v, a, _ in answered(target, variants)]
    choices.sort(key=lambda choice: choice.rank)
    return CaseTuning(case=case.name, kernel=kernel, limit_bytes=card.shared_bytes, choices=choices)


def _hungriest(result: CaseResult) -> Record:
    if result.worst is None:
        raise GateUnknown(f"{result.name}: {result.message}")
    return result.worst.record


def _values(record: Record, names: Sequence[str]) -> dict[str, int]:
    blocks = {name: record.blocks[name] for name in names if name in record.blocks}
    return {**blocks, "num_warps": record.num_warps or 0, "num_stages": record.num_stages or 0}


def _tile(values: dict[str, int]) -> int:
    """How many results a block works on at once."""
    sides = ("BLOCK_M", "BLOCK_N", "BLOCK_H", "BLOCK_SIZE_M", "BLOCK_SIZE_N")
    return math.prod(value for name, value in values.items() if name in sides)


def _choice(
    variant: Case,
    answer: WorkerAnswer,
    kernel: str,
    card: Card,
    known: Sequence[tuple[str, dict[str, int]]],
) -> Choice:
    assert variant.override is not None
    values = variant.override.values
    tile = _tile(values)
    who = [name for name, chosen in known if chosen == values]
    record = next((r for r in answer.records if r.kernel == kernel), None)
    if record is None or record.shared_bytes is None:
        message = (record.error if record else None) or answer.message or answer.ended
        return Choice(values=values, fits=False, tile=tile, who=who, message=message[:120])
    return Choice(
        values=values,
        fits=record.shared_bytes <= card.shared_bytes,
        shared_bytes=record.shared_bytes,
        registers=record.registers,
        spill_bytes=record.spill_bytes,
        tile=tile,
        blocks_per_sm=_resident(record, card),
        who=who,
    )


def _resident(record: Record, card: Card) -> int:
    """How many blocks a multiprocessor can hold at once."""
    threads = 32 * (record.num_warps or 4)
    # the driver takes a kilobyte for each block, and hands out registers in eights
    by_shared = card.shared_bytes_per_sm // ((record.shared_bytes or 0) + 1024)
    registers = -(-(record.registers or 1) // 8) * 8
    by_registers = card.registers_per_sm // (threads * registers)
    return min(by_shared, by_registers, card.threads_per_sm // threads)

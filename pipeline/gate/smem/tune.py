"""Other block sizes, warps and stages for one case's kernel, ranked by how well they fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pipeline.errors import GateUnknown
from pipeline.gate.smem.cases import Case, Override
from pipeline.gate.smem.image_gate import ImageGate
from pipeline.gate.smem.limits import Card
from pipeline.gate.smem.results import Record, WorkerAnswer
from pipeline.gate.smem.run import answered
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
        # what ptxas did not report ranks after everything that it did
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
    """Sweeps what the kernel is launched with, under the engine as the image holds it."""
    # patches that others published for the same kernel are worth comparing with
    others = gate.context.checkout.other_series(gate.plan.spec)
    trees = {"image": gate.patched(), "upstream": gate.tree}
    trees |= {name: gate.patched(series) for name, series in others.items()}
    records = {}
    for name, tree in trees.items():
        (result,) = gate.judge(tree, card, [case])
        if result.worst is None:
            raise GateUnknown(f"{result.name}: {result.message}")
        records[name] = result.worst.record
    kernel = records["image"].kernel
    names = [name for name in records["image"].blocks if name in SWEPT]
    known = {name: _values(record, names) for name, record in records.items()}
    largest = LARGER * max(map(_tile, known.values()))
    variants = []
    for sizes in itertools.product(*([SIZES] * len(names)), warps, stages):
        values = dict(zip([*names, "num_warps", "num_stages"], sizes, strict=True))
        if _tile(values) > largest:
            continue
        name, override = "-".join(map(str, sizes)), Override(kernel=kernel, values=values)
        variants.append(
            case.model_copy(update={"name": f"{case.name}@{name}", "override": override})
        )
    answers = answered(gate.target(trees["image"], card), variants)
    choices = [_choice(variant, answer, card, known) for variant, answer, _ in answers]
    choices.sort(key=lambda choice: choice.rank)
    return CaseTuning(case=case.name, kernel=kernel, limit_bytes=card.shared_bytes, choices=choices)


def _values(record: Record, names: Sequence[str]) -> dict[str, int]:
    blocks = {name: record.blocks[name] for name in names if name in record.blocks}
    return {**blocks, "num_warps": record.num_warps or 0, "num_stages": record.num_stages or 0}


def _tile(values: dict[str, int]) -> int:
    """How many results a block works on at once."""
    sides = ("BLOCK_M", "BLOCK_N", "BLOCK_H", "BLOCK_SIZE_M", "BLOCK_SIZE_N")
    return math.prod(value for name, value in values.items() if name in sides)


def _choice(
    variant: Case, answer: WorkerAnswer, card: Card, known: Mapping[str, dict[str, int]]
) -> Choice:
    assert variant.override is not None
    values, tile = variant.override.values, _tile(variant.override.values)
    who = [name for name, chosen in known.items() if chosen == values]
    record = next((r for r in answer.records if r.kernel == variant.override.kernel), None)
    if record is None or record.shared_bytes is None:
        message = (record.error if record else None) or answer.message or answer.ended
        return Choice(values=values, fits=False, tile=tile, who=who, message=message[:120])
    threads = 32 * (record.num_warps or 4)
    # the driver takes a kilobyte for each block, and hands out registers in eights
    by_shared = card.shared_bytes_per_sm // (record.shared_bytes + 1024)
    registers = -(-(record.registers or 1) // 8) * 8
    by_registers = card.registers_per_sm // (threads * registers)
    return Choice(
        values=values,
        fits=record.shared_bytes <= card.shared_bytes,
        shared_bytes=record.shared_bytes,
        registers=record.registers,
        spill_bytes=record.spill_bytes,
        tile=tile,
        blocks_per_sm=min(by_shared, by_registers, card.threads_per_sm // threads),
        who=who,
    )

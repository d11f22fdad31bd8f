"""Whether a card can run what a file holds: NVIDIA's compatibility rules as pure functions.

CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility":
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#binary-compatibility
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from pipeline.binary.fatbin import CUBIN, PTX, Target
from pipeline.binary.modules import broken_promise
from pipeline.gate.arch.facts import Facts

_NAME = re.compile(r"sm_(\d{2,3})([af]?)")
# Every card that CUDA 12 and 13 compile for.
ARCHITECTURES = (
    *(50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90),
    *(100, 101, 103, 110, 120, 121),
)


class ObjectVerdict(Enum):
    """How an object stands to a card, the worst first."""

    UNREADABLE = "unreadable"
    NO_KERNEL_IMAGE = "no kernel image"
    WRONG_VARIANT = "wrong variant"
    # It starts, but late: the driver compiles every kernel at first, and needs to be as new as the
    # toolkit that wrote the PTX (https://github.com/NVIDIA/nvbandwidth/issues/61).
    JIT = "jit"
    RUNS = "runs"
    NO_CUDA_CODE = "no CUDA code"


@dataclass(frozen=True)
class Judgement:
    """A verdict on an object, and how many of its modules have code for the card."""

    verdict: ObjectVerdict
    message: str
    running: int = 0
    jitted: int = 0
    modules: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return {"all": self.modules, "run": self.running, "jit": self.jitted}


def runs_on(target: Target, card: int) -> bool:
    """Whether machine code loads: same major, minor not above; `a` exactly, `f` in its family.

    Where the suffix is unknown only the exact card is sure: all three variants load there.
    """
    if target.kind != CUBIN:
        return False
    if target.suffix in ("a", None):
        return target.arch == card
    return target.arch // 10 == card // 10 and target.arch <= card


def jits_on(target: Target, card: int) -> bool:
    """Whether the driver can compile PTX: any older target; `a` exactly, `f` in its family."""
    if target.kind != PTX:
        return False
    if target.suffix == "a":
        return target.arch == card
    if target.suffix == "f":
        return target.arch // 10 == card // 10 and target.arch <= card
    return target.arch <= card


def judge(
    facts: Facts,
    arch: str,
    demanded: str | None = None,
    exactly: Collection[str] | None = None,
) -> Judgement:
    """The verdict on an object for a card such as `sm_120`.

    `exactly` is what every module of an object that was compiled here must hold.
    """
    if facts.problem:
        return Judgement(ObjectVerdict.UNREADABLE, f"unreadable: {facts.problem}")
    card = card_of(arch)
    running = jitted = total = 0
    for module in facts.modules:
        total += module.times
        # the driver takes PTX only where a module has no machine code that loads
        if any(runs_on(target, card) for target in module.targets):
            running += module.times
        elif any(jits_on(target, card) for target in module.targets):
            jitted += module.times
    lacking = _lacking(facts.targets, card, demanded)
    if exactly is not None:
        lacking = broken_promise((module.targets for module in facts.modules), exactly) or lacking
    if lacking and not total:
        verdict, message = ObjectVerdict.WRONG_VARIANT, f"no CUDA code where {demanded} is needed"
    elif not total:
        verdict, message = ObjectVerdict.NO_CUDA_CODE, "no CUDA code"
    elif not running and not jitted:
        verdict, message = ObjectVerdict.NO_KERNEL_IMAGE, "no kernel image"
    elif lacking:
        verdict, message = ObjectVerdict.WRONG_VARIANT, lacking
    elif not running:
        verdict, message = ObjectVerdict.JIT, "jit, if the driver is new enough for its PTX"
    else:
        verdict, message = ObjectVerdict.RUNS, "runs"
    return Judgement(verdict, message, running, jitted, total)


def _lacking(targets: set[Target], card: int, demanded: str | None) -> str:
    """What is there instead of the demanded variant; empty where it is there.

    `f` asks for the family's features, which `a` has too; `a` asks for exactly itself. A demand
    counts for every card that runs what it asks for: `sm_120f` for sm_121, too, `sm_120a` not.
    """
    if demanded is None or not answers(demanded, card):
        return ""
    wanted = {"a": ("a",), "f": ("f", "a"), "": ("", "f", "a", None)}[suffix_of(demanded)]
    # PTX is no answer: a demand is for machine code that was compiled as this variant
    here = [t for t in targets if runs_on(t, card)]
    if any(t.suffix in wanted for t in here):
        return ""
    have = ", ".join(sorted(map(str, here))) or "nothing for this card"
    return f"{have} where {demanded} is needed"


def answers(demanded: str, card: int) -> bool:
    """Whether a demand says something about a card."""
    return runs_on(Target(CUBIN, card_of(demanded), suffix_of(demanded)), card)


def card_of(arch: str) -> int:
    """`sm_120a` -> 120."""
    match = _NAME.fullmatch(arch)
    if match is None:
        raise ValueError(f"{arch!r} is not an architecture")
    return int(match[1])


def suffix_of(arch: str) -> str:
    """`sm_120a` -> `a`."""
    return arch[-1] if arch[-1] in "af" else ""

"""What workers report, and how that becomes a verdict on a case, a gate and an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pipeline.artifacts.containers.sandbox import Sandbox
from pipeline.core.model import FILE_VERSION, Digest, Frozen
from pipeline.core.verdict import GateVerdict, worst
from pipeline.images.gate.smem.cases import AcceptedKernel, KernelCase
from pipeline.images.gate.smem.environment import EnvironmentFacts
from pipeline.images.gate.smem.limits import Card

KernelVerdict = Literal["fits", "over", "accepted", "spare", "error"]
NumericsVerdict = Literal["right", "wrong", "unknown"]
# ptxas refuses an instruction or a form of it: no other size of block helps
_LACKING = re.compile(r"(?:Feature|Instruction) '([^']+)' not supported on \.target '(sm_\w+)'")


class Record(Frozen):
    """One kernel as Triton compiled it, or why it did not."""

    kernel: str
    module: str
    group: str | None = None  # configurations that an autotuner chooses among share one
    blocks: dict[str, int] = {}
    shared_bytes: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    seconds: float | None = None
    uses: list[str] = []  # TMA, or one program for each multiprocessor (persistent)
    faults: list[str] = []  # that this version of Triton is known to compile into it
    error: str | None = None


class Computed(Frozen):
    """How far one output of a call is from what it should be.

    Errors are shares of the sum of magnitudes that the right number is the sum of.
    """

    output: str
    elements: int
    unwritten: int  # still NaN, or infinite
    outside: int = 0  # numbers before or after the output that the call wrote over
    max_error: float | None = None
    max_share: float | None = None


class CaseReply(Frozen):
    """What any worker reports of one case."""

    case: str
    ended: str
    message: str = ""


class WorkerAnswer(CaseReply):
    """What a worker reports of a case of kernels."""

    ended: Literal[
        "called", "function gone", "stopped", "raised", "not imported", "died", "timed out"
    ]
    seconds: float = 0.0
    records: list[Record] = []
    computed: list[Computed] = []
    versions: dict[str, str] = {}
    stand_ins: list[str] = []


class KernelResult(Frozen):
    """A record, judged."""

    record: Record
    verdict: KernelVerdict
    message: str = ""


class CaseResult(Frozen):
    """A case, judged. Unknown is never passed."""

    gate: str
    name: str
    stands_for: list[str]
    verdict: GateVerdict
    message: str = ""
    kernels: list[KernelResult] = []
    seconds: float = 0.0
    cached: bool = False
    stand_ins: list[str] = []
    gone: bool = False  # none of the case's functions is in this version
    base: str = ""

    @property
    def worst(self) -> KernelResult | None:
        """The kernel that needs most, of those that count."""
        counted = [
            k for k in self.kernels if k.verdict != "spare" and k.record.shared_bytes is not None
        ]
        return max(counted, key=lambda k: k.record.shared_bytes or 0, default=None)


class KernelFunction(Frozen):
    """A kernel in an engine's code: where it is, and which functions launch it."""

    module: str
    name: str
    line: int
    launched_by: list[str] = []


class Coverage(Frozen):
    """How much of the engine's Triton code the cases reach."""

    kernels: int  # that host code launches, on the cards an image is for
    reached: int
    elsewhere: int = 0  # kernels for other makers' cards, and of the engine's tests
    helpers: int = 0  # functions that only kernels call
    idle: int = 0  # functions that nothing in the engine calls or launches
    rest: list[KernelFunction] = []


class NumericsResult(Frozen):
    """A case's numbers, judged. Unknown is never right."""

    gate: str
    name: str
    stands_for: list[str]
    reference: str
    verdict: NumericsVerdict
    message: str = ""
    tolerance: float
    reason: str
    computed: list[Computed] = []
    launches: list[Record] = []
    seconds: float = 0.0
    cached: bool = False
    base: str = ""


class NumericsResults(Frozen):
    """All cases' numbers, and with what they were computed."""

    verdict: NumericsVerdict
    versions: dict[str, str]
    repairs: list[str]  # of Triton's interpreter
    cases: list[NumericsResult]
    seconds: float = 0.0


class EngineResult(Frozen):
    """What a gate that runs an engine's code found of an image, and what decided it."""

    image: str
    platform: str
    image_digest: Digest | None = None  # of the image as built, where it is built
    engine: str
    engine_version: str
    engine_digest: Digest
    patches: list[str]
    environment: EnvironmentFacts
    worker: Digest
    verdict: GateVerdict
    sandbox: Sandbox | None = None  # what the engine's code could not reach, where any of it ran
    seconds: float = 0.0


class GateResult(EngineResult):
    """What the kernels of an image need, and whether a card has it."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    card: Card
    cases: list[CaseResult]
    coverage: Coverage | None = None
    numerics: NumericsResults | None = None  # of the patched kernels, on request

    @property
    def without_numbers(self) -> list[str]:
        """Cases that passed, without a size whose numbers were compared and judged right."""
        compared = self.numerics.cases if self.numerics else []
        # by base: one size that is compared stands for the others, which run the same code
        right = {(case.gate, case.base) for case in compared if case.verdict == "right"}
        passed = [case for case in self.cases if case.verdict == "passed"]
        return [case.name for case in passed if (case.gate, case.base) not in right]


def judge_case(
    case: KernelCase,
    answer: WorkerAnswer,
    card: Card,
    accepted: Sequence[AcceptedKernel],
    *,
    cached: bool,
) -> CaseResult:
    """Judges one case."""
    # an autotuner passes over what does not fit: one configuration of a group is enough
    roomy = {
        r.group
        for r in answer.records
        if r.group and r.shared_bytes is not None and r.shared_bytes <= card.shared_bytes
    }
    kernels = []
    for record in answer.records:
        needed, is_spare = record.shared_bytes, record.group in roomy
        verdict: KernelVerdict = "spare" if is_spare else "over"
        why = "another configuration fits" if is_spare else ""
        if needed is None:
            verdict, why = "spare" if is_spare else "error", record.error or ""
        elif needed <= card.shared_bytes:
            verdict, why = "fits", ""
        elif not is_spare:
            for known in accepted:
                is_it = known.kernel == record.kernel and known.covers(case.name)
                if is_it and needed <= known.most_bytes:
                    verdict, why = "accepted", known.reason
                    break
        kernels.append(KernelResult(record=record, verdict=verdict, message=why))
    overall_verdict, message = _verdict(case, answer, kernels)
    return CaseResult(
        gate=case.gate,
        name=case.name,
        stands_for=case.stands_for,
        verdict=overall_verdict,
        message=message,
        kernels=kernels,
        seconds=answer.seconds,
        cached=cached,
        stand_ins=answer.stand_ins,
        gone=answer.ended == "function gone",
        base=case.base,
    )


def _verdict(
    case: KernelCase, answer: WorkerAnswer, kernels: Sequence[KernelResult]
) -> tuple[GateVerdict, str]:
    # first of all: a kernel that is too large stays so, however the call then ended
    over = [k.record for k in kernels if k.verdict == "over"]
    if over:
        most = max(over, key=lambda r: r.shared_bytes or 0)
        means = f" ({', '.join(most.uses)})" if most.uses else ""
        return "failed", f"{most.kernel}{means} needs {most.shared_bytes} bytes"
    for kernel in kernels:
        if kernel.record.faults and kernel.verdict != "spare":
            version = answer.versions.get("triton", "this version")
            shown = "; ".join(kernel.record.faults)
            return "failed", f"{kernel.record.kernel}: Triton {version}: {shown}"
    broken = [k for k in kernels if k.verdict == "error"]
    for kernel in broken:
        if lacking := _LACKING.search(kernel.message):
            return "failed", f"{kernel.record.kernel} uses {lacking[1]}, which {lacking[2]} lacks"
    if answer.ended != "called":
        return "unknown", unanswered(case, answer)
    if broken:
        error = _placeless(broken[0].message)
        return "unknown", f"{broken[0].record.kernel} did not compile: {error}"
    # a call that no longer launches the kernel would otherwise pass without judging it
    seen = {k.record.kernel for k in kernels}
    if missing := [name for name in case.kernels if name not in seen]:
        return "unknown", f"{', '.join(missing)} was not compiled by this call"
    for kernel in kernels:
        spills = kernel.record.spill_bytes
        if kernel.record.kernel in case.spill_free and kernel.verdict == "fits":
            if spills is None:
                return "unknown", f"{kernel.record.kernel}: ptxas did not say what it spills"
            if spills:
                return "failed", f"{kernel.record.kernel} spills {spills} bytes"
    reason = next((k.message for k in kernels if k.verdict == "accepted"), None)
    return ("passed", "") if reason is None else ("accepted", reason)


def unanswered(case: KernelCase, answer: WorkerAnswer) -> str:
    """Why a case was not judged."""
    if answer.ended == "timed out":
        return f"took longer than {case.timeout_s} s and was stopped"
    message = _placeless(answer.message) or answer.ended
    if answer.ended == "not imported":
        return f"{message}; name its wheel in `wheels` of the image's gates/engine.yaml"
    return message


def _placeless(message: str) -> str:
    """Cuts off Triton's command for repeating it: the files that it names are gone by now."""
    return message.partition(" Repro command:")[0]


def overall_of_cases(cases: Sequence[CaseResult]) -> GateVerdict:
    """The verdict on all cases together."""
    return worst([case.verdict for case in cases], "unknown")


def fingerprint(cases: Sequence[CaseResult]) -> list[Any]:
    """Lists the kernels without times: equal for two engines that compile the same."""
    return [
        [case.name, case.verdict, [k.record.model_dump(exclude={"seconds"}) for k in case.kernels]]
        for case in cases
    ]

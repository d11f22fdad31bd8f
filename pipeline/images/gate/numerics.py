"""The numerics gate: do the kernels that fit compute the right thing?

In: an image that smem has opened, and `gates/numerics.yaml`. Out: `NumericsResults`, each case's
largest error and what is allowed for its types. The call is the case's own; what changes is the
size, and what is in the tensors. All inputs are seeded, and every output starts as NaN, so that a
number that the call did not write is not right.

Triton's interpreter runs the engine's own code on the CPU, with the block sizes that the engine
chooses for the card, and the result is compared with a float64 reference. It knows no registers and
no shared memory, so this does not judge fit; the other gates do that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, RootModel

from pipeline.core.errors import GateInvalid
from pipeline.core.model import Frozen, Name
from pipeline.core.yaml_file import read_yaml
from pipeline.images.gate.files import gate_files
from pipeline.images.gate.smem import cases as smem_cases
from pipeline.images.gate.smem.cases import CaseSpec, Gates, Identifier, KernelCase, Numerics
from pipeline.images.gate.smem.image_gate import ImageGate
from pipeline.images.gate.smem.results import (
    NumericsResult,
    NumericsResults,
    NumericsVerdict,
    WorkerAnswer,
    unanswered,
)
from pipeline.images.gate.smem.run import GateTarget, answered
from pipeline.images.gate.worker.interpreter import REPAIRS
from pipeline.images.spec.checkout import Checkout

# How far a result may be off, as a share of the sum of magnitudes it is the sum of, and why.
TOLERANCES: dict[smem_cases.Rounding, tuple[float, str]] = {
    "bfloat16": (
        2.0**-7,
        "every probability and the result are rounded to bfloat16, half a unit (2^-8) each;"
        " adding up in 16 bits is within that, and shows in a case with float32 inputs",
    ),
    "bfloat16 result": (
        2.0**-8,
        "a float32 sum, and a result that is rounded once to bfloat16 (2^-9 of itself); adding up"
        " in 16 bits is further off",
    ),
    "bfloat16 scores": (
        2.0**-5,
        "the scores too are multiplied and added up in bfloat16, which shifts every probability",
    ),
    "float8 probabilities": (
        2.0**-3,
        "every probability is rounded to fp8: by 2^-4 of itself, and by 2^-10 where it is small",
    ),
    "float32": (2.0**-14, "sums of a few hundred float32 products, each rounded at 2^-24"),
}


class NumericsSpec(Frozen):
    """The same call with small, seeded inputs, run for its numbers under Triton's interpreter.

    Tensors that the case leaves empty get random numbers, the outputs start as NaN. An entry is
    called as its case. With `like`, what it does not set is as in another entry. Under a name of
    its own it is then one more of the same call, and may set arguments that the case leaves out.
    """

    like: Name | None = None
    reference: smem_cases.Reference | None = None
    outputs: list[Identifier] = []
    rounds_to: smem_cases.Rounding = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 1
    dims: dict[Identifier, int] = {}
    each: dict[Identifier, list[int]] | None = None
    arguments: dict[Identifier, smem_cases.Argument] = {}
    timeout_s: Annotated[int, Field(gt=0, le=1800)] = 240


class NumericsFile(RootModel[dict[Name, dict[Name, NumericsSpec]]]):
    """Gate → case → how it is run for its numbers."""

    schema_name: ClassVar[str] = "numerics"


def read_numeric_cases(checkout: Checkout, image: str, gates: Gates) -> list[KernelCase]:
    """Reads every case of an image that is run for its numbers; none without such a file."""
    # an image's own file comes last, and its entries replace the shared ones
    specs: dict[tuple[str, str], tuple[Path, NumericsSpec]] = {}
    for path in gate_files(checkout, image, "numerics").values():
        if path.name == "numerics.yaml":
            read = read_yaml(path, NumericsFile, GateInvalid).root
            specs |= {(g, name): (path, spec) for g, x in read.items() for name, spec in x.items()}
    known = {(g, spec.name): spec for g, x in gates.gates.items() for spec in x.whole_cases()}
    cases: list[KernelCase] = []
    for (gate, name), (path, numerics) in specs.items():
        where, base = f"{path}: {gate}: {name}", name
        if numerics.like:
            other = specs.get((gate, numerics.like))
            if other is None or other[1].like:
                raise GateInvalid(f"{where}: there is no entry {numerics.like!r} of a case")
            base = name if (gate, name) in known else numerics.like
            like = {"like": numerics.like}
            numerics = smem_cases.filled(numerics, other[1]).model_copy(update=like)
        if (gate, base) not in known:
            raise GateInvalid(f"{path}: {gate}: there is no case {name!r}")
        if numerics.reference is None or not numerics.outputs:
            raise GateInvalid(f"{where}: reference and outputs are missing")
        spec, each = known[gate, base], numerics.each
        # the call stays the case's own: the same arguments, dimensions and functions of the engine
        for key in [*([] if numerics.like else numerics.arguments), *numerics.outputs]:
            if key not in spec.arguments:
                raise GateInvalid(f"{where}: the call has no argument {key!r}")
        for key in [*numerics.dims, *(each or {})]:
            if key not in {**spec.dims, **spec.each}:
                raise GateInvalid(f"{where}: the case has no dimension {key!r}")
        # a case's name is made from the numbers in `each`: other dimensions would name other cases
        if each is not None and set(each) != set(spec.each):
            raise GateInvalid(f"{where}: each must name the same dimensions as the case's")
        functions = (f for x in numerics.arguments.values() for f in smem_cases.called(x))
        if foreign := smem_cases.not_of(gates.setup.package, functions):
            raise GateInvalid(f"{where}: {foreign} is not a function of {gates.setup.package}")
        cases += numeric(gate, spec, numerics, name)
    for case in cases:
        for argument in case.arguments.values():
            smem_cases.require_small(case.name, argument)
    return cases


def numeric(gate: str, spec: CaseSpec, numerics: NumericsSpec, name: str) -> Iterator[KernelCase]:
    """Makes the case as it is run for its numbers, for every combination of dimensions."""
    small = spec.model_copy(
        update={
            "name": name,
            "dims": {**spec.dims, **numerics.dims},
            "each": spec.each if numerics.each is None else numerics.each,
            "arguments": {**spec.arguments, **numerics.arguments},
            "timeout_s": numerics.timeout_s,
        }
    )
    # sizes and arguments are in the case by now; a worker is given only the rest
    chosen = Numerics.model_validate(numerics.model_dump(include=set(Numerics.model_fields)))
    for case in smem_cases.expanded(gate, small):
        arguments: dict[str, Any] = {}
        for key, argument in case.arguments.items():
            tensor = argument.get("tensor")
            # A case needs what it fills itself: lengths, indices, masks. Whole numbers are indices
            # and lengths, where chance leads out of a tensor.
            is_empty = tensor and tensor["fill"] == "zeros" and tensor["values"] is None
            if is_empty and "float" in tensor["dtype"]:
                fill = "nan" if key in numerics.outputs else "random"
                argument = {"tensor": {**tensor, "fill": fill}}
            arguments[key] = argument
        update = {"arguments": arguments, "numerics": chosen, "base": spec.name}
        yield case.model_copy(update=update)


def numeric_cases(gate: ImageGate) -> list[KernelCase]:
    """The cases of an image that are also run for their numbers."""
    return read_numeric_cases(gate.context.checkout, gate.plan.spec.name, gate.gates)


def check_numbers(target: GateTarget, cases: Sequence[KernelCase]) -> NumericsResults:
    """Runs every case and judges its numbers."""
    start = time.monotonic()
    answers = answered(target, cases)
    results = []
    for case, answer, cached in answers:
        assert case.numerics is not None
        tolerance, reason = TOLERANCES[case.numerics.rounds_to]
        verdict, message = _verdict(case, case.numerics, answer, tolerance)
        result = NumericsResult(
            gate=case.gate,
            name=case.name,
            stands_for=case.stands_for,
            reference=case.numerics.reference,
            verdict=verdict,
            message=message,
            tolerance=tolerance,
            reason=reason,
            computed=answer.computed,
            launches=answer.records,
            seconds=answer.seconds,
            cached=cached,
            base=case.base,
        )
        results.append(result)
    found = {result.verdict for result in results}
    # no case at all is unknown, too
    overall: NumericsVerdict = "right" if found == {"right"} else "unknown"
    return NumericsResults(
        verdict="wrong" if "wrong" in found else overall,
        # all workers are in one environment, so all answers name the same versions
        versions={k: v for _, answer, _ in answers for k, v in answer.versions.items()},
        repairs=REPAIRS,
        cases=results,
        seconds=round(time.monotonic() - start, 3),
    )


def _verdict(
    case: KernelCase, numerics: Numerics, answer: WorkerAnswer, tolerance: float
) -> tuple[NumericsVerdict, str]:
    if answer.ended != "called":
        return "unknown", unanswered(case, answer)
    missing = set(case.kernels) - {record.kernel for record in answer.records}
    if missing:
        return "unknown", f"{', '.join(sorted(missing))} was not run by this call"
    compared = {computed.output: computed for computed in answer.computed}
    for output in numerics.outputs:
        got = compared.get(output)
        if got is None or not got.elements:
            return "unknown", f"{output} was not compared"
        if got.outside:
            return "wrong", f"{got.outside} numbers outside of {output} were written over"
        if got.unwritten or got.max_share is None:
            return "wrong", f"{got.unwritten} of {got.elements} numbers of {output} are missing"
        # NaN compares as false: only what is known to be near is right
        if not got.max_share <= tolerance:
            return "wrong", f"{output} is off by {got.max_share:.3g}, allowed are {tolerance:.3g}"
    return "right", ""

"""`gates/numerics.yaml`: which cases are also run for their numbers, and how.

The call is the case's own. What changes is the size, and what is in the tensors: nothing in it is
left to chance, and every output starts as NaN, so that what is not written is not right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, RootModel

from pipeline.errors import GateInvalid, SpecInvalid
from pipeline.gate.files import gate_files
from pipeline.gate.smem.case_spec import (
    Argument,
    CaseSpec,
    Fill,
    Identifier,
    Reference,
    Rounding,
    called,
    not_of,
)
from pipeline.gate.smem.cases import Case, Gates, Numerics, expanded, require_small
from pipeline.model import Frozen, Name
from pipeline.spec.checkout import Checkout
from pipeline.yaml_file import read_yaml


class NumericsSpec(Frozen):
    """The same call with small, seeded inputs, run for its numbers under Triton's interpreter.

    Tensors that the case leaves empty get random numbers, the outputs start as NaN. An entry is
    called as its case. With `like`, what it does not set is as in another entry. Under a name of
    its own it is then one more of the same call, and may set arguments that the case leaves out.
    """

    like: Name | None = None
    reference: Reference | None = None
    outputs: list[Identifier] = []
    rounds_to: Rounding = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 1
    dims: dict[Identifier, int] = {}
    each: dict[Identifier, list[int]] | None = None
    arguments: dict[Identifier, Argument] = {}
    timeout_s: Annotated[int, Field(gt=0, le=1800)] = 240

    def filled(self, other: NumericsSpec) -> NumericsSpec:
        """This entry, with what it does not set taken from another."""
        stated = {name: getattr(self, name) for name in self.model_fields_set}
        for name in ("arguments", "dims"):
            stated[name] = {**getattr(other, name), **stated.get(name, {})}
        return other.model_copy(update=stated)


class NumericsFile(RootModel[dict[Name, dict[Name, NumericsSpec]]]):
    """Gate → case → how it is run for its numbers."""

    schema_name: ClassVar[str] = "numerics"


def read_numeric_cases(checkout: Checkout, image: str, gates: Gates) -> list[Case]:
    """Every case of an image that is run for its numbers; none where the image has no such file."""
    specs: dict[tuple[str, str], tuple[Path, NumericsSpec]] = {}
    for path in gate_files(checkout, image, "numerics").values():
        if path.name == "numerics.yaml":
            specs |= _read(path)
    known = {
        (gate, spec.name): spec for gate, file in gates.gates.items() for spec in file.whole_cases()
    }
    cases: list[Case] = []
    for (gate, name), (path, numerics) in specs.items():
        where, base = f"{path}: {gate}: {name}", name
        if numerics.like:
            other = specs.get((gate, numerics.like))
            if other is None or other[1].like:
                raise GateInvalid(f"{where}: there is no entry {numerics.like!r} of a case")
            base = name if (gate, name) in known else numerics.like
            numerics = numerics.filled(other[1])
        if (gate, base) not in known:
            raise GateInvalid(f"{path}: {gate}: there is no case {name!r}")
        if numerics.reference is None or not numerics.outputs:
            raise GateInvalid(f"{where}: reference and outputs are missing")
        spec = known[gate, base]
        _require_same_call(where, spec, numerics, gates.setup.package)
        cases += numeric(gate, spec, numerics, name)
    for case in cases:
        for argument in case.arguments.values():
            require_small(case.name, argument)
    return cases


def _read(path: Path) -> dict[tuple[str, str], tuple[Path, NumericsSpec]]:
    """A file's entries by gate and case; in an image's own file they replace the shared ones."""
    try:
        gates = read_yaml(path, NumericsFile).root
    except SpecInvalid as error:
        raise GateInvalid(str(error), error.hint) from error
    return {
        (gate, case): (path, spec) for gate, specs in gates.items() for case, spec in specs.items()
    }


def _require_same_call(where: str, spec: CaseSpec, numerics: NumericsSpec, package: str) -> None:
    for name in [*([] if numerics.like else numerics.arguments), *numerics.outputs]:
        if name not in spec.arguments:
            raise GateInvalid(f"{where}: the call has no argument {name!r}")
    for name in [*numerics.dims, *(numerics.each or {})]:
        if name not in {**spec.dims, **spec.each}:
            raise GateInvalid(f"{where}: the case has no dimension {name!r}")
    # a case's name is made from the numbers in `each`: other dimensions would name other cases
    if numerics.each is not None and set(numerics.each) != set(spec.each):
        raise GateInvalid(f"{where}: each must name the same dimensions as the case's")
    functions = (f for argument in numerics.arguments.values() for f in called(argument))
    if foreign := not_of(package, functions):
        raise GateInvalid(f"{where}: {foreign} is not a function of {package}")


def numeric(gate: str, spec: CaseSpec, numerics: NumericsSpec, name: str) -> Iterator[Case]:
    """The case as it is run for its numbers, for every combination of dimensions."""
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
    for case in expanded(gate, small):
        arguments = {
            name: _filled(argument, "nan" if name in numerics.outputs else "random")
            for name, argument in case.arguments.items()
        }
        yield case.model_copy(
            update={"arguments": arguments, "numerics": chosen, "base": spec.name}
        )


def _filled(argument: dict[str, Any], fill: Fill) -> dict[str, Any]:
    """A tensor of floats that was left at zero gets something else to hold."""
    tensor = argument.get("tensor")
    # what a case fills itself, it needs in order to be called: lengths, indices, masks
    if not tensor or tensor["fill"] != "zeros" or tensor["values"] is not None:
        return argument
    # whole numbers are indices and lengths, where chance leads out of a tensor
    if "float" not in tensor["dtype"]:
        return argument
    return {"tensor": {**tensor, "fill": fill}}

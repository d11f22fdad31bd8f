"""Cases as workers are given them: every dimension a number, every argument plain JSON."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import GateInvalid, SpecInvalid
from pipeline.gate.files import EngineSetup, gate_files, read_setup
from pipeline.gate.smem.case_spec import Argument, CaseSpec, GateFile, Numerics, Size
from pipeline.model import Frozen, Name
from pipeline.spec.checkout import Checkout
from pipeline.yaml_file import read_yaml

# 128 Mi elements: a tensor of half a gigabyte in float32, which any laptop has.
MOST_ELEMENTS = 1 << 27
# Each takes a core for seconds, and a slip in `each` multiplies them.
MOST_CASES = 500
# What a case has as its spec has it.
_COPIED = ("stands_for", "function", "optional", "kernels", "spill_free", "timeout_s")


class Override(Frozen):
    """Launch parameters to try in place of the engine's own choice for one kernel."""

    kernel: str
    values: dict[str, int]


class Case(Frozen):
    """A case with every dimension a number: what a worker is given."""

    gate: Name
    name: str
    stands_for: list[str]
    function: list[str]
    arguments: dict[str, Any]
    optional: list[str]
    kernels: list[str]
    spill_free: list[str]
    timeout_s: int
    override: Override | None = None
    numerics: Numerics | None = None
    base: str = ""  # the name that `each` made this one from


class Gates(Frozen):
    """All gates of an image."""

    setup: EngineSetup
    gates: dict[Name, GateFile]

    def cases(self, only: str | None = None) -> list[Case]:
        return [
            case
            for name, gate in sorted(self.gates.items())
            if only is None or name == only
            for spec in gate.whole_cases()
            for case in expanded(name, spec)
        ]


def read_gates(checkout: Checkout, image: str) -> Gates:
    """Reads every gate of an image; an image without any is an error."""
    try:
        setup = read_setup(checkout, image)
        gates: dict[str, GateFile] = {}
        # shared files come before the image's own, which add to them
        for path in gate_files(checkout, image, "smem").values():
            if path.name == "engine.yaml":
                continue
            file, shared = read_yaml(path, GateFile), gates.get(path.stem)
            if file.engine != setup.package:
                raise GateInvalid(f"{path}: engine: is not {setup.package}")
            gates[path.stem] = shared.with_own(file) if shared else file
    except SpecInvalid as error:
        raise GateInvalid(str(error), error.hint) from error
    read = Gates(setup=setup, gates=gates)
    _require_sound(read, checkout.folder(image) / "gates")
    return read


def _require_sound(gates: Gates, folder: Path) -> None:
    for name, gate in gates.gates.items():
        try:
            if not gate.whole_cases():
                raise ValueError("it has no cases")
        except ValueError as error:
            raise GateInvalid(f"{folder / name}.yaml: {error}") from error
    cases = gates.cases()
    # only now: two files, or two sizes that `each` makes, may give the same name
    doubled = [name for name, n in Counter(case.name for case in cases).items() if n > 1]
    if doubled:
        raise GateInvalid(f"{folder}: two cases are called {doubled[0]}")
    if not cases or len(cases) > MOST_CASES:
        raise GateInvalid(f"{folder}: {len(cases)} cases; between 1 and {MOST_CASES} are allowed")
    for case in cases:
        for argument in case.arguments.values():
            require_small(case.name, argument)
    # a name that fits no case would accept nothing
    for name, accepted in ((n, a) for n, gate in gates.gates.items() for a in gate.accepted):
        for each in accepted.cases:
            one = accepted.model_copy(update={"case": each})
            if not any(case.gate == name and one.covers(case.name) for case in cases):
                raise GateInvalid(f"{folder / name}.yaml: accepted: there is no case {each!r}")


def require_small(name: str, argument: Any) -> None:
    """No case may ask for more memory than a laptop has."""
    if isinstance(argument, dict):
        if isinstance(argument.get("tensor"), dict):
            elements = math.prod(max(0, size) for size in argument["tensor"]["shape"])
            if elements > MOST_ELEMENTS:
                raise GateInvalid(f"{name}: a tensor of {elements} elements is too large")
        argument = list(argument.values())
    for inner in argument if isinstance(argument, list) else []:
        require_small(name, inner)


def expanded(gate: str, spec: CaseSpec) -> Iterator[Case]:
    """Makes one case for every combination of `each`, with all sizes worked out."""
    same = {name: getattr(spec, name) for name in _COPIED}
    for values in itertools.product(*spec.each.values()):
        sizes = {**spec.dims, **dict(zip(spec.each, values, strict=True))}
        label = "-".join([spec.name, *map(str, values)])
        arguments = {key: _resolved(arg, sizes, label) for key, arg in spec.arguments.items()}
        yield Case(gate=gate, name=label, arguments=arguments, base=spec.name, **same)


def _resolved(argument: Argument, sizes: Mapping[str, int], label: str) -> dict[str, Any]:
    """Writes an argument as plain JSON, its sizes as numbers."""

    def number(size: Size) -> int:
        return size_of(size, sizes, label)

    def all_of(named: Mapping[str, Argument]) -> dict[str, Any]:
        return {key: _resolved(inner, sizes, label) for key, inner in named.items()}

    if tensor := argument.tensor:
        numbers = {"shape": [number(s) for s in tensor.shape], "step": number(tensor.step)}
        values = None if tensor.values is None else [number(v) for v in tensor.values]
        return {"tensor": {**tensor.model_dump(), **numbers, "values": values}}
    if argument.view:
        return {"view": {"of": argument.view.of, "columns": number(argument.view.columns)}}
    if argument.route:
        return {"route": argument.route.model_dump()}
    if call := argument.call:
        functions = [call.function] if isinstance(call.function, str) else call.function
        item = {} if call.item is None else {"item": call.item}
        return {"call": {"function": functions, "arguments": all_of(call.arguments), **item}}
    if argument.size is not None:
        return {"value": number(argument.size)}
    if argument.items is not None:
        return {"items": [_resolved(a, sizes, label) for a in argument.items]}
    if argument.mapping is not None:
        return {"mapping": all_of(argument.mapping)}
    if argument.fields is not None:
        return {"fields": all_of(argument.fields)}
    return argument.model_dump(exclude_unset=True)


def size_of(size: Size, sizes: Mapping[str, int], label: str) -> int:
    """A size as a number: products of numbers and named dimensions."""
    if isinstance(size, int):
        return size
    product = 1
    for part in size.split("*"):
        if re.fullmatch(r"\d{1,12}", part):
            product *= int(part)
        elif part in sizes:
            product *= sizes[part]
        else:
            raise GateInvalid(f"{label}: there is no dimension {part!r}")
    return product

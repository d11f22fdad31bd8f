"""`images/<name>/gates/smem-*.yaml`: which engine functions are called, with what, and for whom.

A case says how to call one of the engine's own wrapper functions, so that the engine's own choice
of block sizes is what gets compiled. It is data: nothing in it runs but functions of the engine's
own package, and arguments are tensors, numbers and plain words.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.errors import GateInvalid, SpecInvalid
from pipeline.model import Frozen, Name
from pipeline.spec.checkout import Checkout
from pipeline.yaml_file import read_yaml

MOST_ELEMENTS = 1 << 27
MOST_CASES = 500

Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Module = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)
]


def _is_plain(name: str) -> str:
    if any(part.startswith("__") for part in name.replace(":", ".").split(".")):
        raise ValueError("names of Python's own (`__…`) are not for cases")
    return name


# a module and a name in it
Function = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", max_length=300),
    AfterValidator(_is_plain),
]
# a number, a dimension's name, or a product of them: 256, "tokens", "2*tokens"
Size = int | Annotated[str, StringConstraints(pattern=r"^\w+(\*\w+){0,3}$", max_length=80)]
Dtype = Literal[
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint8",
]
# random: normal numbers; coin: 0 or 1; permutation: each index once; nan: to be written by the call
Fill = Literal["zeros", "ones", "arange", "random", "coin", "permutation", "nan"]
# What a kernel's result is compared with; each is a definition of our own, in float64.
Reference = Literal[
    "extend-attention",
    "extend-attention-unified",
    "decode-attention",
    "prefill-attention",
    "paged-decode-attention",
    "prefix-prefill",
    "unified-attention",
    "fused-moe",
]
# The narrowest type that a kernel rounds to on its way, which bounds how far off it may be.
Rounding = Literal["bfloat16", "bfloat16 scores", "float8 probabilities", "float32"]
Upstream = Annotated[str, StringConstraints(pattern=r"^https://\S+$", max_length=300)]
Reason = Annotated[str, StringConstraints(min_length=20, max_length=500)]


class TensorArgument(Frozen):
    """A tensor: its shape, its type, and what is in it where that matters."""

    shape: list[Size] = Field(max_length=8)
    dtype: Dtype = "bfloat16"
    fill: Fill = "zeros"
    step: Size = 1  # of arange
    values: list[Size] | None = Field(default=None, max_length=64)


class ViewArgument(Frozen):
    """The first columns of another argument's last dimension, as MLA's V is a view of K."""

    of: Word
    columns: Size


class RouteArgument(Frozen):
    """What sorting tokens by expert gives: pairs of token and expert, in blocks of one expert each.

    `to` names the expert of every pair. Blocks have the size that the call's configuration asks
    for, which must stand above; what fills a block up is a number past the last pair.
    """

    part: Literal["pairs", "experts", "count"]
    to: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=256)
    config: Word = "config"


class CallArgument(Frozen):
    """What another function of the engine returns, e.g. its default configuration."""

    function: Function
    arguments: dict[Word, Argument] = {}


class Argument(Frozen):
    """One argument in long form; exactly one of the fields is set."""

    tensor: TensorArgument | None = None
    view: ViewArgument | None = None
    route: RouteArgument | None = None
    call: CallArgument | None = None
    size: Size | None = None
    dtype: Dtype | None = None
    triton_dtype: Dtype | None = None
    device: Literal["cuda", "cpu"] | None = None
    items: list[Argument] | None = Field(default=None, max_length=64)
    mapping: dict[Word, Argument] | None = None
    value: float | int | bool | Word | None = None
    none: Literal[True] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        """`null`, numbers, truth values and words may stand for themselves."""
        if given is None:
            return {"none": True}
        return {"value": given} if isinstance(given, bool | int | float | str) else given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The long form, and beside it the short one."""
        made = handler(core_schema)
        inner = handler.resolve_ref_schema(made)
        long = {**inner, "minProperties": 1, "maxProperties": 1}
        inner.clear()
        words = ("null", "boolean", "number", "string")
        inner["anyOf"] = [long, *({"type": word} for word in words)]
        return made

    @model_validator(mode="after")
    def _says_one_thing(self) -> Argument:
        if len(self.model_fields_set) != 1:
            raise ValueError("an argument is exactly one thing")
        return self


class AcceptedKernel(Frozen):
    """A kernel known to be over the limit, with the reason and where it is being fixed."""

    kernel: Word
    case: str | list[str] | None = None  # all cases, where none is named
    most_bytes: Annotated[int, Field(gt=0)]
    reason: Reason
    upstream: list[Upstream] = Field(min_length=1)

    def covers(self, case: str) -> bool:
        """Whether a case is meant: by its name, or as one of the sizes that `each` makes of it."""
        if self.case is None:
            return True
        names = [self.case] if isinstance(self.case, str) else self.case
        return any(re.fullmatch(rf"{re.escape(name)}(-\d+)*", case) for name in names)


class CaseSpec(Frozen):
    """One call, or with `each` one for every combination of dimensions.

    With `like`, what is not said here is as in a case above it; arguments and dimensions one by
    one, everything else as a whole.
    """

    name: Name
    like: Name | None = None
    stands_for: list[str] = []
    function: list[Function] = Field(default=[], max_length=8)
    dims: dict[Word, int] = {}
    each: dict[Word, list[int]] = {}
    arguments: dict[Word, Argument] = {}
    # arguments that other versions of the function do not know and may be left out for them
    optional: list[Word] = []
    kernels: list[Word] = []
    spill_free: list[Word] = []
    timeout_s: Annotated[int, Field(gt=0, le=1800)] = 240

    def filled(self, other: CaseSpec) -> CaseSpec:
        """This case with what it does not say taken from another."""
        said = {name: getattr(self, name) for name in self.model_fields_set - {"like"}}
        for name in ("arguments", "dims"):
            said[name] = {**getattr(other, name), **said.get(name, {})}
        return other.model_copy(update=said)


class GateFile(Frozen):
    """One gate: cases that must fit. A patch names the gate that proves it."""

    engine: Name
    why: Annotated[str, StringConstraints(min_length=20)]
    cases: list[CaseSpec] = Field(min_length=1)
    accepted: list[AcceptedKernel] = []

    def whole_cases(self) -> list[CaseSpec]:
        """The cases with everything they take from others."""
        found: dict[str, CaseSpec] = {}
        for case in self.cases:
            if case.name in found:
                raise ValueError("two cases have one name")
            if case.like is not None and case.like not in found:
                raise ValueError(f"{case.name}: there is no case {case.like!r} above it")
            found[case.name] = case.filled(found[case.like]) if case.like else case
        return list(found.values())

    @model_validator(mode="after")
    def _stays_in_the_engine(self) -> GateFile:
        package = self.engine.replace("-", "_")
        for case in self.whole_cases():
            for field in ("stands_for", "function", "kernels"):
                if not getattr(case, field):
                    raise ValueError(f"{case.name}: {field} is missing")
            for function in _functions(case):
                if function.partition(":")[0].partition(".")[0] != package:
                    raise ValueError(f"{function}: is not a function of {package}")
        return self


def _functions(case: CaseSpec) -> Iterator[str]:
    yield from case.function
    for argument in case.arguments.values():
        yield from called(argument)


def called(argument: Argument) -> Iterator[str]:
    """Functions that an argument's value is made by."""
    below = [*(argument.items or []), *(argument.mapping or {}).values()]
    if argument.call:
        yield argument.call.function
        below += argument.call.arguments.values()
    for inner in below:
        yield from called(inner)


class Override(Frozen):
    """Launch parameters to try in place of the engine's own choice for one kernel."""

    kernel: str
    values: dict[str, int]


class Numerics(Frozen):
    """What a case's numbers are compared with."""

    reference: Reference
    outputs: list[str]
    rounds_to: Rounding
    seed: int


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


class EngineSetup(Frozen):
    """`gates/engine.yaml`: how the engine's package is imported outside its own server."""

    package: Name
    # Packages whose own __init__.py is passed over, because it would start the whole engine.
    bare: list[Module] = []
    # Wheels beyond torch, Triton and what those need that the cases really use.
    wheels: list[Name] = []


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

    def accepted(self, gate: str) -> list[AcceptedKernel]:
        return self.gates[gate].accepted


def read_gates(checkout: Checkout, image: str) -> Gates:
    """Every gate of an image; an image without any is an error that says so."""
    folder = checkout.folder(image) / "gates"
    if not (folder / "engine.yaml").is_file():
        raise GateInvalid(f"{image}: has no gates ({folder} holds no engine.yaml)")
    try:
        setup = read_yaml(folder / "engine.yaml", EngineSetup)
        found = {
            path.stem: read_yaml(path, GateFile) for path in sorted(folder.glob("smem-*.yaml"))
        }
    except SpecInvalid as error:
        raise GateInvalid(str(error)) from error
    return _checked(Gates(setup=setup, gates=found), folder)


def _checked(gates: Gates, folder: Path) -> Gates:
    for name, gate in gates.gates.items():
        if gate.engine != gates.setup.package:
            raise GateInvalid(f"{folder / name}.yaml: engine: is not {gates.setup.package}")
    cases = gates.cases()
    doubled = [name for name, n in Counter(case.name for case in cases).items() if n > 1]
    if doubled:
        raise GateInvalid(f"{folder}: two cases are called {doubled[0]}")
    if not cases or len(cases) > MOST_CASES:
        raise GateInvalid(f"{folder}: {len(cases)} cases; between 1 and {MOST_CASES} are allowed")
    for case in cases:
        for argument in case.arguments.values():
            require_small(case.name, argument)
    for name in gates.gates:
        _require_known(name, gates, folder)
    return gates


def _require_known(name: str, gates: Gates, folder: Path) -> None:
    """What is accepted must be there: a name that fits nothing would accept nothing."""
    cases = [case.name for case in gates.cases(only=name)]
    for accepted in gates.accepted(name):
        for each in [accepted.case] if isinstance(accepted.case, str) else accepted.case or []:
            one = accepted.model_copy(update={"case": each})
            if not any(one.covers(case) for case in cases):
                raise GateInvalid(f"{folder / name}.yaml: accepted: there is no case {each!r}")


def require_small(name: str, argument: Any) -> None:
    """No case may ask for more memory than a laptop has."""
    if isinstance(argument, dict):
        if isinstance(argument.get("tensor"), dict):
            elements = 1
            for size in argument["tensor"]["shape"]:
                elements *= max(0, size)
            if elements > MOST_ELEMENTS:
                raise GateInvalid(f"{name}: a tensor of {elements} elements is too large")
        for inner in argument.values():
            require_small(name, inner)
    elif isinstance(argument, list):
        for inner in argument:
            require_small(name, inner)


def expanded(gate: str, spec: CaseSpec) -> Iterator[Case]:
    """One case for every combination of `each`, with all sizes worked out."""
    names = list(spec.each)
    for values in itertools.product(*spec.each.values()):
        chosen = dict(zip(names, values, strict=True))
        sizes = {**spec.dims, **chosen}
        label = "-".join([spec.name, *map(str, values)])
        arguments = {key: _resolved(arg, sizes, label) for key, arg in spec.arguments.items()}
        yield Case(
            gate=gate,
            name=label,
            stands_for=spec.stands_for,
            function=spec.function,
            arguments=arguments,
            optional=spec.optional,
            kernels=spec.kernels,
            spill_free=spec.spill_free,
            timeout_s=spec.timeout_s,
            base=spec.name,
        )


def _resolved(argument: Argument, sizes: Mapping[str, int], label: str) -> dict[str, Any]:
    """An argument as plain JSON, its sizes as numbers."""

    def number(size: Size) -> int:
        return size_of(size, sizes, label)

    if argument.tensor:
        tensor = argument.tensor
        values = None if tensor.values is None else [number(v) for v in tensor.values]
        return {
            "tensor": {
                "shape": [number(s) for s in tensor.shape],
                "dtype": tensor.dtype,
                "fill": tensor.fill,
                "step": number(tensor.step),
                "values": values,
            }
        }
    if argument.view:
        return {"view": {"of": argument.view.of, "columns": number(argument.view.columns)}}
    if argument.route:
        return {"route": argument.route.model_dump()}
    if argument.call:
        inner = {k: _resolved(a, sizes, label) for k, a in argument.call.arguments.items()}
        return {"call": {"function": argument.call.function, "arguments": inner}}
    if argument.size is not None:
        return {"value": number(argument.size)}
    if argument.items is not None:
        return {"items": [_resolved(a, sizes, label) for a in argument.items]}
    if argument.mapping is not None:
        return {"mapping": {k: _resolved(a, sizes, label) for k, a in argument.mapping.items()}}
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

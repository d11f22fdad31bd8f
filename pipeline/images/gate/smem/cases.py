"""Cases: `gates/smem-*.yaml` as people write them, and as workers are given them.

A case describes how to call one of the engine's own wrapper functions, so that the engine's own
choice of block sizes is what gets compiled. It is data: nothing in it runs but functions of the
engine's own package, and arguments are tensors, numbers and names. A worker is given every
dimension as a number and every argument as plain JSON.

An image may share its files with others of the same engine (`shared` in gates/engine.yaml). A file
of its own with the same name then adds to the shared one: a case of a new name is one more, a case
of a known name changes the fields that it sets, and what it accepts is for this image alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, StringConstraints, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.core.errors import GateInvalid, SpecInvalid
from pipeline.core.files import read_limited
from pipeline.core.model import Frozen, Name
from pipeline.core.yaml_file import MAX_FILE_BYTES, parse_yaml
from pipeline.images.gate.files import EngineSetup, gate_files, read_setup
from pipeline.images.spec.checkout import Checkout

# 128 Mi elements: a tensor of half a gigabyte in float32, which any laptop has.
MOST_ELEMENTS = 1 << 27
# Each takes a core for seconds, and a slip in `each` multiplies them.
MOST_CASES = 1000
# What a case has as its spec has it.
_COPIED = ("stands_for", "function", "optional", "kernels", "spill_free", "timeout_s")

Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


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
Rounding = Literal[
    "bfloat16", "bfloat16 result", "bfloat16 scores", "float8 probabilities", "float32"
]
Upstream = Annotated[str, StringConstraints(pattern=r"^https://\S+$", max_length=300)]
# Long enough that it must say something to a reader a year later.
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

    of: Identifier
    columns: Size


class RouteArgument(Frozen):
    """What sorting tokens by expert gives: pairs of token and expert, in blocks of one expert each.

    `to` names the expert of every pair, -1 for one that another rank has. Blocks have the size that
    the call's configuration asks for, which must stand above; what fills a block up is a number
    past the last pair.
    """

    part: Literal["pairs", "experts", "count"]
    to: list[Annotated[int, Field(ge=-1)]] = Field(min_length=1, max_length=256)
    config: Identifier = "config"


class CallArgument(Frozen):
    """What another function of the engine returns, e.g. its default configuration.

    Of several names, the first that the version has is called. Of several values that it returns,
    `item` counts from 0.
    """

    function: Function | Annotated[list[Function], Field(min_length=1, max_length=8)]
    arguments: dict[Identifier, Argument] = {}
    item: Annotated[int, Field(ge=0, le=15)] | None = None


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
    mapping: dict[Identifier, Argument] | None = None
    fields: dict[Identifier, Argument] | None = None  # of an object, where no more of it is used
    value: float | int | bool | Identifier | None = None
    none: Literal[True] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        """`null`, numbers, truth values and names may stand for themselves."""
        if given is None:
            return {"none": True}
        return {"value": given} if isinstance(given, bool | int | float | str) else given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describes the long form, and the short one."""
        made = handler(core_schema)
        inner = handler.resolve_ref_schema(made)
        long = {**inner, "minProperties": 1, "maxProperties": 1}
        inner.clear()
        short = [{"type": name} for name in ("null", "boolean", "number", "string")]
        inner["anyOf"] = [long, *short]
        return made

    @model_validator(mode="after")
    def _is_one_thing(self) -> Argument:
        if len(self.model_fields_set) != 1:
            raise ValueError("an argument is exactly one thing")
        return self


class AcceptedKernel(Frozen):
    """A kernel known to be over the limit, with the reason and where it is being fixed."""

    kernel: Identifier
    case: str | list[str] | None = None  # all cases, where none is named
    # up to here only: a later version that needs more fails again
    most_bytes: Annotated[int, Field(gt=0)]
    reason: Reason
    upstream: list[Upstream] = Field(min_length=1)

    @property
    def cases(self) -> list[str]:
        return [self.case] if isinstance(self.case, str) else self.case or []

    def covers(self, case: str) -> bool:
        """Whether a case is meant: by its name, or as one of the sizes that `each` makes of it."""
        sizes = (rf"{re.escape(name)}(-\d+)*" for name in self.cases)
        return self.case is None or any(re.fullmatch(pattern, case) for pattern in sizes)


class CaseSpec(Frozen):
    """One call, or with `each` one for every combination of dimensions.

    With `like`, what is not set here is as in a case above it; arguments and dimensions one by
    one, everything else as a whole. Of several functions, the first that the version has is called.
    """

    name: Name
    like: Name | None = None
    stands_for: list[str] = []
    function: list[Function] = Field(default=[], max_length=8)
    dims: dict[Identifier, int] = {}
    each: dict[Identifier, list[int]] = {}
    arguments: dict[Identifier, Argument] = {}
    # arguments that other versions of the function do not know and may be left out for them
    optional: list[Identifier] = []
    kernels: list[Identifier] = []
    spill_free: list[Identifier] = []
    # ptxas takes minutes over the largest tiles; a call that hangs must end all the same
    timeout_s: Annotated[int, Field(gt=0, le=1800)] = 240


Spec = TypeVar("Spec", bound=Frozen)


def filled(spec: Spec, other: Spec) -> Spec:
    """Takes what a spec does not set from another; arguments and dimensions one by one."""
    stated = {name: getattr(spec, name) for name in spec.model_fields_set - {"like"}}
    for name in ("arguments", "dims"):
        stated[name] = {**getattr(other, name), **stated.get(name, {})}
    return other.model_copy(update=stated)


class Numerics(Frozen):
    """What a case's numbers are compared with."""

    reference: Reference
    outputs: list[Identifier] = Field(min_length=1)
    rounds_to: Rounding = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 1


class GateFile(Frozen):
    """One gate: cases that must fit. A patch names the gate that proves it."""

    schema_name: ClassVar[str] = "gate"

    engine: Name
    why: Annotated[str, StringConstraints(min_length=20)]
    cases: list[CaseSpec] = []
    accepted: list[AcceptedKernel] = []

    def whole_cases(self) -> list[CaseSpec]:
        """The cases with everything they take from others."""
        whole: dict[str, CaseSpec] = {}
        for case in self.cases:
            if case.like is not None and case.like not in whole:
                raise ValueError(f"{case.name}: there is no case {case.like!r} above it")
            whole[case.name] = filled(case, whole[case.like]) if case.like else case
        for case in whole.values():
            for field in ("stands_for", "function", "kernels"):
                if not getattr(case, field):
                    raise ValueError(f"{case.name}: {field} is missing")
        return list(whole.values())

    @model_validator(mode="after")
    def _stays_in_the_engine(self) -> GateFile:
        functions = [function for case in self.cases for function in case.function]
        made = [argument for case in self.cases for argument in case.arguments.values()]
        functions += [function for argument in made for function in called(argument)]
        if foreign := not_of(self.engine, functions):
            raise ValueError(f"{foreign}: is not a function of {self.engine}")
        if len({case.name for case in self.cases}) < len(self.cases):
            raise ValueError("two cases have one name")
        return self


def not_of(project: str, functions: Iterable[str]) -> str | None:
    """Finds the first function outside a project's package: cases run nothing but the engine."""
    package = project.replace("-", "_")
    return next((f for f in functions if re.split("[.:]", f)[0] != package), None)


def called(argument: Argument) -> Iterator[str]:
    """Lists the functions that make an argument's value."""
    named = {**(argument.mapping or {}), **(argument.fields or {})}
    below = [*(argument.items or []), *named.values()]
    if argument.call:
        names = argument.call.function
        yield from [names] if isinstance(names, str) else names
        below += argument.call.arguments.values()
    for inner in below:
        yield from called(inner)


class Override(Frozen):
    """Launch parameters to try in place of the engine's own choice for one kernel."""

    kernel: str
    values: dict[str, int]


class KernelCase(Frozen):
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

    def cases(self, only: str | None = None) -> list[KernelCase]:
        return [case for case in self._expanded if only is None or case.gate == only]

    @cached_property
    def _expanded(self) -> list[KernelCase]:
        return [
            case
            for name, gate in sorted(self.gates.items())
            for spec in gate.whole_cases()
            for case in expanded(name, spec)
        ]


def read_gates(checkout: Checkout, image: str) -> Gates:
    """Reads every gate of an image; an image without any is an error."""
    try:
        setup = read_setup(checkout, image)
        # shared files come before the image's own, which add to them
        files = tuple(
            (path, read_limited(path, MAX_FILE_BYTES, SpecInvalid))
            for path in gate_files(checkout, image, "smem").values()
            if path.name != "engine.yaml"
        )
    except SpecInvalid as error:
        raise GateInvalid(str(error), error.hint) from error
    return _gates_in(checkout.folder(image) / "gates", setup.model_dump_json(), files)


# A command asks for the same image's gates several times, and looks through those of all images.
# Keyed by content, so an edited file is never answered from here.
@lru_cache(maxsize=64)
def _gates_in(folder: Path, setup_json: str, files: tuple[tuple[Path, bytes], ...]) -> Gates:
    setup = EngineSetup.model_validate_json(setup_json)
    gates: dict[str, GateFile] = {}
    for path, data in files:
        file = parse_yaml(data, GateFile, path, GateInvalid)
        if file.engine != setup.package:
            raise GateInvalid(f"{path}: engine: is not {setup.package}")
        if shared := gates.get(path.stem):
            specs = {case.name: case for case in shared.cases}
            for spec in file.cases:
                known = specs.get(spec.name)
                specs[spec.name] = filled(spec, known) if known else spec
            accepted = [*shared.accepted, *file.accepted]
            update = {"cases": list(specs.values()), "accepted": accepted}
            file = shared.model_copy(update=update)
        gates[path.stem] = file
    read = Gates(setup=setup, gates=gates)
    for name, gate in gates.items():
        try:
            if not gate.whole_cases():
                raise ValueError("it has no cases")
        except ValueError as error:
            raise GateInvalid(f"{folder / name}.yaml: {error}") from error
    cases = read.cases()
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
    for name, kernel in (
        (name, kernel) for name, gate in gates.items() for kernel in gate.accepted
    ):
        for each in kernel.cases:
            one = kernel.model_copy(update={"case": each})
            if not any(case.gate == name and one.covers(case.name) for case in cases):
                raise GateInvalid(f"{folder / name}.yaml: accepted: there is no case {each!r}")
    return read


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


def expanded(gate: str, spec: CaseSpec) -> Iterator[KernelCase]:
    """Makes one case for every combination of `each`, with all sizes worked out."""
    same = {name: getattr(spec, name) for name in _COPIED}
    for values in itertools.product(*spec.each.values()):
        sizes = {**spec.dims, **dict(zip(spec.each, values, strict=True))}
        label = "-".join([spec.name, *map(str, values)])
        arguments = {key: _resolved(arg, sizes, label) for key, arg in spec.arguments.items()}
        yield KernelCase(gate=gate, name=label, arguments=arguments, base=spec.name, **same)


def _resolved(argument: Argument, sizes: Mapping[str, int], label: str) -> dict[str, Any]:
    """Writes an argument as plain JSON, its sizes as numbers."""

    def number(size: Size) -> int:
        if isinstance(size, int):
            return size
        # products of numbers and named dimensions
        product = 1
        for part in size.split("*"):
            if re.fullmatch(r"\d{1,12}", part):
                product *= int(part)
            elif part in sizes:
                product *= sizes[part]
            else:
                raise GateInvalid(f"{label}: there is no dimension {part!r}")
        return product

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

"""An engine function's arguments, made from a case's description of them."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

from .engines import find
from .errors import Json, Stopped

# Numbers before and after each tensor that belong to nobody: NaN, or 0 where there is none. A
# kernel that lost a mask reads NaN instead of whatever is next in memory. Around an output it
# is a number instead: NaN that is written over NaN would leave no trace.
GUARD = 1 << 18
_AROUND_OUTPUTS = 3


def build(argument: Json, made: Json, package: str) -> Any:
    """An argument's value from its description."""
    import torch

    kind, value = next(iter(argument.items()))
    if kind == "tensor":
        return tensor(value)
    if kind == "view":
        # a view keeps the other tensor's strides, which the kernel is launched with
        return made[value["of"]][..., : value["columns"]]
    if kind == "route":
        return routed(value, made)
    if kind == "call":
        inner = {k: build(a, made, package) for k, a in value["arguments"].items()}
        result = find(value["function"], package)(**inner)
        return result[value["item"]] if "item" in value else result
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "triton_dtype":
        return _triton_dtype(value)
    if kind == "device":
        # torch only reports a card: all memory is the CPU's
        return torch.device("cpu")
    if kind == "items":
        return [build(a, made, package) for a in value]
    if kind == "mapping":
        return {k: build(a, made, package) for k, a in value.items()}
    if kind == "fields":
        return types.SimpleNamespace(**{k: build(a, made, package) for k, a in value.items()})
    return None if kind == "none" else value


def tensor(wanted: Json) -> Any:
    """A tensor on the CPU, filled as described."""
    import torch

    dtype, shape = getattr(torch, wanted["dtype"]), wanted["shape"]
    count = math.prod(shape)
    if wanted["values"] is not None:
        return guarded(torch.tensor(wanted["values"], dtype=dtype).reshape(shape))
    fills: dict[str, Callable[[], Any]] = {
        "zeros": lambda: torch.zeros(shape),
        "ones": lambda: torch.ones(shape),
        "nan": lambda: torch.full(shape, math.nan),
        "arange": lambda: (torch.arange(count) * wanted["step"]).reshape(shape),
        "random": lambda: torch.randn(shape),
        "coin": lambda: torch.randint(0, 2, shape),
        "permutation": lambda: torch.randperm(count).reshape(shape),
    }
    # made in torch's own type and then converted: fp8 and bool have no random numbers
    return guarded(fills[wanted["fill"]]().to(dtype), is_output=wanted["fill"] == "nan")


def guarded(values: Any, *, is_output: bool = False) -> Any:
    """The same values in the middle of a larger buffer."""
    import torch

    nothing = math.nan if values.dtype.is_floating_point else 0
    nothing = _AROUND_OUTPUTS if is_output else nothing
    around = torch.full((GUARD,), nothing).to(values.dtype)
    # cat as bytes: torch puts no fp8 tensors together
    parts = [part.reshape(-1).view(torch.uint8) for part in (around, values, around)]
    buffer = torch.cat(parts).view(values.dtype)
    return buffer[GUARD : GUARD + values.numel()].view(values.shape)


def overwritten(tensor: Any) -> int:
    """How many numbers around an output, which starts as NaN, are no longer what they were."""
    import torch

    buffer = torch.empty(0, dtype=tensor.dtype)
    buffer.set_(tensor.untyped_storage())
    if buffer.numel() < 2 * GUARD:
        return 0  # made by the engine, without guards
    around = (buffer[:GUARD].float(), buffer[-GUARD:].float())
    return sum(int((part != _AROUND_OUTPUTS).sum()) for part in around)


def routed(wanted: Json, made: Json) -> Any:
    """Pairs sorted by expert, each expert's filled up to whole blocks; or whose the blocks are."""
    import torch

    config = made.get(wanted["config"])
    if not config:
        raise Stopped(f"{wanted['config']} must come before the arguments that are routed by it")
    block, experts = config["BLOCK_SIZE_M"], wanted["to"]
    pairs: list[int] = []
    owners: list[int] = []
    for expert in sorted(set(experts)):
        own = [pair for pair, chosen in enumerate(experts) if chosen == expert]
        # a number past the last pair marks rows that only fill their block
        own += [len(experts)] * (-len(own) % block)
        pairs += own
        owners += [expert] * (len(own) // block)
    parts = {"pairs": pairs, "experts": owners, "count": [len(pairs)]}
    return torch.tensor(parts[wanted["part"]], dtype=torch.int32)


def _triton_dtype(name: str) -> Any:
    import triton.language as tl

    renamed = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5", "bool": "int1"}
    return getattr(tl, renamed.get(name, name))

"""One case run for its numbers: the engine's function under Triton's interpreter, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arguments import overwritten
from .calling import attempt, prepare
from .driver import compiling_driver
from .errors import Json
from .interpreter import install
from .references import REFERENCES


def interpreting(card: Json) -> Callable[[Json, str], Json]:
    """Triton, made to interpret as if on the card; what then judges a case."""
    from triton.runtime.driver import driver
    from triton.runtime.interpreter import GridExecutor

    driver.set_active(compiling_driver(card))
    # what Triton goes back to when code resets its driver
    driver._default = driver._active
    install()
    launches: list[Json] = []
    _watch(GridExecutor, launches)
    return lambda case, package: _judge(case, package, launches)


def _watch(kind: Any, launches: list[Json]) -> None:
    real = kind.__call__

    def run(grid: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(
            {
                "kernel": grid.fn.__name__,
                "module": grid.fn.__module__,
                # by type: a flag is a bool, which is an int as well
                "blocks": {k: v for k, v in kwargs.items() if k.isupper() and type(v) is int},
                "num_warps": kwargs.get("num_warps"),
                "num_stages": kwargs.get("num_stages"),
            }
        )
        return real(grid, *args, **kwargs)

    kind.__call__ = run


def _judge(case: Json, package: str, launches: list[Json]) -> Json:
    """Run one case and compare what it wrote with what it should have written."""
    computed: list[Json] = []
    launches.clear()

    def compute() -> None:
        import torch

        wanted = case["numerics"]
        # the same inputs in every run, so that an answer can be kept
        torch.manual_seed(wanted["seed"])
        function, made = prepare(case, package)
        # before the call, which may write to its inputs
        expected = REFERENCES[wanted["reference"]](made)
        function(**made)
        for output in wanted["outputs"]:
            found = errors(made[output], expected[output])
            tensor = case["arguments"][output].get("tensor")
            if tensor and tensor["fill"] == "nan":
                found["outside"] = overwritten(made[output])
            computed.append({"output": output, **found})

    answer = attempt(case, compute)
    answer.update(records=list(launches), computed=computed)
    return answer


def errors(got: Any, expected: Any) -> Json:
    """How far a result is off; a number that was never written is no number."""
    import torch

    numbers = got.double()
    if numbers.shape != expected.want.shape:
        raise ValueError(f"the reference is {expected.want.shape}, the result {numbers.shape}")
    finite = torch.isfinite(numbers)
    measured: Json = {"elements": numbers.numel(), "unwritten": int((~finite).sum())}
    if finite.all():
        off = (numbers - expected.want).abs()
        measured["max_error"] = float(off.max())
        # where nothing was added up, any error at all is too large a share
        measured["max_share"] = float((off / expected.size.clamp_min(1e-30)).max())
    return measured

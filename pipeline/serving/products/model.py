"""A matrix product of a served model, what computing it on a card gave, and the verdict.

The verdict is a function of numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from pipeline.core.model import Frozen

Count = Annotated[int, Field(ge=0)]
Format: TypeAlias = Literal["fp8-tensor", "fp8-channel", "fp8-block", "nvfp4"]
# `unknown`: it is there, and could not be judged; `missing`: the image does not have the route.
Verdict: TypeAlias = Literal["passed", "failed", "unknown", "missing"]


class Product(Frozen):
    """Activations of some tokens times a weight of n rows and k columns, as one card has it."""

    name: str
    n: Annotated[int, Field(ge=1)]
    k: Annotated[int, Field(ge=1)]
    format: Format
    # of routed experts: how many a card has, and how many of all of them a token visits
    experts: Count = 0
    visited: float = 0.0


class Skipped(Frozen):
    """A product that is not FP4 or FP8."""

    name: str
    why: str  # such as: their weights are int4


class Bound(Frozen):
    """How far a result may be from the exact product of the same quantised numbers.

    Quantisation itself is no error here: both sides multiply the same numbers. What is left is the
    rounding of the result to bfloat16, whose half unit is 2^-8 of it, and that of the sum. Tensor
    cores may add FP8 products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.5.2, on
    H800); three of these are given to the number of additions: 2^-11 of the sum of magnitudes.
    """

    of_result: float = 2.0**-8
    of_magnitudes: float = 2.0**-11

    def sentence(self) -> str:
        """For people."""
        return f"{self.of_result:.2g} of the result and {self.of_magnitudes:.2g} of the magnitudes"


class Measured(Frozen):
    """One product at one number of tokens through one route, several times."""

    product: str
    format: Format
    route: str
    tokens: Annotated[int, Field(ge=1)]
    # `refused`: the call raised an error; `crashed`: and the card takes no more work after it
    outcome: Literal["computed", "missing", "refused", "crashed"]
    message: str = ""
    runs: Count = 0
    values: Count = 0
    nan: Count = 0
    infinite: Count = 0
    zero_rows: Count = 0  # rows of nothing but zeros where the exact product has other numbers
    beyond: Count = 0  # values that the bound does not allow, NaN and infinite ones among them
    worst: float = 0.0  # the largest error in units of its bound, of finite values
    differing: Count = 0  # runs whose bits are not those of the first
    rows: tuple[int, int] | None = None  # the first and the last row with such values
    columns: tuple[int, int] | None = None


class Card(Frozen):
    """Where the products were computed."""

    name: str
    capability: str
    versions: dict[str, str] = {}


class Computed(Frozen):
    """The results of the program on the card."""

    card: Card
    measured: list[Measured]
    is_done: bool  # false: it ended before the last product


class Judged(Frozen):
    """The verdict on one route to one product, over all numbers of tokens."""

    product: Product
    route: str
    verdict: Verdict
    tokens: list[int]
    message: str


class ProductsResult(Frozen):
    """What is known about a recipe's products."""

    recipe: str
    card: Card
    bound: Bound
    verdict: Verdict | Literal["skipped"]
    judged: list[Judged]
    skipped: list[Skipped]
    measured: list[Measured]


def judge(m: Measured) -> tuple[Verdict, str]:
    """One product at one number of tokens: right, wrong, or not known."""
    if m.outcome == "missing":
        return "missing", m.message or "not in the image"
    if m.outcome == "refused":
        return "unknown", f"refused: {m.message}"
    if m.outcome == "crashed":
        return "failed", f"the card stopped: {m.message}"
    if not m.values or not m.runs:
        return "unknown", "nothing was computed"
    faults = []
    if m.nan:
        faults.append(f"{m.nan:,} of {m.values:,} values are NaN")
    if m.infinite:
        faults.append(f"{m.infinite:,} of {m.values:,} values are infinite")
    if m.zero_rows:
        faults.append(f"rows of zeros: {m.zero_rows:,}")
    if wrong := m.beyond - m.nan - m.infinite:
        count = f"{wrong:,} of {m.values:,}"
        faults.append(f"{count} values are wrong, by up to {m.worst:.3g} bounds")
    if m.beyond and m.rows and m.columns:
        (top, bottom), (first, last) = m.rows, m.columns
        faults.append(f"in rows {top}-{bottom} and columns {first}-{last}")
    # cuBLAS and CUTLASS give the same bits for the same call on the same card: another result is a
    # race, even where both are near the exact one
    if m.differing:
        faults.append(f"{m.differing} of {m.runs} runs gave other bits")
    return ("failed", "; ".join(faults)) if faults else ("passed", f"{m.worst:.2f}")


def judge_route(product: Product, route: str, rows: Sequence[Measured]) -> Judged:
    """One route to a product over all numbers of tokens: the worst of them counts."""
    judged = [(row, *judge(row)) for row in rows]
    order: tuple[Verdict, ...] = ("failed", "unknown", "missing", "passed")
    found = {each for _, each, _ in judged}
    verdict: Verdict = next((each for each in order if each in found), "unknown")
    tokens = [row.tokens for row, each, _ in judged if each == verdict]
    message = next((text for _, each, text in judged if each == verdict), "was not computed")
    if verdict == "passed":
        message = f"within {max(row.worst for row in rows):.2f} of the bound"
    return Judged(product=product, route=route, verdict=verdict, tokens=tokens, message=message)


def judge_all(
    recipe: str,
    computed: Computed,
    products: Sequence[Product],
    skipped: Sequence[Skipped],
    bound: Bound,
) -> ProductsResult:
    """Every route to every product: all must be right, and each product needs one."""
    judged: list[Judged] = []
    for product in products:
        wanted = (product.name, product.format)
        own = [m for m in computed.measured if (m.product, m.format) == wanted]
        for route in dict.fromkeys(m.route for m in own) or ("any",):
            judged.append(judge_route(product, route, [m for m in own if m.route == route]))
    proved = {(r.product.name, r.product.format) for r in judged if r.verdict == "passed"}
    is_proved = computed.is_done and all((p.name, p.format) in proved for p in products)
    verdict: Verdict | Literal["skipped"] = "passed" if is_proved else "unknown"
    if any(row.verdict == "failed" for row in judged):
        verdict = "failed"
    elif not products:
        verdict = "skipped"
    return ProductsResult(
        recipe=recipe,
        card=computed.card,
        bound=bound,
        verdict=verdict,
        judged=judged,
        skipped=list(skipped),
        measured=computed.measured,
    )

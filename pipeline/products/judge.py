"""The verdict on what a card computed: a function of numbers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pipeline.products.model import (
    Bound,
    Computed,
    Judged,
    Measured,
    Product,
    ProductsResult,
    Skipped,
    Verdict,
)


def judge(measured: Measured) -> tuple[Verdict, str]:
    """One product at one number of tokens: right, wrong, or not known."""
    if measured.outcome == "missing":
        return "missing", measured.message or "not in the image"
    if measured.outcome == "refused":
        return "unknown", f"refused: {measured.message}"
    if measured.outcome == "crashed":
        return "failed", f"the card stopped: {measured.message}"
    if not measured.values or not measured.runs:
        return "unknown", "nothing was computed"
    faults = list(_faults(measured))
    return ("failed", "; ".join(faults)) if faults else ("passed", f"{measured.worst:.2f}")


def _faults(m: Measured) -> Iterator[str]:
    if m.nan:
        yield f"{m.nan:,} of {m.values:,} values are NaN"
    if m.infinite:
        yield f"{m.infinite:,} of {m.values:,} values are infinite"
    if m.zero_rows:
        yield f"rows of zeros: {m.zero_rows:,}"
    if wrong := m.beyond - m.nan - m.infinite:
        yield f"{wrong:,} of {m.values:,} values are wrong, by up to {m.worst:.3g} bounds"
    if m.beyond and m.rows and m.columns:
        yield f"in rows {_span(m.rows)} and columns {_span(m.columns)}"
    # cuBLAS and CUTLASS give the same bits for the same call on the same card: another result is a
    # race, even where both are near the exact one
    if m.differing:
        yield f"{m.differing} of {m.runs} runs gave other bits"


def _span(ends: tuple[int, int]) -> str:
    return f"{ends[0]}-{ends[1]}"


def judge_route(product: Product, route: str, rows: Sequence[Measured]) -> Judged:
    """One route to a product over all numbers of tokens: the worst of them counts."""
    judged = [(row, *judge(row)) for row in rows]
    verdict = _worst([each[1] for each in judged])
    tokens = [row.tokens for row, each, _ in judged if each == verdict]
    if verdict == "passed":
        message = f"within {max(row.worst for row in rows):.2f} of the bound"
    else:
        message = next((text for _, each, text in judged if each == verdict), "was not computed")
    return Judged(product=product, route=route, verdict=verdict, tokens=tokens, message=message)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("failed", "unknown", "missing", "passed")
    return next((each for each in order if each in verdicts), "unknown")


def judge_all(
    recipe: str,
    computed: Computed,
    products: Sequence[Product],
    skipped: Sequence[Skipped],
    bound: Bound,
) -> ProductsResult:
    """Every route to every product."""
    judged = [row for product in products for row in _routes(product, computed.measured)]
    verdict = _overall(products, judged)
    if verdict == "passed" and not computed.is_done:
        verdict = "unknown"
    return ProductsResult(
        recipe=recipe,
        card=computed.card,
        bound=bound,
        verdict=verdict,
        judged=judged,
        skipped=list(skipped),
        measured=computed.measured,
    )


def _routes(product: Product, measured: Sequence[Measured]) -> list[Judged]:
    own = [m for m in measured if (m.product, m.format) == (product.name, product.format)]
    routes = dict.fromkeys(m.route for m in own)
    if not routes:
        return [judge_route(product, "any", [])]
    return [judge_route(product, route, [m for m in own if m.route == route]) for route in routes]


def _overall(products: Sequence[Product], judged: Sequence[Judged]) -> Verdict | Literal["skipped"]:
    """Wrong where any route is; right where each product has a route that is."""
    if not products:
        return "skipped"
    if any(row.verdict == "failed" for row in judged):
        return "failed"
    proved = {(r.product.name, r.product.format) for r in judged if r.verdict == "passed"}
    return "passed" if all((p.name, p.format) in proved for p in products) else "unknown"

from __future__ import annotations

from typing import Any

import pytest

from pipeline.serving.products.model import (
    Bound,
    Card,
    Computed,
    Measured,
    Product,
    ProductsResult,
    judge,
    judge_all,
    judge_route,
)

DOWN = Product(name="down", n=256, k=512, format="nvfp4")
UP = Product(name="up", n=512, k=256, format="nvfp4")


def measured(**changes: Any) -> Measured:
    sound = {
        "product": "down",
        "format": "nvfp4",
        "route": "cutlass",
        "tokens": 16,
        "outcome": "computed",
        "runs": 10,
        "values": 4096,
        "worst": 0.6,
    }
    return Measured.model_validate({**sound, **changes})


def result(
    *rows: Measured, products: tuple[Product, ...] = (DOWN,), done: bool = True
) -> ProductsResult:
    card = Card(name="a card", capability="12.0")
    computed = Computed(card=card, measured=list(rows), is_done=done)
    return judge_all("a-recipe", computed, products, [], Bound())


def test_a_result_within_the_bound_passes() -> None:
    assert judge(measured())[0] == "passed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nan": 3, "beyond": 3}, "3 of 4,096 values are NaN"),
        ({"infinite": 1, "beyond": 1}, "1 of 4,096 values are infinite"),
        ({"zero_rows": 2, "beyond": 512}, "rows of zeros: 2"),
        ({"beyond": 1, "worst": 40.0}, "1 of 4,096 values are wrong, by up to 40 bounds"),
        ({"differing": 1}, "1 of 10 runs gave other bits"),
        ({"outcome": "crashed", "message": "illegal address"}, "the card stopped: illegal address"),
    ],
)
def test_a_fault_fails_and_is_named(changes: dict[str, Any], said: str) -> None:
    verdict, message = judge(measured(**changes))
    assert verdict == "failed"
    assert said in message


def test_a_fault_says_where_it_is() -> None:
    wrong = measured(beyond=9, worst=7.0, rows=(0, 127), columns=(128, 255))
    assert "in rows 0-127 and columns 128-255" in judge(wrong)[1]


def test_a_route_that_is_not_there_or_refuses_has_not_passed() -> None:
    assert judge(measured(outcome="missing"))[0] == "missing"
    assert judge(measured(outcome="refused", message="no kernel"))[0] == "unknown"
    assert judge(measured(values=0))[0] == "unknown"
    assert judge(measured(runs=0))[0] == "unknown"


def test_one_wrong_number_of_tokens_fails_the_route_and_is_named() -> None:
    rows = [measured(tokens=1), measured(tokens=64, nan=1, beyond=1), measured(tokens=1024)]
    judged = judge_route(DOWN, "cutlass", rows)
    assert (judged.verdict, judged.tokens) == ("failed", [64])


def test_a_route_that_refuses_some_numbers_of_tokens_is_not_proved() -> None:
    rows = [measured(tokens=1, outcome="refused"), measured(tokens=64)]
    assert judge_route(DOWN, "cutlass", rows).verdict == "unknown"


def test_a_product_passes_by_one_route_where_the_others_are_missing() -> None:
    assert result(measured(), measured(route="b12x", outcome="missing")).verdict == "passed"


def test_one_wrong_route_fails_all() -> None:
    assert result(measured(), measured(route="b12x", nan=1, beyond=1)).verdict == "failed"


def test_nothing_but_missing_routes_is_unknown() -> None:
    assert result(measured(outcome="missing")).verdict == "unknown"


def test_a_product_that_was_never_reached_is_unknown() -> None:
    found = result(measured(), products=(DOWN, UP))
    assert found.verdict == "unknown"
    assert found.judged[-1].message == "was not computed"


def test_a_program_that_ended_early_has_proved_nothing_as_a_whole() -> None:
    assert result(measured(), done=False).verdict == "unknown"
    assert result(measured(nan=1, beyond=1), done=False).verdict == "failed"


def test_without_any_such_product_there_is_no_verdict() -> None:
    assert result(products=()).verdict == "skipped"

"""How a gate's numbers look on the terminal."""

from __future__ import annotations

from pipeline.cli.gate_tables import show_numbers
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import GateResult, NumericsResults
from tests.unit.gate.numerics.test_numerics import answer, computed, results

DIGEST = f"sha256:{'0' * 64}"


def result(numerics: NumericsResults | None, engine_digest: str = DIGEST) -> GateResult:
    facts = {"kind": "image", "platform": "linux/amd64", "python": "3.11", "triton": "3"}
    return GateResult.model_validate(
        {
            **{"image": "tiny", "platform": "linux/amd64", "engine": "engine"},
            **{"engine_version": "1", "engine_digest": engine_digest, "patches": []},
            **{"card": card_for("sm_120"), "worker": DIGEST, "verdict": "passed", "cases": []},
            "environment": {**facts, "torch": "2", "cuda": "13.0", "wheels": [], "stubs": []},
            "numerics": numerics,
        }
    )


def test_nothing_is_shown_where_nothing_was_asked() -> None:
    assert show_numbers(result(None)) == ""


def test_the_table_names_case_error_and_tolerance() -> None:
    shown = show_numbers(result(results(answer(computed(0.00125)))))
    assert "decode-8  decode-attention  right    1.25e-03       7.81e-03" in shown
    assert shown.endswith("tiny's numerics: 1 right in 0.0 s")


def test_wrong_and_unknown_say_why() -> None:
    wrong = result(results(answer(computed(0.5)), answer()))
    assert "decode-8: o is off by 0.5" in show_numbers(wrong)
    assert "1 wrong, 1 unknown" in show_numbers(wrong)

"""Other launch parameters for a case: which fit, how they rank, and what is never tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import GateUnknown
from pipeline.images.gate.smem.image_gate import CaseTuning, ImageGate, find_case, sweep_launches
from pipeline.images.gate.smem.limits import card_for
from tests.unit.gate.smem.test_run import HEAD, worker
from tests.unit.gate.smem.test_run_gate import make_gate
from tests.unit.support import ROOT, Command

CARD = card_for("sm_120")
# The engine itself chooses tiles of 64 by 64 in four warps. A tile needs 24 bytes for each of its
# results and each stage, 128 rows spill, and with eight warps 16 rows do not compile.
ENGINE = """
OWN = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1}
for case in job["cases"]:
    begin(case)
    values = dict(OWN, **(case["override"] or {"values": {}})["values"])
    m, n, warps, stages = (values[name] for name in OWN)
    kernel = {"kernel": "_fwd", "module": "engine.ops", "blocks": {"BLOCK_M": m, "BLOCK_N": n},
              "num_warps": warps, "num_stages": stages}
    if (m, warps) == (16, 8):
        kernel["error"] = "CompilationError: too few rows"
    else:
        kernel |= {"shared_bytes": 24 * m * n * stages, "registers": 64,
                   "spill_bytes": 8 if m == 128 else 0}
    say({"case": case["name"], "ended": "called", "records": [kernel]})
"""
SILENT = """
for case in job["cases"]:
    begin(case)
    say({"case": case["name"], "ended": "raised", "message": "ValueError: no such head size"})
"""

Tuned = Callable[..., CaseTuning]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    def run(answers: str = ENGINE, warps: tuple[int, ...] = (4, 8)) -> CaseTuning:
        worker(monkeypatch, tmp_path, HEAD + answers)
        gate: ImageGate = make_gate(tmp_path)
        return sweep_launches(gate, CARD, find_case(gate.gates, "extend"), warps, (1,))

    return run


def test_what_fits_ranks_by_spills_and_then_by_the_size_of_its_tile(tuned: Tuned) -> None:
    tuning = tuned(warps=(4,))
    assert (tuning.case, tuning.kernel, tuning.limit_bytes) == ("extend", "_fwd", 101376)
    fitting = [c for c in tuning.choices if c.fits]
    ranks = [(c.spill_bytes, -c.tile) for c in fitting]
    assert ranks == sorted(ranks, key=lambda rank: (rank[0] or 0, rank[1]))
    assert (fitting[0].spill_bytes, fitting[0].tile) == (0, 64 * 64)
    assert fitting[-1].values["BLOCK_M"] == 128  # it spills, though its tile is not the smallest
    # 24 * 64 * 64 bytes are 98,304: a second block would need as much again
    assert fitting[0].blocks_per_sm == 1
    (own,) = [c for c in tuning.choices if c.who]
    assert own.who == ["image", "upstream"]
    assert own.values == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1}


def test_what_needs_more_than_the_card_has_does_not_fit_and_comes_last(tuned: Tuned) -> None:
    choices = tuned(warps=(4,)).choices
    over = [c for c in choices if c.shared_bytes is not None and c.shared_bytes > 101376]
    assert {(c.values["BLOCK_M"], c.values["BLOCK_N"]) for c in over} == {(64, 128), (128, 64)}
    assert not any(c.fits for c in over)
    assert choices[-len(over) :] == over


def test_what_does_not_compile_does_not_fit_and_says_why(tuned: Tuned) -> None:
    broken = [c for c in tuned().choices if c.values["BLOCK_M"] == 16 and c.values["num_warps"] > 4]
    assert len(broken) == 4
    for choice in broken:
        assert not choice.fits
        assert choice.blocks_per_sm is None
        assert choice.message == "CompilationError: too few rows"


def test_tiles_of_more_than_twice_the_largest_choice_are_not_tried(tuned: Tuned) -> None:
    assert max(c.tile for c in tuned().choices) == 2 * 64 * 64


def test_a_case_that_cannot_be_judged_is_not_tuned(tuned: Tuned) -> None:
    with pytest.raises(GateUnknown, match="no such head size"):
        tuned(SILENT)


@pytest.mark.parametrize("option", ["--warps", "--stages"])
@pytest.mark.parametrize("text", ["4,x", "", "4;8"])
def test_what_is_no_list_of_numbers_is_refused_before_anything_is_fetched(
    sm120: Command, option: str, text: str
) -> None:
    ended = sm120("gate", "tune", "sglang-k2", "extend", option, text)
    assert ended.code == 2
    assert option in ended.err


@pytest.mark.parametrize("case", ["nope", "extend-*"])
def test_a_case_that_is_none_is_refused_before_anything_is_fetched(
    sm120: Command, store_root: Path, case: str
) -> None:
    words = ("--checkout", ROOT, "--store", store_root, "gate", "tune", "sglang-k2", case)
    ended = sm120(*words)
    assert ended.error == "GateInvalid"
    assert f"{case}: there is no such case" in ended.err
    assert "sm120 gate find '*' --image IMAGE" in ended.err

"""What `sm120 tune` prints; its trials are tested in tests/unit/tune."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.app import tune
from pipeline.app.tune import TunedRecipe
from pipeline.artifacts.attest.predicates import KernelTable
from pipeline.serving.tune.moe import MoeShape
from pipeline.serving.tune.search import TunedTokens
from tests.unit.support import Command
from tests.unit.tune.test_tune_table import TABLE

SHAPE = MoeShape(experts=8, active=2, width=64, hidden=64, dtype=None)
ROW: dict[str, Any] = {
    **{"tokens": 16, "default": {"BLOCK_SIZE_M": 64}, "config": {"BLOCK_SIZE_M": 64}},
    **{"default_us": 20.0, "us": 20.0, "ratio": None, "trials": 3, "failed": 1},
}


def found(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    done = TunedRecipe("some", SHAPE, (TunedTokens.model_validate(ROW),), **more)
    monkeypatch.setattr(tune, "tune_recipe", lambda *of: done)


def test_no_gain_leaves_the_engine_s_own_sizes(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch)
    ended = sm120("tune", "some")
    assert ended.out.endswith("No gain: nothing was written; the engine's own sizes stay.\n")


def test_no_gain_names_the_earlier_table_that_stays(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, earlier=KernelTable.model_validate(TABLE))
    stays = "kernel-table-some of an earlier run stays, for NVIDIA RTX PRO 6000, driver 580.95.05."
    assert sm120("tune", "some").out.endswith(f"No gain: nothing was written; {stays}\n")
    answer = json.loads(sm120("tune", "some", "--json").out)
    assert answer["table"] is None
    assert answer["earlier"]["card"]["driver"] == "580.95.05"

"""Every planted fault is caught by the rung that exists for it; sound servers are not blamed."""

from __future__ import annotations

import pytest

from pipeline.core import log
from pipeline.serving.smoke.model import SmokePlan
from pipeline.serving.smoke.session import Baseline
from tests.testbed.model_faults import FAULTS
from tests.testbed.model_faults_fresh import FRESH_FAULTS
from tests.testbed.model_server import Fault, ModelServer
from tests.unit.smoke.ladder_runs import PLAN, ladder_result, recorded

REASONING = PLAN.model_copy(update={"reasoning": True})
SEEING = PLAN.model_copy(update={"vision": True})
TINY = PLAN.model_copy(update={"quality": False, "why_no_quality": "the model is tiny"})


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return recorded(ModelServer())


def _caught(fault: Fault, baseline: Baseline) -> tuple[str, str]:
    """The rung that failed, and why."""
    server = ModelServer(
        fault, reasons=fault.needs == "reasoning", has_logprobs=fault.needs != "no logprobs"
    )
    plan = {"reasoning": REASONING, "vision": SEEING}.get(fault.needs, PLAN)
    if fault.needs == "drafts":
        result = ladder_result(server, plan, has_drafts=True)
    else:
        result = ladder_result(server, plan, baseline)
    failed = [rung for rung in result.rungs if rung.verdict == "failed"]
    return (failed[0].name, failed[0].message) if failed else ("-", "not caught")


def test_every_planted_fault_is_caught_by_its_rung(
    baseline: Baseline, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(fault.name, fault.rung, *_caught(fault, baseline)) for fault in FAULTS]
    with capsys.disabled():
        head = ["planted", "should catch it", "caught by", "what it says"]
        print("\n" + log.table(head, [(*row[:3], row[3][:90]) for row in rows]))
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 160
    assert [row[:3] for row in rows if row[1] != row[2]] == []


def test_every_fault_that_was_planted_last_is_caught(baseline: Baseline) -> None:
    """33 of these 41 were caught before the ladder knew them."""
    rows = [(fault.name, fault.rung, _caught(fault, baseline)[0]) for fault in FRESH_FAULTS]
    assert len({row[0] for row in rows}) == 41
    assert [row for row in rows if row[1] != row[2]] == []


@pytest.mark.parametrize(
    ("server", "plan"),
    [
        pytest.param(ModelServer(), PLAN, id="plain"),
        pytest.param(ModelServer(reasons=True), REASONING, id="reasoning"),
        pytest.param(ModelServer(has_ties=True, delay_s=0.01), PLAN, id="slow, with ties"),
        pytest.param(ModelServer(has_logprobs=False), PLAN, id="without logprobs"),
        pytest.param(ModelServer(can_count_only=True), TINY, id="tiny"),
        pytest.param(ModelServer(), SEEING, id="seeing"),
    ],
)
def test_a_sound_server_passes_every_rung(server: ModelServer, plan: SmokePlan) -> None:
    result = ladder_result(server, plan)
    assert result.failures() == []
    assert result.last_good == ("pictures" if plan.vision else "memory")


def test_a_sound_server_keeps_its_draft_model() -> None:
    server = ModelServer()
    result = ladder_result(server, has_drafts=True)
    assert (result.verdict, result.last_good, server.is_drafting) == ("passed", "speculation", True)
    messages = {check.name: check.message for check in result.rungs[-1].checks}
    assert messages["draft model"] == "it is on; held against 30 answers without it"
    assert messages["acceptance"] == "70% of drafted tokens are accepted"


def test_a_sound_server_equals_its_own_baseline(baseline: Baseline) -> None:
    result = ladder_result(ModelServer(), baseline=baseline)
    assert (result.verdict, result.last_good) == ("passed", "speculation")

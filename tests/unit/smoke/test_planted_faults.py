"""Every planted fault is caught by the rung that exists for it; sound servers are not blamed."""

from __future__ import annotations

from operator import attrgetter

import pytest

from pipeline.core import log
from pipeline.serving.smoke.ladder import LADDER
from pipeline.serving.smoke.model import SmokePlan
from pipeline.serving.smoke.rungs.first import FIRST
from pipeline.serving.smoke.rungs.memory import MEMORY
from pipeline.serving.smoke.rungs.speculation import SPECULATION
from pipeline.serving.smoke.rungs.streams import STREAMS
from pipeline.serving.smoke.session import Baseline
from tests.conftest import a_share
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


@pytest.fixture(scope="module")
def is_whole(request: pytest.FixtureRequest) -> bool:
    """With `--big` a fault meets every rung up to its own, and no earlier one may catch it."""
    return bool(request.config.getoption("--big"))


def _caught(fault: Fault, baseline: Baseline, is_whole: bool) -> tuple[str, str]:
    """The rung that failed, and why."""
    plan = {"reasoning": REASONING, "vision": SEEING}.get(fault.needs, PLAN)
    has_drafts = fault.needs == "drafts"
    # the first rung finds out which model there is; the last ones are held against the streams
    needed = {FIRST.name, fault.rung}
    needed |= {STREAMS.name} if fault.rung in (MEMORY.name, SPECULATION.name) else set()
    short = [rung for rung in LADDER if rung.name in needed]
    # a fault that cancels or lengths of earlier rungs bring out needs the whole ladder
    for rungs in (LADDER,) if is_whole else (short, LADDER):
        server = ModelServer(
            fault, reasons=fault.needs == "reasoning", has_logprobs=fault.needs != "no logprobs"
        )
        before = None if has_drafts else baseline
        result = ladder_result(server, plan, before, has_drafts=has_drafts, rungs=rungs)
        for rung in result.rungs:
            if rung.verdict == "failed":
                return rung.name, rung.message
    return "-", "not caught"


def test_every_planted_fault_is_caught_by_its_rung(
    baseline: Baseline, capsys: pytest.CaptureFixture[str], is_whole: bool
) -> None:
    faults = FAULTS if is_whole else a_share(FAULTS, 40, attrgetter("name"))
    rows = [(fault.name, fault.rung, *_caught(fault, baseline, is_whole)) for fault in faults]
    with capsys.disabled():
        head = ["planted", "should catch it", "caught by", "what it says"]
        print("\n" + log.table(head, [(*row[:3], row[3][:90]) for row in rows]))
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 160
    assert [row[:3] for row in rows if row[1] != row[2]] == []


def test_every_fault_that_was_planted_last_is_caught(baseline: Baseline, is_whole: bool) -> None:
    """33 of these 41 were caught before the ladder knew them."""
    assert len({fault.name for fault in FRESH_FAULTS}) == 41
    faults = FRESH_FAULTS if is_whole else a_share(FRESH_FAULTS, 10, attrgetter("name"))
    rows = [(fault.name, fault.rung, _caught(fault, baseline, is_whole)[0]) for fault in faults]
    assert [row for row in rows if row[1] != row[2]] == []


@pytest.mark.share(3)
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

"""What Claude Code and Codex need of a server: planted faults are caught, sound servers pass."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.serving.smoke.ladder import run_ladder
from pipeline.serving.smoke.model import SmokeResult
from pipeline.serving.smoke.rungs.agents import AGENTS
from pipeline.serving.smoke.rungs.first import FIRST
from pipeline.serving.smoke.rungs.responses import RESPONSES
from pipeline.serving.smoke.rungs.tools import TOOLS_RUNG
from tests.testbed.model_faults_clients import CLIENT_FAULTS
from tests.testbed.model_server import COUNT_TOKENS, Asked, Fault, ModelServer, Refusal, listening
from tests.unit.smoke.ladder_runs import PLAN, open_session

RUNGS = (FIRST, TOOLS_RUNG, AGENTS, RESPONSES)
CLAUDE, CODEX = "as Claude Code asks", "as Codex asks"


def rows(result: SmokeResult) -> dict[str, tuple[str, str]]:
    checks = [check for rung in result.rungs for check in rung.checks]
    return {check.name: (check.verdict, check.message) for check in checks}


def run(fault: Fault | None = None, *, reasons: bool = False) -> SmokeResult:
    async def result() -> SmokeResult:
        async with listening(ModelServer(fault, reasons=reasons)) as url:
            session = open_session(url, PLAN.model_copy(update={"reasoning": reasons}))
            return await run_ladder(session, url, RUNGS, say=lambda _: None)

    return asyncio.run(result())


@pytest.mark.parametrize("fault", CLIENT_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_that_a_client_would_meet_is_caught(fault: Fault) -> None:
    result = run(fault, reasons=fault.needs == "reasoning")
    failed = [rung for rung in result.rungs if rung.verdict == "failed"]
    assert [rung.name for rung in failed[:1]] == [fault.rung]


@pytest.mark.parametrize("reasons", [False, True])
def test_a_sound_server_passes_with_and_without_thinking(reasons: bool) -> None:
    result = run(reasons=reasons)
    assert result.failures() == []
    found = rows(result)
    assert found[CLAUDE][0] == found[CODEX][0] == "passed"
    assert ("thinking sent back" in found[CLAUDE][1]) is reasons
    assert ("reasoning sent back" in found[CODEX][1]) is reasons
    assert "count_tokens:" in found[CLAUDE][1]


def refusing(field: str, path: str) -> Fault:
    def refuse(asked: Asked) -> None:
        if field in asked.body and asked.path == path:
            raise Refusal(422, f"{field}: Extra inputs are not permitted")

    return Fault(asked=refuse)


@pytest.mark.parametrize(
    ("field", "path", "name"),
    [
        ("context_management", "/v1/messages", CLAUDE),
        ("output_config", "/v1/messages", CLAUDE),
        ("include", "/v1/responses", CODEX),
    ],
)
def test_a_server_that_refuses_a_client_s_field_is_told_apart(
    field: str, path: str, name: str
) -> None:
    """It says so itself, and harms nobody else."""
    result = run(refusing(field, path))
    assert result.failures() == []
    verdict, message = rows(result)[name]
    assert verdict == "skipped"
    assert f"{field}: Extra inputs" in message


def test_a_server_need_not_count_tokens() -> None:
    def refuse(asked: Asked) -> None:
        if asked.path == COUNT_TOKENS:
            raise Refusal(404, "Not Found")

    result = run(Fault(asked=refuse))
    assert result.failures() == []
    assert "count_tokens is not there" in rows(result)[CLAUDE][1]

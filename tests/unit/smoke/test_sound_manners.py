"""Sound servers that answer in unusual ways are not blamed; what they do not have is skipped."""

from __future__ import annotations

import pytest

from pipeline.serving.smoke.model import SmokePlan, SmokeResult
from pipeline.serving.smoke.rungs import streams
from tests.testbed.model_manners import MANNERS, ThinkingServer, small_room_server
from tests.testbed.model_server import Asked, Fault, ModelServer
from tests.unit.smoke.ladder_runs import PLAN, ladder_result

REASONING = PLAN.model_copy(update={"reasoning": True})
# what no server at an address has
_ALWAYS = {"pictures", "compiles", "thinking", "tool call after thinking", "instant"}


def _skipped(result: SmokeResult) -> dict[str, str]:
    rungs = [rung for rung in result.rungs if rung.name != "speculation"]
    checks = [c for rung in rungs for c in rung.checks if c.verdict == "skipped"]
    return {c.name: c.message for c in checks if c.name not in _ALWAYS}


@pytest.mark.share(5)
@pytest.mark.parametrize(
    ("manners", "skipped"),
    [
        # half of the context is left for its thinking
        ("vLLM", {"context 512", "context 1024"}),
        ("SGLang", set()),
        ("no logprobs, no counts in streams", {"logprobs", "usage in streams"}),
        (
            "no health, no messages",
            {
                "health",
                "/v1/messages",
                "/v1/messages near the full context",
                "six turns",
                "cached tokens grow",
                "as Claude Code asks",
            },
        ),
        (
            "no schemas, seeds or system prompts",
            {
                *("conversation", "seed", "JSON by schema", "six turns", "cached tokens grow"),
                *("as Claude Code asks", "as Codex asks"),
            },
        ),
        ("comments, and events of several lines", {"connections that stay open"}),
        ("pieces of three bytes", set()),
        ("so many at once", set()),
        ("a byte order mark before the first event", set()),
        ("integers written as 40.0", set()),
        ("no ids, no details of the usage", {"cached tokens"}),
        ("one choice only", {"n choices"}),
        ("a connection for each answer", {"connections that stay open"}),
        ("prompts cut, and it says so", set()),
        ("null in every chunk", set()),
        ("usage in every chunk", set()),
        ("a new line after ten numbers", set()),
        ("one after the other", set()),
        ("call ids of Kimi", set()),
        ("an end as probable as going on", set()),
    ],
)
def test_a_sound_server_of_other_manners_passes(manners: str, skipped: set[str]) -> None:
    result = ladder_result(MANNERS[manners])
    assert result.failures() == []
    assert (result.last_good, set(_skipped(result))) == ("memory", skipped)


def test_a_context_that_a_server_does_not_name_is_asked_for() -> None:
    result = ladder_result(MANNERS["a small context that it does not name"])
    assert (result.failures(), result.last_good) == ([], "responses")
    assert {"shared prefix", "pressure"} <= set(_skipped(result))
    assert "use --context" in _skipped(result)["shared prefix"]


def test_a_server_that_asks_to_wait_is_asked_again_and_that_is_said() -> None:
    result = ladder_result(MANNERS["so many at once"])
    messages = {c.name: c.message for rung in result.rungs for c in rung.checks}
    assert "asked to wait" in messages["64 at once"]
    assert "asked to wait" not in messages["8 at once"]


@pytest.mark.parametrize(("pauses", "is_sound"), [(1, True), (2, False)])
def test_one_pause_of_the_machine_is_no_fault_of_the_server(
    pauses: int, is_sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_SLACK", 0.01)  # so that two seconds are the limit
    waited = [-100]

    def wait(asked: Asked) -> float:
        # one of the 64, in each of so many rounds
        if asked.load > 8 and asked.number > waited[-1] + 63 and len(waited) <= pauses:
            waited.append(asked.number)
            return 3.0
        return 0.0

    result = ladder_result(ModelServer(Fault("pauses", "streams", delay_s=wait)))
    failed = {check.name for check in result.failures()}
    assert failed == (set() if is_sound else {"64 at once"})
    assert len(waited) == 1 + pauses


@pytest.mark.parametrize("plan", [PLAN, REASONING], ids=["not expected", "expected"])
def test_a_model_that_always_thinks_passes_and_its_ties_are_judged(plan: SmokePlan) -> None:
    result = ladder_result(ThinkingServer(), plan)
    assert (result.failures(), result.last_good) == ([], "memory")
    messages = {c.name: c.message for rung in result.rungs for c in rung.checks}
    assert "ties" in messages["64 at once"]


def test_a_model_that_always_thinks_has_no_instant_mode() -> None:
    result = ladder_result(ThinkingServer(), REASONING)
    checks = {c.name: c for rung in result.rungs for c in rung.checks}
    assert (checks["thinking"].verdict, checks["instant"].verdict) == ("passed", "skipped")


def test_room_for_thinking_is_no_more_than_a_small_context_has() -> None:
    plan = REASONING.model_copy(update={"answer_tokens": 8192})
    result = ladder_result(small_room_server(), plan)
    assert (result.failures(), result.last_good) == ([], "memory")


def test_a_sound_server_of_plain_manners_skips_nothing() -> None:
    assert _skipped(ladder_result(ModelServer())) == {}

"""A soak finds what only time shows, judges what it has when it is stopped, and blames no other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.serving.smoke.client import NotOffered, Unsound
from pipeline.serving.smoke.ladder import run_ladder
from pipeline.serving.smoke.model import SmokeResult
from pipeline.serving.smoke.rungs import soak
from pipeline.serving.smoke.rungs.first import FIRST
from pipeline.serving.smoke.rungs.soak import SOAK
from tests.testbed.model_server import Asked, Fault, ModelServer, Reply, Token, listening
from tests.unit.smoke.ladder_runs import PLAN, open_session


def _soaked(
    server: ModelServer, seconds: float, meanwhile: Callable[[], Any] | None = None
) -> SmokeResult:
    async def run() -> SmokeResult:
        async with listening(server) as url:
            session = open_session(url, PLAN)
            session.soak_s = seconds

            async def do_meanwhile() -> None:
                while len(getattr(session.soak, "works", ())) < 40:
                    await asyncio.sleep(0.05)
                if meanwhile:
                    meanwhile()

            during = asyncio.create_task(do_meanwhile())
            try:
                return await run_ladder(session, url, (FIRST, SOAK), say=lambda _: None)
            finally:
                during.cancel()

    return asyncio.run(run())


def _soaked_enough(
    server: Callable[[], ModelServer], is_enough: Callable[[dict[str, str]], bool]
) -> SmokeResult:
    """With more time where a busy machine did too little in three seconds."""
    for seconds in (3.0, 10.0, 30.0):
        result = _soaked(server(), seconds)
        if is_enough({check.name: check.verdict for check in result.rungs[-1].checks}):
            break
    return result


def _late(number: int, change: Callable[[Asked, Reply], None]) -> Callable[[Asked, Reply], None]:
    return lambda asked, reply: change(asked, reply) if asked.number > number else None


def _emptied(_: Asked, reply: Reply) -> None:
    reply.text, reply.tokens, reply.calls, reply.finish = "", [], [], "stop"


def _changed(asked: Asked, reply: Reply) -> None:
    reply.tokens = [Token("blorb", -0.1, [("x", -3.0)]), *reply.tokens]
    reply.text = "".join(token.text for token in reply.tokens)


def test_a_sound_server_passes_a_soak_and_its_memory_is_told() -> None:
    result = _soaked_enough(
        lambda: ModelServer(delay_s=0.01), lambda verdicts: verdicts["memory"] != "skipped"
    )
    checks = {check.name: (check.verdict, check.message) for check in result.rungs[1].checks}
    assert result.failures() == []
    assert result.last_good == "soak"
    assert "left by the client" in checks["mixed work"][1]
    assert checks["silent-empty turns"] == ("passed", "none")
    assert checks["memory"][0] == "passed"
    # evidence stays small however long it takes
    assert result.exchanges < 300


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (Fault(reply=_late(60, _emptied)), "silent-empty turns"),
        (Fault(reply=_late(60, _changed)), "drift"),
        (Fault(memory_bytes=lambda a: 2e9 + 2e7 * a.number), "memory"),
        (
            Fault(reply=_late(60, lambda a, r: setattr(r, "model", "other-2"))),
            "mixed work",
        ),
    ],
    ids=["empty", "drift", "memory", "model"],
)
def test_what_goes_wrong_later_is_found(
    fault: Fault, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "_FEWEST", 3)
    result = _soaked_enough(
        lambda: ModelServer(fault, delay_s=0.02), lambda verdicts: verdicts[check] == "failed"
    )
    # a busy machine alone makes answers slower
    assert {c.name for c in result.failures()} - {"speed"} | {check} == {check}
    assert check in [c.name for c in result.failures()]


def _speed(works: list[soak._Work]) -> str:
    """What the check of the speed says after 90 seconds with these."""

    async def run() -> str:
        session = open_session("http://127.0.0.1:9", PLAN)
        session.soak = soak._Soak(90.0, works, [])
        return await soak._speed(session)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ({"short text, whole": 0.5, "long text, whole": 1.0}, ""),
        ({"short text, whole": 0.66, "long text, whole": 1.0}, "short text, whole: 0.20 s at"),
        ({"short text, whole": 0.2, "long text, whole": 3.0}, "long text, whole: 1.00 s at"),
    ],
    ids=["a little slower", "short texts", "long texts"],
)
def test_a_kind_of_request_that_becomes_slow_is_named(last: dict[str, float], found: str) -> None:
    first = {"short text, whole": 0.2, "long text, whole": 1.0, "hang up": 0.1}
    works = [
        soak._Work(kind, at, seconds)
        for at in range(90)
        for kind, seconds in ({**last, "hang up": 9.0} if at >= 60 else first).items()
    ]
    if found:
        with pytest.raises(Unsound, match=found):
            _speed(works)
    else:
        assert "0.20 → 0.50 s" in _speed(works)


def test_too_few_requests_are_no_comparison() -> None:
    with pytest.raises(NotOffered, match="too few requests"):
        _speed([soak._Work("tool call", 1.0, 0.1)] * 40)


def test_ctrl_c_ends_a_soak_with_what_was_found() -> None:
    before = signal.getsignal(signal.SIGINT)
    result = _soaked(ModelServer(delay_s=0.01), 60.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    checks = {check.name: check for check in result.rungs[1].checks}
    assert "stopped by Ctrl-C, 1 min 0 s were asked for" in checks["mixed work"].message
    assert checks["drift"].verdict == "passed"
    assert (result.seconds < 30, signal.getsignal(signal.SIGINT)) == (True, before)

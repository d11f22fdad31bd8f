"""The soak: minutes or hours of mixed work, after which the server must be as it was at first."""

from __future__ import annotations

import asyncio
import re
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from pipeline.core import log
from pipeline.serving.smoke.client import ChatClient, Gone, NotOffered, Unsound
from pipeline.serving.smoke.compare import TextDifference, compare_answers
from pipeline.serving.smoke.rungs.length import prompt_for, sized_haystack
from pipeline.serving.smoke.rungs.tools import require_call, without_tools
from pipeline.serving.smoke.session import Rung, SmokeSession
from pipeline.serving.smoke.tasks import SCENARIOS, TOOLS, countings, sums

SOAK = Rung("soak", "Hours of mixed work change nothing")
_LANES = 8
_TEXT_TOKENS = 1024
_LONG_PROMPT = 1000  # characters
_LEAST_PAUSE_S = 15.0  # between two lines of progress
_SAMPLES = 120  # of the server's memory
_FEWEST = 12  # samples of a part; with fewer, nothing is said about it
_SLOWER, _SLOWER_S = 2.0, 0.25
_GROWTH, _GROWTH_BYTES = 0.10, 128 << 20
_FEWER_EQUAL = 0.1
_MOST_KEPT = 200  # how many exchanges of a soak evidence keeps
_RESIDENT = re.compile(r"^process_resident_memory_bytes(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)


class _Work(NamedTuple):
    """One request of the mix, and how it went."""

    kind: str
    at: float  # seconds since the begin
    seconds: float
    difference: TextDifference | None = None
    is_empty: bool = False
    fault: str = ""


@dataclass
class _Soak:
    """All that a soak saw; the session keeps it for the checks after the work."""

    seconds: float
    works: list[_Work]
    memory: list[tuple[float, int]]
    is_stopped: bool = False

    def thirds(self, kind: str = "") -> tuple[list[_Work], list[_Work]]:
        """The first third and the last."""
        chosen = [w for w in self.works if not kind or w.kind == kind]
        end = self.seconds
        return [w for w in chosen if w.at < end / 3], [w for w in chosen if w.at >= end * 2 / 3]


@SOAK.check("mixed work")
async def _mixed_work(session: SmokeSession) -> str:
    """Long and short answers, streams, tool calls, long texts, and clients that hang up."""
    prompts = [q.prompt for q in countings(4)] + [q.prompt for q in sums(4, seed=51)]
    with suppress(NotOffered):
        tokens = min(_TEXT_TOKENS, (session.context_tokens or _TEXT_TOKENS) // 2)
        stack = await sized_haystack(session, tokens, seed=52)
        prompts += [prompt_for(stack, question) for question in stack.needles]
    for prompt in prompts:
        await session.reference_for(prompt, max_tokens=session.room(session.plan.stream_tokens))
    begin, stop = time.monotonic(), asyncio.Event()
    soak = session.soak = _Soak(0.0, [], [])
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    # Ctrl-C ends the work, not the test: what was found until then is judged and kept
    with suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, stop.set)
    lanes = [
        asyncio.create_task(_lane(session, soak, prompts, lane, begin))
        for lane in range(min(_LANES, max(session.plan.streams)))
    ]
    watch = asyncio.create_task(_watch(session, soak, begin))
    ended = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(
            [*lanes, ended], timeout=session.soak_s, return_when=asyncio.FIRST_COMPLETED
        )
        soak.is_stopped = stop.is_set()
    finally:
        for task in (*lanes, watch, ended):
            task.cancel()
        await asyncio.gather(*lanes, watch, ended, return_exceptions=True)
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
    soak.seconds = time.monotonic() - begin
    gone = next((t.exception() for t in lanes if not t.cancelled() and t.exception()), None)
    if gone:
        raise gone
    faults = [w for w in soak.works if w.fault]
    left = sum(w.kind == "hang up" for w in soak.works)
    message = f"{log.count(len(soak.works), 'request')} in {log.seconds(soak.seconds)}"
    message += f", {left} of them left by the client"
    if soak.is_stopped:
        message += f"; stopped by Ctrl-C, {log.seconds(session.soak_s)} were asked for"
    if faults:
        first = f"after {log.seconds(faults[0].at)}: {faults[0].kind}: {faults[0].fault}"
        raise Unsound(f"{len(faults)} of {message}; {first}")
    return message


async def _lane(
    session: SmokeSession, soak: _Soak, prompts: Sequence[str], lane: int, begin: float
) -> None:
    """Acts as one user, who asks one thing after the other until the time is over."""
    has_tools = session.plan.quality and not without_tools(session)
    turn = lane
    while True:
        turn += 1
        # evidence of hours would fill the memory: keeps only faults and the first
        client = replace(session.client, exchanges=[])
        start, number = time.monotonic(), turn * 7 + lane * 3
        kind, prompt = "answer", prompts[number % len(prompts)]
        difference, is_empty, fault = None, False, ""
        try:
            if turn % 6 == 0:
                kind = "hang up"
                await session.hang_up(prompt, number % 4, client)
            elif turn % 6 == 3 and has_tools:
                kind, scenario = "tool call", SCENARIOS[number % len(SCENARIOS)]
                answer = await session.ask(
                    scenario.prompt, client, tools=TOOLS, stream=number % 2 == 1
                )
                is_empty = answer.is_empty
                if not is_empty:
                    require_call(answer, scenario)
            else:
                answer = await session.ask(
                    prompt,
                    client,
                    max_tokens=session.room(session.plan.stream_tokens),
                    stream=number % 2 == 1,
                )
                size = "long text" if len(prompt) > _LONG_PROMPT else "short text"
                kind = f"{size}, {'streamed' if answer.is_stream else 'whole'}"
                is_empty = answer.is_empty
                base = session.references[prompt]
                if not is_empty:
                    difference = compare_answers(base, answer, session.plan.tolerance)
        except Gone:
            _keep(session, client)
            raise
        except Unsound as error:
            fault = str(error)
        now = time.monotonic()
        soak.works.append(_Work(kind, start - begin, now - start, difference, is_empty, fault))
        if fault or is_empty or (difference and difference.kind == "drift") or turn < 10:
            _keep(session, client)


def _keep(session: SmokeSession, client: ChatClient) -> None:
    exchanges = session.client.exchanges
    for exchange in client.exchanges if len(exchanges) < _MOST_KEPT else []:
        exchanges.append(exchange.model_copy(update={"number": len(exchanges)}))


async def _watch(session: SmokeSession, soak: _Soak, begin: float) -> None:
    """Samples the server's memory, and says how far the soak is."""
    pause = max(session.soak_s / _SAMPLES, 0.05)
    ends = datetime.now() + timedelta(seconds=session.soak_s)
    printed_at = begin
    while True:
        used: int | None = None
        if session.memory_bytes:
            used = await asyncio.to_thread(session.memory_bytes)
        else:
            # the metrics of most engines are optional, and none of the evidence
            client = replace(session.client, exchanges=[])
            with suppress(NotOffered, Unsound):
                found = _RESIDENT.findall(await client.text("/metrics"))
                used = int(sum(map(float, found))) or None
        now = time.monotonic()
        if used:
            soak.memory.append((now - begin, used))
        if now - printed_at >= max(_LEAST_PAUSE_S, session.soak_s / 30):
            printed_at, bad = now, sum(bool(w.fault) or w.is_empty for w in soak.works)
            memory = f", {log.size(used)} of memory" if used else ""
            log.say(
                f"  {log.seconds(now - begin)} of {log.seconds(session.soak_s)}:"
                f" {log.count(len(soak.works), 'request')}, {bad} bad{memory};"
                f" ends at {ends:%H:%M:%S}"
            )
        await asyncio.sleep(pause)


def _no_soak(session: SmokeSession) -> str:
    return "" if session.soak and session.soak.works else "no work was done"


@SOAK.check("silent-empty turns", skip=_no_soak)
async def _empty_turns(session: SmokeSession) -> str:
    """An answer with status 200 and nothing in it ends an agent's work without a word."""
    empty = [w for w in session.soak.works if w.is_empty]
    if empty:
        first = f"the first after {log.seconds(empty[0].at)}: {empty[0].kind}"
        raise Unsound(f"{len(empty)} of {len(session.soak.works)} answers are empty; {first}")
    return "none"


@SOAK.check("drift", skip=_no_soak)
async def _drift(session: SmokeSession) -> str:
    """Answers as they were in the first minutes."""
    differences = [w.difference for w in session.soak.works if w.difference]
    found = session.require_close(differences)
    parts = session.soak.thirds()
    shares = []
    for works in parts:
        judged = [w.difference.kind == "equal" for w in works if w.difference]
        if len(judged) < _FEWEST:
            return found
        shares.append(sum(judged) / len(judged))
    if shares[1] < shares[0] - _FEWER_EQUAL:
        raise Unsound(f"equal at first: {shares[0]:.0%}, in the last third: {shares[1]:.0%}")
    return found


@SOAK.check("speed", skip=_no_soak)
async def _speed(session: SmokeSession) -> str:
    """No kind of request takes longer in the last third than in the first."""
    message = []
    for kind in sorted({w.kind for w in session.soak.works} - {"hang up"}):
        first, last = session.soak.thirds(kind)
        if min(len(first), len(last)) < _FEWEST:
            continue
        was, now = (statistics.median(w.seconds for w in works) for works in (first, last))
        if now > _SLOWER * was + _SLOWER_S:
            raise Unsound(f"{kind}: {was:.2f} s at first, {now:.2f} s in the last third")
        message.append(f"{kind} {was:.2f} → {now:.2f} s")
    if not message:
        raise NotOffered("too few requests to compare the first third with the last")
    return ", ".join(message)


@SOAK.check("memory", skip=_no_soak)
async def _memory(session: SmokeSession) -> str:
    """What the server holds does not grow; leaves out the beginning, when caches fill."""
    soak = session.soak
    parts = [
        [used for at, used in soak.memory if low <= at / soak.seconds < high]
        for low, high in ((0.1, 0.4), (0.4, 0.7), (0.7, 1.1))
    ]
    if min(map(len, parts)) < 2:
        raise NotOffered("neither metrics nor a container of ours tell the server's memory")
    first, middle, last = map(statistics.median, parts)
    message = f"{log.size(first)} at first, {log.size(last)} in the last third"
    if last > first * (1 + _GROWTH) + _GROWTH_BYTES and first < middle < last:
        raise Unsound(f"the server's memory grows: {message}")
    return message

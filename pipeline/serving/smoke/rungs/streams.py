"""Rung 4: many requests at once get the answers that each gets alone."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from functools import partial

from pipeline.core.net.wire import KeptConnection
from pipeline.serving.smoke.chat import ChatAnswer
from pipeline.serving.smoke.client import WAIT, Gone, NotOffered, Unsound
from pipeline.serving.smoke.compare import TextDifference, compare_answers, reference, written_text
from pipeline.serving.smoke.rungs.tools import require_call, without_tools
from pipeline.serving.smoke.session import CheckSpec, Rung, SmokeSession
from pipeline.serving.smoke.tasks import SCENARIOS, TOOLS, countings, sums

STREAMS = Rung("streams", "Many requests at once are answered like one")
# Different prompts, so that what one stream takes from another shows.
_PROMPTS = 8
_TOOL_STREAMS = 8
_SHORT_PROMPTS, _SHORT_TOKENS, _LANES = 24, 4, 8
_SLACK, _SLACK_S = 1.5, 2.0  # more than a server takes that answers one after the other
_CONNECTIONS, _IN_TURN = 4, 6
_HUNG_UP, _LONG_COUNT = 16, 200  # streams that nobody reads to the end, of so many numbers
_TIMES_LONGER = 20.0  # times what a round took before


def _tokens(session: SmokeSession) -> int:
    # some models think although they are asked not to
    return session.room(session.plan.stream_tokens)


@STREAMS.check("alone")
async def _alone(session: SmokeSession) -> str:
    """What every stream is held against; asked twice, one at a time."""
    questions = countings(_PROMPTS)
    for question in questions:
        base = await session.reference_for(question.prompt, max_tokens=_tokens(session))
        if session.plan.quality and not question.is_held(base.text):
            raise Unsound(f"{question.prompt!r}: {base.text[:120]!r}")
    return f"{len(questions)} answers, one at a time"


async def as_alone(session: SmokeSession, number: int) -> str:
    """Asks so many at once, for the answers that each got alone; every round, within the time."""
    parts, times = [], list[float]()
    before = len(session.client.exchanges)
    fewer = max((n for n in session.seconds_at_once if n < number), default=0)
    known = session.seconds_at_once.get(fewer, math.inf)
    # one after the other would take so many times as long, and no longer
    most_s = _SLACK * known * number / max(fewer, 1) + _SLACK_S
    for turn in range(session.plan.rounds + 1):
        # once more only where each was slow: a pause of the machine is no fault of the server
        if turn == session.plan.rounds and min(times) <= most_s:
            break
        begin = time.monotonic()
        parts.append(await one_round(session, number, turn))
        times.append(time.monotonic() - begin)
    # the best of the rounds: kernels may be compiled in the first
    took = session.seconds_at_once[number] = min(times)
    # a server that asks to wait is slow because it says so
    has_waited = any(e.status == WAIT for e in session.client.exchanges[before:])
    if took > most_s and not has_waited:
        raise Unsound(f"{number} at once took {took:.1f} s, {fewer} at once {known:.1f} s")
    return "; then ".join(parts)


@STREAMS.parts.append
def _each_number(session: SmokeSession) -> list[CheckSpec]:
    return [
        CheckSpec(f"{number} at once", "mechanics", partial(as_alone, number=number))
        for number in session.plan.streams
    ]


async def one_round(session: SmokeSession, number: int, turn: int = 0) -> str:
    """Asks so many at once, once."""
    questions, tolerance = countings(_PROMPTS), session.plan.tolerance
    # in another order each time: which request shares a batch with which is part of the test
    chosen = [questions[(i * 3 + turn) % _PROMPTS] for i in range(number)]
    results = await session.ask_all([q.prompt for q in chosen], number, max_tokens=_tokens(session))
    failed = [r for r in results if isinstance(r, Unsound)]
    pairs = [(q, r) for q, r in zip(chosen, results, strict=True) if isinstance(r, ChatAnswer)]
    empty = sum(answer.is_empty for _, answer in pairs)
    if failed or empty:
        first = f": {failed[0]}" if failed else ""
        raise Unsound(f"of {number} answers {empty} are empty and {len(failed)} failed{first}")
    for _, answer in pairs:
        session.require_clean(answer)
    # no answer of another prompt: certain also where a server gives no logprobs
    prompts = {base.text: prompt for prompt, base in session.references.items()}
    for question, answer in pairs:
        text, base = written_text(answer), session.references[question.prompt]
        # a model that only recites gives one answer to all
        if session.plan.quality and text != base.text and text in prompts:
            raise Unsound(f"{question.prompt!r} got the answer to {prompts[text]!r}")
    bases = session.references
    found = session.require_close(
        [compare_answers(bases[q.prompt], a, tolerance) for q, a in pairs]
    )
    # after a tie the rest may differ, and must still be right
    wrong = [a for q, a in pairs if session.plan.quality and not q.is_held(a.text)]
    if len(wrong) > tolerance.near_share * len(pairs):
        raise Unsound(f"{len(wrong)} of {len(pairs)} are wrong; {wrong[0].text[:120]!r}")
    return found


@STREAMS.check("connections that stay open")
async def _kept_connections(session: SmokeSession) -> str:
    """Clients and proxies send one request after the other on a connection: whose answer comes?"""
    questions = sums(_CONNECTIONS * _IN_TURN, seed=41)
    bases = [reference(await session.ask_known(q.prompt, max_tokens=16)) for q in questions]

    async def lane(number: int) -> tuple[list[TextDifference], int]:
        kept, found = KeptConnection(), list[TextDifference]()
        client = replace(session.client, kept=kept)
        try:
            for turn in range(_IN_TURN):
                which = turn * _CONNECTIONS + number
                answer = await session.ask(
                    questions[which].prompt, client, max_tokens=16, stream=turn % 3 == 1
                )
                found.append(compare_answers(bases[which], answer, session.plan.tolerance))
        finally:
            kept.close()
        return found, kept.reuses

    lanes = await asyncio.gather(*(lane(n) for n in range(_CONNECTIONS)))
    same = session.require_close([each for found, _ in lanes for each in found])
    if not (reuses := sum(n for _, n in lanes)):
        raise NotOffered("the server ends every connection after one answer")
    return f"{_CONNECTIONS} connections, used again {reuses} times: {same}"


@STREAMS.check("streams that nobody reads to the end")
async def hang_ups(session: SmokeSession) -> str:
    """Users press stop: what they leave behind takes no place, and is in nobody else's answer."""
    number = min(_PROMPTS, max(session.plan.streams))
    # one alone first: the next request may be the one that suffers
    await session.hang_up(countings(1, _LONG_COUNT, start=4000)[0].prompt, 2)
    begin = time.monotonic()
    await one_round(session, number)
    longest_s = _TIMES_LONGER * (time.monotonic() - begin) + session.plan.limits.first_token_s
    count = max(_HUNG_UP, max(session.plan.streams))
    questions = countings(count, _LONG_COUNT, start=5000)
    # at once, after the head, and in the middle
    begun = [session.hang_up(q.prompt, place % 4) for place, q in enumerate(questions)]
    try:
        async with asyncio.timeout(count * longest_s):
            await asyncio.gather(*begun)
        async with asyncio.timeout(longest_s):
            found = await one_round(session, number, turn=1)
    except TimeoutError as error:
        why = f"after {count} streams that the client left"
        raise Gone(f"{why}: no answers to {number} requests in {longest_s:.0f} s") from error
    return f"{count} were left; then {found}"


@STREAMS.check("short ones in turn")
async def _turns(session: SmokeSession) -> str:
    """Short requests of several lengths, so that places become free and are taken at all moments.

    Where as many long ones ran at once, a KV cache that lost sight of cells in use still gave the
    right text; with these it gave NUL bytes: images/sources/ik-llama/patches/used-cells.patch.
    """
    asked, bases = [], []
    for number, question in enumerate(sums(_SHORT_PROMPTS, seed=21)):
        prompt = "Please. " * (number % 4) + question.prompt.partition("?")[0] + "?"
        # a few, of some more than of others
        most = session.room(_SHORT_TOKENS + number % 4 * 4)
        answer = await session.ask_known(prompt, max_tokens=most)
        session.require_clean(answer)
        asked.append((prompt, most))
        bases.append(reference(answer))
    places = asyncio.Semaphore(min(_LANES, max(session.plan.streams)))

    async def one(number: int) -> TextDifference | Unsound:
        # in another order each time
        which = number * 7 % len(asked)
        prompt, most = asked[which]
        async with places:
            try:
                answer = await session.ask(prompt, max_tokens=most, stream=number % 2 == 1)
            except Unsound as error:
                return error
        return compare_answers(bases[which], answer, session.plan.tolerance)

    count = session.plan.short_requests * session.plan.rounds
    results = await asyncio.gather(*(one(n) for n in range(count)))
    if failed := [r for r in results if isinstance(r, Unsound)]:
        raise Unsound(f"{len(failed)} of {count} short requests failed: {failed[0]}")
    return session.require_close([r for r in results if isinstance(r, TextDifference)])


@STREAMS.check("tool calls at once", "quality", without_tools)
async def tools_at_once(session: SmokeSession) -> str:
    """Tool calls are lost in streams under load: vllm-project/vllm#54701, #53246."""

    async def one(number: int) -> None:
        scenario = SCENARIOS[number % len(SCENARIOS)]
        answer = await session.ask(scenario.prompt, tools=TOOLS, stream=number % 4 != 3)
        require_call(answer, scenario)

    number = min(_TOOL_STREAMS, max(session.plan.streams)) * session.plan.rounds
    results = await asyncio.gather(*(one(i) for i in range(number)), return_exceptions=True)
    failed = [r for r in results if isinstance(r, BaseException)]
    if failed and not isinstance(failed[0], Unsound):
        raise failed[0]
    if failed:
        raise Unsound(f"{len(failed)} of {number} calls at once: {failed[0]}")
    return f"{number} calls at once, all right"

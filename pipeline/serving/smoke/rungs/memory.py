"""Rung 8: what the server keeps of earlier prompts is what it computed for them."""

from __future__ import annotations

import asyncio

from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.rungs.length import UNKNOWN_CONTEXT, prompt_for, sized_haystack
from pipeline.serving.smoke.rungs.streams import one_round, tools_at_once
from pipeline.serving.smoke.rungs.tools import without_tools
from pipeline.serving.smoke.session import Rung, SmokeSession
from pipeline.serving.smoke.tasks import SmokeQuestion

MEMORY = Rung("memory", "What is kept of earlier prompts is right")
_AT_ONCE = 8
_SHORT_ANSWER = 32
_TOO_MUCH = (400, 413, 422)
# vLLM watches for it: docs.vllm.ai, `--jit-monitor-mode`
_COMPILED = "jit_monitor"
_FIRST_SEED = 1000  # of the texts that push others out


def _tokens(session: SmokeSession) -> int:
    """The size of a text: much of a small context, and no more than the plan says."""
    most, wanted = session.context_tokens, session.plan.prefix_tokens
    if most is None:
        return wanted
    # a tiny context holds little else; of a large one, half leaves room for what comes beside it
    return min(wanted, most // 2 if most >= 2048 else most * 3 // 4)


async def _questions(session: SmokeSession, seed: int = 7) -> list[SmokeQuestion]:
    stack = await sized_haystack(session, _tokens(session), seed)
    return [SmokeQuestion(prompt_for(stack, q), q.want) for q in stack.needles]


async def _first_questions(session: SmokeSession) -> list[SmokeQuestion]:
    """Questions about the text that all checks share, each answered once before."""
    try:
        questions = await _questions(session)
        for question in questions:
            await session.reference_for(question.prompt, max_tokens=session.room(_SHORT_ANSWER))
    except RequestRefused as error:
        # perhaps more than the server holds: it does not say how much
        if session.context_tokens is None and error.status in _TOO_MUCH:
            raise NotOffered(f"{_tokens(session)} tokens: {error}; {UNKNOWN_CONTEXT}") from error
        raise
    return questions


async def _ask_again(session: SmokeSession) -> str:
    """Asks all questions about the text at the same time, and compares with the first answers."""
    questions, room = await _first_questions(session), session.room(_SHORT_ANSWER)
    prompts = [q.prompt for q in questions * 2]
    answers = await session.ask_clean(prompts, _AT_ONCE, max_tokens=room)
    sentence = ""
    for number, question in enumerate(questions):
        same = answers[number :: len(questions)]
        for answer in same:
            _require_needle(session, question, answer.text)
        sentence = session.require_same(session.references[question.prompt], same)
    return f"{len(answers)} answers as before ({sentence} each)"


def _require_needle(
    session: SmokeSession, question: SmokeQuestion, text: str, where: str = ""
) -> None:
    # not `mistake`, which repeats the prompt: it is as long as the context
    if session.plan.quality and not question.is_right(text):
        raise Unsound(f"{where}the needle is {question.want}, not {text[:60]!r}")


@MEMORY.check("shared prefix")
async def shared_prefix(session: SmokeSession) -> str:
    """Questions about one text, alone and at the same time."""
    for question in await _first_questions(session):
        _require_needle(session, question, session.references[question.prompt].text)
    return await _ask_again(session)


@MEMORY.check("cached tokens", skip=lambda s: "" if s.plan.caches else "no cache is expected")
async def _cached(session: SmokeSession) -> str:
    """A text that came before is not computed again, where the server counts what it kept."""
    question, counts = (await _first_questions(session))[0], []
    for _ in range(2):
        answer = await session.ask(question.prompt, max_tokens=session.room(_SHORT_ANSWER))
        counts.append(answer.usage.cached_tokens if answer.usage else None)
    known = [n for n in counts if n is not None]
    if not known:
        raise NotOffered("the server does not count cached tokens (prompt_tokens_details)")
    if not max(known):
        raise Unsound(
            f"a prompt of {answer.prompt_tokens} tokens came again, and none was kept"
            " (--no-cache expects that)"
        )
    if max(known) > answer.prompt_tokens:
        raise Unsound(f"{max(known)} tokens were kept of a prompt of {answer.prompt_tokens}")
    return f"{max(known)} of {answer.prompt_tokens} tokens were kept"


@MEMORY.check("pressure")
async def _pressure(session: SmokeSession) -> str:
    """Other texts until the first is pushed out, then the first again: LMCache/LMCache#4247."""
    await _first_questions(session)
    others = []
    for number in range(session.plan.pressure_prompts):
        others.append((await _questions(session, _FIRST_SEED + number))[0])
    prompts, room = [q.prompt for q in others], session.room(_SHORT_ANSWER)
    answers = await session.ask_clean(prompts, _AT_ONCE, max_tokens=room)
    for question, answer in zip(others, answers, strict=True):
        _require_needle(session, question, answer.text, "under pressure: ")
    again = await _ask_again(session)
    return f"after {len(others)} texts of {_tokens(session)} tokens: {again}"


@MEMORY.check(
    "compiles", skip=lambda s: "" if s.read_log else "the log of an address cannot be read"
)
async def _compiles(session: SmokeSession) -> str:
    """Kernels that the engine compiled during the test, by its own log: each stalls everybody."""
    assert session.read_log is not None
    written = list(await asyncio.to_thread(session.read_log))[session.log_lines :]
    lines = [line for line in written if _COMPILED in line]
    if not lines:
        return "the engine's log names no kernel that was compiled during the test"
    return f"{len(lines)} kernels were compiled during the test, the last: {lines[-1][-120:]}"


@MEMORY.check("restart", skip=lambda s: "" if s.restart else s.why_no_restart)
async def _restarted(session: SmokeSession) -> str:
    """Also short prompts and tool calls: what is kept on a disk is more than a cache of texts."""
    assert session.restart is not None
    await _first_questions(session)
    await session.restart()
    again = await _ask_again(session)
    short = await one_round(session, min(_AT_ONCE, max(session.plan.streams)))
    if session.plan.quality and not without_tools(session):
        short += f"; {await tools_at_once(session)}"
    return f"{again}; short prompts at once: {short}"

"""Rung 6: what the server keeps of earlier prompts is what it computed for them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.smoke.client import NotOffered, Refused, Unsound
from pipeline.smoke.rungs.length import UNKNOWN_CONTEXT, prompt_for, sized_haystack
from pipeline.smoke.rungs.streams import one_round, tools_at_once
from pipeline.smoke.rungs.tools import without_tools
from pipeline.smoke.session import CheckSpec, Rung, Session, answers_of
from pipeline.smoke.tasks import Question

_AT_ONCE = 8
_SHORT_ANSWER = 32
_TOO_MUCH = (400, 413, 422)
_FIRST_SEED = 1000  # of the texts that push others out


def _tokens(session: Session) -> int:
    """The size of a text: a good part of a small context, and no more than the plan says."""
    most, wanted = session.context_tokens, session.plan.prefix_tokens
    if most is None:
        return wanted
    # a tiny context holds little else; of a large one, half leaves room for what comes beside it
    return min(wanted, most // 2 if most >= 2048 else most * 3 // 4)


def _room(session: Session) -> int:
    return session.room(_SHORT_ANSWER)


async def _questions(session: Session, seed: int = 7) -> list[Question]:
    stack = await sized_haystack(session, _tokens(session), seed)
    return [Question(prompt_for(stack, q), q.want) for q in stack.needles]


async def _first_questions(session: Session) -> list[Question]:
    """Questions about the text that all checks share, each answered once before."""
    try:
        questions = await _questions(session)
        for question in questions:
            await session.reference_for(question.prompt, max_tokens=_room(session))
    except Refused as error:
        # perhaps more than the server holds: it has not said how much that is
        if session.context_tokens is None and error.status in _TOO_MUCH:
            raise NotOffered(f"{_tokens(session)} tokens: {error}; {UNKNOWN_CONTEXT}") from error
        raise
    return questions


async def _ask_again(session: Session) -> str:
    """All questions about the one text, at the same time, held against the first answers."""
    questions = await _first_questions(session)
    results = await session.ask_all(
        [q.prompt for q in questions * 2], _AT_ONCE, max_tokens=_room(session)
    )
    answers = answers_of(results)
    sentence = ""
    for number, question in enumerate(questions):
        same = answers[number :: len(questions)]
        for answer in same:
            session.require_clean(answer)
            if session.plan.quality and not question.is_right(answer.text):
                raise Unsound(f"the needle is {question.want}, not {answer.text[:60]!r}")
        sentence = session.require_same(session.references[question.prompt], same)
    return f"{len(answers)} answers as before ({sentence} each)"


async def _prefix(session: Session) -> str:
    for question in await _first_questions(session):
        base = session.references[question.prompt]
        if session.plan.quality and not question.is_right(base.text):
            raise Unsound(f"the needle is {question.want}, not {base.text[:60]!r}")
    return await _ask_again(session)


async def _pressure(session: Session) -> str:
    """Other texts until the first is pushed out, then the first again: LMCache/LMCache#4247."""
    await _first_questions(session)
    others = []
    for number in range(session.plan.pressure_prompts):
        others.append((await _questions(session, _FIRST_SEED + number))[0])
    results = await session.ask_all([q.prompt for q in others], _AT_ONCE, max_tokens=_room(session))
    answers = answers_of(results)
    for question, answer in zip(others, answers, strict=True):
        session.require_clean(answer)
        if session.plan.quality and not question.is_right(answer.text):
            raise Unsound(f"under pressure: {question.want}, not {answer.text[:60]!r}")
    again = await _ask_again(session)
    return f"after {len(others)} texts of {_tokens(session)} tokens: {again}"


async def _restarted(session: Session) -> str:
    """Also short prompts and tool calls: what is kept on a disk is more than a cache of texts."""
    assert session.restart is not None
    await _first_questions(session)
    await session.restart()
    again = await _ask_again(session)
    short = await one_round(session, min(_AT_ONCE, max(session.plan.streams)))
    if session.plan.quality and not without_tools(session):
        short += f"; {await tools_at_once(session)}"
    return f"{again}; short prompts at once: {short}"


def _no_restart(session: Session) -> str:
    return "" if session.restart else session.why_no_restart


def _checks(session: Session) -> Sequence[CheckSpec]:
    return [
        CheckSpec("shared prefix", "mechanics", _prefix),
        CheckSpec("pressure", "mechanics", _pressure),
        CheckSpec("restart", "mechanics", _restarted, _no_restart),
    ]


MEMORY = Rung("memory", "What is kept of earlier prompts is right", _checks)

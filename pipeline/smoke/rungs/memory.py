"""Rung 6: what the server keeps of earlier prompts is what it computed for them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.smoke.client import Unsound
from pipeline.smoke.rungs.length import prompt_for, sized_haystack
from pipeline.smoke.session import CheckSpec, Rung, Session, answers_of
from pipeline.smoke.tasks import Question

_AT_ONCE = 8
_SHORT_ANSWER = 32
_FIRST_SEED = 1000  # of the texts that push others out


def _tokens(session: Session) -> int:
    """The size of a text: a good part of a small context, and no more than the plan says."""
    most, wanted = session.context_tokens, session.plan.prefix_tokens
    if most is None:
        return wanted
    # a tiny context holds little else; of a large one, half leaves room for what comes beside it
    return min(wanted, most // 2 if most >= 2048 else most * 3 // 4)


def _room(session: Session) -> int:
    return session.plan.answer_tokens if session.plan.reasoning else _SHORT_ANSWER


async def _questions(session: Session, seed: int = 7) -> list[Question]:
    stack = await sized_haystack(session, _tokens(session), seed)
    return [Question(prompt_for(stack, q), q.want) for q in stack.needles]


async def _ask_again(session: Session) -> str:
    """All questions about the one text, at the same time, held against the first answers."""
    questions = await _questions(session)
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
        base = await session.reference_for(question.prompt, max_tokens=_room(session))
        sentence = session.require_same(base, same)
    return f"{len(answers)} answers as before ({sentence} each)"


async def _prefix(session: Session) -> str:
    for question in await _questions(session):
        base = await session.reference_for(question.prompt, max_tokens=_room(session))
        if session.plan.quality and not question.is_right(base.text):
            raise Unsound(f"the needle is {question.want}, not {base.text[:60]!r}")
    return await _ask_again(session)


async def _pressure(session: Session) -> str:
    """Other texts until the first is pushed out, then the first again: LMCache/LMCache#4247."""
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
    assert session.restart is not None
    await session.restart()
    return await _ask_again(session)


def _no_restart(session: Session) -> str:
    return "" if session.restart else session.why_no_restart


def _checks(session: Session) -> Sequence[CheckSpec]:
    return [
        CheckSpec("shared prefix", "mechanics", _prefix),
        CheckSpec("pressure", "mechanics", _pressure),
        CheckSpec("restart", "mechanics", _restarted, _no_restart),
    ]


MEMORY = Rung("memory", "What is kept of earlier prompts is right", _checks)

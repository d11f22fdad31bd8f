"""A trusted run, recorded."""

from __future__ import annotations

from pipeline.smoke.baseline import (
    Baseline,
    BaselineAnswer,
    BaselineToken,
    baseline_questions,
    is_right,
)
from pipeline.smoke.compare import said_by
from pipeline.smoke.session import Session


async def record_baseline(session: Session, url: str) -> Baseline:
    """Ask one after the other, so that nothing depends on a batch."""
    answers = []
    for question in baseline_questions():
        answer = await session.ask_known(question.prompt)
        session.require_clean(answer)
        answers.append(
            BaselineAnswer(
                prompt=question.prompt,
                text=said_by(answer),
                is_right=is_right(question, answer.text),
                is_cut=answer.is_cut,
                tokens=[
                    BaselineToken(text=t.text, logprob=t.logprob, top=list(t.top))
                    for t in answer.tokens
                ],
            )
        )
    return Baseline(
        model=session.model, url=url, answer_tokens=session.answer_tokens, answers=answers
    )

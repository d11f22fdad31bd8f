"""Greedy answers of a trusted run, in a file: the oracle for another machine or a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipeline.errors import InputInvalid
from pipeline.files import write_bytes
from pipeline.model import Frozen, canonical_json
from pipeline.smoke.chat import Token
from pipeline.smoke.compare import Reference
from pipeline.smoke.tasks import Question, countings, sums, word_problems

if TYPE_CHECKING:
    from pipeline.smoke.session import Session

_MOST_BYTES = 64 << 20


class BaselineToken(Frozen):
    """A token with those that could have been chosen."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


class BaselineAnswer(Frozen):
    """One prompt and its answer."""

    prompt: str
    text: str
    is_right: bool
    tokens: list[BaselineToken]

    def reference(self) -> Reference:
        """As checks compare it."""
        tokens = tuple(Token(t.text, t.logprob, tuple(t.top)) for t in self.tokens)
        return Reference(self.text, tokens)


class Baseline(Frozen):
    """All answers of a trusted run."""

    model: str
    url: str
    answers: list[BaselineAnswer]


def baseline_questions() -> list[Question]:
    """What a trusted run is asked: long answers, small sums, problems of three steps."""
    return [*countings(6), *sums(12, seed=11), *word_problems(12, seed=12)]


def is_right(question: Question, text: str) -> bool:
    """A long answer holds all that is wanted; a short one ends with it."""
    return question.want in text if "," in question.want else question.is_right(text)


async def record_baseline(session: Session, url: str) -> Baseline:
    """Ask one after the other, so that nothing depends on a batch."""
    answers = []
    for question in baseline_questions():
        answer = await session.ask_known(question.prompt)
        session.require_clean(answer)
        text = answer.reasoning + answer.text
        answers.append(
            BaselineAnswer(
                prompt=question.prompt,
                text=text,
                is_right=is_right(question, answer.text),
                tokens=[
                    BaselineToken(text=t.text, logprob=t.logprob, top=list(t.top))
                    for t in answer.tokens
                ],
            )
        )
    return Baseline(model=session.model, url=url, answers=answers)


def write_baseline(path: Path, baseline: Baseline) -> None:
    """The same bytes for the same answers."""
    write_bytes(path, canonical_json(baseline.model_dump(mode="json")) + b"\n")


def read_baseline(path: Path) -> Baseline:
    """A recorded run, or an error that names what is wrong with the file."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputInvalid(f"{path}: is larger than {_MOST_BYTES} bytes")
        return Baseline.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise InputInvalid(
            f"{path}: is no baseline: {why}", "Record one with `sm120 smoke URL --record FILE`."
        ) from error

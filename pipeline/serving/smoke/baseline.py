"""Greedy answers of a trusted run, in a file: the oracle for another machine or a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from pipeline.core.errors import InputInvalid
from pipeline.core.files import write_bytes
from pipeline.core.model import Frozen, canonical_json
from pipeline.serving.smoke.chat import Token
from pipeline.serving.smoke.compare import Reference
from pipeline.serving.smoke.tasks import Question, countings, sums, word_problems

_MOST_BYTES = 64 << 20


class BaselineAnswer(Frozen):
    """One prompt and its answer."""

    prompt: str
    text: str
    is_right: bool
    is_cut: bool = False  # earlier versions wrote no such field
    tokens: tuple[Token, ...]

    def reference(self) -> Reference:
        """As checks compare it."""
        return Reference(self.text, self.tokens, self.is_cut)


class Baseline(Frozen):
    """All answers of a trusted run."""

    model: str
    url: str
    # how many tokens an answer might have; earlier versions wrote no such field
    answer_tokens: Annotated[int, Field(ge=1)] | None = None
    answers: list[BaselineAnswer]


def baseline_questions() -> list[Question]:
    """What a trusted run is asked: long answers, small sums, problems of three steps."""
    return [*countings(6), *sums(12, seed=11), *word_problems(12, seed=12)]


def is_right(question: Question, text: str) -> bool:
    """A long answer holds all that is wanted; a short one ends with it."""
    return question.is_held(text) if "," in question.want else question.is_right(text)


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

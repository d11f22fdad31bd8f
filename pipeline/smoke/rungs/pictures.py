"""Rung 7: pictures, where the model sees; asked after everything that is text."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.smoke.client import Unsound
from pipeline.smoke.picture import picture_questions
from pipeline.smoke.session import CheckSpec, Rung, Session, answers_of

_SEEN_SHARE = 0.75  # whoever does not look is right about one in three
UNSEEN = "neither the recipe nor the server says that the model sees"


async def _pictures(session: Session) -> str:
    """Each in a request of its own, all at once: one that is taken for another shows, too."""
    questions = picture_questions()
    results = await session.ask_all([q.messages() for q in questions], len(questions))
    answers = answers_of(results)
    pairs = list(zip(questions, answers, strict=True))
    wrong = [(q, a) for q, a in pairs if not q.is_right(a.text)]
    if len(wrong) > (1 - _SEEN_SHARE) * len(pairs):
        question, answer = wrong[0]
        raise Unsound(
            f"{len(wrong)} of {len(pairs)} pictures are not seen as they are;"
            f" {question.prompt!r} is {question.want}, not {answer.text[:60]!r}"
        )
    return f"{len(pairs) - len(wrong)} of {len(pairs)} pictures are seen as they are"


def _no_vision(session: Session) -> str:
    if session.plan.text_only:
        return "--text-only"
    return "" if session.plan.vision or session.sees else UNSEEN


def _checks(session: Session) -> Sequence[CheckSpec]:
    return [CheckSpec("pictures", "quality", _pictures, _no_vision)]


PICTURES = Rung("pictures", "Pictures are seen as they are", _checks)

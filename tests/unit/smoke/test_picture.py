"""Pictures hold what is asked about them, and only the right word is right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.serving.smoke.ladder import LADDER, run_ladder
from pipeline.serving.smoke.model import SmokeResult
from pipeline.serving.smoke.rungs.pictures import PICTURES, picture_questions
from tests.testbed.model_eye import look_at
from tests.testbed.model_faults import FAULTS
from tests.testbed.model_server import Asked, Fault, ModelServer, Refusal, listening
from tests.unit.smoke.ladder_runs import PLAN, open_session


def test_an_eye_sees_in_each_picture_what_is_wanted() -> None:
    for question in picture_questions():
        assert question.is_right(look_at(question.png, question.prompt))


def test_no_two_pictures_are_the_same_and_a_request_holds_one() -> None:
    assert len({q.png for q in picture_questions()}) == len(picture_questions())
    (message,) = picture_questions()[0].messages()
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image_url", "text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize("text", ["Blue", "blue.", "**Blue**", "It is not red, it is blue!"])
def test_a_right_word_is_right_however_it_is_written(text: str) -> None:
    assert picture_questions()[0].is_right(text)


@pytest.mark.parametrize(
    "text", ["", "I cannot see pictures.", "Red", "blue or red", "Bluefish", "7", "blueberry"]
)
def test_other_words_are_wrong(text: str) -> None:
    assert not picture_questions()[0].is_right(text)


class Props(ModelServer):
    """A server that says in /props what its model sees, as llama.cpp does."""

    def __init__(self, modalities: Any, fault: Fault | None = None) -> None:
        super().__init__(fault)
        self.modalities = modalities

    def _got(self, asked: Asked) -> Any:
        if asked.path == "/props":
            settings = {"n_ctx": 2048}
            return {"modalities": self.modalities, "default_generation_settings": settings}
        answer = super()._got(asked)
        for model in answer.get("data", []):
            del model["max_model_len"]
        return answer


def _ladder_result(server: ModelServer) -> SmokeResult:
    async def run() -> SmokeResult:
        async with listening(server) as url:
            return await run_ladder(
                open_session(url, PLAN), url, (LADDER[0], PICTURES), say=lambda _: None
            )

    return asyncio.run(run())


def _pictures(result: SmokeResult) -> str:
    return next(c.verdict for r in result.rungs for c in r.checks if c.name == "pictures")


def test_a_server_that_says_that_it_sees_is_held_to_it() -> None:
    blind = next(fault for fault in FAULTS if fault.name == "blind to pictures")
    assert _pictures(_ladder_result(Props({"vision": True}))) == "passed"
    assert _pictures(_ladder_result(Props({"vision": True}, blind))) == "failed"


@pytest.mark.parametrize("modalities", [{"vision": False}, {"vision": "yes"}, None, [], "vision"])
def test_a_server_that_does_not_say_so_is_shown_no_picture(modalities: Any) -> None:
    def refuse(asked: Asked) -> None:
        if asked.picture is not None:
            raise Refusal(500, "what is that?")

    result = _ladder_result(Props(modalities, Fault("surprised", asked=refuse)))
    assert (_pictures(result), result.verdict) == ("skipped", "passed")

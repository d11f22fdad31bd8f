"""Ties are forgiven, drift never is, and what cannot be judged is counted."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.serving.smoke.chat import ChatAnswer, Token, logprobs_fault
from pipeline.serving.smoke.compare import AnswerReference, TextDifference, compare_answers, tally
from pipeline.serving.smoke.model import Exchange, Tolerance

TOLERANCE = Tolerance()
BASE = AnswerReference(
    "The sky is blue",
    (
        Token("The", -0.1, (("The", -0.1), ("A", -0.3))),
        Token(" sky", -0.5, ((" sky", -0.5), (" sea", -0.6), (" sun", -1.2), (" car", -6.0))),
        Token(" is", -0.1, ((" is", -0.1), (" was", -3.0))),
        Token(" blue", -0.1, ((" blue", -0.1), (" grey", -4.0))),
    ),
)


def _answer(text: str, finish: str = "stop") -> ChatAnswer:
    exchange = Exchange(
        number=0, check="", method="POST", path="/", request="", status=200, answer="", seconds=0
    )
    return ChatAnswer(text, "", (), finish, "m", None, (), exchange, 0.0, False)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The sky is blue", "equal"),
        ("The sea is blue", "tie"),
        ("A sky is blue", "tie"),
        ("The sun is hot", "near"),
        ("The sky", "drift"),
        ("The sky is blue and", "near"),
        ("The car is blue", "drift"),
        ("The sky was red", "drift"),
        ("The sky is grey", "drift"),
        ("The zzz is blue", "drift"),
        ("Xyz", "tie"),
    ],
)
def test_the_first_difference_is_judged_by_the_references_own_probabilities(
    text: str, kind: str
) -> None:
    assert compare_answers(BASE, _answer(text), TOLERANCE).kind == kind


@pytest.mark.parametrize(
    ("text", "finish", "is_cut", "kind"),
    [
        ("The sky is", "length", True, "equal"),
        ("The sky is blue and", "length", True, "equal"),
        # one that ended by itself, a reference that did, half an answer, another one, nothing
        ("The sky is", "stop", True, "drift"),
        ("The sky is", "length", False, "near"),
        ("The sky", "length", True, "near"),
        ("The sky is grey", "length", True, "drift"),
        ("", "length", True, "near"),
    ],
)
def test_where_both_are_cut_one_may_be_longer(
    text: str, finish: str, is_cut: bool, kind: str
) -> None:
    # llama.cpp with a draft model ends a full context some tokens earlier
    base = BASE._replace(is_cut=is_cut)
    assert compare_answers(base, _answer(text, finish), TOLERANCE).kind == kind


FULL_STOP = AnswerReference(
    "It rains.",
    (
        Token("It rains", -0.1, (("It rains", -0.1), ("It snows", -4.0))),
        Token(".", -0.7, ((".", -0.7), ("<|im_end|>", -0.8), (" today", -3.0))),
    ),
)


def test_an_end_that_is_as_probable_as_going_on_is_a_tie() -> None:
    assert compare_answers(FULL_STOP, _answer("It rains"), TOLERANCE).kind == "tie"


@pytest.mark.parametrize("text", ["It rains today", "It", "It rains zzz"])
def test_an_end_that_could_have_been_is_no_leave_for_other_words(text: str) -> None:
    assert compare_answers(FULL_STOP, _answer(text), TOLERANCE).kind == "drift"


def test_an_end_of_which_nothing_is_known_is_a_near_miss() -> None:
    unsure = AnswerReference("a b", (Token("a", -0.1, ()), Token(" b", -1.0, ((" b", -1.0),))))
    assert compare_answers(unsure, _answer("a"), TOLERANCE).kind == "near"


def test_the_same_text_with_another_finish_reason_is_drift() -> None:
    base = BASE._replace(finish="stop")
    assert compare_answers(base, _answer(BASE.text), TOLERANCE).kind == "equal"
    assert (
        "'length', 'stop' alone"
        in compare_answers(base, _answer(BASE.text, "length"), TOLERANCE).message
    )


def _thought(reasoning: str, text: str) -> ChatAnswer:
    return dataclasses.replace(_answer(text), reasoning=reasoning)


THOUGHT = AnswerReference(
    "Let me count: fourThe answer is 4",
    (
        Token("<think>\n", -0.1, ()),
        Token("Let me count:", -0.7, (("Let me count:", -0.7), ("I will count:", -0.75))),
        Token(" four", -0.1, ((" four", -0.1), ("</think>", -5.0), (" five", -6.0))),
        Token("</think>", -0.6, (("</think>", -0.6), (" of", -0.7), (" or", -4.0))),
        Token("\n\n", -0.1, ()),
        Token("The answer is 4", -0.7, (("The answer is 4", -0.7), ("It is 4", -0.8))),
    ),
)


@pytest.mark.parametrize(
    ("reasoning", "text", "kind"),
    [
        ("Let me count: four", "The answer is 4", "equal"),
        ("I will count: four", "The answer is 4", "tie"),
        ("Let me count: four", "It is 4", "tie"),
        ("Let me count: four of them", "The answer is 4", "tie"),
        ("Let me count: four or five", "The answer is 4", "drift"),
        ("Let me count: five", "The answer is 5", "drift"),
        ("Let me count:", "The answer is 4", "drift"),
    ],
)
def test_reasoning_is_judged_although_its_marks_are_taken_out(
    reasoning: str, text: str, kind: str
) -> None:
    assert compare_answers(THOUGHT, _thought(reasoning, text), TOLERANCE).kind == kind


def test_without_logprobs_a_difference_is_not_judged() -> None:
    assert compare_answers(AnswerReference("a b", ()), _answer("a c"), TOLERANCE).kind == "unjudged"


def test_tokens_may_have_marks_that_a_parser_took_out() -> None:
    marked = AnswerReference("blue", (Token("<think>", -0.1, ()), *BASE.tokens[3:]))
    assert (
        compare_answers(AnswerReference(" blue", marked.tokens), _answer(" grey"), TOLERANCE).kind
        == "drift"
    )


def test_one_near_miss_is_allowed_and_two_of_ten_are_not() -> None:
    equal, near = TextDifference("equal"), TextDifference("near", "close")
    assert tally([near, *[equal] * 9], TOLERANCE)[1] == ""
    assert "2 near misses; close" in tally([near, near, *[equal] * 8], TOLERANCE)[1]


def test_one_drift_of_a_thousand_is_a_fault() -> None:
    differences = [TextDifference("drift", "far")] + [TextDifference("tie")] * 999
    assert "1 drift; far" in tally(differences, TOLERANCE)[1]


def test_many_differences_that_nobody_can_judge_are_a_fault() -> None:
    differences = [TextDifference("unjudged", "x")] * 4 + [TextDifference("equal")] * 4
    assert tally(differences, TOLERANCE)[1]
    assert not tally(differences[2:], TOLERANCE.model_copy(update={"unjudged_share": 0.5}))[1]


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([Token("a", float("nan"), ())], "no log of a probability"),
        ([Token("a", 0.5, ())], "no log of a probability"),
        ([Token("a", -3.0, (("b", -0.1), ("a", -3.0)))], "more probable"),
        ([Token("a", -1.0, (("a", -1.0), ("b", -1.0)))] * 3, "constant"),
        ([Token("a", -0.1, (("a", -0.1), ("b", -0.2), ("c", -0.3)))], "more than 1"),
        (BASE.tokens, ""),
        ([Token("a", -0.1, (("a", -0.1), ("a", -0.1), ("b", -3.0)))], ""),
    ],
)
def test_logprobs_that_cannot_be_are_found(tokens: list[Token], why: str) -> None:
    found = logprobs_fault(tokens)
    assert (why in found) if why else found == ""

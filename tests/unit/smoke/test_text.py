"""Corrupted text is found, and real text is left alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.serving.smoke.client import Unsound
from pipeline.serving.smoke.compare import corruption
from pipeline.serving.smoke.rungs.answers import _code
from pipeline.serving.smoke.schema import schema_fault
from pipeline.serving.smoke.tasks import (
    PERSON_SCHEMA,
    SmokeQuestion,
    haystack,
    people,
)


@pytest.mark.parametrize(
    "text",
    [
        "Great!!! That works.",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
        "| a | b |\n|----------------|----------------|\n| 1 | 2 |",
        "===========================\nTitle\n---------------------------",
        "Zürich, Tromsø and Kraków are cities; so is 京.",
        "no no no, that is not it",
        "1000000000000000000000",
        "",
    ],
)
def test_real_text_is_not_blamed(text: str) -> None:
    assert corruption(text) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\x00b", "NUL"),
        ("caf\ufffd au lait", "U+FFFD"),
        ("Hello!!!!!!!!", "!!!!"),
        ("the the the the the the the", "repeats"),
        ("It is so. It is so. It is so. It is so. It is so. It is so. It is so. ", "repeats"),
        ("aaaaaaaaaaaaaaaaaaaaaa", "repeats"),
        ("The harbour 早晨的港口很安静没有人", "Cjk"),
        ("привет как дела", "Cyrillic"),
        ("bell\x07", "U+0007"),
    ],
)
def test_corrupted_text_is_named(text: str, why: str) -> None:
    assert why in corruption(text)


def test_a_character_cut_off_by_the_limit_is_no_fault() -> None:
    assert corruption("Z\ufffd", is_cut=True) == ""
    assert corruption("Z\ufffd", is_cut=False)
    assert corruption("\ufffdZ", is_cut=True)


def test_a_script_that_was_asked_for_is_right() -> None:
    assert corruption("один, два, три, четыре", ("CYRILLIC",)) == ""
    assert corruption("one, two, three, four", ("CYRILLIC",))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"age": "34"}, 'age: is "34", not integer'),
        ({"age": True}, "age: is true, not integer"),
        ({"city": "Paris"}, "is none of"),
        ({"languages": [1]}, "languages[0]: is 1"),
        ({"extra": 1}, "which it must not"),
        ({"name": None}, "name: is null"),
    ],
)
def test_a_value_is_held_against_its_schema(change: dict[str, object], why: str) -> None:
    found = schema_fault(PERSON_SCHEMA, {**people(1)[0].facts, **change})
    assert (why in found) if why else found == ""


def test_a_missing_field_is_named() -> None:
    assert '"age" is missing' in schema_fault(PERSON_SCHEMA, {"name": "Anna"})


@pytest.mark.parametrize("text", ["113 这是", "The boats leave 的早 harbour.", "привет 4"])
def test_a_word_of_another_script_is_found_where_nobody_asked_for_names(text: str) -> None:
    assert "not Latin" in corruption(text)


@pytest.mark.parametrize("text", ["5 µm and π", "N.º 4 in the café", "一, two, three, four", "113"])
def test_signs_and_single_letters_are_no_word(text: str) -> None:
    assert corruption(text) == ""


@pytest.mark.parametrize(
    "text", ["113", "It is 113.", "29 + 84 = 113", "**113**", "1,113 - 1,000 = 113"]
)
def test_a_right_answer_ends_with_the_number(text: str) -> None:
    assert SmokeQuestion("", "113").is_right(text)


@pytest.mark.parametrize("text", ["", "114", "113 or 114", "1130", "-113", "one hundred"])
def test_a_wrong_answer_does_not(text: str) -> None:
    assert not SmokeQuestion("", "113").is_right(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"), ("x = 1", "x = 1")],
)
def test_code_is_taken_out_of_its_block(text: str, code: str) -> None:
    ran: list[str] = []

    async def ask(prompt: str) -> SimpleNamespace:
        return SimpleNamespace(text=text)

    def run_code(code: str) -> str:
        ran.append(code)
        return ""

    session: Any = SimpleNamespace(ask=ask, require_clean=lambda answer: None, run_code=run_code)

    async def run() -> str:
        return await _code(session)

    with pytest.raises(Unsound, match="gives ''"):
        asyncio.run(run())
    assert ran[0].startswith(f"{code}\nprint([")


def test_needles_lie_at_their_depths_and_texts_differ_from_the_first_word() -> None:
    stack = haystack(100, [0.1, 0.9], seed=3)
    places = [stack.text.index(f"is {q.want}.") / len(stack.text) for q in stack.needles]
    assert places == pytest.approx([0.1, 0.9], abs=0.03)
    assert stack.text[:13] != haystack(100, [0.1, 0.9], seed=4).text[:13]
    assert stack == haystack(100, [0.1, 0.9], seed=3)

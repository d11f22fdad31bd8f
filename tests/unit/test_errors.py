"""What an error says about names."""

from __future__ import annotations

import pytest

from pipeline.core.errors import there_are

MANY = [f"kimi-k{n}-vllm-8x" for n in range(1, 30)]


@pytest.mark.parametrize(
    ("wanted", "known", "text"),
    [
        ("tinny", ["tiny"], "there are: tiny"),
        ("tinny", [], "there are: none"),
        ("xyzzy", MANY[:16], f"there are: {', '.join(MANY[:16])}"),
        # of many, those with the word in it, else those that are written alike
        ("k26", MANY, "there are 29; the nearest: kimi-k26-vllm-8x"),
        ("kimi-k7-vlm-8x", MANY[:17], "there are 17; the nearest: kimi-k7-vllm-8x, "),
        ("xyzzy", MANY, "there are 29"),
        ("", MANY, f"there are 29; the nearest: {', '.join(MANY[:16])}"),
    ],
)
def test_of_few_names_all_are_named_and_of_many_the_nearest(
    wanted: str, known: list[str], text: str
) -> None:
    answer = there_are(wanted, known)
    assert answer.startswith(text) if text.endswith(", ") else answer == text

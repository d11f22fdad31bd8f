from __future__ import annotations

import re
from typing import Any

import pytest

from pipeline.serving.fit.answer import FitAnswer, answer, hybrid_hint, parallel_hint
from pipeline.serving.fit.engine import FitQuestion, shown_bytes
from pipeline.serving.fit.facts import fact_of, from_recipe, recipe_of
from pipeline.serving.fit.gguf import GgufModel
from pipeline.serving.fit.placement import (
    Batch,
    FitMachine,
    checked_layout,
    place,
    read_placement_overrides,
    shortage,
)
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.units import GIB, read_tokens

CARD = shown_bytes(96 * GIB)


def kimi() -> Architecture:
    fact = fact_of("moonshotai/Kimi-K2.6")
    assert fact is not None
    return fact.architecture()


def gguf() -> GgufModel:
    shipped = recipe_of("ubergarm/Kimi-K2.6-GGUF", "Q4_X")
    assert shipped is not None
    return from_recipe(shipped[0].architecture(), shipped[1])


def asked(**changes: Any) -> FitQuestion:
    values = {"engine": "vllm", "card_bytes": CARD, "tp": 8, "context": 65536}
    return FitQuestion.model_validate(values | changes)


def hint_for(question: FitQuestion, cards: int = 8) -> tuple[str, FitAnswer]:
    result = answer(kimi(), question)
    assert result.short
    return parallel_hint(kimi(), question, result, cards), result


FLAGS: dict[str, tuple[str, Any]] = {
    "--gpu-util": ("fraction", float),
    "--mem-fraction": ("fraction", float),
    "--kv": ("kv", str),
    "--ctx": ("context", read_tokens),
    "--prefill": ("prefill_given", int),
    "--gpu-count": ("tp", int),
    "--tp": ("tp", int),
}


@pytest.mark.parametrize(
    "question",
    [
        asked(context=262144, fraction=0.85),
        asked(context=262144, fraction=0.9),
        asked(engine="sglang"),
        asked(engine="sglang", fraction=0.995),
        asked(tp=4),
        asked(tp=2, context=1024),
        asked(tp=8, card_bytes=shown_bytes(80 * GIB)),
        asked(prefill_given=262144),
    ],
)
def test_every_option_that_a_hint_names_makes_it_fit(question: FitQuestion) -> None:
    hint, _ = hint_for(question)
    named = re.findall(r"(--[a-z-]+) ([\w.]+)(?=,|\.| or)", hint.partition("It fits with ")[2])
    assert named, hint
    for flag, text in named:
        field, read = FLAGS[flag]
        changed = question.model_copy(update={field: read(text.rstrip("."))})
        assert not answer(kimi(), changed).short, (flag, text)


def test_where_the_weights_alone_are_too_large_fewer_tokens_are_not_advised() -> None:
    hint, result = hint_for(asked(tp=4), cards=4)
    assert result.room.kv_bytes < 0
    assert hint.startswith("Fewer tokens do not help. It fits with --gpu-count 8.")
    assert "--ctx" not in hint
    assert "--kv" not in hint
    assert "ik_llama" in hint


def test_where_the_cache_is_too_large_fewer_tokens_are_advised_with_their_number() -> None:
    hint, result = hint_for(asked(context=262144, fraction=0.85))
    assert "Fewer tokens do not help" not in hint
    tokens = re.search(r"--ctx (\d+)k", hint)
    assert tokens is not None
    assert result.low_tokens - 1024 < int(tokens[1]) * 1024 <= result.low_tokens


def test_an_fp8_cache_is_advised_where_it_is_enough_and_not_used_already() -> None:
    assert "--kv fp8" in hint_for(asked(context=262144, fraction=0.9))[0]
    assert "--kv fp8" not in hint_for(asked(context=262144, fraction=0.85))[0]
    assert "--kv" not in hint_for(asked(context=262144, fraction=0.8, kv="fp8"))[0]


@pytest.mark.parametrize(
    ("tp", "cards", "flag"),
    [(4, 8, "with --tp 8."), (4, 4, "with --gpu-count 8."), (2, 4, "with --gpu-count 8 --tp 8.")],
)
def test_cards_that_are_there_are_used_before_more_are_advised(
    tp: int, cards: int, flag: str
) -> None:
    assert flag in hint_for(asked(tp=tp), cards)[0]


def test_more_cards_are_a_number_that_the_cards_of_a_request_divide() -> None:
    # 96 heads: also 24 cards, which are too small, 32 and 48
    fact = fact_of("zai-org/GLM-4.5")
    assert fact is not None
    model, cards = fact.architecture(), {"tp": 24, "card_bytes": shown_bytes(32 * GIB)}
    for dcp, more in ((1, 32), (3, 48)):
        question = asked(dcp=dcp, **cards)
        hint = parallel_hint(model, question, answer(model, question), 24)
        assert f"--gpu-count {more}." in hint


def test_measured_weights_tell_nothing_about_other_numbers_of_cards() -> None:
    hint, _ = hint_for(asked(tp=4, measured_bytes=140 * GIB))
    assert "No single option makes it fit" in hint
    assert "--gpu-count" not in hint


def test_a_host_that_is_too_small_is_told_how_much_it_needs() -> None:
    machine, batch = FitMachine(1, CARD, host_bytes=100 * GIB), Batch(65536, "bf16")
    layout = place(gguf(), machine, batch)
    hint = hybrid_hint(gguf(), machine, batch, layout)
    found = re.search(r"--ram (\d+)GiB or --gpu-count (\d+)\.", hint)
    assert found is not None
    enough, less = (FitMachine(1, CARD, host_bytes=(int(found[1]) - n) * GIB) for n in (0, 1))
    assert not shortage(place(gguf(), enough, batch), enough)
    assert shortage(place(gguf(), less, batch), less)
    cards, fewer = (FitMachine(int(found[2]) - n, CARD, host_bytes=100 * GIB) for n in (0, 1))
    assert not shortage(place(gguf(), cards, batch), cards)
    assert shortage(place(gguf(), fewer, batch), fewer)


def test_a_card_that_is_too_small_for_its_cache_is_told_what_makes_it_smaller() -> None:
    machine, batch = FitMachine(1, shown_bytes(24 * GIB)), Batch(262144, "bf16")
    hint = hybrid_hint(gguf(), machine, batch, place(gguf(), machine, batch))
    assert hint.startswith("It fits with --kv fp8, --ctx 128k or --gpu-count 2.")


def test_rules_that_overfill_a_card_are_named_as_the_cause() -> None:
    machine, batch = FitMachine(2, CARD), Batch(65536, "bf16")
    rules = read_placement_overrides(
        [r"blk\.([1-9]|1[0-9])\.ffn.*=CUDA0", "exps=CPU"], machine.devices
    )
    layout = checked_layout(gguf(), machine, batch, rules)
    assert shortage(layout, machine)
    assert "-ot rules are at fault" in hybrid_hint(gguf(), machine, batch, layout)


def test_what_no_option_mends_is_said() -> None:
    machine, batch = FitMachine(1, shown_bytes(8 * GIB), host_bytes=GIB), Batch(65536, "bf16")
    hint = hybrid_hint(gguf(), machine, batch, place(gguf(), machine, batch))
    assert hint.startswith("No single option makes it fit.")

from __future__ import annotations

import re

import pytest

from pipeline.core.errors import WeightsUnknown
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit.facts import shipped_repositories
from pipeline.serving.fit.source import named_spec, nearest_models
from tests.unit.support import ROOT


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("gpt-oss-120b", "openai/gpt-oss-120b"),
        ("OpenAI/GPT-OSS-120B@main", "openai/gpt-oss-120b"),
        ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        ("kimi-k2.6", "moonshotai/Kimi-K2.6"),
        ("qwen3-next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    ],
)
def test_a_name_without_organisation_or_with_a_mistake_finds_what_is_shipped(
    typed: str, first: str
) -> None:
    assert nearest_models(typed, shipped_repositories())[0] == first


@pytest.mark.parametrize("typed", ["org/name", "a3b", "xxyyzz", "", "/"])
def test_what_looks_like_nothing_gets_no_suggestion(typed: str) -> None:
    assert nearest_models(typed, shipped_repositories()) == []


def test_few_names_are_suggested() -> None:
    assert len(nearest_models("kimi-k2", shipped_repositories())) == 3


def test_specs_and_shipped_models_are_suggested_for_a_name_that_nobody_knows() -> None:
    with pytest.raises(WeightsUnknown, match=r"no weights spec 'Kimi-K2\.6'") as unknown:
        named_spec(Checkout(ROOT), "Kimi-K2.6")
    assert "Did you mean kimi-k2.6 or moonshotai/Kimi-K2.6" in unknown.value.hint
    with pytest.raises(WeightsUnknown) as unknown:
        named_spec(Checkout(ROOT), "xxyyzz")
    assert "Did you mean" not in unknown.value.hint
    assert "organisation/model" in unknown.value.hint


def test_the_page_lists_the_models_whose_facts_are_shipped() -> None:
    page = (ROOT / "docs" / "fit.md").read_text()
    _, _, section = page.partition("## Without network\n")
    listed = re.findall(r"`([\w.-]+/[\w.-]+)`", section.partition("\n## ")[0])
    assert listed == shipped_repositories()

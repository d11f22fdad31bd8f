from __future__ import annotations

import pytest

from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.render.formats import client_settings, render_env


def test_clients_are_told_what_the_guide_tells_them() -> None:
    # "How to deploy Kimi K2.6 on Lambda": use as a Claude Code backend
    wanted = {
        "ANTHROPIC_BASE_URL": "http://10.0.0.7:8001",
        "ANTHROPIC_API_KEY": "dummy",
        "ANTHROPIC_MODEL": "kimi-k2.6",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "kimi-k2.6",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "kimi-k2.6",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "kimi-k2.6",
        "ANTHROPIC_SMALL_FAST_MODEL": "kimi-k2.6",
        "ANTHROPIC_FAST_MODEL": "kimi-k2.6",
        "DISABLE_TELEMETRY": "1",
        "ENABLE_PROMPT_CACHING_1H": "1",
    }
    openai = {
        "OPENAI_BASE_URL": "http://10.0.0.7:8001/v1",
        "OPENAI_API_KEY": "dummy",
        "OPENAI_MODEL": "kimi-k2.6",
    }
    assert client_settings("kimi-k2.6", 8001, "10.0.0.7") == {**openai, **wanted}


def test_settings_are_lines_for_a_shell() -> None:
    assert render_env({"A": "b", "C": "d e's"}) == "export A=b\nexport C='d e'\"'\"'s'\n"


def test_an_address_of_ipv6_gets_its_brackets() -> None:
    assert client_settings("x", 80, "fd00::7")["ANTHROPIC_BASE_URL"] == "http://[fd00::7]:80"


@pytest.mark.parametrize("node", ["", "a b", "http://a", "a/b", "a:80", "$(id)", "-a", "a\n"])
def test_what_is_no_address_is_refused(node: str) -> None:
    with pytest.raises(RecipeInvalid, match="is no host"):
        client_settings("x", 80, node)

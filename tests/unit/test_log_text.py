"""Foreign text acts on no terminal, and secrets are in no text."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from pipeline.core import log
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.recipe.render.formats import render_launch
from pipeline.serving.report import text
from tests.unit.serve.recipes import two_cards
from tests.unit.support import Command

# an escape, a C1 control, a mark that turns the direction, a line end of another kind, half a pair
ODD = "a\x1b[2Jb\x9bc\u202ed\x85e\u2028f\udcffg\rh\x07"


@pytest.mark.parametrize("char", ODD.translate({ord(c): None for c in "abcdefgh[2J"}))
def test_what_steers_a_terminal_is_shown_by_its_number(char: str) -> None:
    assert log.printable(f"<{char}>") == f"<{ascii(char)[1:-1]}>"


@pytest.mark.parametrize("text", ["plain", "é 中文 \u3000 \xa0 😀", "a\tb\nc"])
def test_what_is_seen_stays_as_it_is(text: str) -> None:
    assert log.printable(text) == text


def test_json_escapes_the_same_and_reads_the_same() -> None:
    text = log.json_text({"x": ODD, "é": "中"}, indent=2)
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == {"x": ODD, "é": "中"}


def test_a_screen_lets_our_colours_through_and_nothing_else() -> None:
    out = io.StringIO()
    log.Screen(out).write("\x1b[31mred\x1b[0m \x1b[8mhidden \x1b]0;title\x07\n")
    assert out.getvalue() == "\x1b[31mred\x1b[0m \\x1b[8mhidden \\x1b]0;title\\x07\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@host:8000 is wrong", "http://***@host:8000 is wrong"),
        ("'https://me:a/b@host/v1' is wrong", "'https://***@host/v1' is wrong"),
        ("me:hunter2@registry.example/x: not found", "***@registry.example/x: not found"),
        ("vllm:1@sha256:00 is there", "vllm:1@sha256:00 is there"),
        ("root@host: refused", "root@host: refused"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
    ],
)
def test_logins_in_messages_are_masked(text: str, shown: str) -> None:
    assert log.redacted(text, logins=True) == shown


def test_a_key_is_redacted_in_every_form_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    key = 'sk-"é-0123456789'
    monkeypatch.setenv("SM120_API_KEY", key)
    value = {"a": [f"Bearer {key}", {"b": json.dumps(key)}], "n": 5, "r": repr(key)}
    assert "0123456789" not in json.dumps(log.redacted(value))
    assert log.redacted(value)["n"] == 5
    monkeypatch.setenv("SM120_API_KEY", "x")
    assert log.redacted("xyz") == "xyz", "a key of a letter or two is in every word"


@pytest.mark.parametrize("words", [["--debug"], [], ["--json"]])
def test_the_last_line_of_the_command_has_no_escape_and_no_password(
    sm120: Command, words: list[str]
) -> None:
    ended = sm120("smoke", "http://me:hunter2@\x1b[2J\u202ehost:1x", *words)
    assert ended.code
    shown = ended.out + ended.err
    assert "hunter2" not in shown
    assert not {"\x1b", "\u202e"} & set(shown)
    assert "is not the address of a server" in shown or "such" in shown


def test_a_report_as_text_holds_nothing_that_acts() -> None:
    for shown in (text._escaped(ODD), text._plain(ODD), text._plain(f"={ODD}")):
        assert str(shown).isprintable()
    assert text._plain(1.5) == 1.5


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"A": "x\x85y"}},
        {"environment": {"A": "x\u2028y"}},
        {"environment": {"A": "x\u202ey"}},
        {"model": "x\x1by"},
        {"model": "x\u2066y"},
    ],
)
@pytest.mark.parametrize("form", ["docker", "quadlet", "systemd", "compose", "kubernetes", "shell"])
def test_no_format_writes_what_it_cannot_keep_intact(changes: dict[str, Any], form: str) -> None:
    launch = plan_launch(two_cards(), Overrides(), weights="").model_copy(update=changes)
    with pytest.raises(RecipeInvalid, match="holds a line end or another control character"):
        render_launch(launch, LaunchTarget(image="sm120/vllm:1"), form)

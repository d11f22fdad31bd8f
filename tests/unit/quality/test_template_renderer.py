"""The reference for chat templates."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import TemplateUnusable
from pipeline.images.gate.templates.cases import conversations
from pipeline.images.gate.templates.files import read_model_text
from pipeline.images.gate.templates.renderer import ChatTemplate, TemplateRefused

USER = [{"role": "user", "content": '<b>é & "x"</b>'}]


def render(source: str, messages: Any = USER, tools: Any = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, tools, options=options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # blocks take the line that they stand on, and nothing else
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ bos_token }}{{ messages[0].content }}", '<s><b>é & "x"</b>'),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>é & \\"x\\"</b>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ {'é': 1} | tojson(ensure_ascii=True) }}", '{"\\u00e9": 1}'),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "xFalse"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = i %}{% endfor %}"
         "{{ ns.n }}", "2"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}",
         "True True True"),
        ("{{ enable_thinking is defined and not enable_thinking }}", "True"),
    ],
)  # fmt: skip
def test_templates_mean_what_they_mean_in_transformers(source: str, text: str) -> None:
    assert render(source, enable_thinking=False) == text


def test_the_date_is_that_of_the_clock() -> None:
    clock = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 2, 3))
    assert clock.render(USER) == "03 Feb 2026"


def test_arguments_of_a_call_are_an_object_and_reasoning_has_its_usual_name() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": [1]}'}}
    turn = {"role": "assistant", "tool_calls": [call], "reasoning": "hm"}
    source = "{{ messages[0].tool_calls[0].function.arguments.x[0] }} {{ messages[0].%s }}"
    assert render(source % "reasoning_content", [turn]) == "1 hm"
    assert call["function"]["arguments"] == '{"x": [1]}'  # the request stays as it was


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system turns') }}",
        "{{ messages[0].content + none }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_may_refuse_a_conversation(source: str) -> None:
    with pytest.raises(TemplateRefused):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "x" * ((1 << 20) + 1),
    ],
)
def test_a_template_that_does_what_none_may_is_refused(source: str) -> None:
    with pytest.raises((TemplateUnusable, TemplateRefused)):
        render(source)


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_added_tokens_are_those_of_both_files_and_the_tokenizer_counts(tmp_path: Path) -> None:
    decoder = {
        "1": {"content": "<think>", "special": False},
        "2": {"content": "<|im_end|>", "special": True},
        "3": {"content": "<t>", "special": True},
        "4": "no token",
    }
    config = {"chat_template": "x", "added_tokens_decoder": decoder}
    known = read_model_text(write(tmp_path, tokenizer_config__json=config)).added_tokens
    assert known == {"<think>": False, "<|im_end|>": True, "<t>": True}
    listed = [{"id": 3, "content": "<t>", "special": False}, {"id": 4}, 5]
    write(tmp_path, tokenizer__json={"added_tokens": listed})
    assert read_model_text(tmp_path).added_tokens == {**known, "<t>": False}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, {}),
        ({"tokenizer__json": {"added_tokens": "none"}}, {}),
        ({"tokenizer__json": [1]}, {}),
    ],
)
def test_files_without_a_list_of_added_tokens_have_none(
    tmp_path: Path, files: dict[str, Any], found: dict[str, bool]
) -> None:
    config = {"chat_template": "x", "added_tokens_decoder": []}
    folder = write(tmp_path, tokenizer_config__json=config, **files)
    assert read_model_text(folder).added_tokens == found


def test_a_tokenizer_that_is_no_JSON_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config__json={"chat_template": "x"})
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TemplateUnusable, match=r"tokenizer\.json"):
        _ = read_model_text(folder).added_tokens


def test_a_template_comes_from_its_own_file_before_the_field(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config__json={"chat_template": "field", "bos_token": "<s>"})
    assert read_model_text(tmp_path).render(USER) == "field"
    write(tmp_path, chat_template__jinja="file {{ bos_token }}")
    text = read_model_text(tmp_path)
    assert text.render(USER) == "file <s>"
    assert sorted(text.inputs) == ["chat_template.jinja", "tokenizer_config.json"]
    assert text.why_no_tokenizer == "tokenizer.json is missing"
    (tmp_path / "tiktoken.model").touch()
    why = read_model_text(tmp_path).why_no_tokenizer
    assert why == "only its own Python code reads tiktoken.model"


def test_a_model_may_have_another_template_for_tools(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    text = read_model_text(write(tmp_path, tokenizer_config__json={"chat_template": listed}))
    assert (text.render(USER), text.render(USER, [{}])) == ("a", "b")


@pytest.mark.parametrize(
    "config", ['{"chat_template": 7}', "[]", "{", '{"chat_template": [{"name": "rag"}]}', "{}"]
)
def test_a_folder_without_a_template_says_so(tmp_path: Path, config: str) -> None:
    with pytest.raises(TemplateUnusable):
        read_model_text(write(tmp_path, tokenizer_config__json=config))


def test_special_tokens_are_texts_or_objects_with_one(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "x": "y"}
    folder = write(tmp_path, tokenizer_config__json={"chat_template": "x", **tokens})
    found = read_model_text(folder).template.tokens
    assert found == {"bos_token": "<s>", "eos_token": "</s>"}


def test_conversations_try_roles_tools_results_turns_thinking_and_pictures() -> None:
    found = conversations()
    assert len({c.name for c in found}) == len(found) >= 18
    roles = {m["role"] for c in found for m in c.messages}
    assert roles == {"system", "user", "assistant", "tool"}
    assert any(c.tools for c in found)
    assert any(c.has_picture for c in found)
    assert [c.options.get("thinking") for c in found if c.options] == [True, False]

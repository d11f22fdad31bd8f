"""The template and tokenizer of weights on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.core.errors import ModelUnreadable, TemplateUnusable, WeightsDamaged
from pipeline.serving.quality.texts import served_text
from pipeline.serving.recipe.tiny import Tensor, dump_gguf
from tests.testbed.locked_set import make_set

USER = [{"role": "user", "content": "Hello"}]
CONFIG = json.dumps(
    {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<s>"}
)
FILES = {"tokenizer_config.json": CONFIG.encode(), "config.json": b"{}"}


@pytest.mark.parametrize("hub_cache", [False, True])
def test_locked_files_are_read_in_either_layout(tmp_path: Path, hub_cache: bool) -> None:
    make_set(tmp_path, FILES, {"tokenizer.json": b"{}"}, hub_cache=hub_cache)
    text = served_text(tmp_path)
    assert text.render(USER) == "<s>Hello"
    assert sorted(text.inputs) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_template_that_was_changed_after_it_was_locked_is_refused(tmp_path: Path) -> None:
    make_set(tmp_path, FILES, {})
    changed = CONFIG.replace("content", "role")
    (tmp_path / "tokenizer_config.json").write_text(changed)
    with pytest.raises(WeightsDamaged, match="is not the file that is locked"):
        served_text(tmp_path)


def test_a_template_that_was_laid_beside_locked_files_is_refused(tmp_path: Path) -> None:
    make_set(tmp_path, FILES, {})
    (tmp_path / "chat_template.jinja").write_text("another")
    with pytest.raises(WeightsDamaged, match="is not among the locked files"):
        served_text(tmp_path)


def test_files_without_a_lock_are_taken_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(CONFIG)
    assert served_text(tmp_path).render(USER) == "<s>Hello"
    assert "are not locked" in capsys.readouterr().err


def test_a_gguf_file_holds_its_template_and_names_its_special_tokens(tmp_path: Path) -> None:
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 9,  # no such token
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}",
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(dump_gguf(fields, {"x": Tensor((1,), [0.0], "f32")}))  # type: ignore[arg-type]
    for named in (path, tmp_path):
        text = served_text(named)
        assert text.render(USER) == "<s>Hello"
        assert text.tokenizer_file is None
    del fields["tokenizer.chat_template"]
    path.write_bytes(dump_gguf(fields, {"x": Tensor((1,), [0.0], "f32")}))  # type: ignore[arg-type]
    with pytest.raises(TemplateUnusable):
        served_text(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelUnreadable):
        served_text(path)

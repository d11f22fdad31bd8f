"""Quality of a trained model, served by mainline llama.cpp, which nobody here wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.llama_server import served, trained_model

ROOT = Path(__file__).resolve().parents[2]
# one place in each of many texts: each takes seconds on a busy machine, and texts are what counts
_TEXTS = ["--texts", "96", "--places", "1", "--at-once", "1"]

pytestmark = [pytest.mark.big, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def model() -> Path:
    return trained_model()


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model, tmp_path_factory.mktemp("llama")) as address:
        yield address


def quality(*told: object) -> tuple[int, Any]:
    """The code, and the result or what was printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "pipeline", "quality", *map(str, told)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if not done.stdout.startswith("{"):
        return done.returncode, done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def counts(result: Any) -> tuple[int, list[str]]:
    rows = result["parts"][0]["rows"]
    failed = [f"{row['name']}: {row['message']}" for row in rows if row["verdict"] == "failed"]
    return sum(row["verdict"] == "passed" for row in rows), failed


def test_llama_cpp_renders_the_template_as_the_reference_does(url: str, model: Path) -> None:
    code, result = quality(url, "--weights", model, "--only", "tokens", "--json")
    # its template knows no switch for thinking, and no pictures
    assert counts(result) == (16, [])
    assert code == 0


def test_llama_cpp_counts_as_the_tokenizers_library_does(
    url: str, model: Path, tmp_path: Path
) -> None:
    import gguf
    import tokenizers

    fields = gguf.GGUFReader(model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    # llama.cpp, src/llama-vocab.cpp: "smollm" splits digits, then as GPT-2 does
    split = tokenizers.pre_tokenizers
    made.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    made.add_special_tokens(control)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos")}
    config = {f"{name}_token": tokens[number] for name, number in ids.items()}
    config["chat_template"] = fields["tokenizer.chat_template"].contents()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    code, result = quality(url, "--weights", tmp_path, "--only", "tokens", "--json")
    assert counts(result) == (16, [])
    assert code == 0
    assert "by tokenizer.json" in result["parts"][0]["message"]


def test_a_model_that_calls_no_tool_fails_by_its_schema_cases(url: str, model: Path) -> None:
    told = ["--only", "schema", "--tool-cases", "2", "--at-once", "1", "--json"]
    code, result = quality(url, "--weights", model, *told)
    # so small a model answers in words
    assert (code, result["verdict"]) == (92, "failed")
    assert result["parts"][0]["message"].startswith("4 calls: 4 no call")


def test_a_server_agrees_with_itself_and_one_with_damaged_weights_does_not(
    url: str, model: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference.json"
    assert quality(url, "--weights", model, "--record", reference, *_TEXTS)[0] == 0
    told = ["--reference", reference, "--only", "agreement", "--at-once", "1", "--json"]
    code, result = quality(url, *told)
    assert (code, result["verdict"]) == (0, "passed"), result["parts"]
    damaged = tmp_path / "damaged.gguf"
    shutil.copy(model, damaged)
    size = damaged.stat().st_size
    with damaged.open("r+b") as file:
        # among the weights of the blocks: the head of the file stays
        for share in (0.4, 0.55, 0.7, 0.85):
            file.seek(int(size * share))
            data = file.read(1 << 20)
            file.seek(int(size * share))
            file.write(data[::-1])
    with served(damaged, tmp_path) as other:
        code, result = quality(other, *told)
    assert (code, result["verdict"]) == (92, "failed"), result["parts"]

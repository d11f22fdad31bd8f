"""`sm120 gate run` up to its first download, over the cases of this checkout."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.unit.support import AMD64, ARM64, ROOT, Command

RUN = ("--checkout", ROOT, "gate", "run")


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that this runs on, whatever it is."""
    for module in ("workspace", "gate"):
        monkeypatch.setattr(f"pipeline.app.{module}.host_platform", lambda: AMD64)


def said(sm120: Command, *words: str) -> str:
    return sm120(*RUN, *words, "--offline").err


def test_a_run_names_its_cases_and_what_it_fetches_before_it_does(sm120: Command) -> None:
    text = said(sm120, "sglang-k2", "--platform", AMD64)
    assert " cases of smem and " in text
    assert " cases of numerics, " in text
    assert " files to fetch, " in text


def test_a_pattern_may_fit_cases_of_numerics_alone(sm120: Command) -> None:
    for words in ((), ("--only", "numerics")):
        text = said(sm120, "sglang-k2", "--case", "decode-gqa-cap*", *words)
        assert "sglang-k2: 1 case of numerics, " in text
    assert sm120(*RUN, "sglang-k2", "--case", "decode-gqa-cap*", "--only", "smem").code == 10


def test_wheels_for_another_processor_are_not_known_before_an_index_is_asked(
    sm120: Command,
) -> None:
    assert "would be looked up in the index" in said(sm120, "vllm", "--platform", ARM64)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sglang-k2", "--case", "nope"), 10),
        (("sglang-k2", "--series", "nope"), 10),
        (("sglang-k2", "--arch", "sm_1"), 2),
        (("llama-cpp-cpu",), 10),
        (("nope",), 41),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_fetched(
    sm120: Command, words: tuple[str, ...], code: int
) -> None:
    assert sm120(*RUN, *words).code == code


def tokenizer(folder: Path, **changed: bool) -> Path:
    """A folder of weights whose tokenizer has Kimi's markers."""
    names = ["tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin"]
    names += ["tool_call_argument_begin", "tool_call_end"]
    texts = {"<think>": False, "</think>": False}
    texts |= {f"<|{name}|>": changed.get(name, False) for name in names}
    decoder = {i: {"content": t, "special": s} for i, (t, s) in enumerate(texts.items())}
    config = {"chat_template": "x", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_tokenizer_that_agrees_is_named_with_its_families(sm120: Command, tmp_path: Path) -> None:
    words = ("sglang-k2", "--only", "parsers", "--weights", f"kimi-k2.5={tokenizer(tmp_path)}")
    assert "its tokenizer has the markers of kimi-k2.5" in said(sm120, *words)


def test_a_marker_that_a_tokenizer_has_otherwise_is_an_error_with_its_name(
    sm120: Command, tmp_path: Path
) -> None:
    folder = tokenizer(tmp_path, tool_call_end=True)
    ended = sm120(*RUN, "sglang-k2", "--only", "parsers", "--weights", f"kimi-k2.5={folder}")
    assert ended.code == 10
    assert "has '<|tool_call_end|>' as special, formats.yaml as not special" in ended.err


def test_weights_of_a_family_that_the_image_does_not_judge_are_refused(
    sm120: Command, tmp_path: Path
) -> None:
    weights = f"glm-9={tokenizer(tmp_path)}"
    ended = sm120(*RUN, "sglang-k2", "--only", "parsers", "--weights", weights)
    assert (ended.code, "no such family of models" in ended.err) == (10, True)


@pytest.mark.parametrize("only", ["smem", "arch"])
def test_weights_are_for_parsers_and_templates_alone(
    sm120: Command, tmp_path: Path, only: str
) -> None:
    ended = sm120(*RUN, "sglang-k2", "--only", only, "--weights", f"kimi-k2.5={tmp_path}")
    assert ended.code == 2


def test_a_node_says_that_it_begins_before_it_makes_anything(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"sha256:{'0' * 64}\n"))
    words = ("--checkout", ROOT, "gate", "answer", "sglang-k2", "--only", "parsers", "--offline")
    ended = sm120(*words)
    assert json.loads(ended.out.splitlines()[0])["node"]
    assert ended.code == 22


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--on", "host1"), 10, "is neither slurm nor slurm:PARTITION"),
        (("--chunk", "5"), 10, "are about nodes"),
        (("--on", "slurm", "--chunk", "0"), 2, "not in the range"),
        (("--on", "slurm", "--time-limit", "5"), 2, "is not a time such as 90s"),
    ],
)
def test_options_of_nodes_that_cannot_be_meant_are_refused(
    sm120: Command, words: tuple[str, ...], code: int, reason: str
) -> None:
    ended = sm120(*RUN, "sglang-k2", "--only", "parsers", *words)
    assert (ended.code, reason in ended.err) == (code, True)

"""Scores of other programs, from files in their own forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ScoresInvalid
from pipeline.serving.quality.scores import PublishedScore, read_scores
from tests.unit.support import Command

LM_EVAL = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.88,
            "exact_match_stderr,strict-match": 0.009,
            "exact_match,flexible-extract": 0.91,
            "exact_match_stderr,flexible-extract": 0.008,
        }
    },
    "configs": {"gsm8k": {}},
    "n-samples": {"gsm8k": {"original": 1319, "effective": 1319}},
    "config": {"model": "local-completions", "model_args": "model=kimi", "gen_kwargs": None},
}
EVALSCOPE = {
    "name": "kimi@gsm8k",
    "dataset_name": "gsm8k",
    "model_name": "kimi",
    "score": 0.9,
    "metrics": [{"name": "mean_acc", "num": 1319, "score": 0.9, "categories": []}],
}
INSPECT = {
    "version": 2,
    "status": "success",
    "eval": {"task": "aime2025", "model": "openai/kimi", "model_generate_config": {"top_p": 0.95}},
    "results": {
        "total_samples": 960,
        "scores": [
            {
                "name": "match",
                "metrics": {"accuracy": {"value": 0.82}, "stderr": {"value": 0.03}},
            }
        ],
    },
}
SOURCE = "https://example.com/model-card"


def bar(value: float, tolerance: float = 0.0) -> PublishedScore:
    given = {"value": value, "tolerance": tolerance, "source": SOURCE}
    return PublishedScore.model_validate(given)


def write(folder: Path, value: Any) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "program", "scores"),
    [
        (LM_EVAL, "lm-eval", ["exact_match strict-match", "exact_match flexible-extract"]),
        (EVALSCOPE, "evalscope", ["mean_acc"]),
        (INSPECT, "inspect-ai", ["match accuracy"]),
    ],
)
def test_each_form_is_read(tmp_path: Path, value: Any, program: str, scores: list[str]) -> None:
    found = read_scores(write(tmp_path, value))
    assert (found.program, [score.metric for score in found.scores]) == (program, scores)
    assert found.verdict == "unknown"  # there is nothing to hold it against


@pytest.mark.parametrize(
    ("published", "tolerance", "verdict"),
    [(0.85, 0.0, "passed"), (0.89, 0.03, "passed"), (0.89, 0.0, "unknown"), (0.95, 0.02, "failed")],
)
def test_the_whole_interval_decides(
    tmp_path: Path, published: float, tolerance: float, verdict: str
) -> None:
    metric = "exact_match strict-match"
    found = read_scores(write(tmp_path, LM_EVAL), bar(published, tolerance), metric)
    assert (found.verdict, len(found.scores)) == (verdict, 1)


def test_a_share_without_an_error_has_the_interval_of_its_samples(tmp_path: Path) -> None:
    estimate = read_scores(write(tmp_path, EVALSCOPE)).scores[0].estimate
    assert (estimate.method, estimate.n) == ("Wilson", 1319)
    assert 0.882 < estimate.low < 0.885
    few = {**EVALSCOPE, "metrics": [{"name": "acc", "score": 0.9}]}
    unknown = read_scores(write(tmp_path, few), bar(0.1)).scores[0]
    assert (unknown.verdict, unknown.samples) == ("unknown", None)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"results": {"x": 7}, "configs": {}},
        {"metrics": [{"name": "a"}]},
        {**EVALSCOPE, "metrics": [{"name": "a", "score": 90}]},
        {**EVALSCOPE, "metrics": [{"name": "a", "score": None}]},
        {**INSPECT, "status": "error"},
        {**INSPECT, "results": None},
        "text",
    ],
)
def test_other_files_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ScoresInvalid):
        read_scores(write(tmp_path, value))


def test_an_import_is_stated_and_fails_below_its_bar(sm120: Command, tmp_path: Path) -> None:
    path = write(tmp_path, EVALSCOPE)
    told = ["--published", "0.89", "--tolerance", "0.02", "--source", SOURCE]
    done = sm120("quality", "import", path, *told)
    assert done.code == 0
    assert done.out.splitlines()[2].split()[:4] == ["passed", "gsm8k", "mean_acc", "0.9000"]
    stated = tmp_path / "results.json.dsse.json"
    assert stated.exists()
    assert "quality of an address" in sm120("verify", path).out
    high = sm120("quality", "import", path, "--published", "0.99", "--source", SOURCE, "--json")
    assert (high.code, json.loads(high.out)["verdict"]) == (92, "failed")
    assert sm120("quality", "import", path, "--published", "0.9").code == 2
    assert sm120("quality", "import", path, "--published", "0.9", "--source", "x").code == 2
    assert sm120("quality", "import", path).code == 0

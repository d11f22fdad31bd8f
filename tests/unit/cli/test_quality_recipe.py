"""`sm120 quality RECIPE`: the result is stated of the image that serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.images.gate.runs import ImageRuns
from tests.testbed.quality_faults import FAULTS
from tests.testbed.quality_server import CONFIG, QualityServer
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.support import Command

pytestmark = pytest.mark.usefixtures("checkout")


@pytest.fixture
def world(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LiveRecipe]:
    with live_recipe(sm120, monkeypatch, tmp_path, LiveRecipe) as made:
        yield made


@pytest.mark.parametrize(("name", "verdict"), [("", "passed"), ("off by a constant", "failed")])
def test_a_result_is_stated_of_the_image_with_what_it_was_compared_with(
    world: LiveRecipe, name: str, verdict: str
) -> None:
    world.serve()
    fault = next((each for each in FAULTS if each.name == name), None)
    server = QualityServer(fault)
    world.engine.model.handle = server.handle  # type: ignore[method-assign]
    world.engine.live.close()
    world.engine.live.open()
    # in the folder that the recipe was served with, so that nobody need name it
    (world.weights / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    done = world.sm120("quality", "brainy", "--only", "tokens")
    assert done.code == (0 if verdict == "passed" else 92), done.err
    path = next(world.store.glob("images/tiny/*/runs.json"))
    runs = ImageRuns.model_validate_json(path.read_bytes()).runs
    (run,) = [each for each in runs if each.kind == "quality"]
    assert (run.recipe, run.verdict, run.last_good) == ("brainy", verdict, None)
    assert run.summary() == f"quality with brainy: {verdict}"
    inputs = {"tokens/tokenizer_config.json", "quality.json", "quality-exchanges.jsonl", "recipe"}
    assert inputs <= set(run.inputs)
    shown = world.sm120("verify", "tiny")
    assert "quality with brainy" in shown.out

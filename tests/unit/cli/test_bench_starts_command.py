"""`sm120 bench RECIPE --workload start` as it is typed: started, measured, left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.serving.bench.model import BenchRun
from pipeline.serving.bench.record import read_run
from pipeline.serving.serve import run as run_module
from tests.testbed.model_faults import FAULTS
from tests.testbed.oci_door import Door
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.support import Command, Ended

pytestmark = pytest.mark.usefixtures("checkout")


class World(LiveRecipe):
    """Starts of the recipe."""

    def starts(self, out: Path, *more: str) -> Ended:
        words = ("--workload", "start", "--output", str(out), *more)
        return self.sm120("bench", "brainy", *words)


@pytest.fixture
def world(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    # a folder without a lock and an engine without a parser stop a start otherwise
    monkeypatch.setattr(run_module, "preflight", lambda job, holder: [])
    with live_recipe(sm120, monkeypatch, tmp_path, World) as made:
        yield made


def _run(out: Path) -> BenchRun:
    return read_run(out / "start")


def test_starts_are_measured_and_nothing_is_left_where_nothing_was_served(
    world: World, tmp_path: Path
) -> None:
    done = world.starts(tmp_path, "--weights", str(world.weights))
    assert (done.code, "ready s" in done.out) == (0, True)
    assert world.engine.known == {}
    assert len(world.engine.created) == 2
    assert [row["kind"] for row in world.attempts()] == ["serve", "serve"]


def test_a_start_is_as_long_as_the_serve_says(world: World, tmp_path: Path) -> None:
    assert world.starts(tmp_path, "--weights", str(world.weights)).code == 0
    ready = [cell.trials[0].metrics.ready_s or 0.0 for cell in _run(tmp_path).cells]
    ends = [row["ends"][0]["seconds"] for row in world.attempts()]
    # an attempt has the preflight in it, too
    assert all(0 < each <= end for each, end in zip(ready, ends, strict=True))


def test_the_clock_stops_at_an_answer_that_is_right(world: World, tmp_path: Path) -> None:
    done = world.starts(tmp_path, "--weights", str(world.weights))
    assert done.code == 0, done.err
    assert "The pull of its image is not measured: --pull REGISTRY/REPO" in done.err
    assert "right answer s" in done.out
    for cell in _run(tmp_path).cells:
        found = cell.trials[0].metrics
        assert found.start_to_right_answer_s is not None
        assert found.start_to_first_token_s is not None
        assert found.start_to_right_answer_s > found.start_to_first_token_s
        assert (found.pull_s, found.pull_to_right_answer_s) == (None, None)


@pytest.mark.parametrize("fault", ["wrong model name", "empty answer", "unknown finish_reason"])
def test_a_wrong_answer_is_no_end_of_a_start(fault: str, world: World, tmp_path: Path) -> None:
    world.engine.model.fault = next(each for each in FAULTS if each.name == fault)
    done = world.starts(tmp_path, "--weights", str(world.weights))
    assert done.error in ("SmokeFailed", "BenchUnanswered"), done.err
    assert not (tmp_path / "start" / "bench.json").exists()


def test_a_pull_without_a_start_is_a_mistake_that_is_named(world: World, tmp_path: Path) -> None:
    words = ("--workload", "quick", "--pull", "127.0.0.1:9/x", "--output", str(tmp_path))
    ended = world.sm120("bench", "brainy", *words)
    assert (ended.error, world.engine.created) == ("WorkloadInvalid", [])
    assert "quick: starts no engine, so there is no pull to measure" in ended.err


def test_the_pull_of_an_image_that_is_not_loaded_counts(
    world: World, door: Door, tmp_path: Path
) -> None:
    at = f"{door.host_port}/team/tiny"
    assert world.sm120("publish", "tiny", at).code == 0
    facts = next(iter(world.engine.images.values()))
    world.engine.images, world.engine.loadable = {}, facts
    done = world.starts(tmp_path, "--weights", str(world.weights), "--pull", at)
    assert done.code == 0, done.err
    assert world.engine.loads == [world.digest]
    cold, warm = (cell.trials[0].metrics for cell in _run(tmp_path).cells)
    assert cold.pull_s is not None
    assert cold.pull_to_right_answer_s is not None
    assert cold.start_to_right_answer_s is not None
    assert cold.pull_to_right_answer_s > cold.pull_s + cold.start_to_right_answer_s - 0.01
    assert cold.pull_s > 0
    # by then it is there
    assert (warm.pull_s, warm.pull_to_right_answer_s) == (None, None)
    assert "The pull is not measured: brainy's image is loaded on this machine" in done.err
    assert "pull to right answer" in done.out


@pytest.mark.parametrize("place", ["team/other", "team/tiny:v1"])
def test_an_image_that_is_not_published_there_is_an_error(
    place: str, world: World, door: Door, tmp_path: Path
) -> None:
    world.engine.loadable = next(iter(world.engine.images.values()))
    world.engine.images = {}
    at = f"{door.host_port}/{place}"
    done = world.starts(tmp_path, "--weights", str(world.weights), "--pull", at)
    assert done.code != 0
    assert done.error in ("NotInRegistry", "ReferenceInvalid"), done.err
    assert world.engine.created == []
    assert not (tmp_path / "start" / "bench.json").exists()


def test_a_run_of_starts_names_what_stood_behind_them(world: World, tmp_path: Path) -> None:
    assert world.starts(tmp_path, "--weights", str(world.weights)).code == 0
    inputs, serve = _run(tmp_path).inputs, world.attempts()[0]
    assert inputs.image == world.digest
    assert (inputs.recipe, inputs.recipe_name) == (serve["recipe_digest"], "brainy")
    assert inputs.weights == serve["weights_digest"]


def test_what_is_served_is_ended_and_served_again_and_both_are_said(
    world: World, tmp_path: Path
) -> None:
    assert world.serve().code == 0
    done = world.starts(tmp_path, "--weights", str(world.weights))
    assert done.code == 0
    assert "brainy is served now: it is ended" in done.err
    assert "brainy is served again" in done.err
    assert [facts.running for facts in world.engine.known.values()] == [True]


def test_a_start_that_fails_has_the_cause_and_not_its_hint(world: World, tmp_path: Path) -> None:
    world.engine.images = {}
    world.engine.loadable = None
    done = world.starts(tmp_path, "--weights", str(world.weights))
    assert done.error == "ImageDiffers"
    assert not (tmp_path / "start" / "bench.json").exists()


def test_a_tiny_recipe_makes_its_weights_as_serve_does(world: World, tmp_path: Path) -> None:
    world.recipe(engine="llama-cpp", model={"tiny": True, "file": "tiny.gguf", "name": "brain-1"})
    assert world.starts(tmp_path).code == 0
    assert (_run(tmp_path).inputs.weights or "").startswith("sha256:")


def test_other_recipes_need_a_folder_of_weights(world: World, tmp_path: Path) -> None:
    assert "--weights" in world.starts(tmp_path).err
    assert world.engine.created == []


def _several(world: World, out: Path, *more: str) -> Ended:
    words = ("--workload", "tiny", "--concurrency", "1", "--requests", "2", "--no-self-test")
    return world.sm120("bench", "brainy", *words, "--output", str(out), *more)


def test_several_starts_are_measured_and_nothing_is_left(world: World, tmp_path: Path) -> None:
    more = ("--starts", "2", "--repeats", "2", "--weights", str(world.weights))
    done = _several(world, tmp_path, *more)
    assert done.code == 0, done.err
    assert "means of 2 starts of the engine, 2 trials, with 95 % confidence" in done.out
    assert "Starting the engine anew, 2 of 2" in done.err
    assert world.engine.known == {}
    assert len(world.engine.created) == 2
    run = read_run(tmp_path / "tiny")
    assert [trial.start for trial in run.cells[0].trials] == [0, 1]
    assert run.inputs.image == world.digest
    # a finished run is shown, and no engine is started for that
    again = _several(world, tmp_path, *more)
    assert (again.code, len(world.engine.created)) == (0, 2)
    assert "is finished: nothing is measured" in again.err


def test_an_address_cannot_be_started_anew(world: World, tmp_path: Path) -> None:
    words = ("bench", "http://127.0.0.1:1", "--starts", "2", "--output", str(tmp_path))
    done = world.sm120(*words)
    assert done.error == "WorkloadInvalid"
    assert "the engine of an address cannot be started anew" in done.err


def test_several_starts_are_of_this_machine(world: World, tmp_path: Path) -> None:
    done = _several(world, tmp_path, "--starts", "2", "--on", "other")
    assert (done.code, "leave --on out" in done.err) == (2, True)

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import RecipeInvalid, WeightsUnknown
from pipeline.core.known import unknown
from pipeline.core.model import sha256_of
from pipeline.serving.recipe.launch import Overrides, plan_launch, with_whole_repositories
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.recipe.tiny import tiny_gguf
from pipeline.serving.serve.preflight import CHECKS, PlannedStart, PreflightMachine
from pipeline.serving.serve.weights import WeightsFolder, find_weights, tiny_weights
from pipeline.weights.disk import receipt
from tests.unit.serve.recipes import recipe
from tests.unit.weights.disk_set import COMMIT, flip, make_set, settle


def kimi(**model: Any) -> Recipe:
    body = {"repository": "org/tiny", "weights": "tiny", "name": "tiny", **model}
    return recipe(name="kimi", engine="vllm", model=body)


def test_the_tiny_model_is_made_once_and_can_be_read_by_the_container(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = tiny_weights(store, recipe())
    assert made == tiny_weights(store, recipe())
    path = made.folder / made.file
    assert made.digest == sha256_of(path.read_bytes()) == sha256_of(tiny_gguf())
    assert made.file == "tiny.gguf"
    assert path.stat().st_mode & 0o444 == 0o444
    assert made.folder.stat().st_mode & 0o555 == 0o555


def test_the_tiny_model_has_the_name_that_a_recipe_gives_it(tmp_path: Path) -> None:
    named = recipe(model={"tiny": True, "name": "tiny", "file": "small.gguf"})
    assert tiny_weights(open_store(tmp_path), named).file == "small.gguf"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_reads_no_gguf_gets_no_tiny_model(tmp_path: Path, engine: str) -> None:
    with pytest.raises(RecipeInvalid, match="GGUF"):
        tiny_weights(open_store(tmp_path), recipe(engine=engine, image=engine))


def test_a_fetched_set_is_mounted_as_it_is(tmp_path: Path) -> None:
    place = make_set(tmp_path).place
    found = find_weights(kimi(), place.root, ())
    assert (found.folder, found.digest) == (place.root, place.lock.seal)


def test_of_a_hub_cache_the_blobs_are_mounted_with_the_links_that_lead_to_them(
    tmp_path: Path,
) -> None:
    disk = make_set(tmp_path, hub_cache=True)
    place = disk.place
    for folder in (place.root, place.snapshot):
        found = find_weights(kimi(), folder, ())
        assert (found.folder, found.digest) == (place.snapshot, place.lock.seal)
        launch = plan_launch(kimi(), Overrides(), weights=str(found.folder))
        launch = with_whole_repositories(launch)
        assert {m.inside: m.host for m in launch.mounts} == {"/models": str(place.root)}
        seen = Path(launch.arguments[0])
        for path in disk.files:
            link = place.name(disk.pin(path)).readlink()
            assert os.path.normpath((seen / path).parent / link).startswith("/models/blobs/")


def test_a_snapshot_that_nobody_locked_is_mounted_the_same_way(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert find_weights(kimi(), snapshot, ()) == WeightsFolder(snapshot)


def test_a_plain_folder_without_a_lock_is_taken_but_nothing_is_known_of_it(tmp_path: Path) -> None:
    assert find_weights(kimi(), tmp_path, ()) == WeightsFolder(tmp_path)


def test_a_set_of_another_model_is_refused(tmp_path: Path) -> None:
    place = make_set(tmp_path).place
    with pytest.raises(WeightsUnknown, match="holds tiny, but kimi is for org/other"):
        find_weights(kimi(repository="org/other", weights="other"), place.root, ())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnknown, match="is not a folder"):
        find_weights(kimi(), tmp_path / "none", ())


def checked(weights: WeightsFolder) -> str:
    nobody = unknown("nobody looked")
    plan = PlannedStart(kimi(), port=1, image_is_built=True, weights=weights, cuda=None)
    (row,) = CHECKS["weights"](plan, PreflightMachine(nobody, nobody, nobody, nobody))
    return row.verdict


def test_preflight_wants_every_file_proved_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt, "CLOCK_TICK_NS", 10_000_000)
    disk = make_set(tmp_path)
    weights = find_weights(kimi(), disk.place.root, ())
    assert checked(weights) == "failed"
    settle()
    disk.check()
    assert checked(weights) == "passed"
    flip(disk.path(sorted(disk.files)[0]), 0)
    assert checked(weights) == "failed"
    disk.path(sorted(disk.files)[0]).unlink()
    assert checked(weights) == "failed"

"""One's own weights: a folder becomes a locked set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.core.errors import WeightsUnknown
from pipeline.serving.recipe.model import RecipeFile
from pipeline.serving.serve.weights import find_weights
from pipeline.weights.disk import receipt
from pipeline.weights.disk.receipt import check_by_receipt, lock_folder
from pipeline.weights.place import find_places
from tests.unit.support import Command
from tests.unit.weights.disk_set import settle


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "My Model"
    (made / "sub").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"weights" * 1000)
    (made / "sub" / "config.json").write_text("{}")
    (made / ".cache" / "huggingface").mkdir(parents=True)
    (made / ".cache" / "huggingface" / "x.lock").write_text("")
    monkeypatch.setattr(receipt, "CLOCK_TICK_NS", 10_000_000)
    settle()
    return made


def test_a_folder_of_ones_own_is_locked_verified_and_found_to_be_served(
    folder: Path, sm120: Command
) -> None:
    (answer,) = sm120("weights", "lock", str(folder), "--json").json
    assert (answer["name"], answer["files"]) == ("local--my-model", 2)
    (place,) = find_places(folder)
    assert [pin.path for pin in place.lock.files] == ["model.safetensors", "sub/config.json"]
    assert check_by_receipt(place).unknown == []
    assert sm120("weights", "verify", str(folder)).code == 0
    body = {
        "name": "mine",
        "summary": "a model of my own",
        "backing": "proved",
        "sources": {"ours": {"kind": "ours", "title": "this project", "why": "a test"}},
        "image": "vllm",
        "engine": "vllm",
        "model": {"repository": "org/base", "name": "mine"},
        "hardware": {"cards": 0},
        "port": 8080,
    }
    found = find_weights(RecipeFile.model_validate(body).root, folder, ())
    assert found.digest == answer["seal"]
    assert found.place is not None


def test_the_same_files_give_the_same_lock_and_a_flipped_byte_is_damage(
    folder: Path, sm120: Command
) -> None:
    first = lock_folder(folder)
    assert lock_folder(folder) == first
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert sm120("weights", "verify", str(folder)).error == "WeightsDamaged"
    assert lock_folder(folder).commit != first.commit


def test_what_is_no_folder_of_plain_files_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "link.safetensors").symlink_to("model.safetensors")
    with pytest.raises(WeightsUnknown, match=r"link\.safetensors: is not a plain file"):
        lock_folder(folder)
    (folder / "link.safetensors").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(WeightsUnknown, match="pipe: is not a plain file"):
        lock_folder(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsUnknown, match="has no files"):
        lock_folder(tmp_path / "empty")


def test_an_unlocked_folder_is_told_how_to_lock_it(folder: Path, sm120: Command) -> None:
    ended = sm120("weights", "verify", str(folder))
    assert ended.error == "WeightsUnknown"
    assert f"`sm120 weights lock {folder}`" in ended.err
    assert sm120("weights", "lock", str(folder), "--dry-run").code == 2

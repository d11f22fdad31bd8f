from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import LockEdited, WeightsUnknown
from pipeline.weights.disk.install import link
from pipeline.weights.model import FilePin, WeightsLock, WeightsSpec, sealed_weights_lock
from pipeline.weights.place import LockedFolder, find_places, new_place

SHA = "a" * 64
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lock() -> WeightsLock:
    spec = WeightsSpec(
        name="tiny",
        repository="org/tiny",
        format="safetensors",
        quant="bf16",
        about="A set of weights that is only here for the tests.",
    )
    return sealed_weights_lock(spec, COMMIT, [FilePin(path="sub/a.json", size_bytes=3, sha256=SHA)])


@pytest.mark.parametrize("hub_cache", [False, True])
def test_a_place_is_found_again_by_the_lock_it_keeps(tmp_path: Path, hub_cache: bool) -> None:
    place = new_place(tmp_path, lock(), hub_cache=hub_cache)
    place.keep_lock()
    assert find_places(tmp_path) == [place]


def test_in_the_hubs_layout_the_link_leads_to_the_blob(tmp_path: Path) -> None:
    place = new_place(tmp_path, lock(), hub_cache=True)
    (pin,) = place.lock.files
    blob, name = place.file(pin), place.name(pin)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"abc")
    assert link(place, pin)
    assert str(name.readlink()) == f"../../../blobs/{pin.want}"
    assert name.read_bytes() == b"abc"
    assert name == tmp_path / "models--org--tiny" / "snapshots" / COMMIT / "sub" / "a.json"


def test_a_folder_without_a_lock_is_not_taken_for_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnknown):
        find_places(tmp_path)


def test_a_folder_that_is_not_there_is_not_taken_for_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnknown):
        find_places(tmp_path / "none")


def test_a_changed_lock_beside_the_files_is_refused(tmp_path: Path) -> None:
    place = LockedFolder(tmp_path, lock())
    place.keep_lock()
    text = place.lock_file.read_text(encoding="utf-8")
    place.lock_file.write_text(text.replace(SHA, "b" * 64), encoding="utf-8")
    with pytest.raises(LockEdited):
        find_places(tmp_path)

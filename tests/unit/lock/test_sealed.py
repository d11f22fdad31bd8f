from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import LockEdited, LockMissing
from pipeline.core.model import Digest, Name
from pipeline.core.sealed import UNSEALED, Sealed, read_sealed
from pipeline.hosts.lock_model import read_host_lock
from pipeline.images.lock.model import read_lock as read_image_lock
from pipeline.weights.model import read_weights_lock as read_weights_lock

EDITED, MISSING = LockEdited.hint, LockMissing.hint


class Thing(Sealed):
    """The smallest lock there can be."""

    name: Name
    seal: Digest


def written(tmp_path: Path, name: str, seal: str) -> Path:
    path = tmp_path / "thing.lock.yaml"
    path.write_text(f"name: {name}\nseal: {seal}\n")
    return path


def test_a_sealed_thing_is_read_back(tmp_path: Path) -> None:
    thing = Thing(name="a", seal=UNSEALED).sealed()
    assert thing.seal == thing.computed_seal() != UNSEALED
    assert read_sealed(written(tmp_path, "a", thing.seal), Thing) == thing


@pytest.mark.parametrize("name", ["b", "aa", "A"])
def test_another_value_under_the_same_seal_is_refused(tmp_path: Path, name: str) -> None:
    seal = Thing(name="a", seal=UNSEALED).sealed().seal
    with pytest.raises(LockEdited):
        read_sealed(written(tmp_path, name, seal), Thing)


@pytest.mark.parametrize("seal", [UNSEALED, "null", "''", "sha256:" + "f" * 64])
def test_no_other_seal_will_do(tmp_path: Path, seal: str) -> None:
    with pytest.raises(LockEdited):
        read_sealed(written(tmp_path, "a", seal), Thing)


@pytest.mark.parametrize(
    ("read", "missing", "edited"),
    [
        (read_image_lock, "Make it with `sm120 image lock IMAGE`.", EDITED),
        (
            read_weights_lock,
            "Make it with `sm120 weights lock NAME`.",
            "Restore it (`git checkout lockfiles`), or make it again with"
            " `sm120 weights lock NAME`.",
        ),
        (
            read_host_lock,
            "Make it with `sm120 host lock`.",
            "Make it again with `sm120 host lock`.",
        ),
    ],
)
def test_each_lock_names_the_command_that_makes_it(
    tmp_path: Path, read: Callable[[Path], Sealed], missing: str, edited: str
) -> None:
    path = tmp_path / "x.lock.yaml"
    with pytest.raises(LockMissing, match="there is no such lock") as gone:
        read(path)
    path.write_text("format: 1\n")
    with pytest.raises(LockEdited, match="Field required") as changed:
        read(path)
    assert (gone.value.hint, changed.value.hint) == (missing, edited)

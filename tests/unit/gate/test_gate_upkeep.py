"""What gates leave in the store, and what of it nobody uses any more."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.artifacts.store.upkeep import bytes_below, remove_trees, tree_sections
from pipeline.images.gate.smem.engine import mark_used
from pipeline.images.gate.upkeep import GATE_PARTS, gate_leftovers
from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.testbed.deb_file import Item
from tests.unit.support import Command

DAY_S = 24 * 3600


class Place:
    """A checkout with one image, and a store in which gates have run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: Store = open_store(root / "store")
        deb = makers.make_deb(root / "mirror", "tool", Item("./usr/bin/tool", b"#!/bin/sh\n"))
        self.checkout: Checkout = makers.make_checkout(root, makers.root_image([deb]))

    def put(self, name: str, data: bytes = b"{}", *, days: float = 0) -> Path:
        """A file of the store whose entry in its section was last used so many days ago."""
        path = self.store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entry = self.store.root.joinpath(*Path(name).parts[:3])
        os.utime(entry, (0, time.time() - days * DAY_S))
        return path

    def left(self) -> list[str]:
        result = gate_leftovers(self.store)
        return [str(path.relative_to(self.store.root)) for path in result]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_empty_store_has_no_leftovers(place: Place) -> None:
    assert place.left() == []


@pytest.mark.parametrize(
    "name",
    [
        "environments/older/facts.json",
        "environments/half/site/torch.py",
        "engines/older/engine/ops.py",
        "answers/older.json",
        "kernels/older",
        "kernels-unlocked/older/kernel",
        "kernels-of/older.json",
    ],
)
def test_what_no_gate_has_used_for_a_month_goes(place: Place, name: str) -> None:
    place.put(f"gate/{name}", days=31)
    place.put(f"gate/{name}".replace("older", "newer").replace("half", "newer"), days=29)
    assert place.left() == ["/".join(["gate", *name.split("/")[:2]])]


def test_what_is_used_again_stays(place: Place) -> None:
    folder = place.put("gate/environments/mine/facts.json", days=100).parent
    mark_used(folder)
    assert place.left() == []


def test_a_link_in_place_of_a_section_is_not_followed(place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    mine = tmp_path / "elsewhere" / "mine"
    mine.write_bytes(b"1")
    os.utime(mine, (0, 0))
    (place.store.root / "gate").mkdir()
    (place.store.root / "gate" / "engines").symlink_to(tmp_path / "elsewhere")
    assert place.left() == []


def test_notes_on_objects_stay_while_a_built_image_holds_the_object(place: Place) -> None:
    (built,) = makers.build(place.checkout, place.store, place.root / "mirror", "root")
    rows = [r for layer in built.layers for r in place.store.contents(layer.record)]
    held = next(row.sha256 for row in rows if row.sha256)
    place.put(f"gates/arch/{held}.json", days=100)
    place.put(f"gates/arch/{'0' * 64}.json")
    assert place.left() == [f"gates/arch/{'0' * 64}.json"]


def test_the_command_says_first_and_removes_when_told(sm120: Command, place: Place) -> None:
    old = place.put("gate/environments/older/facts.json", days=31)
    mine = place.put("gate/environments/mine/facts.json")
    trim = ("--store", place.store.root, "store", "trim")
    assert "1 leftover of gates and compiling" in sm120(*trim).out
    assert old.exists()
    assert sm120(*trim, "--yes").code == 0
    assert not old.parent.exists()
    assert mine.exists()


def test_a_file_that_two_trees_share_is_counted_once(place: Place) -> None:
    first = place.put("gate/engines/a/x.py", b"12345")
    second = place.store.root / "gate/engines/b/x.py"
    second.parent.mkdir()
    os.link(first, second)
    section = {s.name: s for s in tree_sections(place.store, GATE_PARTS)}["gate engines"]
    assert (section.files, section.size_bytes) == (1, 5)
    assert bytes_below(second.parent) == 0  # removing one of them frees nothing
    assert remove_trees([second.parent]) == 0
    assert first.exists()

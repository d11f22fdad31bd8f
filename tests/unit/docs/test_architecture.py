"""The architecture page describes the rooms as their imports are."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS
from tests.docs.rooms import PACKAGE, SHARED, arrows, circle, modules

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
# the rows of the table of rooms; test_pages.py compares their last column, the imports
ROOMS = re.findall(r"^\| `pipeline/(\w+)` \|", PAGE, re.M)


def test_every_room_stands_on_the_page_once() -> None:
    rooms = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert sorted(ROOMS) == rooms


def test_a_room_imports_only_rooms_above_it_in_the_table() -> None:
    order = [SHARED, *ROOMS]
    back = [
        f"{room} imports {other}"
        for room, others in arrows().items()
        for other in others
        if order.index(other) > order.index(room)
    ]
    assert back == []


def test_no_rooms_import_each_other() -> None:
    assert circle(arrows()) == []


def test_no_files_import_each_other() -> None:
    assert circle(modules()) == []


def test_a_circle_is_noticed() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset()}
    assert circle(graph) == ["a", "b", "c", "a"]
    assert circle({**graph, "c": frozenset("d")}) == []

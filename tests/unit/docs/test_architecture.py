"""The architecture page describes the packages as their imports are."""

from __future__ import annotations

import re

from tests.docs.packages import arrows, circle, modules, parts
from tests.docs.pages import DOCS

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
# the rows of the table of packages; test_pages.py compares their last column, the imports
PACKAGES = re.findall(r"^\| `pipeline/([\w/]+)` \|", PAGE, re.M)


def test_every_package_stands_on_the_page_once() -> None:
    assert sorted(PACKAGES) == sorted(arrows())


def test_a_package_imports_only_packages_above_it_in_the_table() -> None:
    back = [
        f"{package} imports {other}"
        for package, others in arrows().items()
        for other in others
        if PACKAGES.index(other) > PACKAGES.index(package)
    ]
    assert back == []


def test_no_packages_import_each_other() -> None:
    assert circle(arrows()) == []
    assert circle(parts()) == []


def test_no_files_import_each_other() -> None:
    assert circle(modules()) == []


def test_a_circle_is_noticed() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset()}
    assert circle(graph) == ["a", "b", "c", "a"]
    assert circle({**graph, "c": frozenset("d")}) == []

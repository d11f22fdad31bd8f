"""Licences are found where the image holds them, also behind links."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.evidence.statements import bill
from pipeline.evidence.statements.bill import licences_of
from pipeline.evidence.statements.inventory import package_parts
from pipeline.evidence.statements.licence import Licence
from tests.makers import build_in, make_deb, root_image
from tests.testbed.deb_file import Item, hard_link, symlink
from tests.unit.verify.world import COPYRIGHT

DOC = "./usr/share/doc/tool"
NOT_THERE = "the image holds no copyright file of it"


def licence(tmp_path: Path, *items: Item) -> Licence:
    deb = make_deb(tmp_path / "mirror", "tool", *items)
    _, store, built = build_in(tmp_path, root_image([deb]))
    (licences,) = licences_of(store, package_parts(built)).values()
    return licences


@pytest.mark.parametrize(
    "items",
    [
        [Item(f"{DOC}/copyright", COPYRIGHT)],
        [Item(f"{DOC}/other", COPYRIGHT), hard_link(f"{DOC}/copyright", f"{DOC}/other")],
        [Item(f"{DOC}-common/copyright", COPYRIGHT), symlink(DOC, "tool-common")],
        [
            Item("./usr/share/doc/x/copyright", COPYRIGHT),
            symlink(f"{DOC}/copyright", "../x/copyright"),
        ],
        [
            Item("./usr/share/doc/x/copyright", COPYRIGHT),
            symlink(f"{DOC}/copyright", "/usr/share/doc/x/copyright"),
        ],
    ],
)
def test_a_copyright_file_is_found(tmp_path: Path, items: list[Item]) -> None:
    assert licence(tmp_path, *items).expression == "GPL-2.0-or-later AND MIT"


@pytest.mark.parametrize(
    "items",
    [
        [Item("./usr/bin/tool", b"")],
        [symlink(f"{DOC}/copyright", "gone")],
        [symlink(DOC, "x"), symlink("./usr/share/doc/x", "tool")],
    ],
)
def test_what_the_image_does_not_hold_is_not_asserted(tmp_path: Path, items: list[Item]) -> None:
    assert licence(tmp_path, *items) == Licence(reason=NOT_THERE)


def test_a_huge_copyright_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bill, "_MOST_BYTES", 10)
    declared = licence(tmp_path, Item(f"{DOC}/copyright", COPYRIGHT))
    assert "larger than 10 bytes" in declared.reason

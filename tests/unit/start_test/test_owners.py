"""Whom the folders of an image belong to, by its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.images.start_test.prove import judge_owners, read_owners
from tests.makers import build_in, make_deb, make_wheel, root_image, wheel_image
from tests.testbed.deb_file import Item

FOLDERS = ["/home/engine", "/tmp", "/home/engine/.cache/triton"]


def row(path: str, uid: int, mode: int, gid: int | None = None) -> FileRow:
    owner = uid if gid is None else gid
    return FileRow(path, Kind.DIR, mode, 0, "", 0, "", "", uid, owner)


def rows(*changed: FileRow) -> dict[str, FileRow]:
    usual = [row("home", 0, 0o755), row("home/engine", 1000, 0o755), row("tmp", 0, 0o1777)]
    return {each.path: each for each in [*usual, *changed]}


def test_a_home_of_its_own_and_a_common_tmp_are_right() -> None:
    assert judge_owners(rows(), FOLDERS, 1000, 1000).verdict == "passed"


WRONG: dict[str, tuple[FileRow, str]] = {
    "home of root": (row("home/engine", 0, 0o755), "/home/engine belongs to 0:0, mode 0755"),
    "home that is closed": (row("home/engine", 1000, 0o555), "mode 0555"),
    "home of another user": (row("home/engine", 1001, 0o700), "belongs to 1001:1001"),
    "cache of root": (row("home/engine/.cache", 0, 0o755), "/home/engine/.cache belongs to 0:0"),
    "tmp for root alone": (row("tmp", 0, 0o755), "/tmp: /tmp belongs to 0:0"),
    "a folder that cannot be entered": (row("home/engine", 1000, 0o644), "mode 0644"),
    "others may, the owner may not": (row("home/engine", 1000, 0o077), "mode 0077"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_owner_or_mode_is_caught(changed: FileRow, message: str) -> None:
    test = judge_owners(rows(changed), FOLDERS, 1000, 1000)
    assert (test.name, test.verdict) == ("owners", "failed")
    assert message in test.message


@pytest.mark.parametrize(
    "changed",
    [
        row("home/engine", 0, 0o775, gid=1000),
        row("home/engine", 0, 0o777),
        row("home/engine/.cache", 1000, 0o700),
    ],
)
def test_groups_and_others_may_write_where_their_bits_say_so(changed: FileRow) -> None:
    assert judge_owners(rows(changed), FOLDERS, 1000, 1000).verdict == "passed"


def test_a_folder_above_which_nothing_is_known_is_not_writable() -> None:
    assert judge_owners(rows(), ["/srv/models"], 1000, 1000).verdict == "failed"
    assert judge_owners(rows(), ["/srv/models"], 0, 0).verdict == "failed"


def built(tmp_path: Path, **more: Any) -> dict[str, FileRow]:
    mirror = tmp_path / "mirror"
    deb = make_deb(mirror, "tool", Item("./usr/bin/tool", b"#!"))
    image = wheel_image("engine", [make_wheel(mirror, "pkg")], user="engine", **more)
    image.files["x"] = "x\n"
    _, store, built = build_in(tmp_path, root_image([deb]), image)
    return read_owners(store, built, FOLDERS)


def test_a_built_image_has_its_owners_in_its_layers(tmp_path: Path) -> None:
    found = built(tmp_path)
    assert (found["home/engine"].uid, found["home/engine"].gid) == (1000, 1000)
    assert found["tmp"].mode & 0o7777 == 0o1777
    assert judge_owners(found, FOLDERS, 1000, 1000).verdict == "passed"


def test_a_file_put_below_the_home_leaves_a_cache_that_belongs_to_root(tmp_path: Path) -> None:
    found = built(tmp_path, files=[{"from": "x", "to": "/home/engine/.cache/x"}])
    test = judge_owners(found, FOLDERS, 1000, 1000)
    assert test.verdict == "failed"
    assert "/home/engine/.cache belongs to 0:0" in test.message

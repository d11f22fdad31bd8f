"""A change becomes a patch against installed files, or is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import PatchConflict, UnknownImage
from pipeline.core.model import sha256_of
from pipeline.images.assemble import patch_series
from pipeline.images.assemble.image import wheel_tree
from pipeline.images.assemble.patch_series import (
    Installed,
    installed_files,
    new_patch,
)
from pipeline.images.assemble.plan import plan_image
from tests.makers import (
    AMD64,
    Edit,
    build_in,
    make_checkout,
    make_deb,
    make_wheel,
    patch_files,
    root_image,
    wheel_image,
)

MODULE = b"one\ntwo\nthree\n"
EDIT = Edit("pkg/mod.py", MODULE, b"one\nzwei\nthree\n")
AFTER = EDIT.after.replace(b"three", b"drei")
SECOND = Edit("pkg/mod.py", EDIT.after, AFTER)
TEST = Edit("tests/test_mod.py", b"a\n", b"b\n")


@pytest.fixture
def files(tmp_path: Path) -> Installed:
    """An image whose one patch is EDIT."""
    mirror = tmp_path / "mirror"
    wheel = make_wheel(mirror, "pkg", {"pkg/mod.py": MODULE, "pkg/data": b"\xff\n"})
    image = wheel_image("child", [wheel], patches="patches/series.yaml")
    image.files = patch_files(EDIT)
    root = root_image([make_deb(mirror, "tool")])
    checkout, store, built = build_in(tmp_path, root, image)
    return installed_files(checkout, built.plan, wheel_tree(store, built.plan))


def moved(edit: Edit, path: str) -> str:
    return Edit(path, edit.before, edit.after).diff


@pytest.mark.parametrize("path", ["pkg/mod.py", "python/pkg/mod.py", "src/python/pkg/mod.py"])
def test_a_diff_may_come_from_any_folder_of_a_repository(files: Installed, path: str) -> None:
    made = new_patch(files, moved(SECOND, path).encode(), "a.diff")
    assert made.text == SECOND.diff
    assert made.applies_to == "pkg==1.0"
    (file,) = made.files
    assert (file.path, file.before, file.after) == (
        "pkg/mod.py",
        sha256_of(SECOND.before),
        sha256_of(AFTER),
    )


def test_a_diff_of_git_is_read_with_its_headers(files: Installed) -> None:
    head = "From 1234\nSubject: a fix\n\n---\n pkg/mod.py | 2 +-\n\n"
    lines = f"index 1..2 100644\n{moved(SECOND, 'python/pkg/mod.py')}-- \n2.39\n"
    text = head + of_git("python/pkg/mod.py", lines)
    assert new_patch(files, text.encode(), "a.patch").text == SECOND.diff


def of_git(path: str, lines: str) -> str:
    return f"diff --git a/{path} b/{path}\n{lines}"


def test_files_that_no_wheel_has_are_left_out_and_named(files: Installed) -> None:
    new = "new file mode 100644\n--- /dev/null\n+++ b/docs/b.md\n@@ -0,0 +1 @@\n+x\n"
    parts = [
        of_git("docs/b.md", new),
        of_git("logo.png", "Binary files a/logo.png and b/logo.png differ\n"),
        of_git("python/pkg/mod.py", moved(SECOND, "python/pkg/mod.py")),
        of_git(TEST.path, TEST.diff),
    ]
    made = new_patch(files, "".join(parts).encode(), "a.patch")
    assert made.left_out == ("docs/b.md", "logo.png", "tests/test_mod.py")
    assert made.text == SECOND.diff


def test_a_plain_diff_of_two_files_is_for_the_one_that_is_named(files: Installed) -> None:
    text = SECOND.diff.replace("a/pkg/mod.py", "old.py\t2026-01-01").replace(
        "b/pkg/mod.py", "new.py"
    )
    assert new_patch(files, text.encode(), "a.diff", "pkg/mod.py").text == SECOND.diff
    with pytest.raises(PatchConflict, match=r"no wheel of the image has old\.py"):
        new_patch(files, text.encode(), "a.diff")


@pytest.mark.parametrize("of", ["pkg/mod.py", "/opt/venv/lib/python3.11/site-packages/pkg/mod.py"])
def test_an_edited_copy_becomes_a_diff(files: Installed, of: str) -> None:
    assert new_patch(files, AFTER, "mod.py", of).text == SECOND.diff


def test_a_copy_that_is_no_different_is_refused(files: Installed) -> None:
    with pytest.raises(PatchConflict, match=r"is the same as pkg/mod\.py in the image"):
        new_patch(files, EDIT.after, "mod.py", "pkg/mod.py")


def test_what_is_not_text_is_refused(files: Installed) -> None:
    with pytest.raises(PatchConflict, match="is not text"):
        new_patch(files, b"\xfe\n", "data", "pkg/data")


def test_a_copy_of_no_file_is_refused(files: Installed) -> None:
    with pytest.raises(PatchConflict, match=r"no wheel of the image has pkg/nope\.py"):
        new_patch(files, AFTER, "mod.py", "pkg/nope.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("just words\n", "is not a unified diff"),
        (EDIT.diff, "line 2 is 'zwei', expected 'two'"),
        (TEST.diff, r"no wheel of the image has tests/test_mod\.py"),
        ("--- a/pkg/mod.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n", "in place"),
        (f"{SECOND.diff}{SECOND.diff.replace('mod.py', 'data')}", "is not text"),
    ],
)
def test_a_diff_that_does_not_fit_is_refused(files: Installed, text: str, message: str) -> None:
    with pytest.raises(PatchConflict, match=message):
        new_patch(files, text.encode(), "a.diff")


@pytest.mark.parametrize("data", [b"--- a heading\ntext\n", MODULE])
def test_what_only_resembles_a_diff_is_an_edited_copy(files: Installed, data: bytes) -> None:
    (file,) = new_patch(files, data, "mod.py", "pkg/mod.py").files
    assert file.after == sha256_of(data)


def test_an_image_whose_wheels_were_never_fetched_is_built_first(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "mirror", "pkg")
    root = root_image([make_deb(tmp_path / "mirror", "tool")])
    checkout = make_checkout(tmp_path / "checkout", root, wheel_image("child", [wheel]))
    with pytest.raises(UnknownImage, match="is not in the store yet") as caught:
        wheel_tree(open_store(tmp_path / "store"), plan_image(checkout, "child", AMD64))
    assert caught.value.hint == "Run `sm120 build child --accept` first."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("--- \n" * 400_000, 0),
        ("--- " + "x" * 2_000_000, 0),
        ("--- a\n" * 300_000, 0),
        ("diff --git a/" + "x" * 2_000_000, 0),
        ("--- a/x\n+++ b/x\n" * 1000, 1000),
    ],
)
def test_two_megabytes_that_begin_like_a_diff_are_read_at_once(text: str, count: int) -> None:
    begun = time.monotonic()
    why = f"changes {count} files, more than 500" if count else "is not a unified diff"
    with pytest.raises(PatchConflict, match=why):
        patch_series.new_patch(cast(Any, None), text.encode(), "big.diff")
    assert time.monotonic() - begun < 20


def test_a_diff_of_more_files_than_a_patch_has_is_refused_before_any_is_looked_up() -> None:
    with pytest.raises(PatchConflict, match=r"big\.diff: changes 501 files, more than 500"):
        patch_series.new_patch(cast(Any, None), b"--- a/x\n+++ b/x\n" * 501, "big.diff")

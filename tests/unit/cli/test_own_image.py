"""The verbs that begin an image and a patch, where they refuse: docs/own-image.md has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.app.workspace import host_platform
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import AMD64, Command, build_tiny

REASONS = ("--no-upstream", "only of our own", "--no-gate", "changes no kernel")
WHY = ("--why", "a test needs a reason that is long enough")
SITE = "/opt/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--base", "tiny", "--like", "tiny"],
    ],
)
@pytest.mark.usefixtures("checkout")
def test_a_new_image_stands_on_another_or_is_a_copy(sm120: Command, args: list[str]) -> None:
    ended = sm120("image", "new", "mine", *args)
    assert ended.code == 2
    assert "name one of --base and --like" in ended.err


@pytest.mark.parametrize("option", ["--require", "--platform", "--summary"])
@pytest.mark.usefixtures("checkout")
def test_a_copy_takes_no_changes_on_the_command_line(sm120: Command, option: str) -> None:
    value = {"--require": "thing==1.0", "--platform": AMD64, "--summary": "mine"}[option]
    ended = sm120("image", "new", "mine", "--like", "tiny", option, value)
    assert ended.code == 2
    assert f"{option} goes with --base; a copy (--like) is changed in its file" in ended.err
    assert "name one of" not in ended.err


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("mine", ["--base", "nope"], "UnknownImage"),
        ("mine", ["--like", "nope"], "UnknownImage"),
        ("tiny", ["--base", "tiny"], "SpecInvalid"),
        ("../mine", ["--base", "tiny"], "SpecInvalid"),
        ("../mine", ["--like", "tiny"], "SpecInvalid"),
    ],
)
def test_what_cannot_be_an_image_is_refused_and_nothing_written(
    sm120: Command, checkout: Checkout, name: str, args: list[str], error: str
) -> None:
    before = sorted(checkout.root.rglob("*"))
    assert sm120("image", "new", name, *args).error == error
    assert sorted(checkout.root.rglob("*")) == before


def test_a_new_image_may_be_for_this_machine_alone(sm120: Command, checkout: Checkout) -> None:
    assert sm120("image", "new", "mine", "--base", "tiny", "--platform", "host").code == 0
    assert checkout.spec("mine").platforms == [host_platform()]
    ended = sm120("image", "new", "other", "--base", "tiny", "--platform", "linux/s390x")
    assert ended.code == 2
    assert "'linux/amd64', 'linux/arm64', 'host'" in ended.err
    assert not (checkout.root / "images" / "other").exists()


def test_a_copy_of_an_image_can_be_locked_like_it(sm120: Command, checkout: Checkout) -> None:
    assert "is written" in sm120("image", "new", "mine", "--like", "tiny").out
    assert checkout.spec("mine").lock_digest() == checkout.spec("tiny").lock_digest()


@pytest.mark.usefixtures("checkout")
def test_a_patch_of_an_image_that_was_never_built_says_what_to_do(
    sm120: Command, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("x = 2\n")
    ended = sm120("image", "add-patch", "tiny", tmp_path / "a.py", *WHY, *REASONS)
    assert ended.error == "UnknownImage"
    assert "Run `sm120 build tiny --accept` first." in ended.err


@pytest.mark.usefixtures("no_slow_helpers")
def test_all_that_a_patch_lacks_is_said_at_once_and_nothing_is_written(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    build_tiny(sm120, "--accept")
    (tmp_path / "a.py").write_text("x = 2\n")
    asked = ("image", "add-patch", "tiny", tmp_path / "a.py", "--of", "thing/__init__.py")
    ended = sm120(*asked, *WHY)
    assert ended.error == "SpecInvalid"
    assert "give either `upstream`" in ended.err
    assert "give either `gate`" in ended.err
    assert not (checkout.folder("tiny") / "patches").exists()
    assert sm120(*asked, *WHY, *REASONS).code == 0
    (patch,) = checkout.series(checkout.spec("tiny")).patches
    assert (patch.applies_to, patch.no_gate) == ("thing==1.0", "changes no kernel")
    assert yaml.safe_load((checkout.folder("tiny") / "image.yaml").read_text())["patches"]


@pytest.mark.usefixtures("no_slow_helpers", "checkout")
def test_a_file_of_an_image_is_printed(sm120: Command) -> None:
    build_tiny(sm120, "--accept")
    for path in ("thing/__init__.py", f"{SITE}/thing/__init__.py"):
        assert sm120("image", "cat", "tiny", path).out == "one = 1\n"
    for path, reason, hint in (
        ("thing/nope.py", "no such file", "Give its whole path."),
        ("thin/__init__.py", "no such file", f"The nearest: {SITE}/thing/__init__.py."),
        (f"{SITE}/thing", "is a folder", f"`sm120 image files tiny {SITE}/thing` lists it."),
    ):
        ended = sm120("image", "cat", "tiny", path)
        assert ended.error == "UnknownFile"
        assert reason in ended.err
        assert hint in ended.err
    assert "The nearest: " in sm120("image", "explain", "tiny", "thin/__init__.py").err


@pytest.mark.usefixtures("no_slow_helpers", "checkout")
def test_the_files_of_an_image_are_listed(sm120: Command) -> None:
    build_tiny(sm120, "--accept")
    root = {row["path"]: row for row in sm120("image", "files", "tiny", "--json").json}
    assert root["/opt"]["kind"] == "dir"
    assert root["/opt"]["files"] > 1
    (file,) = sm120("image", "files", "tiny", "thing", "--json").json
    assert (file["path"], file["size_bytes"]) == (f"{SITE}/thing/__init__.py", 8)
    assert sm120("image", "files", "tiny", "*/thing/__init__.py", "--json").json == [file]
    assert sm120("image", "files", "tiny", "thing/__init__.py", "--json").json == [file]
    assert f"8 B   file  {SITE}/thing/__init__.py\n" in sm120("image", "files", "tiny", "thing").out


@pytest.mark.parametrize("path", ["/opt/nothing", "*.nothing", "[x"])
@pytest.mark.usefixtures("no_slow_helpers", "checkout")
def test_files_that_an_image_lacks_are_not_an_empty_list(sm120: Command, path: str) -> None:
    build_tiny(sm120, "--accept")
    ended = sm120("image", "files", "tiny", path)
    assert (ended.error, ended.out) == ("UnknownFile", "")
    assert "`sm120 image files tiny" in ended.err

"""Every file of an image has an origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import UnknownFile
from pipeline.evidence.statements.inventory import Origin, file_origin
from tests.makers import build_in, make_deb, root_image
from tests.testbed.deb_file import symlink
from tests.unit.verify.world import World

SITE = "opt/venv/lib/python3.11/site-packages"


def origin(world: World, path: str) -> Origin:
    return file_origin(world.checkout, world.store, world.built, path)


def test_a_file_of_a_wheel(world: World) -> None:
    file = origin(world, f"/{SITE}/other/__init__.py")
    assert file.origin == "other"
    assert file.package == "pkg:pypi/other@1.0?file_name=other-1.0-py3-none-any.whl"
    (pin,) = [p for p in world.built.plan.lock.wheels if p.name == "other"]
    assert file.package_sha256 == pin.sha256
    assert file.patches == ()


def test_a_file_of_a_deb_behind_a_link(world: World) -> None:
    file = origin(world, "/bin/tool")
    assert file.path == "/usr/bin/tool"
    assert file.links == ("/bin → usr/bin",)
    assert file.origin == "tool"
    assert str(file.package).startswith("pkg:deb/debian/tool@1.0?arch=amd64")


def test_a_patched_file_names_its_wheel_and_its_patch(world: World) -> None:
    file = origin(world, f"{SITE}/pkg/code.py")
    assert file.layer == "patches"
    assert file.origin == "pkg, changed by a patch of engine"
    assert [p.split()[0] for p in file.patches] == ["images/engine/patches/0001.patch"]
    assert str(file.package).startswith("pkg:pypi/pkg@1.0")


def test_a_record_that_a_patch_made_untrue_is_explained(world: World) -> None:
    file = origin(world, f"{SITE}/pkg-1.0.dist-info/RECORD")
    assert file.origin == "pkg, its RECORD updated after a patch of engine"
    assert file.patches == ()


def test_a_file_of_ours(world: World) -> None:
    file = origin(world, "/opt/serve.py")
    assert file.origin == "a file of images/engine"
    assert file.package is None


def test_a_file_that_the_builder_wrote(world: World) -> None:
    assert origin(world, "/opt/venv/pyvenv.cfg").origin == "made by the builder for engine"
    assert origin(world, "/etc/passwd").origin == "made by the builder for root"


def test_a_folder_belongs_to_the_layer_that_made_it_first(world: World) -> None:
    assert origin(world, "/usr/bin").layer == "2 Debian packages"


@pytest.mark.parametrize("path", ["/nothing", "", "../../etc/shadow2", "/bin/nothing"])
def test_what_is_not_there_is_said_to_be_missing(world: World, path: str) -> None:
    with pytest.raises(UnknownFile, match="no such file"):
        origin(world, path)


def test_a_symlink_loop_is_an_error(world: World, tmp_path: Path) -> None:
    round_and_round = symlink("./usr/share/a", "b"), symlink("./usr/share/b", "a")
    deb = make_deb(tmp_path / "mirror", "tool", *round_and_round)
    checkout, store, built = build_in(tmp_path, root_image([deb]))
    with pytest.raises(UnknownFile, match=r"^/usr/share/a: its links lead in a circle"):
        file_origin(checkout, store, built, "/usr/share/a")

"""A compiled image built again: identical, equivalent as declared, or the first byte named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import NotReproducible
from pipeline.evidence.statements.rebuilt import Rebuilt, compare_builds, first_difference
from pipeline.images.assemble.image import assemble_images
from pipeline.images.source.compiled import compile_tree
from tests.compiled import (
    COPYING,
    CompiledWorld,
    CopyingBackend,
    build_compiled,
    compiler_in,
    source_spec,
)
from tests.makers import folder_fetcher
from tests.unit.binary.arch_files import host_object

Make = Callable[[Path], dict[str, bytes]]
WHY = "it notes the moment at which it was made"
pytestmark = pytest.mark.usefixtures("no_slow_helpers")


def declaring(**paths: str) -> dict[str, Any]:
    """Builds that let some outputs differ."""
    builds = source_spec()["builds"]
    declared = {"bin/hello" if name == "hello" else name: why for name, why in paths.items()}
    return {name: {**build, "may_differ": declared} for name, build in builds.items()}


def outputs(hello: bytes = b"same", notes: bytes = b"same") -> Make:
    return lambda _: {"hello": hello, "notes": notes}


def again(world: CompiledWorld, backend: CopyingBackend) -> Rebuilt:
    """Compile and build in an empty store."""
    empty = open_store(world.place / "empty")
    for tree in world.built.plan.trees:
        compile_tree(compiler_in(world.checkout, empty, world.mirror, backend), tree)
    fetcher = folder_fetcher(empty, world.mirror)
    plans = [world.built.plan]
    second = assemble_images(world.checkout, empty, plans, lambda: fetcher, judge=False)[0]
    return Rebuilt(second, compare_builds(world.store, world.built, empty, second))


def test_the_same_bytes_again_are_identical(tmp_path: Path) -> None:
    world = build_compiled(tmp_path)
    rebuilt = again(world, COPYING)
    assert (rebuilt.verdict, rebuilt.second.digest) == ("identical", world.built.digest)
    assert rebuilt.declared == ()


def test_what_is_declared_may_differ_and_is_listed_with_its_reason(tmp_path: Path) -> None:
    world = build_compiled(tmp_path, CopyingBackend(outputs()), builds=declaring(notes=WHY))
    rebuilt = again(world, CopyingBackend(outputs(notes=b"later")))
    assert rebuilt.verdict == "equivalent"
    assert rebuilt.second.digest != world.built.digest
    assert [(x.path, x.reason) for x in rebuilt.declared] == [
        ("/opt/hello/notes", WHY),
        ("/opt/other/notes", WHY),
    ]


def test_what_is_declared_and_the_same_is_identical(tmp_path: Path) -> None:
    world = build_compiled(tmp_path, builds=declaring(notes=WHY, hello=WHY))
    assert again(world, COPYING).verdict == "identical"


@pytest.mark.parametrize(
    ("declared", "first", "second", "message"),
    [
        ({}, outputs(b"abcd"), outputs(b"abXd"), r"/opt/hello/bin/hello .*first at byte 2, 0x63"),
        ({}, outputs(b"abcd"), outputs(b"abcde"), "first at byte 4, its end against 0x65"),
        # one file is declared, the other one differs as well
        ({"notes": WHY}, outputs(), outputs(b"x", b"x"), r"bin/hello differs in size_bytes: 4"),
        # declared is a file, not all whose names begin so
        ({"note": WHY}, outputs(), outputs(notes=b"SAME"), r"/opt/hello/notes .* first at byte 0"),
    ],
)
def test_what_is_not_declared_is_different_and_the_first_byte_named(
    tmp_path: Path, declared: dict[str, str], first: Make, second: Make, message: str
) -> None:
    world = build_compiled(tmp_path, CopyingBackend(first), builds=declaring(**declared))
    with pytest.raises(NotReproducible, match=message):
        again(world, CopyingBackend(second))


def test_the_section_of_a_program_that_differs_is_named(tmp_path: Path) -> None:
    before = host_object({".text": b"code" * 4, ".comment": b"GCC: 12.2"})
    at = before.index(b"GCC: 12.2") + 5
    after = before[:at] + b"3" + before[at + 1 :]
    world = build_compiled(tmp_path, CopyingBackend(outputs(before)))
    with pytest.raises(NotReproducible, match=rf"first at byte {at} \(section \.comment\), 0x31"):
        again(world, CopyingBackend(outputs(after)))


def test_one_tree_declares_nothing_for_another(tmp_path: Path) -> None:
    builds = source_spec()["builds"]
    builds["plain"] = {**builds["plain"], "may_differ": {"notes": WHY}}
    world = build_compiled(tmp_path, CopyingBackend(outputs()), builds=builds)
    with pytest.raises(NotReproducible, match="/opt/other/notes"):
        again(world, CopyingBackend(outputs(notes=b"later")))


def test_other_settings_of_the_image_are_no_declared_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = build_compiled(tmp_path, CopyingBackend(outputs()), builds=declaring(notes=WHY))
    monkeypatch.setattr("pipeline.images.assemble.image.CREATED", "1990-01-01T00:00:00Z")
    with pytest.raises(NotReproducible, match="the config or manifest differs"):
        again(world, CopyingBackend(outputs(notes=b"later")))


def test_a_difference_outside_the_compiled_trees_is_not_declared_by_them(tmp_path: Path) -> None:
    world = build_compiled(tmp_path, builds=declaring(notes=WHY))
    start = world.checkout.folder("engine") / "start.sh"
    start.write_text("#!/bin/bash\n")
    with pytest.raises(NotReproducible, match=r"layer 'engine files': /opt/start\.sh"):
        again(world, COPYING)


def test_two_builds_of_one_digest_have_no_difference(tmp_path: Path) -> None:
    world = build_compiled(tmp_path)
    plans = [world.built.plan]
    (same,) = assemble_images(
        world.checkout, world.store, plans, lambda: folder_fetcher(world.store, world.mirror)
    )
    assert compare_builds(world.store, world.built, world.store, same) == ()


def test_the_first_difference_of_two_texts_is_found_wherever_it_is() -> None:
    text = bytes(range(64))
    for at in range(64):
        other = text[:at] + b"\xff" + text[at + 1 :]
        assert first_difference(text, other) == f"first at byte {at}, 0x{at:02x} against 0xff"
        assert first_difference(text, text[:at]).startswith(f"first at byte {at}, ")
    for one, other in itertools.permutations([b"", b"a", b"ab"], 2):
        at = min(len(one), len(other))
        assert first_difference(one, other).startswith(f"first at byte {at}, ")
        assert "its end" in first_difference(one, other)


def test_what_is_no_program_has_no_section() -> None:
    def first(data: bytes, at: int) -> str:
        changed = bytes([data[at] ^ 0xFF])
        text = first_difference(data, data[:at] + changed + data[at + 1 :])
        return text.removeprefix(f"first at byte {at}").partition(", 0x")[0]

    program = host_object({".text": b"code"})
    assert first(program, program.index(b"code")) == " (section .text)"
    assert first(program, 3) == " (the ELF header)"
    assert first(program, len(program) - 1) == " (between the sections of its ELF)"
    assert first(program[:80], 70) == ""  # cut off
    assert first(b"a text that is long enough to be looked at" * 4, 70) == ""

"""The Python blocks of the page about Python run, one after another, in their worlds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Page
from tests.docs.walks import World
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.support import Command, make_checkout, make_wheel

PAGE = Page(DOCS / "python.md")
BLOCKS = [block for block in PAGE.blocks if block.kind == "python"]
WORLDS = list(dict.fromkeys(block.mark.removeprefix("python: ") for block in BLOCKS))


@pytest.fixture
def served(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """A machine with a container engine, and a recipe of a built image."""
    make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
    # what the parser of this image's engine accepts is not committed
    monkeypatch.setattr("pipeline.app.serve._refused", lambda checkout, launch: ())
    with live_recipe(sm120, monkeypatch, tmp_path, LiveRecipe) as live:
        model = {"tiny": True, "file": "tiny.gguf", "name": "brain-1"}
        live.recipe(engine="llama-cpp", model=model)
        yield World(sm120, {"tiny-cpu": "brainy"})


@pytest.mark.usefixtures("no_slow_helpers")
@pytest.mark.parametrize("name", WORLDS)
def test_the_blocks_of_the_page_run_in_their_order(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    world: World = request.getfixturevalue(name)
    monkeypatch.chdir(world.sm120.cwd)
    known: dict[str, object] = {}
    blocks = [block for block in BLOCKS if block.mark == f"python: {name}"]
    for block in blocks:
        text = block.text
        for on_page, here in world.names.items():
            text = text.replace(on_page, here)
        exec(compile(text, str(PAGE.path), "exec"), known)
    # each block prints one line or more
    assert len(capfd.readouterr().out.splitlines()) >= len(blocks)


def test_every_block_is_short_and_has_a_world() -> None:
    assert all(block.mark.startswith("python: ") for block in BLOCKS)
    assert max(len(block.text.splitlines()) for block in BLOCKS) <= 7

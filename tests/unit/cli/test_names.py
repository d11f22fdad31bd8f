"""Shell completion of image and recipe names: quick, and silent where there is nothing."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from pipeline.cli.main import cli
from pipeline.cli.verbs import GROUPS, VerbGroup
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from tests.unit.support import ROOT

IMAGES, RECIPES = Checkout(ROOT).images(), Recipes([ROOT / "recipes"]).names()


def completed(*args: str | Path, begun: str = "") -> list[str]:
    shell = BashComplete(cli, {}, "sm120", "_SM120_COMPLETE")
    return [item.value for item in shell.get_completions([*map(str, args)], begun)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["build"], IMAGES),
        (["build", "vllm"], IMAGES),
        (["build", "--offline"], IMAGES),
        (["image", "rebuild"], IMAGES),
        (["gate", "run"], IMAGES),
        (["recipe", "flags"], IMAGES),
        (["serve"], RECIPES),
        (["serve", "--port", "8000"], RECIPES),
        (["recipe", "stop", "tiny-cpu"], RECIPES),
        (["smoke"], RECIPES),
        (["bench", "run"], RECIPES),
        (["bench"], ["run", "answer", "list", "compare", "record", "attest", *RECIPES]),
        # one name is all that these take, and a word after it is of another kind
        (["serve", "tiny-cpu"], []),
        (["recipe", "status"], []),
        (["image", "new"], []),
    ],
)
def test_names_of_the_checkout_are_completed(args: list[str], expected: list[str]) -> None:
    assert completed("--checkout", ROOT, *args) == expected


def test_only_what_begins_so_is_offered_and_options_and_files_as_before() -> None:
    assert completed("--checkout", ROOT, "serve", begun="tiny-c") == ["tiny-cpu"]
    assert completed("--checkout", ROOT, "build", begun="nobody") == []
    assert completed("serve", begun="--runt") == ["--runtime"]
    assert completed("build", "vllm", begun="--off") == ["--offline"]
    assert completed("serve", "tiny-cpu", "--runtime", begun="po") == ["podman"]
    shell = BashComplete(cli, {}, "sm120", "_SM120_COMPLETE")
    (item,) = shell.get_completions(["image", "export", "vllm"], "/tm")
    assert (item.type, item.value) == ("file", "/tm")


def test_recipes_of_ones_own_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert completed("serve", "--recipes", tmp_path) == ["mine"]
    monkeypatch.setenv("SM120_RECIPES", f"{tmp_path}{os.pathsep}{tmp_path / 'gone'}")
    assert completed("serve") == ["mine"]
    assert completed("--checkout", ROOT, "serve") == sorted([*RECIPES, "mine"])


def test_where_nothing_can_be_found_nothing_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    assert completed("--checkout", gone, "serve") == []
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert completed("build") == []
    gone.rmdir()
    assert completed("build") == []
    assert completed("serve") == []


def test_every_verb_that_takes_a_name_completes_it() -> None:
    # these name what is not there yet, or anything that can be checked
    others = {"new", "verify"}
    for group in (cli, *GROUPS):
        assert isinstance(group, VerbGroup)
        for name, verb in group.verbs.items():
            if verb.where and name not in others:
                assert verb.names == _kind(group, name), name


def _kind(group: VerbGroup, name: str) -> str | None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    metavar = str(arguments[0].metavar or arguments[0].name).upper() if arguments else ""
    return next((kind for kind in ("image", "recipe") if kind.upper() in metavar), None)

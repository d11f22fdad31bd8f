"""`sm120 recipe flags`: what it shows, and what it does not mix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.main import cli
from pipeline.core.errors import RecipeInvalid, SpecInvalid
from tests.unit.support import ROOT


def flags(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--checkout", str(ROOT), "recipe", "flags", *arguments])


def test_the_committed_flags_are_shown_without_an_image() -> None:
    done = flags("ik-llama-cpu")
    assert done.exit_code == 0
    assert "--override-tensor" in done.output
    assert "ik-llama: ik_llama.cpp 55d3c05b" in done.output


def test_the_same_as_json() -> None:
    shown = json.loads(flags("vllm-nccl", "--json").stdout)
    assert (shown["image"], shown["version"]) == ("vllm", "0.32.0")
    assert shown["flags"]["--max-model-len"] == {"takes": "one", "type": "size", "words": ["auto"]}


def test_an_image_without_an_engine_has_no_flags() -> None:
    assert isinstance(flags("debian-python").exception, SpecInvalid)


@pytest.mark.parametrize(
    "arguments",
    [
        ["vllm", "--wheel", __file__],
        ["vllm", "--inside", "sglang"],
        ["llama-cpp", "--program", __file__, "--archive", __file__],
        ["vllm", "--program", "/nothing/here"],
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str]) -> None:
    assert flags(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["vllm", "--program", __file__],  # compiles nothing
        ["ik-llama", "--archive", __file__],  # is not mainline
        ["llama-cpp", "--archive", __file__],  # not the archive of the lock
    ],
)
def test_a_file_that_is_not_the_images_is_refused(arguments: list[str]) -> None:
    assert isinstance(flags(*arguments).exception, SpecInvalid)


def test_nothing_is_guessed_where_no_file_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.app.recipes.flags_folder", lambda _: tmp_path)
    assert isinstance(flags("vllm").exception, RecipeInvalid)

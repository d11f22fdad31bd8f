"""`sm120 load`: the names that an image gets, and what is said to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.app.recipes import run_lines
from pipeline.artifacts.containers.docker import Docker
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from tests.unit.support import ROOT, Command, build_tiny

SPECS, RECIPES = Checkout(ROOT), Recipes([ROOT / "recipes"])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The tags of every load that reaches Docker."""
    tags: list[list[str]] = []

    def load(docker: Any, store: Any, name: str, digest: str, names: list[str]) -> str:
        tags.append(names)
        return "sha256:1"

    monkeypatch.setattr(Docker, "__init__", lambda docker: None)
    monkeypatch.setattr(Docker, "load", load)
    return tags


@pytest.mark.usefixtures("checkout")
def test_an_image_gets_a_name_that_stays_and_one_that_moves(
    sm120: Command, loaded: list[list[str]]
) -> None:
    (built,) = build_tiny(sm120, "--accept", "--json").json
    ended = sm120("load", "tiny")
    fixed = f"sm120/tiny:{built['digest'][7:19]}"
    assert loaded == [[fixed, "sm120/tiny:latest"]]
    assert ended.out == f"{fixed} is in Docker as sha256:1, also named sm120/tiny:latest\n"


@pytest.mark.usefixtures("checkout")
def test_names_that_are_given_are_all_it_gets(sm120: Command, loaded: list[list[str]]) -> None:
    build_tiny(sm120, "--accept")
    sm120("load", "tiny", "--tag", "mine:1", "--json")
    assert loaded == [["mine:1"]]


@pytest.mark.parametrize(
    ("image", "want"),
    [
        (
            "llama-cpp-cpu",
            "docker run --rm -p 127.0.0.1:8080:8080 -v /models:/models:ro"
            " TAG -m /models/MODEL.gguf",
        ),
        (
            "sglang-k2",
            "docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -p 127.0.0.1:30000:30000"
            " -v /models:/models:ro TAG --model-path /models/MODEL",
        ),
        (
            "vllm",
            "docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -p 127.0.0.1:8000:8000"
            " -v /models:/models:ro TAG /models/MODEL",
        ),
    ],
)
def test_the_line_that_runs_an_image_has_its_port_and_its_model(image: str, want: str) -> None:
    run, ask, recipe = run_lines(RECIPES, SPECS.spec(image), "TAG")
    assert run == f"Run it: {want}"
    port = SPECS.spec(image).ports[0]
    assert ask == f"Ask it: curl http://127.0.0.1:{port}/v1/models"
    assert RECIPES.read(recipe.rpartition(" ")[2]).image == image


def test_an_image_without_a_server_has_no_such_line() -> None:
    assert list(run_lines(RECIPES, SPECS.spec("debian-python"), "TAG")) == []


def test_a_recipe_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("name: broken\n", encoding="utf-8")
    recipes = Recipes([tmp_path, ROOT / "recipes"])
    assert list(run_lines(recipes, SPECS.spec("llama-cpp-cpu"), "TAG"))

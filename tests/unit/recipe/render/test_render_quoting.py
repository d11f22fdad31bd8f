from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.render.formats import CONTAINED, render_launch, systemd_word
from tests.testbed.unit_file import settings as settings_of
from tests.testbed.unit_file import words
from tests.unit.recipe.render.launches import (
    HOSTILE,
    QUADLET_HOSTILE,
    TARGET,
    VARIABLES,
    hostile_launch,
    small_launch,
)

ALL = [*CONTAINED, "shell"]
PRINTABLE = st.text(st.characters(exclude_categories=["C"]), min_size=1)


def undoubled(value: str) -> str:
    """As Compose and Kubernetes read it."""
    assert "$" not in value.replace("$$", "")
    return value.replace("$$", "$")


def shell_words(text: str) -> list[str]:
    """As a shell splits it; shlex knows no continued lines."""
    return shlex.split(text.replace(" \\\n", " "))


def rendered(format_name: str) -> str:
    return render_launch(hostile_launch(format_name), TARGET, format_name)


@pytest.mark.parametrize("format_name", ["docker", "podman"])
def test_a_shell_gives_the_engine_what_the_recipe_says(format_name: str) -> None:
    found = shell_words(rendered(format_name))
    assert found[-len(HOSTILE) :] == HOSTILE
    assert [b for a, b in itertools.pairwise(found) if a == "-e"] == VARIABLES


def test_a_script_gives_the_engine_what_the_recipe_says() -> None:
    # the head holds a comment, which shlex takes for words
    body = rendered("shell").partition("set -eu\n")[2]
    found = shell_words(body)
    assert found[found.index("/models") + 1 : -2] == HOSTILE
    exports = [b for a, b in itertools.pairwise(found) if a == "export"]
    assert exports == VARIABLES


def test_systemd_gives_the_engine_what_the_recipe_says() -> None:
    start = dict(settings_of(rendered("systemd"), "Service"))["ExecStart"]
    found = words(start)
    assert found[0] == "/usr/bin/docker"
    assert found[-len(HOSTILE) :] == HOSTILE
    assert [b for a, b in itertools.pairwise(found) if a == "-e"] == VARIABLES


def test_a_quadlet_gives_the_engine_what_the_recipe_says() -> None:
    found = settings_of(rendered("quadlet"), "Container")
    assert words(dict(found)["Exec"])[1:] == QUADLET_HOSTILE
    assert [words(value) for key, value in found if key == "Environment"] == [
        [each] for each in VARIABLES
    ]


def test_compose_gives_the_engine_what_the_recipe_says() -> None:
    engine = yaml.safe_load(rendered("compose"))["services"]["engine"]
    assert [undoubled(word) for word in engine["command"][1:]] == HOSTILE
    assert [f"{k}={undoubled(v)}" for k, v in engine["environment"].items()] == VARIABLES


def test_kubernetes_gives_the_engine_what_the_recipe_says() -> None:
    deployment, _ = yaml.safe_load_all(rendered("kubernetes"))
    engine = deployment["spec"]["template"]["spec"]["containers"][0]
    assert [undoubled(word) for word in engine["args"][1:]] == HOSTILE
    assert [f"{x['name']}={undoubled(x['value'])}" for x in engine["env"]] == VARIABLES


@pytest.mark.parametrize("value", ["1e3", "0o17", "017", "12:30", "y", "N", ".5", "-1", "+1", "."])
@pytest.mark.parametrize("format_name", ["compose", "kubernetes"])
def test_a_text_that_yaml_1_2_takes_for_something_else_is_quoted(
    format_name: str, value: str
) -> None:
    text = render_launch(small_launch(environment={"NAME": value}), TARGET, format_name)
    assert re.search(rf": '{re.escape(value)}'$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "end", ["a\nb", "a\r", "\0", "tab\there", "\x7f", "a\x85b", "\x9b", "\u2028", "\u2029"]
)
@pytest.mark.parametrize("place", ["argument", "variable", "folder", "model"])
def test_a_value_of_two_lines_is_refused(end: str, place: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "argument": {"arguments": [end]},
        "variable": {"environment": {"NAME": end}},
        "folder": {"mounts": [Mount(host=f"/{end}", inside="/models")]},
        "model": {"model": end},
    }
    for format_name in ALL:
        with pytest.raises(RecipeInvalid, match="control character"):
            render_launch(small_launch(**changes[place]), TARGET, format_name)


# a byte of a folder's name that is no UTF-8, as Python reads it; then what is no character
@pytest.mark.parametrize("end", ["\udcff", "\ufffe", "\ufdd0", "\U0010ffff"])
@pytest.mark.parametrize("place", ["argument", "variable", "folder"])
def test_a_value_that_is_no_text_is_refused(end: str, place: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "argument": {"arguments": [end]},
        "variable": {"environment": {"NAME": end}},
        "folder": {"mounts": [Mount(host=f"/{end}", inside="/models")]},
    }
    for format_name in ALL:
        with pytest.raises(RecipeInvalid, match="no text"):
            render_launch(small_launch(**changes[place]), TARGET, format_name)


# a busy machine is no fault of what is tested
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PRINTABLE, min_size=1))
def test_systemd_reads_any_words_back(wanted: list[str]) -> None:
    assert words(" ".join(map(systemd_word, wanted))) == wanted


def test_an_empty_word_is_not_lost() -> None:
    assert systemd_word("") == '""'


def test_a_folder_that_is_hard_to_quote_arrives_in_shells_and_units() -> None:
    launch = small_launch(mounts=[Mount(host="/a b/$x'\"%h", inside="/models")])
    want = "/a b/$x'\"%h:/models:ro"
    assert want in shell_words(render_launch(launch, TARGET, "docker"))
    unit = render_launch(launch, TARGET, "systemd")
    assert want in words(dict(settings_of(unit, "Service"))["ExecStart"])


@pytest.mark.parametrize("folder", ["/a b", "/a'b", '/a"b', "/a\\b", "/a$b"])
def test_a_folder_that_quadlets_cannot_mount_is_refused(folder: str) -> None:
    launch = small_launch(mounts=[Mount(host=folder, inside="/models")])
    with pytest.raises(RecipeInvalid, match="quadlet"):
        render_launch(launch, TARGET, "quadlet")


def test_a_semicolon_of_its_own_is_no_argument_for_quadlets() -> None:
    with pytest.raises(RecipeInvalid, match="`;`"):
        render_launch(small_launch(arguments=["a", ";", "b"]), TARGET, "quadlet")
    render_launch(small_launch(arguments=["a;", ";b"]), TARGET, "quadlet")


def test_a_percent_sign_in_a_folder_is_no_specifier_for_quadlets() -> None:
    launch = small_launch(mounts=[Mount(host="/data/50%", inside="/models")])
    assert "Volume=/data/50%%:/models:ro,Z" in render_launch(launch, TARGET, "quadlet").splitlines()


@pytest.mark.parametrize("folder", ["/a:b", "relative", ""])
def test_a_folder_that_a_container_cannot_have_is_refused(folder: str) -> None:
    launch = small_launch(mounts=[Mount(host=folder, inside="/models")])
    for format_name in CONTAINED:
        with pytest.raises(RecipeInvalid, match="absolute path without a colon"):
            render_launch(launch, TARGET, format_name)

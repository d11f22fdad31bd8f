"""A command starts fast when it loads only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipeline.cli.lazy import Lazily
from pipeline.cli.main import cli
from tests.testbed.locked_set import SMALL, make_set
from tests.unit.support import ROOT

SLOW = {
    *("cryptography", "docker", "huggingface_hub", "packaging", "pydantic"),
    *("pypi_simple", "requests", "rich", "urllib3", "yaml"),
}
CODE = """
import sys
from pipeline.cli.main import cli
try:
    cli(sys.argv[1:], prog_name="sm120")
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def loaded_by(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return SLOW & set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", ["--version", "--help", "weights verify --help", "build --help"])
def test_what_only_speaks_of_commands_loads_none_of_their_libraries(words: str) -> None:
    assert loaded_by(*words.split()) == set()


def test_a_verify_of_weights_loads_its_own_libraries_alone(tmp_path: Path) -> None:
    make_set(tmp_path, SMALL, {"model.safetensors": b"weights" * 1000})
    assert loaded_by("weights", "verify", str(tmp_path)) == {"pydantic", "yaml"}


@pytest.mark.parametrize("words", [[], ["weights"]], ids=["sm120", "weights"])
def test_a_command_goes_by_the_name_it_is_listed_under(words: list[str]) -> None:
    group: click.Command = cli
    for word in words:
        assert isinstance(group, click.Group)
        group = group.commands[word]
    assert isinstance(group, click.Group)
    assert {name: one.name for name, one in group.commands.items()} == {
        n: n for n in group.commands
    }


def test_a_command_is_loaded_once_and_an_unknown_one_not_at_all() -> None:
    commands = Lazily({"verify": "weights_check:verify"})
    assert commands["verify"] is commands["verify"]
    assert commands.get("build") is None
    with pytest.raises(KeyError):
        commands["build"]

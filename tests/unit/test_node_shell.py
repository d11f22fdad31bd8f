"""A root shell on a test node: Docker may lose the end of what it prints, and nothing is missed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest

from tests.testbed.nodes import Node


class LossyContainer:
    """Runs commands here, and loses output of the first so many from some byte on."""

    def __init__(self, place: Path, losses: int, from_byte: int) -> None:
        self.place, self.losses, self.from_byte = place, losses, from_byte

    def exec_run(self, words: list[str]) -> SimpleNamespace:
        words = [word.replace("/run/", f"{self.place}/") for word in words]
        done = subprocess.run(words, capture_output=True, check=False)
        text = done.stdout.replace(f"{self.place}/".encode(), b"/run/")
        if self.losses:
            self.losses, text = self.losses - 1, text[: self.from_byte]
        return SimpleNamespace(exit_code=done.returncode, output=text)


@pytest.mark.parametrize("losses", [0, 1, 3])
@pytest.mark.parametrize("from_byte", [0, 2, 9])
def test_what_docker_lost_is_read_again(
    losses: int, from_byte: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = LossyContainer(tmp_path, losses, from_byte)

    def client(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(containers=SimpleNamespace(get=lambda _: container))

    monkeypatch.setattr(docker, "DockerClient", client)
    node = Node("n1", "", "id", "", tmp_path)
    assert node.shell(f"echo one >> {tmp_path}/times; echo two >&2; printf three") == "two\nthree"
    assert (tmp_path / "times").read_text() == "one\n"
    assert node.shell("echo no; exit 3", check=False) == "no\n"
    container.losses = losses
    with pytest.raises(AssertionError, match="n1: 'echo no; exit 3' ended with 3: no"):
        node.shell("echo no; exit 3")

"""Rebuilds over a stand-in for `srun` that runs the real command of a node on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.support import ROOT, Command, Ended

AMD64 = "linux/amd64"
# what comes after the options of srun is the job, which is run once; its reply may be changed
SRUN = """#!/bin/sh
echo "$*" >> {here}/calls
while [ "$1" != /usr/bin/env ]; do shift; done
[ -e {here}/reply ] || "$@" > {here}/reply
sed "$(cat {here}/change)" {here}/reply
"""
NODE = """#!/bin/sh
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={root}
exec {python} -m pipeline --checkout {checkout} --store {here}/store "$@"
"""


@dataclass
class OneNode:
    """A cluster of one program."""

    folder: Path
    sm120: Command

    def rebuild(self, *words: str) -> Ended:
        node = ("--on", "slurm", "--node-command", str(self.folder / "node"))
        return self.sm120("image", "rebuild", "tiny", *node, *words)

    def change(self, script: str) -> None:
        """What sed makes of the node's reply."""
        (self.folder / "change").write_text(script, encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


@pytest.fixture
def node(sm120: Command, built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneNode:
    """A node with the same checkout, and a store of its own that holds nothing."""
    assert built
    folder = tmp_path / "cluster"
    folder.mkdir()
    # a node finds its files itself
    mirror = f"\nexport SM120_MIRRORS={tmp_path / 'mirror'}\nexec"
    words = {"here": folder, "root": ROOT, "python": sys.executable, "checkout": tmp_path}
    programs = {"srun": SRUN, "node": NODE.replace("\nexec", mirror), "scancel": "#!/bin/sh\n"}
    for name, text in programs.items():
        (folder / name).write_text(text.format(**words), encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    made = OneNode(folder, sm120)
    made.change("")
    return made


def test_a_node_builds_the_same_bytes_from_nothing_and_is_not_asked_again(
    node: OneNode, built: str
) -> None:
    done = node.rebuild("--offline")
    assert (done.code, len(node.calls)) == (0, 1), done.err
    assert re.fullmatch(rf"tiny for {AMD64}: identical on \S+, {built}\n", done.out)
    # the whole node, and the network only where the caller would use it
    assert "--exclusive" in node.calls[0]
    assert node.calls[0].endswith(f"image answer tiny --platform {AMD64} --offline")
    row = node.rebuild("--offline", "--json").json
    assert (row["verdict"], row["identical"], row["cached"]) == ("identical", True, True)
    assert (row["digest"], len(node.calls)) == (built, 1)


DIFFERENT = {
    "a layer": (
        's/\\("layers": \\[\\["[^"]*", "sha256:\\)[0-9a-f]\\{8\\}/\\100000000/',
        "built other bytes: layer ",
    ),
    "the manifest": (
        's/\\("digest": "sha256:\\)[0-9a-f]\\{8\\}/\\100000000/',
        "all layers are equal, the config or manifest differs",
    ),
}


@pytest.mark.share(1)
@pytest.mark.parametrize("what", DIFFERENT)
def test_other_bytes_are_named_and_asked_for_again(node: OneNode, what: str) -> None:
    script, why = DIFFERENT[what]
    # an image with another layer has another digest, too
    node.change(f"{DIFFERENT['the manifest'][0]}; {script}")
    done = node.rebuild("--offline")
    assert done.error == "NotReproducible"
    assert why in done.err
    assert f"tiny for {AMD64}: different on" in done.out
    node.change("")
    assert node.rebuild("--offline").code == 0
    assert len(node.calls) == 2


NO_ANSWER = {
    "another builder": 's/"builder": "sha256:[0-9a-f]*/"builder": "sha256:00/',
    "an answer to another key": 's/"key": "sha256:[0-9a-f]*/"key": "sha256:00/',
}


@pytest.mark.share(1)
@pytest.mark.parametrize("what", NO_ANSWER)
def test_what_is_no_answer_proves_nothing(node: OneNode, what: str) -> None:
    node.change(NO_ANSWER[what])
    done = node.rebuild("--offline", "--json")
    assert (done.error, len(node.calls)) == ("SlurmUnavailable", 3)
    assert json.loads(done.out)["verdict"] == "unknown"
    if what == "another builder":
        assert "has another builder than this machine" in done.err


def test_a_node_of_another_spec_has_no_answer(
    node: OneNode, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other, program = tmp_path_factory.mktemp("other"), node.folder / "node"
    for name in ("images", "lockfiles"):
        shutil.copytree(tmp_path / name, other / name)
    spec = other / "images" / "tiny" / "image.yaml"
    text = spec.read_text(encoding="utf-8")
    spec.write_text(text.replace("a small image", "another image"), encoding="utf-8")
    text = program.read_text(encoding="utf-8")
    program.write_text(text.replace(f"--checkout {tmp_path}", f"--checkout {other}"))
    done = node.rebuild("--offline")
    assert done.error == "SlurmUnavailable"
    assert "srun ended with 0 and 0 of 1 answer: no reason" in done.err


@pytest.mark.parametrize("words", [("--attest",), ("--keep-objects",)])
def test_what_is_about_this_machine_is_refused(node: OneNode, words: tuple[str, ...]) -> None:
    done = node.rebuild(*words)
    assert (done.code, node.calls) == (2, [])
    assert "--attest and --keep-objects are about this machine" in done.err

"""What this command made is listed, and removed when somebody says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import docker as sdk
import pytest
from docker.errors import APIError, DockerException, ImageNotFound

from pipeline.artifacts.containers.facts import own_name
from pipeline.artifacts.containers.podman import Podman
from pipeline.artifacts.store.store import Store
from pipeline.core import proc
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import Command

OURS, MOVING, CHOSEN = "sm120/vllm:7e106a76b933", "sm120/vllm:latest", "sm120/vllm:mine"


@dataclass
class FakeDocker:
    """A daemon with some images; `busy` are used by containers."""

    tags: list[str] = field(default_factory=lambda: [OURS, MOVING, CHOSEN, "postgres:16"])
    busy: tuple[str, ...] = ()
    served: list[str] = field(default_factory=list)
    owner: str | None = None

    def ping(self) -> bool:
        return True

    def containers(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        owner = {"sm120.owner": self.owner} if self.owner else {}
        return [{"Labels": {filters["label"]: name, **owner}} for name in self.served]

    @property
    def api(self) -> FakeDocker:
        return self

    def images(self) -> list[dict[str, Any]]:
        return [{"RepoTags": self.tags, "Size": 1000}, {"RepoTags": None, "Size": 5}]

    def remove_image(self, tag: str) -> None:
        if tag in self.busy:
            raise APIError("conflict: container 123 is using it")
        if tag not in self.tags:
            raise ImageNotFound("no such image")
        self.tags.remove(tag)


@dataclass
class FakePodman:
    """A user's Podman, in place of its program; `busy` are used by containers."""

    names: list[str] = field(default_factory=list)
    busy: tuple[str, ...] = ()
    answer: bytes | None = None
    containers: dict[str, str] = field(default_factory=dict)  # recipes, and their status

    def read(self, words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        if words[1] == "images":
            rows = json.dumps([{"Names": self.names, "Size": 2000}, {"Names": None, "Size": 5}])
            out, code, error = self.answer or rows.encode(), 0, b""
        elif words[1] == "ps":
            out, code, error = "\n".join(self.containers).encode(), 0, b""
        elif words[1] == "container":
            out, code, error = self._container(words[3]), 0, b""
        elif words[2] in self.busy:
            out, code, error = b"", 2, b"Error: image used by 7ef3: image is in use by a container"
        elif words[2] not in self.names:
            out, code, error = b"", 1, f"Error: {words[2]}: image not known".encode()
        else:
            self.names.remove(words[2])
            out, code, error = b"Untagged", 0, b""
        return subprocess.CompletedProcess(words, code, out, error)

    def _container(self, recipe: str) -> bytes:
        status = self.containers[recipe]
        state = {"Status": status, "Running": status == "running", "ExitCode": 0}
        labels = {"sm120.recipe": recipe}
        body = {"Id": recipe, "Name": recipe, "Image": "1", "State": state}
        return json.dumps([{**body, "Config": {"Labels": labels}}]).encode()


@pytest.fixture(autouse=True)
def podman(monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    fake = FakePodman()
    monkeypatch.setattr(proc, "find_tool", lambda name, hint: name)
    monkeypatch.setattr(proc, "read", fake.read)
    monkeypatch.setattr(Podman, "is_there", lambda: bool(fake.names or fake.answer))
    return fake


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    daemon = FakeDocker()
    monkeypatch.setattr(sdk, "from_env", lambda **_: daemon)
    return daemon


@pytest.fixture
def machine(
    checkout: Checkout, docker: FakeDocker, sm120: Command, store_root: Path
) -> dict[str, Path]:
    """A store, a key, a trust file and an environment, and beside each what is not ours."""
    sm120("--store", store_root, "store", "trim")
    Store(store_root).note_loaded([OURS, MOVING])
    sm120("evidence", "new-key", "me")
    keys = Path(os.environ["HOME"]) / ".config" / "sm120" / "keys"
    (keys / "notes.txt").write_text("mine")
    sm120("evidence", "trust-key", keys / "me.pub")
    (checkout.root / "lockfiles" / "tool").mkdir()
    for name in ("run", "other"):
        (checkout.root / "lockfiles" / "tool" / f"{name}.txt").write_text("")
        (checkout.root / ".nox" / name / "bin").mkdir(parents=True)
    (checkout.root / ".nox" / "run" / "locked").write_text("0" * 64)
    return {
        "store": store_root,
        "keys": keys,
        "trust": keys.with_name("trust.yaml"),
        "run": checkout.root / ".nox" / "run",
        "other": checkout.root / ".nox" / "other",
    }


def is_there(machine: dict[str, Path]) -> dict[str, bool]:
    found = {name: path.exists() for name, path in machine.items() if name != "keys"}
    return {**found, "keys": (machine["keys"] / "me.pem").exists()}


ALL = dict.fromkeys(("store", "keys", "trust", "run", "other"), True)


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run", "--yes"], ["--json"], []])
def test_nothing_goes_before_somebody_says_so(
    machine: dict[str, Path], docker: FakeDocker, sm120: Command, options: list[str]
) -> None:
    ended = sm120("--store", machine["store"], "uninstall", *options)
    assert ended.code == 0, ended.err
    assert str(machine["run"]) in ended.out
    assert OURS in ended.out
    assert is_there(machine) == ALL
    assert OURS in docker.tags


def test_all_but_the_keys_goes(
    machine: dict[str, Path], docker: FakeDocker, sm120: Command
) -> None:
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert ended.code == 0, ended.err
    assert "kept (--keys)" in ended.out
    assert is_there(machine) == {**ALL, "store": False, "run": False}
    assert docker.tags == [CHOSEN, "postgres:16"]
    again = sm120("--store", machine["store"], "uninstall", "--yes", "--json").json
    assert [item["what"] for item in again["items"] if item["goes"]] == []


def test_keys_go_when_they_are_asked_for_and_what_lies_beside_them_stays(
    machine: dict[str, Path], sm120: Command
) -> None:
    answer = sm120("--store", machine["store"], "uninstall", "--yes", "--keys", "--json").json
    assert answer["removed"]
    assert is_there(machine) == {**dict.fromkeys(ALL, False), "other": True}
    assert [p.name for p in machine["keys"].iterdir()] == ["notes.txt"]


def test_a_tag_that_a_container_uses_is_named(
    machine: dict[str, Path], docker: FakeDocker, sm120: Command
) -> None:
    docker.busy = (OURS,)
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert ended.error == "DockerUnavailable"
    assert "container 123" in ended.err
    assert machine["store"].exists(), "it knows which tags are ours"
    assert machine["run"].exists(), "the command is needed again"
    docker.busy = ()
    assert sm120("--store", machine["store"], "uninstall", "--yes").code == 0
    assert (OURS in docker.tags, machine["run"].exists()) == (False, False)


def test_nothing_goes_while_an_engine_is_served_in_docker(
    machine: dict[str, Path], docker: FakeDocker, sm120: Command
) -> None:
    docker.served = ["tiny-cpu"]
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert ended.error == "AlreadyServed"
    assert "sm120 recipe stop --all" in ended.err
    assert is_there(machine) == ALL
    listed = sm120("--store", machine["store"], "uninstall", "--dry-run")
    assert (listed.code, "tiny-cpu is served" in listed.out) == (0, True)
    docker.served = []
    assert sm120("--store", machine["store"], "uninstall", "--yes").code == 0


@pytest.mark.parametrize(
    ("status", "error"),
    [("running", "AlreadyServed"), ("created", "AlreadyServed"), ("exited", "")],
)
def test_nothing_goes_while_an_engine_may_run_in_podman(
    machine: dict[str, Path], podman: FakePodman, sm120: Command, status: str, error: str
) -> None:
    podman.names, podman.containers = list(PODMANS), {"tiny-cpu": status}
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert (ended.error, machine["store"].exists()) == (error, bool(error))


PODMANS = [f"localhost/{OURS}", f"docker.io/{MOVING}"]
OTHERS = [f"localhost/{CHOSEN}", f"quay.io/{OURS}", "localhost/mine:latest"]


def test_tags_in_podman_are_listed_and_go(
    machine: dict[str, Path], podman: FakePodman, sm120: Command
) -> None:
    podman.names = [*PODMANS, *OTHERS]
    shown = sm120("--store", machine["store"], "uninstall", "--json").json["items"]
    tags = [item["where"] for item in shown if item["what"] == "Podman tag"]
    assert sorted(tags) == sorted(PODMANS)
    assert sm120("--store", machine["store"], "uninstall", "--yes").code == 0
    assert podman.names == OTHERS


def test_a_tag_in_podman_that_a_container_uses_is_named(
    machine: dict[str, Path], podman: FakePodman, sm120: Command
) -> None:
    podman.names, podman.busy = list(PODMANS), (PODMANS[0],)
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert ended.error == "DockerUnavailable"
    assert f"{PODMANS[0]}: " in ended.err
    assert "in use by a container" in ended.err
    assert podman.names == PODMANS[:1]
    assert machine["run"].exists()


@pytest.mark.parametrize("answer", [b"no JSON", b'{"Names": 1}', b"[1]"])
def test_without_an_answer_of_podman_the_rest_goes(
    machine: dict[str, Path], podman: FakePodman, sm120: Command, answer: bytes
) -> None:
    podman.answer = answer
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert (ended.code, "tags of images in it are not listed" in ended.err) == (0, True)
    assert not machine["store"].exists()


def test_what_stays_and_how_it_goes_is_said_before_the_command_itself_goes(
    machine: dict[str, Path],
    checkout: Checkout,
    sm120: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", str(machine["run"]))
    for options in (["--dry-run"], ["--yes"]):
        ended = sm120("--store", machine["store"], "uninstall", *options)
        folder = machine["keys"].parent
        assert f"--keys removes them now, `rm -r {folder}` later" in ended.out
        assert f"This command itself goes with {machine['run']}" in ended.out
        assert f"`rm -r {checkout.root}` removes it" in ended.out
    again = sm120("--store", machine["store"], "uninstall")
    assert "`--keys --yes` removes it" in again.out
    assert sm120("--store", machine["store"], "uninstall", "--keys", "--yes").code == 0
    assert "nothing of this command" in sm120("--store", machine["store"], "uninstall").out


def test_without_docker_the_rest_goes(
    machine: dict[str, Path], sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise DockerException("no socket")

    monkeypatch.setattr(sdk, "from_env", refuse)
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert (ended.code, "tags of images in it are not listed" in ended.err) == (0, True)
    assert not machine["store"].exists()


def test_environments_behind_a_link_are_somebody_elses(
    machine: dict[str, Path], sm120: Command, tmp_path: Path
) -> None:
    home = machine["run"].parent
    home.rename(tmp_path / "shared")
    home.symlink_to(tmp_path / "shared")
    assert sm120("--store", machine["store"], "uninstall", "--yes").code == 0
    assert (tmp_path / "shared" / "run" / "locked").exists()


def test_a_folder_that_is_no_store_is_not_touched(
    docker: FakeDocker, sm120: Command, tmp_path: Path
) -> None:
    docker.tags = []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    ended = sm120("--store", tmp_path / "mine", "uninstall", "--yes")
    assert "nothing of this command is here" in ended.out
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(("answer", "is_gone"), [(True, True), (False, False)])
def test_on_a_terminal_it_asks(
    machine: dict[str, Path],
    sm120: Command,
    monkeypatch: pytest.MonkeyPatch,
    answer: bool,
    is_gone: bool,
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda *_, **__: answer)
    ended = sm120("--store", machine["store"], "uninstall")
    assert ended.code == 0
    assert machine["store"].exists() is not is_gone


def test_files_that_others_put_among_keys_and_inputs_stay(
    machine: dict[str, Path], sm120: Command
) -> None:
    keys, store = machine["keys"], machine["store"]
    (keys / "server.pem").write_text("-----BEGIN PRIVATE KEY-----\nof a web server\n")
    (keys / "other.pem").write_text("-----BEGIN RSA PRIVATE KEY-----\nx\n")
    (keys / "other.pub").write_text("ssh-rsa AAAA me@host\n")
    (keys / "friend.pub").write_bytes((keys / "me.pub").read_bytes())
    (store / "inputs" / "thesis.tex").write_text("mine")
    (store / "oci/blobs/sha256" / "notes").write_text("mine")
    done = sm120("--store", store, "uninstall", "--keys", "--yes")
    assert done.code == 0
    left = {p.name for p in keys.iterdir()}
    assert left == {"server.pem", "other.pem", "other.pub", "friend.pub", "notes.txt"}
    assert (store / "inputs" / "thesis.tex").read_text() == "mine"
    assert (store / "oci/blobs/sha256" / "notes").read_text() == "mine"
    assert "thesis.tex: is not the store's own, and stays" in done.out + done.err
    kept = {p.name for p in store.rglob("*") if p.is_file()}
    assert kept == {"thesis.tex", "notes", *(p.name for p in store.iterdir() if p.is_file())}


@pytest.mark.parametrize("level", ["keys", "config"])
def test_keys_that_a_link_leads_to_stay_and_that_is_shown(
    machine: dict[str, Path], sm120: Command, tmp_path: Path, level: str
) -> None:
    folder = machine["keys"] if level == "keys" else machine["keys"].parent
    real = tmp_path / "shared"
    folder.rename(real)
    folder.symlink_to(real)
    before = {p.name for p in real.rglob("*")}
    done = sm120("--store", machine["store"], "uninstall", "--keys", "--yes")
    assert done.code == 0
    assert {p.name for p in real.rglob("*")} == before
    assert f"{folder} is a link: the keys that it leads to stay." in done.out + done.err


def test_what_another_user_serves_or_loaded_is_shown_and_stays(
    machine: dict[str, Path], docker: FakeDocker, sm120: Command
) -> None:
    other = "sm120/sglang:0123456789ab"
    docker.tags.append(other)
    docker.served, docker.owner = ["kimi"], "uid 4711, /home/bob"
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert ended.code == 0, ended.err
    assert "kimi is served by another user (uid 4711, /home/bob), and stays" in ended.out
    assert "kept (loaded by another user, or by an older version)" in ended.out
    assert docker.tags == [CHOSEN, "postgres:16", other]


def test_what_oneself_serves_still_stops_it(
    machine: dict[str, Path], docker: FakeDocker, sm120: Command
) -> None:
    docker.served, docker.owner = ["kimi"], own_name()
    ended = sm120("--store", machine["store"], "uninstall", "--yes")
    assert ended.error == "AlreadyServed"
    assert OURS in docker.tags

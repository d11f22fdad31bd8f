"""Podman's own refusals, as a user reads them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field

import pytest

from pipeline.artifacts.containers import podman as podman_module
from pipeline.artifacts.containers.podman import Podman
from pipeline.core import proc
from pipeline.core.errors import ContainerRefused, PodmanUnavailable

REFUSED = b"Error: unable to start container: crun: setrlimit `RLIMIT_NOFILE`: not permitted\n"


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch) -> Podman:
    """One that refuses everything."""
    done = subprocess.CompletedProcess([], 126, b"", REFUSED)
    monkeypatch.setattr(proc, "read", lambda *_, **__: done)
    return Podman(list)


def test_a_container_that_podman_does_not_start_shows_its_reason_and_no_log(podman: Podman) -> None:
    with pytest.raises(ContainerRefused, match="RLIMIT_NOFILE") as caught:
        podman.start("abc")
    assert "sm120 render RECIPE" in caught.value.hint
    assert "log" not in caught.value.hint


def test_what_is_no_start_is_another_error(podman: Podman) -> None:
    with pytest.raises(PodmanUnavailable, match=r"Podman could not stop: .*RLIMIT_NOFILE"):
        podman.stop("abc", 1)


BUSY = b"Error: removing container abc root filesystem: 1 error occurred:\n\t* unlinkat /x/userdata/shm: device or resource busy\n"  # noqa: E501


def container(status: str) -> bytes:
    state = {"Status": status, "Running": status == "running", "ExitCode": 0}
    body = {"Id": "abc", "Name": "sm120-tiny", "Image": "1", "State": state, "Config": {}}
    return json.dumps([body]).encode()


@dataclass
class Program:
    """A Podman that says a state of its container, and refuses `rm` a few times."""

    status: str
    refusals: list[bytes] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)

    def read(self, words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        self.asked.append(words)
        if words[1:3] == ["container", "inspect"]:
            return subprocess.CompletedProcess(words, 0, container(self.status), b"")
        if words[1] == "rm" and self.refusals:
            return subprocess.CompletedProcess(words, 125, b"", self.refusals.pop())
        return subprocess.CompletedProcess(words, 0, b"/usr/bin/runc\n", b"")

    def removes(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        monkeypatch.setattr(proc, "read", self.read)
        monkeypatch.setattr(podman_module, "_BUSY_S", (0.0, 0.0, 0.0))
        Podman(list).remove("abc")
        return [" ".join(words[:2]) for words in self.asked]


def test_a_container_whose_mount_is_busy_is_removed_at_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Program("exited", [BUSY, BUSY]).removes(monkeypatch)
    assert asked == ["podman container", *["podman rm"] * 3]


def test_what_stays_busy_is_an_error_with_a_hint_about_podman(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PodmanUnavailable, match="resource busy") as caught:
        Program("exited", [BUSY] * 3).removes(monkeypatch)
    assert "podman ps" in caught.value.hint
    assert "Docker" not in caught.value.hint


def test_another_refusal_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("exited", [REFUSED])
    with pytest.raises(PodmanUnavailable, match="RLIMIT_NOFILE") as caught:
        program.removes(monkeypatch)
    assert [words[1] for words in program.asked] == ["container", "rm"]
    assert "podman info" in caught.value.hint


def test_an_engine_that_podman_forgot_is_ended_by_its_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program("created")
    program.removes(monkeypatch)
    deleted, removed = program.asked[-2:]
    assert deleted == ["/usr/bin/runc", "delete", "--force", "abc"]
    assert removed[:2] == ["podman", "rm"]


@pytest.mark.parametrize("status", ["running", "exited"])
def test_the_runtime_is_left_alone_where_podman_knows_what_runs(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/usr/bin/runc delete" not in Program(status).removes(monkeypatch)

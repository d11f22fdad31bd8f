"""Podman's own refusals, as a user reads them."""

from __future__ import annotations

import subprocess

import pytest

from pipeline import proc
from pipeline.errors import ContainerRefused, DockerUnavailable
from pipeline.serve.podman import Podman

REFUSED = b"Error: unable to start container: crun: setrlimit `RLIMIT_NOFILE`: not permitted\n"


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch) -> Podman:
    """One that refuses everything."""
    done = subprocess.CompletedProcess([], 126, b"", REFUSED)
    monkeypatch.setattr(proc, "read", lambda *_, **__: done)
    return Podman(words=lambda arguments: ["podman", *arguments])


def test_a_container_that_podman_does_not_start_shows_its_reason_and_no_log(podman: Podman) -> None:
    with pytest.raises(ContainerRefused, match="RLIMIT_NOFILE") as caught:
        podman.start("abc")
    assert "sm120 render RECIPE" in caught.value.hint
    assert "log" not in caught.value.hint


def test_what_is_no_start_is_another_error(podman: Podman) -> None:
    with pytest.raises(DockerUnavailable, match=r"Podman could not stop: .*RLIMIT_NOFILE"):
        podman.stop("abc", 1)

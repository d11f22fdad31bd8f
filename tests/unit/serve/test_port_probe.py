from __future__ import annotations

import socket

import pytest

from pipeline.serving.serve.port_probe import port_problem
from tests.testbed.ports import unused_port


class _WithoutRights(socket.socket):
    """As a user without root meets ports below 1024."""

    def bind(self, address: object) -> None:
        raise PermissionError(13, "Permission denied")


@pytest.fixture
def port() -> int:
    return unused_port()


def test_a_free_port_has_no_problem_and_a_taken_one_has(port: int) -> None:
    assert port_problem(port) == ""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen()
        assert port_problem(port) == "Address already in use"


def test_a_low_port_is_a_problem_only_where_somebody_listens(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen()
        monkeypatch.setattr(socket, "socket", _WithoutRights)
        assert port_problem(port) == "Address already in use"
    assert port_problem(port) == ""

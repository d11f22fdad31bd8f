from __future__ import annotations

import socket
import threading

import pytest

from pipeline.serving.serve.health import is_healthy, served_models
from tests.unit.serve.fake_engine import answering


def test_a_server_that_says_yes_is_healthy_and_names_its_models() -> None:
    with answering(["a", "b"]) as port:
        assert is_healthy(port)
        assert served_models(port) == ["a", "b"]


def test_a_server_that_loads_is_not_healthy_yet() -> None:
    with answering([], health=503) as port:
        assert not is_healthy(port)


def test_nobody_is_not_healthy() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert not is_healthy(probe.getsockname()[1])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nno json",
        b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"name": "x"}]}',
        b"HTTP/1.1 401 Unauthorized\r\n\r\n{}",
        b"something else\r\n",
        b"",
    ],
)
def test_an_answer_that_names_no_models_names_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        assert served_models(server.getsockname()[1]) is None
        thread.join()

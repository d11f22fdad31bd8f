"""How a server counts the tokens of a prompt, where its context is small or it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.bench.server import Server
from pipeline.errors import BenchUnanswered
from pipeline.smoke.wire import Address


@contextmanager
def server(most_letters: int, *, counts: bool = True) -> Iterator[Server]:
    """A server whose tokens are letters, and whose context holds so many of them."""

    class Letters(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            letters = len(body["messages"][0]["content"])
            status, answer = (
                200,
                json.dumps({"usage": {"prompt_tokens": letters}} if counts else {}),
            )
            if letters > most_letters:
                status, answer = 400, '{"error": {"message": "exceeds the available context"}}'
            data = answer.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing to the terminal."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Letters)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.server_port}"
        yield Server(Address.read(url), url)
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@pytest.mark.parametrize("most_letters", [100_000, 500])
def test_a_small_context_gives_the_same_scale_as_a_large_one(most_letters: int) -> None:
    with server(most_letters) as small:
        scale = small.scale("letters", "key")
    assert 5 < scale.per_word < 9


def test_a_server_that_refuses_every_prompt_is_quoted() -> None:
    with server(3) as full, pytest.raises(BenchUnanswered, match=r"400: .*available context"):
        full.scale("letters", "key")


def test_a_server_that_counts_nothing_cannot_be_measured() -> None:
    with server(100_000, counts=False) as mute, pytest.raises(BenchUnanswered, match="no answer"):
        mute.scale("letters", "key")

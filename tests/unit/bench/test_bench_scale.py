"""How a server counts the tokens of a prompt, where its context is small or it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean

import pytest

from pipeline.app.bench import changed_workload
from pipeline.core.errors import BenchUnanswered
from pipeline.core.net.wire import Address
from pipeline.serving.bench.plan import TokenScale, WorkerJob, cells_of, sessions
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.workload import read_workload


@contextmanager
def server(most_letters: int, *, counts: bool = True) -> Iterator[MeasuredServer]:
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
        yield MeasuredServer(Address.read(url), url)
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@pytest.mark.parametrize("most_letters", [100_000, 500])
def test_a_small_context_gives_the_same_scale_as_a_large_one(most_letters: int) -> None:
    with server(most_letters) as small:
        scale = small.scale("letters", 0)
    assert 5 < scale.per_word < 9


def test_two_runs_of_a_workload_have_prompts_of_the_length_that_was_asked_for() -> None:
    workload = changed_workload(read_workload("tiny"), input_tokens=150)

    def lengths(scale: TokenScale, nonce: str) -> list[int]:
        address = Address.read("h:1")
        base = {"address": address, "model": "m", "workload": workload, "nonce": nonce}
        jobs = [
            WorkerJob.model_validate({**base, "requests": c.requests, "cell": c, "scale": scale})
            for c in cells_of(workload)
        ]
        bodies = [json.loads(each[0].body) for job in jobs for each in sessions(job)]
        return [len(body["messages"][0]["content"]) for body in bodies]

    with server(500) as small:
        first, second = (
            lengths(small.scale("letters", workload.seed), nonce) for nonce in ("one", "two")
        )
    assert first == second
    assert fmean(first) == pytest.approx(150, rel=0.03)


def test_a_prompt_that_fills_the_context_may_have_been_cut_off() -> None:
    with server(100_000) as cutting:
        whole = cutting.scale("letters", 0)
        # 400 words are counted as more letters than this context has
        short = cutting.scale("letters", 0, context=1000)
    assert whole != short
    assert short.per_word == pytest.approx(whole.per_word, rel=0.1)


def test_a_server_that_refuses_every_prompt_is_quoted() -> None:
    with server(3) as full, pytest.raises(BenchUnanswered, match=r"400: .*available context"):
        full.scale("letters", 0)


def test_a_server_that_counts_nothing_cannot_be_measured() -> None:
    with server(100_000, counts=False) as mute, pytest.raises(BenchUnanswered, match="no answer"):
        mute.scale("letters", 0)


def test_a_server_that_does_not_answer_is_not_asked_again_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def silent(self: MeasuredServer, *_: object) -> None:
        asked.append(1)
        self.lost = "no answer within 600 s"

    monkeypatch.setattr(MeasuredServer, "_ask", silent)
    url = "http://127.0.0.1:9"
    with pytest.raises(BenchUnanswered, match="no answer within 600 s"):
        MeasuredServer(Address.read(url), url).scale("model", seed=1)
    assert len(asked) == 1

"""A server that repeats the key that it was sent gets it into no file and onto no terminal."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed.bench_faults import FaultyConnection, bench_server
from tests.testbed.model_server import Asked, Fault, ModelServer, Refusal, in_thread
from tests.unit.support import Command, Ended

KEY = "sk-7f3aQz19LmWx42RtBn"
_PART = 10  # characters of the key: whoever has so many of them has nearly all
SMALL = ("--quick", "--streams", "1,2", "--lengths", "4", "--pressure", "2", "--no-quality")


@pytest.fixture(autouse=True)
def key(sm120: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's key is given, and there is one that signs."""
    monkeypatch.setenv("SM120_API_KEY", KEY)
    assert sm120("evidence", "new-key", "me").code == 0


def require_no_key(folder: Path, done: Ended) -> None:
    """Not in what was printed, not in a file, not in what a statement holds, and no part of it."""
    found = {"the terminal": done.out + done.err}
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_text("utf-8", "replace")
        if path.name.endswith(".dsse.json"):
            text += base64.b64decode(json.loads(text)["payload"]).decode()
        found[path.name] = text
    parts = {KEY[at : at + _PART] for at in range(len(KEY) - _PART + 1)}
    assert [name for name, text in found.items() if any(part in text for part in parts)] == []


def _refusal(before: int) -> Callable[[Asked], None]:
    def asked(_: Asked) -> None:
        raise Refusal(401, f"{'x' * before} wrong key: Bearer {KEY}")

    return asked


def _answered(asked: Asked, text: str) -> str:
    return f"{KEY} {text}"


# What is cut short for a table or a record may be cut within the key: a key's length apart, so that
# every cut falls into one; without `--big` three times as far, and bench asks for those between.
BEFORE = [
    pytest.param(before, marks=() if before % 60 == 0 else pytest.mark.big)
    for before in (0, *range(40, 400, 20))
]


@pytest.mark.parametrize("before", BEFORE)
def test_a_refusal_with_the_key_is_kept_without_it_by_smoke(
    sm120: Command, tmp_path: Path, before: int
) -> None:
    with in_thread(ModelServer(Fault(asked=_refusal(before)))) as url:
        done = sm120("--debug", "smoke", url, *SMALL, "--output", tmp_path / "kept")
    assert done.error == "SmokeFailed"
    assert (tmp_path / "kept" / "smoke.json.dsse.json").exists()
    require_no_key(tmp_path / "kept", done)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_answer_and_a_stream_with_the_key_are_kept_without_it_by_smoke(
    sm120: Command, tmp_path: Path, more: tuple[str, ...]
) -> None:
    with in_thread(ModelServer(Fault(text=_answered))) as url:
        done = sm120(
            "--debug",
            "smoke",
            url,
            *SMALL,
            "--up-to",
            "tools",
            "--output",
            tmp_path / "kept",
            *more,
        )
    assert (tmp_path / "kept" / "exchanges.jsonl").exists()
    require_no_key(tmp_path / "kept", done)


BENCH = (
    "--requests",
    "4",
    "--input-tokens",
    "32",
    "--output-tokens",
    "4",
    "--repeats",
    "1",
    "--no-self-test",
)


@pytest.mark.share(6)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("where", ["refusal", "stream"])
def test_a_server_that_repeats_the_key_is_measured_without_it(
    sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, before: int
) -> None:
    def fault(self: FaultyConnection, request: bytes, tokens: int) -> bool:
        # the first warms the server up: the trial itself fails
        if self.world.requests <= 1:
            return False
        more = before + 20 * (self.world.requests - 2)
        text = f"{'x' * more} wrong key: Bearer {KEY}"
        body = json.dumps({"error": {"message": text}}).encode()
        if where == "refusal":
            self.write_json(b"401 Unauthorized", body)
        else:
            data = b"data: " + body + b"\n\n"
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            self.transport.write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return True

    monkeypatch.setattr(FaultyConnection, "fault_key", fault, raising=False)
    with bench_server("key") as server:
        words = ("--concurrency", "1", *BENCH, "--output", tmp_path / "bench")
        done = sm120("--debug", "bench", server.url, *words)
    assert done.error == "BenchVoid"
    # beyond some length the message is cut before it comes to the key
    if before < 250:
        assert "***" in (tmp_path / "bench" / "quick" / "requests.jsonl").read_text()
    require_no_key(tmp_path / "bench", done)

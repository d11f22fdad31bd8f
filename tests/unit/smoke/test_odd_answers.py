"""An honest server is not blamed for a byte order mark; odd lengths and sizes are named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.core.net.wire import Address, Raw
from pipeline.serving.smoke.client import ChatClient, Gone, Unsound
from pipeline.serving.smoke.ladder import exchanges_file
from pipeline.serving.smoke.model import ChatLimits
from tests.testbed.hostile import CHUNKED, OK, Script, body, forever, hostile_server, sends
from tests.unit.smoke.streamed import events_of

BOM = b"\xef\xbb\xbf"
EVENT = b'data: {"a": 1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", [1, 2, 3, 5, len(BOM + EVENT)])
def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it(cut: int) -> None:
    data = BOM + EVENT
    raw = Raw(200, {}, [(0.1, data[:cut]), (0.5, data[cut:])], 0.6)
    assert [value for _, value in events_of(raw)] == [b'{"a": 1}']


def test_a_byte_order_mark_within_a_stream_is_data() -> None:
    raw = Raw(200, {}, [(0.1, b"data: 1\n\n" + BOM + b"data: 2\n\ndata: [DONE]\n\n")], 0.2)
    assert [value for _, value in events_of(raw)] == [b"1"]


def get(script: Script, key: str = "") -> ChatClient:
    with hostile_server(script) as url:
        client = ChatClient(Address.read(url), ChatLimits(request_s=5.0), {"Authorization": key})
        try:
            asyncio.run(client.get("/v1/models"))
        except Unsound as error:
            client.check = f"{type(error).__name__}: {error}"
        return client


@pytest.mark.parametrize("length", [b"+2", b"2_0", b" -2", b"0x2", b"\xb2", b"2,2", b"1" * 5000])
def test_a_length_that_is_no_number_is_named(length: bytes) -> None:
    ended = get(sends(OK + b"Content-Length: " + length + b"\r\n\r\n{}"))
    assert "states a length of" in ended.check


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (forever(CHUNKED, b"0" * 4096), "a chunk of the answer has a size without end"),
        (sends(CHUNKED + b"f" * 40 + b"\r\n"), "is larger than any answer"),
        (sends(CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n"), "has no size"),
    ],
)
def test_an_endless_or_odd_chunk_size_is_named(script: Script, reason: str) -> None:
    assert reason in get(script).check


def test_a_mark_before_a_whole_answer_is_no_fault() -> None:
    assert get(body(BOM + b'{"data": []}')).check == ""


def test_a_key_that_a_server_repeats_is_kept_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = "sk-0123456789abcdef"
    monkeypatch.setenv("SM120_API_KEY", key)
    data = b'{"error": "wrong key ' + key.encode() + b'"}'
    head = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(data)
    client = get(sends(head + data), f"Bearer {key}")
    assert "wrong key ***" in client.check
    assert key.encode() not in exchanges_file(client.exchanges)
    assert Gone is not Unsound

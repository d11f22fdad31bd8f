"""Requests end in time and in bounds, whatever a server sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pipeline.core.errors import InputInvalid
from pipeline.core.net.wire import Address, AnswerLost, KeptConnection, Raw, send
from pipeline.serving.smoke.client import ChatClient, Unsound
from tests.testbed.model_server import ModelServer, listening
from tests.unit.smoke.streamed import events_of


def _sent(answer: Sequence[bytes], *, limit_s: float = 20.0, most_bytes: int = 10_000) -> Raw:
    """The answer of a server that writes these pieces and hangs up; none hangs for ever."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in answer:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not answer:
            await reader.read()
        writer.close()

    async def run() -> Raw:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await send(
                Address.read(f"http://127.0.0.1:{port}/v1"),
                "GET",
                "/v1/models",
                b"",
                {},
                limit_s=limit_s,
                most_bytes=most_bytes,
            )
        finally:
            server.close()

    return asyncio.run(run())


OK = b"HTTP/1.1 200 OK\r\n"


def test_a_stated_length_is_read_whole() -> None:
    assert _sent([OK + b"Content-Length: 5\r\n\r\n", b"he", b"llo"]).data == b"hello"


def test_chunks_are_joined() -> None:
    raw = _sent([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"])
    assert (raw.status, raw.data, len(raw.pieces)) == (200, b"hello", 2)


def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    assert _sent([OK + b"\r\n", b"hello"]).data == b"hello"


def test_a_note_that_an_answer_follows_is_not_the_answer() -> None:
    note = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    raw = _sent([note + OK + b"Content-Length: 5\r\n\r\nhello"])
    assert (raw.status, raw.data) == (200, b"hello")


def test_what_follows_the_answer_on_a_connection_that_ends_is_not_looked_at() -> None:
    assert _sent([OK + b"Content-Length: 5\r\n\r\nhello", b" and more"]).data == b"hello"
    assert _sent([OK + b"Content-Length: 5\r\n\r\nhello and more"]).data == b"hello"
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
    assert _sent([chunked]).data == b"hello"
    assert _sent([chunked + b"X-Trailer: 1\r\n\r\n"]).data == b"hello"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([OK + b"Content-Length: 9\r\n\r\nhello"], "ended in mid-answer"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhe"], "ended in mid-answer"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"-1\r\n"], "has no size"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"FFFFFFFF\r\n"], "larger than"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * 17 + b"\r\n"], "than any answer"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1" * 70_000], "size without end"),
        ([OK + b"Content-Length: 20000\r\n\r\n", b"x" * 20000], "larger than"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 700], "larger than"),
        ([OK + b"Content-Length: x\r\n\r\n"], "states a length of"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "not HTTP"),
        ([OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n"], "too long"),
        ([b""], "ended in mid-answer"),
    ],
)
def test_what_is_no_whole_answer_is_lost_with_the_reason(answer: list[bytes], why: str) -> None:
    with pytest.raises(AnswerLost, match=why):
        _sent(answer)


def test_a_server_that_says_nothing_is_left_after_the_limit() -> None:
    with pytest.raises(AnswerLost, match=r"within 0\.05 s"):
        _sent([], limit_s=0.05)


def test_nobody_there_is_said_so() -> None:
    address = Address.read("http://127.0.0.1:9")
    with pytest.raises(AnswerLost, match="no server listens"):
        asyncio.run(send(address, "GET", "/", b"", {}, limit_s=5, most_bytes=10))


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("http://gpu1:8000", Address("gpu1", 8000, False, "")),
        ("gpu1:8000", Address("gpu1", 8000, False, "")),
        ("https://models.example/a/v1/", Address("models.example", 443, True, "/a")),
    ],
)
def test_an_address_may_be_typed_in_several_ways(typed: str, address: Address) -> None:
    assert Address.read(typed) == address


@pytest.mark.parametrize("typed", ["ftp://gpu1", "http://", "http://a:b", "http://me:key@gpu1"])
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(InputInvalid):
        Address.read(typed)


def _events(*pieces: bytes, has_done: bool = True) -> list[bytes]:
    raw = Raw(200, {}, [(0.0, piece) for piece in pieces], 0.0)
    return [data for _, data in events_of(raw, has_done=has_done)]


def test_events_are_whole_where_pieces_cut_a_line_or_a_character() -> None:
    stream = "data: größe\r\n\r\n: a comment\ndata:東京\n\ndata: [DONE]\n\n".encode()
    pieces = [stream[i : i + 1] for i in range(len(stream))]
    assert [e.decode() for e in _events(*pieces)] == ["größe", "東京"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_of_data_without_an_empty_one_between_are_one_event(end: bytes) -> None:
    lines = [b"id: 7", b'data: {"a":', b"data: 1}", b"", b": ping", b"", b"data: [DONE]", b"", b""]
    stream = end.join(lines)
    assert _events(stream) == [b'{"a":\n1}']
    assert _events(*(stream[i : i + 1] for i in range(len(stream)))) == [b'{"a":\n1}']


def test_an_event_has_the_time_of_the_piece_that_ends_it() -> None:
    pieces = [(1.0, b"data: a\n"), (2.0, b"\ndata: [DO"), (3.0, b"NE]\n\n")]
    assert events_of(Raw(200, {}, pieces, 4.0)) == [(2.0, b"a")]


def test_done_behind_the_end_of_a_message_is_no_event() -> None:
    assert _events(b"data: stop\n\ndata: [DONE]\n\n", has_done=False) == [b"stop"]
    assert _events(b"data: stop\n\n", has_done=False) == [b"stop"]


def test_the_last_line_need_not_end() -> None:
    assert _events(b"data: a\n\ndata: [DONE]") == [b"a"]


@pytest.mark.parametrize("stream", [b"", b"data: a\n\n", b"data: a\n\ndata: [DO", b"[DONE]\n\n"])
def test_a_stream_without_its_end_is_refused(stream: bytes) -> None:
    with pytest.raises(Unsound, match="DONE"):
        _events(stream)


def test_one_connection_carries_several_requests_and_a_client_may_hang_up() -> None:
    server = ModelServer()

    async def run() -> tuple[int, int, int]:
        async with listening(server) as url:
            client = ChatClient(Address.read(url), kept=KeptConnection())
            for _ in range(3):
                await client.get("/health")
            assert client.kept is not None
            client.kept.close()
            used = server.connections
            words = {"role": "user", "content": "Write the numbers from 1 to 400 in digits."}
            body = {"messages": [words], "max_tokens": 900, "stream": True}
            await ChatClient(Address.read(url)).hang_up("/v1/chat/completions", body, 2)
            for _ in range(200):
                await asyncio.sleep(0)
            return used, client.kept.reuses, server.cancels

    assert asyncio.run(run()) == (1, 2, 1)

"""Streamed answers cut into pieces anywhere, and answers that are none."""

from __future__ import annotations

import json

import pytest

from pipeline.core.net.framing import Malformed
from pipeline.serving.bench.answer import BenchAnswer, loops
from pipeline.serving.bench.stub import chunk, event, last_events

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WHOLE = _HEAD + event(" one", 1) + event(" two", 2) + event(" three", 3) + last_events(3, 7)


def _plain(body: bytes, head: str = "Content-Type: text/event-stream") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + body


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _delta(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta}]}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 100_000])
def test_an_answer_reads_the_same_however_it_is_cut(size: int) -> None:
    answer = BenchAnswer()
    pieces = [_WHOLE[at : at + size] for at in range(0, len(_WHOLE), size)]
    wholes = [answer.feed(piece, float(number)) for number, piece in enumerate(pieces)]
    assert wholes[-1]
    assert not any(wholes[:-1])
    assert (answer.text, len(answer.times), answer.finish) == (" one two three", 3, "length")
    assert answer.usage == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert answer.done
    assert answer.reusable


def test_a_token_has_the_time_of_the_piece_that_completed_it() -> None:
    answer = BenchAnswer()
    one, two = event(" one", 1), event(" two", 2)
    answer.feed(_HEAD + one[:-10], 1.0)
    assert list(answer.times) == []
    answer.feed(one[-10:] + two, 2.0)
    assert list(answer.times) == [2.0, 2.0]
    assert answer.first_byte == 1.0


def test_a_large_chunk_is_not_waited_for() -> None:
    answer = BenchAnswer()
    both = chunk(_data(_delta(content="a")) + _data(_delta(content="b")))
    middle = both.index(b"\n\n") + 3
    answer.feed(_HEAD + both[:middle], 1.0)
    assert list(answer.times) == [1.0]


def test_thoughts_and_tool_calls_are_text_too() -> None:
    answer = BenchAnswer()
    call = {"function": {"name": "find", "arguments": "{}"}}
    deltas: list[dict[str, object]] = [
        {"reasoning_content": "hm"},
        {"reasoning": "so"},
        {"tool_calls": [call]},
    ]
    for number, delta in enumerate(deltas):
        answer.feed((_HEAD if number == 0 else b"") + chunk(_data(_delta(**delta))), 1.0)
    assert (len(answer.times), answer.text) == (3, "hmsofind{}")


def test_an_event_without_text_is_no_token() -> None:
    answer = BenchAnswer()
    answer.feed(_HEAD + chunk(_data(_delta(role="assistant", content=""))), 1.0)
    answer.feed(chunk(b": a comment\n\n"), 1.0)
    assert len(answer.times) == 0


def test_a_plain_completion_has_its_text_elsewhere() -> None:
    answer = BenchAnswer()
    answer.feed(_HEAD + chunk(_data({"choices": [{"text": "word"}]})), 1.0)
    assert answer.text == "word"


def test_an_answer_with_a_length_ends_there() -> None:
    body = _data(_delta(content="a")) + b"data: [DONE]\n\n"
    head = f"Content-Type: text/event-stream\r\nContent-Length: {len(body)}"
    answer = BenchAnswer()
    assert answer.feed(_plain(body, head), 1.0)
    assert answer.reusable


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = BenchAnswer()
    assert not answer.feed(_plain(_data(_delta(content="a"))), 1.0)
    answer.ended()
    assert answer.whole
    assert not answer.reusable


def test_a_chunked_answer_that_ends_early_is_not_whole() -> None:
    answer = BenchAnswer()
    answer.feed(_WHOLE[:-3], 1.0)
    answer.ended()
    assert not answer.whole


def test_a_refusal_keeps_its_reason_and_not_more() -> None:
    answer = BenchAnswer()
    body = b"no room " * 10_000
    head = f"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: {len(body)}\r\n\r\n"
    assert answer.feed(head.encode() + body, 1.0)
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert answer.error.startswith("no room")


def test_an_error_in_the_stream_is_kept() -> None:
    answer = BenchAnswer()
    answer.feed(_HEAD + chunk(_data({"error": {"code": 500, "message": "out of memory"}})), 1.0)
    assert answer.error == "out of memory"


def test_a_note_that_an_answer_follows_is_not_the_answer() -> None:
    note = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    for size in (1, 7, 1000):
        answer, data = BenchAnswer(), note + _WHOLE
        for at in range(0, len(data), size):
            answer.feed(data[at : at + size], float(at))
        assert (answer.status, answer.whole, answer.first_byte) == (200, True, 0.0)
        assert "link" not in answer.headers


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 000\r\n\r\n",
        b"HTTP/1.1 2\xb20 OK\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + b"x" * 100_000,
        b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: \xb2\r\n\r\n",
        _HEAD + b"-5\r\n",
        _HEAD + b"1_0\r\n",
        _HEAD + b"\r\n",
        _HEAD + b"1" * 17 + b"\r\n",
        _HEAD + b"0\r\n\r\nmore",
        _HEAD + b"x" * 5000,
        _HEAD + chunk(b"data: {\n\n"),
        _HEAD + chunk(b"data: []\n\n"),
        _HEAD + chunk(b"data: 5\n\n"),
        _HEAD + chunk(b"data: {}\n\n"),
        _HEAD + chunk(b'data: {"choices": [5]}\n\n'),
        _HEAD + chunk(b'data: {"choices": {"a": 1}}\n\n'),
        _HEAD + chunk(b'data: {"choices": [{"delta": {"tool_calls": [7]}}]}\n\n'),
        _HEAD + chunk(b'data: {"choices": [], "usage": 5}\n\n'),
        _HEAD + chunk(b"data: " + b"[" * 100_000 + b"\n\n"),
        _HEAD + chunk(b"x" * (5 << 20)),
    ],
)
def test_what_is_no_stream_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        BenchAnswer().feed(data, 1.0)


def test_a_long_answer_keeps_only_its_end() -> None:
    answer, kept = BenchAnswer(), BenchAnswer(keep_all=True)
    for each in (answer, kept):
        each.feed(_HEAD, 0.0)
        for number in range(3000):
            each.feed(event(f" w{number}", number), 1.0)
    assert answer.characters == kept.characters == len(kept.text)
    assert len(answer.text) < 13_000 < len(kept.text)
    assert len(answer.times) == 3000


@pytest.mark.parametrize(
    "text",
    [
        "It was so. " + "the same words, " * 40,
        "!" * 300,
        "\n".join(["def again(self):", "    return self.again()"] * 30),
    ],
)
def test_a_loop_at_the_end_is_seen(text: str) -> None:
    assert loops(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short",
        "A refrain. " * 3,
        "-" * 300,
        "| --- | --- |\n" * 40,
        " ".join(f"word{n}" for n in range(500)),
        "the same words, " * 40 + " ".join(f"and then word {n}" for n in range(50)),
    ],
)
def test_text_and_tables_are_no_loop(text: str) -> None:
    assert not loops(text)


@pytest.mark.parametrize("size", [1, 2, 5, 100_000])
def test_a_byte_order_mark_does_not_hide_the_first_token(size: int) -> None:
    body = b"\xef\xbb\xbf" + _data(_delta(content="one")) + _data(_delta(content="two"))
    whole, answer = _HEAD + chunk(body) + b"0\r\n\r\n", BenchAnswer()
    for at in range(0, len(whole), size):
        answer.feed(whole[at : at + size], float(at))
    assert (answer.text, len(answer.times)) == ("onetwo", 2)


@pytest.mark.parametrize("head", ["", "Content-Length: 4"])
def test_bytes_after_the_end_of_an_answer_are_no_part_of_the_next(head: str) -> None:
    data = _WHOLE + _WHOLE
    if head:
        data = _plain(b": a\nHTTP/1.1 200", f"Content-Type: text/event-stream\r\n{head}")
    with pytest.raises(Malformed, match="bytes follow the end"):
        BenchAnswer().feed(data, 0.0)

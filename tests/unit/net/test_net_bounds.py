"""What is just within a bound is taken, and what is just beyond it is refused with the reason."""

from __future__ import annotations

import hashlib
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import Interrupted
from pipeline.core.log import Gauge
from pipeline.core.net import timing
from pipeline.core.net.address import (
    goes_on,
    is_loopback,
    next_address,
    origin_of,
    reason_of,
    shown_address,
    split_address,
    without_controls,
)
from pipeline.core.net.answer import Pages, decoded
from pipeline.core.net.client import basic, is_home, login_in
from pipeline.core.net.download import download_blob, pour, require_length
from pipeline.core.net.failures import BadAddress, BadAnswer, Lost
from pipeline.core.net.framing import FramedAnswer, Malformed
from pipeline.core.net.route import tls_context
from pipeline.core.net.timing import RetryPolicy, most_attempts

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Kept(FramedAnswer):
    """Keeps the pieces, each with its time."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.pieces: list[tuple[float, bytes]] = []
        self.begun = 0

    def take(self, data: bytes, now: float) -> None:
        self.pieces.append((now, data))

    def begin(self) -> None:
        self.begun += 1

    @property
    def data(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


def fed(*pieces: bytes, **given: Any) -> Kept:
    answer = Kept(**given)
    for now, piece in enumerate(pieces):
        assert answer.feed(piece, float(now)) is answer.whole
    return answer


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("data", "body", "is_whole"),
    [
        (HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello", True),
        (HEAD + b"Content-Length: 5\r\n\r\nhell", b"hell", False),
        (HEAD + b"\r\nhello", b"hello", False),
        (CHUNKED + b"5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n", b"hello!", True),
        (CHUNKED + b"5\r\nhello\r\n0\r\nX: y\r\n\r\n", b"hello", True),
        (CHUNKED + b"5\r\nhello\r\n0\r\nX: y\r\n", b"hello", False),
        (CHUNKED + b"5\r\nhello\r\n", b"hello", False),
    ],
)
def test_an_answer_is_the_same_however_it_is_cut(
    data: bytes, body: bytes, is_whole: bool, size: int
) -> None:
    answer = fed(*(data[i : i + size] for i in range(0, len(data), size)))
    assert (answer.data, answer.whole, answer.begun) == (body, is_whole, 1)
    assert (answer.status, answer.first_byte) == (200, 0.0)
    assert b"" not in [piece for _, piece in answer.pieces]


def test_lines_of_a_body_are_no_headers() -> None:
    answer = fed(HEAD + b"Content-Length: 14\r\n\r\na\r\nX-Evil: 1\r\n")
    assert answer.headers == {"content-length": "14"}
    assert answer.data == b"a\r\nX-Evil: 1\r\n"


def test_a_piece_has_the_time_at_which_it_came() -> None:
    answer = fed(CHUNKED + b"5\r\nhe", b"llo\r", b"\n3\r\nyou\r\n", b"0\r\n\r\n")
    assert answer.pieces == [(0.0, b"he"), (1.0, b"llo"), (2.0, b"you")]
    assert answer.whole


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/2 200 OK\r\n\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 099 OK\r\n\r\n", "the answer is not HTTP"),
        (b"x" * ((1 << 16) + 1), "the head of the answer is too long"),
        (HEAD + b"x" * (1 << 16) + b"\r\n\r\n", "the head of the answer is too long"),
        (HEAD + b"Content-Length: +5\r\n\r\n", "the answer states a length of '\\+5'"),
        (HEAD + b"Content-Length: 5\r\n\r\nhello!", "bytes follow the end of the answer"),
        (CHUNKED + b"0\r\n\r\nx", "bytes follow the end of the answer"),
        (CHUNKED + b"\r\n", "a chunk of the answer has no size"),
        (CHUNKED + b"+5\r\n", "a chunk of the answer has no size"),
        (CHUNKED + b"1_0\r\n", "a chunk of the answer has no size"),
        (CHUNKED + b"0" * 17 + b"\r\n", "a chunk of the answer is larger than any answer"),
        (CHUNKED + b"8\r\n", "the answer is larger than 7 bytes"),
        (CHUNKED + b"1" * 1025, "a chunk of the answer has a size without end"),
        (CHUNKED + b"0\r\n" + b"x" * (1 << 16), "the trailers of the answer are too long"),
    ],
)
def test_an_answer_beyond_its_bounds_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        fed(data, most_bytes=7)


@pytest.mark.parametrize(
    "data",
    [
        b"x" * (1 << 16),
        CHUNKED + b"7\r\n",
        CHUNKED + b"0" * 15 + b"7\r\n",
        CHUNKED + b"1" * 1024,
        CHUNKED + b"0\r\n" + b"x" * ((1 << 16) - 3),
    ],
)
def test_an_answer_within_its_bounds_may_go_on(data: bytes) -> None:
    assert not fed(data, most_bytes=7).whole


def test_what_follows_the_last_answer_of_a_connection_is_not_looked_at() -> None:
    answer = fed(HEAD + b"Content-Length: 5\r\n\r\nhello!", is_last=True)
    assert (answer.data, answer.whole) == (b"hello", True)
    assert fed(CHUNKED + b"0\r\n\r\nx", is_last=True).whole
    assert fed(CHUNKED + b"0\r\n", is_last=True).whole


@pytest.mark.parametrize(
    ("head", "is_reusable"),
    [
        (HEAD + b"Content-Length: 0\r\n\r\n", True),
        (HEAD + b"CONTENT-LENGTH : 0 \r\n\r\n", True),
        (HEAD + b"Content-Length: 0\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (CHUNKED + b"0\r\n\r\n", True),
        (HEAD + b"\r\n", False),
    ],
)
def test_a_connection_is_used_again_where_its_answer_has_an_end(
    head: bytes, is_reusable: bool
) -> None:
    assert fed(b"HTTP/1.1 103 Early\r\nX: y\r\n\r\n" + head).reusable is is_reusable


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [(HEAD + b"\r\nx", True), (HEAD[:-2], False), (HEAD + b"Content-Length: 5\r\n\r\nx", False)],
)
def test_only_an_answer_without_a_length_ends_with_its_connection(
    data: bytes, is_whole: bool
) -> None:
    answer = fed(data)
    answer.ended()
    assert answer.whole is is_whole


@pytest.mark.parametrize(
    ("span", "start", "goes"),
    [
        ("bytes 5-9/10", 5, True),
        (" bytes 5-9/* ", 5, True),
        ("bytes 5-5/10", 5, True),  # it may end early
        ("bytes 4-9/10", 5, False),
        ("bytes 6-9/10", 5, False),
        ("bytes 5-10/10", 5, False),
        ("bytes 5-4/10", 5, False),
        ("bytes 5-9/11", 5, False),
        ("bytes 5-9/10, x", 5, False),
        ("", 0, False),
    ],
)
def test_a_part_of_a_file_goes_on_where_ours_ends(span: str, start: int, goes: bool) -> None:
    assert goes_on(span, start, 10) is goes


def test_an_origin_is_scheme_host_and_port() -> None:
    assert origin_of("HTTPS://Hub.Example/x") == "https://hub.example:443"
    assert origin_of("http://ann@hub.example/x") == "http://hub.example:80"
    assert origin_of("http://hub.example:8080/") == "http://hub.example:8080"
    longest = "http://x/" + "a" * (16_384 - 9)
    assert split_address(longest).path == longest[8:]
    with pytest.raises(BadAddress, match="is not a valid address"):
        split_address(f"{longest}a")


@pytest.mark.parametrize(
    ("home", "here", "is_at_home"),
    [
        ("http://a/x", "http://a:80/y", True),
        ("http://a/x", "https://a/y", True),
        ("http://a:80/x", "https://a:443/y", True),
        ("http://a/x", "https://b/y", False),
        ("http://a:8080/x", "https://a/y", False),
        ("http://a/x", "https://a:8443/y", False),
        ("https://a/x", "http://a/y", False),
        ("https://a/x", "https://a:8443/y", False),
    ],
)
def test_a_login_stays_at_home_or_steps_up_to_https(home: str, here: str, is_at_home: bool) -> None:
    assert is_home(home, here) is is_at_home


def test_a_login_is_read_from_an_address() -> None:
    assert login_in("http://a/x") == ""
    assert login_in("http://ann:s%40fe@a/x") == basic("ann", "s@fe") == "Basic YW5uOnNAZmU="
    assert login_in("http://ann@a/x") == basic("ann", "")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("http://b/y", "redirects from https to http://b/y"),
        ("ftp://a/", "redirects to 'ftp://a/', which is not a valid address"),
        ("https://u:p@a/", r"redirects to 'https://\*\*\*@a/', which is not a valid address"),
    ],
)
def test_a_redirect_is_refused_with_its_reason(place: str, why: str) -> None:
    with pytest.raises(BadAnswer, match=why):
        next_address("https://a/x", place)
    assert next_address("https://ann:x@A/x", "http://a/y") == "https://A/y"


def test_a_server_s_text_is_short_and_plain() -> None:
    assert without_controls("a\x1b[2J\n  b") == "a [2J b"
    assert without_controls("x" * 201) == "x" * 200
    assert without_controls(" " * 2000 + "x") == ""
    assert shown_address("https://ann:s3cret@a/x?token=1") == "https://***@a/x"


def test_the_innermost_cause_is_the_reason() -> None:
    def caught(fail: Callable[[], None]) -> BaseException:
        with pytest.raises(ValueError, match="outer") as info:
            fail()
        return info.value

    def caused() -> None:
        raise ValueError("outer") from OSError("inner http://ann:x@a/")

    def in_context() -> None:
        try:
            raise OSError("before")
        except OSError:
            raise ValueError("outer")  # noqa: B904

    def hidden() -> None:
        try:
            raise OSError("before")
        except OSError:
            raise ValueError("outer") from None

    assert reason_of(caught(caused)) == "inner http://***@a/"
    assert reason_of(caught(in_context)) == "before"
    assert reason_of(caught(hidden)) == "outer"
    assert reason_of(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("[::1]", True), ("[::1]:80", True), ("localhost:80", True), ("localhost2", False)],
)
def test_this_machine_is_known_with_and_without_a_port(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here


@pytest.mark.parametrize(
    ("ca_file", "cafile", "capath", "has_certifi", "used"),
    [
        (None, None, None, True, "certifi's"),
        (None, None, None, False, None),
        ("mine", None, None, True, "mine"),
        (None, "the system's", None, True, None),
        (None, None, "the system's", True, None),
    ],
)
def test_a_package_s_CAs_are_taken_only_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch,
    ca_file: str | None,
    cafile: str | None,
    capath: str | None,
    has_certifi: bool,
    used: str | None,
) -> None:
    seen: list[str | None] = []

    def make(cafile: str | None = None) -> ssl.SSLContext:
        seen.append(cafile)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    places = SimpleNamespace(cafile=cafile, capath=capath)
    monkeypatch.setattr("ssl.get_default_verify_paths", lambda: places)
    monkeypatch.setattr("ssl.create_default_context", make)
    found = object() if has_certifi else None
    monkeypatch.setattr("pipeline.core.net.route.find_spec", lambda name: found)
    monkeypatch.setitem(sys.modules, "certifi", SimpleNamespace(where=lambda: "certifi's"))
    assert not tls_context(ca_file).verify_flags & ssl.VERIFY_X509_STRICT
    assert seen == [used]


def test_a_list_ends_by_pages_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pages = Pages("the list", 2, 5.0)
    pages.take("a")
    now[0] = 105.0
    pages.take("b")
    with pytest.raises(BadAnswer, match="the list repeats a page and does not end"):
        pages.take("a")
    with pytest.raises(BadAnswer, match="the list does not end: more than 2 pages"):
        pages.take("c")
    pages = Pages("the list", 9, 5.0)
    now[0] = 110.1
    with pytest.raises(BadAnswer, match="the list does not end: more than 5 s"):
        pages.take("a")


@pytest.mark.parametrize(
    ("encoding", "data", "why"),
    [
        ("br", b"", "has the content encoding 'br', which was not requested"),
        ("gzip", b"no gzip", "has damaged compression"),
        ("x-gzip", b"\x1f\x8b\x08", "has a compressed body that is cut off"),
    ],
)
def test_compression_that_is_none_is_refused(encoding: str, data: bytes, why: str) -> None:
    with pytest.raises(BadAnswer, match=why):
        list(decoded([data], encoding))
    assert list(decoded([b"a", b"b"], "identity")) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("lost", "attempts", "most"),
    [
        (Lost("x"), None, 5),
        (Lost("x"), 3, 3),
        (Lost("x", is_unreached=True), None, 2),
        (Lost("x", is_unreached=True), 1, 1),
    ],
)
def test_who_was_never_reached_is_asked_less_often(
    lost: Lost, attempts: int | None, most: int
) -> None:
    assert most_attempts(lost, attempts) == most


class Waits(threading.Event):
    """Notes how long a policy waits, and waits no time at all."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return self.is_set()


def test_waits_double_up_to_a_bound_or_are_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    stop = Waits()
    policy = RetryPolicy(stop, 0.5)
    for attempt in (0, 1, 3, 20):
        policy.pause(attempt)
    policy.pause(0, Lost("x", wait_s=0.0))
    policy.pause(0, Lost("x answers 503", wait_s=1.0))
    policy.pause(0, Lost("not said twice", wait_s=1.0))
    policy.pause(0, Lost("x", wait_s=9999.0))
    assert stop.waited == [0.5, 1.0, 4.0, 30.0, 0.0, 1.0, 1.0, 330.0]
    assert capsys.readouterr().err.splitlines() == ["  x answers 503; trying again in 1 s"]
    stop.set()
    with pytest.raises(Interrupted):
        policy.pause(0)


@pytest.mark.parametrize(("waits", "n_asked"), [([330.0, 330.0, 0.0], 4), ([330.0, 330.1], 2)])
def test_a_server_may_ask_for_two_windows_in_all(waits: list[float], n_asked: int) -> None:
    left, asked = list(waits), 0

    def once() -> str:
        nonlocal asked
        asked += 1
        if left:
            raise Lost("x", wait_s=left.pop(0))
        return "there"

    policy = RetryPolicy(Waits(), 0.0)
    if n_asked > len(waits):
        assert policy.retried(once) == "there"
    else:
        with pytest.raises(Lost):
            policy.retried(once)
    assert asked == n_asked


def test_a_moment_is_told_from_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    reset = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1000000012"}
    assert timing.asked_wait_s(reset) == 12
    assert timing.asked_wait_s({**reset, "X-RateLimit-Reset": "999999999"}) == 999_999_999
    assert timing.asked_wait_s({**reset, "X-RateLimit-Reset": "1000000000"}) == 0
    assert timing.retry_after_s("Sun, 09 Sep 2001 01:46:45 GMT") == 5


class Sent:
    """An answer without a server."""

    url = "http://a/x?secret"

    def __init__(self, status: int, *pieces: bytes, **headers: str) -> None:
        self.status, self._pieces, self._headers = status, pieces, headers
        self.is_closed = False

    def header(self, name: str) -> str:
        return self._headers.get(name.replace("-", "_"), "")

    @property
    def length(self) -> int | None:
        stated = self.header("Content-Length")
        return int(stated) if stated else None

    def pieces(self) -> Any:
        return (memoryview(piece) for piece in self._pieces)

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Sent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Counted(Gauge):
    """A gauge that only counts."""

    def __init__(self) -> None:
        self.shown = 0

    def at(self, n_bytes: int) -> None:
        self.shown = n_bytes

    def advance(self, n_bytes: int) -> None:
        self.shown += n_bytes


DATA = b"0123456789"
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (Sent(200, DATA[:4], DATA[4:]), DIGEST),
        (Sent(200, DATA, b"x"), "more than 10 bytes"),
        (Sent(200, DATA[:4], Transfer_Encoding="Chunked"), None),
    ],
)
def test_a_file_is_passed_on_up_to_its_size(answer: Any, wanted: str | None) -> None:
    gauge, written = Counted(), bytearray()
    got = pour(answer, hashlib.sha256(), 0, 10, gauge, written.extend)
    assert got == (wanted or f"sha256:{hashlib.sha256(DATA[:4]).hexdigest()}")
    assert gauge.shown == len(written) == (4 if wanted is None else 10)


@pytest.mark.parametrize(
    "answer", [Sent(200, DATA[:4]), Sent(206, DATA[:4], Transfer_Encoding="chunked")]
)
def test_a_file_that_ends_early_is_lost(answer: Any) -> None:
    with pytest.raises(Lost, match="http://a/x: ended after 4 of 10 bytes"):
        pour(answer, hashlib.sha256(), 0, 10, Counted())


def test_another_size_is_refused_before_the_first_byte() -> None:
    require_length(Sent(200, Content_Length="10"), 10)  # type: ignore[arg-type]
    require_length(Sent(200), 10)  # type: ignore[arg-type]
    with pytest.raises(BadAnswer, match="has 9 bytes instead of 10"):
        require_length(Sent(200, Content_Length="9"), 10)  # type: ignore[arg-type]


REST: dict[str, str] = {"Content_Range": "bytes 4-9/10", "Content_Length": "6"}


@pytest.mark.parametrize(
    ("before", "answers", "asked"),
    [
        (b"", [Sent(200, DATA)], [0]),
        (DATA[:4], [Sent(206, DATA[4:], **REST)], [4]),
        (DATA[:4], [Sent(200, DATA)], [4]),  # a server that knows no ranges
        (DATA[:4], [Sent(416), Sent(200, DATA)], [4, 0]),
        (
            DATA[:4],
            [Sent(206, **{**REST, "Content_Range": "bytes 5-9/10"}), Sent(200, DATA)],
            [4, 0],
        ),
        (DATA[:4], [Sent(206, **{**REST, "Content_Length": "7"}), Sent(200, DATA)], [4, 0]),
        (DATA, [], []),
        (DATA + b"x", [Sent(200, DATA)], [0]),
        (b"bad!", [Sent(206, DATA[4:], **REST), Sent(200, DATA)], [4, 0]),
        (b"all is bad", [Sent(200, DATA)], [0]),
    ],
)
def test_a_file_is_completed_from_what_is_there(
    tmp_path: Path, before: bytes, answers: list[Sent], asked: list[int]
) -> None:
    partial, gauge, starts = tmp_path / "partial", Counted(), list[int]()
    if before:
        partial.write_bytes(before)
    left = list(answers)

    def open_at(start: int) -> Any:
        starts.append(start)
        return left.pop(0)

    got = download_blob(open_at, partial, DIGEST, 10, gauge, RetryPolicy(Waits(), 0.0))
    assert (got, partial.read_bytes(), gauge.shown) == (DIGEST, DATA, 10)
    assert starts == asked
    assert all(answer.is_closed for answer in answers)


def test_a_file_of_other_bytes_is_not_kept(tmp_path: Path) -> None:
    gauge, partial = Counted(), tmp_path / "partial"
    answers: list[Any] = [Sent(200, b"x" * 10)]
    policy = RetryPolicy(Waits(), 0.0)
    got = download_blob(lambda _: answers.pop(), partial, DIGEST, 10, gauge, policy)
    assert got == f"sha256:{hashlib.sha256(b'x' * 10).hexdigest()}"
    assert (partial.exists(), gauge.shown) == (False, 0)


def test_a_connection_that_brings_nothing_is_left_after_five_tries(tmp_path: Path) -> None:
    stop, asked = Waits(), list[int]()

    def open_at(start: int) -> Any:
        asked.append(start)
        raise Lost("x")

    with pytest.raises(Lost):
        download_blob(open_at, tmp_path / "x", DIGEST, 10, Counted(), RetryPolicy(stop, 1.0))
    assert (asked, stop.waited) == ([0] * 5, [1.0, 2.0, 4.0, 8.0])


def test_a_connection_that_brings_a_mebibyte_before_each_break_is_only_slow(
    tmp_path: Path,
) -> None:
    piece, n_pieces = bytes(1 << 20), 8
    size, stop = n_pieces << 20, Waits()

    def open_at(start: int) -> Any:
        last = size - 1
        span = {"Content_Range": f"bytes {start}-{last}/{size}", "Content_Length": "1"}
        return Sent(206 if start else 200, piece, **(span if start else {}))

    digest = f"sha256:{hashlib.sha256(piece * n_pieces).hexdigest()}"
    policy = RetryPolicy(stop, 1.0)
    assert download_blob(open_at, tmp_path / "x", digest, size, Counted(), policy) == digest
    assert stop.waited == [1.0] * (n_pieces - 1)

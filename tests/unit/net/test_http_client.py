"""The one HTTP client against a real socket: what it reads, refuses, waits for and keeps secret."""

from __future__ import annotations

import base64
import gc
import gzip
import socket
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.core.errors import Interrupted
from pipeline.core.net.address import (
    linked_page,
    masked,
    next_address,
    number_in,
    shown_address,
    split_address,
)
from pipeline.core.net.client import Client, Small
from pipeline.core.net.failures import (
    BadAddress,
    BadAnswer,
    BadHeader,
    BadProxy,
    Lost,
    NetError,
    Untrusted,
)
from pipeline.core.net.route import Proxies, read_proxy, tls_context
from pipeline.core.net.timing import ATTEMPTS, HttpLimits, RetryPolicy, Watchdog, asked_wait_s
from tests.growth import grows_linearly
from tests.testbed import hostile
from tests.testbed.hostile import SHORT, hostile_server

MOST = 1 << 20


@pytest.mark.parametrize("name", hostile.ANSWERS)
def test_no_answer_of_a_hostile_server_is_endless_or_unexplained(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    start = time.monotonic()
    with (
        hostile_server(hostile.ANSWERS[name]) as url,
        pytest.raises(NetError, match=r"127\.0\.0\.1") as caught,
    ):
        Client(limits=SHORT).fetch(f"{url}/x?secret=1", most_bytes=MOST)
    assert time.monotonic() - start < 20
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)


def test_a_bomb_takes_no_more_memory_than_the_limit() -> None:
    for name in ("an endless gzip bomb", "an endless body", "a chunk of -1 bytes"):
        with hostile_server(hostile.ENDLESS[name]) as url:
            tracemalloc.start()
            with pytest.raises(NetError):
                Client().fetch(url, most_bytes=MOST)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 * MOST


def test_what_fits_is_read_whole_and_unpacked() -> None:
    data = b'{"a": 1}' * 1000
    packed = gzip.compress(data[:100]) + gzip.compress(data[100:])
    for script in (
        hostile.body(data),
        hostile.body(packed, hostile.GZIPPED),
        hostile.sends(hostile.CHUNKED + b"1f40\r\n" + data + b"\r\n0\r\n\r\n"),
        hostile.sends(hostile.OK + b"\r\n" + data),
    ):
        with hostile_server(script) as url:
            assert Client().fetch(url, most_bytes=len(data)).data == data
        with hostile_server(script) as url, pytest.raises(BadAnswer, match="larger than 7999"):
            Client().fetch(url, most_bytes=len(data) - 1)


def test_an_answer_that_comes_steadily_may_take_longer_than_the_grace() -> None:
    limits = HttpLimits(grace_s=0.3, least_bytes_per_s=100_000)
    slowly = hostile.forever(hostile.OK + b"Content-Length: 655360\r\n\r\n", b"x" * 65536, 0.06)
    with hostile_server(slowly) as url:
        start = time.monotonic()
        assert len(Client(limits=limits).fetch(url, most_bytes=MOST).data) == 655360
    assert time.monotonic() - start > 0.4


def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    seen: list[socket.socket] = []

    def answer(conn: socket.socket, request: bytes) -> None:
        seen.append(conn)
        for _ in range(3):
            conn.sendall(hostile.OK + b"Content-Length: 2\r\n\r\n{}")
            conn.recv(65536)

    asker = Client()
    with hostile_server(answer) as url:
        for _ in range(3):
            assert asker.fetch(url, most_bytes=9).data == b"{}"
    assert len(seen) == 1


def test_the_connections_of_a_client_close_with_its_last_use() -> None:
    closed = threading.Event()

    def answer(conn: socket.socket, request: bytes) -> None:
        conn.sendall(hostile.OK + b"Content-Length: 2\r\n\r\n{}")
        conn.settimeout(20)
        if conn.recv(1) == b"":
            closed.set()

    asker = Client()
    with hostile_server(answer) as url:
        asker.fetch(url, most_bytes=9)
        gc.disable()
        try:
            del asker
            assert closed.wait(20)
        finally:
            gc.enable()


def test_a_kept_connection_that_the_server_closed_is_no_failure() -> None:
    asker, rude = Client(), hostile.body(b"{}")  # closes without announcing it
    with hostile_server(rude) as url:
        for _ in range(20):
            assert asker.fetch(url, most_bytes=9).data == b"{}"


def test_what_a_kept_connection_swallows_is_asked_again_unless_it_carries_a_body() -> None:
    """The server takes the second request of each connection, and closes without an answer."""
    asked: list[bytes] = []

    def answer(conn: socket.socket, request: bytes) -> None:
        asked.append(request.partition(b" ")[0])
        conn.sendall(hostile.OK + b"Content-Length: 2\r\n\r\n{}")
        asked.append(conn.recv(65536).partition(b" ")[0] + b" swallowed")

    asker = Client()
    with hostile_server(answer) as url:
        for _ in range(2):
            assert asker.fetch(url, most_bytes=9).data == b"{}"
        with pytest.raises(Lost):
            asker.ask("PUT", url, body=Small(b"x"))
    assert asked == [b"GET", b"GET swallowed", b"GET", b"PUT swallowed"]


def test_a_head_that_only_drips_is_cut_on_a_kept_connection_too() -> None:
    def answer(conn: socket.socket, request: bytes) -> None:
        conn.sendall(hostile.OK + b"Content-Length: 2\r\n\r\n{}")
        conn.recv(65536)
        hostile.forever(hostile.OK, b"X: y\r\n", 0.05)(conn, request)

    asker = Client(limits=HttpLimits(head_s=1.5))
    with hostile_server(answer) as url:
        assert asker.fetch(url, most_bytes=9).data == b"{}"
        start = time.monotonic()
        with pytest.raises(Lost, match="whole answer"):
            asker.fetch(url, most_bytes=9)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "rest",
    [b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"Content-Length: 9000\r\n\r\n", b"\r\n"],
)
def test_a_redirect_is_followed_whatever_is_left_of_its_body(rest: bytes) -> None:
    def answer(conn: socket.socket, request: bytes) -> None:
        moved = b"HTTP/1.1 302 Found\r\nLocation: /y\r\n" + rest
        whole = hostile.OK + b"Content-Length: 2\r\n\r\n{}"
        conn.sendall(whole if request.startswith(b"GET /y ") else moved)

    with hostile_server(answer) as url:
        reply = Client().fetch(f"{url}/x", most_bytes=9)
    assert (reply.data, reply.url) == (b"{}", f"{url}/y")


@pytest.mark.parametrize("status", [100, 102, 103, 199])
def test_an_interim_answer_is_not_the_answer(status: int) -> None:
    """Nor is the answer after it that of the next request on the same connection."""

    def answer(conn: socket.socket, request: bytes) -> None:
        for data in (b"one", b"two"):
            conn.sendall(b"HTTP/1.1 %d Wait\r\nLink: </x>; rel=preload\r\n\r\n" % status)
            time.sleep(0.02)
            conn.sendall(hostile.OK + b"Content-Length: 3\r\n\r\n" + data)
            conn.recv(65536)

    asker = Client()
    with hostile_server(answer) as url:
        replies = [asker.fetch(url, most_bytes=9) for _ in range(2)]
    assert [(r.status, r.data) for r in replies] == [(200, b"one"), (200, b"two")]


@pytest.mark.parametrize("head", [b"", b"Content-Type: x\r\n", b"Content-Type: x\r\nContent-Len"])
def test_a_connection_that_ends_among_the_headers_brought_no_empty_answer(head: bytes) -> None:
    with hostile_server(hostile.sends(hostile.OK + head)) as url, pytest.raises(Lost):
        Client().fetch(url, most_bytes=9)


@pytest.mark.parametrize("end", [b"Content-Length: 0\r\n\r\n", b"\r\n"])
def test_an_answer_without_a_body_is_one(end: bytes) -> None:
    with hostile_server(hostile.sends(hostile.OK + end)) as url:
        assert Client().fetch(url, most_bytes=9).data == b""


def test_a_length_that_is_stated_twice_alike_is_a_length() -> None:
    for lengths, is_good in ((b"2, 2", True), (b"2\r\nContent-Length: 2", True), (b"2, 3", False)):
        script = hostile.sends(hostile.OK + b"Content-Length: " + lengths + b"\r\n\r\n{}")
        with hostile_server(script) as url:
            if is_good:
                assert Client().fetch(url, most_bytes=9).data == b"{}"
            else:
                with pytest.raises(NetError):
                    Client().fetch(url, most_bytes=9)


def test_the_default_of_netrc_is_not_for_hosts_that_a_server_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[bytes] = []

    def answer(conn: socket.socket, request: bytes) -> None:
        heads.append(request)
        hostile.body(b"{}")(conn, request)

    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("default login ann password s3cret\n")
    with hostile_server(answer) as there:
        elsewhere = there.replace("127.0.0.1", "localhost").encode()
        with hostile_server(hostile.redirects_to(elsewhere)) as here:
            Client(use_netrc=True).fetch(here, most_bytes=9)
        Client(use_netrc=True).fetch(there, most_bytes=9)
    assert [b"Authorization" in head for head in heads] == [False, True]


@pytest.mark.parametrize(
    "address",
    [
        *("http://ann:s3/cret@proxy:3128", "http://ann:s3?cret@proxy:3128", "ann:s3/cret@proxy:1"),
        *("http://ann:s3#cret@proxy:3128", "http://ann:s3 cret@proxy:3128", "http://ann:s3@cr@["),
        *("https://ann:s3/cr/et@host/simple/?x=1", "https://ann:cret?s3@host/simple/"),
    ],
)
def test_a_password_that_nobody_encoded_is_not_shown(address: str) -> None:
    texts = [shown_address(address)]
    for ask in (read_proxy, split_address):
        with suppress(NetError):
            ask(address)
            continue
        try:
            ask(address)
        except NetError as error:
            texts.append(str(error))
    assert not [text for text in texts if "s3" in text or "cret" in text]


@pytest.mark.parametrize(
    "address", ["http://h:5000/repo@sha256:ab", "h:5000/r@sha256:ab", "https://h/p@2x.png"]
)
def test_what_is_no_login_is_shown(address: str) -> None:
    assert masked(address) == shown_address(address) == address


def test_masking_takes_linear_time() -> None:
    assert grows_linearly(lambda size: masked("//a:b" * size), 5_000)


@pytest.mark.parametrize("proxy", ["http://pro xy:1", "http://a..b:1", f"http://{'a' * 70}:1"])
def test_a_proxy_whose_name_cannot_be_is_blamed_and_not_the_server(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(BadProxy, match="the proxy"):
        Client().ask("GET", "http://host.test/x")


def test_a_tls_handshake_that_only_drips_is_left() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        conn, _ = listener.accept()
        with suppress(OSError), conn:
            conn.sendall(b"\x16\x03\x03\x40\x00\x02")
            while True:
                conn.sendall(b"\x00")
                time.sleep(hostile.DRIP_S)

    threading.Thread(target=drip, daemon=True).start()
    start, url = time.monotonic(), f"https://127.0.0.1:{listener.getsockname()[1]}/x"
    with listener, pytest.raises(Lost):
        Client(limits=HttpLimits(connect_s=0.2)).fetch(url, most_bytes=9)
    assert time.monotonic() - start < 20


def test_a_server_may_take_longer_to_read_than_to_be_reached() -> None:
    def slow(conn: socket.socket, request: bytes) -> None:
        time.sleep(0.5)
        left = (8 << 20) - len(request.partition(b"\r\n\r\n")[2])
        while left > 0:
            left -= len(conn.recv(1 << 20))
        conn.sendall(b"HTTP/1.1 201 Made\r\nContent-Length: 0\r\n\r\n")

    asker = Client(limits=HttpLimits(connect_s=0.2, silence_s=5))
    with hostile_server(slow) as url:
        assert asker.ask("PUT", url, body=Small(bytes(8 << 20))).status == 201


@pytest.mark.parametrize("login", ["Bearer hf_s3cret\nX: y", "Bearer s3cret\u2028", "s3cret\0"])
def test_a_login_that_cannot_be_sent_is_not_shown(login: str) -> None:
    with pytest.raises(BadHeader, match="Authorization") as caught:
        Client().fetch("http://127.0.0.1:9/x", most_bytes=9, login=login)
    assert "s3cret" not in str(caught.value)


def test_a_proxy_that_is_not_there_is_blamed_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for scheme in ("http", "https"):
        with pytest.raises(Lost, match="the proxy failed"):
            Client().fetch(f"{scheme}://far.example/x", most_bytes=9)


def test_a_stop_ends_a_thread_that_waits_for_bytes() -> None:
    asker = Client()
    ended: list[BaseException] = []

    def work(url: str) -> None:
        try:
            asker.fetch(url, most_bytes=MOST)
        except BaseException as error:
            ended.append(error)

    for script in (hostile.silence, hostile.ENDLESS["a dripping body"]):
        with hostile_server(script) as url:
            thread = threading.Thread(target=work, args=(url,), daemon=True)
            thread.start()
            time.sleep(0.1)
            asker.hang_up()
            assert asker.join([thread])
    assert [type(e) for e in ended] == [Interrupted, Interrupted]
    with hostile_server(hostile.body(b"{}")) as url:
        assert asker.fetch(url, most_bytes=9).data == b"{}"


def test_a_login_in_an_address_goes_to_its_origin_only() -> None:
    asked: list[bytes] = []

    def keeps(conn: socket.socket, request: bytes) -> None:
        asked.append(request)
        hostile.body(b"{}")(conn, request)

    with hostile_server(keeps) as other:
        with hostile_server(hostile.redirects_to(other.encode() + b"/y")) as url:
            Client().fetch(url.replace("://", "://ann:s%40fe@"), most_bytes=9)
        assert b"uthorization" not in asked[0]
        Client().fetch(other.replace("://", "://ann:s%40fe@") + "/z", most_bytes=9)
    assert b"Basic " + base64.b64encode(b"ann:s@fe") in asked[1]
    assert b"s%40fe" not in asked[1]


def test_netrc_answers_where_it_is_asked_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ann password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    asked: list[bytes] = []

    def keeps(conn: socket.socket, request: bytes) -> None:
        asked.append(request)
        hostile.body(b"{}")(conn, request)

    with hostile_server(keeps) as url:
        Client().fetch(url, most_bytes=9)
        Client(use_netrc=True).fetch(url, most_bytes=9)
    assert [b"uthorization" in request for request in asked] == [False, True]
    assert b"Basic " + base64.b64encode(b"ann:s3cret") + b"\r\n" in asked[1]


def test_a_body_is_sent_whole_and_a_refusal_in_the_middle_is_heard() -> None:
    def refuses(conn: socket.socket, request: bytes) -> None:
        conn.sendall(b"HTTP/1.1 413 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nmuch")

    with hostile_server(refuses) as url:
        answer = Client().ask("PUT", url, body=Small(b"x" * (8 << 20)))
        assert (answer.status, answer.read(9)) == (413, b"much")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://[",
            "http://x:99999/",
            "http://x:0/",
            "ftp://x/",
            "file:///x",
            "x",
            "",
            "http://",
        ),
        *("http://x/\x07", "http://x:y/", "http://[::1", "http://x\n/", "http://" + "a" * 20_000),
    ],
)
def test_what_is_no_address_is_reported_as_such(url: str) -> None:
    with pytest.raises(BadAddress, match="not a valid address"):
        Client().fetch(url, most_bytes=9)


def test_a_server_that_is_not_there_is_lost_and_not_wrong() -> None:
    with pytest.raises(Lost, match="refused"):
        Client().fetch("http://127.0.0.1:9/x", most_bytes=9)


def _no_such_name(*args: object, **more: object) -> object:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _attempts(asker: Client, url: str) -> int:
    """How often an address is asked until it is given up."""
    n_asked = 0

    def once() -> object:
        nonlocal n_asked
        n_asked += 1
        reply = asker.fetch(url, most_bytes=9)
        if reply.status >= 500:
            raise Lost(f"answers {reply.status}")
        return reply

    with pytest.raises(Lost):
        RetryPolicy(asker.stop, 0.0).retried(once)
    return n_asked


def test_where_nobody_is_there_from_the_beginning_two_attempts_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _attempts(Client(), "http://127.0.0.1:9/x") == 2
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_name)
    assert _attempts(Client(), "http://hub.invalid/x") == 2


def test_a_server_that_answers_with_an_error_or_answered_before_is_tried_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = hostile.sends(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    asker = Client()
    with hostile_server(failing) as url:
        assert _attempts(asker, url) == ATTEMPTS
    assert _attempts(asker, url) == ATTEMPTS
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_name)
    assert _attempts(asker, url) == ATTEMPTS
    assert _attempts(asker, "http://hub.invalid/x") == 2


def test_a_redirect_never_leads_from_https_to_another_hosts_http() -> None:
    assert next_address("https://a/x", "/y") == "https://a/y"
    assert next_address("https://a:8443/x", "http://a/y?q") == "https://a:8443/y?q"
    assert next_address("http://a/x", "http://b/y") == "http://b/y"
    assert next_address("http://a/x", "https://b/y") == "https://b/y"
    for place in ("http://b/y", "ftp://a/", "http://[", "https://u:p@a/", "https://a:99999/"):
        with pytest.raises(BadAnswer):
            next_address("https://a/x", place)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "Fri, 01 Jan 2016 00:00:00 GMT"}, 0),
        ({"RateLimit": '"api";r=0;t=45'}, 45),
        ({"RateLimit": "r=0;t=45"}, 45),
        ({"RateLimit": '"api";r=0;t=45, "pages";r=3;t=300'}, 45),
        ({"RateLimit": '"api"; r=0; t=45, "pages"; r=0; t=300'}, 300),
        ({"RateLimit": "limit=100, remaining=0, reset=12"}, 12),
        ({"RateLimit-Remaining": "0", "RateLimit-Reset": "13"}, 13),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "14"}, 14),
        ({"X-RateLimit-Reset": "1"}, 1),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1451606400"}, 0),
        ({"Retry-After": "2", "RateLimit": "r=0;t=9"}, 9),
        ({"RateLimit": '"api";r=5;t=45'}, None),
        ({"RateLimit-Remaining": "4", "RateLimit-Reset": "13"}, None),
        ({"RateLimit": "soon"}, None),
        ({"RateLimit": "r=0;t=" + "9" * 400}, None),
        ({"RateLimit": "target=45"}, None),
        ({"Retry-After": "²"}, None),
        ({"Retry-After": "9" * 400}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-1"}, None),
        ({}, None),
    ],
)
def test_a_pause_is_read_however_a_server_spells_it(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert asked_wait_s(headers) == seconds


@pytest.mark.parametrize(
    ("address", "url", "login"),
    [
        ("http://proxy", "http://proxy:80", ""),
        ("proxy:3128", "http://proxy:3128", ""),
        ("https://proxy", "https://proxy:443", ""),
        ("http://ann:s%40fe@proxy:3128", "http://proxy:3128", "ann:s@fe"),
        ("ann:safe@proxy", "http://proxy:80", "ann:safe"),
        ("http://[::1]:3128", "http://[::1]:3128", ""),
    ],
)
def test_a_proxy_is_read_as_the_environment_spells_it(address: str, url: str, login: str) -> None:
    proxy = read_proxy(address)
    assert (proxy.url, proxy.login) == (url, login)
    assert "safe" not in repr(proxy)


@pytest.mark.parametrize("address", ["socks5://p:1", "http://", "http://p:99999", "http://["])
def test_a_proxy_that_is_none_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(BadAddress, match="proxy"):
        read_proxy(address)


@pytest.mark.parametrize(
    ("no_proxy", "url", "uses"),
    [
        ("", "http://far.example/", True),
        ("far.example", "http://far.example/", False),
        ("example", "http://far.example/", False),
        (".example", "http://far.example:8080/", False),
        ("*", "http://far.example/", False),
        ("10.0.0.0/8", "http://10.2.3.4/", False),
        ("10.0.0.0/8", "http://11.2.3.4/", True),
        ("10.0.0.0/99,x/y", "http://10.2.3.4/", True),
        ("near.example", "http://far.example/", True),
        ("", "http://127.0.0.1:5000/", False),
        ("", "http://localhost/", False),
        ("", "http://[::1]:5000/", False),
        ("", "http://[::2]:5000/", True),
    ],
)
def test_no_proxy_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, url: str, uses: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://p:1")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert (Proxies().of(split_address(url)) is not None) == uses


def test_the_proxys_login_goes_to_the_proxy_for_http_and_https(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bytes] = []

    def proxy(conn: socket.socket, request: bytes) -> None:
        asked.append(request)
        hostile.body(b"{}")(conn, request)

    with hostile_server(proxy) as url:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, url.replace("://", "://ann:s3cret@"))
        assert Client().fetch("http://far.example/x", most_bytes=9).data == b"{}"
        with pytest.raises(NetError) as caught:
            Client().fetch("https://far.example/x", most_bytes=9)
    login = b"Basic " + base64.b64encode(b"ann:s3cret")
    assert asked[0].startswith(b"GET http://far.example/x HTTP/1.1\r\n")
    assert asked[1].startswith(b"CONNECT far.example:443 HTTP/1.")
    assert all(login in request for request in asked)
    assert "s3cret" not in str(caught.value)


def test_a_proxy_that_never_ends_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = HttpLimits(connect_s=0.2, silence_s=1)
    endless = hostile.forever(b"HTTP/1.1 200 OK\r\nX: ", b"x", hostile.DRIP_S)
    with hostile_server(endless) as url:
        monkeypatch.setenv("https_proxy", url)
        with pytest.raises(Lost):
            Client(limits=limits).fetch("https://far.example/x", most_bytes=9)


def test_a_ca_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for path in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        with pytest.raises(Untrusted, match=path.name):
            tls_context(path)


@pytest.mark.parametrize(
    ("header", "page"),
    [
        ("<https://h/x?a=1,2>; rel=next", "https://h/x?a=1,2"),
        ('<a>; rel="prev next"', "a"),
        ("<a>; REL=NEXT", "a"),
        ('<a>; title="b, <c>; rel=next"; rel="first", <d>; rel="next"', "d"),
        ('<a>; title="rel=next"', None),
        ("<a>; rel=nextish", None),
        ('<a>; x="rel="next"', None),
        ("<" + "a" * 20_000 + ">; rel=next", "a" * 20_000),
        ('<a>; x="' * 5000, None),
    ],
)
def test_a_list_is_not_cut_by_an_odd_link(header: str, page: str | None) -> None:
    assert linked_page(header) == page


def test_the_next_page_is_found_in_a_link_and_nowhere_else() -> None:
    assert linked_page('</a?n=1>; rel="next"') == "/a?n=1"
    assert linked_page("</p>; rel=prev, </n>; rel=next") == "/n"
    for header in ("", "next", '</a>; rel="prev"', '</a>; rel="nextish"', "rel=next", "<" * 9999):
        assert linked_page(header) is None


def test_a_count_in_a_header_is_digits_and_not_too_many() -> None:
    assert (number_in("12"), number_in("0")) == (12, 0)
    for header in ("", "-1", "1.5", "²", "1_0", " 1", "9" * 400):
        assert number_in(header) is None


def test_the_watchdog_minds_short_limits_that_come_after_long_ones() -> None:
    watch, cut = Watchdog(), []
    watch.begin(1, lambda: cut.append(1), 30)
    watch.begin(3, lambda: [][0], 0.05)
    watch.begin(2, lambda: cut.append(2), 0.05)
    deadline = time.monotonic() + 20
    while not cut and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cut == [2]
    assert (watch.end(1), watch.end(2), watch.end(3)) == (True, False, False)


@pytest.mark.parametrize(("asked_s", "n_asked"), [(1e9, 1), (400.0, 2), (0.0, ATTEMPTS)])
def test_a_server_that_asks_for_days_is_given_up_at_once(asked_s: float, n_asked: int) -> None:
    asked: list[float] = []
    retry_policy = RetryPolicy(threading.Event(), 0.0)
    retry_policy.pause = lambda attempt, lost=None: asked.append(attempt)  # type: ignore[method-assign]

    def busy() -> None:
        raise Lost("answers 429", wait_s=asked_s)

    with pytest.raises(Lost, match="429"):
        retry_policy.retried(busy)
    assert len(asked) + 1 == n_asked

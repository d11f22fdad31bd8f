"""Answers that no honest server gives, written byte by byte to a real socket.

    with hostile_server(ENDLESS["a dripping body"]) as url: ...

`endings(ask, ANSWERS)` is empty where an entry point ends each of them well, and in time.
"""

from __future__ import annotations

import gzip
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from pipeline.core.errors import PipelineError
from pipeline.core.net.timing import HttpLimits

Script = Callable[[socket.socket, bytes], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_MOST_S = 20.0  # an endless answer ends with the test
DRIP_S = 0.02


def sends(*parts: bytes) -> Script:
    """These bytes, and the end of the connection."""

    def answer(conn: socket.socket, request: bytes) -> None:
        for part in parts:
            conn.sendall(part)

    return answer


def forever(head: bytes, again: bytes, every_s: float = 0.0) -> Script:
    """A beginning, then the same again and again."""

    def answer(conn: socket.socket, request: bytes) -> None:
        conn.sendall(head)
        until = time.monotonic() + _MOST_S
        while time.monotonic() < until:
            conn.sendall(again)
            time.sleep(every_s)

    return answer


def silence(conn: socket.socket, request: bytes) -> None:
    conn.settimeout(_MOST_S)
    conn.recv(1)


def body(data: bytes, head: bytes = OK) -> Script:
    return sends(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def redirects_to(place: bytes) -> Script:
    return sends(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + place + b"\r\n\r\n")


def redirects_on(conn: socket.socket, request: bytes) -> None:
    """Every answer leads to a place that is new."""
    place = b"/%d" % time.monotonic_ns()
    redirects_to(place)(conn, request)


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
GZIPPED = OK + b"Content-Encoding: gzip\r\n"
BOMB = gzip.compress(bytes(64 << 20), 9)

# too much, too slow or never: whoever reads this to its end does not come back
ENDLESS: dict[str, Script] = {
    "silence": silence,
    "endless headers": forever(OK, b"X-More: yes\r\n"),
    "an endless header line": forever(OK + b"X-Long: ", b"x" * 4096),
    "dripping headers": forever(OK + b"X-Long: ", b"x", DRIP_S),
    "endless hundreds": forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless hints": forever(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    "endless headers of a hint": forever(b"HTTP/1.1 103 Early Hints\r\n", b"Link: </x>\r\n"),
    "an endless body": forever(OK + b"\r\n", b" " * 65536),
    "a dripping body": forever(OK + b"Content-Length: 9999\r\n\r\n", b" ", DRIP_S),
    "a dripping body without length": forever(OK + b"\r\n", b" ", DRIP_S),
    "endless chunks": forever(CHUNKED, b"4000\r\n" + b" " * 0x4000 + b"\r\n"),
    "dripping chunks": forever(CHUNKED, b"1\r\n \r\n", DRIP_S),
    "an endless chunk head": forever(CHUNKED, b"0" * 4096),
    "a chunk of -1 bytes": forever(CHUNKED + b"-1\r\n", b" " * 65536),
    "endless trailers": forever(CHUNKED + b"0\r\n", b"X-More: yes\r\n"),
    "dripping trailers": forever(CHUNKED + b"1\r\n{\r\n0\r\n", b"x", DRIP_S),
    "a gzip bomb": body(BOMB, GZIPPED),
    "an endless gzip bomb": forever(GZIPPED + b"\r\n", BOMB),
    "endless empty gzips": forever(GZIPPED + b"\r\n", gzip.compress(b"") * 1000),
    "redirects without end": redirects_on,
}
# damaged, contradictory or leading nowhere
DAMAGED: dict[str, Script] = {
    "nothing": sends(b""),
    "no HTTP": sends(b"220 smtp.example ready\r\n"),
    "a status of letters": sends(b"HTTP/1.1 OK\r\n\r\n"),
    "a body cut off": sends(OK + b"Content-Length: 99\r\n\r\n{"),
    "a chunk cut off": sends(CHUNKED + b"9\r\n{"),
    "chunks without an end": sends(CHUNKED + b"1\r\n{\r\n"),
    "a chunk of letters": sends(CHUNKED + b"zz\r\n{\r\n0\r\n\r\n"),
    "a chunk of 10**400 bytes": sends(CHUNKED + b"9" * 400 + b"\r\n{\r\n"),
    "a length of 10**400": sends(OK + b"Content-Length: 1" + b"0" * 400 + b"\r\n\r\n{"),
    "a length of 10**5000": sends(OK + b"Content-Length: 1" + b"0" * 5000 + b"\r\n\r\n{"),
    "a negative length": sends(OK + b"Content-Length: -5\r\n\r\n{"),
    "a length of letters": sends(OK + b"Content-Length: \xb2\r\n\r\n{"),
    "a switch of protocols": sends(b"HTTP/1.1 101 Go\r\nUpgrade: h2c\r\n\r\n" + OK + b"\r\n{}"),
    "chunks within gzip": sends(
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "chunks within chunks": sends(
        OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "two lengths": sends(OK + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}"),
    "gzip and garbage": body(gzip.compress(b"{}") + b"garbage", GZIPPED),
    "gzip in gzip": body(
        gzip.compress(gzip.compress(b"{}")), OK + b"Content-Encoding: gzip, gzip\r\n"
    ),
    "HTTP of another age": sends(b"HTTP/3.7 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
    "damaged gzip": body(b"\x1f\x8b\x08 no gzip at all", GZIPPED),
    "gzip cut off": body(
        gzip.compress(b'{"a": "' + bytes(range(65, 91)) * 9 + b'"}')[:-9], GZIPPED
    ),
    "an unknown encoding": body(b"{}", OK + b"Content-Encoding: br\r\n"),
    "a redirect to a bracket": redirects_to(b"http://["),
    "a redirect to port 99999": redirects_to(b"http://127.0.0.1:99999/"),
    "a redirect to port 10**400": redirects_to(b"http://127.0.0.1:" + b"9" * 400 + b"/"),
    "a redirect to ftp": redirects_to(b"ftp://127.0.0.1/x"),
    "a redirect to a file": redirects_to(b"file:///etc/passwd"),
    "a redirect to nobody": redirects_to(b"http:///x"),
    "a redirect with a bell": redirects_to(b"http://127.0.0.1/\x07"),
    "a redirect to a label too long": redirects_to(b"http://" + b"a" * 70 + b"..x/"),
}
ANSWERS = {**ENDLESS, **DAMAGED}
# JSON that two readers read in two ways, or that makes one stumble
BAD_JSON: dict[str, bytes] = {
    "not JSON": b"{",
    "no UTF-8": b'{"a": "\xff"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "one key twice": b'{"sha": "a", "sha": "b"}',
    "NaN": b'{"size": NaN}',
    "Infinity": b'{"size": -Infinity}',
    "a number of 400 digits": b'{"size": 1' + b"0" * 400 + b"}",
    "a number of 5000 digits": b'{"size": 1' + b"0" * 5000 + b"}",
    "a float past all floats": b'{"size": 1e999}',
    "a deep list": b"[" * 100_000 + b"]" * 100_000,
    "a deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "half a character": b'{"a": "\\ud800"}',
    "quotes without end": b'{"a": "' + b'\\"' * 50_000,
    "a list": b"[1]",
    "a number": b"7",
    "a text": b'"x"',
    "null": b"null",
}
JSON_ANSWERS = {name: body(data) for name, data in BAD_JSON.items()}


@contextmanager
def hostile_server(script: Script) -> Iterator[str]:
    """Answer every request by the script, until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    open_ones: list[socket.socket] = []

    def serve(conn: socket.socket) -> None:
        with suppress(OSError), conn:
            request = b""
            while b"\r\n\r\n" not in request:
                if not (more := conn.recv(65536)):
                    return
                request += more
            script(conn, request)
            conn.shutdown(socket.SHUT_WR)
            conn.settimeout(1)
            # not closed before the client has read: what it sent late would reset the rest
            while conn.recv(65536):
                pass

    def accept() -> None:
        for _ in itertools.count():
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            open_ones.append(conn)
            threading.Thread(target=serve, args=(conn,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for conn in open_ones:
            with suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)


# for servers that answer, on a machine that may be busy
PATIENT = HttpLimits()
# for those that never do: so short that a test of all answers takes a second or two
SHORT = HttpLimits(
    connect_s=2, silence_s=0.3, head_s=0.4, piece_s=0.4, grace_s=0.4, least_bytes_per_s=10**7
)
LONGEST_S = 4.0  # of one exchange with all of its tries, on a busy machine


def endings(ask: Callable[[str], object], scripts: Mapping[str, Script]) -> dict[str, str]:
    """How an entry point ends at each of the answers, where it does not end as it should.

    It should end with an error of ours that is one clear line with a hint, in time.
    """

    def one(script: Script) -> str:
        start = time.monotonic()
        with hostile_server(script) as url:
            try:
                return f"believed: {ask(url)!r:.80}"
            except PipelineError as error:
                took = time.monotonic() - start
                is_clear = str(error).isprintable() and error.hint and error.exit_code > 1
                if is_clear and took < LONGEST_S:
                    return ""
                return f"{type(error).__name__} after {took:.1f} s: {error} [{error.hint}]"
            except Exception as error:
                return f"a defect: {error!r:.200}"

    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(scripts, pool.map(one, scripts.values()), strict=True))
    return {name: words for name, words in found.items() if words}

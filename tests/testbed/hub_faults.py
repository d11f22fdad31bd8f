"""What can go wrong between a Hub and its client, each as a value: `hub.fail(path, flip(5))`."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.testbed.hub import Blob
    from tests.testbed.hub_handler import Handler

Act = Callable[["Handler", int, dict[str, str], "bytes | Blob", int, int], None]


@dataclass(frozen=True)
class Fault:
    """A bad answer, and which ranges it is for."""

    act: Act
    hits: Callable[[int, int], bool] = lambda start, stop: True


def _holds(at: int) -> Callable[[int, int], bool]:
    return lambda start, stop: start <= at < stop


def _blob(body: bytes | Blob) -> Blob:
    assert not isinstance(body, bytes), "this fault is for files"
    return body


def flip(at: int, bit: int = 1) -> Fault:
    """One wrong byte of the file, in a body of the right size."""

    def wrong(blob: Blob, start: int, stop: int) -> Iterator[bytes]:
        for piece in blob.pieces(start, stop):
            if start <= at < start + len(piece):
                changed = bytearray(piece)
                changed[at - start] ^= bit
                piece = bytes(changed)
            start += len(piece)
            yield piece

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.begin(status, headers, span[1] - span[0])
        h.pour(wrong(_blob(body), *span))

    return Fault(act, _holds(at))


def instead(other: bytes) -> Fault:
    """A page of somebody's proxy, say: 200 and other bytes."""
    return Fault(lambda h, status, headers, body, start, stop: h.send(200, {}, other))


def stall(at: int) -> Fault:
    """Everything up to a byte of the file, then nothing more while the server lives."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.begin(status, headers, span[1] - span[0])
        h.pour(_blob(body).pieces(span[0], at))
        h.hub.stopping.wait()
        h.hang_up()

    return Fault(act, _holds(at))


def silent() -> Fault:
    """Not even headers."""

    def act(h: Handler, *_: object) -> None:
        h.hub.stopping.wait()
        h.hang_up()

    return Fault(act)


def cut(at: int) -> Fault:
    """The connection ends properly, but too early: at a byte of the file."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.begin(status, headers, span[1] - span[0])
        h.pour(_blob(body).pieces(span[0], at))
        h.hang_up()

    return Fault(act, _holds(at))


def reset(at: int) -> Fault:
    """The connection is thrown away (RST) at a byte of the file."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.begin(status, headers, span[1] - span[0])
        h.pour(_blob(body).pieces(span[0], at))
        h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        h.connection.close()
        h.close_connection = True

    return Fault(act, _holds(at))


def whole_file() -> Fault:
    """200 and everything, whatever range was asked for."""

    def act(h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *_: int) -> None:
        headers.pop("Content-Range", None)
        h.send(200, headers, body, 0, _blob(body).size)

    return Fault(act)


def short(by: int) -> Fault:
    """A body, and a Content-Length that agrees with it, that lacks its last bytes."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.send(status, headers, body, span[0], max(span[0], span[1] - by))

    return Fault(act)


def long(by: int) -> Fault:
    """A body, and a Content-Length that agrees with it, with more bytes than the file has."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.begin(status, headers, span[1] - span[0] + by)
        h.pour(_blob(body).pieces(*span))
        h.pour([b"\0" * by])

    return Fault(act)


def shifted(by: int) -> Fault:
    """The bytes, and the Content-Range, of another range than was asked for."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        size = _blob(body).size
        start, stop = min(span[0] + by, size - 1), min(span[1] + by, size)
        h.send(
            206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, body, start, stop
        )

    return Fault(act)


def lying_shift(by: int) -> Fault:
    """The Content-Range that was asked for, over the bytes of another."""

    def act(
        h: Handler, status: int, headers: dict[str, str], body: bytes | Blob, *span: int
    ) -> None:
        h.send(
            status, headers, body, max(0, span[0] - by), max(0, span[0] - by) + span[1] - span[0]
        )

    return Fault(act)


def status(code: int, **named: str) -> Fault:
    """Only a status; header names are written with underscores."""
    headers = {name.replace("_", "-"): value for name, value in named.items()}
    return Fault(lambda h, *_: h.send(code, headers, b"a bad day"))


def gated(code: int = 403) -> Fault:
    return status(code, X_Error_Code="GatedRepo")


def redirect(to: str) -> Fault:
    return Fault(lambda h, *_: h.send(302, {"Location": to}, b""))


def truncated(keep: float = 0.5) -> Fault:
    """The first part of an answer's text, honestly measured: JSON that does not end."""

    def act(h: Handler, code: int, headers: dict[str, str], body: bytes | Blob, *_: int) -> None:
        assert isinstance(body, bytes)
        h.send(code, headers, body[: int(len(body) * keep)])

    return Fault(act)


def page_loop() -> Fault:
    """A tree page whose next page is itself."""

    def act(h: Handler, code: int, headers: dict[str, str], body: bytes | Blob, *_: int) -> None:
        h.send(code, {**headers, "Link": f'<{h.hub.url}{h.path}>; rel="next"'}, body)

    return Fault(act)


def answer(text: bytes, **named: str) -> Fault:
    """Another text than the true answer, as JSON."""
    headers = {name.replace("_", "-"): value for name, value in named.items()}
    return Fault(lambda h, *_: h.send(200, {"Content-Type": "application/json", **headers}, text))


def then(happens: Callable[[], object]) -> Fault:
    """The good answer, already made; but when it arrives the world is another one."""

    def act(h: Handler, code: int, headers: dict[str, str], body: bytes | Blob, *span: int) -> None:
        happens()
        h.send(code, headers, body, *span)

    return Fault(act)

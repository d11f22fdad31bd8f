"""The framing of an HTTP/1.1 answer: its head, then chunks, a stated length or the rest.

It is fed what came, in pieces of any size, and neither waits nor opens anything. For the load
client it is the hot path, a few microseconds for a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.core.net.address import number_in

_MOST_HEAD_BYTES = 1 << 16
_LONGEST_CHUNK_LINE = 1024
_MOST_SIZE_DIGITS = 16
_HEX = frozenset(b"0123456789abcdefABCDEF")


class Malformed(ValueError):
    """The answer is not what a server of this kind sends."""


@dataclass(slots=True, eq=False)
class FramedAnswer:
    """What has come of one answer; `take` gets each piece of its body, without its framing."""

    most_bytes: int = 1 << 62  # of one chunk
    is_last: bool = False  # of its connection: what follows it is not looked at
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    first_byte: float | None = None
    whole: bool = False
    reusable: bool = False  # its connection can carry another request
    _rest: bytes = b""
    _chunked: bool = False
    _chunk_left: int = 0
    _body_left: int | None = None

    def take(self, data: bytes, now: float) -> None:
        """A piece of the body."""
        raise NotImplementedError

    def begin(self) -> None:
        """The head is read; who needs an answer of some kind refuses others here."""

    def feed(self, data: bytes, now: float) -> bool:
        """Take what came; whether the answer is whole."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        while not self.status:
            if self.first_byte is None:
                self.first_byte = now
            end = data.find(b"\r\n\r\n", at)
            # a head that ended in the same piece may be too long as well
            if (len(data) if end < 0 else end) - at > _MOST_HEAD_BYTES:
                raise Malformed("the head of the answer is too long")
            if end < 0:
                self._rest = data[at:]
                return False
            self._read_head(data[at:end])
            at = end + 4
        if not self._chunked:
            data = data[at:] if at else data
            if self._body_left is not None:
                if len(data) > self._body_left:
                    if not self.is_last:
                        raise Malformed("bytes follow the end of the answer")
                    data = data[: self._body_left]
                self._body_left -= len(data)
            if data:
                self.take(data, now)
            self.whole = self._body_left == 0
            return self.whole
        size = len(data)
        while at < size:
            if left := self._chunk_left:
                # a chunk is not waited for: what is there of it has its time now
                end = min(at + left, size)
                # its last two bytes end its line
                if left > 2:
                    self.take(data[at : min(end, at + left - 2)], now)
                self._chunk_left, at = left - (end - at), end
            else:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    if size - at > _LONGEST_CHUNK_LINE:
                        raise Malformed("a chunk of the answer has a size without end")
                    self._rest = data[at:]
                    return self.whole
                digits = data[at:line_end].partition(b";")[0].strip()
                # int() also takes signs and underscores
                if not digits or not _HEX.issuperset(digits):
                    raise Malformed("a chunk of the answer has no size")
                if len(digits) > _MOST_SIZE_DIGITS:
                    raise Malformed("a chunk of the answer is larger than any answer")
                if (length := int(digits, 16)) > self.most_bytes:
                    raise Malformed(f"the answer is larger than {self.most_bytes} bytes")
                if length == 0:
                    # trailers may follow; an empty line ends them
                    end = data.find(b"\r\n\r\n", line_end)
                    if end < 0 and not self.is_last:
                        if size - at > _MOST_HEAD_BYTES:
                            raise Malformed("the trailers of the answer are too long")
                        self._rest = data[at:]
                        return self.whole
                    self.whole = True
                    if size > end + 4 and not self.is_last:
                        raise Malformed("bytes follow the end of the answer")
                    return self.whole
                self._chunk_left = length + 2
                at = line_end + 2
        return self.whole

    def ended(self) -> None:
        """The connection ended: for an answer without a length that is its end."""
        if self.status and not self._chunked and self._body_left is None:
            self.whole = True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        status = number_in(rest[:3]) or 0
        if not version.startswith("HTTP/1.") or status < 100:
            raise Malformed("the answer is not HTTP")
        if status < 200:  # a note that an answer will follow
            return
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
        self.status, self.headers = status, headers
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "")
        if not self._chunked and length:
            self._body_left = number_in(length)  # int() also takes signs and other digits
            if self._body_left is None:
                raise Malformed(f"the answer states a length of {length[:40]!r}")
        closes = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        self.reusable = not closes and (self._chunked or self._body_left is not None)
        self.begin()

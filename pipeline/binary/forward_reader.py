"""A file that is read once, forwards, in flat memory: what a layer's deflate stream can give."""

from __future__ import annotations

from collections.abc import Iterator


class ForwardReader:
    """Chunks with a read position; a range asked for in time is kept while it passes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""
        self._start = 0  # where the buffer begins in the file
        self._at = 0  # the read position within the buffer
        self._searched: dict[bytes, int] = {}  # up to where in the file a needle is not
        self._kept: dict[int, tuple[int, bytearray]] = {}

    @property
    def position(self) -> int:
        return self._start + self._at

    def take(self, n_bytes: int) -> bytes:
        """The next bytes; fewer only where the file ends."""
        while len(self._buffer) - self._at < n_bytes and self._pull():
            pass
        data = self._buffer[self._at : self._at + n_bytes]
        self._at += len(data)
        return data

    def peek(self, n_bytes: int) -> bytes:
        """The next bytes, which stay where they are."""
        data = self.take(n_bytes)
        self._at -= len(data)
        return data

    def skip(self, n_bytes: int) -> int:
        """Skips so many bytes; returns how many the file had."""
        remaining = n_bytes
        while remaining > (ready := len(self._buffer) - self._at):
            remaining -= ready
            self._at = len(self._buffer)
            if not self._pull():
                return n_bytes - remaining
        self._at += remaining
        return n_bytes

    def find(self, *needles: bytes) -> bytes:
        """Go to the nearest of the needles; empty, and at the end, where none is left."""
        while True:
            matches = [(i, n) for n in needles if (i := self._next(n)) >= 0]
            if matches:
                self._at, needle = min(matches)
                return needle
            # the last bytes may begin a needle that the next chunk completes
            self._at = max(self._at, len(self._buffer) - max(map(len, needles)) + 1)
            if not self._pull():
                self._at = len(self._buffer)
                return b""

    def _next(self, needle: bytes) -> int:
        """Where the needle is in the buffer; what was searched once is not searched again."""
        begin = max(self._at, self._searched.get(needle, 0) - self._start)
        index = self._buffer.find(needle, begin)
        end = index if index >= 0 else max(begin, len(self._buffer) - len(needle) + 1)
        self._searched[needle] = self._start + end
        return index

    def keep(self, offset: int, size_bytes: int) -> None:
        """Keep a range that has not passed yet."""
        self._kept[offset] = (size_bytes, bytearray())
        self._tap(self._start, self._buffer)

    def kept(self, offset: int) -> bytes:
        """What passed of a range that was asked for."""
        return bytes(self._kept[offset][1])

    def _pull(self) -> bool:
        """Drop what was read and append the next chunk."""
        chunk = next(self._chunks, b"")
        self._tap(self._start + len(self._buffer), chunk)
        self._buffer = self._buffer[self._at :] + chunk
        self._start += self._at
        self._at = 0
        return bool(chunk)

    def _tap(self, start: int, data: bytes) -> None:
        for offset, (size_bytes, out) in self._kept.items():
            first = max(offset + len(out), start) - start
            if start <= offset + len(out):
                out += data[first : offset + size_bytes - start]

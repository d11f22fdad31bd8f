"""A zip file on a server, read without fetching it: its directory, and single members."""

from __future__ import annotations

import io
import os
import zipfile

from pipeline.errors import CorruptArchive
from pipeline.fetch.http import Client
from pipeline.net.display import masked

# Directories of engine wheels are some hundred kilobytes; their members tens.
_BUFFER_BYTES = 1 << 17


class _Spans(io.RawIOBase):
    """A file on a server as Python's zip reader wants it."""

    def __init__(self, client: Client, url: str, size_bytes: int) -> None:
        self._client, self._url, self._size_bytes = client, url, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        length = min(len(buffer), self._size_bytes - self._at)
        if length <= 0:
            return 0
        buffer[:length] = self._client.read_span(self._url, self._at, length)
        self._at += length
        return length


def open_zip(client: Client, url: str) -> zipfile.ZipFile:
    """The zip file at an address; its members are fetched when they are read."""
    spans = _Spans(client, url, client.size_of(url))
    try:
        return zipfile.ZipFile(io.BufferedReader(spans, _BUFFER_BYTES))
    except zipfile.BadZipFile as error:
        raise CorruptArchive(f"{masked(url)}: is no zip file ({error})") from error

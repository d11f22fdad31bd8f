"""Ranges from the Hub's Xet store, through `hf_xet`, where a server offers it.

The Hub's token is sent to the endpoint only, which exchanges it for a short-lived one of the store.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import SourceUnreachable
from pipeline.fetch.http import Client
from pipeline.net.address import reason_of
from pipeline.net.client import MAY_PASS
from pipeline.net.failures import NetError
from pipeline.net.timing import Watchdog, asked_wait_s
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.http_route import HubRepository, route_failure, stall_limits
from pipeline.weights.transfer.routes import AttemptFailed, ByteStream, NotAvailable

_HASH = "X-Xet-Hash"  # huggingface_hub: HUGGINGFACE_HEADER_X_XET_HASH


def has_xet() -> bool:
    """Whether this machine has the Xet client at all (there is none for some processors)."""
    return importlib.util.find_spec("hf_xet") is not None


class XetRoute:
    """Ordered byte streams of the Xet store, by the hash that the Hub names for a file."""

    name, is_shared = "Xet", False

    def __init__(
        self,
        client: Client,
        repository: HubRepository,
        stall_s: float,
        new_group: Callable[[HubRepository], Any] | None = None,
    ) -> None:
        self._client, self._repository, self._stall_s = client, repository, stall_s
        self._new_group = new_group or _store_group
        self._group: Any = None
        self._watch = Watchdog()
        self._guard = threading.Lock()

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        name = self._hash_of(pin)
        try:
            with self._guard:
                # one for all threads: each group has its own connections and token
                self._group = self._group or self._new_group(self._repository)
            info = _file_info(name, pin.size_bytes)
            stream = self._group.download_stream(info, start=start, end=stop)
        except Exception as error:  # the store's client has no common kind of error
            reason = f"{pin.path}: the Xet store refuses: {reason_of(error)}"
            raise NotAvailable(SourceUnreachable(reason), only_this_file=True) from error
        return _XetBody(stream, stop - start, self._watch, self._stall_s)

    def _hash_of(self, pin: FilePin) -> str:
        """The store's name for a file, from the header of the Hub's redirect."""
        place, limits = self._repository.address(pin.path), stall_limits(self._stall_s)
        try:
            answer = self._client.http.ask(
                "HEAD", place, headers=self._repository.login, limits=limits
            )
        except NetError as error:
            raise route_failure(pin, error) from error
        answer.close()
        if name := answer.header(_HASH):
            return name
        if answer.status in MAY_PASS:
            why = f"{pin.path}: the Hub answers {answer.status}"
            raise AttemptFailed(why, wait_s=asked_wait_s(answer.headers))
        why = "is not offered through Xet"
        if answer.status >= 400:
            why = f"the Hub answers {answer.status} {answer.header('X-Error-Code')}".rstrip()
        raise NotAvailable(SourceUnreachable(f"{pin.path}: {why}"), only_this_file=True)


def _store_group(repository: HubRepository) -> Any:
    import hf_xet

    token = {"Authorization": f"Bearer {repository.token}"} if repository.token else {}
    route = f"{repository.endpoint}/api/models/{repository.name}/xet-read-token"
    return hf_xet.XetSession().new_download_stream_group(
        token_refresh_url=f"{route}/{repository.commit}", token_refresh_headers=token
    )


def _file_info(name: str, size_bytes: int) -> Any:
    import hf_xet

    return hf_xet.XetFileInfo(name, size_bytes)


class _XetBody:
    """A stream as a body: its pieces have sizes of their own, and a stalled one is cancelled."""

    is_whole = False

    def __init__(self, stream: Any, left: int, watch: Watchdog, stall_s: float) -> None:
        self._stream, self._left = stream, left
        self._watch, self._stall_s = watch, stall_s
        self._pieces: Iterator[bytes] = iter(stream)
        self._piece = memoryview(b"")

    def readinto(self, buffer: memoryview) -> int:
        if not self._piece:
            self._piece = memoryview(self._next())
        count = min(len(buffer), len(self._piece), self._left)
        if not count:
            raise AttemptFailed(f"the Xet stream ended {self._left} bytes early")
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        self._left -= count
        return count

    def _next(self) -> bytes:
        self._watch.begin(id(self), self._stream.cancel, self._stall_s)
        piece, why = b"", None
        try:
            piece = next(self._pieces, b"")
        except Exception as error:  # the store's client has no common kind of error
            why = error
        finally:
            in_time = self._watch.end(id(self))
        if not in_time:
            raise AttemptFailed("the Xet stream stalled", is_stall=True) from why
        if why is not None:
            raise AttemptFailed(f"Xet: {reason_of(why)}") from why
        return piece

    def close(self) -> None:
        # a stream that is dropped half read goes on in hf_xet's own threads
        if self._left:
            self._stream.cancel()

"""Files and pages as pip and uv get them on this machine, and one careful, resumable download."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pipeline.core.errors import DigestMismatch, SourceUnreachable
from pipeline.core.log import Bar, Gauge
from pipeline.core.net.address import masked
from pipeline.core.net.answer import Answer
from pipeline.core.net.client import MAY_PASS, Reply
from pipeline.core.net.client import Client as HttpClient
from pipeline.core.net.download import download as net_download
from pipeline.core.net.failures import BadAnswer, BadHeader, BadProxy, Lost, NetError, Untrusted
from pipeline.core.net.route import tls_context
from pipeline.core.net.settings import Settings
from pipeline.core.net.timing import Limits, Patience, asked_wait_s

Result = TypeVar("Result")


class Client:
    """The one HTTP client with pip's and uv's settings, and with patience."""

    def __init__(
        self,
        settings: Settings,
        *,
        first_wait_s: float = 0.5,
        limits: Limits | None = None,
        use_netrc: bool = True,
    ) -> None:
        self.settings = settings
        try:
            self.http = HttpClient(
                proxy=settings.proxy,
                make_context=lambda: tls_context(settings.ca_file),
                limits=limits,
                use_netrc=use_netrc,
            )
        except NetError as error:
            raise unreachable(error) from error
        self.patience = Patience(self.stop, first_wait_s)

    @property
    def stop(self) -> threading.Event:
        return self.http.stop

    def hang_up(self) -> None:
        """Tell every thread to stop, also those that wait for a server's next bytes."""
        self.http.hang_up()

    def join(self, threads: Sequence[threading.Thread]) -> bool:
        """Wait a little for threads that should stop; once all are gone, it can be used again."""
        return self.http.join(threads)

    def size_of(self, url: str) -> int:
        """A file's size without its bytes."""
        with self.retried(lambda: self.open("HEAD", url)) as answer:
            if answer.length is None:
                raise SourceUnreachable(f"{masked(url)}: does not report its size")
            return answer.length

    def read(self, url: str, most_bytes: int) -> bytes:
        """A small file, whole, as it lies there; a larger one is an error."""

        def once() -> bytes:
            with self.open("GET", url) as answer:
                return answer.read(most_bytes, decode=False)

        return self.retried(once)

    def page(self, url: str, most_bytes: int, headers: Mapping[str, str] | None = None) -> Reply:
        """A small answer in one try, whatever its status."""
        return self.http.fetch(url, most_bytes=most_bytes, headers=headers)

    def open(self, method: str, url: str, headers: Mapping[str, str] | None = None) -> Answer:
        """One try: `Lost` for what may pass, an error of our own for what will not."""
        try:
            answer = self.http.open(method, url, headers=headers)
        except Lost:
            raise
        except NetError as error:
            raise unreachable(error) from error
        # 416 is no error here: a partial file may have all bytes, or more than the server's
        if answer.status in ((200, 206, 416) if headers else (200,)):
            return answer
        answer.close()
        reason = f"{masked(url)}: answers {answer.status}"
        if answer.status in MAY_PASS or answer.status >= 500:
            raise Lost(reason, wait_s=asked_wait_s(answer.headers))
        raise SourceUnreachable(reason)

    def retried(self, ask: Callable[[], Result]) -> Result:
        """What may pass is tried again; what is left is an error of our own."""
        try:
            return self.patience.retried(ask)
        except NetError as error:
            raise unreachable(error) from error


def unreachable(error: NetError) -> SourceUnreachable:
    """The error for a failure that another try does not fix, with what to do about it."""
    hint = ""
    if isinstance(error, Untrusted):
        hint = "Name the CA of your network in SSL_CERT_FILE, or in pip's `cert` setting."
    if isinstance(error, BadProxy):
        hint = "Correct it where it is set: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY or pip's `proxy`."
    if isinstance(error, BadHeader):
        hint = "Set the login or token again: a line end or another odd character got into it."
    return SourceUnreachable(str(error), hint)


def download(
    client: Client, url: str, partial: Path, *, sha256: str, size_bytes: int, bar: Bar
) -> None:
    """Bring `partial` to its full size, going on where it stopped, hashing as bytes arrive."""
    want, gauge = f"sha256:{sha256}", Gauge(bar)

    def open_at(start: int) -> Answer:
        return client.open("GET", url, {"Range": f"bytes={start}-"} if start else {})

    try:
        got = net_download(open_at, partial, want, size_bytes, gauge, client.patience)
    except BadAnswer as error:
        raise DigestMismatch(f"{masked(url)}: {error}") from error
    except Lost as error:
        raise SourceUnreachable(str(error)) from error
    if got != want:
        raise DigestMismatch(f"{masked(url)}: locked as {want}, received {got}")

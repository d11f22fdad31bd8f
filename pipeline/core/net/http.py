"""Files and pages as pip and uv get them on this machine, and one careful, resumable download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pipeline.core.errors import DigestMismatch, SourceUnreachable
from pipeline.core.log import Bar, Gauge
from pipeline.core.net.address import masked
from pipeline.core.net.answer import Answer
from pipeline.core.net.client import MAY_PASS
from pipeline.core.net.client import Client as HttpClient
from pipeline.core.net.download import download_blob as net_download
from pipeline.core.net.failures import BadAnswer, BadHeader, BadProxy, Lost, NetError, Untrusted
from pipeline.core.net.route import tls_context
from pipeline.core.net.settings import NetworkSettings
from pipeline.core.net.timing import HttpLimits, RetryPolicy, asked_wait_s

Result = TypeVar("Result")


class NetClient(HttpClient):
    """The one HTTP client with pip's and uv's settings, and with retries."""

    def __init__(
        self,
        settings: NetworkSettings,
        *,
        first_wait_s: float = 0.5,
        limits: HttpLimits | None = None,
        use_netrc: bool = True,
    ) -> None:
        self.settings = settings
        try:
            super().__init__(
                proxy=settings.proxy,
                make_context=lambda: tls_context(settings.ca_file),
                limits=limits,
                use_netrc=use_netrc,
            )
        except NetError as error:
            raise unreachable_error(error) from error
        self.retry_policy = RetryPolicy(self.stop, first_wait_s)

    def size_of(self, url: str) -> int:
        """A file's size without its bytes."""
        with self.retried(lambda: self.open("HEAD", url)) as answer:
            if answer.length is None:
                raise SourceUnreachable(f"{masked(url)}: does not report its size")
            return answer.length

    def read(self, url: str, most_bytes: int) -> bytes:
        """Reads a small file whole, as the server stores it; a larger one is an error."""

        def once() -> bytes:
            with self.open("GET", url) as answer:
                return answer.read(most_bytes, decode=False)

        return self.retried(once)

    def open(self, method: str, url: str, headers: Mapping[str, str] | None = None) -> Answer:
        """One try: `Lost` for what may pass, an error of our own for what will not."""
        try:
            answer = self.follow(method, url, headers=headers)
        except Lost:
            raise
        except NetError as error:
            raise unreachable_error(error) from error
        # 416 is no error here: a partial file may have all bytes, or more than the server's
        if answer.status in ((200, 206, 416) if headers else (200,)):
            return answer
        answer.close()
        reason = f"{masked(url)}: answers {answer.status}"
        if answer.status in MAY_PASS or answer.status >= 500:
            raise Lost(reason, wait_s=asked_wait_s(answer.headers))
        raise SourceUnreachable(reason)

    def retried(self, ask: Callable[[], Result]) -> Result:
        """Retries failures that may pass; turns those that remain into errors of our own."""
        try:
            return self.retry_policy.retried(ask)
        except NetError as error:
            raise unreachable_error(error) from error


def unreachable_error(error: NetError) -> SourceUnreachable:
    """The error for a failure that another try does not fix, with what to do about it."""
    hints = {
        Untrusted: "Name the CA of your network in SSL_CERT_FILE, or in pip's `cert` setting.",
        BadProxy: "Correct it in HTTPS_PROXY, HTTP_PROXY, ALL_PROXY or pip's `proxy` setting.",
        BadHeader: "Set the login or token again: a line end or another odd character got into it.",
    }
    return SourceUnreachable(str(error), hints.get(type(error), ""))


def download_file(
    client: NetClient, url: str, partial: Path, *, sha256: str, size_bytes: int, bar: Bar
) -> None:
    """Brings `partial` to its full size, going on where it stopped, hashing as bytes arrive."""
    want, gauge = f"sha256:{sha256}", Gauge(bar)

    def open_at(start: int) -> Answer:
        return client.open("GET", url, {"Range": f"bytes={start}-"} if start else {})

    try:
        got = net_download(open_at, partial, want, size_bytes, gauge, client.retry_policy)
    except BadAnswer as error:
        raise DigestMismatch(f"{masked(url)}: {error}") from error
    except Lost as error:
        raise SourceUnreachable(str(error)) from error
    if got != want:
        raise DigestMismatch(f"{masked(url)}: locked as {want}, received {got}")

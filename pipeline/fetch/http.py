"""Files and pages as pip and uv would get them here, and one careful, resumable download."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline import log
from pipeline.errors import DigestMismatch, Interrupted, SourceUnreachable
from pipeline.fetch.settings import Settings
from pipeline.files import hash_so_far, os_errors_explained, size_so_far
from pipeline.log import Bar
from pipeline.net.address import goes_on, masked
from pipeline.net.answer import Answer
from pipeline.net.client import MAY_PASS, Reply
from pipeline.net.client import Client as HttpClient
from pipeline.net.failures import BadHeader, BadProxy, Lost, NetError, Untrusted
from pipeline.net.route import tls_context
from pipeline.net.timing import Limits, asked_wait_s

ATTEMPTS = 5
LONGEST_WAIT_S = 30.0
LONGEST_ASKED_S = 330.0  # the Hub counts in windows of five minutes
_REPORTED_FROM_S = 5.0  # shorter waits nobody wonders about
_CHUNK_BYTES = 1 << 20


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
        self._first_wait_s = first_wait_s
        try:
            self.http = HttpClient(
                proxy=settings.proxy,
                make_context=lambda: tls_context(settings.ca_file),
                limits=limits,
                use_netrc=use_netrc,
            )
        except NetError as error:
            raise unreachable(error) from error

    @property
    def stop(self) -> threading.Event:
        return self.http.stop

    def hang_up(self) -> None:
        """Tell every thread to stop, also those that wait for a server's next bytes."""
        self.http.hang_up()

    def join(self, threads: Sequence[threading.Thread]) -> bool:
        """Wait a little for threads that should stop; once all are gone, it can be used again."""
        return self.http.join(threads)

    def get(self, url: str, start: int = 0) -> Answer:
        """A streaming answer: 200, or for a later start also 206 or 416."""
        return self._ask("GET", url, {"Range": f"bytes={start}-"} if start else {})

    def size_of(self, url: str) -> int:
        """A file's size without its bytes."""
        with self._ask("HEAD", url, {}) as answer:
            if answer.length is None:
                raise SourceUnreachable(f"{masked(url)}: does not report its size")
            return answer.length

    def read(self, url: str, most_bytes: int) -> bytes:
        """A small file, whole, as it lies there; a larger one is an error."""
        lost: Lost | None = None
        for attempt in range(ATTEMPTS):
            if lost:
                self.pause(attempt - 1, lost.wait_s)
            try:
                with self.get(url) as answer:
                    return answer.read(most_bytes, decode=False)
            except Lost as error:
                lost = error
            except NetError as error:
                raise unreachable(error) from error
        raise SourceUnreachable(str(lost))

    def page(self, url: str, most_bytes: int, headers: Mapping[str, str] | None = None) -> Reply:
        """A small answer in one try, whatever its status."""
        return self.http.fetch(url, most_bytes=most_bytes, headers=headers)

    def _ask(self, method: str, url: str, headers: dict[str, str]) -> Answer:
        """Retry what may pass, refuse what will not."""
        good = (200, 206, 416) if "Range" in headers else (200,)
        reason, wait_s = "", None
        for attempt in range(ATTEMPTS):
            if attempt:
                self.pause(attempt - 1, wait_s)
            try:
                answer = self.http.open(method, url, headers=headers)
            except Lost as error:
                reason, wait_s = str(error), error.wait_s
                continue
            except NetError as error:
                raise unreachable(error) from error
            if answer.status in good:
                return answer
            answer.close()
            reason, wait_s = f"{masked(url)}: answers {answer.status}", asked_wait_s(answer.headers)
            if answer.status < 500 and answer.status not in MAY_PASS:
                break
        raise SourceUnreachable(reason)

    def pause(self, attempt: int, wait_s: float | None) -> None:
        """Wait longer each time, or as long as the server asks; a stop ends it."""
        own_s = min(self._first_wait_s * 2**attempt, LONGEST_WAIT_S)
        seconds = own_s if wait_s is None else min(wait_s, LONGEST_ASKED_S)
        if seconds >= _REPORTED_FROM_S:
            log.say(f"  a server asks us to wait {seconds:.0f} s")
        if self.stop.wait(seconds):
            raise Interrupted("stopped")


def unreachable(error: NetError) -> SourceUnreachable:
    """A failure that another try does not mend, with what to do about it."""
    hint = ""
    if isinstance(error, Untrusted):
        hint = "Name the CA of your network in SSL_CERT_FILE, or in pip's `cert` setting."
    if isinstance(error, BadProxy):
        hint = "Correct it where it is set: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY or pip's `proxy`."
    if isinstance(error, BadHeader):
        hint = "Set the login or token again: a line end or another odd character got into it."
    return SourceUnreachable(str(error), hint)


class Tally:
    """What one attempt added to the bar, so that a failed one can be taken back."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._added = bar, 0

    def advance(self, n_bytes: int) -> None:
        self._added += n_bytes
        self._bar.advance(n_bytes)

    def take_back(self) -> None:
        self.advance(-self._added)


def download(
    client: Client, url: str, partial: Path, *, sha256: str, size_bytes: int, bar: Bar
) -> None:
    """Bring `partial` to its full size, going on where it stopped, hashing as bytes arrive."""
    failures, started_over = 0, False
    while True:
        tally, before = Tally(bar), size_so_far(partial)
        try:
            digest = _attempt(client, url, partial, size_bytes, tally)
        except Lost as error:
            tally.take_back()
            has_moved = size_so_far(partial) >= before + _CHUNK_BYTES
            failures = 1 if has_moved else failures + 1
            if failures == ATTEMPTS:
                raise SourceUnreachable(str(error)) from error
            client.pause(failures - 1, error.wait_s)
            continue
        if digest == sha256:
            return
        tally.take_back()
        partial.unlink(missing_ok=True)
        if started_over or not before:
            raise DigestMismatch(f"{masked(url)}: locked as {sha256}, received {digest}")
        # the beginning that was kept may be what is wrong: once more, from the first byte
        started_over = True


def _attempt(client: Client, url: str, partial: Path, size_bytes: int, bar: Bar) -> str:
    have = size_so_far(partial)
    if have > size_bytes:
        partial.unlink()
        have = 0
    if have == size_bytes:
        return hash_so_far(partial, bar.advance).hexdigest()
    with _open_at(client, url, have, size_bytes) as answer:
        if answer.status == 200:
            _require_length(answer, url, size_bytes)
            partial.unlink(missing_ok=True)
        return _pour(answer, partial, size_bytes, bar)


def _open_at(client: Client, url: str, have: int, size_bytes: int) -> Answer:
    """An answer that begins at our byte or, where the server cannot do that, at the first."""
    answer = client.get(url, have)
    is_rest = answer.status == 206 and goes_on(answer.header("Content-Range"), have, size_bytes)
    if answer.status == 200 or (is_rest and (answer.length or 0) <= size_bytes - have):
        return answer
    answer.close()
    return client.get(url)


def _require_length(answer: Answer, url: str, size_bytes: int) -> None:
    """Refuse a file of another size before its first byte."""
    if answer.length is not None and answer.length != size_bytes:
        raise DigestMismatch(
            f"{masked(url)}: locked with {size_bytes} bytes, received a file of {answer.length}"
        )


def _pour(answer: Answer, partial: Path, size_bytes: int, bar: Bar) -> str:
    """Append the answer to the file; return the whole file's hash."""
    sha = hash_so_far(partial, bar.advance)
    got = size_so_far(partial)
    with os_errors_explained(partial), partial.open("ab") as out:
        for chunk in answer.pieces():
            got += len(chunk)
            if got > size_bytes:
                return f"more than the locked {size_bytes} bytes"
            out.write(chunk)
            sha.update(chunk)
            bar.advance(len(chunk))
    # only a chunked body marks its own end; any other that is short was cut off
    is_whole = answer.status == 200 and answer.header("Transfer-Encoding").lower() == "chunked"
    if got < size_bytes and not is_whole:
        raise Lost(f"{masked(answer.url)}: ended after {got} of {size_bytes} bytes")
    return sha.hexdigest()

"""HTTP as pip and uv would do it here, and one careful, resumable download."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema, TooManyRedirects
from urllib3.exceptions import HTTPError

from pipeline.errors import DigestMismatch, Interrupted, SourceUnreachable
from pipeline.fetch.settings import Settings, masked
from pipeline.files import hash_so_far, os_errors_explained, size_so_far
from pipeline.log import Bar

CONNECT_TIMEOUT_S = 15
READ_TIMEOUT_S = 60
ATTEMPTS = 5
LONGEST_WAIT_S = 30.0
# A thread that waits for a connection cannot be stopped; the process does not wait for it.
LONGEST_GOODBYE_S = 3.0
_CHUNK_BYTES = 1 << 20
# half the CPU and wall time of taking each TLS record as it comes, measured on 267 MB
_PIECE_BYTES = 1 << 18

_HOPELESS = (InvalidSchema, InvalidURL, MissingSchema, TooManyRedirects)


class _Session(requests.Session):
    """A session whose CA bundle and proxy are the configured ones, whatever variables say."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def merge_environment_settings(self, *args: Any, **kwargs: Any) -> Any:
        merged = super().merge_environment_settings(*args, **kwargs)
        if self._settings.ca_file:
            merged["verify"] = self._settings.ca_file
        if proxy := self._settings.proxy:
            merged["proxies"] = {"http": proxy, "https": proxy}
        return merged


class Client:
    """Sessions, one a thread, that share settings and a stop sign."""

    def __init__(self, settings: Settings, *, first_wait_s: float = 0.5) -> None:
        self.settings = settings
        self.stop = threading.Event()
        self._first_wait_s = first_wait_s
        self._of_thread = threading.local()
        self._answers: weakref.WeakSet[requests.Response] = weakref.WeakSet()
        self._guard = threading.Lock()

    @property
    def session(self) -> requests.Session:
        if not hasattr(self._of_thread, "session"):
            self._of_thread.session = self._new_session()
        session: requests.Session = self._of_thread.session
        return session

    def _new_session(self) -> requests.Session:
        session = _Session(self.settings)
        session.headers["User-Agent"] = "sm120-pipeline"
        session.hooks["response"] = [self._note]
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=4))
        return session

    def _note(self, answer: requests.Response, **_: Any) -> None:
        """Remember an answer whose body is still to come; either this or `hang_up` ends it."""
        with self._guard:
            self._answers.add(answer)
        if self.stop.is_set():
            answer.close()
            raise Interrupted("stopped")

    def hang_up(self) -> None:
        """Tell every thread to stop, also those that wait for a server's next bytes."""
        self.stop.set()
        with self._guard:
            answers = list(self._answers)
        for answer in answers:
            with suppress(OSError, ValueError, RuntimeError):
                answer.raw.shutdown()

    def see_off(self, threads: Sequence[threading.Thread]) -> bool:
        """Wait a little for threads that were told to stop; with all gone, asking goes on."""
        deadline = time.monotonic() + LONGEST_GOODBYE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        all_gone = not any(thread.is_alive() for thread in threads)
        if all_gone:
            self.stop.clear()
        return all_gone

    def get(self, url: str, start: int = 0) -> requests.Response:
        """A streaming answer: 200, or for a later start also 206 or 416."""
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        return self._ask("GET", url, headers)

    def size_of(self, url: str) -> int:
        """A file's size without its bytes."""
        answer = self._ask("HEAD", url, {"Accept-Encoding": "identity"})
        answer.close()
        length = answer.headers.get("Content-Length", "")
        if not length.isdigit():
            raise SourceUnreachable(f"{masked(url)}: does not say how large it is")
        return int(length)

    def read(self, url: str) -> bytes:
        """A small file, whole."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self.pause(attempt - 1, None)
            try:
                with self.get(url) as answer:
                    return bytes(answer.content)
            except (requests.RequestException, HTTPError, OSError) as error:
                reason = _reason(error)
        raise SourceUnreachable(f"{masked(url)}: {reason}")

    def read_span(self, url: str, start: int, length: int) -> bytes:
        """A part of a file; an error where the server only gives files as a whole."""
        span = f"bytes={start}-{start + length - 1}"
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self.pause(attempt - 1, None)
            try:
                headers = {"Accept-Encoding": "identity", "Range": span}
                with self._ask("GET", url, headers) as answer:
                    given = answer.headers.get("Content-Range", "")
                    from_there = answer.status_code == 206 and given.startswith(f"bytes {start}-")
                    if not from_there and not (answer.status_code == 200 and start == 0):
                        raise SourceUnreachable(f"{masked(url)}: does not serve parts of files")
                    data = b"".join(_chunks(answer, length))
            except (requests.RequestException, HTTPError, OSError) as error:
                reason = _reason(error)
                continue
            if len(data) == length:
                return data
            reason = f"ended after {len(data)} of {length} bytes"
        raise SourceUnreachable(f"{masked(url)}: {reason}")

    def _ask(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        """Retry what may pass, refuse what will not."""
        good = (200, 206, 416) if "Range" in headers else (200,)
        reason, retry_after = "", None
        for attempt in range(ATTEMPTS):
            if attempt:
                self.pause(attempt - 1, retry_after)
            try:
                answer = self._request(method, url, headers)
            except _HOPELESS as error:
                reason = _reason(error)
                break
            except requests.RequestException as error:
                reason, retry_after = _reason(error), None
                continue
            if answer.status_code in good:
                return answer
            answer.close()
            reason, retry_after = f"answers {answer.status_code}", answer.headers.get("Retry-After")
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                break
        raise SourceUnreachable(f"{masked(url)}: {reason}")

    def _request(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        return self.session.request(
            method,
            url,
            headers=headers,
            stream=True,
            allow_redirects=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        )

    def pause(self, attempt: int, retry_after: str | None) -> None:
        """Wait longer each time, or as long as the server asks; a stop ends it."""
        wait_s = self._first_wait_s * 2**attempt
        if retry_after and retry_after.isdigit():
            wait_s = float(retry_after)
        if self.stop.wait(min(wait_s, LONGEST_WAIT_S)):
            raise Interrupted("stopped")


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return masked(" ".join(str(error).split()))[:200] or type(error).__name__


class Tally:
    """What one attempt told the bar, so that a failed one can be taken back."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._told = bar, 0

    def advance(self, n_bytes: int) -> None:
        self._told += n_bytes
        self._bar.advance(n_bytes)

    def take_back(self) -> None:
        self.advance(-self._told)


def download(
    client: Client, url: str, partial: Path, *, sha256: str, size_bytes: int, bar: Bar
) -> None:
    """Bring `partial` to its full size, going on where it stopped, hashing as bytes arrive."""
    failures, started_over = 0, False
    while True:
        tally, before = Tally(bar), size_so_far(partial)
        try:
            digest = _attempt(client, url, partial, size_bytes, tally)
        except (requests.RequestException, HTTPError, ConnectionError, TimeoutError) as error:
            tally.take_back()
            has_moved = size_so_far(partial) >= before + _CHUNK_BYTES
            failures = 1 if has_moved else failures + 1
            if failures == ATTEMPTS:
                raise SourceUnreachable(f"{masked(url)}: {_reason(error)}") from error
            client.pause(failures - 1, None)
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
    with _open_at(client, url, have) as answer:
        if answer.status_code == 200:
            have = 0
        _require_length(answer, url, size_bytes - have, size_bytes)
        if not have:
            partial.unlink(missing_ok=True)
        return _pour(client, answer, partial, size_bytes, bar)


def _open_at(client: Client, url: str, have: int) -> requests.Response:
    """An answer that begins at our byte or, where the server cannot do that, at the first."""
    answer = client.get(url, have)
    span = answer.headers.get("Content-Range", "")
    goes_on = answer.status_code == 206 and span.startswith(f"bytes {have}-")
    if answer.status_code == 200 or goes_on:
        return answer
    answer.close()
    return client.get(url)


def _require_length(answer: requests.Response, url: str, want: int, size_bytes: int) -> None:
    """Refuse a file of another size before its first byte."""
    length = answer.headers.get("Content-Length", "")
    if length.isdigit() and int(length) != want:
        raise DigestMismatch(
            f"{masked(url)}: locked with {size_bytes} bytes, received a file of"
            f" {size_bytes - want + int(length)}"
        )


def _pour(
    client: Client, answer: requests.Response, partial: Path, size_bytes: int, bar: Bar
) -> str:
    """Append the answer to the file; return the whole file's hash."""
    sha = hash_so_far(partial, bar.advance)
    got = size_so_far(partial)
    with os_errors_explained(partial), partial.open("ab") as out:
        for chunk in _chunks(answer):
            if client.stop.is_set():
                raise Interrupted("stopped")
            got += len(chunk)
            if got > size_bytes:
                return f"more than the locked {size_bytes} bytes"
            out.write(chunk)
            sha.update(chunk)
            bar.advance(len(chunk))
    # only a chunked answer says where it ends; any other that is short was cut off
    if got < size_bytes and answer.headers.get("Transfer-Encoding") != "chunked":
        raise ConnectionError(f"ended after {got} of {size_bytes} bytes")
    return sha.hexdigest()


def _chunks(answer: requests.Response, most_bytes: int | None = None) -> Iterator[bytes]:
    """Pieces large enough that hashing them, not Python, is the work; `hang_up` ends a wait."""
    left = most_bytes
    while left != 0:
        wanted = _PIECE_BYTES if left is None else min(left, _PIECE_BYTES)
        chunk = answer.raw.read(wanted, decode_content=False)
        if not chunk:
            return
        left = None if left is None else left - len(chunk)
        yield chunk

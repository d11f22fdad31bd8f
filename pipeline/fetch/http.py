"""HTTP as pip and uv would do it here, and one careful, resumable download."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from pipeline.errors import DigestMismatch, Interrupted, SourceUnreachable
from pipeline.fetch.settings import Settings, masked
from pipeline.files import os_errors_explained
from pipeline.log import Bar

CONNECT_TIMEOUT_S = 15
READ_TIMEOUT_S = 60
ATTEMPTS = 5
LONGEST_WAIT_S = 30.0
_CHUNK_BYTES = 1 << 20

_thread = threading.local()


class _Session(requests.Session):
    """A session whose CA bundle is the configured one, whatever variables say."""

    def __init__(self, ca_file: str | None) -> None:
        super().__init__()
        self._ca_file = ca_file

    def merge_environment_settings(self, *args: Any, **kwargs: Any) -> Any:
        merged = super().merge_environment_settings(*args, **kwargs)
        if self._ca_file:
            merged["verify"] = self._ca_file
        return merged


class Client:
    """Sessions, one a thread, that share settings and a stop sign."""

    def __init__(self, settings: Settings, *, first_wait_s: float = 0.5) -> None:
        self.settings = settings
        self.stop = threading.Event()
        self._first_wait_s = first_wait_s

    @property
    def session(self) -> requests.Session:
        sessions: dict[int, requests.Session] = _thread.__dict__.setdefault("sessions", {})
        if id(self) not in sessions:
            sessions[id(self)] = self._new_session()
        return sessions[id(self)]

    def _new_session(self) -> requests.Session:
        session = _Session(self.settings.ca_file)
        session.headers["User-Agent"] = "sm120-pipeline"
        if self.settings.proxy:
            session.proxies = {"http": self.settings.proxy, "https": self.settings.proxy}
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=4))
        return session

    def get(self, url: str, start: int = 0) -> requests.Response:
        """A streaming answer of 200 or 206; retries what may pass, refuses what will not."""
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
        answer = self.get(url)
        try:
            return bytes(answer.content)
        except (requests.RequestException, HTTPError, OSError) as error:
            raise SourceUnreachable(f"{masked(url)}: {_reason(error)}") from error

    def _ask(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        reason = ""
        for attempt in range(ATTEMPTS):
            try:
                answer = self.session.request(
                    method,
                    url,
                    headers=headers,
                    stream=True,
                    allow_redirects=True,
                    timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                )
            except requests.RequestException as error:
                reason = _reason(error)
                self.pause(attempt, None)
                continue
            if answer.status_code in (200, 206, 416):
                return answer
            reason = f"answers {answer.status_code}"
            answer.close()
            if answer.status_code < 500 and answer.status_code != 429:
                break
            self.pause(attempt, answer.headers.get("Retry-After"))
        raise SourceUnreachable(f"{masked(url)}: {reason}")

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
    return " ".join(str(error).split())[:200] or type(error).__name__


def download(
    client: Client, url: str, partial: Path, *, sha256: str, size_bytes: int, bar: Bar
) -> None:
    """Bring `partial` to its full size, going on where it stopped, hashing as bytes arrive."""
    for attempt in range(ATTEMPTS):
        try:
            digest = _attempt(client, url, partial, size_bytes, bar)
        except (requests.RequestException, HTTPError, ConnectionError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                raise SourceUnreachable(f"{masked(url)}: {_reason(error)}") from error
            client.pause(attempt, None)
            continue
        if digest == sha256:
            return
        partial.unlink()
        bar.advance(-size_bytes)
        raise DigestMismatch(f"{masked(url)}: locked as {sha256}, received {digest}")
    raise SourceUnreachable(f"{masked(url)}: broke off {ATTEMPTS} times")


def _attempt(client: Client, url: str, partial: Path, size_bytes: int, bar: Bar) -> str:
    have = partial.stat().st_size if partial.exists() else 0
    if have > size_bytes:
        partial.unlink()
        have = 0
    if have == size_bytes:
        return _hash_prefix(partial, bar).hexdigest()
    answer = client.get(url, have)
    if have and not _resumes(answer, have):
        partial.unlink()
        have = 0
        if answer.status_code == 416:
            answer.close()
            answer = client.get(url)
    sha = _hash_prefix(partial, bar) if have else hashlib.sha256()
    got = have
    try:
        with answer, os_errors_explained(partial), partial.open("ab") as out:
            for chunk in _chunks(answer):
                if client.stop.is_set():
                    raise Interrupted("stopped")
                got += len(chunk)
                if got > size_bytes:
                    break
                out.write(chunk)
                sha.update(chunk)
                bar.advance(len(chunk))
    except BaseException:
        bar.advance(-min(got, size_bytes))
        raise
    if got < size_bytes:
        bar.advance(-got)
        raise ConnectionError(f"ended after {got} of {size_bytes} bytes")
    if got > size_bytes:
        return f"more than the locked {size_bytes} bytes"
    return sha.hexdigest()


def _resumes(answer: requests.Response, have: int) -> bool:
    """Whether the answer really goes on at our byte; some servers send 200 and all of it."""
    span = answer.headers.get("Content-Range", "")
    return answer.status_code == 206 and span.startswith(f"bytes {have}-")


def _chunks(answer: requests.Response) -> Iterator[bytes]:
    while chunk := answer.raw.read(_CHUNK_BYTES, decode_content=False):
        yield chunk


def _hash_prefix(path: Path, bar: Bar) -> hashlib._Hash:
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            sha.update(chunk)
            bar.advance(len(chunk))
    return sha

"""The plain way: ranges over HTTP from the Hub, its CDN, a mirror or a neighbour.

The token goes to the origin it is for and to no other: redirects are followed here, by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError

from pipeline.errors import HubBroken
from pipeline.fetch.http import Client
from pipeline.fetch.settings import masked
from pipeline.weights.http_answer import few_words, judge, require_same_file
from pipeline.weights.model import FilePin
from pipeline.weights.routes import Body, Lost, NotHere
from pipeline.weights.watchdog import Watchdog

CONNECT_TIMEOUT_S = 15
STALL_S = 30.0
_MOST_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_STALE_LINK = (400, 401, 403, 404, 410)


class Bearer(requests.auth.AuthBase):
    """The token, or none: given as `auth`, so that no netrc entry takes its place."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, at an endpoint that speaks the Hub's language."""

    endpoint: str
    name: str
    commit: str
    token: str | None = None

    def address(self, path: str) -> str:
        return f"{self.endpoint}/{self.name}/resolve/{self.commit}/{quote(path)}"


class HttpRoute:
    """Ranges of a repository's files; remembers where the Hub sends us for each."""

    def __init__(
        self, client: Client, repository: Repository, name: str, stall_s: float = STALL_S
    ) -> None:
        self.name = name
        self._client, self._repository, self._stall_s = client, repository, stall_s
        self._links: dict[str, str] = {}
        self._watch = Watchdog(2 * stall_s, client.stop)

    def open(self, pin: FilePin, start: int, stop: int) -> Body:
        headers = {"Accept-Encoding": "identity"}
        if (start, stop) != (0, pin.size_bytes):
            headers["Range"] = f"bytes={start}-{stop - 1}"
        answer = self._ask_link(pin, headers) or self._ask_hub(pin, headers)
        try:
            is_whole = judge(answer, pin, start, stop)
        except BaseException:
            answer.close()
            raise
        span = (0, pin.size_bytes) if is_whole else (start, stop)
        return _HttpBody(answer, span, is_whole, self._watch)

    def _ask_link(self, pin: FilePin, headers: dict[str, str]) -> requests.Response | None:
        """The place we were sent to last time; signed links end, then the Hub is asked anew."""
        link = self._links.get(pin.path)
        if link is None:
            return None
        answer = self._request(link, headers, None)
        if answer.status_code in (*_REDIRECTS, *_STALE_LINK):
            answer.close()
            self._links.pop(pin.path, None)
            return None
        return answer

    def _ask_hub(self, pin: FilePin, headers: dict[str, str]) -> requests.Response:
        url = home = self._repository.address(pin.path)
        for _ in range(_MOST_HOPS):
            token = self._repository.token if _origin(url) == _origin(home) else None
            answer = self._request(url, headers, token)
            if answer.status_code not in _REDIRECTS or "Location" not in answer.headers:
                if _origin(url) != _origin(home) and answer.status_code < 400:
                    self._links[pin.path] = url
                return answer
            answer.close()
            require_same_file(answer, pin)
            url = urljoin(url, answer.headers["Location"])
            if urlsplit(url).scheme not in ("http", "https"):
                raise NotHere(HubBroken(f"{pin.path}: is said to be at {masked(url)[:100]}"))
        raise Lost(f"{pin.path}: more than {_MOST_HOPS} redirects", ending=HubBroken)

    def _request(self, url: str, headers: dict[str, str], token: str | None) -> requests.Response:
        try:
            return self._client.session.request(
                "GET",
                url,
                headers=headers,
                auth=Bearer(token),
                stream=True,
                allow_redirects=False,
                timeout=(CONNECT_TIMEOUT_S, self._stall_s),
            )
        except requests.RequestException as error:
            is_stall = isinstance(error, requests.exceptions.ReadTimeout)
            raise Lost(f"{masked(url)}: {few_words(error)}", is_stall=is_stall) from error


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2]


class _HttpBody:
    """Reads from the socket straight into the caller's buffer."""

    def __init__(
        self, answer: requests.Response, span: tuple[int, int], is_whole: bool, watch: Watchdog
    ) -> None:
        self.is_whole = is_whole
        self._answer, self._watch = answer, watch
        self._left = span[1] - span[0]
        # urllib3's own `readinto` makes a copy; below it, the standard library's does not
        self._source: Any = answer.raw._original_response

    def readinto(self, buffer: memoryview) -> int:
        self._watch.begin(id(self), self._answer.raw.shutdown)
        try:
            count: int = self._source.readinto(buffer[: self._left])
        except TimeoutError as error:
            raise Lost("no byte came any more", is_stall=True) from error
        except (OSError, HTTPError, HTTPException, ValueError) as error:
            raise Lost(few_words(error)) from error
        finally:
            in_time = self._watch.end(id(self))
        if not in_time:
            raise Lost("the bytes only drip", is_stall=True)
        if not count:
            raise Lost(f"the connection ended {self._left} bytes early")
        self._left -= count
        return count

    def close(self) -> None:
        if self._left:
            self._answer.close()
        else:
            self._answer.raw.release_conn()

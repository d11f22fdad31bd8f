"""The plain way: ranges over HTTP from the Hub, its CDN, a mirror or a neighbour.

The token goes to the origin it is for and to no other: redirects are followed here, by hand.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from pipeline.errors import HubBroken
from pipeline.fetch.http import Client, unreachable
from pipeline.net.address import next_address, origin_of
from pipeline.net.answer import Answer
from pipeline.net.client import REDIRECTS, login_in
from pipeline.net.failures import BadAddress, BadAnswer, BadProxy, NetError
from pipeline.net.failures import Lost as ConnectionLost
from pipeline.net.limits import Limits
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.http_answer import judge, require_same_file
from pipeline.weights.transfer.routes import Body, Lost, NotHere

STALL_S = 30.0
_MOST_HOPS = 5
_STALE_LINK = (400, 401, 403, 404, 410)


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, at an endpoint that speaks the Hub's language."""

    endpoint: str
    name: str
    commit: str
    token: str | None = None

    def address(self, path: str) -> str:
        return f"{self.endpoint}/{self.name}/resolve/{self.commit}/{quote(path)}"

    @property
    def login(self) -> dict[str, str]:
        """The token as a header, else the login that stands in the endpoint's address."""
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        own = ""
        with suppress(BadAddress):  # told when it is asked
            own = login_in(self.endpoint)
        return {"Authorization": own} if own else {}


class HttpRoute:
    """Ranges of a repository's files; remembers where the Hub sends us for each."""

    def __init__(
        self, client: Client, repository: Repository, name: str, stall_s: float = STALL_S
    ) -> None:
        self.name = name
        self._client, self._repository = client, repository
        self._limits = stall_limits(stall_s)
        self._links: dict[str, str] = {}

    def open(self, pin: FilePin, start: int, stop: int) -> Body:
        headers = {}
        if (start, stop) != (0, pin.size_bytes):
            headers["Range"] = f"bytes={start}-{stop - 1}"
        answer = self._ask_link(pin, headers) or self._ask_hub(pin, headers)
        try:
            is_whole = judge(answer, pin, start, stop)
        except BaseException:
            answer.close()
            raise
        span = (0, pin.size_bytes) if is_whole else (start, stop)
        return _HttpBody(answer, span, is_whole)

    def _ask_link(self, pin: FilePin, headers: dict[str, str]) -> Answer | None:
        """The place we were sent to last time; signed links end, then the Hub is asked anew."""
        link = self._links.get(pin.path)
        if link is None:
            return None
        answer = self._request(pin, link, headers)
        if answer.status in (*REDIRECTS, *_STALE_LINK):
            answer.close()
            self._links.pop(pin.path, None)
            return None
        return answer

    def _ask_hub(self, pin: FilePin, headers: dict[str, str]) -> Answer:
        url = home = self._repository.address(pin.path)
        for _ in range(_MOST_HOPS):
            is_home = url == home or origin_of(url) == origin_of(home)
            login = self._repository.login if is_home else {}
            answer = self._request(pin, url, {**headers, **login})
            place = answer.header("Location")
            if answer.status not in REDIRECTS or not place:
                if not is_home and answer.status < 400:
                    self._links[pin.path] = url
                return answer
            answer.close()
            require_same_file(answer, pin)
            try:
                url = next_address(url, place)
            except BadAnswer as error:
                raise NotHere(HubBroken(f"{pin.path}: the server {error}")) from error
        raise Lost(f"{pin.path}: more than {_MOST_HOPS} redirects", ending=HubBroken)

    def _request(self, pin: FilePin, url: str, headers: dict[str, str]) -> Answer:
        try:
            return self._client.http.ask("GET", url, headers=headers, limits=self._limits)
        except NetError as error:
            raise route_failure(pin, error) from error


def stall_limits(stall_s: float) -> Limits:
    """Bounds for a route that is left when it stalls."""
    return Limits(silence_s=stall_s, head_s=2 * stall_s, piece_s=2 * stall_s)


def route_failure(pin: FilePin, error: NetError) -> Lost | NotHere:
    """What a failed exchange means for a route."""
    if isinstance(error, ConnectionLost):
        return Lost(str(error), is_stall=error.is_stall, wait_s=error.wait_s)
    if isinstance(error, BadAddress | BadAnswer) and not isinstance(error, BadProxy):
        return NotHere(HubBroken(f"{pin.path}: {error}"))
    return NotHere(unreachable(error))


class _HttpBody:
    """Reads from the socket straight into the caller's buffer."""

    def __init__(self, answer: Answer, span: tuple[int, int], is_whole: bool) -> None:
        self.is_whole = is_whole
        self._answer = answer
        self._left = span[1] - span[0]

    def readinto(self, buffer: memoryview) -> int:
        try:
            count = self._answer.readinto(buffer[: self._left])
        except ConnectionLost as error:
            raise Lost(str(error), is_stall=error.is_stall) from error
        if not count:
            raise Lost(f"the connection ended {self._left} bytes early")
        self._left -= count
        return count

    def close(self) -> None:
        self._answer.close()

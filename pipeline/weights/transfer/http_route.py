"""The plain way: ranges over HTTP from the Hub, its CDN, a mirror or a neighbour.

The token goes to the origin it is for and to no other: redirects are followed here, by hand.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from pipeline.errors import DigestMismatch, HubBroken, HubRefused, PipelineError, RevisionMoved
from pipeline.fetch.http import Client, unreachable
from pipeline.net.address import next_address
from pipeline.net.answer import Answer
from pipeline.net.client import REDIRECTS, is_home, login_in
from pipeline.net.failures import BadAddress, BadAnswer, BadProxy, NetError
from pipeline.net.failures import Lost as ConnectionLost
from pipeline.net.timing import Limits, asked_wait_s
from pipeline.weights.model import FILE_HASH, FilePin
from pipeline.weights.transfer.routes import (
    NEIGHBOUR_LOGIN,
    AttemptFailed,
    ByteStream,
    NotAvailable,
    wrong_bytes,
)

STALL_S = 30.0  # without a byte for so long, another route is taken
_MOST_HOPS = 5  # the Hub needs two: a renamed repository, then its CDN
_STALE_LINK = (400, 401, 403, 404, 410)  # what CDNs answer when a signed link has expired
_MAY_PASS = (408, 425, 429)  # besides 5xx
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")  # RFC 9110, 14.4
_MOST_SAID = 200  # characters of a server's own reason
_NUMBER = re.compile(r"\d{1,18}")


@dataclass(frozen=True)
class HubRepository:
    """A repository at a commit, at an endpoint with the Hub's API."""

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
        with suppress(BadAddress):  # reported when it is asked
            own = login_in(self.endpoint)
        return {"Authorization": own} if own else {}


class HttpRoute:
    """Ranges of a repository's files; remembers where the Hub sends us for each."""

    def __init__(
        self,
        client: Client,
        repository: HubRepository,
        name: str,
        stall_s: float = STALL_S,
        *,
        is_shared: bool = False,
    ) -> None:
        self.name, self.is_shared = name, is_shared
        self._client, self._repository = client, repository
        self._limits = stall_limits(stall_s)
        # a neighbour has tokens of its own, and never gets the Hub's
        self._login_hint = NEIGHBOUR_LOGIN if is_shared else HubRefused.hint
        self._links: dict[str, str] = {}

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        headers = {}
        # a whole file is asked for without a range: some mirrors know none
        if (start, stop) != (0, pin.size_bytes):
            headers["Range"] = f"bytes={start}-{stop - 1}"
        answer = self._ask_link(pin, headers) or self._ask_hub(pin, headers)
        try:
            is_whole = check_answer(answer, pin, start, stop, self._login_hint)
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
            at_home = url == home or is_home(home, url)
            # a CDN has its own signature in the link, and must not see the token
            login = self._repository.login if at_home else {}
            answer = self._request(pin, url, {**headers, **login})
            place = answer.header("Location")
            if answer.status not in REDIRECTS or not place:
                # a signed link is good for a while, and spares the Hub a request for each range
                if not at_home and answer.status < 400:
                    self._links[pin.path] = url
                return answer
            answer.close()
            # before the CDN is asked: what it sends has no hash in its headers
            require_same_file(answer, pin)
            try:
                url = next_address(url, place)
            except BadAnswer as error:
                raise NotAvailable(HubBroken(f"{pin.path}: the server {error}")) from error
        raise AttemptFailed(f"{pin.path}: more than {_MOST_HOPS} redirects", error_type=HubBroken)

    def _request(self, pin: FilePin, url: str, headers: dict[str, str]) -> Answer:
        try:
            return self._client.http.ask("GET", url, headers=headers, limits=self._limits)
        except NetError as error:
            raise route_failure(pin, error) from error


def stall_limits(stall_s: float) -> Limits:
    """Bounds for a route that is left when it stalls."""
    return Limits(silence_s=stall_s, head_s=2 * stall_s, piece_s=2 * stall_s)


def route_failure(pin: FilePin, error: NetError) -> AttemptFailed | NotAvailable:
    """Whether a failed request is worth another attempt on this route."""
    if isinstance(error, ConnectionLost):
        return AttemptFailed(
            str(error),
            is_stall=error.is_stall,
            is_unreached=error.is_unreached,
            wait_s=error.wait_s,
        )
    # a wrong proxy is a setting of this machine, not a fault of the Hub
    if isinstance(error, BadAddress | BadAnswer) and not isinstance(error, BadProxy):
        return NotAvailable(HubBroken(f"{pin.path}: {error}"))
    return NotAvailable(unreachable(error))


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
            raise AttemptFailed(str(error), is_stall=error.is_stall) from error
        if not count:
            raise AttemptFailed(f"the connection ended {self._left} bytes early")
        self._left -= count
        return count

    def close(self) -> None:
        self._answer.close()


def require_same_file(answer: Answer, pin: FilePin) -> None:
    """With a redirect the Hub names the hash and size of the file that it leads to."""
    etag = answer.header("X-Linked-Etag").removeprefix("W/").strip('"')
    size = answer.header("X-Linked-Size")
    if FILE_HASH.fullmatch(etag) and len(etag) == len(pin.want) and etag != pin.want:
        wrong = wrong_bytes(f"{pin.path}: locked as {pin.want}, the server has {etag}")
        raise NotAvailable(wrong, only_this_file=True)
    if _NUMBER.fullmatch(size) and int(size) != pin.size_bytes:
        raise NotAvailable(_other_size(pin, int(size)), only_this_file=True)


def _other_size(pin: FilePin, size: int) -> DigestMismatch:
    return wrong_bytes(f"{pin.path}: locked with {pin.size_bytes} bytes, the server has {size}")


def check_answer(
    answer: Answer, pin: FilePin, start: int, stop: int, login_hint: str = HubRefused.hint
) -> bool:
    """Refuse what cannot be the wanted range; returns whether the whole file comes instead."""
    status = answer.status
    if status not in (200, 206):
        raise _refusal(answer, pin, login_hint)
    # ranges count bytes of the encoded form, which no lock knows
    if answer.header("Content-Encoding") not in ("", "identity"):
        raise AttemptFailed(
            f"{pin.path}: the server sends it compressed, though we asked it not to",
            error_type=HubBroken,
        )
    is_part = (start, stop) != (0, pin.size_bytes)
    length, want = answer.header("Content-Length"), pin.size_bytes
    if status == 206:
        span = _SPAN.fullmatch(answer.header("Content-Range"))
        # it may end early: a server may send less than it was asked for (RFC 9110, 15.3.7)
        if not is_part or not span or not start == int(span[1]) <= int(span[2]) < stop:
            raise AttemptFailed(
                f"{pin.path}: the server sent another range than {start}-{stop - 1}",
                error_type=HubBroken,
            )
        if span[3] not in ("*", str(pin.size_bytes)):
            raise AttemptFailed(str(_other_size(pin, int(span[3]))), error_type=wrong_bytes)
        want = int(span[2]) + 1 - start
    if length and (not _NUMBER.fullmatch(length) or int(length) != want):
        raise AttemptFailed(
            f"{pin.path}: {want} bytes are locked, the server announces {length[:20]}",
            error_type=wrong_bytes,
        )
    return is_part and status == 200


def _refusal(answer: Answer, pin: FilePin, login_hint: str) -> AttemptFailed | NotAvailable:
    """Whether another attempt may help, by the status."""
    status, code = answer.status, answer.header("X-Error-Code")
    # the Hub, and whoever serves as it does, gives the reason for people in a header
    said = "".join(c for c in answer.header("X-Error-Message") if c.isprintable())[:_MOST_SAID]
    why = f": {said}" if said else ""
    if status >= 500 or status in _MAY_PASS:
        wait_s = asked_wait_s(answer.headers)
        return AttemptFailed(f"{pin.path}: the server answers {status}{why}", wait_s=wait_s)
    # the other codes are about the repository or the revision, so they hold for every file
    is_of_file = status in (404, 409, 410, 416) and code in ("", "EntryNotFound")
    return NotAvailable(_error(status, code, why, pin, login_hint), only_this_file=is_of_file)


def _error(status: int, code: str, why: str, pin: FilePin, login_hint: str) -> PipelineError:
    if code == "GatedRepo":
        return HubRefused(f"{pin.path}: the repository is gated, and this user has no access")
    if code == "RevisionNotFound":
        return RevisionMoved(f"{pin.path}: the repository no longer has the locked commit")
    if status == 416:
        return wrong_bytes(f"{pin.path}: the server's file is shorter than the locked one")
    if status in (401, 403):
        reason = f"{pin.path}: the server answers {status}: this user has no access"
        return HubRefused(reason, login_hint)
    return HubRefused(
        f"{pin.path}: the server answers {status} {code}".rstrip() + why,
        "Name another source with --from, or ask whoever runs that server."
        if why
        else "It has no such file at the locked commit; see `sm120 weights lock NAME --dry-run`.",
    )

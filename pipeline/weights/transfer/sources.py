"""Where the bytes of a locked set come from: folders, then neighbours, then the Hub.

The Hub's token goes to the origin it is for and to no other: we follow redirects by hand, and
the endpoint exchanges it for a short-lived token of the Xet store.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.core.errors import (
    DigestMismatch,
    HubBroken,
    HubRefused,
    PipelineError,
    RevisionMoved,
    SourceUnreachable,
    SpecInvalid,
)
from pipeline.core.net.address import masked, next_address, number_in, reason_of, split_address
from pipeline.core.net.answer import Answer
from pipeline.core.net.client import MAY_PASS, REDIRECTS, is_home, login_in
from pipeline.core.net.failures import BadAddress, BadAnswer, BadProxy, NetError
from pipeline.core.net.failures import Lost as ConnectionLost
from pipeline.core.net.http import NetClient, unreachable_error
from pipeline.core.net.settings import local_folder, plain_settings
from pipeline.core.net.timing import HttpLimits, Watchdog, asked_wait_s
from pipeline.weights import hub
from pipeline.weights.model import FILE_HASH, FilePin, WeightsLock
from pipeline.weights.place import cache_name
from pipeline.weights.transfer.router import (
    NEIGHBOUR_LOGIN,
    NEIGHBOUR_TOKEN,
    AttemptFailed,
    ByteStream,
    NotAvailable,
    Route,
    not_offline,
    wrong_bytes,
)

STALL_S = 30.0  # without a byte for so long, another route is taken
_MOST_HOPS = 6  # the Hub needs two: a renamed repository, then its CDN; one link may be stale
_STALE_LINK = (400, 401, 403, 404, 410)  # what CDNs answer when a signed link has expired
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")  # RFC 9110, 14.4
_MOST_REASON_CHARS = 200  # of a server's own message
_XET_HASH = "X-Xet-Hash"  # huggingface_hub: HUGGINGFACE_HEADER_X_XET_HASH


def open_routes(
    lock: WeightsLock, *, neighbours: Sequence[str] = (), offline: bool = False
) -> tuple[NetClient, list[Route]]:
    """Open the routes that this machine's environment gives, and their shared client."""
    # not pip's settings: its indexes and logins have nothing to do with weights
    client, is_offline = NetClient(plain_settings()), offline or hub.is_offline()
    routes = find_routes(
        client,
        lock,
        endpoint=hub.endpoint(),
        token=None if is_offline else hub.saved_token(),
        neighbours=neighbours,
        offline=is_offline,
        with_xet=not hub.is_on("HF_HUB_DISABLE_XET"),
    )
    return client, routes


def find_routes(
    client: NetClient,
    lock: WeightsLock,
    *,
    endpoint: str,
    token: str | None,
    neighbours: Sequence[str] = (),
    offline: bool = False,
    stall_s: float = STALL_S,
    with_xet: bool = True,
) -> list[Route]:
    """Folders, then neighbours, then the Hub: by plain HTTP, and by Xet where that stalls.

    The Hub's token is sent to the Hub only; neighbours get the one in SM120_NEIGHBOUR_TOKEN.
    """
    # all named sources share the work; the internet gets requests for what none of them has
    routes: list[Route] = [FolderRoute(folder, lock) for folder in named_folders(neighbours)]
    if offline:
        return routes
    for address in (place for place in neighbours if local_folder(place) is None):
        routes.append(neighbour_route(client, lock, address, "--from", stall_s))
    home = HubRepository(endpoint, lock.repository, lock.commit, token)
    routes.append(HttpRoute(client, home, "plain HTTP", stall_s))
    # after plain HTTP, which needs no native code; some processors have no Xet client
    if with_xet and importlib.util.find_spec("hf_xet") is not None:
        routes.append(XetRoute(client, home, stall_s))
    return routes


def neighbour_route(
    client: NetClient, lock: WeightsLock, address: str, option: str, stall_s: float = STALL_S
) -> HttpRoute:
    """Another machine that serves weights; `option` is what named it."""
    try:
        name = split_address(address).netloc.rpartition("@")[2]
    except BadAddress as error:
        what = "neither a folder nor" if option == "--from" else "not"
        raise SpecInvalid(
            f"{option} {masked(address)}: is {what} an http address",
            "Name http://HOST:PORT of a neighbour, or a folder (--from) or an inventory (--peers).",
        ) from error
    # not an option: command lines are visible to every user of the machine
    secret = os.environ.get(NEIGHBOUR_TOKEN)
    source = HubRepository(address.rstrip("/"), lock.repository, lock.commit, secret)
    return HttpRoute(client, source, name, stall_s, is_shared=True)


def named_folders(neighbours: Sequence[str]) -> list[Path]:
    """The folders among the sources that a user named."""
    folders = [f for place in neighbours if (f := local_folder(place))]
    if missing := [f for f in folders if not f.is_dir()]:
        raise SpecInvalid(f"--from {missing[0]}: is not a folder", "Name a folder or an address.")
    return folders


class FolderRoute:
    """A folder that may hold the files: by their paths, or as the Hub's cache does."""

    is_shared = True

    def __init__(self, folder: Path, lock: WeightsLock) -> None:
        self.name = str(folder)
        self._roots = (folder, folder / "snapshots" / lock.commit)
        self._blobs = (folder / "blobs", folder / cache_name(lock) / "blobs")

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        paths = (*(r / pin.path for r in self._roots), *(b / pin.want for b in self._blobs))
        return open_local(paths, pin, start, stop, self.name)


def open_local(
    paths: Iterable[Path], pin: FilePin, start: int, stop: int, where: str
) -> ByteStream:
    """Open the first file that has the right size; the hash of its bytes decides."""
    for path in paths:
        try:
            if path.is_file() and path.stat().st_size == pin.size_bytes:
                file = path.open("rb", buffering=0)
                file.seek(start)
                break
        except OSError:
            continue
    else:
        raise NotAvailable(not_offline(f"{pin.path}: is not in {where}"), only_this_file=True)

    def read(buffer: memoryview) -> int:
        try:
            return file.readinto(buffer)
        except OSError as error:
            raise AttemptFailed(f"{file.name}: {error.strerror}") from error

    return ByteStream(str(path), read, file.close, stop - start)


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
        """The token as a header, else the login in the endpoint's address."""
        own = f"Bearer {self.token}" if self.token else ""
        with suppress(BadAddress):  # the request will report it
            own = own or login_in(self.endpoint)
        return {"Authorization": own} if own else {}


def _ask(
    route: HttpRoute | XetRoute, pin: FilePin, method: str, url: str, headers: dict[str, str]
) -> Answer:
    """Send one request about a file; give up when it stalls."""
    try:
        stall_s = route.stall_s
        limits = HttpLimits(silence_s=stall_s, head_s=2 * stall_s, piece_s=2 * stall_s)
        return route.client.ask(method, url, headers=headers, limits=limits)
    except ConnectionLost as error:
        raise _lost(error) from error
    except NetError as error:
        # a wrong proxy is a setting of this machine, not a fault of the Hub
        if isinstance(error, BadAddress | BadAnswer) and not isinstance(error, BadProxy):
            raise NotAvailable(HubBroken(f"{pin.path}: {error}")) from error
        raise NotAvailable(unreachable_error(error)) from error


def _lost(error: ConnectionLost) -> AttemptFailed:
    why, wait_s = str(error), error.wait_s
    return AttemptFailed(
        why, is_stall=error.is_stall, is_unreached=error.is_unreached, wait_s=wait_s
    )


@dataclass(eq=False)
class HttpRoute:
    """Ranges of a repository's files over plain HTTP; remembers where the Hub redirects each."""

    client: NetClient
    repository: HubRepository
    name: str
    stall_s: float = STALL_S
    is_shared: bool = field(default=False, kw_only=True)
    _links: dict[str, str] = field(default_factory=dict)

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        # a whole file is asked for without a range: some mirrors know none
        is_part = (start, stop) != (0, pin.size_bytes)
        headers = {"Range": f"bytes={start}-{stop - 1}"} if is_part else {}
        home = self.repository.address(pin.path)
        url = link = self._links.get(pin.path, home)
        for _ in range(_MOST_HOPS):
            at_home = url == home or is_home(home, url)
            # a CDN has its own signature in the link, and must not see the token
            login = self.repository.login if at_home else {}
            answer = _ask(self, pin, "GET", url, {**headers, **login})
            # signed links expire; then ask the Hub again
            if url == link != home and answer.status in (*REDIRECTS, *_STALE_LINK):
                answer.close()
                self._links.pop(pin.path, None)
                url = link = home
                continue
            place = answer.header("Location")
            if answer.status not in REDIRECTS or not place:
                break
            answer.close()
            # With a redirect the Hub names the hash and size of the file that it leads to. Compared
            # before asking the CDN, whose headers have no hash.
            etag = answer.header("X-Linked-Etag").removeprefix("W/").strip('"')
            size = answer.header("X-Linked-Size")
            if FILE_HASH.fullmatch(etag) and len(etag) == len(pin.want) and etag != pin.want:
                wrong = wrong_bytes(f"{pin.path}: locked as {pin.want}, the server has {etag}")
                raise NotAvailable(wrong, only_this_file=True)
            if number_in(size) not in (None, pin.size_bytes):
                raise NotAvailable(_other_size(pin, size), only_this_file=True)
            try:
                url = next_address(url, place)
            except BadAnswer as error:
                raise NotAvailable(HubBroken(f"{pin.path}: the server {error}")) from error
        else:
            why = f"{pin.path}: more than {_MOST_HOPS} redirects"
            raise AttemptFailed(why, error_type=HubBroken)
        # a signed link is good for a while, and spares the Hub a request for each range
        if not at_home and answer.status < 400:
            self._links[pin.path] = url
        try:
            is_whole = check_answer(answer, pin, start, stop, is_neighbour=self.is_shared)
        except BaseException:
            answer.close()
            raise

        def read(buffer: memoryview) -> int:
            try:
                return answer.readinto(buffer)  # from the socket straight into the buffer
            except ConnectionLost as error:
                raise _lost(error) from error

        length = pin.size_bytes if is_whole else stop - start
        return ByteStream("the connection", read, answer.close, length, is_whole)


def _other_size(pin: FilePin, size: str) -> DigestMismatch:
    return wrong_bytes(f"{pin.path}: locked with {pin.size_bytes} bytes, the server has {size}")


def check_answer(
    answer: Answer, pin: FilePin, start: int, stop: int, *, is_neighbour: bool = False
) -> bool:
    """Refuse what cannot be the wanted range; returns whether the whole file comes instead."""
    if answer.status not in (200, 206):
        raise _refusal(answer, pin, is_neighbour)
    # ranges count bytes of the encoded form, which no lock knows
    if answer.header("Content-Encoding") not in ("", "identity"):
        raise AttemptFailed(
            f"{pin.path}: the server sends it compressed, though we asked it not to",
            error_type=HubBroken,
        )
    is_part = (start, stop) != (0, pin.size_bytes)
    length, want = answer.header("Content-Length"), pin.size_bytes
    if answer.status == 206:
        span = _SPAN.fullmatch(answer.header("Content-Range"))
        # it may end early: a server may send less than it was asked for (RFC 9110, 15.3.7)
        if not is_part or not span or not start == int(span[1]) <= int(span[2]) < stop:
            why = f"{pin.path}: the server sent another range than {start}-{stop - 1}"
            raise AttemptFailed(why, error_type=HubBroken)
        if span[3] not in ("*", str(pin.size_bytes)):
            raise AttemptFailed(str(_other_size(pin, span[3])), error_type=wrong_bytes)
        want = int(span[2]) + 1 - start
    if length and number_in(length) != want:
        why = f"{pin.path}: {want} bytes are locked, the server announces {length[:20]}"
        raise AttemptFailed(why, error_type=wrong_bytes)
    return is_part and answer.status == 200


def _refusal(answer: Answer, pin: FilePin, is_neighbour: bool) -> AttemptFailed | NotAvailable:
    """Turn a status into a failure that another attempt may fix, or into the final error."""
    status, code = answer.status, answer.header("X-Error-Code")
    # the Hub, and whoever serves as it does, gives the reason for people in a header
    reason = "".join(c for c in answer.header("X-Error-Message") if c.isprintable())
    why = f": {reason[:_MOST_REASON_CHARS]}" if reason else ""
    if status >= 500 or status in MAY_PASS:
        wait_s = asked_wait_s(answer.headers)
        return AttemptFailed(f"{pin.path}: the server answers {status}{why}", wait_s=wait_s)
    error: PipelineError
    wants_login = False
    if code == "GatedRepo":
        error = HubRefused(f"{pin.path}: the repository is gated, and this user has no access")
    elif code == "RevisionNotFound":
        error = RevisionMoved(f"{pin.path}: the repository no longer has the locked commit")
    elif status == 416:
        error = wrong_bytes(f"{pin.path}: the server's file is shorter than the locked one")
    elif status in (401, 403):
        text = f"{pin.path}: the server answers {status}: this user has no access"
        # a neighbour has tokens of its own, and never gets the Hub's
        error, wants_login = HubRefused(text, NEIGHBOUR_LOGIN if is_neighbour else ""), is_neighbour
    else:
        text = f"{pin.path}: the server answers {status} {code}".rstrip() + why
        hint = "It has no such file at the locked commit; see `sm120 weights lock NAME --dry-run`."
        if why:
            hint = "Name another source with --from, or ask whoever runs that server."
        error = HubRefused(text, hint)
    # the other codes are about the repository or the revision, so they hold for every file
    is_of_file = status in (404, 409, 410, 416) and code in ("", "EntryNotFound")
    return NotAvailable(error, only_this_file=is_of_file, wants_login=wants_login)


@dataclass(eq=False)
class XetRoute:
    """Ordered byte streams of the Xet store, by the hash that the Hub names for a file."""

    client: NetClient
    repository: HubRepository
    stall_s: float
    store: Any = None  # a group of downloads, and how to name a file to it; opened when needed
    name: str = "Xet"
    is_shared: bool = False
    _watch: Watchdog = field(default_factory=Watchdog)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        # the Hub's redirect names the file in the store by a header
        url = self.repository.address(pin.path)
        answer = _ask(self, pin, "HEAD", url, self.repository.login)
        answer.close()
        status, name = answer.status, answer.header(_XET_HASH)
        if not name:
            if status in MAY_PASS:
                wait_s = asked_wait_s(answer.headers)
                raise AttemptFailed(f"{pin.path}: the Hub answers {status}", wait_s=wait_s)
            why = "is not offered through Xet"
            if status >= 400:
                why = f"the Hub answers {status} {answer.header('X-Error-Code')}".rstrip()
            raise NotAvailable(SourceUnreachable(f"{pin.path}: {why}"), only_this_file=True)
        try:
            with self._guard:
                # one for all threads: each group has its own connections and token
                if self.store is None:
                    import hf_xet

                    there = self.repository
                    token = {"Authorization": f"Bearer {there.token}"} if there.token else {}
                    route = f"{there.endpoint}/api/models/{there.name}/xet-read-token"
                    group = hf_xet.XetSession().new_download_stream_group(
                        token_refresh_url=f"{route}/{there.commit}", token_refresh_headers=token
                    )
                    self.store = group, hf_xet.XetFileInfo
            group, file_info = self.store
            info = file_info(name, pin.size_bytes)
            stream = group.download_stream(info, start=start, end=stop)
        except Exception as error:  # the store's client has no common kind of error
            reason = f"{pin.path}: the Xet store refuses: {reason_of(error)}"
            raise NotAvailable(SourceUnreachable(reason), only_this_file=True) from error
        return self._body(stream, stop - start)

    def _body(self, stream: Any, length: int) -> ByteStream:
        """Wrap a stream, whose pieces vary in size; cancel it if it stalls."""
        pieces, piece = iter(stream), memoryview(b"")

        def read(buffer: memoryview) -> int:
            nonlocal piece
            why: Exception | None = None
            if not piece:
                self._watch.begin(id(stream), stream.cancel, self.stall_s)
                try:
                    piece = memoryview(next(pieces, b""))
                except Exception as error:  # the store's client has no common kind of error
                    why = error
                finally:
                    in_time = self._watch.end(id(stream))
                if not in_time:
                    raise AttemptFailed("the Xet stream stalled", is_stall=True) from why
                if why is not None:
                    raise AttemptFailed(f"Xet: {reason_of(why)}") from why
            count = min(len(buffer), len(piece))
            buffer[:count] = piece[:count]
            piece = piece[count:]
            return count

        def close() -> None:
            # a dropped, half-read stream goes on in hf_xet's own threads
            if body.n_bytes:
                stream.cancel()

        body = ByteStream("the Xet stream", read, close, length)
        return body

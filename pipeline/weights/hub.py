"""The Hub, a mirror or a neighbour: which commit a revision names, and which files it has.

Endpoint, token and offline mode are read as the Hub's own client reads them. A listing must not
go round in circles, nor go on for ever, nor lead away from the endpoint with our token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import (
    HubBroken,
    HubRefused,
    PipelineError,
    SourceUnreachable,
)
from pipeline.fetch.http import Client, unreachable
from pipeline.fetch.settings import Settings
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.net.address import linked_page, next_address, origin_of, parts_of
from pipeline.net.answer import Pages
from pipeline.net.client import MAY_PASS, Reply
from pipeline.net.failures import BadAddress, BadAnswer, BadProxy, Lost, NetError
from pipeline.net.timing import Limits, asked_wait_s
from pipeline.weights.model import MOST_FILES, FilePin

ATTEMPTS = 5
MOST_PAGE_BYTES = 64 << 20
_MOST_PAGES = 1000
_MOST_ENTRIES = 5 * MOST_FILES  # folders are listed, too
_YES = ("1", "on", "yes", "true")
_HEX = frozenset("0123456789abcdef")


def endpoint() -> str:
    """HF_ENDPOINT as it is now, else the Hub."""
    address = (os.environ.get("HF_ENDPOINT") or _default_endpoint()).rstrip("/")
    try:
        parts_of(address)
    except BadAddress as error:
        raise SourceUnreachable(f"HF_ENDPOINT: {error}", "Correct HF_ENDPOINT.") from error
    return address


def _default_endpoint() -> str:
    """The Hub's address, which its own library knows; that cannot be loaded with a wrong one."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_offline() -> bool:
    """HF_HUB_OFFLINE, as the Hub's own client understands it."""
    return _says_yes("HF_HUB_OFFLINE") or _says_yes("TRANSFORMERS_OFFLINE")


def _says_yes(name: str) -> bool:
    return os.environ.get(name, "").lower() in _YES


class _Part(BaseModel):
    """Closed for what is used, open for what is not."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Lfs(_Part):
    oid: str
    size: int


class _Entry(_Part):
    """A file as the Hub lists it."""

    path: str
    size: int
    oid: str
    lfs: _Lfs | None = None


class Hub:
    """Questions about repositories; every answer is checked before it is believed."""

    def __init__(
        self,
        settings: Settings,
        *,
        endpoint: str,
        token: str | None = None,
        first_wait_s: float = 0.5,
        limits: Limits | None = None,
    ) -> None:
        self.endpoint, self.token = endpoint, token
        # a login of ~/.netrc is not for the Hub: it has a token, or none on purpose
        self._client = Client(settings, first_wait_s=first_wait_s, limits=limits, use_netrc=False)

    def commit_of(self, repository: str, revision: str) -> str:
        """The commit that a revision names at this moment."""
        place = f"{self.endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}"
        info = _value(repository, self._ask(repository, place), any_int=True)
        commit = info.get("sha") if isinstance(info, dict) else None
        if not isinstance(commit, str) or len(commit) != 40 or set(commit) - _HEX:
            raise HubBroken(f"{repository}: {revision} is said to be commit {str(commit)[:50]!r}")
        return commit

    def files(self, repository: str, commit: str) -> list[FilePin]:
        """Every file of a commit, with its size and the hash that the Hub knows it by."""
        pins: dict[str, FilePin] = {}
        for n_entries, found in enumerate(self._entries(repository, commit), 1):
            if len(pins) > MOST_FILES or n_entries > _MOST_ENTRIES:
                raise HubBroken(f"{repository}: more than {MOST_FILES} files are listed")
            if not isinstance(found, dict) or not isinstance(found.get("type"), str):
                raise HubBroken(f"{repository}: lists what is neither a file nor a folder")
            if found["type"] != "file":
                continue
            pin = _pin(repository, found)
            if pin.path in pins:
                raise HubBroken(f"{repository}: {pin.path!r} is listed twice")
            pins[pin.path] = pin
        return list(pins.values())

    def _entries(self, repository: str, commit: str) -> Iterator[Any]:
        """What all pages of a tree list."""
        place: str | None = f"{self.endpoint}/api/models/{repository}/tree/{commit}?recursive=true"
        pages = Pages(f"{repository}: its listing", _MOST_PAGES, self._client.http.limits.pages_s)
        while place is not None:
            try:
                pages.take(place)
            except BadAnswer as error:
                raise HubBroken(str(error)) from error
            reply = self._ask(repository, place)
            entries = _value(repository, reply)
            if not isinstance(entries, list):
                raise HubBroken(f"{repository}: the answer makes no sense (no list of files)")
            yield from entries
            place = self._next_page(repository, reply)

    def _next_page(self, repository: str, reply: Reply) -> str | None:
        link = linked_page(reply.header("Link"))
        if link is None:
            return None
        try:
            place = next_address(reply.url, link)
        except BadAnswer as error:
            raise HubBroken(f"{repository}: a page {error}") from error
        if origin_of(place) != origin_of(self.endpoint):
            where = urlsplit(place).netloc
            raise HubBroken(f"{repository}: a page leads to {where}, which our token is not for")
        return place

    def _ask(self, repository: str, url: str) -> Reply:
        """Try again what may pass; give every other failure its own error."""
        login = f"Bearer {self.token}" if self.token else ""
        error: PipelineError
        for attempt in range(ATTEMPTS):
            wait_s = None
            try:
                reply = self._client.http.fetch(url, most_bytes=MOST_PAGE_BYTES, login=login)
            except Lost as lost:
                error, wait_s = SourceUnreachable(f"{repository}: {lost}"), lost.wait_s
            except NetError as failure:
                raise _failure(repository, failure) from failure
            else:
                if reply.status == 200:
                    return reply
                error, wait_s = _refusal(repository, reply), asked_wait_s(reply.headers)
                if reply.status not in MAY_PASS:
                    break
            if attempt + 1 < ATTEMPTS:
                self._client.pause(attempt, wait_s)
        raise error


def _value(repository: str, reply: Reply, *, any_int: bool = False) -> Any:
    try:
        return read_json(reply.data, most_bytes=MOST_PAGE_BYTES, any_int=any_int)
    except JsonInvalid as error:
        raise HubBroken(f"{repository}: the answer makes no sense ({error})") from error


def _failure(repository: str, error: NetError) -> PipelineError:
    if isinstance(error, BadAnswer):
        return HubBroken(f"{repository}: {error}")
    if isinstance(error, BadAddress) and not isinstance(error, BadProxy):
        return SourceUnreachable(f"{repository}: {error}", "Correct HF_ENDPOINT.")
    return unreachable(error)


def _pin(repository: str, found: dict[str, Any]) -> FilePin:
    try:
        entry = _Entry.model_validate(found)
        if entry.lfs is None:
            return FilePin(path=entry.path, size_bytes=entry.size, git_sha1=entry.oid)
        if entry.lfs.size != entry.size:
            raise HubBroken(f"{repository}: {entry.path} is said to have two sizes")
        return FilePin(path=entry.path, size_bytes=entry.size, sha256=entry.lfs.oid)
    except ValidationError as error:
        first = error.errors()[0]
        words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise HubBroken(f"{repository}: {str(found.get('path'))[:100]!r}: {words}") from error


def _refusal(repository: str, reply: Reply) -> PipelineError:
    status, code = reply.status, reply.header("X-Error-Code")
    if code == "GatedRepo":
        return HubRefused(f"{repository}: is gated, and not open to this user")
    if code == "RevisionNotFound":
        return HubRefused(
            f"{repository}: has no such revision", "Correct `revision` in the weights spec."
        )
    # the Hub does not tell a stranger whether a repository is private or not there
    if code == "RepoNotFound" or status == 401:
        return HubRefused(f"{repository}: is not there, or not for this user ({status})")
    if status == 403:
        return HubRefused(f"{repository}: the Hub answers {status}")
    return SourceUnreachable(f"{repository}: the Hub answers {status}")


def saved_token() -> str | None:
    """HF_TOKEN, or what `hf auth login` left; none where the user forbids to send it unasked."""
    if _says_yes("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    # it knows all the places where a login may lie, but cannot be loaded with a wrong endpoint
    endpoint()
    from huggingface_hub import get_token

    return get_token()


def may_use_xet() -> bool:
    """Whether the user has not switched it off."""
    return not _says_yes("HF_HUB_DISABLE_XET")

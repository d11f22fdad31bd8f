"""The Hub, a mirror or a neighbour: which commit a revision names, and which files it has.

It reads endpoint, token and offline mode as the Hub's own client does. A listing must not
have pages that repeat, pages without end, or pages elsewhere that would get our token.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.core.errors import HubBroken, HubRefused, PipelineError, SourceUnreachable
from pipeline.core.foreign_json import JsonInvalid, read_json, value_at
from pipeline.core.net import failures
from pipeline.core.net.address import linked_page, next_address, origin_of, split_address
from pipeline.core.net.answer import Pages
from pipeline.core.net.client import MAY_PASS, Reply
from pipeline.core.net.http import NetClient, unreachable_error
from pipeline.core.net.settings import NetworkSettings
from pipeline.core.net.timing import HttpLimits, asked_wait_s
from pipeline.core.yaml_file import mistakes
from pipeline.weights.model import COMMIT, MOST_FILES, FilePin

MOST_PAGE_BYTES = 64 << 20  # 1,000 entries have some hundred kB
_MOST_PAGES = 1000  # the Hub has 1,000 entries on a page, mirrors may have fewer
_MOST_ENTRIES = 5 * MOST_FILES  # folders are listed too
_YES = ("1", "on", "yes", "true")  # as huggingface_hub reads its switches
_HUB_DOWN = "Check the network and HF_ENDPOINT, then run it again."


def endpoint() -> str:
    """HF_ENDPOINT as it is now, else the Hub."""
    address = os.environ.get("HF_ENDPOINT")
    if not address:
        # imported late: importing it fails if HF_ENDPOINT is malformed
        from huggingface_hub import constants

        address = constants.ENDPOINT
    try:
        split_address(address)
    except failures.BadAddress as error:
        raise SourceUnreachable(f"HF_ENDPOINT: {error}", "Correct HF_ENDPOINT.") from error
    return address.rstrip("/")


def is_offline() -> bool:
    """HF_HUB_OFFLINE, as the Hub's own client understands it."""
    return is_on("HF_HUB_OFFLINE") or is_on("TRANSFORMERS_OFFLINE")


def is_on(name: str) -> bool:
    """Whether a switch of the Hub's own client is set."""
    return os.environ.get(name, "").lower() in _YES


class _HubModel(BaseModel):
    """Strict about the fields that are used; the Hub may add others."""

    # strict: a size that comes as text or a float is a fault, not something to convert
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Lfs(_HubModel):
    oid: str
    size: int


class _Entry(_HubModel):
    """A file as the Hub lists it."""

    path: str
    size: int
    oid: str
    lfs: _Lfs | None = None


class Hub:
    """Asks about repositories, and checks every answer before use."""

    def __init__(
        self,
        settings: NetworkSettings,
        *,
        endpoint: str,
        token: str | None = None,
        first_wait_s: float = 0.5,
        limits: HttpLimits | None = None,
        attempts: int | None = None,
    ) -> None:
        self.endpoint, self.token, self._attempts = endpoint, token, attempts
        # a login of ~/.netrc is not for the Hub: it has a token, or none on purpose
        self._client = NetClient(
            settings, first_wait_s=first_wait_s, limits=limits, use_netrc=False
        )

    def commit_of(self, repository: str, revision: str) -> str:
        """The commit that a revision names at this moment."""
        place = f"{self.endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}"
        info = _value(repository, self._ask(repository, place), any_int=True)
        commit = value_at(info, "sha")
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise HubBroken(f"{repository}: the commit of {revision} is {str(commit)[:50]!r}")
        return commit

    def files(self, repository: str, commit: str) -> list[FilePin]:
        """Every file of a commit, with its size and the hash that the Hub knows it by."""
        pins: dict[str, FilePin] = {}
        n_entries = 0
        place: str | None = f"{self.endpoint}/api/models/{repository}/tree/{commit}?recursive=true"
        pages = Pages(f"{repository}: its listing", _MOST_PAGES, self._client.limits.pages_s)
        while place is not None:
            try:
                pages.take(place)
            except failures.BadAnswer as error:
                raise HubBroken(str(error)) from error
            reply = self._ask(repository, place)
            entries = _value(repository, reply)
            if not isinstance(entries, list):
                raise HubBroken(f"{repository}: the answer is not a list of files")
            n_entries += len(entries)
            for entry in entries:
                if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                    raise HubBroken(f"{repository}: its listing has an entry without a type")
                pin = _pin(repository, entry) if entry["type"] == "file" else None
                # nobody knows which of the two a client would download
                if pin and pin.path in pins:
                    raise HubBroken(f"{repository}: {pin.path!r} is listed twice")
                pins |= {pin.path: pin} if pin else {}
            # while it arrives, not at the end: an endless listing must not fill the memory first
            if len(pins) > MOST_FILES or n_entries > _MOST_ENTRIES:
                raise HubBroken(f"{repository}: more than {MOST_FILES} files are listed")
            place = linked_page(reply.header("Link"))
            try:
                place = next_address(reply.url, place) if place is not None else None
            except failures.BadAnswer as error:
                raise HubBroken(f"{repository}: a page {error}") from error
            if place is not None and origin_of(place) != origin_of(self.endpoint):
                where = urlsplit(place).netloc
                raise HubBroken(
                    f"{repository}: the next page is at {where}, which must not get our token"
                )
        return list(pins.values())

    def _ask(self, repository: str, url: str) -> Reply:
        """Ask, and retry failures that may pass; every other failure has its own error."""
        login = f"Bearer {self.token}" if self.token else ""

        def once() -> Reply:
            reply = self._client.fetch(url, MOST_PAGE_BYTES, login=login)
            if reply.status in MAY_PASS:
                wait_s = asked_wait_s(reply.headers)
                raise failures.Lost(f"the Hub answers {reply.status}", wait_s=wait_s)
            return reply

        try:
            reply = self._client.retry_policy.retried(once, self._attempts)
        except failures.NetError as error:
            if isinstance(error, failures.BadAnswer):
                raise HubBroken(f"{repository}: {error}") from error
            # settings of this machine have hints of their own
            if isinstance(error, failures.BadProxy | failures.BadHeader | failures.Untrusted):
                raise unreachable_error(error) from error
            hint = "Correct HF_ENDPOINT." if isinstance(error, failures.BadAddress) else _HUB_DOWN
            raise SourceUnreachable(f"{repository}: {error}", hint) from error
        if reply.status != 200:
            raise _refusal(repository, reply)
        return reply


def _value(repository: str, reply: Reply, *, any_int: bool = False) -> Any:
    try:
        return read_json(reply.data, most_bytes=MOST_PAGE_BYTES, any_int=any_int)
    except JsonInvalid as error:
        raise HubBroken(f"{repository}: the answer is not valid JSON ({error})") from error


def _pin(repository: str, listed: dict[str, Any]) -> FilePin:
    try:
        entry = _Entry.model_validate(listed)
        # for a large file `oid` is git's hash of its LFS pointer; that of its bytes is under `lfs`
        if entry.lfs is None:
            return FilePin(path=entry.path, size_bytes=entry.size, git_sha1=entry.oid)
        # which of the two the bytes will have is not known
        if entry.lfs.size != entry.size:
            raise HubBroken(f"{repository}: {entry.path} is listed with two sizes")
        return FilePin(path=entry.path, size_bytes=entry.size, sha256=entry.lfs.oid)
    except ValidationError as error:
        why = f"{str(listed.get('path'))[:100]!r}: {mistakes(error)}"
        raise HubBroken(f"{repository}: {why}") from error


def _refusal(repository: str, reply: Reply) -> PipelineError:
    status, code = reply.status, reply.header("X-Error-Code")
    if code == "GatedRepo":
        return HubRefused(f"{repository}: is gated, and this user has no access")
    if code == "RevisionNotFound":
        return HubRefused(
            f"{repository}: has no such revision",
            "Correct it behind the @, or `revision` in the weights spec.",
        )
    # the Hub hides whether a repository exists from those who may not read it
    if code == "RepoNotFound" or status == 401:
        return HubRefused(
            f"{repository}: does not exist, or this user has no access ({status})",
            f"Correct the name; if it is right: {HubRefused.hint[0].lower()}{HubRefused.hint[1:]}",
        )
    if status == 403:
        return HubRefused(f"{repository}: the Hub answers {status}")
    return SourceUnreachable(f"{repository}: the Hub answers {status}", _HUB_DOWN)


def saved_token() -> str | None:
    """HF_TOKEN, or the token of `hf auth login`; None if HF_HUB_DISABLE_IMPLICIT_TOKEN is set."""
    if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    # the library knows all the places of a login, but importing it fails with a wrong endpoint
    endpoint()
    from huggingface_hub import get_token

    return get_token()

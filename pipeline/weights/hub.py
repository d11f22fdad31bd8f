"""The Hub, a mirror or a neighbour, asked through `huggingface_hub`: which commit, which files.

Endpoint, token and offline mode are read as the Hub's own client reads them. On top of what it
checks, a listing must not go round in circles nor lead away from the endpoint with our token.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory
from pydantic import ValidationError

from pipeline.errors import (
    HubBroken,
    HubRefused,
    PipelineError,
    SourceUnreachable,
)
from pipeline.fetch.settings import Settings, masked
from pipeline.weights.http_answer import retry_after_s
from pipeline.weights.model import MOST_FILES, FilePin

ATTEMPTS = 5
TIMEOUT_S = 30.0
_MAY_PASS = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT_S = 120.0
_YES = ("1", "on", "yes", "true")
Answer = TypeVar("Answer")


def endpoint() -> str:
    """HF_ENDPOINT as it is now, else the Hub."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """HF_HUB_OFFLINE, as the Hub's own client understands it."""
    return _says_yes("HF_HUB_OFFLINE") or _says_yes("TRANSFORMERS_OFFLINE")


def _says_yes(name: str) -> bool:
    return os.environ.get(name, "").lower() in _YES


class Hub:
    """Questions about repositories; every answer is checked before it is believed."""

    def __init__(
        self,
        settings: Settings,
        *,
        endpoint: str,
        token: str | None = None,
        first_wait_s: float = 0.5,
    ) -> None:
        self.endpoint, self.token = endpoint, token
        self._settings, self._first_wait_s = settings, first_wait_s
        self._api = HfApi(endpoint=endpoint, token=token or False, library_name="sm120-pipeline")

    def commit_of(self, repository: str, revision: str) -> str:
        """The commit that a revision names at this moment."""
        info = self._asked(
            repository,
            lambda: self._api.model_info(repository, revision=revision, timeout=TIMEOUT_S),
            ATTEMPTS,
        )
        commit = info.sha or ""
        if len(commit) != 40 or set(commit) - set("0123456789abcdef"):
            raise HubBroken(f"{repository}: {revision} is said to be commit {commit[:50]!r}")
        return commit

    def files(self, repository: str, commit: str) -> list[FilePin]:
        """Every file of a commit, with its size and the hash that the Hub knows it by."""
        # the Hub's client itself asks again for pages, as it does not for anything else
        entries = self._asked(repository, lambda: self._list(repository, commit), 1)
        pins: dict[str, FilePin] = {}
        for entry in entries:
            if entry.path in pins:
                raise HubBroken(f"{repository}: {entry.path!r} is listed twice")
            pins[entry.path] = _pin(repository, entry)
        return list(pins.values())

    def _list(self, repository: str, commit: str) -> list[RepoFile]:
        found = []
        for entry in self._api.list_repo_tree(repository, recursive=True, revision=commit):
            if isinstance(entry, RepoFile):
                found.append(entry)
            if len(found) > MOST_FILES:
                raise HubBroken(f"{repository}: more than {MOST_FILES} files are listed")
        return found

    def _asked(self, repository: str, ask: Callable[[], Answer], attempts: int) -> Answer:
        """Try again what may pass; give every other failure its own ending."""
        for attempt in range(attempts):
            try:
                with _guarded(self.endpoint, self._settings):
                    return ask()
            except HfHubHTTPError as error:
                ending, wait_s = (
                    _ending(repository, error),
                    retry_after_s(error.response.headers.get("Retry-After", "")),
                )
                if error.response.status_code not in _MAY_PASS:
                    raise ending from error
            except httpx2.HTTPError as error:
                words = masked(" ".join(str(error).split())) or type(error).__name__
                ending, wait_s = SourceUnreachable(f"{repository}: {words}"), None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                # what is not JSON, or is not the JSON of a listing
                words = " ".join(str(error).split())[:100]
                raise HubBroken(f"{repository}: the answer makes no sense ({words})") from error
            if attempt + 1 < attempts:
                pause_s = self._first_wait_s * 2**attempt if wait_s is None else wait_s
                time.sleep(min(pause_s, _LONGEST_WAIT_S))
        raise ending


def _pin(repository: str, entry: RepoFile) -> FilePin:
    try:
        if entry.lfs is None:
            return FilePin(path=entry.path, size_bytes=entry.size, git_sha1=entry.blob_id)
        if entry.lfs.size != entry.size:
            raise HubBroken(f"{repository}: {entry.path} is said to have two sizes")
        return FilePin(path=entry.path, size_bytes=entry.size, sha256=entry.lfs.sha256)
    except ValidationError as error:
        first = error.errors()[0]
        words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise HubBroken(f"{repository}: {str(entry.path)[:100]!r}: {words}") from error


def _ending(repository: str, error: HfHubHTTPError) -> PipelineError:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return HubRefused(f"{repository}: is gated, and not open to this user")
    if isinstance(error, RevisionNotFoundError):
        return HubRefused(
            f"{repository}: has no such revision", "Correct `revision` in the weights wish."
        )
    if isinstance(error, RepositoryNotFoundError):
        return HubRefused(f"{repository}: is not there, or not for this user ({status})")
    if status in (401, 403):
        return HubRefused(f"{repository}: the Hub answers {status}")
    return SourceUnreachable(f"{repository}: the Hub answers {status}")


class _Guard:
    """Watches a listing: pages must be new ones, and at the endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._origin = urlsplit(endpoint)[:2]
        self._next_pages: set[str] = set()

    def look_at_request(self, request: httpx2.Request) -> None:
        here = urlsplit(str(request.url))
        if here[:2] != self._origin and "authorization" in request.headers:
            raise HubBroken(f"an answer leads to {here.netloc}, which our token is not for")

    def look_at_answer(self, answer: httpx2.Response) -> None:
        page = answer.links.get("next", {}).get("url")
        if page is None or answer.status_code != 200:
            return
        if page in self._next_pages:
            raise HubBroken("the pages of a listing go round in a circle")
        self._next_pages.add(page)


_ONE_AT_A_TIME = threading.Lock()  # the Hub's client has one factory a process


@contextmanager
def _guarded(endpoint: str, settings: Settings) -> Iterator[None]:
    """The Hub's client with our certificates, proxy and eyes; afterwards as it was."""
    guard = _Guard(endpoint)

    def client() -> httpx2.Client:
        return httpx2.Client(
            event_hooks={"request": [guard.look_at_request], "response": [guard.look_at_answer]},
            follow_redirects=True,
            timeout=TIMEOUT_S,
            proxy=settings.proxy,
            verify=ssl.create_default_context(cafile=settings.ca_file),
        )

    with _ONE_AT_A_TIME:
        set_client_factory(client)
        try:
            yield
        finally:
            set_client_factory(default_client_factory)


def saved_token() -> str | None:
    """HF_TOKEN, or what `hf auth login` left; none where the user forbids to send it unasked."""
    return None if _says_yes("HF_HUB_DISABLE_IMPLICIT_TOKEN") else get_token()


def may_use_xet() -> bool:
    """Whether the user has not switched it off."""
    return not _says_yes("HF_HUB_DISABLE_XET")

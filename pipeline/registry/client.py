"""One registry: requests that are tried again where that may help, and never where it harms."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from pipeline import log
from pipeline.errors import (
    Interrupted,
    NotInRegistry,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
)
from pipeline.registry.answer import Answer, Lost, Refusal
from pipeline.registry.auth import Authority, Scope
from pipeline.registry.login import find_login
from pipeline.registry.reference import Reference, is_loopback
from pipeline.registry.transport import Body, Transport, origin_of
from pipeline.registry.trust import certificate_files, tls_context
from pipeline.registry.words import error_words, seconds, shown, words

ATTEMPTS = 5
LONGEST_WAIT_S = 30.0
_SAID_FROM_S = 1.0  # shorter waits nobody wonders about
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_MOST_ERROR_BYTES = 8192
MOST_ANSWER_BYTES = 1 << 16
_BREAKS = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Access:
    """How a registry may be reached."""

    ca_file: Path | None = None
    insecure_http: bool = False
    first_wait_s: float = 0.5


class Client:
    """A registry and how to talk to it; safe for several threads."""

    def __init__(self, reference: Reference, access: Access | None = None) -> None:
        self._access = access or Access()
        self.name = reference.registry
        self._guard, self._said_at = threading.Lock(), 0.0
        self._host_port = reference.host_port
        self.transport = Transport(lambda: tls_context(self._host_port, self._access.ca_file))
        self.base = self._find_base()
        self.authority = Authority(
            lambda: find_login(reference),
            self.transport.request,
            plain=self.base.startswith("http://"),
        )

    def _find_base(self) -> str:
        """https, but http where it was asked for, and on loopback where nothing else answers."""
        if self._access.insecure_http:
            return f"http://{self._host_port}"
        has_own = self._access.ca_file or certificate_files(self._host_port)
        if is_loopback(self._host_port) and not has_own and self._speaks_plain_http():
            return f"http://{self._host_port}"
        return f"https://{self._host_port}"

    def _speaks_plain_http(self) -> bool:
        url = f"http://{self._host_port}/v2/"
        try:
            answer = self.transport.request("GET", url, {})
            answer.read(_MOST_ERROR_BYTES)
        except _BREAKS:
            return False
        finally:
            self.transport.forget(url)
        # Go's servers answer plain http on a TLS port with 400 and a sentence
        return answer.status != 400

    def ask(
        self,
        method: str,
        place: str,
        *,
        scope: Scope,
        good: tuple[int, ...] = (200,),
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        most_bytes: int = MOST_ANSWER_BYTES,
    ) -> Answer:
        """A whole answer with a good status; what may pass is tried again, the rest is an error."""
        failed: Lost | None = None
        for attempt in range(ATTEMPTS):
            if failed:
                self.pause(attempt - 1, failed)
            try:
                answer = self.once(
                    method, place, scope=scope, good=good, headers=headers, body=body
                )
                return replace(answer, data=self.read(answer, most_bytes))
            except Lost as lost:
                failed = lost
        raise RegistryUnreachable(f"{self.name}: {failed}") from failed

    def once(
        self,
        method: str,
        place: str,
        *,
        scope: Scope,
        good: tuple[int, ...] = (200,),
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> Answer:
        """One try, with login and redirects; `Lost` where another try may help."""
        url = place if "://" in place else f"{self.base}{place}"
        login = self.authority.header(scope)
        fresh, hops = False, 0
        while True:
            answer = self._send(method, self._checked(url), headers, body, login)
            if answer.status in good:
                return answer
            if answer.status in _REDIRECTS and hops < _MOST_REDIRECTS:
                url, hops = answer.location, hops + 1
                self._drop(answer)
                continue
            if answer.status == 401 and self._is_home(url) and not fresh:
                asked = answer.raw.headers.get_all("WWW-Authenticate") or []
                self._drop(answer)
                login, fresh = self._authorize(scope, login, asked), True
                continue
            raise self._failure(method, answer)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: Body | None,
        login: str,
    ) -> Answer:
        sent = dict(headers or {})
        if login and self._is_home(url):
            sent["Authorization"] = login
        try:
            raw = self.transport.request(method, url, sent, body)
            return Answer(raw.status, url, raw)
        except ssl.SSLCertVerificationError as error:
            raise RegistryUnreachable(
                f"{shown(url)}: its certificate is not trusted: {error.verify_message}",
                "Name its CA with --ca FILE, or put it where Docker looks for it.",
            ) from error
        except _BREAKS as error:
            if self.transport.stop.is_set():
                raise Interrupted("stopped") from error
            raise Lost(f"{shown(url)}: {words(error)}") from error

    def _authorize(self, scope: Scope, login: str, asked: list[str]) -> str:
        try:
            return self.authority.answer(scope, login, asked)
        except _BREAKS as error:
            raise Lost(f"the token service: {words(error)}") from error
        except RegistryRefused as error:
            raise RegistryRefused(f"{self.name}: {error}", error.hint) from error

    def _is_home(self, url: str) -> bool:
        """Logins go to the registry itself and nowhere else."""
        return origin_of(url) == origin_of(self.base)

    def _checked(self, url: str) -> str:
        """An address that a server gave us: never from https to http."""
        try:
            parts, home = urlsplit(url), urlsplit(self.base)
            is_known = parts.scheme in ("http", "https") and bool(parts.hostname)
            here = (parts.hostname or "").lower() == (home.hostname or "").lower()
            _ = parts.port
        except ValueError:
            is_known = here = False
            parts = home = urlsplit(self.base)
        if not is_known or "@" in parts.netloc:
            raise RegistryBroken(f"{self.name}: sends us to {shown(url)!r}, which is no address")
        if parts.scheme == "https" or home.scheme == "http":
            return url
        if here:
            # behind a TLS proxy that does not say so, registries call themselves http
            return parts._replace(scheme="https", netloc=home.netloc).geturl()
        raise RegistryBroken(f"{self.name}: sends us from https to {shown(url)}")

    def _failure(self, method: str, answer: Answer) -> Exception:
        said, codes = error_words(self._error_body(answer))
        self._drop(answer)
        what = f"{method} {shown(answer.url)}"
        if answer.status in _PASSING:
            return Lost(f"{what}: answers {answer.status}{said}", answer.header("Retry-After"))
        if answer.status in (401, 403):
            return RegistryRefused(f"{what}: refused with {answer.status}{said}")
        if answer.status == 404:
            return NotInRegistry(f"{what}: not there{said}")
        return Refusal(f"{what}: answers {answer.status}{said}", answer.status, codes)

    def _error_body(self, answer: Answer) -> bytes:
        try:
            return answer.raw.read(_MOST_ERROR_BYTES)
        except _BREAKS:
            return b""

    def _drop(self, answer: Answer) -> None:
        """Read what little is left, so that the connection can be used again, or close it."""
        try:
            answer.raw.read(_MOST_ERROR_BYTES)
        except _BREAKS:
            self.transport.forget(answer.url)
            return
        if not answer.raw.isclosed():
            self.transport.forget(answer.url)

    def read(self, answer: Answer, most_bytes: int) -> bytes:
        """A small body, whole; `Lost` where it broke off."""
        length = answer.raw.length  # none for chunked answers, nothing for HEAD
        try:
            data = answer.raw.read(most_bytes + 1)
        except _BREAKS as error:
            self.transport.forget(answer.url)
            raise Lost(f"{shown(answer.url)}: {words(error)}") from error
        if len(data) > most_bytes:
            self.transport.forget(answer.url)
            raise RegistryBroken(f"{shown(answer.url)}: is larger than {most_bytes} bytes")
        if length is not None and len(data) < length:
            self.transport.forget(answer.url)
            raise Lost(f"{shown(answer.url)}: ended after {len(data)} of {length} bytes")
        return data

    def pause(self, attempt: int, lost: Lost | None = None) -> None:
        """Wait longer each time, or as long as the server asks; a stop ends it."""
        wait_s = self._access.first_wait_s * 2**attempt
        asked_s = seconds(lost.retry_after) if lost else None
        wait_s = min(wait_s if asked_s is None else asked_s, LONGEST_WAIT_S)
        if lost and wait_s >= _SAID_FROM_S:
            self._say_once(f"  {lost}; trying again in {wait_s:.0f} s")
        if self.transport.stop.wait(wait_s):
            raise Interrupted("stopped")

    def _say_once(self, words: str) -> None:
        """What several threads meet at once is told once."""
        now = time.monotonic()
        with self._guard:
            is_new, self._said_at = now - self._said_at >= _SAID_FROM_S, now
        if is_new:
            log.say(words)

    def hang_up(self) -> None:
        """End everything under way."""
        self.transport.hang_up()

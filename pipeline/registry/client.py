"""One registry: requests with login, redirects and retries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar
from urllib.parse import urljoin

from pipeline.errors import (
    Interrupted,
    NotInRegistry,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
)
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.net.address import clean, is_loopback, next_address, origin_of, shown
from pipeline.net.answer import Answer
from pipeline.net.client import MAY_PASS, REDIRECTS, Body, Reply
from pipeline.net.client import Client as HttpClient
from pipeline.net.failures import (
    BadAddress,
    BadAnswer,
    BadHeader,
    BadProxy,
    Lost,
    NetError,
    Untrusted,
)
from pipeline.net.timing import Patience, asked_wait_s
from pipeline.oci.reference import Reference
from pipeline.registry.access import Access
from pipeline.registry.auth import MOST_TOKEN_BYTES, Authority, Scope
from pipeline.registry.docker_config import certificate_files, find_login, tls_context

Item = TypeVar("Item")
Result = TypeVar("Result")

# registries redirect blobs once, to their storage
_MOST_REDIRECTS = 5
# answers to uploads and errors; manifests and blobs have limits of their own
MOST_ANSWER_BYTES = 1 << 16
# of an error body a line is shown; the rest may be somebody's whole web page
_MOST_ERROR_BYTES = 8192


class Refusal(RegistryBroken):
    """An unexpected status; some callers can handle it by its status or codes."""

    def __init__(self, message: str, status: int, codes: frozenset[str]) -> None:
        super().__init__(message)
        self.status, self.codes = status, codes


class RegistryClient:
    """A registry and how to talk to it; safe for several threads."""

    def __init__(self, reference: Reference, access: Access | None = None) -> None:
        self._access = access or Access()
        self.name = reference.registry
        self._host_port = reference.host_port
        self._http = HttpClient(
            make_context=lambda: tls_context(self._host_port, self._access.ca_file),
            limits=self._access.limits,
        )
        self.stop, self.pages_s = self._http.stop, self._access.limits.pages_s
        self.patience = Patience(self.stop, self._access.first_wait_s)
        self.base = self._find_base()
        self.authority = Authority(
            lambda: find_login(reference),
            self._ask_service,
            plain=self.base.startswith("http://"),
        )

    def _find_base(self) -> str:
        """https, but http where it was asked for, and on loopback where nothing else answers."""
        if self._access.insecure_http:
            return f"http://{self._host_port}"
        # who keeps a certificate for a registry on this machine expects it to speak TLS
        has_own = self._access.ca_file or certificate_files(self._host_port)
        if is_loopback(self._host_port) and not has_own and self._speaks_plain_http():
            return f"http://{self._host_port}"
        return f"https://{self._host_port}"

    def _speaks_plain_http(self) -> bool:
        url = f"http://{self._host_port}/v2/"
        try:
            with self._http.ask("GET", url) as answer:
                pass
        except NetError:
            return False
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
    ) -> Reply:
        """A whole answer with a good status; temporary failures are tried again."""

        def once() -> Reply:
            answer = self.once(method, place, scope=scope, good=good, headers=headers, body=body)
            return self.read(answer, most_bytes)

        try:
            return self.patience.retried(once)
        except Lost as lost:
            raise RegistryUnreachable(f"{self.name}: {lost}") from lost

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
            # storage behind a registry is another host: the login is sent to `_is_home` only
            if answer.status in REDIRECTS and hops < _MOST_REDIRECTS:
                answer.drain()
                url, hops = location_of(answer), hops + 1
                continue
            # only once: a second 401 with a fresh token means that it is not allowed
            if answer.status == 401 and self._is_home(url) and not fresh:
                asked = answer.all_headers("WWW-Authenticate")
                answer.drain()
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
            return self._http.ask(method, url, headers=sent, body=body)
        except Untrusted as error:
            raise RegistryUnreachable(
                str(error), "Name its CA with --ca FILE, or put it where Docker looks for it."
            ) from error
        except BadHeader as error:
            hint = "`docker login REGISTRY` keeps a new login in the place of the damaged one."
            raise RegistryRefused(str(error), hint) from error
        except BadProxy as error:
            hint = "Correct it where it is set: HTTPS_PROXY, HTTP_PROXY or ALL_PROXY."
            raise RegistryUnreachable(str(error), hint) from error
        except BadAddress as error:
            raise RegistryBroken(f"{self.name}: redirects to {error}") from error
        except BadAnswer as error:
            raise RegistryBroken(f"{self.name}: {error}") from error

    def _ask_service(
        self, method: str, url: str, headers: dict[str, str], body: Body | None
    ) -> Reply:
        """A token service's answer, whole; it may be another server with another CA."""
        answer = self._send(method, url, headers, body, "")
        return self.read(answer, MOST_TOKEN_BYTES)

    def _authorize(self, scope: Scope, login: str, asked: list[str]) -> str:
        try:
            return self.authority.answer(scope, login, asked)
        except Lost as error:
            raise Lost(f"the token service: {error}", wait_s=error.wait_s) from error
        except RegistryRefused as error:
            raise RegistryRefused(f"{self.name}: {error}", error.hint) from error

    def _is_home(self, url: str) -> bool:
        """Logins go to the registry itself and nowhere else."""
        return origin_of(url) == origin_of(self.base)

    def _checked(self, url: str) -> str:
        """An address that a server gave us: never from https to http."""
        try:
            return next_address(self.base, url)
        except BadAnswer as error:
            raise RegistryBroken(f"{self.name}: {error}") from error

    def _failure(self, method: str, answer: Answer) -> Exception:
        reason, codes = _error_message(answer)
        what = f"{method} {shown(answer.url)}"
        if answer.status in MAY_PASS:
            wait_s = asked_wait_s(answer.headers)
            return Lost(f"{what}: answers {answer.status}{reason}", wait_s=wait_s)
        if answer.status in (401, 403):
            return RegistryRefused(f"{what}: refused with {answer.status}{reason}")
        if answer.status == 404:
            return NotInRegistry(f"{what}: not found{reason}")
        return Refusal(f"{what}: answers {answer.status}{reason}", answer.status, codes)

    def read(self, answer: Answer, most_bytes: int) -> Reply:
        """A small answer, whole; `Lost` where the connection broke."""
        try:
            return Reply(answer.status, answer.url, answer.headers, answer.read(most_bytes))
        except BadAnswer as error:
            raise RegistryBroken(str(error)) from error

    def each(
        self, jobs: int, items: Iterable[Item], work: Callable[[Item], Result]
    ) -> list[Result]:
        """Several transfers in parallel, results in order; the first failure ends them all."""
        listed = list(items)
        if len(listed) <= 1 or jobs <= 1:
            return [work(item) for item in listed]
        with ThreadPoolExecutor(min(jobs, len(listed))) as pool:
            futures = [pool.submit(work, item) for item in listed]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                errors = [e for e in (f.exception() for f in done) if e is not None]
                # transfers that were stopped because another failed only raise Interrupted
                for error in sorted(errors, key=lambda e: isinstance(e, Interrupted)):
                    raise error
                return [f.result() for f in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                self.hang_up()
                raise

    def hang_up(self) -> None:
        """End everything under way."""
        self._http.hang_up()


def location_of(answer: Reply | Answer) -> str:
    """The `Location` of an answer as a whole address."""
    place = answer.header("Location")
    if not place:
        raise RegistryBroken(f"{shown(answer.url)}: answers {answer.status} without a Location")
    try:
        return urljoin(answer.url, place)
    except ValueError as error:
        raise RegistryBroken(
            f"{shown(answer.url)}: redirects to {shown(place)!r}, which is not a valid address"
        ) from error


def _error_message(answer: Answer) -> tuple[str, frozenset[str]]:
    """The message of a registry's error body, and its error codes.

    https://github.com/opencontainers/distribution-spec/blob/main/spec.md#error-codes
    """
    try:
        data = answer.read(_MOST_ERROR_BYTES)
        errors = read_json(data, most_bytes=_MOST_ERROR_BYTES)["errors"]
        rows = [(str(e.get("code", "")), str(e.get("message", ""))) for e in errors[:3]]
    except (NetError, JsonInvalid, KeyError, TypeError, AttributeError):
        return "", frozenset()
    text = "; ".join(" ".join(row) for row in rows)
    return (f" ({clean(text)})" if text else ""), frozenset(code for code, _ in rows)

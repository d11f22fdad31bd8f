"""One registry: requests with login, redirects and retries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urljoin

from pipeline.artifacts.oci.reference import ImageReference
from pipeline.artifacts.registry import auth
from pipeline.artifacts.registry.access import Access
from pipeline.core import errors
from pipeline.core.errors import RegistryBroken, RegistryRefused, RegistryUnreachable
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.net import failures
from pipeline.core.net.address import (
    is_loopback,
    next_address,
    origin_of,
    shown_address,
    without_controls,
)
from pipeline.core.net.answer import Answer
from pipeline.core.net.client import MAY_PASS, REDIRECTS, Body, Reply
from pipeline.core.net.client import Client as HttpClient
from pipeline.core.net.failures import BadAnswer, Lost, NetError
from pipeline.core.net.timing import RetryPolicy, asked_wait_s

Item = TypeVar("Item")
Result = TypeVar("Result")

# registries redirect blobs once, to their storage
_MOST_REDIRECTS = 5
# answers to uploads and errors; manifests and blobs have limits of their own
MOST_ANSWER_BYTES = 1 << 16
# a line of an error body is shown; the rest may be a whole web page
_MOST_ERROR_BYTES = 8192


class Refusal(RegistryBroken):
    """An unexpected status; some callers can handle it by its status or codes."""

    def __init__(self, message: str, status: int, codes: frozenset[str]) -> None:
        super().__init__(message)
        self.status, self.codes = status, codes


@dataclass(frozen=True)
class RegistryRequest:
    """What to ask a registry for: a path of its API or a whole address."""

    method: str
    place: str
    scope: auth.Scope
    good: tuple[int, ...] = (200,)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | None = None


class RegistryClient:
    """A registry and how to talk to it; safe for several threads."""

    def __init__(self, reference: ImageReference, access: Access | None = None) -> None:
        allowed, host_port = access or Access(), reference.host_port
        ca_file, self.name = allowed.ca_file, reference.registry
        self._http = HttpClient(
            make_context=lambda: auth.registry_context(host_port, ca_file),
            limits=allowed.limits,
        )
        self.stop, self.pages_s = self._http.stop, allowed.limits.pages_s
        self.hang_up = self._http.hang_up  # ends everything under way
        self.retry_policy = RetryPolicy(self.stop, allowed.first_wait_s)
        is_plain = allowed.insecure_http
        # a certificate for a registry on this machine means that it speaks TLS
        has_own = ca_file or auth.certificate_files(host_port)
        if not is_plain and is_loopback(host_port) and not has_own:
            # https, but http on loopback where nothing else answers
            try:
                with self._http.ask("GET", f"http://{host_port}/v2/") as answer:
                    # Go's servers answer plain http on a TLS port with 400 and a sentence
                    is_plain = answer.status != 400
            except NetError:
                pass
        self.base = f"{'http' if is_plain else 'https'}://{host_port}"

        self.authority = auth.Authority(
            lambda: auth.find_login(reference),
            # a token service may be another server with another CA
            lambda *request: self.read(self._send(*request), auth.MOST_TOKEN_BYTES),
            plain=is_plain,
        )

    def ask(self, request: RegistryRequest, most_bytes: int = MOST_ANSWER_BYTES) -> Reply:
        """Returns a whole answer with a good status; retries temporary failures."""
        try:
            return self.retry_policy.retried(lambda: self.read(self.once(request), most_bytes))
        except Lost as lost:
            raise RegistryUnreachable(f"{self.name}: {lost}") from lost

    def once(self, request: RegistryRequest) -> Answer:
        """One try, with login and redirects; `Lost` where another try may help."""
        url = request.place if "://" in request.place else f"{self.base}{request.place}"
        login, fresh, hops = self.authority.header(request.scope), False, 0
        while True:
            try:
                # an address that a server gave us: never from https to http
                url = next_address(self.base, url)
            except BadAnswer as error:
                raise RegistryBroken(f"{self.name}: {error}") from error
            # logins go to the registry itself and not to its storage on another host
            is_home = origin_of(url) == origin_of(self.base)
            sent = {"Authorization": login} if login and is_home else {}
            answer = self._send(request.method, url, {**request.headers, **sent}, request.body)
            if answer.status in request.good:
                return answer
            if answer.status in REDIRECTS and hops < _MOST_REDIRECTS:
                answer.drain()
                url, hops = location_of(answer), hops + 1
            # only once: a second 401 with a fresh token means that it is not allowed
            elif answer.status == 401 and is_home and not fresh:
                asked = answer.headers.getlist("WWW-Authenticate")
                answer.drain()
                try:
                    login, fresh = self.authority.answer(request.scope, login, asked), True
                except Lost as error:
                    raise Lost(f"the token service: {error}", wait_s=error.wait_s) from error
                except RegistryRefused as error:
                    raise RegistryRefused(f"{self.name}: {error}", error.hint) from error
            else:
                break
        # the registry's own message, from its error body:
        # https://github.com/opencontainers/distribution-spec/blob/main/spec.md#error-codes
        rows: list[tuple[str, str]] = []
        with suppress(NetError, JsonInvalid, KeyError, TypeError, AttributeError):
            body = read_json(answer.read(_MOST_ERROR_BYTES), most_bytes=_MOST_ERROR_BYTES)
            listed = body["errors"][:3]
            rows = [(str(e.get("code", "")), str(e.get("message", ""))) for e in listed]
        text, status = "; ".join(" ".join(row) for row in rows), answer.status
        reason = f" ({without_controls(text)})" if text else ""
        what = f"{request.method} {shown_address(answer.url)}"
        if status in MAY_PASS:
            raise Lost(f"{what}: answers {status}{reason}", wait_s=asked_wait_s(answer.headers))
        if status in (401, 403):
            raise RegistryRefused(f"{what}: refused with {status}{reason}")
        if status == 404:
            raise errors.NotInRegistry(f"{what}: not found{reason}")
        codes = frozenset(code for code, _ in rows)
        raise Refusal(f"{what}: answers {status}{reason}", status, codes)

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: Body | None) -> Answer:
        try:
            return self._http.ask(method, url, headers=headers, body=body)
        except failures.Untrusted as error:
            hint = "Name its CA with --ca FILE, or put it where Docker looks for it."
            raise RegistryUnreachable(str(error), hint) from error
        except failures.BadProxy as error:
            hint = "Correct it where it is set: HTTPS_PROXY, HTTP_PROXY or ALL_PROXY."
            raise RegistryUnreachable(str(error), hint) from error
        except failures.BadHeader as error:
            hint = "`docker login REGISTRY` keeps a new login in the place of the damaged one."
            raise RegistryRefused(str(error), hint) from error
        except failures.BadAddress as error:
            raise RegistryBroken(f"{self.name}: redirects to {error}") from error
        except BadAnswer as error:
            raise RegistryBroken(f"{self.name}: {error}") from error

    def read(self, answer: Answer, most_bytes: int) -> Reply:
        """Reads a small answer whole; `Lost` where the connection broke."""
        try:
            return Reply(answer.status, answer.url, answer.headers, answer.read(most_bytes))
        except BadAnswer as error:
            raise RegistryBroken(str(error)) from error

    def each(
        self, jobs: int, items: Iterable[Item], work: Callable[[Item], Result]
    ) -> list[Result]:
        """Runs transfers in parallel; returns results in order; the first failure ends them all."""
        listed = list(items)
        if len(listed) <= 1 or jobs <= 1:
            return [work(item) for item in listed]
        with ThreadPoolExecutor(min(jobs, len(listed))) as pool:
            futures: list[Future[Result]] = []
            try:
                # one by one: Ctrl-C in between ends those that run already
                for item in listed:
                    futures.append(pool.submit(work, item))
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = [e for e in (f.exception() for f in done) if e is not None]
                # transfers that were stopped because another failed only raise Interrupted
                for error in sorted(failed, key=lambda e: isinstance(e, errors.Interrupted)):
                    raise error
                return [f.result() for f in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                self.hang_up()
                raise


def location_of(answer: Reply | Answer) -> str:
    """The `Location` of an answer as a whole address."""
    place, where = answer.header("Location"), shown_address(answer.url)
    if not place:
        raise RegistryBroken(f"{where}: answers {answer.status} without a Location")
    try:
        return urljoin(answer.url, place)
    except ValueError as error:
        message = f"redirects to {shown_address(place)!r}, which is not a valid address"
        raise RegistryBroken(f"{where}: {message}") from error

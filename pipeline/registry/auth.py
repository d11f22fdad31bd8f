"""Authentication: from a registry's `WWW-Authenticate` to the header that answers it.

A password goes only to the registry itself (basic) or to the token service that the registry
names (bearer); a token goes only to the registry that it was made for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlencode

from pipeline.errors import RegistryBroken, RegistryRefused
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.net.address import parts_of, shown
from pipeline.net.client import Body, Reply, Small
from pipeline.net.failures import BadAddress
from pipeline.registry.docker_config import Login

# tokens are some kilobytes; an endless answer must end
MOST_TOKEN_BYTES = 1 << 20
Send = Callable[[str, str, dict[str, str], Body | None], Reply]


@dataclass(frozen=True)
class Scope:
    """What a request may do: actions on its repository, and pulling from another."""

    repository: str = ""
    actions: str = "pull"
    also_from: str = ""

    def as_list(self) -> list[str]:
        """As token services expect it."""
        if not self.repository:
            return []
        scopes = [f"repository:{self.repository}:{self.actions}"]
        return [*scopes, f"repository:{self.also_from}:pull"] if self.also_from else scopes


class Authority:
    """Headers by scope, made once and shared by all threads."""

    def __init__(self, find_login: Callable[[], Login | None], send: Send, *, plain: bool) -> None:
        self._find_login, self._send, self._plain = find_login, send, plain
        self._headers: dict[Scope, str] = {}
        self._guard = threading.Lock()
        self._asked = False
        self._login: Login | None = None

    def header(self, scope: Scope) -> str:
        """The header that worked for this scope before; empty where none was needed yet."""
        return self._headers.get(scope, "")

    def answer(self, scope: Scope, refused: str, headers: list[str]) -> str:
        """The header for the next try; `refused` is the one that was not enough."""
        with self._guard:
            known = self._headers.get(scope, "")
            # another thread may have been faster
            if known and known != refused:
                return known
            made = self._make(scope, read_challenges(headers))
            self._headers[scope] = made
            return made

    def _make(self, scope: Scope, challenges: list[Challenge]) -> str:
        # a credential helper may open a dialog: it is asked once, and only when needed
        if not self._asked:
            self._login, self._asked = self._find_login(), True
        # a token is good for one repository and some minutes, a password for everything
        for challenge in challenges:
            if challenge.scheme == "bearer" and challenge.get("realm"):
                return "Bearer " + self._token(scope, challenge)
        if any(c.scheme == "basic" for c in challenges):
            if self._login is None or not self._login.user:
                raise RegistryRefused("the registry requires a login, and there is none for it")
            return self._login.basic
        named = ", ".join(c.scheme for c in challenges) or "nothing"
        raise RegistryBroken(
            f"the registry refuses access and asks for {named}, which is not supported"
        )

    def _token(self, scope: Scope, challenge: Challenge) -> str:
        realm = challenge.get("realm")
        service = _service(realm)
        if service.scheme == "http" and not self._plain:
            raise RegistryRefused(
                f"the registry's token service {shown(realm)} is not reached by https",
                "Nothing was sent to it.",
            )
        # our own scope first; the registry may ask for more, as for mounting
        wanted = dict.fromkeys([*scope.as_list(), *challenge.get("scope").split()])
        query = [("service", challenge.get("service"))] if challenge.get("service") else []
        query += [("scope", word) for word in wanted]
        answer = self._ask(realm, "&" if service.query else "?", query)
        if answer.status in (401, 403):
            raise RegistryRefused(f"the token service {service.netloc} refuses the login")
        if answer.status != 200:
            raise RegistryBroken(f"the token service {shown(realm)} answers {answer.status}")
        return _token_in(answer.data, shown(realm))

    def _ask(self, realm: str, joint: str, query: list[tuple[str, str]]) -> Reply:
        login = self._login
        # an identity token is exchanged by POST (OAuth 2), a password sent by GET:
        # https://distribution.github.io/distribution/spec/auth/oauth/
        if login is not None and login.identity_token:
            form = [("grant_type", "refresh_token"), ("refresh_token", login.identity_token)]
            form += [("client_id", "sm120-pipeline"), *query]
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            return self._send("POST", realm, kind, Small(urlencode(form).encode()))
        headers = {"Authorization": login.basic} if login else {}
        return self._send("GET", f"{realm}{joint}{urlencode(query)}", headers, None)


def _service(realm: str) -> SplitResult:
    try:
        parts = parts_of(realm)
    except BadAddress as error:
        raise RegistryBroken(f"the registry's token service {error}") from error
    if "@" in parts.netloc or parts.fragment:
        raise RegistryBroken(
            f"the registry's token service {shown(realm)!r} is not a valid address"
        )
    return parts


def _token_in(data: bytes, realm: str) -> str:
    try:
        body = read_json(data, most_bytes=MOST_TOKEN_BYTES)
        # the older name and OAuth's; services send one or both
        token = body.get("token") or body.get("access_token")
    except (JsonInvalid, AttributeError):
        token = None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise RegistryBroken(f"the token service {realm} returned no token")
    return token


_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_PARAMETER = re.compile(r'\s*([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))\s*(?:,|$)')
_LONGEST = 4096  # of a header; real ones have some hundred characters


@dataclass(frozen=True)
class Challenge:
    """One way to authenticate: its scheme in lower case, and its parameters."""

    scheme: str
    parameters: dict[str, str]

    def get(self, name: str) -> str:
        return self.parameters.get(name, "")


def read_challenges(headers: list[str]) -> list[Challenge]:
    """All challenges of an answer; unreadable ones are skipped."""
    return [challenge for header in headers for challenge in _read(header[:_LONGEST])]


def _read(header: str) -> list[Challenge]:
    challenges: list[Challenge] = []
    at = 0
    while at < len(header):
        parameter = _PARAMETER.match(header, at)
        if parameter and challenges:
            name, quoted, plain = parameter.groups()
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            challenges[-1].parameters.setdefault(name.lower(), value)
            at = parameter.end()
            continue
        scheme = _SCHEME.match(header, at)
        if not scheme:
            break
        challenges.append(Challenge(scheme[1].lower(), {}))
        at = scheme.end()
    return challenges

"""Logins and trust: what Docker keeps for a registry, and answers to `WWW-Authenticate`.

A password goes only to the registry itself (basic) or to the token service that the registry
names (bearer); a token goes only to the registry that it was made for.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeline.artifacts.oci.reference import ImageReference
from pipeline.core import proc
from pipeline.core.errors import RegistryBroken, RegistryRefused, RegistryUnreachable
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.net.address import shown_address, split_address
from pipeline.core.net.client import Body, Reply, Small, basic
from pipeline.core.net.failures import BadAddress
from pipeline.core.net.route import tls_context as system_context

# tokens are some kilobytes; an endless answer must end
MOST_TOKEN_BYTES = 1 << 20
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_PARAMETER = re.compile(r'\s*([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))\s*(?:,|$)')
_LONGEST = 4096  # of a header; real ones have some hundred characters
# It becomes part of a program's name: no path may come in.
_HELPER = re.compile(r"[A-Za-z0-9._-]+")
# `docker login` without a name keeps the login under this old address
_HUB_KEY = "https://index.docker.io/v1/"
_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io")
# how a helper reports that it has no login:
# https://github.com/docker/docker-credential-helpers/blob/master/credentials/error.go
_NOT_FOUND = ("credentials not found", "no credentials server url")
# helpers talk to a desktop's key store or to GPG; they need nothing else of the environment
_HELPER_NEEDS = ("DOCKER_CONFIG", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "GNUPGHOME", "GPG_TTY")
# Rootless Docker and Podman have their own; all are read, as a machine may use either.
_ENGINES = ("docker", "containers")
_PLACES = tuple(f"{top}/{name}/certs.d" for top in ("/etc", "~/.config") for name in _ENGINES)

Send = Callable[[str, str, dict[str, str], Body | None], Reply]


@dataclass(frozen=True)
class Login:
    """A user and a password, or a token that stands for both; never shown."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The header's value for basic authentication."""
        return basic(self.user, self.password)


def find_login(reference: ImageReference) -> Login | None:
    """The login that `docker login` kept for a registry; none means anonymous."""
    path = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RegistryRefused(f"{path}: cannot be read", "Repair it, or log in again.") from error
    config, key = _table(config), reference.registry
    key = _HUB_KEY if key in _HUB_NAMES else key
    # in the order of Docker's client: the registry's own helper, the one for all, then the file
    helpers = _table(config.get("credHelpers"))
    name = _text(helpers.get(key)) or _text(config.get("credsStore"))
    if name and not _HELPER.fullmatch(name):
        raise RegistryRefused(f"{path}: {name!r} is not the name of a credential helper")
    if name:
        helper, hint = f"docker-credential-{name}", f"{path} names it; install it or take that out."
        command = [proc.find_tool(helper, hint), "get"]
        done = proc.read(command, env=proc.child_environment(*_HELPER_NEEDS), stdin=key.encode())
        output = " ".join(done.stdout.decode(errors="replace").split())
        if not done.returncode:
            try:
                credentials = json.loads(done.stdout)
                user, secret = str(credentials["Username"]), str(credentials["Secret"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RegistryRefused(f"{helper}: its answer cannot be read") from error
            # the helpers' convention for a token instead of a password
            return Login(identity_token=secret) if user == "<token>" else Login(user, secret)
        # helpers report this only as text
        if not any(known in output.lower() for known in _NOT_FOUND):
            raise RegistryRefused(f"{helper}: {output[:200] or 'failed'}")

    def host(name: str) -> str:
        # old versions of Docker kept logins under addresses
        return name.rpartition("://")[2].partition("/")[0]

    auths = _table(config.get("auths"))
    same_host = (auths[name] for name in sorted(auths) if host(name) == host(key))
    known = auths.get(key)
    entry = _table(next(same_host, None) if known is None else known)
    user, password = _text(entry.get("username")), _text(entry.get("password"))
    if auth := _text(entry.get("auth")):
        try:
            user, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, ValueError) as error:
            raise RegistryRefused(f"{path}: the login of {key} cannot be read") from error
        # Docker's own client trims NULs, too
        password = password.rstrip("\0")
    token = _text(entry.get("identitytoken"))
    return Login(user, password, token) if user or token else None


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def certificate_files(host_port: str, places: tuple[str, ...] = _PLACES) -> list[Path]:
    """Docker's and Podman's files for a registry: `.crt` is a CA, `.cert` a client certificate."""
    folders = [Path(place).expanduser() / host_port for place in places]
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def registry_context(host_port: str, ca_file: Path | None) -> ssl.SSLContext:
    """A context that trusts the system's CAs and those added for this registry."""
    context, files = system_context(), certificate_files(host_port)
    for path in [*([ca_file] if ca_file else []), *files]:
        what, key = "client certificate", path.with_suffix(".key")
        try:
            if path == ca_file or path.suffix == ".crt":
                what = "CA certificate"
                context.load_verify_locations(cafile=path)
            # a client certificate is of use only with its key beside it
            elif path.suffix == ".cert" and key in files:
                context.load_cert_chain(path, key)
        except (OSError, ssl.SSLError) as error:
            raise RegistryUnreachable(f"{path}: is not a readable {what}") from error
    return context


@dataclass(frozen=True)
class Scope:
    """What a request may do: actions on its repository, and pulling from another."""

    repository: str = ""
    actions: str = "pull"
    also_from: str = ""


@dataclass(frozen=True)
class Challenge:
    """One method to authenticate: its scheme in lower case, and its parameters."""

    scheme: str
    parameters: dict[str, str]

    def get(self, name: str) -> str:
        return self.parameters.get(name, "")


def read_challenges(headers: list[str]) -> list[Challenge]:
    """Reads all challenges of an answer; skips those that it cannot read."""
    found: list[Challenge] = []
    for header in (header[:_LONGEST] for header in headers):
        at, is_first = 0, True
        while at < len(header):
            parameter, scheme = _PARAMETER.match(header, at), _SCHEME.match(header, at)
            if parameter and not is_first:
                name, quoted, plain = parameter.groups()
                value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
                found[-1].parameters.setdefault(name.lower(), value)
                at = parameter.end()
            elif scheme:
                found.append(Challenge(scheme[1].lower(), {}))
                at, is_first = scheme.end(), False
            else:
                break
    return found


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
        """The header for the next try; `refused` is the one that the registry refused."""
        with self._guard:
            known = self._headers.get(scope, "")
            # another thread may have been faster
            if known and known != refused:
                return known
            # a credential helper may open a dialog: it is asked once, and only when needed
            if not self._asked:
                self._login, self._asked = self._find_login(), True
            challenges = read_challenges(headers)
            bearers = [c for c in challenges if c.scheme == "bearer" and c.get("realm")]
            # a token is good for one repository and some minutes, a password for everything
            if bearers:
                made = "Bearer " + self._token(scope, bearers[0])
            elif any(c.scheme == "basic" for c in challenges):
                if self._login is None or not self._login.user:
                    raise RegistryRefused("the registry requires a login, and there is none for it")
                made = self._login.basic
            else:
                named = ", ".join(c.scheme for c in challenges) or "nothing"
                raise RegistryBroken(
                    f"the registry refuses access and asks for {named}, which is not supported"
                )
            self._headers[scope] = made
            return made

    def _token(self, scope: Scope, challenge: Challenge) -> str:
        """A token from the service that the registry names."""
        realm, login = challenge.get("realm"), self._login
        name = f"token service {shown_address(realm)}"
        try:
            service = split_address(realm)
        except BadAddress as error:
            raise RegistryBroken(f"the registry's token service {error}") from error
        if "@" in service.netloc or service.fragment:
            message = (
                f"the registry's token service {shown_address(realm)!r} is not a valid address"
            )
            raise RegistryBroken(message)
        if service.scheme == "http" and not self._plain:
            message = f"the registry's {name} is not reached by https"
            raise RegistryRefused(message, "Nothing was sent to it.")
        # our own scope first; the registry may ask for more, as for mounting
        own = [f"repository:{scope.repository}:{scope.actions}"] if scope.repository else []
        if own and scope.also_from:
            own.append(f"repository:{scope.also_from}:pull")
        wanted = dict.fromkeys([*own, *challenge.get("scope").split()])
        query = [("service", challenge.get("service"))] if challenge.get("service") else []
        query += [("scope", word) for word in wanted]
        # an identity token is exchanged by POST (OAuth 2), a password sent by GET:
        # https://distribution.github.io/distribution/spec/auth/oauth/
        if login is not None and login.identity_token:
            form = [("grant_type", "refresh_token"), ("refresh_token", login.identity_token)]
            form += [("client_id", "sm120-pipeline"), *query]
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = self._send("POST", realm, kind, Small(urlencode(form).encode()))
        else:
            headers = {"Authorization": login.basic} if login else {}
            joint = "&" if service.query else "?"
            answer = self._send("GET", f"{realm}{joint}{urlencode(query)}", headers, None)
        if answer.status in (401, 403):
            raise RegistryRefused(f"the token service {service.netloc} refuses the login")
        if answer.status != 200:
            raise RegistryBroken(f"the {name} answers {answer.status}")
        try:
            body = read_json(answer.data, most_bytes=MOST_TOKEN_BYTES)
            # the older name and OAuth's; services send one or both
            token = body.get("token") or body.get("access_token")
        except (JsonInvalid, AttributeError):
            token = None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise RegistryBroken(f"the {name} returned no token")
        return token

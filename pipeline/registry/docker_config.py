"""What Docker keeps for a registry: logins, credential helpers, and certificates."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import proc
from pipeline.errors import RegistryRefused, RegistryUnreachable
from pipeline.net.client import basic
from pipeline.net.route import tls_context as system_context
from pipeline.oci.reference import Reference

# It becomes part of a program's name: no path may come in.
_HELPER = re.compile(r"[A-Za-z0-9._-]+")
# `docker login` without a name keeps the login under this old address
_HUB_KEY = "https://index.docker.io/v1/"
_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io")
# how a helper reports that it has no login:
# https://github.com/docker/docker-credential-helpers/blob/master/credentials/error.go
_NOT_FOUND = ("credentials not found", "no credentials server url")
# helpers talk to a desktop's key store or to GPG; nothing else of the environment is theirs
_HELPER_NEEDS = ("DOCKER_CONFIG", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "GNUPGHOME", "GPG_TTY")


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


def find_login(reference: Reference) -> Login | None:
    """The login that `docker login` kept for a registry; none means anonymous."""
    config = _read_config()
    key = _HUB_KEY if reference.registry in _HUB_NAMES else reference.registry
    # as Docker's client looks: the registry's own helper, the one for all, then the file
    helper = _text(_table(config, "credHelpers").get(key)) or _text(config.get("credsStore"))
    login = _ask_helper(helper, key) if helper else None
    return login or _from_auths(_table(config, "auths"), key)


def config_path() -> Path:
    """Where Docker keeps its client configuration."""
    folder = os.environ.get("DOCKER_CONFIG") or "~/.docker"
    return Path(folder).expanduser() / "config.json"


def _read_config() -> dict[str, Any]:
    path = config_path()
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise RegistryRefused(f"{path}: cannot be read", "Repair it, or log in again.") from error
    return config if isinstance(config, dict) else {}


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _from_auths(auths: dict[str, Any], key: str) -> Login | None:
    entry = auths.get(key)
    if entry is None:
        wanted = _host(key)
        entry = next((auths[k] for k in sorted(auths) if _host(k) == wanted), None)
    if not isinstance(entry, dict):
        return None
    user, password = _text(entry.get("username")), _text(entry.get("password"))
    if auth := _text(entry.get("auth")):
        user, password = _decoded(auth, key)
    token = _text(entry.get("identitytoken"))
    return Login(user, password, token) if user or token else None


def _host(key: str) -> str:
    """Old versions of Docker kept logins under addresses."""
    return key.rpartition("://")[2].partition("/")[0]


def _decoded(auth: str, key: str) -> tuple[str, str]:
    try:
        text = base64.b64decode(auth, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise RegistryRefused(f"{config_path()}: the login of {key} cannot be read") from error
    user, _, password = text.partition(":")
    # Docker's own client trims NULs here, too
    return user, password.rstrip("\0")


def _ask_helper(name: str, key: str) -> Login | None:
    if not _HELPER.fullmatch(name):
        raise RegistryRefused(f"{config_path()}: {name!r} is not the name of a credential helper")
    program = proc.find_tool(
        f"docker-credential-{name}", f"{config_path()} names it; install it or take that out."
    )
    done = proc.read([program, "get"], env=proc.environment(*_HELPER_NEEDS), stdin=key.encode())
    output = " ".join(done.stdout.decode(errors="replace").split())
    if done.returncode != 0:
        if any(known in output.lower() for known in _NOT_FOUND):
            return None
        raise RegistryRefused(f"docker-credential-{name}: {output[:200] or 'failed'}")
    try:
        credentials = json.loads(done.stdout)
        user, secret = str(credentials["Username"]), str(credentials["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RegistryRefused(f"docker-credential-{name}: its answer cannot be read") from error
    # the helpers' convention for a token instead of a password
    return Login(identity_token=secret) if user == "<token>" else Login(user, secret)


# Rootless Docker and Podman have their own; all are read, as a machine may use either.
_PLACES = (
    "/etc/docker/certs.d",
    "/etc/containers/certs.d",
    "~/.config/docker/certs.d",
    "~/.config/containers/certs.d",
)


def certificate_files(host_port: str, places: tuple[str, ...] = _PLACES) -> list[Path]:
    """Docker's and Podman's files for a registry: `.crt` is a CA, `.cert` a client certificate."""
    folders = [Path(place).expanduser() / host_port for place in places]
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def tls_context(host_port: str, ca_file: Path | None) -> ssl.SSLContext:
    """A context that trusts the system's CAs and those added for this registry."""
    context = system_context()
    files = certificate_files(host_port)
    for path in [*([ca_file] if ca_file else []), *(p for p in files if p.suffix == ".crt")]:
        try:
            context.load_verify_locations(cafile=path)
        except (OSError, ssl.SSLError) as error:
            raise RegistryUnreachable(f"{path}: is not a readable CA certificate") from error
    # a client certificate is of use only with its key beside it
    for path in files:
        key = path.with_suffix(".key")
        if path.suffix == ".cert" and key in files:
            try:
                context.load_cert_chain(path, key)
            except (OSError, ssl.SSLError) as error:
                raise RegistryUnreachable(
                    f"{path}: is not a readable client certificate"
                ) from error
    return context

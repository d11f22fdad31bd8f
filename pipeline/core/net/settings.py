"""Where wheels come from: asks pip and uv for their settings on this machine."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from pipeline.core import proc

# Where Debian, Fedora and Alpine keep them.
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
_SYSTEM_UV = Path("/etc/uv/uv.toml")
# What pip reads as true in its configuration.
_YES = ("1", "y", "yes", "t", "true", "on")


@dataclass(frozen=True)
class NetworkSettings:
    """Indexes, folders, certificates and proxies, in the order they are tried."""

    indexes: tuple[str, ...]
    folders: tuple[Path, ...] = ()
    ca_file: str | None = None
    proxy: str | None = None
    mirrors: tuple[str, ...] = field(default=())


def default_index() -> str:
    """The index that pip and uv ask unless another is named."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT  # slow to import: it brings an HTTP client along

    return PYPI_SIMPLE_ENDPOINT


def read_settings(extra_mirrors: tuple[str, ...] = ()) -> NetworkSettings:
    """The settings of pip, uv and SM120_* on this machine."""
    pip = pip_settings(_pip_config_list())
    user = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "uv" / "uv.toml"
    env = os.environ
    # the old names (UV_INDEX_URL, UV_EXTRA_INDEX_URL) still work in uv:
    # https://docs.astral.sh/uv/concepts/indexes/
    chosen = (env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL") or "").split()[:1]
    default = [_unnamed(u) for u in chosen]
    extra = [_unnamed(u) for u in env.get("UV_INDEX", "").split()]
    extra += env.get("UV_EXTRA_INDEX_URL", "").split()
    places = env.get("UV_FIND_LINKS", "").replace(",", " ").split()
    no_index = list(pip.get("no-index", []))
    for path in (user, _SYSTEM_UV):  # nearest first
        uv: dict[str, Any] = {}
        # uv itself says what is wrong with one that does not parse when it makes a lock
        with suppress(OSError, ValueError):
            uv = tomllib.loads(path.read_text(encoding="utf-8"))
        for index in uv.get("index", []):
            (default if index.get("default") else extra).append(str(index["url"]))
        # `[pip]` holds what is for `uv pip` alone, which is how we call it
        for table in (uv, uv.get("pip", {})):
            default += [table["index-url"]] if "index-url" in table else []
            extra += table.get("extra-index-url", [])
            places += table.get("find-links", [])
            no_index += [str(table["no-index"])] if "no-index" in table else []
    # The first default is the nearest: environment, then user, then system. uv's before pip's: it
    # resolves our locks, so what it finds there should be fetched from there.
    default = default[:1] or pip.get("index-url") or [default_index()]
    extra += pip.get("extra-index-url", [])
    places += pip.get("find-links", [])
    urls = [] if any(value.lower() in _YES for value in no_index) else [*default, *extra]
    folders = [local_folder(p) for p in [*places, *urls]]
    return NetworkSettings(
        indexes=tuple(dict.fromkeys(u for u in urls if local_folder(u) is None)),
        folders=tuple(dict.fromkeys(f for f in folders if f is not None)),
        ca_file=_ca_file(pip),
        proxy=next(iter(pip.get("proxy", [])), None),
        mirrors=(*extra_mirrors, *named_mirrors()),
    )


def named_mirrors() -> list[str]:
    """The folders and addresses of SM120_MIRRORS."""
    return os.environ.get("SM120_MIRRORS", "").split()


def plain_settings() -> NetworkSettings:
    """For servers that pip and uv know nothing of: certificates and proxies of the environment."""
    return NetworkSettings(indexes=(), ca_file=_ca_file({}))


def _pip_config_list() -> str:
    """`pip config list` of the interpreter we run in; empty where there is no pip."""
    # asked, not read: pip merges several files and its own variables
    # https://pip.pypa.io/en/stable/topics/configuration/
    names = [n for n in os.environ if n.startswith("PIP_")]
    asked = proc.read(
        [sys.executable, "-m", "pip", "config", "list"], env=proc.child_environment(*names)
    )
    return asked.stdout.decode(errors="replace") if asked.returncode == 0 else ""


def pip_settings(listing: str) -> dict[str, list[str]]:
    """pip's settings by name; the environment wins over `install`, that over `global`."""
    ranked: dict[str, tuple[int, list[str]]] = {}
    ranks = {":env:": 4, "install": 3, "download": 2, "global": 1}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        # `global.index-url='https://…'`; of the environment `:env:.index-url='…'`
        section, _, name = key.rpartition(".")
        try:
            text = str(ast.literal_eval(value.strip()))
        except (ValueError, SyntaxError):
            text = value
        rank, values = ranks.get(section, 0), text.split()
        # pip, too, passes over a setting that is there but empty
        if values and rank > ranked.get(name, (0, []))[0]:
            ranked[name] = (rank, values)
    return {name: values for name, (_, values) in ranked.items()}


def _unnamed(index: str) -> str:
    """Drops the name that uv lets an index carry: `name=address`."""
    name, _, address = index.partition("=")
    return address if address and "/" not in name else index


def local_folder(place: str) -> Path | None:
    """A local folder behind a path or file: address, else nothing."""
    if place.startswith("file:"):
        # file:///folder, file://localhost/folder or file:/folder
        path = place.removeprefix("file:").partition("#")[0].partition("?")[0]
        return Path(unquote(f"/{path[2:].partition('/')[2]}" if path.startswith("//") else path))
    return None if "://" in place else Path(place).expanduser()


def _ca_file(pip: dict[str, list[str]]) -> str | None:
    """The CA bundle pip or uv would use: their settings, then the system's."""
    chosen = next(iter(pip.get("cert", [])), None)
    # as OpenSSL and uv, requests, and curl call it
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    candidates = [chosen, *(os.environ.get(n) for n in names), *_SYSTEM_BUNDLES]
    return next((c for c in candidates if c and Path(c).is_file()), None)


def with_login(url: str, index: str) -> str:
    """An address that an index gave, with the index's own login where it is the same server."""
    home, target = urlsplit(index), urlsplit(url)
    login, _, host = home.netloc.rpartition("@")
    # an index may list files of any server: a login must not follow them there
    if not login or (target.scheme, target.netloc) != (home.scheme, host):
        return url
    return urlunsplit(target._replace(netloc=home.netloc))

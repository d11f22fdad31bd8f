"""The way to a server: through which proxy, and which certificates are trusted."""

from __future__ import annotations

import ipaddress
import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3.exceptions import LocationParseError
from urllib3.util import make_headers, parse_url

from pipeline.core.net.address import is_loopback, shown_address
from pipeline.core.net.failures import BadProxy, Untrusted


@dataclass(frozen=True)
class Proxy:
    """A proxy's address, and the header that its login makes; the login is never shown."""

    url: str
    login: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return dict(make_headers(proxy_basic_auth=self.login)) if self.login else {}


class Proxies:
    """The proxies of one client, read once."""

    def __init__(self, configured: str | None = None) -> None:
        self._configured = read_proxy(configured) if configured else None
        self._environment = getproxies()

    def of(self, parts: SplitResult) -> Proxy | None:
        """The proxy for an address; a configured one is for all, as with pip."""
        if self._configured is not None:
            return self._configured
        address = self._environment.get(parts.scheme) or self._environment.get("all")
        host_port = parts.netloc.rpartition("@")[2]
        if not address or is_loopback(host_port) or proxy_bypass(host_port):
            return None
        # NO_PROXY may name networks, like 10.0.0.0/8
        for name in self._environment.get("no", "").split(","):
            with suppress(ValueError):
                network = ipaddress.ip_network(name.strip(), strict=False) if "/" in name else ()
                if ipaddress.ip_address(parts.hostname or "") in network:
                    return None
        return read_proxy(address)


def read_proxy(address: str) -> Proxy:
    """An address as it stands in HTTPS_PROXY; without a scheme it is http, without a port 80."""
    text = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        parse_url(f"http://{parts.netloc.rpartition('@')[2]}")
        (host or "").encode("idna")
    except (ValueError, LocationParseError) as error:
        raise BadProxy(f"the proxy {shown_address(text)!r} is not a valid address") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BadProxy(f"the proxy {shown_address(text)!r} is not an http or https address")
    name = f"[{host}]" if ":" in host else host
    login = ""
    if "@" in parts.netloc:
        login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    at = port or (443 if parts.scheme == "https" else 80)
    return Proxy(f"{parts.scheme}://{name}:{at}", login)


def tls_context(ca_file: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """A context that believes the CAs of a file, or of this machine."""
    places = ssl.get_default_verify_paths()
    has_none = not ca_file and not places.cafile and not places.capath
    try:
        # Mozilla's CAs as a Python package has them, where the system has none at all
        if has_none and find_spec("certifi") is not None:
            import certifi

            ca_file = certifi.where()
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise Untrusted(f"{ca_file}: is not a readable file of CA certificates") from error
    # Python 3.13 began to refuse a CA without key usage, as `openssl req -x509` makes it: Docker,
    # curl and older Pythons take it (https://docs.python.org/3/library/ssl.html#context-creation)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context

"""Whom to believe: the system's CAs, those kept for Docker, and one named by hand."""

from __future__ import annotations

import ssl
from pathlib import Path

from pipeline.errors import RegistryUnreachable
from pipeline.net.route import tls_context as system_context

_PLACES = (
    "/etc/docker/certs.d",
    "/etc/containers/certs.d",
    "~/.config/docker/certs.d",
    "~/.config/containers/certs.d",
)


def certificate_files(host_port: str, places: tuple[str, ...] = _PLACES) -> list[Path]:
    """What Docker and Podman were given for a registry: `.crt` is a CA, `.cert` is our own."""
    folders = [Path(place).expanduser() / host_port for place in places]
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def tls_context(host_port: str, ca_file: Path | None) -> ssl.SSLContext:
    """A context that believes the system's CAs and those added for this registry."""
    context = system_context()
    files = certificate_files(host_port)
    for path in [*([ca_file] if ca_file else []), *(p for p in files if p.suffix == ".crt")]:
        try:
            context.load_verify_locations(cafile=path)
        except (OSError, ssl.SSLError) as error:
            raise RegistryUnreachable(f"{path}: is no readable CA certificate") from error
    for path in files:
        key = path.with_suffix(".key")
        if path.suffix == ".cert" and key in files:
            try:
                context.load_cert_chain(path, key)
            except (OSError, ssl.SSLError) as error:
                raise RegistryUnreachable(f"{path}: is no readable client certificate") from error
    return context

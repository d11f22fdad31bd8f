"""Whom to believe: a CA file that was named, else the system's, else the one that Python brings."""

from __future__ import annotations

import os
import ssl
from importlib.util import find_spec

from pipeline.net.failures import Untrusted


def tls_context(ca_file: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """A context that believes the CAs of a file, or of this machine."""
    try:
        return ssl.create_default_context(cafile=ca_file or _bundled())
    except (OSError, ssl.SSLError) as error:
        raise Untrusted(f"{ca_file}: is no readable file of CA certificates") from error


def _bundled() -> str | None:
    """Mozilla's CAs as a Python package has them, where the system has none at all."""
    places = ssl.get_default_verify_paths()
    if places.cafile or places.capath or find_spec("certifi") is None:
        return None
    import certifi

    return certifi.where()

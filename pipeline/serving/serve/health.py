"""Whether a server answers: asked on this machine's own address, or through a socket to another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeAlias

from pipeline.core import foreign_json
from pipeline.core.net.wire import Address, AnswerLost, send

_MOST_BYTES = 4 << 20
# An engine that loads may take seconds for an answer; one that hangs is asked again.
_TIMEOUT_S = 5.0


# A port of this machine, or a socket that leads to a port of another one.
Endpoint: TypeAlias = int | Path


def is_healthy(door: Endpoint) -> bool:
    """Whether `/health` says yes: engines answer 503 while they load."""
    return _get(door, "/health")[0] == 200


def is_listening(door: Endpoint) -> bool:
    """Whether a server listens, ready or not."""
    return _get(door, "/health")[0] != 0


def served_models(door: Endpoint) -> list[str] | None:
    """The models that a server says it has; none where it does not say."""
    status, body = _get(door, "/v1/models")
    if status != 200:
        return None
    try:
        value = foreign_json.read_json(body, most_bytes=_MOST_BYTES, any_int=True)
        names = [model["id"] for model in value["data"]]
    except (ValueError, LookupError, TypeError):
        return None
    return names if all(isinstance(name, str) for name in names) else None


def _get(door: Endpoint, path: str) -> tuple[int, bytes]:
    # not the client for the internet: this needs no proxy, no redirect and no second try
    port, socket = (0, door) if isinstance(door, Path) else (door, None)
    address = Address("127.0.0.1", port, False, "", socket)
    request = send(address, "GET", path, b"", {}, limit_s=_TIMEOUT_S, most_bytes=_MOST_BYTES)
    try:
        # a loop for each question: the threads that ask have none
        raw = asyncio.run(request)
    except AnswerLost:
        return 0, b""
    return raw.status, raw.data

"""Whether a server answers: asked on this machine's own address, or through a socket to another."""

from __future__ import annotations

import http.client
import socket
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline import foreign_json
from pipeline.model import Frozen

_MOST_BYTES = 4 << 20
# An engine that loads may take seconds for an answer; one that hangs is asked again.
_TIMEOUT_S = 5.0


class _Model(Frozen):
    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str


class _Models(Frozen):
    model_config = ConfigDict(frozen=True, extra="ignore")

    data: list[_Model]


# A port of this machine, or a socket that leads to a port of another one.
Door: TypeAlias = int | Path
_MODELS: TypeAdapter[_Models] = TypeAdapter(_Models)


def is_healthy(door: Door) -> bool:
    """Whether `/health` says yes: engines answer 503 while they load."""
    status, _ = _get(door, "/health")
    return status == 200


def answers(door: Door) -> bool:
    """Whether anybody is there, ready or not."""
    status, _ = _get(door, "/health")
    return status != 0


def served_models(door: Door) -> list[str] | None:
    """The models that a server says it has; none where it does not say."""
    status, body = _get(door, "/v1/models")
    if status != 200:
        return None
    try:
        value = foreign_json.read_json(body, most_bytes=_MOST_BYTES, any_int=True)
        return [model.id for model in _MODELS.validate_python(value).data]
    except (ValueError, ValidationError):
        return None


class _ThroughSocket(http.client.HTTPConnection):
    def __init__(self, place: Path) -> None:
        super().__init__("127.0.0.1", timeout=_TIMEOUT_S)
        self._place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(str(self._place))


def _connection(door: Door) -> http.client.HTTPConnection:
    # not the client for the internet: no proxy, no redirect and no second try is wanted here
    if isinstance(door, Path):
        return _ThroughSocket(door)
    return http.client.HTTPConnection("127.0.0.1", door, timeout=_TIMEOUT_S)


def _get(door: Door, path: str) -> tuple[int, bytes]:
    connection = _connection(door)
    with closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException):
            return 0, b""

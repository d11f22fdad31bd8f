"""Whether a server answers, asked on this machine's own address."""

from __future__ import annotations

import http.client
from contextlib import closing

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


_MODELS: TypeAdapter[_Models] = TypeAdapter(_Models)


def is_healthy(port: int) -> bool:
    """Whether `/health` says yes: engines answer 503 while they load."""
    status, _ = _get(port, "/health")
    return status == 200


def served_models(port: int) -> list[str] | None:
    """The models that a server says it has; none where it does not say."""
    status, body = _get(port, "/v1/models")
    if status != 200:
        return None
    try:
        value = foreign_json.read_json(body, most_bytes=_MOST_BYTES, any_int=True)
        return [model.id for model in _MODELS.validate_python(value).data]
    except (ValueError, ValidationError):
        return None


def _get(port: int, path: str) -> tuple[int, bytes]:
    # not the client for the internet: no proxy, no redirect and no second try is wanted here
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    with closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException):
            return 0, b""

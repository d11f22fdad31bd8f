"""Asking the Hub that this machine uses for a model's lock, and for its small files."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.core import log
from pipeline.core.errors import OfflineMiss, SourceUnreachable
from pipeline.core.net.http import Client
from pipeline.core.net.settings import plain_settings
from pipeline.core.net.timing import Limits
from pipeline.weights.hub import Hub, endpoint, is_offline, saved_token
from pipeline.weights.locking import LockResult, look_up
from pipeline.weights.model import FilePin, WeightsSpec
from pipeline.weights.transfer.fetch import fetch_range
from pipeline.weights.transfer.sources import HttpRoute, HubRepository

_SHORT_CONNECT_S = 5.0  # behind a firewall that answers nothing, each try takes as long

_ELSEWHERE = "A machine without network takes a lock that was made elsewhere (docs/air-gap.md)."

# the bytes of a file, of a repository at a commit
ReadFile = Callable[[str, str, FilePin], bytes]


def open_hub(*, patient: bool = True) -> tuple[Hub, ReadFile]:
    """The Hub that this machine uses, and what reads its small files whole.

    Unless `patient`, a Hub that cannot be reached is given up after two short tries.
    """
    settings = plain_settings()
    attempts, limits = (None, None) if patient else (2, Limits(connect_s=_SHORT_CONNECT_S))
    hub = Hub(settings, endpoint=endpoint(), token=saved_token(), limits=limits, attempts=attempts)
    client = Client(settings)

    def read(repository: str, commit: str, pin: FilePin) -> bytes:
        source = HubRepository(hub.endpoint, repository, commit, hub.token)
        routes = [HttpRoute(client, source, "plain HTTP")]
        return b"".join(fetch_range(routes, pin, 0, pin.size_bytes, client=client))

    return hub, read


def look_up_now(spec: WeightsSpec, *, offline: bool = False) -> LockResult:
    """The lock that answers a spec today."""
    # huggingface_hub's own switch: users who set it expect every tool to obey it
    if offline or is_offline():
        why = "--offline is given" if offline else "HF_HUB_OFFLINE is set"
        raise OfflineMiss(
            f"{spec.repository}: {why}, and only the Hub knows the files of {spec.revision}",
            _ELSEWHERE,
        )
    hub, read = open_hub()
    try:
        with log.step(f"Looking up {spec.name}: {spec.repository} at {spec.revision}"):
            return look_up(spec, hub, lambda pin, commit: read(spec.repository, commit, pin))
    except SourceUnreachable as error:
        raise SourceUnreachable(str(error), f"{error.hint} {_ELSEWHERE}") from error

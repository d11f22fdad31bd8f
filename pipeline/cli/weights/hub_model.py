"""A model of the Hub, as far as small files go: for verbs that look before anything is fetched."""

from __future__ import annotations

from pipeline import log
from pipeline.errors import ModelUnreadable, OfflineMiss
from pipeline.fetch.http import Client
from pipeline.fetch.settings import plain_settings
from pipeline.fit.config import MOST_BYTES
from pipeline.fit.source import HubModel
from pipeline.weights.hub import Hub, endpoint, is_offline, saved_token
from pipeline.weights.locking import checked
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.fetch import fetch_range
from pipeline.weights.transfer.http_route import HttpRoute, HubRepository


def ask_hub(repository: str, revision: str) -> HubModel:
    """What a repository holds at a revision now."""
    if is_offline():
        raise OfflineMiss("HF_HUB_OFFLINE is set", "Unset it, or name a config.json that is here.")
    settings = plain_settings()
    client, hub = Client(settings), Hub(settings, endpoint=endpoint(), token=saved_token())
    with log.step(f"Looking up {repository} at {revision}"):
        commit = hub.commit_of(repository, revision)
        files = hub.files(repository, commit)
    there = HubRepository(hub.endpoint, repository, commit, hub.token)

    def read(pin: FilePin) -> bytes:
        if pin.size_bytes > MOST_BYTES:
            raise ModelUnreadable(f"{pin.path}: is larger than 16 MiB")
        routes = [HttpRoute(client, there, "plain HTTP")]
        return checked(pin, b"".join(fetch_range(routes, pin, 0, pin.size_bytes, client=client)))

    return HubModel(repository, commit, files, read)

"""A model of the Hub, as far as small files go: for verbs that look before anything is fetched."""

from __future__ import annotations

from pipeline import log
from pipeline.errors import ModelUnreadable, OfflineMiss
from pipeline.fit.config import MOST_BYTES
from pipeline.fit.source import HubModel
from pipeline.weights.hub import is_offline
from pipeline.weights.locking import checked
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.lookup import open_hub


def ask_hub(repository: str, revision: str) -> HubModel:
    """What a repository holds at a revision now."""
    if is_offline():
        raise OfflineMiss(f"{repository}: HF_HUB_OFFLINE is set", "Unset it to ask the Hub.")
    # the question is small, and there are other ways to an answer than to wait
    hub, read_file = open_hub(patient=False)
    with log.step(f"Looking up {repository} at {revision}"):
        commit = hub.commit_of(repository, revision)
        files = hub.files(repository, commit)

    def read(pin: FilePin) -> bytes:
        if pin.size_bytes > MOST_BYTES:
            raise ModelUnreadable(f"{pin.path}: is larger than 16 MiB")
        return checked(pin, read_file(repository, commit, pin))

    return HubModel(repository, commit, files, read)

"""A plain push to a loopback registry: what is missing, and how many bytes that is."""

from __future__ import annotations

import requests

from pipeline.store.store import Store


def push(store: Store, registry_url: str, repository: str, digest: str) -> int:
    """Upload missing blobs and the manifest; returns the bytes sent."""
    session = requests.Session()
    base = f"{registry_url}/v2/{repository}"
    manifest = store.read_json(digest)
    sent = 0
    for blob in [manifest["config"], *manifest["layers"]]:
        if session.head(f"{base}/blobs/{blob['digest']}", timeout=60).status_code == 200:
            continue
        place = session.post(f"{base}/blobs/uploads/", timeout=60).headers["Location"]
        with store.blob_path(blob["digest"]).open("rb") as data:
            answer = session.put(place, data=data, params={"digest": blob["digest"]}, timeout=600)
        answer.raise_for_status()
        sent += int(blob["size"])
    body = store.read_blob(digest)
    session.put(
        f"{base}/manifests/perf",
        data=body,
        headers={"Content-Type": manifest["mediaType"]},
        timeout=60,
    ).raise_for_status()
    return sent + len(body)

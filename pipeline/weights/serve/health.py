"""What a server says of itself: how much of it is proved."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.weights.serve.served import ServedSets, Snapshot


def health(served: ServedSets, *, in_detail: bool) -> dict[str, Any]:
    """Counts for everybody; names only for those who may read the files anyway."""
    files = served.files
    states = Counter(held.state for held in files)
    word = "damaged" if states["wrong"] else "proving" if states["unproved"] else "ready"
    answer: dict[str, Any] = {
        "status": word,
        "files": len(files),
        "proved": states["proved"],
        "unproved": states["unproved"],
        "wrong": states["wrong"],
        "size_bytes": sum(held.pin.size_bytes for held in files),
        "proved_bytes": sum(h.pin.size_bytes for h in files if h.state == "proved"),
    }
    if in_detail:
        answer["sets"] = [_set(snapshot) for snapshot in served.snapshots.values()]
    return answer


def _set(snapshot: Snapshot) -> dict[str, Any]:
    held = snapshot.files.values()
    return {
        "repository": snapshot.repository,
        "commit": snapshot.commit,
        "files": len(held),
        "proved": sum(h.state == "proved" for h in held),
        "wrong": {h.pin.path: h.why for h in held if h.state == "wrong"},
    }

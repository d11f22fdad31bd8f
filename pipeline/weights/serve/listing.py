"""What the server lists: sets as the Hub's API describes them, from locks alone, and its health."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.weights.model import FilePin
from pipeline.weights.serve.served import Absent, ServedSets, Snapshot, blob_id, pointer

Json = dict[str, Any]


def file_entry(pin: FilePin) -> Json:
    """A file in a tree."""
    entry: Json = {"type": "file", "oid": blob_id(pin), "size": pin.size_bytes, "path": pin.path}
    if pin.sha256:
        entry["lfs"] = {"oid": pin.sha256, "size": pin.size_bytes, "pointerSize": len(pointer(pin))}
    return entry


def folder_entry(path: str, tree_id: str) -> Json:
    """A folder in a tree."""
    return {"type": "directory", "oid": tree_id, "size": 0, "path": path}


def tree(snapshot: Snapshot, below: str, *, recursive: bool) -> list[Json]:
    """The files and folders below a folder, sorted by path."""
    if below and below not in snapshot.folders:
        raise Absent("EntryNotFound", "there is no such folder in the set", snapshot.commit)
    start = f"{below}/" if below else ""
    rows = [folder_entry(*item) for item in snapshot.folders.items()]
    rows += [file_entry(held.pin) for held in snapshot.files.values()]
    inside = [
        row
        for row in rows
        if row["path"].startswith(start) and (recursive or "/" not in row["path"][len(start) :])
    ]
    return sorted(inside, key=lambda row: str(row["path"]))


def paths_info(snapshot: Snapshot, paths: list[str]) -> list[Json]:
    """What is known of some paths; like the Hub, silent about those that do not exist."""
    rows: list[Json] = []
    for path in dict.fromkeys(paths):
        if path in snapshot.files:
            rows.append(file_entry(snapshot.files[path].pin))
        elif path in snapshot.folders:
            rows.append(folder_entry(path, snapshot.folders[path]))
    return rows


def model_info(snapshot: Snapshot, *, blobs: bool) -> Json:
    """The repository at one commit."""
    return {
        "id": snapshot.repository,
        "modelId": snapshot.repository,
        "author": snapshot.repository.partition("/")[0],
        "sha": snapshot.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "siblings": [
            _sibling(snapshot.files[path].pin, blobs=blobs) for path in sorted(snapshot.files)
        ],
    }


def _sibling(pin: FilePin, *, blobs: bool) -> Json:
    if not blobs:
        return {"rfilename": pin.path}
    entry: Json = {"rfilename": pin.path, "size": pin.size_bytes, "blobId": blob_id(pin)}
    if pin.sha256:
        # the Hub spells LFS differently here than in a tree: sha256, not oid
        size = len(pointer(pin))
        entry["lfs"] = {"sha256": pin.sha256, "size": pin.size_bytes, "pointerSize": size}
    return entry


def refs(names: dict[str, str]) -> Json:
    """The names of revisions, all as branches: which of them are tags is not known."""
    rows = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in sorted(names.items())
    ]
    return {"branches": rows, "converts": [], "tags": []}


def health(served: ServedSets, *, in_detail: bool) -> dict[str, Any]:
    """Counts for everybody; names only for those who may read the files anyway."""
    files = served.files
    states = Counter(held.state for held in files)
    # the worst first: a monitor reads only this one
    status = "damaged" if states["wrong"] else "proving" if states["unproved"] else "ready"
    answer: dict[str, Any] = {
        "status": status,
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

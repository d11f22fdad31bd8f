"""Which repositories, revisions and files exist for a client: those of the locks, no others.

The listings have the form of the Hub's API, and come from locks alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.core.errors import LockEdited
from pipeline.core.files import files_below, read_plain
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place
from pipeline.weights.serve.http import Refused
from pipeline.weights.serve.prover import ServedFile

MAIN = "main"
_MOST_REF_BYTES = 256  # a commit has 40

Json = dict[str, Any]


def absent(code: str, message: str, commit: str = "") -> Refused:
    """The refusal of what is not served; `code` is the Hub's X-Error-Code for it."""
    extra = {"X-Repo-Commit": commit} if commit else {}
    return Refused(404, message, {"X-Error-Code": code, **extra})


@dataclass
class Snapshot:
    """One commit of a repository: the files of every set that was locked from it."""

    repository: str
    commit: str
    files: dict[str, ServedFile] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)  # path -> its id in listings

    def add(self, place: Place) -> None:
        """Take in a set; sets of one commit may share files, but not contradict each other."""
        for pin in place.lock.files:
            held = self.files.setdefault(pin.path, ServedFile(place, pin))
            if held.pin != pin:
                raise LockEdited(
                    f"{self.repository}: {pin.path} is locked in two ways at one commit",
                    f"Compare {held.place.lock_file} and {place.lock_file}.",
                )
            # clients need an id, not git's: a set is mostly a part of its repository, so git's
            # id of the whole folder could not be known here anyway
            folders = PurePosixPath(pin.path).parents
            self.folders.update((str(f), _git_id("tree", bytes(f))) for f in folders if f.name)

    def held(self, path: str) -> ServedFile:
        if path not in self.files:
            raise absent("EntryNotFound", "there is no such file in the set", self.commit)
        return self.files[path]

    def _entry(self, path: str) -> Json:
        """A file or folder in a tree."""
        if path in self.folders:
            return {"type": "directory", "oid": self.folders[path], "size": 0, "path": path}
        pin = self.files[path].pin
        oid, lfs = _ids(pin, "oid")
        return {"type": "file", "oid": oid, "size": pin.size_bytes, "path": path, **lfs}

    def tree(self, below: str, *, recursive: bool) -> list[Json]:
        """The files and folders below a folder, sorted by path."""
        if below and below not in self.folders:
            raise absent("EntryNotFound", "there is no such folder in the set", self.commit)
        start = f"{below}/" if below else ""
        return [
            self._entry(path)
            for path in sorted({*self.folders, *self.files})
            if path.startswith(start) and (recursive or "/" not in path[len(start) :])
        ]

    def paths_info(self, paths: list[str]) -> list[Json]:
        """Entries of some paths; like the Hub, silent about those that do not exist."""
        known = (p for p in dict.fromkeys(paths) if p in self.files or p in self.folders)
        return [self._entry(path) for path in known]

    def model_info(self, *, blobs: bool) -> Json:
        """The repository at one commit."""
        siblings: list[Json] = [{"rfilename": path} for path in sorted(self.files)]
        for entry in siblings if blobs else ():
            pin = self.files[entry["rfilename"]].pin
            # the Hub spells LFS differently here than in a tree: sha256, not oid
            blob_id, lfs = _ids(pin, "sha256")
            entry |= {"size": pin.size_bytes, "blobId": blob_id, **lfs}
        return {
            "id": self.repository,
            "modelId": self.repository,
            "author": self.repository.partition("/")[0],
            "sha": self.commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "siblings": siblings,
        }


def _ids(pin: FilePin, spelling: str) -> tuple[str, Json]:
    """Git's id of a file, and the `lfs` entry of a large one, of which git holds a pointer."""
    if pin.git_sha1:
        return pin.git_sha1, {}
    size = pin.size_bytes
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{pin.sha256}\nsize {size}\n"
    lfs = {spelling: pin.sha256, "size": size, "pointerSize": len(pointer)}
    return _git_id("blob", pointer.encode()), {"lfs": lfs}


def _git_id(kind: str, data: bytes) -> str:
    head = f"{kind} {len(data)}\0".encode()
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()


class ServedSets:
    """Everything that is served."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.snapshots: dict[tuple[str, str], Snapshot] = {}
        self._names: dict[tuple[str, str], str] = {}
        for place in places:
            key = (place.lock.repository, place.lock.commit)
            self.snapshots.setdefault(key, Snapshot(*key)).add(place)
            # a Hub cache records which branch or tag a commit came from; a plain folder does not
            refs = place.root / "refs"
            plain = (e for e in files_below(refs) if e.is_file(follow_symlinks=False))
            for path in sorted(Path(e.path) for e in plain) if place.hub_cache else ():
                name = path.relative_to(refs).as_posix()
                with suppress(OSError):  # what cannot be read names no commit
                    data = read_plain(path, _MOST_REF_BYTES) or b""
                    if data.strip() == place.lock.commit.encode():
                        self._names[place.lock.repository, name] = place.lock.commit

    @property
    def files(self) -> list[ServedFile]:
        return [held for s in self.snapshots.values() for held in s.files.values()]

    def names(self, repository: str) -> dict[str, str]:
        """Every name of a repository's revisions with its commit."""
        named = {n: c for (r, n), c in self._names.items() if r == repository}
        commits = self._commits(repository)
        # clients that name no revision ask for main; of several commits none can be meant
        return {**({MAIN: commits[0]} if len(commits) == 1 else {}), **named}

    def find(self, repository: str, revision: str) -> Snapshot:
        """The snapshot that a client means."""
        commits = self._commits(repository)
        if not commits:
            raise absent("RepoNotFound", "this server does not have the repository")
        commit = self.names(repository).get(revision, revision)
        if (repository, commit) not in self.snapshots:
            what = "is not served; ask for one of the commits"
            raise absent("RevisionNotFound", f"the revision {what} {', '.join(commits)}")
        return self.snapshots[repository, commit]

    def refs(self, repository: str) -> Json:
        """The names of revisions, all as branches: which of them are tags is not known."""
        names = self.names(repository)
        self.find(repository, next(iter(names), MAIN))
        rows = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in sorted(names.items())
        ]
        return {"branches": rows, "converts": [], "tags": []}

    def _commits(self, repository: str) -> list[str]:
        return sorted(c for r, c in self.snapshots if r == repository)

    def health(self, *, in_detail: bool) -> Json:
        """Counts for everybody; names only for those who may read the files anyway."""
        files = self.files
        states = Counter(held.state for held in files)
        # the worst first: a monitor reads only this one
        status = "damaged" if states["wrong"] else "proving" if states["unproved"] else "ready"
        answer: Json = {
            "status": status,
            "files": len(files),
            "proved": states["proved"],
            "unproved": states["unproved"],
            "wrong": states["wrong"],
            "size_bytes": sum(held.pin.size_bytes for held in files),
            "proved_bytes": sum(h.pin.size_bytes for h in files if h.state == "proved"),
        }
        if in_detail:
            answer["sets"] = [
                {
                    "repository": snapshot.repository,
                    "commit": snapshot.commit,
                    "files": len(snapshot.files),
                    "proved": sum(h.state == "proved" for h in snapshot.files.values()),
                    "wrong": {p: h.why for p, h in snapshot.files.items() if h.state == "wrong"},
                }
                for snapshot in self.snapshots.values()
            ]
        return answer

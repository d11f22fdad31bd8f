"""Which repositories, revisions and files exist for a client: those of the locks, no others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pipeline.errors import LockEdited
from pipeline.files import files_below, read_plain
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place
from pipeline.weights.serve.prover import ServedFile

MAIN = "main"
_MOST_REF_BYTES = 256  # a commit has 40


class Absent(Exception):
    """What a client asked for is not here; `code` is the Hub's X-Error-Code for it."""

    def __init__(self, code: str, message: str, commit: str = "") -> None:
        super().__init__(message)
        self.code, self.commit = code, commit


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
            raise Absent("EntryNotFound", "there is no such file in the set", self.commit)
        return self.files[path]


def pointer(pin: FilePin) -> bytes:
    """What git itself holds of a large file."""
    return (
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{pin.sha256}\nsize {pin.size_bytes}\n"
    ).encode()


def blob_id(pin: FilePin) -> str:
    """Git's id of a file; of a large one it is that of its pointer."""
    if pin.git_sha1:
        return pin.git_sha1
    return _git_id("blob", pointer(pin))


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
            self._learn_names(place)

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
            raise Absent("RepoNotFound", "this server does not have the repository")
        commit = self.names(repository).get(revision, revision)
        if (repository, commit) not in self.snapshots:
            what = "is not served; ask for one of the commits"
            raise Absent("RevisionNotFound", f"the revision {what} {', '.join(commits)}")
        return self.snapshots[repository, commit]

    def _commits(self, repository: str) -> list[str]:
        return sorted(c for r, c in self.snapshots if r == repository)

    def _learn_names(self, place: Place) -> None:
        """A Hub cache records which branch or tag a commit came from; a plain folder does not."""
        refs = place.root / "refs"
        if not place.hub_cache:
            return
        plain = (e for e in files_below(refs) if e.is_file(follow_symlinks=False))
        for path in sorted(Path(entry.path) for entry in plain):
            name = path.relative_to(refs).as_posix()
            with suppress(OSError):  # what cannot be read names no commit
                if (read_plain(path, _MOST_REF_BYTES) or b"").strip() == place.lock.commit.encode():
                    self._names[place.lock.repository, name] = place.lock.commit

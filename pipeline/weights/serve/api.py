"""Answers as the Hub gives them, for the part of it that clients need to load a model.

The locks alone decide which repositories, revisions and files exist for a client.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from pipeline.core.errors import LockEdited
from pipeline.core.files import files_below, read_plain
from pipeline.weights.disk.blocks import (
    LEAST_BLOCK_BYTES,
    MOST_BLOCK_BYTES,
    BlockList,
    HeldBlocks,
    all_blocks,
    hash_blocks,
)
from pipeline.weights.disk.hashing import FileUnfit, FileUnreadable, Identity
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder
from pipeline.weights.serve import http
from pipeline.weights.serve.http import Request, RequestError, Response
from pipeline.weights.serve.prover import NotYet, Prover, ServedFile

PAGE_ENTRIES = 1000  # as the Hub has on a page
_RETRY_S = 10  # a shard of 5 GB is hashed in less
_LOOPBACK = re.compile(r"(127\.[0-9.]+|localhost|\[::1\])(:[0-9]+)?", re.I)
_HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_ONE_RANGE = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})")
MAIN = "main"
_MOST_REF_BYTES = 256  # a commit has 40

Json = dict[str, Any]


def absent(code: str, message: str, commit: str = "") -> RequestError:
    """Refuse what is not served; `code` is the Hub's X-Error-Code for it."""
    extra = {"X-Repo-Commit": commit} if commit else {}
    return RequestError(404, message, {"X-Error-Code": code, **extra})


@dataclass
class Snapshot:
    """One commit of a repository: the files of every set that was locked from it."""

    repository: str
    commit: str
    files: dict[str, ServedFile] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)  # path -> its id in listings

    def add(self, place: LockedFolder) -> None:
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

    def entry(self, path: str) -> Json:
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
            self.entry(path)
            for path in sorted({*self.folders, *self.files})
            if path.startswith(start) and (recursive or "/" not in path[len(start) :])
        ]

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

    def __init__(self, places: Iterable[LockedFolder]) -> None:
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
        """Map a repository's revision names to commits."""
        named = {n: c for (r, n), c in self._names.items() if r == repository}
        commits = self._commits(repository)
        # clients that name no revision ask for main; with several commits that is ambiguous
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
        """List the names of revisions, all as branches: nobody knows which of them are tags."""
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


class BlockHolder(Protocol):
    """A fetch that hands on what it has verified, while it still fetches the rest."""

    def open_held(self, pin: FilePin, start: int, stop: int) -> int:
        """A handle on verified bytes; raises FileUnreadable where they are not here yet."""
        ...

    def held(self) -> HeldBlocks: ...


@dataclass(frozen=True)
class HubApi:
    """A read-only Hub over some locked sets."""

    served: ServedSets
    prover: Prover
    tokens: frozenset[str] = frozenset()
    only_loopback: bool = True
    scheme: str = "http"
    holder: BlockHolder | None = None  # the files are still being fetched
    host: str = field(default_factory=lambda: secrets.token_hex(8))
    _lists: dict[tuple[str, int], BlockList] = field(default_factory=dict)
    _listing: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: Request) -> Response:
        """Answer a request; no request changes anything."""
        try:
            return self._answer(request)
        except NotYet as reason:
            refused = RequestError(
                503, f"the file {reason}: try later", {"Retry-After": str(_RETRY_S)}
            )
        except FileUnfit as reason:
            # not a 5xx: clients would ask for half a minute more, and the file stays as it is
            refused = RequestError(409, f"the file is refused: it {reason}")
        except RequestError as reason:
            refused = reason
        headers = {"X-Error-Message": str(refused), "Content-Type": "application/json"}
        body = json.dumps({"error": str(refused)}).encode()
        return Response(refused.status, headers | refused.extra, body)

    def _answer(self, request: Request) -> Response:
        parts, query = request.split()
        host = request.header("host")
        if not _HOST.fullmatch(host):
            raise RequestError(400, "the Host header is missing or malformed")
        # DNS rebinding: a page's own name may lead to 127.0.0.1, but its Host header shows the name
        if self.only_loopback and not self.tokens and not _LOOPBACK.fullmatch(host):
            raise RequestError(
                421, "this server listens on loopback only; use localhost or 127.0.0.1"
            )
        # before the token is asked for: load balancers and systemd probes have none
        if parts == ["healthz"]:
            _check_method(request, "GET", "HEAD")
            return _json(self.served.health(in_detail=self.may_read(request)))
        if not self.may_read(request):
            # the Hub's own message for a wrong token: its client recognises it
            message = "Invalid credentials in Authorization header"
            if not request.header("authorization"):
                message = "this server needs a token: set HF_TOKEN"
            raise RequestError(401, message, {"WWW-Authenticate": "Bearer"})
        match parts:
            # POST, as the Hub's client asks: a list of paths may be longer than a URL
            case ["api", "models", owner, name, "paths-info", revision]:
                _check_method(request, "POST")
                snapshot = self.served.find(f"{owner}/{name}", revision)
                # like the Hub, silent about those that do not exist
                known = {*snapshot.files, *snapshot.folders}
                paths = (path for path in dict.fromkeys(request.asked_paths()) if path in known)
                return _json([snapshot.entry(path) for path in paths], snapshot)
            case ["api", "models", owner, name] | ["api", "models", owner, name, "revision", _]:
                _check_method(request, "GET", "HEAD")
                snapshot = self.served.find(f"{owner}/{name}", parts[5] if parts[4:] else MAIN)
                return _json(
                    snapshot.model_info(blobs=http.is_switched_on(query, "blobs")), snapshot
                )
            case ["api", "models", owner, name, "refs"]:
                _check_method(request, "GET", "HEAD")
                return _json(self.served.refs(f"{owner}/{name}"))
            case ["api", "models", owner, name, "tree", revision, *path]:
                _check_method(request, "GET", "HEAD")
                snapshot = self.served.find(f"{owner}/{name}", revision)
                below = "/".join(path).strip("/")
                rows = snapshot.tree(below, recursive=http.is_switched_on(query, "recursive"))
                limit = min(http.number(query, "limit", PAGE_ENTRIES), PAGE_ENTRIES) or PAGE_ENTRIES
                start, extra = http.number(query, "cursor", 0), {}
                if len(rows) > start + limit:
                    asked = {name: values[0] for name, values in query.items()}
                    text = urlencode({**asked, "limit": limit, "cursor": start + limit})
                    place = f"{host}{quote(request.path, safe='/%')}"
                    extra["Link"] = f'<{self.scheme}://{place}?{text}>; rel="next"'
                return _json(rows[start : start + limit], snapshot, extra)
            # not of the Hub's API: what hosts of a rack ask each other
            case ["api", "models", owner, name, "held", revision]:
                _check_method(request, "GET")
                return self.held(self.served.find(f"{owner}/{name}", revision), _block(query))
            case ["api", "models", owner, name, "blocks", revision, *path] if path:
                _check_method(request, "GET")
                snapshot = self.served.find(f"{owner}/{name}", revision)
                return self.blocks(snapshot.held("/".join(path)), _block(query))
            case ["api", "models", _, _, *_]:
                _check_method(request, "GET", "HEAD")
                raise absent(
                    "EntryNotFound", "this server does not have this part of the Hub's API"
                )
            case [owner, name, "resolve", revision, *path] if path:
                _check_method(request, "GET", "HEAD")
                snapshot = self.served.find(f"{owner}/{name}", revision)
                return self._file(request, snapshot, snapshot.held("/".join(path)))
        _check_method(request, "GET", "HEAD", "POST")
        raise absent("RepoNotFound", "this server has only model repositories, read-only")

    def _file(self, request: Request, snapshot: Snapshot, held: ServedFile) -> Response:
        pin, etag = held.pin, f'"{held.pin.want}"'
        headers = {
            "Content-Type": "application/octet-stream",
            "ETag": etag,
            "X-Repo-Commit": snapshot.commit,
            "Accept-Ranges": "bytes",
            # a proxy must ask again: by now we may refuse the file
            "Cache-Control": "no-cache",
        }
        if pin.sha256:
            # the Hub's client takes hash and size of a large file from these, not from its ETag
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(pin.size_bytes)}
        if etag in request.header("if-none-match"):
            return Response(304, headers)
        asked = request.header("range")
        # RFC 9110, 13.1.5: the client has a part of another file, so it needs all of this one
        if request.header("if-range") not in ("", etag) or request.method == "HEAD":
            asked = ""
        status, start, stop, size = 200, 0, pin.size_bytes, pin.size_bytes
        unit, _, text = asked.partition("=")
        # Several ranges in one request may be answered with the whole file, and so may a unit that
        # is not known; a range in bytes that cannot be parsed is refused: its author wanted little.
        if unit.strip().lower() == "bytes" and "," not in text:
            match, status, stop = _ONE_RANGE.fullmatch(text.strip()), 206, 0
            if match and match[3] is not None:
                start, stop = max(0, size - int(match[3])), size  # `-500`: the last 500 bytes
            elif match:
                start, stop = int(match[1]), min(int(match[2] or size), size - 1) + 1
            if start >= stop:
                extra = {"Content-Range": f"bytes */{size}"}
                raise RequestError(416, "the file does not have this range", extra)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if held.is_small and self.holder is None:
            return Response(status, headers, self.prover.read(held)[start:stop])
        handle, seen = self._open(held, start, stop)
        return Response(status, headers, part=http.FilePart(handle, start, stop - start, seen))

    def _open(self, held: ServedFile, start: int, stop: int) -> tuple[int, Identity | None]:
        if self.holder is None:
            return self.prover.open(held)
        try:
            return self.holder.open_held(held.pin, start, stop), None
        except FileUnreadable as reason:
            raise NotYet(str(reason)) from None

    def held(self, snapshot: Snapshot, block_bytes: int) -> Response:
        """List the blocks here: those that a running fetch verified, else whole files."""
        if self.holder is not None:
            now = self.holder.held()
            # bits of blocks of another size mean other bytes
            if now.block_bytes != block_bytes:
                raise RequestError(409, f"the blocks here have {now.block_bytes} bytes")
        else:
            pins = [held.pin for held in snapshot.files.values() if held.state == "proved"]
            now = HeldBlocks(
                host=self.host,
                block_bytes=block_bytes,
                is_whole=len(pins) == len(snapshot.files),
                received_bytes=0,
                files={p.want: f"{all_blocks(p.size_bytes, block_bytes):x}" for p in pins},
            )
        return _json(now.model_dump(), snapshot)

    def blocks(self, held: ServedFile, block_bytes: int) -> Response:
        """Return the hash of each block of a whole file; compute it once, one file at a time."""
        key = held.pin.want, block_bytes
        with self._listing:
            if key not in self._lists:
                size = held.pin.size_bytes
                handle, seen = self._open(held, 0, size)
                part = http.FilePart(handle, 0, size, seen)
                try:
                    self._lists[key] = hash_blocks(handle, size, block_bytes)
                    part.require_unchanged()
                except (OSError, http.Incomplete) as error:
                    self._lists.pop(key, None)
                    raise NotYet(f"could not be read now ({error})") from None
                finally:
                    os.close(handle)
            return _json(self._lists[key].model_dump())

    def may_read(self, request: Request) -> bool:
        """Whether a request shows a token, or none is needed."""
        kind, _, given = request.header("authorization").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        # all are compared, in constant time: the answer's delay must not show how much was right
        matches = [hmac.compare_digest(token, known.encode()) for known in self.tokens]
        return not self.tokens or (kind.lower() == "bearer" and any(matches))


def _block(query: http.Query) -> int:
    block_bytes = http.number(query, "block_bytes", LEAST_BLOCK_BYTES)
    # one of five sizes: a client must not have us keep a list for every number there is
    if block_bytes.bit_count() != 1 or not LEAST_BLOCK_BYTES <= block_bytes <= MOST_BLOCK_BYTES:
        raise RequestError(400, "block_bytes is not a power of two from 1 MiB to 16 MiB")
    return block_bytes


def _check_method(request: Request, *allowed: str) -> None:
    if request.method not in allowed:
        names = ", ".join(allowed)
        raise RequestError(405, f"only {names} may be used here", {"Allow": names})


def _json(
    value: Any, snapshot: Snapshot | None = None, extra: dict[str, str] | None = None
) -> Response:
    headers = {"Content-Type": "application/json; charset=utf-8", **(extra or {})}
    if snapshot:
        headers["X-Repo-Commit"] = snapshot.commit
    return Response(200, headers, json.dumps(value, ensure_ascii=False).encode())

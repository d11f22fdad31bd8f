"""A small Hub of real bytes on loopback: repositories, revisions, tree pages, ranges, a CDN.

    with test_hub() as hub:
        commit = hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": big_bytes})
        hub.fail("model.safetensors", hub_faults.flip(5))     # the next answer that holds byte 5
        ...
        hub.sent_bytes("model.safetensors")

Files of `large_from` bytes and more are LFS files and lie with "the CDN", another port. What was
asked is in `asked`, what goes wrong on request in `tests.testbed.hub_faults`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from tests.testbed.hub_handler import Handler
from tests.testbed.quiet_server import serving

if TYPE_CHECKING:
    from tests.testbed.hub_faults import Fault

Stage = Literal["info", "tree", "resolve", "body", "xet"]
ALWAYS = 1_000_000
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Blob:
    """The bytes of one file: in memory, or a file of this disk that may be large."""

    content: bytes | Path
    large: bool

    @cached_property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    @cached_property
    def sha256(self) -> str:
        total = hashlib.sha256()
        for piece in self.pieces(0, self.size):
            total.update(piece)
        return total.hexdigest()

    @cached_property
    def oid(self) -> str:
        """Git's name: of the file, or of the pointer that stands for a large one."""
        total = hashlib.sha1(b"blob %d\0" % (len(self.pointer) if self.large else self.size))
        for piece in [self.pointer] if self.large else self.pieces(0, self.size):
            total.update(piece)
        return total.hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        head = "version https://git-lfs.github.com/spec/v1"
        return f"{head}\noid sha256:{self.sha256}\nsize {self.size}\n".encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from one place to another, little by little."""
        if isinstance(self.content, bytes):
            for at in range(start, stop, _PIECE_BYTES):
                yield self.content[at : min(at + _PIECE_BYTES, stop)]
            return
        with self.content.open("rb") as handle:
            handle.seek(start)
            while start < stop and (piece := handle.read(min(_PIECE_BYTES, stop - start))):
                start += len(piece)
                yield piece


@dataclass
class Asked:
    """One request, how it was answered, and how many bytes of body have left so far."""

    origin: Literal["hub", "cdn"]
    method: str
    target: str
    stage: Stage | None
    name: str  # of the file, or of the revision
    headers: dict[str, str]
    status: int = 0
    sent_bytes: int = 0

    @property
    def has_token(self) -> bool:
        return "authorization" in self.headers

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass
class Repository:
    """Commits with their files, and names for some of the commits."""

    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""  # private: without it, the repository is not there
    gated_for: str = ""  # gated: the files are only for this token

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Planned:
    """A fault that waits for its request."""

    pattern: str
    stage: Stage
    fault: Fault
    times: int


@dataclass
class TestHub:
    """What is served, what goes wrong, and what was asked."""

    __test__ = False  # a part for tests, not one of them

    url: str = ""
    cdn_url: str = ""
    large_from: int = 1 << 14
    page_entries: int = 1000
    redirects: bool = True
    xet: bool = False
    bytes_per_s: float = 0  # of one connection
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    _planned: list[Planned] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, repository: str, files: Mapping[str, bytes | Path], revision: str = "main"
    ) -> str:
        """A new commit that a revision now names; returns the commit."""
        blobs = {path: self._blob(content) for path, content in sorted(files.items())}
        names = json.dumps([repository, {path: blob.oid for path, blob in blobs.items()}])
        commit = hashlib.sha1(names.encode()).hexdigest()
        home = self.repositories.setdefault(repository, Repository())
        home.commits[commit] = blobs
        home.refs[revision] = commit
        return commit

    def _blob(self, content: bytes | Path) -> Blob:
        blob = Blob(content, large=False)
        return Blob(content, large=True) if blob.size >= self.large_from else blob

    def fail(self, pattern: str, fault: Fault, times: int = 1, stage: Stage = "body") -> None:
        """Answer the next requests that fit in a bad way.

        `stage` is which: a file's `body` wherever it comes from, the `resolve` call before it
        (which redirects large files), the `tree` or `info` of a revision, or the `xet` token.
        """
        with self._guard:
            self._planned.append(Planned(pattern, stage, fault, times))

    def forgive(self) -> None:
        """Nothing goes wrong any more."""
        with self._guard:
            self._planned.clear()

    def next_fault(self, stage: Stage, name: str, start: int, stop: int) -> Fault | None:
        with self._guard:
            for plan in self._planned:
                fits = plan.stage == stage and fnmatchcase(name, plan.pattern)
                if plan.times > 0 and fits and plan.fault.hits(start, stop):
                    plan.times -= 1
                    return plan.fault
        return None

    def blob_of(self, sha256: str) -> Blob | None:
        """What the CDN has under a hash."""
        repositories = self.repositories.values()
        blobs = (b for r in repositories for c in r.commits.values() for b in c.values())
        return next((b for b in blobs if b.large and b.sha256 == sha256), None)

    def cdn_address(self, blob: Blob, path: str) -> str:
        return f"{self.cdn_url}/cdn/{blob.sha256}/{quote(path)}?signature=of-the-day"

    def tree(self, repository: Repository, commit: str) -> list[dict[str, Any]]:
        """Entries as the Hub's tree call lists them: folders too, LFS files with their hash."""
        entries: dict[str, dict[str, Any]] = {}
        for path, blob in repository.commits[commit].items():
            for at in (i for i, c in enumerate(path) if c == "/"):
                oid = hashlib.sha1(path[:at].encode()).hexdigest()
                entries[path[:at]] = {"type": "directory", "oid": oid, "size": 0, "path": path[:at]}
            entries[path] = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path}
            if blob.large:
                sizes = {"size": blob.size, "pointerSize": len(blob.pointer)}
                entries[path]["lfs"] = {"oid": blob.sha256, **sizes}
            if blob.large and self.xet:
                entries[path]["xetHash"] = blob.sha256
        return [entries[path] for path in sorted(entries)]

    def bodies(self, pattern: str = "*") -> list[Asked]:
        """The requests that were answered with bytes of matching files."""
        asked = [a for a in self.asked if a.stage == "body" and a.method == "GET"]
        return [a for a in asked if fnmatchcase(a.name, pattern)]

    def sent_bytes(self, pattern: str = "*") -> int:
        """How many bytes of matching files have left, over all requests."""
        return sum(asked.sent_bytes for asked in self.bodies(pattern))


@contextmanager
def test_hub(**settings: Any) -> Iterator[TestHub]:
    """Run the Hub and its CDN on free ports until the block ends."""
    hub = TestHub(**settings)
    with (
        serving(Handler, hub=hub, origin="hub") as hub.url,
        serving(Handler, hub=hub, origin="cdn") as hub.cdn_url,
    ):
        try:
            yield hub
        finally:
            hub.stopping.set()


test_hub.__test__ = False  # type: ignore[attr-defined]

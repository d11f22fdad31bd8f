"""The store: finished things by digest, shared by every build of a user.

    store.json    marks the folder as a store; in any other folder nothing is written or removed
    oci/          an OCI image layout: blobs/sha256/<hex>, index.json
    inputs/       wheels and .debs, by sha256
    partial/      downloads under way; kept after a crash, resumed
    layers/       which layer a set of inputs gave (key → digest, diffID, sizes)
    contents/     what a layer holds and where in the blob each file lies
    images/       what was built last, for `nothing to do` in a blink, and the results of its gates
    gate/ gates/  what gates compile with, and their results; see pipeline/images/gate/upkeep.py
    toolchains/ trees/ objects/ imports/ logs/  what compiling leaves (images/source)
    bumps/        candidates of `sm120 bump`: their specs and locks, and what was found
    published/    which repositories were seen to hold what
    verified/     the newest image that a tag of a registry was seen on
    attempts/ tiny/  what was served and how it went, and the tiny model; see pipeline/serving/serve
    smoke/        results of `sm120 smoke URL` without --output, and their statements
    tmp/ locks/   work under way
Everything outside partial/ and tmp/ appears by rename only, so a kill leaves no half file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from pipeline.artifacts.oci.document import index_json
from pipeline.artifacts.oci.layout import LAYOUT
from pipeline.artifacts.oci.record import FileRow, ImageRecord, LayerRecord, WrittenLayer
from pipeline.core import files, foreign_json
from pipeline.core.errors import FolderInTheWay, NotAStore, StoreDamaged
from pipeline.core.files import is_free, locked, os_errors_explained, read_plain, remove_tree
from pipeline.core.model import Frozen, sha256_of

# Documents of images; and the tables of layers, which have a line for each file.
_MOST_BYTES = 64 << 20
_MOST_TABLE_BYTES = 1 << 30
_MOST_MARK_BYTES = 4096
MARK = "store.json"
FORMAT = 1
_LINE = b'{"format":%d,"kind":"sm120 store"}\n' % FORMAT
# Every store has these; the others of OWN come with what needs them.
FOLDERS = (
    *("oci", "oci/blobs", "oci/blobs/sha256"),
    *("inputs", "partial", "layers", "contents", "images", "tmp", "locks"),
)
OWN = (
    *(*FOLDERS, "gate", "gates", "published", "verified"),
    *("imports", "logs", "objects", "toolchains", "trees"),
    *("attempts", "tiny", "loaded", "smoke", "bumps"),
)
# A new disk has the first; the second is a mark that was cut short.
_NOTHING = ("lost+found", MARK)


class _Mark(Frozen):
    """What `store.json` holds. We touch no store of a newer format, whose mark may hold more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["sm120 store"]
    format: int


def is_store(root: Path) -> bool:
    """Whether a folder has the mark of a store; a mark that is not ours is an error."""
    mark = root / MARK
    try:
        is_plain = stat.S_ISREG(mark.lstat().st_mode)
    except OSError as error:
        # other reasons are raised: `Path.exists` hides them from Python 3.14 on
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    try:
        text = files.read_at_most(mark, _MOST_MARK_BYTES) if is_plain else None
        if text == b"":
            return False  # cut short while it was written
        known = _Mark.model_validate_json(text or b"")
    except ValidationError:
        hint = f"If the folder is your store, make this its only line: {_LINE.decode().strip()}"
        raise NotAStore(f"{mark}: is damaged, or does not belong to a store", hint) from None
    if known.format != FORMAT:
        message = f"{mark}: the store has format {known.format}, this version supports {FORMAT}"
        raise NotAStore(message, "Use the newer version, or name another folder with SM120_STORE.")
    return True


def require_store(root: Path) -> None:
    """Refuses a folder that is neither a store nor a place where one may be made."""
    if not is_store(root):
        if not root.is_dir() and (root.exists() or root.is_symlink()):
            raise NotAStore(f"{root}: is not a folder")
        names = sorted(p.name for p in root.iterdir()) if root.exists() else []
        other = next((name for name in names if name not in _NOTHING), "")
        # another process may just have made it one
        if other and not is_store(root):
            raise NotAStore(f"{root}: is not a store, and not empty: it holds {other!r}")
        return
    # `trim` and `sweep` remove files: a link would lead them out of the store
    for name in OWN:
        if (root / name).is_symlink():
            message = f"{root / name}: is a symlink; a store's own folders must not be one"
            raise NotAStore(message, "Move the whole store instead: SM120_STORE names its place.")


class Store:
    """One user's store on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Makes the folders, and finds out now rather than later that they cannot be written."""
        with os_errors_explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            require_store(self.root)
            # The mark before anything else. It is written in place and in one piece, always the
            # same: two that make one store at the same time do not disturb each other, and a kill
            # leaves an empty mark at worst.
            if not is_store(self.root):
                # O_NOFOLLOW: a planted link would have us write into another file
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
                with os.fdopen(os.open(self.root / MARK, flags, 0o644), "wb") as mark:
                    mark.write(_LINE)
                    mark.flush()
                    os.fsync(mark.fileno())
            for name in FOLDERS:
                (self.root / name).mkdir(exist_ok=True)
            # by writing: modes, quotas and read-only mounts all refuse it differently
            with tempfile.TemporaryFile(dir=self.tmp):
                pass
            # so that skopeo and others can read from the store as it is
            self.write(self.root / "oci" / "oci-layout", LAYOUT)

    def blob_path(self, digest: str) -> Path:
        return self.root / "oci" / "blobs" / "sha256" / _hex(digest)

    def input_path(self, sha256: str) -> Path:
        return self.root / "inputs" / sha256

    def has_input(self, sha256: str, size_bytes: int) -> bool:
        """Whether a file of that name and size is there: enough to plan with, not to build from."""
        try:
            # a link could lead to a file that changes later
            info = self.input_path(sha256).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size == size_bytes

    def partial_path(self, sha256: str) -> Path:
        return self.root / "partial" / sha256

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def locked(
        self, name: str, stop: threading.Event | None = None
    ) -> AbstractContextManager[None]:
        """Locks one thing, e.g. a layer key, for one process."""
        return locked(self.root / "locks" / name, stop=stop)

    def in_use(self) -> AbstractContextManager[None]:
        """Many may build at once; `alone` waits for all of them.

        A reader of a store that cannot be written, and that never had this lock, has no other
        process to wait for.
        """
        path = self.root / "locks" / "store"
        is_readable_only = not path.exists() and not os.access(path.parent, os.W_OK)
        return nullcontext() if is_readable_only else locked(path, shared=True)

    def alone(self) -> AbstractContextManager[None]:
        """Lets no build run while the caller removes files."""
        return self.locked("store")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder that is gone afterwards; the lock in it tells others that it is in use."""
        with ExitStack() as held:
            # under a lock that `sweep` takes too: a folder whose lock is not held is a dead one
            with self.locked("scratch"), os_errors_explained(self.tmp):
                self.tmp.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(dir=self.tmp))
                held.callback(remove_tree, folder)
                held.enter_context(locked(folder / "in-use"))
            yield folder

    def sweep(self) -> None:
        """Removes folders of killed processes from the store's own tmp/, never links."""
        # a build that was stopped while it made the store may have left no tmp/
        if not (self.root / MARK).is_file() or self.tmp.is_symlink() or not self.tmp.is_dir():
            return
        # a killed process lost its lock; one that still works holds it
        with self.locked("scratch"), os.scandir(self.tmp) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and is_free(Path(entry.path) / "in-use"):
                    remove_tree(Path(entry.path))

    def need_space(self, n_bytes: int) -> None:
        """Stops before the first byte if the disk cannot hold what is coming."""
        files.need_space(self.root, n_bytes)

    def write(self, path: Path, data: bytes) -> None:
        """Writes a small file whole; a kill leaves its parts in tmp/, which `sweep` cleans."""
        # a build with nothing to do writes nothing, also in a store that cannot be written
        with suppress(OSError):
            if read_plain(path, len(data)) == data:
                return
        if path.is_dir() and not path.is_symlink():
            raise FolderInTheWay(path)
        with self.scratch() as folder:
            # `keep_file` syncs it, once
            with os_errors_explained(path):
                (folder / "new").write_bytes(data)
            files.keep_file(folder / "new", path)

    def put_blob(self, data: bytes) -> str:
        """Keeps a small blob (config, manifest, index)."""
        digest = sha256_of(data)
        self.write(self.blob_path(digest), data)
        return digest

    def read_blob(self, digest: str) -> bytes:
        """A small blob's bytes, checked."""
        path = self.blob_path(digest)
        try:
            data = read_own(path)
        except FileNotFoundError:
            raise StoreDamaged(f"{digest}: not in the store") from None
        if sha256_of(data) != digest:
            raise StoreDamaged(f"{path}: does not match its digest")
        return data

    def layer(self, key: str) -> LayerRecord | None:
        """The layer that a set of inputs gave before, if its blob is still whole."""
        path = self.root / "layers" / f"{_hex(key)}.json"
        try:
            record = LayerRecord.model_validate_json(read_own(path))
            # the size only: with nothing to do, hashing gigabytes would be all that a build does
            is_whole = self.blob_path(record.digest).stat().st_size == record.size_bytes
        except (FileNotFoundError, StoreDamaged, ValueError):
            return None
        return record if is_whole and self._table_path(record).exists() else None

    def keep_layer(self, key: str, layer: WrittenLayer) -> LayerRecord:
        """Records a layer whose blob is already in place, and what it holds."""
        # most files are root's, and a table of an engine has some ten thousand rows
        short = (row if row.uid or row.gid else row[:-2] for row in layer.rows)
        # a line a row, for `find_rows`: a newline is never part of a string of JSON
        lines = [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in short]
        # the record last: where it is, the table is too, whenever a kill comes
        self.write(self._table_path(layer.record), ("[\n" + ",\n".join(lines) + "\n]\n").encode())
        self.write(self.root / "layers" / f"{_hex(key)}.json", layer.record.dump())
        return layer.record

    def contents(self, layer: LayerRecord) -> list[FileRow]:
        """What a layer holds, ours or a foreign one."""
        return read_layer_table(self._table_path(layer))

    def find_rows(self, layer: LayerRecord, suffix: str) -> list[FileRow]:
        """Finds the rows whose path ends so, without parsing a whole table of ten thousands."""
        # the path is a row's first field, so its end is followed by a comma
        needle = json.dumps(suffix, ensure_ascii=False)[1:].encode() + b","
        try:
            table = read_own(self._table_path(layer), _MOST_TABLE_BYTES)
            rows, at = [], table.find(needle)
            while at >= 0:
                start, end = table.rfind(b"\n", 0, at) + 1, table.index(b"\n", at)
                row = FileRow(*json.loads(table[start:end].rstrip(b",")))
                # a link's target may end so as well
                if row.path.endswith(suffix):
                    rows.append(row)
                at = table.find(needle, end)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise StoreDamaged(f"the table of contents of {layer.digest} is damaged") from error
        return rows

    def _table_path(self, record: LayerRecord) -> Path:
        """The table's file: a layer can be both ours and foreign, with a table for each."""
        suffix = ".foreign.json" if record.is_foreign else ".json"
        return self.root / "contents" / f"{_hex(record.digest)}{suffix}"

    def image_record(self, name: str, platform: str) -> ImageRecord | None:
        """What was built last for an image and platform; none where the record is damaged."""
        try:
            return read_image_record(self.image_folder(name, platform) / "image.json")
        except (FileNotFoundError, StoreDamaged):
            return None

    def has_image(self, record: ImageRecord) -> bool:
        """Whether all of an image is still here; it does not read the bytes of layers."""
        for layer in record.layers:
            path = self.blob_path(layer.record.digest)
            if not path.exists() or path.stat().st_size != layer.record.size_bytes:
                return False
        try:
            self.read_blob(record.config)
            self.read_blob(record.digest)
        except StoreDamaged:
            return False
        return True

    def keep_image(self, name: str, platform: str, record: ImageRecord) -> None:
        """Records a built image and names it in the layout's index."""
        self.write(self.image_folder(name, platform) / "image.json", record.dump())
        # `index.json` from the images that are there, so the store is itself an OCI layout;
        # two builds that end at the same time would each leave out the other's image
        with self.locked("index"):
            images = [read_image_record(path) for path in self.image_paths()]
            index = index_json(image.descriptor for image in images)
            self.write(self.root / "oci" / "index.json", index)

    def image_folder(self, name: str, platform: str) -> Path:
        return self.root / "images" / name / platform.replace("/", "-")

    def image_paths(self) -> list[Path]:
        """The records of all built images, to be read with `read_image_record`."""
        return sorted((self.root / "images").glob("*/*/image.json"))

    @contextmanager
    def new_blob(self) -> Iterator[NewBlob]:
        """A blob whose digest is known only when it is written."""
        with self.scratch() as folder:
            yield NewBlob(self, folder / "blob")


@dataclass(frozen=True)
class NewBlob:
    """Bytes that become a blob once they are whole."""

    store: Store
    path: Path

    def keep(self, digest: str) -> Path:
        """Gives the finished file its name."""
        final = self.store.blob_path(digest)
        files.keep_file(self.path, final)
        return final


def read_own(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Reads a file of the store's own. It waits for no pipe and reads nothing without an end."""
    try:
        data = read_plain(path, most_bytes)
    except OSError as error:
        # not a plain file, a socket, links in a circle
        if error.errno not in (errno.EINVAL, errno.ENXIO, errno.ELOOP):
            raise
        raise StoreDamaged(f"{path}: is not a plain file") from error
    if data is None:
        raise StoreDamaged(f"{path}: is larger than any file of its kind")
    return data


def read_image_record(path: Path) -> ImageRecord:
    """What the store keeps of a built image."""
    data = read_own(path)
    try:
        value = foreign_json.read_json(data, most_bytes=_MOST_BYTES)
        return ImageRecord.model_validate(value)
    except ValueError as error:
        raise StoreDamaged(f"{path}: is damaged") from error


def read_layer_table(path: Path) -> list[FileRow]:
    """A layer's table of contents."""
    try:
        return [FileRow(*row) for row in json.loads(read_own(path, _MOST_TABLE_BYTES))]
    except (ValueError, TypeError, FileNotFoundError, RecursionError) as error:
        raise StoreDamaged(f"the table of contents {path} is damaged") from error


def default_root() -> Path:
    """`SM120_STORE`, else the user's cache directory."""
    if chosen := os.environ.get("SM120_STORE"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "sm120"


def open_store(root: Path | None = None) -> Store:
    """Opens the store, ready for use."""
    store = Store(root or default_root())
    store.prepare()
    store.sweep()
    return store


def open_to_read(root: Path | None = None) -> Store:
    """Opens the store for commands that only read, also one that is read-only or missing.

    It makes, marks and sweeps nothing.
    """
    store = Store(root or default_root())
    with os_errors_explained(store.root):
        require_store(store.root)
    return store


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")

"""A folder of advisories: OSV's archives and records, and dumps of Debian's tracker, as published.

Reads all of it before anything is judged. One damaged record makes it refuse the whole database: a
gap would let a vulnerable package pass as clean.
"""

from __future__ import annotations

import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.artifacts.attest.statement import CLOCKS_APART
from pipeline.core import log
from pipeline.core.errors import DatabaseInvalid
from pipeline.core.files import sha256_of_file
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.audit.advisories import Advisory, Affected, read_osv, read_tracker

# the largest records list every version of a kernel; the tracker's dump is one file of 70 MB
_MOST_RECORD_BYTES = 32 << 20
_MOST_DUMP_BYTES = 512 << 20
_MOST_TOTAL_BYTES = 16 << 30
_MOST_RECORDS = 2_000_000
# deflate reaches 1032; JSON of advisories ten or twenty
_MOST_RATIO = 200
_SMALL = 1 << 20  # below that, a ratio says nothing

Package = tuple[str, str]  # an ecosystem and a name


@dataclass(frozen=True)
class AdvisoryDatabase:
    """The advisories about some packages; size and age of the database that they come from."""

    about: dict[Package, list[tuple[Advisory, Affected]]]
    digest: str  # over the digests of all files
    files: int
    records: int
    newest: datetime


@dataclass
class _Reading:
    """What has been read so far, against the limits."""

    wanted: Collection[Package]
    now: datetime
    known: dict[str, tuple[datetime | None, str, Advisory]]
    records: int = 0
    n_bytes: int = 0
    newest: datetime | None = None

    def parse(self, data: bytes, what: str, most_bytes: int) -> Any:
        """Parses a JSON value, within the limits of a whole database."""
        self.n_bytes += len(data)
        if self.n_bytes > _MOST_TOTAL_BYTES:
            raise DatabaseInvalid(f"{what}: the database is larger than {_MOST_TOTAL_BYTES} bytes")
        try:
            return read_json(data, most_bytes=most_bytes)
        except JsonInvalid as error:
            raise DatabaseInvalid(f"{what}: {error}") from error

    def keep(self, advisory: Advisory, content: str, what: str, key: str = "") -> None:
        """Keeps a record; the later one where two downloads hold the same."""
        self.records += 1
        if self.records > _MOST_RECORDS:
            raise DatabaseInvalid(f"{what}: the database has more than {_MOST_RECORDS} records")
        if advisory.modified:
            if advisory.modified > self.now + CLOCKS_APART:
                raise DatabaseInvalid(
                    f"{what}: was modified {advisory.modified:%Y-%m-%d}, which is in the future"
                )
            self.newest = max(self.newest or advisory.modified, advisory.modified)
        before = self.known.get(key or advisory.id)
        if before and before[1] != content:
            if before[0] == advisory.modified:
                raise DatabaseInvalid(f"{what}: {advisory.id} is there twice, with other contents")
            if before[0] and advisory.modified and before[0] > advisory.modified:
                return
        # other records need only their id, to notice a second one
        is_wanted = any((a.ecosystem, a.name) in self.wanted for a in advisory.affected)
        entry = advisory if is_wanted and not advisory.is_withdrawn else _UNWANTED
        self.known[key or advisory.id] = advisory.modified, content, entry


_UNWANTED = Advisory("", (), "unrated", None, None, "", ())


def read_database(folder: Path, wanted: Collection[Package], now: datetime) -> AdvisoryDatabase:
    """Reads all advisories below a folder, and keeps those about the wanted packages."""
    reading, paths = _Reading(wanted, now, {}), list[Path]()
    for place, folders, names in os.walk(folder):
        # a clone of a database has a history, which is no part of it
        folders[:] = sorted(x for x in folders if not x.startswith("."))
        found = sorted(x for x in names if x.endswith((".json", ".zip")) and x[0] != ".")
        paths += [Path(place) / name for name in found]
    digests = []
    with log.step(f"Reading advisories in {folder}"), log.counting(len(paths), "file") as bar:
        for path in paths:
            what = str(path.relative_to(folder))
            for name, inside, data in _contents(path, what):
                most_bytes = _MOST_RECORD_BYTES if path.suffix == ".zip" else _MOST_DUMP_BYTES
                body = reading.parse(data, inside, most_bytes)
                is_table = isinstance(body, dict) and bool(body)
                if is_table and "id" not in body and path.suffix != ".zip":
                    # the tracker has no times: the file was written when it was fetched
                    fetched = datetime.fromtimestamp(path.stat().st_mtime, UTC)
                    reading.newest = max(reading.newest or fetched, min(fetched, now))
                    for package, each in read_tracker(body, what):
                        content = f"{each.severity} {each.affected}"
                        reading.keep(each, content, what, f"{package} {each.id}")
                    continue
                advisory = read_osv(body, inside)
                # OSV names each file after its record; another was moved or made up
                if name != f"{advisory.id}.json":
                    raise DatabaseInvalid(
                        f"{inside}: holds the record {advisory.id}, and is not named after it",
                        f"Nothing was judged. A record's file is named {advisory.id}.json, as OSV"
                        " publishes it. Rename it if it is yours. Fetch the database again if not.",
                    )
                reading.keep(advisory, sha256_of(canonical_json(body)), inside)
            digests.append(f"{what} {sha256_of_file(path)}")
            bar.advance(1)
    if not reading.records or reading.newest is None:
        raise DatabaseInvalid(f"{folder}: holds no advisory (*.zip and *.json are read)")
    about: dict[Package, list[tuple[Advisory, Affected]]] = {}
    for _, _, advisory in reading.known.values():
        for place_of in advisory.affected:
            package_of = place_of.ecosystem, place_of.name
            if package_of in wanted:
                about.setdefault(package_of, []).append((advisory, place_of))
    digest = sha256_of("\n".join(digests).encode())
    return AdvisoryDatabase(about, digest, len(paths), reading.records, reading.newest)


def _contents(path: Path, what: str) -> Iterator[tuple[str, str, bytes]]:
    """Yields each file with its name and title: one of the folder, or all of an archive.

    Reads archives in memory and unpacks nothing, so no name in one leads anywhere.
    """
    try:
        # reading a pipe would block, and a link may lead out of the folder
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DatabaseInvalid(f"{what}: is a link or no plain file")
        if path.suffix != ".zip":
            if path.stat().st_size > _MOST_DUMP_BYTES:
                raise DatabaseInvalid(f"{what}: is larger than {_MOST_DUMP_BYTES} bytes")
            yield path.name, what, path.read_bytes()
            return
        with zipfile.ZipFile(path) as archive:
            seen: set[str] = set()
            for member in archive.infolist():
                inside = f"{what}: {member.filename[:80]!r}"
                if member.filename in seen:
                    raise DatabaseInvalid(f"{inside}: is there twice")
                seen.add(member.filename)
                if member.is_dir():
                    continue
                if not member.filename.endswith(".json"):
                    raise DatabaseInvalid(f"{inside}: is no record")
                if member.flag_bits & 1:
                    raise DatabaseInvalid(f"{inside}: is encrypted")
                size, packed = member.file_size, max(member.compress_size, 1)
                if size > _MOST_RECORD_BYTES or (size > _SMALL and size / packed > _MOST_RATIO):
                    raise DatabaseInvalid(f"{inside}: unpacks to {size} bytes from {packed}")
                # the header may lie about the size: no more than the limit is read
                with archive.open(member) as file:
                    data = file.read(_MOST_RECORD_BYTES + 1)
                yield member.filename.rpartition("/")[2], inside, data
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise DatabaseInvalid(f"{what}: cannot be read ({error})") from error
    except (RuntimeError, ValueError) as error:  # what zipfile raises for fields that contradict
        raise DatabaseInvalid(f"{what}: is a damaged archive ({error})") from error

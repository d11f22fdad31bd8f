"""A Python environment in an image: its folders, what wheels put there, and which wheel wins."""

from __future__ import annotations

import base64
import configparser
import csv
import io
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256

from packaging.utils import canonicalize_name

from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.core.errors import CorruptArchive, HostileArchive, PathConflict
from pipeline.images.assemble.layer import WRONG_RECORD, Deflated, Entry, link_to, parents
from pipeline.images.assemble.wheel import Member, Wheel, read_chunks, read_member

INSTALLER = b"sm120-pipeline\n"
# The longest entry_points.txt of today's engines has 2.4 kB; long ones are slow to parse.
_MOST_ENTRY_POINT_BYTES = 256 << 10
_MOST_SCRIPTS = 1_000
# A larger program is no script: nothing to rewrite in its first line.
_MOST_SCRIPT_BYTES = 1 << 20
# https://packaging.python.org/en/latest/specifications/entry-points/
_ENTRY_POINT = re.compile(r"^([\w.]+)\s*:\s*([\w.]+)\s*(\[.*\])?$")
_SCRIPT_NAME = re.compile(r"^[\w.+-]+$")
_SCRIPT = """\
#!{python}
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({call}())
"""


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment over the image's own Python, e.g. 3.11 at /opt/venv."""

    version: str = "3.11"
    root: str = "opt/venv"

    @property
    def site(self) -> str:
        return f"{self.root}/lib/python{self.version}/site-packages"

    @property
    def bin(self) -> str:
        return f"{self.root}/bin"

    def scheme(self, name: str, project: str) -> str | None:
        """The folder of one of a wheel's install schemes."""
        # where pip puts them in a virtual environment
        headers = f"{self.root}/include/site/python{self.version}/{project}"
        folders = {"purelib": self.site, "platlib": self.site, "scripts": self.bin}
        return {**folders, "data": self.root, "headers": headers}.get(name)

    def record_path(self, path: str) -> str:
        """A path as RECORD writes it: relative to site-packages."""
        return posixpath.relpath(path, self.site)

    def skeleton(self, home: str = "/usr/bin") -> list[Entry]:
        """What `python -m venv --without-pip` would make, without running it."""
        system = f"{home}/python{self.version}"
        config = f"home = {home}\ninclude-system-site-packages = false\nversion = {self.version}\n"
        links = {"python": system, "python3": "python", f"python{self.version}": "python"}
        return [
            Entry(f"{self.root}/pyvenv.cfg", Kind.FILE, 0o644, config.encode()),
            link_to(f"{self.root}/lib64", "lib"),
            *(link_to(f"{self.bin}/{n}", t) for n, t in links.items()),
        ]


def record_row(path: str, data: bytes) -> str:
    """A RECORD line for bytes that are at hand."""
    return _row(path, sha256(data).hexdigest(), len(data))


def _row(path: str, digest_hex: str, size_bytes: int) -> str:
    packed = base64.urlsafe_b64encode(bytes.fromhex(digest_hex)).decode().rstrip("=")
    out, promised = io.StringIO(), f"sha256={packed}" if digest_hex else ""
    csv.writer(out, lineterminator="\n").writerow([path, promised, size_bytes])
    return out.getvalue()


def wheel_entries(
    wheel: Wheel, venv: Venv, *, rewrite_record: bool = False, without: Sequence[str] = ()
) -> list[Entry]:
    """The files an installer would place, with its scripts made and all of them in RECORD.

    Files that match a pattern of `without` are left out, and RECORD does not list them.
    """
    entries: list[Entry] = []
    rows: list[str] = []
    record_name = f"{wheel.dist_info}/RECORD"
    for name, member in wheel.members.items():
        left_out = any(fnmatchcase(name, pattern) for pattern in without)
        if name == record_name or (left_out and not name.startswith(f"{wheel.dist_info}/")):
            continue
        promised = wheel.record.get(name, "")
        if rewrite_record:
            # for a wheel known to be published with a wrong RECORD
            sha = sha256()
            for piece in read_chunks(member):
                sha.update(piece)
            promised = sha.hexdigest()
        entry = _placed(wheel, member, venv, promised)
        entries.append(entry)
        rows.append(_row(venv.record_path(entry.path), entry.sha256, entry.size_bytes))
    shipped = {entry.path for entry in entries}
    made = [(f"{venv.site}/{wheel.dist_info}/INSTALLER", 0o644, INSTALLER)]
    # no section of a wheel's is a default for the others
    parser = configparser.ConfigParser(
        delimiters=("=",), strict=False, interpolation=None, default_section="\0"
    )
    # names of commands may have capitals
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    if listed := wheel.members.get(f"{wheel.dist_info}/entry_points.txt"):
        n_bytes = listed.content.size_bytes
        if n_bytes > _MOST_ENTRY_POINT_BYTES:
            raise HostileArchive(f"{wheel.filename}: {n_bytes} bytes of entry points are too many")
        try:
            parser.read_string(read_member(listed).decode())
        except (configparser.Error, UnicodeDecodeError) as error:
            raise CorruptArchive(f"{wheel.filename}: entry_points.txt is not readable") from error
    sections = [name for name in ("console_scripts", "gui_scripts") if parser.has_section(name)]
    points = [point for section in sections for point in parser.items(section)]
    if len(points) > _MOST_SCRIPTS:
        raise HostileArchive(f"{wheel.filename}: {len(points)} scripts are too many")
    for name, value in points:
        match = _ENTRY_POINT.match(value.strip())
        if not match or not _SCRIPT_NAME.match(name) or name.startswith("."):
            raise HostileArchive(f"{wheel.filename}: entry point {name!r} = {value!r} is not valid")
        words = {"module": match[1], "call": match[2], "first": match[2].split(".")[0]}
        text = _SCRIPT.format(python=f"/{venv.bin}/python", **words)
        made.append((f"{venv.bin}/{name}", 0o755, text.encode()))
    for path, mode, data in made:
        # a wheel may ship INSTALLER, or the script its entry point names
        if path not in shipped:
            shipped.add(path)
            entries.append(Entry(path, Kind.FILE, mode, data))
            rows.append(record_row(venv.record_path(path), data))
    # it cannot hold its own hash
    rows.append(f"{record_name},,\n")
    record = "".join(sorted(rows)).encode()
    entries.append(Entry(f"{venv.site}/{record_name}", Kind.FILE, 0o644, record))
    return [replace(entry, owner=wheel.project) for entry in entries]


def _placed(wheel: Wheel, member: Member, venv: Venv, promised: str) -> Entry:
    """Where one member goes: `.data/SCHEME/…` by its scheme, all else below site-packages."""
    top, _, below = member.name.partition("/")
    path, scheme = f"{venv.site}/{member.name}", ""
    if below and top.endswith(".data"):
        scheme, _, rest = below.partition("/")
        folder = venv.scheme(scheme, wheel.dist_info.split("-")[0])
        if folder is None or not rest:
            raise CorruptArchive(f"{wheel.filename}: unknown scheme in {member.name!r}")
        path = f"{folder}/{rest}"
    # `.data` folders lead to site-packages, too, where another's metadata would be believed
    inside = path.removeprefix(f"{venv.site}/")
    folder = inside.partition("/")[0]
    is_metadata = inside != path and folder.lower().endswith((".dist-info", ".egg-info"))
    if is_metadata and folder != wheel.dist_info:
        # old setuptools left an egg-info beside the modules
        name = canonicalize_name(folder.rpartition(".")[0].partition("-")[0])
        if not folder.lower().endswith(".egg-info") or name != wheel.project:
            message = f"{wheel.filename}: writes {folder}, the metadata of another package"
            raise HostileArchive(message)
    mode = 0o755 if member.executable or scheme == "scripts" else 0o644
    if scheme == "scripts" and member.content.size_bytes <= _MOST_SCRIPT_BYTES:
        data = read_member(member)
        if sha256(data).hexdigest() != promised:
            raise CorruptArchive(f"{member.name}: its RECORD promises {promised}", WRONG_RECORD)
        # `#!python` becomes the image's interpreter
        if data.startswith(b"#!python"):
            _, newline, rest_of_it = data.partition(b"\n")
            data = f"#!/{venv.bin}/python".encode() + newline + rest_of_it
            return Entry(path, Kind.FILE, mode, data, sha256=sha256(data).hexdigest())
    return Entry(path, Kind.FILE, mode, member.content, sha256=promised)


def winner(path: str, owners: Sequence[str], prefer: Sequence[str]) -> str:
    """Which wheel's bytes a contested path gets."""
    if len(set(owners)) == 1:
        # a wheel that contradicts itself has no winner
        raise PathConflict(
            f"/{path}: {owners[0]} is there twice, with different bytes",
            "An image cannot replace a wheel of its base: name the base's own base under `base`,"
            " and all requirements here.",
        )
    for name in prefer:
        if name in owners:
            return name
    listed = " and ".join(sorted(set(owners)))
    raise PathConflict(f"/{path}: {listed} write it with different bytes")


def merge_wheels(groups: Iterable[list[Entry]], prefer: Sequence[str]) -> list[Entry]:
    """The entries of several wheels as one list, each path once."""
    claims: dict[str, list[Entry]] = {}
    for entry in (e for group in groups for e in group):
        claims.setdefault(entry.path, []).append(entry)
    _require_files({parent for path in claims for parent in parents(path)} & claims.keys())
    merged = []
    for first, *others in claims.values():
        if not all(same_bytes(first, other) for other in others):
            rivals = [first, *others]
            name = winner(first.path, [entry.owner for entry in rivals], prefer)
            first = next(entry for entry in rivals if entry.owner == name)
        merged.append(first)
    return merged


def _require_files(contested: Iterable[str]) -> None:
    for path in sorted(contested):
        hint = "Lock another version of one of them, or leave one out under `python: omit:`."
        raise PathConflict(f"/{path}: is a file in one wheel and a folder in another", hint)


def same_bytes(one: Entry, other: Entry) -> bool:
    """Whether two files are equal, without reading them."""
    if one.kind is not Kind.FILE or other.kind is not Kind.FILE:
        return one.kind is other.kind and one.target == other.target

    def identity(entry: Entry) -> object:
        content = entry.content
        if entry.sha256 or content is None or isinstance(content, bytes):
            return entry.sha256 or content
        # files without a hash in RECORD compare by what the zip states
        is_packed = isinstance(content, Deflated)
        return (content.crc32, content.size_bytes) if is_packed else (content.path, content.offset)

    return identity(one) == identity(other)


def misplaced(layers: Sequence[list[FileRow]], prefer: Sequence[str]) -> list[tuple[int, FileRow]]:
    """The winners of contested paths that a later layer would hide, with their layers' numbers."""
    claims: dict[str, list[tuple[int, FileRow]]] = {}
    folders: set[str] = set()
    for position, rows in enumerate(layers):
        for row in rows:
            if row.kind == Kind.DIR:
                folders.add(row.path)
            else:
                claims.setdefault(row.path, []).append((position, row))
    _require_files(folders & claims.keys())
    lost = []
    # in a container the last layer wins, whatever `prefer` names
    for path, rivals in sorted(claims.items()):
        if len({(row.kind, row.sha256, row.target) for _, row in rivals}) == 1:
            continue
        name = winner(path, [row.owner for _, row in rivals], prefer)
        best = next(claim for claim in rivals if claim[1].owner == name)
        # unless the winner is on top already
        if best[0] != max(position for position, _ in rivals):
            lost.append(best)
    return lost

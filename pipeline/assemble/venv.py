"""A Python environment in an image: where it lies, and what installing a wheel puts there."""

from __future__ import annotations

import base64
import configparser
import csv
import io
import posixpath
import re
from dataclasses import dataclass, replace
from hashlib import sha256

from packaging.utils import canonicalize_name

from pipeline.assemble.entry import WRONG_RECORD, Entry
from pipeline.assemble.wheel import Member, Wheel, read_chunks, read_member
from pipeline.errors import CorruptArchive, HostileArchive
from pipeline.oci.record import Kind

INSTALLER = b"sm120-pipeline\n"
# The longest entry_points.txt of today's engines has 2.4 kB; reading them takes its time.
_MOST_ENTRY_POINT_BYTES = 256 << 10
_MOST_SCRIPTS = 1_000
# https://packaging.python.org/en/latest/specifications/entry-points/
_ENTRY_POINT = re.compile(r"^([\w.]+)\s*:\s*([\w.]+)\s*(\[.*\])?$")
_SCRIPT_NAME = re.compile(r"^[\w.+-]+$")
_METADATA_FOLDERS = (".dist-info", ".egg-info")
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

    @property
    def python(self) -> str:
        return f"/{self.root}/bin/python"

    def scheme(self, name: str, project: str) -> str | None:
        """The folder of one of a wheel's install schemes."""
        folders = {
            "purelib": self.site,
            "platlib": self.site,
            "scripts": self.bin,
            "data": self.root,
            # where pip puts them in a virtual environment
            "headers": f"{self.root}/include/site/python{self.version}/{project}",
        }
        return folders.get(name)

    def record_path(self, path: str) -> str:
        """A path as RECORD writes it: relative to site-packages."""
        return posixpath.relpath(path, self.site)

    def skeleton(self, home: str = "/usr/bin") -> list[Entry]:
        """What `python -m venv --without-pip` would leave, without running it."""
        system = f"{home}/python{self.version}"
        config = f"home = {home}\ninclude-system-site-packages = false\nversion = {self.version}\n"
        links = {"python": system, "python3": "python", f"python{self.version}": "python"}
        return [
            Entry(f"{self.root}/pyvenv.cfg", Kind.FILE, 0o644, config.encode()),
            Entry(f"{self.root}/lib64", Kind.SYMLINK, 0o777, target="lib"),
            *(Entry(f"{self.bin}/{n}", Kind.SYMLINK, 0o777, target=t) for n, t in links.items()),
        ]


def record_row(path: str, data: bytes) -> str:
    """A RECORD line for bytes that are at hand."""
    return _row(path, sha256(data).hexdigest(), len(data))


def _row(path: str, digest_hex: str, size_bytes: int) -> str:
    promised = ""
    if digest_hex:
        packed = base64.urlsafe_b64encode(bytes.fromhex(digest_hex)).decode().rstrip("=")
        promised = f"sha256={packed}"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([path, promised, size_bytes])
    return out.getvalue()


def wheel_entries(wheel: Wheel, venv: Venv, *, rewrite_record: bool = False) -> list[Entry]:
    """The files an installer would place, with its scripts made and all of them in RECORD."""
    if rewrite_record:
        wheel = replace(wheel, record=_true_record(wheel))
    entries: list[Entry] = []
    rows: list[str] = []
    record_name = f"{wheel.dist_info}/RECORD"
    for name, member in wheel.members.items():
        if name == record_name:
            continue
        entry = _placed(wheel, member, venv)
        _require_own_place(wheel, entry.path, venv)
        entries.append(entry)
        size = len(entry.content) if isinstance(entry.content, bytes) else member.content.size_bytes
        rows.append(_row(venv.record_path(entry.path), entry.sha256, size))
    made = [Entry(f"{venv.site}/{wheel.dist_info}/INSTALLER", Kind.FILE, 0o644, INSTALLER)]
    made += _console_scripts(wheel, venv)
    shipped = {e.path for e in entries}
    for entry in made:
        if entry.path in shipped:
            continue  # a wheel may ship INSTALLER, or the script its entry point names
        shipped.add(entry.path)
        entries.append(entry)
        assert isinstance(entry.content, bytes)
        rows.append(record_row(venv.record_path(entry.path), entry.content))
    # it cannot hold its own hash
    rows.append(f"{record_name},,\n")
    text = "".join(sorted(rows)).encode()
    entries.append(Entry(f"{venv.site}/{record_name}", Kind.FILE, 0o644, text))
    return [replace(entry, owner=wheel.project) for entry in entries]


def _require_own_place(wheel: Wheel, path: str, venv: Venv) -> None:
    """`.data` folders lead to site-packages, too, where another's metadata would be believed."""
    below = path.removeprefix(f"{venv.site}/")
    top = below.partition("/")[0]
    if below == path or not top.lower().endswith(_METADATA_FOLDERS) or top == wheel.dist_info:
        return
    # old setuptools left an egg-info beside the modules
    name = top.rpartition(".")[0].partition("-")[0]
    if not top.lower().endswith(".egg-info") or canonicalize_name(name) != wheel.project:
        raise HostileArchive(f"{wheel.filename}: writes {top}, the metadata of another package")


def _true_record(wheel: Wheel) -> dict[str, str]:
    """What RECORD should be, for a wheel known to be published with a wrong one."""
    record = {}
    for name, member in wheel.members.items():
        sha = sha256()
        for piece in read_chunks(member):
            sha.update(piece)
        record[name] = sha.hexdigest()
    return record


def _placed(wheel: Wheel, member: Member, venv: Venv) -> Entry:
    """Where one member goes: `.data/SCHEME/…` by its scheme, all else below site-packages."""
    top, _, below = member.name.partition("/")
    promised = wheel.record.get(member.name, "")
    mode = 0o755 if member.executable else 0o644
    path = f"{venv.site}/{member.name}"
    if below and top.endswith(".data"):
        scheme, _, rest = below.partition("/")
        folder = venv.scheme(scheme, wheel.dist_info.split("-")[0])
        if folder is None or not rest:
            raise CorruptArchive(f"{wheel.filename}: unknown scheme in {member.name!r}")
        path = f"{folder}/{rest}"
        if scheme == "scripts":
            return _script(member, path, promised, venv)
    return Entry(path, Kind.FILE, mode, member.content, sha256=promised)


def _script(member: Member, path: str, promised: str, venv: Venv) -> Entry:
    """A shipped script: `#!python` becomes the image's interpreter."""
    # a program, not a script: nothing to rewrite in its first line
    if member.content.size_bytes > 1 << 20:
        return Entry(path, Kind.FILE, 0o755, member.content, sha256=promised)
    data = read_member(member)
    if sha256(data).hexdigest() != promised:
        raise CorruptArchive(f"{member.name}: its RECORD promises {promised}", WRONG_RECORD)
    if not data.startswith(b"#!python"):
        return Entry(path, Kind.FILE, 0o755, member.content, sha256=promised)
    _, newline, rest = data.partition(b"\n")
    data = b"#!" + venv.python.encode() + newline + rest
    return Entry(path, Kind.FILE, 0o755, data, sha256=sha256(data).hexdigest())


def _console_scripts(wheel: Wheel, venv: Venv) -> list[Entry]:
    member = wheel.members.get(f"{wheel.dist_info}/entry_points.txt")
    if member is None:
        return []
    if member.content.size_bytes > _MOST_ENTRY_POINT_BYTES:
        raise HostileArchive(
            f"{wheel.filename}: {member.content.size_bytes} bytes of entry points are too many"
        )
    # no section of a wheel's is a default for the others
    parser = configparser.ConfigParser(
        delimiters=("=",), strict=False, interpolation=None, default_section="\0"
    )
    # names of commands may have capitals
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(read_member(member).decode())
    except (configparser.Error, UnicodeDecodeError) as error:
        raise CorruptArchive(f"{wheel.filename}: entry_points.txt is not readable") from error
    points = [
        point
        for section in ("console_scripts", "gui_scripts")
        if parser.has_section(section)
        for point in parser.items(section)
    ]
    if len(points) > _MOST_SCRIPTS:
        raise HostileArchive(f"{wheel.filename}: {len(points)} scripts are too many")
    return [_console_script(wheel, name, value, venv) for name, value in points]


def _console_script(wheel: Wheel, name: str, value: str, venv: Venv) -> Entry:
    match = _ENTRY_POINT.match(value.strip())
    if not match or not _SCRIPT_NAME.match(name) or name.startswith("."):
        raise HostileArchive(f"{wheel.filename}: entry point {name!r} = {value!r} is not valid")
    module, call = match[1], match[2]
    text = _SCRIPT.format(python=venv.python, module=module, first=call.split(".")[0], call=call)
    return Entry(f"{venv.bin}/{name}", Kind.FILE, 0o755, text.encode())

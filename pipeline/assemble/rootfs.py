"""Debian packages as layers: a root file system, or what an image adds to one; no script runs."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.assemble.deb import DebContents, unpack
from pipeline.assemble.entry import Entry, Slice, parents, with_parents
from pipeline.errors import CorruptArchive, HostileArchive, SpecInvalid
from pipeline.oci.record import Kind
from pipeline.spec.image import Account

# Read only by people at a terminal or by packaging tools, never by a program in a container.
# Copyright files stay: licences ask for them.
LEFT_OUT = (
    "usr/share/bug",
    "usr/share/doc",
    "usr/share/doc-base",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/menu",
)
# Debian 12 keeps these as links into /usr; packages still ship files below them.
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ALWAYS_MERGED = ("bin", "sbin", "lib")
# dpkg's own, and what scanners read: packages ship folders below it, never files.
_DATABASE = "var/lib/dpkg/"
_CHUNK_BYTES = 1024**2
_CA_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
_CA_FOLDER = "usr/share/ca-certificates/mozilla/"

# What base-passwd, libc-bin and base-files copy into place when they are configured.
_COPIES = {
    "etc/passwd": "usr/share/base-passwd/passwd.master",
    "etc/group": "usr/share/base-passwd/group.master",
    "etc/nsswitch.conf": "usr/share/libc-bin/nsswitch.conf",
    "etc/profile": "usr/share/base-files/profile",
    "root/.bashrc": "usr/share/base-files/dot.bashrc",
    "root/.profile": "usr/share/base-files/dot.profile",
}
_DEFAULTS = {
    "etc/passwd": b"root:*:0:0:root:/root:/bin/sh\n",
    "etc/group": b"root:*:0:\n",
    "etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
}
# Links that update-alternatives and postinst scripts make: the first target that exists wins.
_LINKS = (
    ("usr/bin/sh", ("dash", "bash")),
    ("usr/bin/awk", ("mawk", "gawk")),
    ("usr/bin/cc", ("gcc",)),
    ("usr/bin/c++", ("g++",)),
    ("usr/bin/python3", ("python3.11",)),
    ("usr/bin/which", ("which.debianutils",)),
    ("usr/lib/ssl/cert.pem", (f"/{_CA_BUNDLE}",)),
    ("etc/localtime", ("/usr/share/zoneinfo/Etc/UTC",)),
    ("etc/dpkg/origins/default", ("debian",)),
    ("var/run", ("/run",)),
    ("var/lock", ("/run/lock",)),
)
_SHELL = "/usr/sbin/nologin"  # nobody logs in to an image
_DIRECTORIES = {
    **dict.fromkeys(("dev", "etc", "home", "mnt", "opt", "proc", "run", "srv", "sys"), 0o755),
    **dict.fromkeys(("usr/local/bin", "usr/local/lib", "var/cache", "var/log"), 0o755),
    **dict.fromkeys(("run/lock", "tmp", "var/tmp"), 0o1777),
    "root": 0o700,
    "var/lib/dpkg/info": 0o755,
    "var/lib/dpkg/updates": 0o755,
}


def assemble_rootfs(
    debs: Iterable[Path], scratch: Path, *, users: Sequence[Account] = (), architecture: str
) -> list[Entry]:
    """Everything in the image's base layer, sorted by path."""
    packages = unpack_all(sorted(debs), scratch, architecture)
    tree = Tree()
    for contents in packages:
        tree.add_package(contents)
    for top in _ALWAYS_MERGED + tuple(m for m in _MERGED if tree.holds_below(f"usr/{m}")):
        tree.put(_link(top, f"usr/{top}"))
        tree.ensure_directory(f"usr/{top}", 0o755)
    _write_configuration(tree)
    for user in users:
        _add_user(tree, user)
    _write_dpkg_status(tree, packages)
    return with_hard_links(with_parents(tree.entries()))


def unpack_all(debs: list[Path], scratch: Path, architecture: str) -> list[DebContents]:
    """Unpack side by side (lzma lets go of the interpreter), in order of package name."""
    names = [deb.name for deb in debs]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise CorruptArchive(f"{doubled[0]} is given twice")
    # each needs up to 128 MiB for xz
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        packages = list(pool.map(lambda deb: unpack(deb, scratch), debs))
    known: set[str] = set()
    for deb, contents in zip(debs, packages, strict=True):
        name, built_for = (contents.control.get(f, "") for f in ("Package", "Architecture"))
        if built_for not in (architecture, "all"):
            raise CorruptArchive(f"{deb.name} is for {built_for or 'nothing'}, not {architecture}")
        if name in known:
            raise CorruptArchive(f"package {name} is given twice")
        known.add(name)
    return sorted(packages, key=lambda contents: contents.control["Package"])


@dataclass
class Tree:
    """Paths of the image with what is there and who put it there."""

    _entries: dict[str, Entry] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)
    files_of: dict[str, list[str]] = field(default_factory=dict)

    def add_package(self, contents: DebContents) -> None:
        """Add a package's files, cleaned; a file that another package has otherwise is an error."""
        owner = contents.control["Package"]
        shipped = {entry.path: entry for entry in contents.entries}
        paths = []
        for entry in contents.entries:
            if entry.path in _MERGED:
                # Some packages ship /bin as a folder, some as the link that we write anyway.
                continue
            if entry.kind is Kind.HARDLINK:
                # A copy of the same slice; the links are tied again when all paths are known.
                entry = replace(shipped[entry.target], path=entry.path)
            entry = _normalised(entry)
            if _is_left_out(entry):
                continue
            if f"{entry.path}/".startswith(_DATABASE) and entry.kind is not Kind.DIR:
                raise HostileArchive(f"{owner}: {entry.path} would change dpkg's database")
            self._require_same(entry, owner)
            self.put(entry, owner)
            paths.append(entry.path)
        self.files_of[owner] = sorted(paths)

    def put(self, entry: Entry, owner: str = "") -> None:
        """Write a path, over whatever was there."""
        self._entries[entry.path] = replace(entry, owner=owner)
        self._owners.setdefault(entry.path, owner)

    def ensure_directory(self, path: str, mode: int) -> None:
        """Give a directory its mode; what a package ships as a link stays a link."""
        known = self._entries.get(path)
        if known is None or known.kind is Kind.DIR:
            self.put(_directory(path, mode))

    def get(self, path: str) -> Entry | None:
        """What is at a path, if anything."""
        return self._entries.get(path)

    def read(self, path: str) -> bytes | None:
        """A file's content, or None where there is no such file."""
        entry = self._entries.get(path)
        return None if entry is None else _content(entry)

    def paths_below(self, folder: str) -> list[str]:
        """Everything in a folder and its folders, sorted."""
        return sorted(p for p in self._entries if p.startswith(folder.rstrip("/") + "/"))

    def holds_below(self, folder: str) -> bool:
        """Whether a folder has anything in it."""
        return bool(self.paths_below(folder))

    def entries(self) -> list[Entry]:
        """All of it, once nothing lies below something that is not a directory."""
        for path, owner in self._owners.items():
            for parent in parents(path):
                above = self._entries.get(parent)
                if above is not None and above.kind is not Kind.DIR:
                    raise CorruptArchive(
                        f"{owner or 'the image'} writes {path}, but {parent} "
                        f"(from {self._owners[parent] or 'the image'}) is not a directory"
                    )
        return list(self._entries.values())

    def _require_same(self, entry: Entry, owner: str) -> None:
        known = self._entries.get(entry.path)
        if known is None or _same(known, entry):
            return
        raise CorruptArchive(
            f"{self._owners[entry.path]} and {owner} both ship {entry.path}, differently"
        )


def _normalised(entry: Entry) -> Entry:
    """One owner, two modes, no set-user-id, and /usr merged."""
    executable = entry.kind is not Kind.FILE or entry.mode & 0o111
    mode = 0o777 if entry.kind is Kind.SYMLINK else 0o755 if executable else 0o644
    return replace(entry, path=_merged(entry.path), mode=mode, uid=0, gid=0)


def _merged(path: str) -> str:
    return f"usr/{path}" if path.split("/")[0] in _MERGED else path


def _is_left_out(entry: Entry) -> bool:
    folder = next((f for f in LEFT_OUT if entry.path == f or entry.path.startswith(f + "/")), "")
    if folder != "usr/share/doc":
        return bool(folder)
    parts = entry.path.split("/")
    # Packages built together share one folder through a link.
    is_shared_folder = len(parts) == 4 and entry.kind is Kind.SYMLINK
    is_copyright = len(parts) == 5 and parts[4] == "copyright"
    return not (is_shared_folder or is_copyright)


def _same(one: Entry, other: Entry) -> bool:
    if one.kind is not other.kind or one.target != other.target:
        return False
    return one.kind is not Kind.FILE or (
        one.mode == other.mode and _content(one) == _content(other)
    )


def _content(entry: Entry) -> bytes | None:
    if isinstance(entry.content, Slice):
        with Path(entry.content.path).open("rb") as file:
            file.seek(entry.content.offset)
            return file.read(entry.content.size_bytes)
    return entry.content if isinstance(entry.content, bytes) else None


def _write_configuration(tree: Tree) -> None:
    """What the packages' scripts would have written."""
    for path, mode in _DIRECTORIES.items():
        tree.ensure_directory(path, mode)
    for path in sorted(_COPIES):
        content = tree.read(_COPIES[path]) or _DEFAULTS.get(path)
        # what a package ships itself is not overwritten
        if tree.get(path) is None and content is not None:
            tree.put(_file(path, content))
    _write_ca_bundle(tree)
    for path, targets in _LINKS:
        _write_link(tree, path, targets)


def _write_ca_bundle(tree: Tree) -> None:
    names = [path for path in tree.paths_below(_CA_FOLDER) if path.endswith(".crt")]
    # what update-ca-certificates would concatenate
    certificates = [(tree.read(name) or b"").rstrip(b"\n") + b"\n" for name in names]
    if certificates:
        tree.put(_file(_CA_BUNDLE, b"".join(certificates)))


def _write_link(tree: Tree, path: str, targets: tuple[str, ...]) -> None:
    """Link to the first target that exists, unless a package owns the path."""
    at_path = tree.get(path)
    # an empty folder is nobody's content, only the place of such a link
    is_free = at_path is None or (at_path.kind is Kind.DIR and not tree.holds_below(path))
    for target in targets:
        there = posixpath.normpath(posixpath.join("/", posixpath.dirname(path), target))
        if is_free and tree.get(there.lstrip("/")) is not None:
            tree.put(_link(path, target))
            return


def _add_user(tree: Tree, user: Account) -> None:
    passwd, group = (tree.read(f"etc/{name}") or b"" for name in ("passwd", "group"))
    _require_free(passwd, "user", user.name, user.uid)
    _require_free(group, "group", user.name, user.gid)
    line = f"{user.name}:*:{user.uid}:{user.gid}::{user.home}:{_SHELL}\n"
    tree.put(_file("etc/passwd", passwd + line.encode()))
    tree.put(_file("etc/group", group + f"{user.name}:*:{user.gid}:\n".encode()))
    home = _directory(user.home.lstrip("/"), 0o755)
    if tree.get(home.path) is not None:
        raise SpecInvalid(f"the home of {user.name}, {user.home}, is a folder of the system")
    tree.put(replace(home, uid=user.uid, gid=user.gid))


def _require_free(table: bytes, what: str, name: str, number: int) -> None:
    rows = [line.split(":") for line in table.decode(errors="replace").split("\n")]
    if rows.pop() != [""] or any(len(row) < 3 for row in rows):
        raise CorruptArchive(f"the packages' list of {what}s in /etc is damaged")
    if any(row[0] == name or row[2] == str(number) for row in rows):
        raise SpecInvalid(f"{what} {name} ({number}) is already one of Debian's own")


def _write_dpkg_status(tree: Tree, packages: list[DebContents]) -> None:
    """dpkg's database, so that `dpkg -l` and scanners see what is installed."""
    stanzas = [status_stanza(contents.control_text) for contents in packages]
    tree.put(_file("var/lib/dpkg/status", "\n".join(stanzas).encode()))
    # Format 1 names the list files of multi-arch packages with their architecture.
    tree.put(_file("var/lib/dpkg/info/format", b"1\n"))
    for contents in packages:
        control = contents.control
        multi_arch = control.get("Multi-Arch") == "same"
        name = control["Package"] + (f":{control['Architecture']}" if multi_arch else "")
        # as dpkg writes these lists: the root first
        listing = "/.\n" + "".join(f"/{p}\n" for p in tree.files_of[control["Package"]])
        tree.put(_file(f"var/lib/dpkg/info/{name}.list", listing.encode()))


def status_stanza(control_text: str) -> str:
    """dpkg wants the status right after the name."""
    text = control_text.strip("\n") + "\n"
    return re.sub(r"(?m)^(Package:.*\n)", r"\1Status: install ok installed\n", text, count=1)


def with_hard_links(entries: list[Entry]) -> list[Entry]:
    """Tie paths that share one slice: the first is the file, the others link to it."""
    first: dict[Slice, str] = {}
    tied: list[Entry] = []
    for entry in entries:
        if entry.kind is Kind.FILE and isinstance(entry.content, Slice):
            # entries come sorted, so the first path is the same on every machine
            target = first.setdefault(entry.content, entry.path)
            if target != entry.path:
                entry = replace(entry, kind=Kind.HARDLINK, content=None, target=target)
        tied.append(entry)
    return tied


def _file(path: str, content: bytes) -> Entry:
    return Entry(path=path, kind=Kind.FILE, mode=0o644, content=content)


def _directory(path: str, mode: int) -> Entry:
    return Entry(path=path, kind=Kind.DIR, mode=mode)


def _link(path: str, target: str) -> Entry:
    return Entry(path=path, kind=Kind.SYMLINK, mode=0o777, target=target)


def assemble_overlay(debs: Iterable[Path], scratch: Path, *, architecture: str) -> list[Entry]:
    """The packages' files alone; what they are goes to dpkg's `status.d`, as scanners expect."""
    packages = unpack_all(sorted(debs), scratch, architecture)
    tree = Tree()
    for contents in packages:
        tree.add_package(contents)
        name = contents.control["Package"]
        stanza = status_stanza(contents.control_text).encode()
        tree.put(Entry(f"var/lib/dpkg/status.d/{name}", Kind.FILE, 0o644, stanza), name)
    return with_hard_links(with_parents(tree.entries()))

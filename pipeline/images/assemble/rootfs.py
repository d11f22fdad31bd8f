"""Debian packages as layers: a root file system, or what an image adds to one; no script runs."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.artifacts.oci.record import Kind
from pipeline.core.errors import CorruptArchive, HostileArchive, SpecInvalid
from pipeline.images.assemble.deb import DebContents, unpack_deb
from pipeline.images.assemble.layer import Entry, Slice, link_to, parents, with_parents
from pipeline.images.spec.image import Account

# Read only by people at a terminal or by packaging tools, never by a program in a container.
# Copyright files stay: licences ask for them.
_LEFT_OUT = re.compile(r"usr/share/(bug|doc|doc-base|info|lintian|locale|man|menu)(/.*)?")
# Debian 12 keeps these as links into /usr; packages still ship files below them.
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ALWAYS_MERGED = ("bin", "sbin", "lib")
# dpkg's own, and what scanners read: packages ship folders below it, never files.
_DATABASE = "var/lib/dpkg/"
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
_SHELL = "/usr/sbin/nologin"  # an image has no logins
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
    for top in _ALWAYS_MERGED + tuple(m for m in _MERGED if tree.paths_below(f"usr/{m}")):
        tree.put(link_to(top, f"usr/{top}"))
        tree.ensure_directory(f"usr/{top}", 0o755)
    # from here on, what the packages' scripts would have written
    for path, mode in _DIRECTORIES.items():
        tree.ensure_directory(path, mode)
    for path in sorted(_COPIES):
        content = tree.read(_COPIES[path]) or _DEFAULTS.get(path)
        # a file that a package ships itself is not overwritten
        if path not in tree.entries and content is not None:
            tree.put(_file(path, content))
    names = [path for path in tree.paths_below(_CA_FOLDER) if path.endswith(".crt")]
    # what update-ca-certificates would concatenate
    certificates = [(tree.read(name) or b"").rstrip(b"\n") + b"\n" for name in names]
    if certificates:
        tree.put(_file(_CA_BUNDLE, b"".join(certificates)))
    for path, targets in _LINKS:
        known = tree.entries.get(path)
        # an empty folder is no package's content, only the place of such a link
        is_free = known is None or (known.kind is Kind.DIR and not tree.paths_below(path))
        for target in targets if is_free else ():
            leads_to = posixpath.normpath(posixpath.join("/", posixpath.dirname(path), target))
            if leads_to.lstrip("/") in tree.entries:
                tree.put(link_to(path, target))
                break
    for user in users:
        tables = {name: tree.read(f"etc/{name}") or b"" for name in ("passwd", "group")}
        for what, table, number in (("user", "passwd", user.uid), ("group", "group", user.gid)):
            rows = [line.split(":") for line in tables[table].decode(errors="replace").split("\n")]
            if rows.pop() != [""] or any(len(row) < 3 for row in rows):
                raise CorruptArchive(f"the packages' list of {what}s in /etc is damaged")
            if any(row[0] == user.name or row[2] == str(number) for row in rows):
                raise SpecInvalid(f"{what} {user.name} ({number}) is already one of Debian's own")
        line = f"{user.name}:*:{user.uid}:{user.gid}::{user.home}:{_SHELL}\n"
        tree.put(_file("etc/passwd", tables["passwd"] + line.encode()))
        tree.put(_file("etc/group", tables["group"] + f"{user.name}:*:{user.gid}:\n".encode()))
        home = user.home.lstrip("/")
        if home in tree.entries:
            raise SpecInvalid(f"the home of {user.name}, {user.home}, is a folder of the system")
        tree.put(Entry(home, Kind.DIR, 0o755, uid=user.uid, gid=user.gid))
    # dpkg's database, so that `dpkg -l` and scanners see what is installed
    stanzas = [status_stanza(contents.control_text) for contents in packages]
    tree.put(_file("var/lib/dpkg/status", "\n".join(stanzas).encode()))
    # Format 1 names the list files of multi-arch packages with their architecture.
    tree.put(_file("var/lib/dpkg/info/format", b"1\n"))
    for control in (contents.control for contents in packages):
        multi_arch = control.get("Multi-Arch") == "same"
        name = control["Package"] + (f":{control['Architecture']}" if multi_arch else "")
        # as dpkg writes these lists: the root first
        listing = "/.\n" + "".join(f"/{p}\n" for p in tree.files_of[control["Package"]])
        tree.put(_file(f"var/lib/dpkg/info/{name}.list", listing.encode()))
    return tree.sorted_entries()


def assemble_overlay(debs: Iterable[Path], scratch: Path, *, architecture: str) -> list[Entry]:
    """The packages' files alone; dpkg's `status.d` describes them, as scanners expect."""
    tree = Tree()
    for contents in unpack_all(sorted(debs), scratch, architecture):
        tree.add_package(contents)
        name = contents.control["Package"]
        stanza = status_stanza(contents.control_text).encode()
        tree.put(_file(f"var/lib/dpkg/status.d/{name}", stanza), name)
    return tree.sorted_entries()


def unpack_all(debs: list[Path], scratch: Path, architecture: str) -> list[DebContents]:
    """Unpacks in parallel (lzma releases the interpreter's lock), in order of package name."""
    names = [deb.name for deb in debs]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise CorruptArchive(f"{doubled[0]} is given twice")
    # each needs up to 128 MiB for xz
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        packages = list(pool.map(lambda deb: unpack_deb(deb, scratch), debs))
    known: dict[str, DebContents] = {}
    for deb, contents in zip(debs, packages, strict=True):
        name, built_for = (contents.control.get(f, "") for f in ("Package", "Architecture"))
        if built_for not in (architecture, "all"):
            raise CorruptArchive(f"{deb.name} is for {built_for or 'nothing'}, not {architecture}")
        if name in known:
            raise CorruptArchive(f"package {name} is given twice")
        known[name] = contents
    return [known[name] for name in sorted(known)]


@dataclass
class Tree:
    """Paths of the image with their entries and the packages that put them there."""

    entries: dict[str, Entry] = field(default_factory=dict)
    files_of: dict[str, list[str]] = field(default_factory=dict)

    def add_package(self, contents: DebContents) -> None:
        """Adds a package's files, cleaned; two packages with different files are an error."""
        owner = contents.control["Package"]
        shipped = {entry.path: entry for entry in contents.entries}
        paths = []
        for entry in contents.entries:
            path, kind = entry.path, entry.kind
            if path in _MERGED:
                # Some packages ship /bin as a folder, some as the link that we write anyway.
                continue
            if kind is Kind.HARDLINK:
                # A copy of the same slice; the links are tied again when all paths are known.
                entry = shipped[entry.target]
                kind = entry.kind
            path = f"usr/{path}" if path.split("/")[0] in _MERGED else path
            # one owner, two modes, no set-user-id
            mode = 0o755 if kind is not Kind.FILE or entry.mode & 0o111 else 0o644
            mode = 0o777 if kind is Kind.SYMLINK else mode
            entry = replace(entry, path=path, mode=mode, uid=0, gid=0)
            parts, doc = path.split("/"), path.startswith("usr/share/doc/")
            # packages built together share one folder of documentation through a link
            is_shared_folder = doc and len(parts) == 4 and kind is Kind.SYMLINK
            is_copyright = doc and len(parts) == 5 and parts[4] == "copyright"
            if _LEFT_OUT.fullmatch(path) and not is_shared_folder and not is_copyright:
                continue
            if f"{path}/".startswith(_DATABASE) and kind is not Kind.DIR:
                raise HostileArchive(f"{owner}: {path} would change dpkg's database")
            known = self.entries.get(path, entry)
            is_same = known.kind is kind and known.target == entry.target
            if is_same and kind is Kind.FILE and known is not entry:
                is_same = known.mode == mode and _content(known) == _content(entry)
            if not is_same:
                message = f"{known.owner} and {owner} both ship {path}, differently"
                raise CorruptArchive(message)
            self.put(entry, owner)
            paths.append(path)
        self.files_of[owner] = sorted(paths)

    def put(self, entry: Entry, owner: str = "") -> None:
        """Writes a path, over whatever was there."""
        self.entries[entry.path] = replace(entry, owner=owner)

    def ensure_directory(self, path: str, mode: int) -> None:
        """Gives a directory its mode; a link that a package ships stays a link."""
        known = self.entries.get(path)
        if known is None or known.kind is Kind.DIR:
            self.put(Entry(path, Kind.DIR, mode))

    def read(self, path: str) -> bytes | None:
        """A file's content, or None where there is no such file."""
        entry = self.entries.get(path)
        return None if entry is None else _content(entry)

    def paths_below(self, folder: str) -> list[str]:
        """Everything in a folder and its folders, sorted."""
        return sorted(p for p in self.entries if p.startswith(folder.rstrip("/") + "/"))

    def sorted_entries(self) -> list[Entry]:
        """All of it; nothing may lie below something that is not a directory.

        Ties paths that share one slice: the first is the file, the others are links to it.
        """
        for path, entry in self.entries.items():
            for parent in parents(path):
                above = self.entries.get(parent)
                if above is not None and above.kind is not Kind.DIR:
                    writers = (entry.owner or "the image", above.owner or "the image")
                    message = f"{writers[0]} writes {path}, but {parent} (from {writers[1]})"
                    raise CorruptArchive(f"{message} is not a directory")
        first: dict[Slice, str] = {}
        tied: list[Entry] = []
        for entry in with_parents(list(self.entries.values())):
            if entry.kind is Kind.FILE and isinstance(entry.content, Slice):
                # entries come sorted, so the first path is the same on every machine
                target = first.setdefault(entry.content, entry.path)
                if target != entry.path:
                    entry = replace(entry, kind=Kind.HARDLINK, content=None, target=target)
            tied.append(entry)
        return tied


def _content(entry: Entry) -> bytes | None:
    if isinstance(entry.content, Slice):
        with Path(entry.content.path).open("rb") as file:
            file.seek(entry.content.offset)
            return file.read(entry.content.size_bytes)
    return entry.content if isinstance(entry.content, bytes) else None


def status_stanza(control_text: str) -> str:
    """dpkg wants the status right after the name."""
    text = control_text.strip("\n") + "\n"
    return re.sub(r"(?m)^(Package:.*\n)", r"\1Status: install ok installed\n", text, count=1)


def _file(path: str, content: bytes) -> Entry:
    return Entry(path=path, kind=Kind.FILE, mode=0o644, content=content)

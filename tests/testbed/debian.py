"""Debian's own packages in a local folder: asked for once, many at a time, checked by hash.

apt fetches one file after the other, which takes minutes where each answer takes a second.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.fetch.http import Client
from pipeline.fetch.settings import read_settings
from pipeline.fetch.sources import debian_mirror, read_below
from pipeline.lock.closure import DebRow
from pipeline.lock.debs import resolve_debs
from tests.testbed.packages import CannotHave, find_program, system_environment

SUITE = "bookworm"
# what every Debian has: `Essential: yes`, and apt
ESSENTIAL = (
    *("base-files", "base-passwd", "bash", "bsdutils", "coreutils", "dash", "debianutils"),
    *("diffutils", "dpkg", "findutils", "grep", "gzip", "hostname", "init-system-helpers"),
    *("libc-bin", "login", "ncurses-base", "ncurses-bin", "perl-base", "sed", "sysvinit-utils"),
    *("tar", "util-linux", "apt", "debian-archive-keyring"),
)


def local_debian(folder: Path, wanted: Sequence[str]) -> str:
    """Fill the folder with the packages and all they need; returns a line for apt's sources."""
    stanzas = bring_packages(folder, [*ESSENTIAL, *wanted])
    _write_index(folder, "\n".join(stanzas.values()).encode())
    # every file was checked against Debian's signed index
    return f"deb [trusted=yes] copy:{folder} ./"


def bring_packages(folder: Path, wanted: Sequence[str]) -> dict[str, str]:
    """The packages and all they need, in the folder; their stanzas by name."""
    client = Client(read_settings())
    architecture = _read(["dpkg", "--print-architecture"]).strip()
    try:
        mirror = debian_mirror().main

        def get(path: str) -> bytes:
            return read_below(client, mirror, path)

        rows = resolve_debs(wanted, [], [SUITE], ["main"], architecture, get)
        with ThreadPoolExecutor(8) as pool:
            stanzas = pool.map(lambda row: _kept(folder, row, get(row.path)), rows)
            return dict(zip((row.name for row in rows), stanzas, strict=True))
    except PipelineError as error:
        raise CannotHave(f"Debian's packages cannot be had here: {error}") from error


def _write_index(folder: Path, packages: bytes) -> None:
    """An index that carries the suite's name: by it mmdebstrap finds what is essential."""
    (folder / "Packages").write_bytes(packages)
    row = f" {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages"
    (folder / "Release").write_text(f"Suite: {SUITE}\nCodename: {SUITE}\nSHA256:\n{row}\n")


def _kept(folder: Path, row: DebRow, data: bytes) -> str:
    """Keep a file that is what the index says; its stanza for our own index."""
    if hashlib.sha256(data).hexdigest() != row.sha256:
        raise CannotHave(f"The mirror's {row.name} is not what Debian signed.")
    path = folder / row.path.rpartition("/")[2]
    path.write_bytes(data)
    control = _read(["dpkg-deb", "--field", str(path)]).rstrip("\n")
    return f"{control}\nFilename: ./{path.name}\nSize: {row.size_bytes}\nSHA256: {row.sha256}\n"


def _read(command: Sequence[str]) -> str:
    return subprocess.run(
        [find_program(command[0]), *command[1:]],
        env=system_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout

"""Debian's own packages in a local folder: asked for once, many at a time, checked by hash.

apt fetches one file after the other, which takes minutes where each answer takes a second.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.app.workspace import host_platform
from pipeline.core.errors import PipelineError
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import read_settings
from pipeline.images.fetch.sources import debian_mirror, read_below
from pipeline.images.lock.debs import resolve_debs
from pipeline.images.lock.model import DebPin
from pipeline.images.lock.release import DEBIAN_12_KEYRING
from tests.testbed.packages import CannotHave, find_program, system_environment

UBUNTU_MIRROR = "SM120_UBUNTU_MIRROR"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True)
class System:
    """A system that nodes can have: its name in our locks, and where its packages are."""

    name: str
    suite: str
    architecture: str = host_platform().partition("/")[2]
    components: tuple[str, ...] = ("main",)
    # what the nodes say they are, where that is not what their packages are
    os_release: str = ""

    @property
    def target(self) -> str:
        return f"{self.name}/{self.architecture}"

    @property
    def is_ubuntu(self) -> bool:
        """Whether its packages are Ubuntu's; a node can say so and have Debian's."""
        return self.name.startswith("ubuntu") and not self.os_release

    @property
    def keyring_package(self) -> str:
        return "ubuntu-keyring" if self.is_ubuntu else "debian-archive-keyring"


BOOKWORM = System("debian-12", "bookworm")
TRIXIE = System("debian-13", "trixie")
NOBLE = System("ubuntu-24.04", "noble", components=("main", "universe"))
# Ubuntu by its facts only, where its archive cannot be reached: the packages are Debian's
UBUNTU_LIKE = System(
    *("ubuntu-24.04", "bookworm"),
    os_release="""PRETTY_NAME="Ubuntu 24.04.3 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.3 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
""",
)
# what every Debian has: `Essential: yes`, and apt
ESSENTIAL = (
    *("base-files", "base-passwd", "bash", "bsdutils", "coreutils", "dash", "debianutils"),
    *("diffutils", "dpkg", "findutils", "grep", "gzip", "hostname", "init-system-helpers"),
    *("libc-bin", "login", "ncurses-base", "ncurses-bin", "perl-base", "sed", "sysvinit-utils"),
    *("tar", "util-linux", "apt"),
)


def local_debian(folder: Path, wanted: Sequence[str], system: System = BOOKWORM) -> str:
    """Fill the folder with the packages and all they need; returns a line for apt's sources."""
    names = [*ESSENTIAL, system.keyring_package, *wanted]
    stanzas = bring_packages(folder, names, system)
    _write_index(folder, "\n".join(stanzas.values()).encode(), system.suite)
    # every file was checked against the system's signed index
    return f"deb [trusted=yes] copy:{folder} ./"


def bring_packages(
    folder: Path, wanted: Sequence[str], system: System = BOOKWORM
) -> dict[str, str]:
    """The packages and all they need, in the folder; their stanzas by name."""
    client = NetClient(read_settings())
    try:
        mirror = mirror_of(system)
        keyring = ubuntu_keyring(folder) if system.is_ubuntu else debian_keyring(system)

        def get(path: str, most_bytes: int) -> bytes:
            return read_below(client, mirror, path, most_bytes)

        suites = [(system.suite, get)]
        rows = resolve_debs(wanted, [], suites, system.components, system.architecture, keyring)
        with ThreadPoolExecutor(8) as pool:
            stanzas = pool.map(lambda row: _kept(folder, row, get(row.path, row.size_bytes)), rows)
            return dict(zip((row.name for row in rows), stanzas, strict=True))
    except PipelineError as error:
        raise CannotHave(f"{system.name}'s packages cannot be had here: {error}") from error


def mirror_of(system: System) -> tuple[str, ...]:
    """Where the system's packages are: Debian's as apt has it, Ubuntu's as the environment says."""
    if not system.is_ubuntu:
        return debian_mirror().main
    mirror = os.environ.get(UBUNTU_MIRROR)
    if not mirror:
        raise CannotHave(f"Ubuntu's archive is not named: set {UBUNTU_MIRROR} to its base address.")
    return (mirror,)


def debian_keyring(system: System) -> Path:
    """Debian 12's keys are ours; a newer Debian's come with its package here."""
    if system.suite == BOOKWORM.suite:
        return DEBIAN_12_KEYRING
    if not KEYRING.exists():
        raise CannotHave(f"Debian's keys ({KEYRING}) are not here.")
    return KEYRING


def ubuntu_keyring(folder: Path) -> Path:
    """Ubuntu's keys, from Debian 13's package of them: so Debian's signature vouches for them."""
    place = folder / "keys"
    place.mkdir()
    bring_packages(place, ["ubuntu-keyring"], TRIXIE)
    (package,) = place.glob("ubuntu-keyring_*.deb")
    _read(["dpkg-deb", "--extract", str(package), str(place)])
    return place / "usr/share/keyrings/ubuntu-archive-keyring.gpg"


def _write_index(folder: Path, packages: bytes, suite: str) -> None:
    """An index that carries the suite's name: by it mmdebstrap finds what is essential."""
    (folder / "Packages").write_bytes(packages)
    row = f" {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages"
    (folder / "Release").write_text(f"Suite: {suite}\nCodename: {suite}\nSHA256:\n{row}\n")


def _kept(folder: Path, row: DebPin, data: bytes) -> str:
    """Keep a file that is what the index says; its stanza for our own index."""
    if hashlib.sha256(data).hexdigest() != row.sha256:
        raise CannotHave(f"The mirror's {row.name} is not what was signed.")
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

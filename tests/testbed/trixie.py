"""Programs of Debian 13 on Debian 12: unpacked from their packages, never installed.

Go programs without libraries of their own run there as they are.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.fetch.aptconf import find_mirror
from tests.testbed.packages import CannotHave, find_program, system_environment

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def trixie_program(folder: Path, name: str) -> Path:
    """A program of the package of that name, below `folder`; what is there already is used."""
    program = folder / "root" / "usr" / "bin" / name
    if not program.exists():
        apt = apt_configuration(folder)
        if not (folder / "updated").exists():
            run([*apt, "update"], folder)
            (folder / "updated").touch()
        run([*apt, "download", name], folder)
        package = next(folder.glob(f"{name}_*.deb"))
        run([find_program("dpkg-deb"), "-x", str(package), str(folder / "root")], folder)
    return program


def apt_configuration(folder: Path) -> list[str]:
    """apt-get with lists and sources of its own, from the mirror that this machine uses."""
    try:
        mirror = find_mirror().main[0]
    except PipelineError as error:
        raise CannotHave(f"No Debian mirror is configured here: {error}") from error
    for name in ("etc", "lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "etc" / "trixie.sources").write_text(
        f"Types: deb\nURIs: {mirror}\nSuites: trixie\nComponents: main\nSigned-By: {KEYRING}\n"
    )
    options = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": f"{folder}/etc",
        "Dir::State::Lists": f"{folder}/lists",
        "Dir::Cache": f"{folder}/cache",
        "APT::Sandbox::User": "root",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [find_program("apt-get"), "--quiet", *flags]


def run(command: Sequence[str], folder: Path) -> None:
    """Run in a folder; a refusal means that this machine cannot have the program."""
    done = subprocess.run(
        list(command),
        cwd=folder,
        env=system_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise CannotHave(f"Debian 13 cannot be read here: {words}")

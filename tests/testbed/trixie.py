"""Programs of Debian 13 on Debian 12: unpacked from their packages, never installed.

Go programs without libraries of their own run there as they are.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.core.errors import PipelineError
from pipeline.images.fetch.sources import debian_mirror
from tests.testbed.packages import CannotHave
from tests.testbed.programs import run_program

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def trixie_program(folder: Path, name: str) -> Path:
    """A program of the package of that name, below `folder`; what is there already is used."""
    program = folder / "root" / "usr" / "bin" / name
    if not program.exists():
        options = apt_options(folder)
        if not (folder / "updated").exists():
            run_program("apt-get", "update", *options)
            (folder / "updated").touch()
        run_program("apt-get", "download", name, *options, cwd=folder)
        package = next(folder.glob(f"{name}_*.deb"))
        run_program("dpkg-deb", "-x", str(package), str(folder / "root"))
    return program


def apt_options(folder: Path) -> list[str]:
    """Lists and sources of apt-get's own, from the mirror that this machine uses."""
    try:
        mirror = debian_mirror().main[0]
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
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

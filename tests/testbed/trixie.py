"""Programs of Debian 13, unpacked beside the system's own: judges of what we sign and push."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import MirrorUnknown
from pipeline.fetch.aptconf import find_mirror
from tests.testbed.packages import CannotHave, find_program, system_environment

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE = "trixie"


def trixie_program(name: str, folder: Path) -> Path:
    """The program of a package of the same name, fetched through a throwaway apt."""
    program = folder / "root" / "usr" / "bin" / name
    if not program.exists():
        _fetch(name, folder)
    if not program.exists():
        raise CannotHave(f"Debian 13's package {name} holds no program {name}.")
    return program


def _fetch(name: str, folder: Path) -> None:
    if not KEYRING.exists():
        raise CannotHave("Debian's archive keyring is not installed.")
    options = _private_apt(folder)
    apt = find_program("apt-get")
    _run([apt, "--quiet", *options, "update"], folder)
    _run([apt, "--quiet", *options, "download", name], folder)
    debs = sorted(folder.glob(f"{name}_*.deb"))
    _run([find_program("dpkg-deb"), "-x", str(debs[-1]), str(folder / "root")], folder)


def _private_apt(folder: Path) -> list[str]:
    """Options of an apt that knows this one suite and touches nothing of the system's."""
    try:
        mirror = find_mirror().main[0]
    except MirrorUnknown as error:
        raise CannotHave("This machine does not say where Debian's packages are.") from error
    for part in ("state/lists/partial", "cache/archives/partial", "etc"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "state" / "status").touch()
    sources = folder / "etc" / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {SUITE} main\n")
    return [
        *("-o", f"Dir::State={folder}/state", "-o", f"Dir::State::status={folder}/state/status"),
        *("-o", f"Dir::Cache={folder}/cache", "-o", f"Dir::Etc::sourcelist={sources}"),
        *("-o", "Dir::Etc::sourceparts=-", "-o", "APT::Sandbox::User=root"),
        *("-o", "Acquire::Languages=none"),
    ]


def _run(args: Sequence[str], folder: Path) -> None:
    proxies = {n: v for n, v in os.environ.items() if n.lower().endswith("_proxy")}
    done = subprocess.run(
        args,
        cwd=folder,
        env=system_environment(**proxies),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise CannotHave(f"Debian 13's packages cannot be had here: {reason}")

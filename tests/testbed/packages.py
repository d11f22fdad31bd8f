"""Debian packages that a test needs, installed once where that is possible."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = Path("/var/lock/sm120-testbed.lock")
POLICY_FILE = Path("/usr/sbin/policy-rc.d")
# 101: "action forbidden by policy", so no maintainer script starts a service.
POLICY = "#!/bin/sh\nexit 101\n"

# The system's own programs come first: a client in /usr/local may be from another vendor.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


class CannotHave(Exception):
    """This machine cannot have a part of the testbed; the message is the reason, one sentence."""


def system_environment(**values: str) -> dict[str, str]:
    """The short environment in which the testbed runs programs."""
    return {"PATH": SYSTEM_PATH, "HOME": str(Path.home()), "LC_ALL": "C.UTF-8", **values}


def find_program(name: str) -> str:
    """The system's program of that name."""
    path = shutil.which(name, path=SYSTEM_PATH)
    if path is None:
        raise CannotHave(f"The program {name} is not installed.")
    return path


def ensure_debian_packages(names: Sequence[str]) -> None:
    """Install the packages that are missing, without starting any service."""
    if not missing_packages(names):
        return
    require_debian_root(names)
    with only_one_installer(), services_stay_off():
        missing = missing_packages(names)
        if missing:
            install(missing)


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of the packages that dpkg does not have installed."""
    if shutil.which("dpkg-query", path=SYSTEM_PATH) is None:
        return list(names)
    return [name for name in names if not is_installed(name)]


def is_installed(name: str) -> bool:
    """Whether dpkg calls the package installed."""
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", name]
    answer = subprocess.run(
        query, env=system_environment(), capture_output=True, text=True, check=False
    )
    return answer.stdout == "installed"


def require_debian_root(names: Sequence[str]) -> None:
    """Give up with a reason where apt-get cannot help."""
    wanted = ", ".join(names)
    if shutil.which("apt-get", path=SYSTEM_PATH) is None:
        raise CannotHave(f"The packages {wanted} are needed and this is not Debian.")
    if os.geteuid() != 0:
        raise CannotHave(f"The packages {wanted} are needed and only root can install them.")


def install(names: Sequence[str]) -> None:
    """One quiet apt-get run, with a fresh index when the first try knows too little."""
    apt = ["apt-get", "--quiet", "--yes", "-o", "DPkg::Lock::Timeout=300"]
    wanted = [*apt, "install", "--no-install-recommends", *names]
    env = system_environment(DEBIAN_FRONTEND="noninteractive")
    for command in (wanted, [*apt, "update"], wanted):
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if command is wanted and done.returncode == 0:
            return
    reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
    raise CannotHave(f"apt-get could not install {', '.join(names)}: {reason}")


@contextmanager
def only_one_installer() -> Iterator[None]:
    """Let parallel test runs install one after the other."""
    with LOCK_FILE.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def services_stay_off() -> Iterator[None]:
    """Forbid packages to start services while inside; a policy that is there already stays."""
    if POLICY_FILE.exists():
        yield
        return
    try:
        POLICY_FILE.write_text(POLICY)
        POLICY_FILE.chmod(0o755)
        yield
    finally:
        POLICY_FILE.unlink(missing_ok=True)

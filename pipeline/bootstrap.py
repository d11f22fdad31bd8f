"""Environments from hash-locked requirements, made with the standard library alone.

`noxfile.py` calls this on a machine that has only Python; nothing of the package is imported here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

# Names the folder of wheels that `sm120 image collect --tool` made, for a machine without network.
VARIABLE = "SM120_TOOL"
FOLDER = "tool"  # of that name it is found below a folder that --mirror names, too


def environment(root: Path, group: str) -> Path:
    """The programs of a hash-locked group, in `.nox/GROUP`; made once for each version of its lock.

    One environment serves all sessions of a group: a session of nox's own would be a copy each.
    """
    home, lock = root / ".nox" / group, root / "lockfiles" / "tool" / f"{group}.txt"
    stamp = home / "locked"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Making .nox/{group} from lockfiles/tool/{group}.txt …", file=sys.stderr, flush=True)
        wheels = tool_folder(sys.argv[1:], os.environ)
        _run([sys.executable, "-m", "venv", "--clear", str(home)], group, _VENV)
        install = pip_install(home / "bin" / "python", wheels)
        hint = _IN_FOLDER.format(wheels) if wheels else _NO_FOLDER
        _run([*install, "--require-hashes", "-r", str(lock)], group, hint)
        if group != "nox":  # the menu itself needs no package of ours
            _run([*install, "--no-deps", "--no-build-isolation", "-e", str(root)], group, hint)
        stamp.write_text(wanted)
    return home / "bin"


_VENV = "Python's venv is needed, with pip (Debian: apt install python3-venv)."
_NO_FOLDER = (
    "Without a package index: `sm120 image collect --tool --to DIR` on a machine that has one,"
    f" then {VARIABLE}=DIR/{FOLDER} here."
)
_IN_FOLDER = (
    "{} must hold what `sm120 image collect --tool` collects at this commit, for this"
    " machine: --tool-platform and --tool-python name another."
)


def tool_folder(arguments: Sequence[str], variables: Mapping[str, str]) -> Path | None:
    """The folder of wheels that was named, or that lies below a folder of collected files."""
    if named := variables.get(VARIABLE):
        return Path(named).expanduser().resolve()
    mirrors = [value for word, value in pairwise(arguments) if word == "--mirror"]
    mirrors += [word.removeprefix("--mirror=") for word in arguments if word[:9] == "--mirror="]
    mirrors += variables.get("SM120_MIRRORS", "").split()
    folders = [Path(mirror).expanduser() / FOLDER for mirror in mirrors if "://" not in mirror]
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


def pip_install(python: Path, wheels: Path | None) -> list[str]:
    """The command that installs; from a folder of wheels it asks no index."""
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    return [*command, "--no-index", "--find-links", str(wheels)] if wheels else command


def _run(command: list[str], group: str, hint: str) -> None:
    """Run it to its end; where that is a failure, its last words and what to do, in few lines."""
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    errors = done.stderr.decode(errors="replace")
    if done.returncode:
        reason = last_words(errors) or f"exit code {done.returncode}"
        sys.exit(f"noxfile.py: .nox/{group} could not be made: {reason}\n       {hint}")
    sys.stderr.write(errors)


def last_words(errors: str) -> str:
    """Why pip failed, as it says itself; a crash of its own ends with the reason."""
    lines = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in errors.splitlines() if line.startswith("ERROR: ")]
    named = [line.removeprefix("ERROR: ") for line in said if line.strip() != "ERROR: Exception:"]
    return (named or lines or [""])[-1]

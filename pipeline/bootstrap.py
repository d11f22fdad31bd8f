"""Environments from hash-locked requirements, made with the standard library alone.

`noxfile.py` calls this on a machine that has only Python; nothing of the package is imported here.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

# Names the folder of wheels that `sm120 image collect --tool` made, for a machine without network.
VARIABLE = "SM120_TOOL"
# How often it says how far it is: on a terminal in one line, elsewhere in lines of a log.
_LIVE_BEAT_S, _BEAT_S = 1.0, 15.0
FOLDER = "tool"  # of that name it is found below a folder that --mirror names, too


def environment(root: Path, group: str) -> Path:
    """The programs of a hash-locked group, in `.nox/GROUP`; made anew for another lock or place.

    One environment serves all sessions of a group: a session of nox's own would be a copy each.
    """
    home, lock = root / ".nox" / group, root / "lockfiles" / "tool" / f"{group}.txt"
    stamp, python = home / "locked", "python{}.{}".format(*sys.version_info)
    pins = lock.read_bytes()
    # programs in it name its path, so that those of a copy would run the original
    wanted = f"{hashlib.sha256(pins).hexdigest()} {python} {home}"
    if not stamp.exists() or stamp.read_text("utf-8", "replace") != wanted:
        began, count = time.monotonic(), len(re.findall(rb"(?m)^\S+==", pins))
        title = f"Making .nox/{group} from lockfiles/tool/{group}.txt: {count} packages"
        print(title, file=sys.stderr, flush=True)
        wheels = tool_folder(sys.argv[1:], os.environ)
        stamp.unlink(missing_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(home)], group, _VENV)
        install = pip_install(home / "bin" / "python", wheels)
        hint = _IN_FOLDER.format(wheels) if wheels else _NO_FOLDER
        _run([*install, "--require-hashes", "-r", str(lock)], group, hint, count)
        if group != "nox":  # the menu itself needs no package of ours
            _run([*install, "--no-deps", "--no-build-isolation", "-e", str(root)], group, hint)
            # Relative: below a folder whose name is not ASCII, Python before 3.13 does not start in
            # the C locale if this file names it (https://github.com/python/cpython/issues/77102).
            for file in home.glob("lib/python*/site-packages/pipeline.pth"):
                file.write_text("../../../../..\n")
        stamp.write_text(wanted, "utf-8")
        print(f"  done in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return home / "bin"


_VENV = "Python's venv is needed, with pip (Debian: apt install python3-venv)."
_NO_FOLDER = (
    "Without a package index: `sm120 image collect --tool --output DIR` on a machine that has one,"
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
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    return [*command, "--no-index", "--find-links", str(wheels)] if wheels else command


def _run(command: list[str], group: str, hint: str, packages: int = 0) -> None:
    """Run it to its end, saying how far it is; its last words and what to do where it failed."""
    began, live = time.monotonic(), sys.stderr.isatty()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=output, stderr=errors) as process:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LIVE_BEAT_S if live else _BEAT_S)
                    break
                output.seek(0)
                state = f"  {how_far(output.read(), packages)}, {time.monotonic() - began:.0f} s"
                start, end = ("\r", "\033[K") if live else ("", "\n")
                print(f"{start}{state}", end=end, file=sys.stderr, flush=True)
        if live:
            print("\r", end="\033[K", file=sys.stderr)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if code:
        reason = last_words(text) or f"exit code {code}"
        sys.exit(f"noxfile.py: .nox/{group} could not be made: {reason}\n       {hint}")
    sys.stderr.write(text)


def how_far(output: bytes, packages: int) -> str:
    """What pip is doing, by the lines that it has written."""
    if not packages:
        return "preparing"
    if b"\nInstalling collected packages" in output:
        return f"installing {packages} packages"
    # of other platforms pip says "Ignoring"
    seen = len(re.findall(rb"(?m)^(?:Collecting|Ignoring) ", output))
    return f"fetching package {min(max(seen, 1), packages)} of {packages}"


def last_words(errors: str) -> str:
    """Why pip failed, as it says itself; a crash of its own ends with the reason."""
    lines = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in errors.splitlines() if line.startswith("ERROR: ")]
    named = [line.removeprefix("ERROR: ") for line in said if line.strip() != "ERROR: Exception:"]
    return (named or lines or [""])[-1]

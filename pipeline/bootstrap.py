"""Environments from hash-locked requirements, made with the standard library alone.

`noxfile.py` calls this on a machine that has only Python; nothing of the package is imported here.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

# Names the folder of wheels that `sm120 image collect --tool` made, for a machine without network.
VARIABLE = "SM120_TOOL"
# How often it says how far it is: on a terminal in one line, elsewhere in lines of a log.
_LIVE_BEAT_S, _BEAT_S = 1.0, 15.0
# Where uv cannot: how many pips install a long lock side by side, and from how many packages on.
# One waits for the index half of its time.
_PIPS, _PACKAGES_A_PIP = 4, 20
# pip's settings, as uv calls them: it does not read pip's.
_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "no-index": "UV_NO_INDEX",
    "no-cache-dir": "UV_NO_CACHE",
}
FOLDER = "tool"  # a folder of that name below one that --mirror names will do, too


def environment(root: Path, group: str) -> Path:
    """Makes the programs of a hash-locked group in `.nox/GROUP`, anew for another lock or place.

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
        _run([[sys.executable, "-m", "venv", "--clear", str(home)]], group, _VENV)
        programs, locked = home / "bin", ["--no-deps", "--require-hashes", "-r"]
        install = [str(programs / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        install += ["--no-index", "--find-links", str(wheels)] if wheels else []
        hint = _IN_FOLDER.format(wheels) if wheels else _NO_FOLDER
        variables: Mapping[str, str] | None = None
        with tempfile.TemporaryDirectory() as folder:
            # it names every package: none needs what another one installs
            blocks = re.findall(rb"(?m)^\S.*(?:\n[ \t].*)*", pins)
            pips = min(_PIPS, count // _PACKAGES_A_PIP + 1)
            parts = {Path(folder, f"{i}.txt"): blocks[i::pips] for i in range(pips)}
            uv = [block for block in blocks if block.startswith(b"uv==")]
            if uv and not wheels and (variables := uv_variables(programs / "python")):
                (file := Path(folder, "uv.txt")).write_bytes(uv[0])
                _run([[*install, *locked, str(file)]], group, hint)
                by_uv = [str(programs / "uv"), "pip", "install", "--quiet"]
                by_uv += ["--python", install[0]]
                # our sessions compile what they import; a command may be where that is forbidden
                compiled = ["--compile-bytecode"] if group not in ("test", "lint") else []
                with suppress(SystemExit):  # pip does it then, or says why not
                    _run([[*by_uv, *compiled, *locked, str(lock)]], group, hint, count, variables)
                    install, parts = by_uv, {}
            for file, part in parts.items():
                file.write_bytes(b"\n".join(part))
            _run([[*install, *locked, str(file)] for file in parts], group, hint, count)
        if group != "nox":  # the menu itself needs no package of ours
            ours = [*install, "--no-deps", "--no-build-isolation", "-e", str(root)]
            _run([ours], group, hint, variables=variables)
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
    """Finds the named folder of wheels, or the one below a folder of collected files."""
    if named := variables.get(VARIABLE):
        return Path(named).expanduser().resolve()
    mirrors = [value for word, value in pairwise(arguments) if word == "--mirror"]
    mirrors += [word.removeprefix("--mirror=") for word in arguments if word[:9] == "--mirror="]
    mirrors += variables.get("SM120_MIRRORS", "").split()
    folders = [Path(mirror).expanduser() / FOLDER for mirror in mirrors if "://" not in mirror]
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


def uv_variables(python: Path) -> dict[str, str]:
    """The environment that makes uv ask whom pip would ask; empty where pip may ask nobody."""
    command = [str(python), "-m", "pip", "config", "list", "--disable-pip-version-check"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_LINK_MODE": "copy"}
    for name, variable in _UV_NAMES.items():
        # `global.index-url='https://…'`, of the environment `:env:.index-url='…'`
        settings = dict(re.findall(rf"(?m)^(\S+)\.{name}=(.*)$", listing))
        if value := settings.get(":env:") or settings.get("install") or settings.get("global"):
            between = "," if name == "find-links" else " "
            found[variable] = between.join(ast.literal_eval(value).split())
    return {} if "UV_NO_INDEX" in found else {**found, **os.environ}


def _run(
    commands: list[list[str]],
    group: str,
    hint: str,
    packages: int = 0,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run them side by side, saying how far they are; the first that fails ends all."""
    began, live = time.monotonic(), sys.stderr.isatty()
    with ExitStack() as opened:
        outputs = [opened.enter_context(tempfile.TemporaryFile()) for _ in commands]
        errors = [opened.enter_context(tempfile.TemporaryFile()) for _ in commands]
        running = [
            opened.enter_context(
                subprocess.Popen(command, stdout=output, stderr=error, env=variables)
            )
            for command, output, error in zip(commands, outputs, errors, strict=True)
        ]
        printed_at = began
        # one that fails ends the others; its beat is short, so that this is noticed soon
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            with suppress(subprocess.TimeoutExpired):
                running[codes.index(None)].wait(_LIVE_BEAT_S)
                continue
            if not live and time.monotonic() - printed_at < _BEAT_S:
                continue
            printed_at = time.monotonic()
            for output in outputs:
                output.seek(0)
            far = how_far([output.read() for output in outputs], packages)
            start, end = ("\r", "\033[K") if live else ("", "\n")
            print(
                f"{start}  {far}, {printed_at - began:.0f} s", end=end, file=sys.stderr, flush=True
            )
        for process, code in zip(running, codes, strict=True):
            if code is None:
                process.terminate()
        if live:
            print("\r", end="\033[K", file=sys.stderr)
        texts = list[str]()
        for error in errors:
            error.seek(0)
            texts.append(error.read().decode(errors="replace"))
    for code, text in zip(codes, texts, strict=True):
        if code:
            reason = last_words(text) or f"exit code {code}"
            sys.exit(f"noxfile.py: .nox/{group} could not be made: {reason}\n       {hint}")
    sys.stderr.write("".join(texts))


def how_far(outputs: list[bytes], packages: int) -> str:
    """Says what pip is doing, by the lines that it wrote; several pips may share the work.

    uv writes none before its end.
    """
    if not packages:
        return "preparing"
    if all(b"\nInstalling collected packages" in output for output in outputs):
        return f"installing {packages} packages"
    # of other platforms pip says "Ignoring"
    seen = sum(len(re.findall(rb"(?m)^(?:Collecting|Ignoring) ", each)) for each in outputs)
    place = f"package {min(seen, packages)} of {packages}" if seen else f"{packages} packages"
    return f"fetching {place}"


def last_words(errors: str) -> str:
    """Finds why pip failed, in its own words; a crash of pip ends with the reason."""
    lines = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.strip()]
    failed = [line for line in errors.splitlines() if line.startswith("ERROR: ")]
    named = [line.removeprefix("ERROR: ") for line in failed if line.strip() != "ERROR: Exception:"]
    return (named or lines or [""])[-1]

"""The menu. `python3 noxfile.py -s build-sm120` works on a machine that has only Python.

Run as a script it makes its own environment from the hash-locked requirements; with nox
installed, `nox -s build-sm120` is the same.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LOCKS = ROOT / "lockfiles" / "tool"


def bootstrap() -> None:
    """Make `.nox/menu` with nox in it, from hashes, and go on there."""
    home = ROOT / ".nox" / "menu"
    python = home / "bin" / "python"
    wanted = (LOCKS / "nox.txt").read_bytes()
    stamp = home / "locked"
    if not stamp.exists() or stamp.read_bytes() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, "--require-hashes", "-r", str(LOCKS / "nox.txt")], check=True)
        stamp.write_bytes(wanted)
    os.execv(python, [str(python), "-m", "nox", "-f", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    bootstrap()

import nox  # noqa: E402

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["build-sm120"]
nox.options.error_on_missing_interpreters = True

ENGINES = ("sglang-k2", "sglang", "vllm")


def set_up(session: nox.Session, group: str) -> None:
    """Install a hash-locked group and this package, once for each version of the lock."""
    lock = LOCKS / f"{group}.txt"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    stamp = Path(session.virtualenv.location) / "locked"
    if not stamp.exists() or stamp.read_text() != wanted:
        quiet = ("-q", "--disable-pip-version-check")
        session.install(*quiet, "--require-hashes", "-r", str(lock))
        session.install(*quiet, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        stamp.write_text(wanted)


def with_images(words: list[str]) -> list[str]:
    """What follows `--`: options alone are for the engine images, names stand for themselves."""
    takes_value = ("--mirror", "--platform")
    before = ["", *words]
    names = [
        word
        for previous, word in zip(before, words, strict=False)
        if not word.startswith("-") and previous not in takes_value
    ]
    return words if names else [*ENGINES, *words]


@nox.session(name="build-sm120")
def build_sm120(session: nox.Session) -> None:
    """Build the engine images sglang-k2, sglang and vllm (after --: others; --gate judges them)."""
    set_up(session, "run")
    session.run("sm120", "build", *with_images(session.posargs))


@nox.session
def gate(session: nox.Session) -> None:
    """Does an engine image fit SM120? Needs no GPU (-- IMAGE [--unpatched] [--numerics] …)."""
    set_up(session, "run")
    session.run("sm120", "gate", *(session.posargs or ENGINES[:1]))


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests, then integration tests with real parts where this machine can have them."""
    set_up(session, "test")
    # a file stays in one process; tests/conftest.py says which files belong together
    share_out = ("--numprocesses=auto", "--maxprocesses=4", "--durations=25")
    session.run("pytest", *share_out, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and mypy, strict; ansible-lint over the whole of ansible/."""
    set_up(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
    # the folder, not the playbooks: files that roles include at run time are linted only so
    session.run("ansible-lint", "--offline", "--strict", "--profile", "production", "ansible")


@nox.session
def provision(session: nox.Session) -> None:
    """Bring hosts to what is locked, and prove it (-- -i INVENTORY [--check --diff])."""
    set_up(session, "hosts")
    session.run("sm120", "host", "provision", *(session.posargs or ("--help",)))


@nox.session(name="verify-hosts")
def verify_hosts(session: nox.Session) -> None:
    """Prove every promise of every role on each host (-- -i INVENTORY [--functions IMAGE])."""
    set_up(session, "hosts")
    session.run("sm120", "host", "verify", *(session.posargs or ("--help",)))


@nox.session
def lock(session: nox.Session) -> None:
    """Move the pins: our own tools, then every image (-- --check: only look)."""
    set_up(session, "run")
    if "--check" in session.posargs:
        session.run("sm120", "lock", *session.posargs)
        return
    for group, extra in (
        ("nox", ["--group", "nox"]),
        ("run", ["pyproject.toml", "--group", "build"]),
        ("hosts", ["pyproject.toml", "--group", "build", "--group", "hosts"]),
        ("test", ["pyproject.toml", "--group", "build", "--group", "test"]),
        ("lint", ["pyproject.toml", "--group", "build", "--group", "lint"]),
    ):
        session.run(
            *("uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
            *("--no-header", "--no-annotate", "--python-version", "3.11", "--upgrade"),
            *(*extra, "--output-file", str(LOCKS / f"{group}.txt")),
        )
    session.run("sm120", "lock", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Publish a built and gated image to a registry (-- IMAGE REGISTRY/REPO:TAG)."""
    set_up(session, "run")
    session.run("sm120", "publish", *(session.posargs or ("--help",)))


@nox.session
def perf(session: nox.Session) -> None:
    """Measure our claims side by side with the usual way, in one run."""
    set_up(session, "test")
    session.run("python", "-m", "tests.perf", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Do a room's unit tests notice small wrong changes to its code? (-- ROOM [--sample N] …)."""
    set_up(session, "test")
    # after Ctrl-C it removes its copies of the tree
    command = ("python", "-m", "tests.mutants", *(session.posargs or ("--help",)))
    session.run(*command, interrupt_timeout=30, terminate_timeout=30)

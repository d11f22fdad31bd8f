"""Linux's own sandboxes: what engine code or a step of a build may reach.

A gate imports and calls functions of the engine; with `patches --against` these come from a wheel
that no lock names. `start.py` runs them without network, without the caller's files and
processes, and without capabilities. Where the system forbids namespaces (Docker's default profile,
AppArmor on Ubuntu 24.04), Landlock and seccomp do most of that, and results say what is missing.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from pipeline.artifacts.containers import backend
from pipeline.artifacts.containers.backend import Running, StepContainer
from pipeline.artifacts.containers.start import BARRIERS
from pipeline.core import proc
from pipeline.core.errors import GateEnvironment, SandboxUnavailable
from pipeline.core.files import remove_tree
from pipeline.core.model import Frozen

START = Path(__file__).with_name("start.py")
_PROBE_S = 30.0  # a machine under load takes seconds; one that hangs must not hang the gate
_PR_SET_DUMPABLE = 4

Barrier = Literal["network", "files", "processes", "capabilities", "environment"]
Kind = Literal["namespaces", "restrictions"]
Paths = Sequence[Path]


class Sandbox(Frozen):
    """What the engine's code cannot reach on this machine, and why no stronger sandbox works."""

    kind: Kind | Literal["none"]
    held: list[Barrier]
    reason: str = ""  # why this kind and no stronger one

    @property
    def missing(self) -> list[str]:
        return [barrier for barrier in BARRIERS if barrier not in self.held]

    @property
    def isolates(self) -> bool:
        """Whether untrusted code may run in it."""
        return {"network", "files"} <= set(self.held)

    def sentence(self) -> str:
        """For people: what held, and what did not."""
        if not self.missing:
            return "Engine code has no network, no files or processes of yours, and no capabilities"
        reached = " and ".join(self.missing)
        return f"Engine code is not kept from your {reached} ({self.reason or 'no sandbox'})"

    def command(
        self, command: Sequence[str], *, read: Paths, write: Paths, root: Path, cwd: Path
    ) -> list[str]:
        """The command that starts another one inside; `root` is an empty folder."""
        if self.kind == "none":
            return list(command)
        request: dict[str, object] = {"kind": self.kind, "held": self.held}
        request |= {"root": str(root.absolute()), "cwd": str(cwd.absolute())}
        for name, paths in (("read", read), ("write", write)):
            request[name] = [str(path.absolute()) for path in paths]
        # -I: the variables are meant for the program inside, not for this interpreter
        return [sys.executable, "-I", "-S", str(START), json.dumps(request), *command]

    def run(
        self,
        command: Sequence[str],
        *,
        read: Paths = (),
        write: Paths = (),
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a program inside to its end; its home is an empty folder that is removed with it."""
        # not TemporaryDirectory, whose removal recurses: code inside may nest folders without end
        folder = Path(tempfile.mkdtemp())
        try:
            root, work = folder / "root", folder / "work"
            root.mkdir()
            work.mkdir()
            inside = self.command(command, read=read, write=[*write, work], root=root, cwd=work)
            variables = {"PATH": "/usr/bin:/bin", "HOME": str(work), **(env or {})}
            return proc.read(inside, env=variables, timeout_s=timeout_s)
        finally:
            remove_tree(folder)


NO_SANDBOX = Sandbox(kind="none", held=["environment"], reason="none can be made on this system")


@cache
def find_sandbox() -> Sandbox:
    """Finds the strongest sandbox that this machine lets us make, by trying."""
    reasons: list[str] = []
    # the stronger one first: it also hides what it does not give
    for kind in get_args(Kind):
        try:
            # whether a kernel, a container or a security module allows it is known only by doing it
            done = Sandbox(kind=kind, held=[]).run([], timeout_s=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{kind}: {error}")
            continue
        if not done.returncode:
            # the barriers that hold
            found = {"kind": kind, "held": json.loads(done.stdout), "reason": "; ".join(reasons)}
            return Sandbox.model_validate(found)
        last = proc.last_line(done.stderr.decode(errors="replace"))
        reasons.append(f"{kind}: {last.removeprefix('sandbox: ')}")
    return NO_SANDBOX.model_copy(update={"reason": "; ".join(reasons)})


def hide_environment() -> None:
    """Hides this process's variables and memory from others of the same user.

    For systems where engine code can read files: /proc would show it our keys and tokens.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def require_isolation(sandbox: Sandbox) -> None:
    """Refuses to run code that no lock names where it could reach the caller's files."""
    if not sandbox.isolates:
        raise GateEnvironment(
            f"{sandbox.sentence()}; the other version's code is in no lock, so it was not run",
            "Allow user namespaces or Landlock on this system, or pass --without-sandbox as a user"
            " or on a machine without secrets.",
        )


class Namespaces:
    """Runs steps with the kernel alone: own mounts, network, processes and host name."""

    kind: backend.Kind = "namespaces"

    def __init__(self) -> None:
        sandbox = find_sandbox()
        if sandbox.kind != "namespaces":
            raise SandboxUnavailable(sandbox.reason or "not allowed here")

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        empty = container.scratch / "new-root"
        empty.mkdir(exist_ok=True)
        request = {
            "kind": "namespaces",
            **{"held": [], "read": [], "write": []},
            "root": str(empty.absolute()),
            "cwd": container.workdir,
            "system": str(container.root.absolute()),
            "mounts": [[str(path.absolute()), at] for at, path in container.mounts.items()],
            "hostname": backend.HOST_NAME,
            "memory_bytes": container.limits.memory_bytes,
            "cpus": container.limits.cpus,
            **({"user": container.user} if container.user else {}),
        }
        words = [sys.executable, "-I", "-S", str(START), json.dumps(request), *command]
        with backend.started(words, container.env) as running:
            yield running

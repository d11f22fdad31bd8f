"""The container that steps run in: a toolchain's files, no network, fixed paths, limits.

Three backends: Linux namespaces, which need nothing installed; Docker, through its SDK; Podman. All
three show the same paths, variables, host name and number of processors, so that they give the same
bytes.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pipeline.artifacts.containers.start import LARGEST_FILE_BYTES
from pipeline.core import log, proc
from pipeline.core.errors import StepFailed
from pipeline.core.files import is_free

Kind = Literal["namespaces", "docker", "podman"]
KINDS: tuple[Kind, ...] = ("namespaces", "docker", "podman")
HOST_NAME = "build"  # compilers and configure scripts write it into what they make
Wanted = Literal["auto", "namespaces", "docker", "podman"]
OnLine = Callable[[str], None]
# On every container: the scratch folder of the command that started it.
LABEL = "sm120.scratch"
SHM_BYTES = 256 << 20
WORK = "/build"
_KILLED = 128 + signal.SIGKILL  # as shells and container engines report it
_MOST_LINE_BYTES = 1 << 20
# The number of processes that a build may have; far above what compilers need, and allowed to all.
_PROCESSES = 4096


@dataclass(frozen=True)
class StepLimits:
    """What a step may use."""

    cpus: int
    memory_bytes: int
    silent_s: float
    most_s: float = float("inf")  # a step that prints without end ends here


@dataclass(frozen=True)
class StepContainer:
    """A container's files, mounts, variables and limits: everything that a step sees."""

    root: Path  # the toolchain, unpacked
    image: str  # its tag, for Docker
    mounts: Mapping[str, Path]  # folders it may write to, by their path inside
    env: Mapping[str, str]
    limits: StepLimits
    scratch: Path
    # The image's own user and group. With them a step runs in the image as it would be served: with
    # its user, variables and files to write. Without them steps run as the caller.
    user: tuple[int, int] | None = None
    workdir: str = WORK

    @property
    def processors(self) -> str:
        """The processors that a step may use, as container engines write them."""
        return ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.limits.cpus]))


@dataclass(frozen=True)
class Running:
    """A started command: the handle of its output, and a function that waits for its end."""

    output: int
    wait: Callable[[], int]


class SandboxBackend(Protocol):
    """A backend that runs a command in a container."""

    @property
    def kind(self) -> Kind: ...

    def running(
        self, container: StepContainer, command: Sequence[str]
    ) -> AbstractContextManager[Running]:
        """Starts the command; the end of the block removes everything of it."""


def is_left(scratch: str) -> bool:
    """Whether the command that made a container has ended: its scratch folder is free."""
    path = Path(scratch)
    return path.is_absolute() and (not path.is_dir() or is_free(path / "in-use"))


def process_limits() -> dict[str, int]:
    """Limits of each process: container engines set their own, which root inside may not raise."""
    files = min(x for x in resource.getrlimit(resource.RLIMIT_NOFILE) if x != -1)
    return {"nofile": files, "nproc": _PROCESSES, "core": 0, "fsize": LARGEST_FILE_BYTES}


def with_environment(env: Mapping[str, str]) -> list[str]:
    """Sets these variables and no other: each container engine adds some of its own."""
    return ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items())]


def run_step(
    backend: SandboxBackend, container: StepContainer, command: Sequence[str], on_line: OnLine
) -> int:
    """Runs one command, hands on its lines, and ends it where it hangs."""
    limits, rest, start = container.limits, b"", time.monotonic()
    last = start
    with backend.running(container, command) as running, selectors.DefaultSelector() as waiting:
        os.set_blocking(running.output, False)
        waiting.register(running.output, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if now - start > limits.most_s:
                raise StepFailed(f"took longer than {log.seconds(limits.most_s)}, so it was ended")
            if now - last > limits.silent_s:
                silent = log.seconds(limits.silent_s)
                raise StepFailed(f"printed nothing for {silent}, so it was ended")
            if not waiting.select(timeout=min(1.0, limits.silent_s)):
                continue
            chunk = os.read(running.output, 1 << 16)
            if not chunk:
                break
            last = time.monotonic()
            # ninja ends lines with carriage returns on terminals
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            # a line without end must not fill the memory
            if len(rest) > _MOST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in filter(None, lines):
                on_line(line.decode(errors="replace"))
        if rest:
            on_line(rest.decode(errors="replace"))
        code = running.wait()
    if code == _KILLED:
        limit = log.size(container.limits.memory_bytes)
        raise StepFailed(f"was killed, as the system does when memory ends (limit: {limit})")
    return code


@contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None
) -> Iterator[Running]:
    """Starts a program; it and its children end with the block."""
    with proc.running(command, env=env, cwd=cwd) as process:
        assert process.stdout is not None
        yield Running(process.stdout.fileno(), process.wait)

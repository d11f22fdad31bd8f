"""The box that steps run in: a toolchain's files, no network, fixed paths, limits.

Three ways to make one: Linux namespaces, which need nothing installed; Docker, through its SDK;
Podman. All three show the same paths, variables and host name, so that they give the same bytes.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pipeline import proc
from pipeline.errors import DockerUnavailable, SandboxUnavailable, StepFailed
from pipeline.oci import docker
from pipeline.sandbox.sandbox import START, find_sandbox

Kind = Literal["namespaces", "docker", "podman"]
KINDS: tuple[Kind, ...] = ("namespaces", "docker", "podman")
HOST_NAME = "build"  # compilers and configure scripts write it into what they make
Wanted = Literal["auto", "namespaces", "docker", "podman"]
OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Limits:
    """What a step may use."""

    cpus: int
    memory_bytes: int
    silent_s: float


@dataclass(frozen=True)
class Box:
    """Everything that a step sees."""

    root: Path  # the toolchain, unpacked
    image: str  # its tag, for Docker
    mounts: Mapping[str, Path]  # folders it may write to, by their path inside
    env: Mapping[str, str]
    limits: Limits
    scratch: Path
    hidden: tuple[str, ...] = field(default=())


class Way(Protocol):
    """One way to run a command in a box."""

    kind: Kind

    def started(self, box: Box, command: Sequence[str]) -> list[str]:
        """The program that runs it here, with its output on stdout."""


class Namespaces:
    """The kernel alone: own mounts, network, processes and host name."""

    kind: Kind = "namespaces"

    def started(self, box: Box, command: Sequence[str]) -> list[str]:
        empty = box.scratch / "new-root"
        empty.mkdir(exist_ok=True)
        request = {
            "kind": "namespaces",
            "held": [],
            "read": [],
            "write": [],
            "root": str(empty.absolute()),
            "cwd": "/build",
            "system": str(box.root.absolute()),
            "mounts": [[str(path.absolute()), at] for at, path in box.mounts.items()],
            "hostname": HOST_NAME,
            "memory_bytes": box.limits.memory_bytes,
            "cpus": box.limits.cpus,
        }
        return [sys.executable, "-I", "-S", str(START), json.dumps(request), *command]


class Containers:
    """Docker or Podman, by their own commands; Docker needs the image loaded, Podman a folder."""

    def __init__(self, kind: Literal["docker", "podman"]) -> None:
        self.kind: Kind = kind

    def started(self, box: Box, command: Sequence[str]) -> list[str]:
        limits = [f"--memory={box.limits.memory_bytes}", f"--cpus={box.limits.cpus}"]
        volumes = [f"--volume={path.absolute()}:{at}" for at, path in box.mounts.items()]
        env = [f"--env={name}={value}" for name, value in box.env.items()]
        common = [
            *("run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL"),
            *("--security-opt=no-new-privileges", f"--hostname={HOST_NAME}"),
            *("--workdir=/build", f"--user={os.geteuid()}:{os.getegid()}", "--entrypoint="),
            *(*limits, *volumes, *env),
        ]
        if self.kind == "docker":
            return [self.kind, *common, box.image, *command]
        own = [] if os.geteuid() == 0 else ["--userns=keep-id"]
        return [self.kind, *common, *own, "--rootfs", str(box.root.absolute()), *command]


def find_way(wanted: Wanted) -> Way:
    """The first way that this machine allows; tried, not guessed."""
    reasons = []
    for kind in KINDS if wanted == "auto" else (wanted,):
        reason = _obstacle(kind)
        if not reason:
            return Namespaces() if kind == "namespaces" else Containers(kind)
        reasons.append(f"{kind}: {reason}")
    raise SandboxUnavailable(f"no sandbox to compile in ({'; '.join(reasons)})")


def _obstacle(kind: Kind) -> str:
    if kind == "namespaces":
        sandbox = find_sandbox()
        return "" if sandbox.kind == "namespaces" else sandbox.reason or "not allowed here"
    if kind == "docker":
        try:
            docker.connect().close()
        except DockerUnavailable as error:
            return str(error)
        return ""
    try:
        done = proc.read(["podman", "info"], timeout_s=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return proc.last_line(done.stderr.decode(errors="replace")) if done.returncode else ""


def run_step(way: Way, box: Box, command: Sequence[str], on_line: OnLine) -> int:
    """Run one command to its end and hand on its lines; a silent one is ended."""
    # a container's own variables come with its command
    env = dict(box.env) if way.kind == "namespaces" else proc.environment("DOCKER_HOST")
    with _started(way.started(box, command), env) as process:
        assert process.stdout is not None
        for line in _lines(process, box.limits.silent_s):
            on_line(line)
        return process.wait()


@contextmanager
def _started(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        list(command),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C on a terminal is ours to act on: all it started ends as one
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _lines(process: subprocess.Popen[bytes], silent_s: float) -> Iterator[str]:
    """Output line by line; carriage returns end lines too, as ninja writes them on terminals."""
    assert process.stdout is not None
    handle, rest, last = process.stdout.fileno(), b"", time.monotonic()
    os.set_blocking(handle, False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(handle, selectors.EVENT_READ)
        while True:
            if waiting.select(timeout=1.0):
                chunk = os.read(handle, 1 << 16)
                if not chunk:
                    break
                last = time.monotonic()
                *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
                yield from (line.decode(errors="replace") for line in lines if line)
            elif time.monotonic() - last > silent_s:
                raise StepFailed(
                    f"nothing was printed for {silent_s / 60:.0f} minutes, so it was ended"
                )
    if rest:
        yield rest.decode(errors="replace")

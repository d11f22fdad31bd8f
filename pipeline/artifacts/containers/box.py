"""The container that steps run in: a toolchain's files, no network, fixed paths, limits.

Three backends: Linux namespaces, which need nothing installed; Docker, through its SDK; Podman. All
three show the same paths, variables, host name and number of processors, so that they give the same
bytes.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pipeline.artifacts.containers import docker
from pipeline.artifacts.containers.sandbox import START, find_sandbox
from pipeline.artifacts.containers.start import LARGEST_FILE_BYTES
from pipeline.core import log, proc
from pipeline.core.errors import DockerUnavailable, SandboxUnavailable, StepFailed
from pipeline.core.files import is_free

if TYPE_CHECKING:
    from docker.models.containers import Container

Kind = Literal["namespaces", "docker", "podman"]
KINDS: tuple[Kind, ...] = ("namespaces", "docker", "podman")
HOST_NAME = "build"  # compilers and configure scripts write it into what they make
Wanted = Literal["auto", "namespaces", "docker", "podman"]
OnLine = Callable[[str], None]
# On every container: the scratch folder of the command that started it.
LABEL = "sm120.scratch"
_SHM_BYTES = 256 << 20
_WORK = "/build"
_KILLED = 128 + signal.SIGKILL  # as shells and container engines report it
# Podman answers within seconds; one that hangs must not stop a build for ever.
_PODMAN_S = 60.0
_MOST_LINE_BYTES = 1 << 20
# The number of processes that a build may have; far above what compilers need, and allowed to all.
_PROCESSES = 4096


@dataclass(frozen=True)
class Limits:
    """What a step may use."""

    cpus: int
    memory_bytes: int
    silent_s: float
    most_s: float = float("inf")  # a step that prints without end ends here


@dataclass(frozen=True)
class Box:
    """A container's files, mounts, variables and limits: everything that a step sees."""

    root: Path  # the toolchain, unpacked
    image: str  # its tag, for Docker
    mounts: Mapping[str, Path]  # folders it may write to, by their path inside
    env: Mapping[str, str]
    limits: Limits
    scratch: Path
    # The image's own user and group. With them a step runs in the image as it would be served: with
    # its user, variables and files to write. Without them steps run as the caller.
    user: tuple[int, int] | None = None
    workdir: str = _WORK

    @property
    def processors(self) -> str:
        """The processors that a step may use, as container engines write them."""
        return ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.limits.cpus]))


@dataclass(frozen=True)
class Running:
    """A started command: the handle of its output, and a function that waits for its end."""

    output: int
    wait: Callable[[], int]


class Way(Protocol):
    """A backend that runs a command in a container."""

    @property
    def kind(self) -> Kind: ...

    def running(self, box: Box, command: Sequence[str]) -> AbstractContextManager[Running]:
        """Starts the command; the end of the block removes everything of it."""


class Namespaces:
    """Uses the kernel alone: own mounts, network, processes and host name."""

    kind: Kind = "namespaces"

    @contextmanager
    def running(self, box: Box, command: Sequence[str]) -> Iterator[Running]:
        empty = box.scratch / "new-root"
        empty.mkdir(exist_ok=True)
        request = {
            "kind": "namespaces",
            **{"held": [], "read": [], "write": []},
            "root": str(empty.absolute()),
            "cwd": box.workdir,
            "system": str(box.root.absolute()),
            "mounts": [[str(path.absolute()), at] for at, path in box.mounts.items()],
            "hostname": HOST_NAME,
            "memory_bytes": box.limits.memory_bytes,
            "cpus": box.limits.cpus,
            **({"user": box.user} if box.user else {}),
        }
        start = [sys.executable, "-I", "-S", str(START), json.dumps(request), *command]
        with _process(start, box.env) as running:
            yield running


class Podman:
    """Podman on the unpacked toolchain; an overlay keeps what it writes out of that folder."""

    kind: Kind = "podman"

    def __init__(self, runtime: str = "") -> None:
        self._head = ["podman", *([f"--runtime={runtime}"] if runtime else [])]

    @contextmanager
    def running(self, box: Box, command: Sequence[str]) -> Iterator[Running]:
        # containers whose command was killed before it could end them
        shown = '{{.ID}} {{index .Labels "' + LABEL + '"}}'
        listed = self._read("ps", "--all", f"--filter=label={LABEL}", f"--format={shown}")
        for identity, _, scratch in (line.partition(" ") for line in listed.splitlines()):
            if is_left(scratch):
                self._read("rm", "--force", "--ignore", "--time=0", identity)
        name = f"sm120-{secrets.token_hex(8)}"
        try:
            start = [*self._head, *self._arguments(box, name), *command]
            # its monitor leaves a file `oom` where it was started
            with _process(start, None, box.scratch) as running:
                yield running
        finally:
            # podman's own process is gone, but its container is a child of another
            self._read("rm", "--force", "--ignore", "--time=0", name)

    def _arguments(self, box: Box, name: str) -> list[str]:
        own_image = ["--pull=never", box.image]
        unpacked = [
            *("--read-only", "--read-only-tmpfs=false", f"--workdir={_WORK}"),
            *(f"--user={os.geteuid()}:{os.getegid()}",),
            *(["--userns=keep-id"] if os.geteuid() else []),
            # O: on the folder itself podman would leave the points that it mounts things at
            *("--rootfs", f"{box.root.absolute()}:O", *_with_environment(box.env)),
        ]
        return [
            *("run", "--rm", f"--name={name}", f"--label={LABEL}={box.scratch}"),
            *("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(f"--hostname={HOST_NAME}", "--no-hosts", "--entrypoint="),
            # swap counts too, or there would be no limit
            *(f"--memory={box.limits.memory_bytes}", f"--memory-swap={box.limits.memory_bytes}"),
            *(f"--cpuset-cpus={box.processors}", f"--shm-size={_SHM_BYTES}"),
            *(f"--ulimit={name}={soft}:{hard}" for name, (soft, hard) in _rlimits().items()),
            *(f"--volume={path.absolute()}:{at}" for at, path in box.mounts.items()),
            *(own_image if box.user else unpacked),
        ]

    def _read(self, *arguments: str) -> str:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = proc.read([*self._head, *arguments], timeout_s=_PODMAN_S)
            return done.stdout.decode(errors="replace")
        return ""


class Docker:
    """Docker, through its SDK; the toolchain is an image there."""

    kind: Kind = "docker"

    @contextmanager
    def running(self, box: Box, command: Sequence[str]) -> Iterator[Running]:
        from docker.errors import DockerException
        from requests import RequestException

        client = docker.connect()
        try:
            for left in client.containers.list(all=True, filters={"label": LABEL}):
                if is_left(left.labels[LABEL]):
                    left.remove(force=True)
            container = client.containers.create(**_docker_arguments(box, command))
            try:
                with _followed(container) as running:
                    yield running
            finally:
                with suppress(DockerException):
                    container.remove(force=True)
        except (DockerException, RequestException) as error:
            reason = " ".join(str(error).split())[:300]
            raise DockerUnavailable(
                f"Docker ended the build: {reason}",
                "Its reason is above; finished objects are kept, so run it again.",
            ) from error
        finally:
            client.close()


def _docker_arguments(box: Box, command: Sequence[str]) -> dict[str, Any]:
    from docker.types import Ulimit

    limits = _rlimits().items()
    as_caller = {
        "read_only": True,
        "working_dir": _WORK,
        "user": f"{os.geteuid()}:{os.getegid()}",
        "command": [*_with_environment(box.env), *command],
    }
    return {
        "image": box.image,
        **({"command": list(command)} if box.user else as_caller),
        "entrypoint": [],
        "labels": {LABEL: str(box.scratch)},
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "hostname": HOST_NAME,
        "mem_limit": box.limits.memory_bytes,
        "memswap_limit": box.limits.memory_bytes,  # swap counts too, or there would be no limit
        "cpuset_cpus": box.processors,
        "shm_size": _SHM_BYTES,
        "ulimits": [Ulimit(name=name, soft=soft, hard=hard) for name, (soft, hard) in limits],
        "volumes": [f"{path.absolute()}:{at}" for at, path in box.mounts.items()],
    }


@contextmanager
def _followed(container: Container) -> Iterator[Running]:
    """Starts a container and sends its output through a pipe, as that of a process comes."""
    from urllib3.exceptions import HTTPError

    output, into = os.pipe()

    def follow() -> None:
        with suppress(OSError, HTTPError), os.fdopen(into, "wb", buffering=0) as pipe:
            for chunk in stream:
                pipe.write(chunk)

    try:
        stream = container.attach(stream=True, logs=True)
        container.start()
        threading.Thread(target=follow, daemon=True).start()
        yield Running(output, lambda: int(container.wait()["StatusCode"]))
    finally:
        os.close(output)


def is_left(scratch: str) -> bool:
    """Whether the command that made a container has ended: its scratch folder is free."""
    path = Path(scratch)
    return path.is_absolute() and (not path.is_dir() or is_free(path / "in-use"))


def _rlimits() -> dict[str, tuple[int, int]]:
    """Limits of each process: container engines set their own, which root inside may not raise."""
    files = min(x for x in resource.getrlimit(resource.RLIMIT_NOFILE) if x != -1)
    sizes = LARGEST_FILE_BYTES, LARGEST_FILE_BYTES
    return {"nofile": (files, files), "nproc": (_PROCESSES,) * 2, "core": (0, 0), "fsize": sizes}


def _with_environment(env: Mapping[str, str]) -> list[str]:
    """Sets these variables and no other: each container engine adds some of its own."""
    return ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items())]


def find_way(wanted: Wanted) -> Way:
    """Tries the backends on this machine and returns the first that works."""
    reasons = []
    for kind in KINDS if wanted == "auto" else (wanted,):
        reason = ""
        if kind == "namespaces":
            sandbox = find_sandbox()
            if sandbox.kind == "namespaces":
                return Namespaces()
            reason = sandbox.reason or "not allowed here"
        elif kind == "docker":
            try:
                docker.connect().close()
                return Docker()
            except DockerUnavailable as error:
                reason = str(error)
        else:
            found = _find_podman()
            if isinstance(found, Podman):
                return found
            reason = found
        reasons.append(f"{kind}: {reason}")
    raise SandboxUnavailable(f"no sandbox to compile in ({'; '.join(reasons)})")


def _find_podman() -> Podman | str:
    """Podman with the first runtime that works, as its own choice need not; else the reason."""
    reason = ""
    limits = [f"--ulimit={name}={soft}:{hard}" for name, (soft, hard) in _rlimits().items()]
    for runtime in ("", "crun", "runc"):
        head = ["podman", *([f"--runtime={runtime}"] if runtime else [])]
        arguments = ["run", "--rm", "--network=none", *limits, "--rootfs"]
        try:
            with tempfile.TemporaryDirectory() as empty:
                command = [*head, *arguments, f"{empty}:O", "/nothing"]
                done = proc.read(command, timeout_s=_PODMAN_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        # a missing program is the last thing that a runtime finds out: all else works
        if done.returncode == 127:
            return Podman(runtime)
        reason = reason or proc.last_line(done.stderr.decode(errors="replace"))
    return reason


def run_step(way: Way, box: Box, command: Sequence[str], on_line: OnLine) -> int:
    """Runs one command, hands on its lines, and ends it where it hangs."""
    limits, rest, start = box.limits, b"", time.monotonic()
    last = start
    with way.running(box, command) as running, selectors.DefaultSelector() as waiting:
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
        limit = log.size(box.limits.memory_bytes)
        raise StepFailed(f"was killed, as the system does when memory ends (limit: {limit})")
    return code


@contextmanager
def _process(
    command: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None = None
) -> Iterator[Running]:
    if env is None:
        env = proc.environment("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # on Ctrl-C we end everything that it started
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield Running(process.stdout.fileno(), process.wait)
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

"""Where an engine is started: on this machine, or on another one through an SSH connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pipeline.artifacts.containers.arguments import EngineKind
from pipeline.artifacts.containers.container_engine import ContainerEngine, Wanted
from pipeline.artifacts.containers.docker import Docker
from pipeline.artifacts.containers.podman import Podman
from pipeline.core import proc
from pipeline.core.errors import DockerUnavailable, HostUnreached
from pipeline.core.known import Known, then, unknown
from pipeline.hosts.facts import capture
from pipeline.hosts.facts.source import Capture, read_capture
from pipeline.hosts.fleet.remote import one_line
from pipeline.hosts.fleet.tunnel import LIMIT_S, Tunnel
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve import guard, port_probe
from pipeline.serving.serve.health import Endpoint
from pipeline.serving.serve.preflight import PreflightMachine, machine_for

# nvidia-smi alone is asked four times, and may take seconds each on many cards
_CAPTURE_S = 300.0
# What `uname -m` says of the platforms that images are built for.
_MACHINES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


class Site:
    """This machine, as serving sees it; other machines are a kind of it."""

    @property
    def host(self) -> str:
        """Its name; empty for this machine."""
        return ""

    def look(self, recipe: Recipe, port: int) -> PreflightMachine:
        """Captures now what preflight judges, as far as the recipe depends on it."""
        return machine_for(recipe, self.port_problem(port), self.captured)

    def port_problem(self, port: int) -> Known[str]:
        """Why a port there cannot be used; empty where it is free."""
        return port_probe.port_problem(port)

    def clock_s(self) -> Known[float]:
        """How far its clock is ahead of this machine's."""
        return 0.0

    def captured(self) -> Known[Capture]:
        """Captures the facts of the machine now."""
        return read_capture(None)

    def door(self, port: int) -> Endpoint:
        """Where this machine reaches a port of that one."""
        return port

    def guarded(self, container: str, attempt: str) -> AbstractContextManager[None]:
        """A block that leaves its container only if it ends well."""
        # a start on this machine removes what fails itself
        return nullcontext()


HERE = Site()


@dataclass(frozen=True)
class RemoteSite(Site):
    """Another machine. Its Python runs our questions, and no file of ours stays on it."""

    tunnel: Tunnel
    name: str
    kind: EngineKind
    place: str  # Docker's socket there, or Podman's program

    @property
    def host(self) -> str:
        return self.name

    def look(self, recipe: Recipe, port: int) -> PreflightMachine:
        """Runs the code that looks at this machine, as the login's user."""
        return machine_for(recipe, self.port_problem(port), self.captured)

    def port_problem(self, port: int) -> Known[str]:
        tried = self._ask("the port cannot be tried", port_probe, str(port))
        return then(tried, lambda out: out.decode(errors="replace").strip())

    def clock_s(self) -> Known[float]:
        begun = time.time()
        answer = self.tunnel.read(["date", "+%s.%N"])
        # halfway through the question, the best guess
        middle = (begun + time.time()) / 2
        return then(answer.out, lambda out: float(out) - middle)

    def captured(self) -> Known[Capture]:
        """Runs the code that captures this machine, as the login's user."""
        found = self._ask("its facts cannot be read", capture, limit_s=_CAPTURE_S)
        return then(found, Capture.model_validate_json)

    def _ask(
        self, failure: str, module: ModuleType, *words: str, limit_s: float = LIMIT_S
    ) -> Known[bytes]:
        """Runs a module of ours with the host's Python, and returns what it prints."""
        code = one_line(Path(str(module.__file__)))
        done = self.tunnel.read(["python3", "-c", code, *words], limit_s=limit_s)
        return unknown(f"{self.name}: {failure}: {done.message}") if done.code else done.out

    def door(self, port: int) -> Endpoint:
        """A socket of the connection."""
        return self.tunnel.forward(f"127.0.0.1:{port}")

    @contextmanager
    def guarded(self, container: str, attempt: str) -> Iterator[None]:
        """The guard on that machine removes the container when the connection is lost."""
        code = one_line(Path(guard.__file__))
        words = ["python3", "-c", code, self.kind, self.place, container, attempt]
        process = proc.talk(self.tunnel.command(words), env=proc.child_environment())
        assert process.stdin is not None
        assert process.stdout is not None
        pipe, done = process.stdin, threading.Event()

        def beat() -> None:
            # the pipe is closed, or its other end gone, when the block ends
            with suppress(OSError, ValueError):
                while not done.wait(guard.BEAT_S):
                    pipe.write(guard.BEAT)
                    pipe.flush()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
            # only now: until here a lost connection must remove the container
            answer = b""
            with suppress(OSError):
                pipe.write(guard.KEEP)
                pipe.flush()
                answer = process.stdout.readline()
            # without it the host may already remove the container
            if answer != guard.KEPT:
                raise HostUnreached(
                    f"{self.name}: the connection was lost at the end of the start",
                    "Check the network to it, and serve the recipe again.",
                )
        finally:
            done.set()
            proc.end(process)


def tunnel_of(site: Site) -> Tunnel | None:
    """The connection to another machine; none for this one."""
    return site.tunnel if isinstance(site, RemoteSite) else None


def find_remote_site(
    tunnel: Tunnel, name: str, wanted: Wanted
) -> tuple[RemoteSite, ContainerEngine]:
    """Finds the container engine of a host; returns the host and the engine."""
    if wanted != "podman":
        user = tunnel.read(["id", "-u"]).out.decode(errors="replace").strip()
        # the system's daemon, or one without root
        places = ("/var/run/docker.sock", f"/run/user/{user}/docker.sock")
        for place in places:
            if tunnel.read(["test", "-w", place]).code == 0:
                return RemoteSite(tunnel, name, "docker", place), Docker(tunnel.forward(place))
        if wanted == "docker":
            if any(tunnel.read(["test", "-e", place]).code == 0 for place in places):
                raise DockerUnavailable(
                    f"{name}: this login may not use Docker's socket",
                    "Put the login's user into the group `docker`, or log in as root.",
                )
            raise DockerUnavailable(
                f"{name}: Docker does not run there",
                "`sm120 host provision` installs it (role container_runtime).",
            )
    if tunnel.read(["podman", "--version"]).code:
        raise DockerUnavailable(
            f"{name}: neither Docker nor Podman answers this login",
            "`sm120 host provision` installs them (role container_runtime).",
        )
    return RemoteSite(tunnel, name, "podman", "podman"), Podman(tunnel.command)


def platform_of(tunnel: Tunnel, name: str) -> str:
    """The platform of the images that a host runs."""
    machine = tunnel.read(["uname", "-m"]).out.decode(errors="replace").strip()
    if machine not in _MACHINES:
        raise DockerUnavailable(
            f"{name}: no image is for its processor, {machine or 'unknown'}",
            "Choose a host with an amd64 or arm64 processor.",
        )
    return _MACHINES[machine]

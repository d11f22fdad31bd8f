"""Podman, through its own program: containers of recipes, and steps of a build.

Its flags are Docker's, and CDI cards are among them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from pipeline.artifacts.containers import backend, docker
from pipeline.artifacts.containers.arguments import ContainerArguments, EngineKind, Label
from pipeline.artifacts.containers.backend import Running, StepContainer
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.oci.document import read_document
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log, proc

_TIMEOUT_S = 120.0
_PIECE_BYTES = 1 << 16
_VERSIONS = "`podman version` shows which it is: answers of 4 and 5 are known here."
_BUSY_S = (0.5, 2.0, 0.0)  # pauses after each try
_STILL_BUSY = (
    "Something still uses its files. `podman ps --all` shows whether it is there; after a restart"
    " of this machine `podman rm --force` removes it."
)
# What Podman finds its sockets, its images and its own settings by.
_PASSED = (
    *("XDG_RUNTIME_DIR", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS"),
    *("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"),
)


class Podman:
    """One user's Podman; `on_host` turns a command line into one that runs on another host."""

    kind: EngineKind = "podman"

    def __init__(
        self, on_host: Callable[[Sequence[str]], list[str]] | None = None, runtime: str = ""
    ) -> None:
        self._command: Callable[[Sequence[str]], list[str]] = on_host or list
        self._runtime = [f"--runtime={runtime}"] if runtime else []
        if on_host is None:
            proc.find_tool("podman", "Install Podman, or use --runtime docker.")

    @staticmethod
    def is_there() -> bool:
        return shutil.which("podman") is not None

    @classmethod
    def answers(cls) -> bool:
        """Whether it is installed and works for this user."""
        return cls.is_there() and not cls()._run("ps", "--quiet", may_fail=True).returncode

    @classmethod
    def for_steps(cls) -> Self:
        """Podman with the first runtime that works; Podman's own choice may fail."""
        reason = ""
        limits = [
            f"--ulimit={name}={most}:{most}" for name, most in backend.process_limits().items()
        ]
        for runtime in ("", "crun", "runc"):
            podman = cls(runtime=runtime)
            with tempfile.TemporaryDirectory() as empty:
                flags = ["--rm", "--network=none", *limits, "--rootfs", f"{empty}:O"]
                done = podman._run("run", *flags, "/nothing", may_fail=True)
            # a missing program is the last thing that a runtime finds out: all else works
            if done.returncode == 127:
                return podman
            reason = reason or proc.last_line(_text(done.stderr))
        raise errors.SandboxUnavailable(reason)

    def _run(
        self,
        *arguments: str,
        kind: type[errors.PipelineError] = errors.PodmanUnavailable,
        wait_s: float = _TIMEOUT_S,
        may_fail: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        words = self._command(["podman", *self._runtime, *arguments])
        try:
            done = proc.read(words, env=proc.child_environment(*_PASSED), timeout_s=wait_s)
        except subprocess.TimeoutExpired as error:
            raise kind(f"Podman did not {arguments[0]} within {log.seconds(wait_s)}") from error
        if done.returncode and not may_fail:
            raise kind(f"Podman could not {arguments[0]}: {_reason(done.stderr)}")
        return done

    def image(self, identity: str) -> ImageFacts | None:
        answer = self._inspect("image", identity)
        return ImageFacts.model_validate(answer) if answer else None

    def load(self, store: Store, name: str, digest: str) -> None:
        image = read_document(store.read_blob(digest))
        total = docker.archive_bytes(image)
        process = proc.talk(
            self._command(["podman", "load", "--quiet"]), env=proc.child_environment(*_PASSED)
        )
        assert process.stdin is not None
        try:
            with (
                log.step(f"Loading {name}, {log.size(total)}"),
                log.progress("sent", total) as bar,
            ):
                # a Podman that refuses closes its end; its reason is read below
                with suppress(BrokenPipeError):
                    for piece in docker.docker_archive(
                        store, image, [docker.default_tag(name, digest)]
                    ):
                        process.stdin.write(piece)
                        bar.advance(len(piece))
                _, error = process.communicate()
        finally:
            proc.end(process)
        if process.returncode:
            raise errors.PodmanUnavailable(
                f"Podman refused {name}: {_reason(error)}",
                "Its reason is above; `podman info` shows whether it works for you.",
            )

    def create(self, arguments: ContainerArguments) -> str:
        # no registry may answer for an image that the store has
        flags = ["--pull=never", *arguments.run_flags()]
        words = [*flags, arguments.image, *arguments.arguments]
        # warnings come before the id
        return _text(self._run("create", *words, kind=errors.ContainerRefused).stdout).split()[-1]

    def start(self, identity: str) -> None:
        self._run("start", identity, kind=errors.ContainerRefused)

    def containers(self) -> list[ContainerFacts]:
        options = ("--all", "--no-trunc", f"--filter=label={Label.RECIPE}", "--format={{.ID}}")
        listed = _text(self._run("ps", *options).stdout).split()
        found = [self.container(identity) for identity in listed]
        return sorted((x for x in found if x is not None), key=lambda x: x.name)

    def container(self, name: str) -> ContainerFacts | None:
        answer = self._inspect("container", name)
        return ContainerFacts.model_validate(answer) if answer else None

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        options = [*(["--follow"] if follow else []), *([f"--tail={tail}"] if tail else [])]
        words = self._command(["podman", "logs", *options, identity])
        # its end kills it: `podman logs --follow` ends only with its container
        with backend.started(words, proc.child_environment(*_PASSED)) as running:
            while piece := os.read(running.output, _PIECE_BYTES):
                yield piece

    def stop(self, identity: str, timeout_s: int) -> None:
        self._run("stop", f"--time={timeout_s}", identity, wait_s=timeout_s + _TIMEOUT_S)

    def remove(self, identity: str) -> None:
        facts = self.container(identity)
        if facts is not None and facts.status == "created":
            # After `podman system reset` with another storage, or when its folder in /run was
            # cleared, Podman takes what runs for what was before a boot. `podman rm` leaves such
            # an engine running, with its cards and its port; the OCI runtime below still knows it.
            # If it never ran, there is nothing to delete.
            runtime = _text(self._run("info", "--format={{.Host.OCIRuntime.Path}}").stdout).strip()
            words = self._command([runtime, "delete", "--force", facts.id])
            proc.read(words, env=proc.child_environment(*_PASSED), timeout_s=_TIMEOUT_S)
        for pause_s in _BUSY_S:
            options = ("--force", "--ignore", "--time=0", "--volumes")
            done = self._run("rm", *options, identity, may_fail=True)
            if not done.returncode:
                return
            reason = f"Podman could not rm: {_reason(done.stderr)}"
            # its own cleanup may still hold a mount: containers/podman#10454, #11594
            if b"busy" not in done.stderr:
                raise errors.PodmanUnavailable(reason)
            time.sleep(pause_s)
        raise errors.PodmanUnavailable(reason, _STILL_BUSY)

    def close(self) -> None:
        return

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        """Runs a step on the unpacked toolchain; an overlay takes what the step writes."""
        # remove containers whose command died before it could end them
        shown = '{{.ID}} {{index .Labels "' + backend.LABEL + '"}}'
        listed = self._run(
            "ps", "--all", f"--filter=label={backend.LABEL}", f"--format={shown}"
        ).stdout
        for identity, _, scratch in (line.partition(" ") for line in _text(listed).splitlines()):
            if backend.is_left(scratch):
                self._run("rm", "--force", "--ignore", "--time=0", identity, may_fail=True)
        name, limits = f"sm120-{secrets.token_hex(8)}", container.limits
        unpacked = [
            *("--read-only", "--read-only-tmpfs=false", f"--workdir={backend.WORK}"),
            f"--user={os.geteuid()}:{os.getegid()}",
            *(["--userns=keep-id"] if os.geteuid() else []),
            # O: on the folder itself podman would leave the points that it mounts things at
            *(
                "--rootfs",
                f"{container.root.absolute()}:O",
                *backend.with_environment(container.env),
            ),
        ]
        words = [
            *("podman", *self._runtime, "run", "--rm", f"--name={name}"),
            *(f"--label={backend.LABEL}={container.scratch}", "--network=none", "--cap-drop=ALL"),
            *("--security-opt=no-new-privileges", "--no-hosts", f"--hostname={backend.HOST_NAME}"),
            # swap counts too, or there would be no limit
            *(f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"),
            *(
                f"--cpuset-cpus={container.processors}",
                f"--shm-size={backend.SHM_BYTES}",
                "--entrypoint=",
            ),
            *(f"--ulimit={kind}={most}:{most}" for kind, most in backend.process_limits().items()),
            *(f"--volume={path.absolute()}:{at}" for at, path in container.mounts.items()),
            *(["--pull=never", container.image] if container.user else unpacked),
            *command,
        ]
        try:
            # its monitor leaves a file `oom` where it was started
            with backend.started(
                words, proc.child_environment(*_PASSED), container.scratch
            ) as running:
                yield running
        finally:
            # podman's own process is gone, but its container is a child of another
            with suppress(errors.PodmanUnavailable):
                self._run("rm", "--force", "--ignore", "--time=0", name, may_fail=True)

    def _inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        done = self._run(kind, "inspect", name, may_fail=True)
        if done.returncode:
            text = _text(done.stderr).lower()
            # there is no image or container of that name, in the words of its versions 4 and 5
            if "no such" in text or "not known" in text:
                return None
            raise errors.PodmanUnavailable(
                f"Podman could not look at {name}: {_reason(done.stderr)}",
                "`podman info` shows whether it works for this user.",
            )
        try:
            return dict(json.loads(done.stdout)[0])
        except (ValueError, LookupError, TypeError) as error:
            message = f"Podman's answer about {name} cannot be read"
            raise errors.PodmanUnavailable(message, _VERSIONS) from error


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


def _reason(error: bytes) -> str:
    return " ".join(proc.last_line(_text(error)).split())[:400]

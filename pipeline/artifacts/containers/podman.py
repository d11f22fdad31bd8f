"""Podman through its own program: its flags are Docker's, and CDI cards are among them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from pipeline.artifacts.containers.arguments import ContainerArguments, Label
from pipeline.artifacts.containers.container_engine import EngineKind
from pipeline.artifacts.containers.docker import (
    archive_bytes,
    default_tag,
    docker_archive,
)
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.oci.document import read_document
from pipeline.artifacts.store.store import Store
from pipeline.core import log, proc
from pipeline.core.errors import ContainerRefused, PipelineError, PodmanUnavailable

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
    """One user's Podman; `on_host` makes of a command line one that runs on another host."""

    kind: EngineKind = "podman"

    def __init__(self, on_host: Callable[[Sequence[str]], list[str]] | None = None) -> None:
        self._command: Callable[[Sequence[str]], list[str]] = on_host or list
        if on_host is None:
            proc.find_tool("podman", "Install Podman, or use --engine docker.")

    @staticmethod
    def is_there() -> bool:
        return shutil.which("podman") is not None

    @classmethod
    def answers(cls) -> bool:
        """Whether it is installed and works for this user."""
        return cls.is_there() and not cls()._run("ps", "--quiet", may_fail=True).returncode

    def _run(
        self,
        *arguments: str,
        kind: type[PipelineError] = PodmanUnavailable,
        wait_s: float = _TIMEOUT_S,
        may_fail: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        words = self._command(["podman", *arguments])
        try:
            done = proc.read(words, env=proc.environment(*_PASSED), timeout_s=wait_s)
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
        total = archive_bytes(image)
        process = proc.talk(
            self._command(["podman", "load", "--quiet"]), env=proc.environment(*_PASSED)
        )
        assert process.stdin is not None
        try:
            with (
                log.step(f"Loading {name}, {log.size(total)}"),
                log.progress("sent", total) as bar,
            ):
                # a Podman that refuses closes its end; its reason is read below
                with suppress(BrokenPipeError):
                    for piece in docker_archive(store, image, [default_tag(name, digest)]):
                        process.stdin.write(piece)
                        bar.advance(len(piece))
                _, error = process.communicate()
        finally:
            proc.end(process)
        if process.returncode:
            raise PodmanUnavailable(
                f"Podman refused {name}: {_reason(error)}",
                "Its reason is above; `podman info` shows whether it works for you.",
            )

    def create(self, arguments: ContainerArguments) -> str:
        # no registry may answer for an image that the store has
        flags = ["--pull=never", *arguments.run_flags()]
        words = [*flags, arguments.image, *arguments.arguments]
        # warnings come before the id
        return _text(self._run("create", *words, kind=ContainerRefused).stdout).split()[-1]

    def start(self, identity: str) -> None:
        self._run("start", identity, kind=ContainerRefused)

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
        process = subprocess.Popen(
            self._command(["podman", "logs", *options, identity]),
            env=proc.environment(*_PASSED),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            while piece := process.stdout.read1(_PIECE_BYTES):  # type: ignore[attr-defined]
                yield piece
        finally:
            # `podman logs --follow` ends only with its container
            process.kill()
            process.wait()
            process.stdout.close()

    def stop(self, identity: str, timeout_s: int) -> None:
        self._run("stop", f"--time={timeout_s}", identity, wait_s=timeout_s + _TIMEOUT_S)

    def remove(self, identity: str) -> None:
        facts = self.container(identity)
        if facts is not None and facts.status == "created":
            # After `podman system reset` with another storage, or when its folder in /run was
            # cleared, Podman takes what runs for what was before a boot. `podman rm` leaves such
            # an engine running, with its cards and its port; the OCI runtime below still knows it.
            # Of one that never ran there is nothing to delete.
            runtime = _text(self._run("info", "--format={{.Host.OCIRuntime.Path}}").stdout).strip()
            words = self._command([runtime, "delete", "--force", facts.id])
            proc.read(words, env=proc.environment(*_PASSED), timeout_s=_TIMEOUT_S)
        for pause_s in _BUSY_S:
            options = ("--force", "--ignore", "--time=0", "--volumes")
            done = self._run("rm", *options, identity, may_fail=True)
            if not done.returncode:
                return
            reason = f"Podman could not rm: {_reason(done.stderr)}"
            # its own cleanup may still hold a mount: containers/podman#10454, #11594
            if b"busy" not in done.stderr:
                raise PodmanUnavailable(reason)
            time.sleep(pause_s)
        raise PodmanUnavailable(reason, _STILL_BUSY)

    def close(self) -> None:
        return

    def _inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        done = self._run(kind, "inspect", name, may_fail=True)
        if done.returncode:
            if _is_unknown(done.stderr):
                return None
            raise PodmanUnavailable(
                f"Podman could not look at {name}: {_reason(done.stderr)}",
                "`podman info` shows whether it works for this user.",
            )
        try:
            return dict(json.loads(done.stdout)[0])
        except (ValueError, LookupError, TypeError) as error:
            message = f"Podman's answer about {name} cannot be read"
            raise PodmanUnavailable(message, _VERSIONS) from error


def _is_unknown(error: bytes) -> bool:
    """Whether there is no image or container of a name, in the words of its versions 4 and 5."""
    text = _text(error).lower()
    return "no such" in text or "not known" in text


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


def _reason(error: bytes) -> str:
    return " ".join(proc.last_line(_text(error)).split())[:400]

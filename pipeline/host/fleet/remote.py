"""A shell on a host as root: over SSH with one kept connection, or on this machine itself."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from pipeline import proc
from pipeline.host.fleet.promised import Connection
from pipeline.model import Frozen

CONNECT_S = 10
LIMIT_S = 120.0
_SSH_FAILED = 255


class Unreached(Exception):
    """The host does not answer, or does not let us become root; the message says why."""


class Said(Frozen):
    """How a command ended and what it said."""

    code: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", errors="replace")

    @property
    def words(self) -> str:
        """The last line it said, for a person."""
        both = (self.err.strip() or self.out.strip()).decode("utf-8", errors="replace")
        return both.splitlines()[-1] if both else "no words"


class Remote:
    """Commands on a host, as root. Nothing is asked of a person, and every command has a limit."""

    def __init__(self, connection: Connection, sockets: Path) -> None:
        self._to = connection
        self._sockets = sockets
        self._root: bool | None = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._to.kind != "local":
            proc.read([*self._ssh(), "-O", "exit", self._to.address], env=_environment())

    def run(self, command: str, limit_s: float = LIMIT_S) -> Said:
        """What a root shell says; a host that is not reached raises."""
        if self._root is None:
            self._root = self._is_root()
        script = f"timeout --kill-after=5 {limit_s:g} /bin/sh -c {shlex.quote(command)}"
        script = f"export LC_ALL=C; {script}"
        if self._root:
            return self._send(script, b"", limit_s)
        password = self._to.become_password
        sudo = "sudo -S -p ''" if password else "sudo -n"
        stdin = f"{password}\n".encode() if password else b""
        return self._send(f"{sudo} -- /bin/sh -c {shlex.quote(script)}", stdin, limit_s)

    def _is_root(self) -> bool:
        """Whether we are root at once; if not, sudo must let us be."""
        if self._to.kind not in ("ssh", "local", "smart"):
            raise Unreached(f"ansible_connection {self._to.kind} is not ssh or local")
        if self._to.password:
            raise Unreached("SSH with a password is not supported; use a key or an agent")
        if self._send("id -u", b"", LIMIT_S).out.strip() == b"0":
            return True
        if self._to.become_method != "sudo":
            raise Unreached(f"become by {self._to.become_method} is not supported, only sudo")
        self._root = False
        answer = self.run("id -u")
        if answer.out.strip() != b"0":
            raise Unreached(f"cannot become root: {answer.words}")
        return False

    def _send(self, script: str, stdin: bytes, limit_s: float) -> Said:
        args = ["/bin/sh", "-c", script]
        if self._to.kind != "local":
            args = [*self._ssh(), self._to.address, "--", script]
        try:
            done = proc.read(args, env=_environment(), stdin=stdin, timeout_s=limit_s + 30)
        except subprocess.TimeoutExpired:
            raise Unreached(f"no answer within {limit_s + 30:g} s") from None
        said = Said(code=done.returncode, out=done.stdout, err=done.stderr)
        if said.code == _SSH_FAILED and self._to.kind != "local":
            raise Unreached(said.words)
        return said

    def _ssh(self) -> Sequence[str]:
        to = self._to
        return [
            *(proc.find_tool("ssh", "Install an SSH client."), "-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=15"),
            *("-o", "ControlMaster=auto", "-o", "ControlPersist=60s"),
            *("-o", f"ControlPath={self._sockets}/%C"),
            *(("-p", str(to.port)) if to.port else ()),
            *(("-l", to.user) if to.user else ()),
            *(("-i", to.key) if to.key else ()),
            *shlex.split(to.arguments),
        ]


def _environment() -> dict[str, str]:
    path = os.environ.get("PATH", "")
    return proc.environment("SSH_AUTH_SOCK", "USER", PATH=f"{path}:/usr/sbin:/usr/bin:/sbin:/bin")

"""One SSH connection to a host: forwards its sockets and ports, and runs its programs.

Everything goes through one login (an OpenSSH ControlMaster), as its own user and not as root.
The connection ends with this program, however that ends: what runs on the host reads our pipe.
"""

from __future__ import annotations

import itertools
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.core import log, proc
from pipeline.core.errors import HostUnreached, PipelineError
from pipeline.hosts.fleet.promised import HostConnection
from pipeline.hosts.fleet.remote import CONNECT_S, CommandResult, ssh_environment, ssh_words

LIMIT_S = 60.0
_POLL_S = 0.05
# logins can take seconds if they look up a name first
_OPEN_S = CONNECT_S + 20.0
# until the process of a connection that broke has gone: its sockets close a moment before
_GRACE_S = 0.3
_HINT = "Check its power, network and SSH login: `ssh HOST true` must work without a question."


def plain_connection(host: str) -> HostConnection:
    """A host as one types it for ssh: `user@host`, or a name of ~/.ssh/config."""
    if not host or host.startswith("-") or any(c.isspace() for c in host):
        raise HostUnreached(f"{host!r} is not the name of a host", "Write it as for ssh.")
    return HostConnection(address=host)


class Tunnel:
    """An open connection; what it forwards is gone with it."""

    def __init__(self, to: HostConnection, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.host = to.address
        self._folder, self._process = folder, process
        self._numbers = itertools.count(1)
        self._ssh = [
            *(proc.find_tool("ssh", "Install an SSH client."), "-S", str(folder / "control"), "-T"),
            # the options of a user for this host are in effect already, in the connection itself
            *("-F", "/dev/null", "-o", "LogLevel=ERROR"),
            # without the connection ssh would make one of its own, which this class does not watch
            *("-o", "ProxyCommand=false"),
        ]

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs a program on the host."""
        return [*self._ssh, self.host, "--", shlex.join(words)]

    def read(
        self, words: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S
    ) -> CommandResult:
        """Run a program on the host to its end; the caller judges its exit code."""
        try:
            done = proc.read(self.command(words), stdin=stdin, timeout_s=limit_s)
        except subprocess.TimeoutExpired as error:
            raise HostUnreached(
                f"{self.host}: `{words[0]}` did not finish within {log.seconds(limit_s)}", _HINT
            ) from error
        # 255 is ssh's own: the program's codes end at 254 in practice
        if done.returncode == 255 and self.is_lost():
            raise HostUnreached(f"{self.host}: the connection was lost", _HINT)
        return CommandResult(code=done.returncode, out=done.stdout, err=done.stderr)

    def forward(self, place: str) -> Path:
        """Open a local socket that leads to a socket or `address:port` of the host."""
        socket = self._folder / f"{next(self._numbers)}.sock"
        order = ["-O", "forward", "-L", f"{socket}:{place}"]
        done = proc.read([*self._ssh, *order, self.host], timeout_s=LIMIT_S)
        if done.returncode or not socket.exists():
            reason = proc.last_line(done.stderr.decode(errors="replace"))
            raise HostUnreached(f"{self.host}: {place} cannot be forwarded: {reason}", _HINT)
        return socket

    def hang_up(self) -> None:
        """End the connection from another thread: whoever uses it gets an error."""
        proc.end(self._process)

    def is_lost(self) -> bool:
        """Whether the connection has ended by itself; ssh may need a moment to go."""
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            return False
        return True


@contextmanager
def open_tunnel(to: HostConnection) -> Iterator[Tunnel]:
    """Log in, and log out when the block ends; name a lost connection in its errors."""
    if to.kind not in ("ssh", "smart"):
        raise HostUnreached(
            f"{to.address}: ansible_connection {to.kind} is not supported, only ssh",
            "For this machine itself, leave --on out.",
        )
    # sockets have paths of at most 107 bytes, which TMPDIR may exceed
    with (
        tempfile.TemporaryDirectory(prefix="sm120-", dir="/tmp") as name,
        Path(name, "errors").open("w+b") as errors,
    ):
        folder = Path(name)
        control = folder / "control"
        program, *options = ssh_words(to)
        # first: the first value that ssh gets for an option is the one it keeps
        own = ["ControlMaster=yes", f"ControlPath={control}", "ControlPersist=no", "LogLevel=ERROR"]
        words = [program, "-T", *(x for option in own for x in ("-o", option)), *options]
        with ssh_environment(to) as env:
            process = proc.talk([*words, to.address, "--", "cat"], env=env, errors=errors)
            tunnel = Tunnel(to, folder, process)
            deadline = time.monotonic() + _OPEN_S
            try:
                # ssh makes the socket once the login has succeeded
                while not control.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        errors.seek(0)
                        text = errors.read(4096).decode(errors="replace")
                        reason = proc.last_line(text, "no login in time")
                        raise HostUnreached(f"{to.address}: {reason}", _HINT)
                    time.sleep(_POLL_S)
            except BaseException:
                proc.end(process)
                raise
        try:
            yield tunnel
        except HostUnreached:
            raise
        except PipelineError as error:
            if not tunnel.is_lost():
                raise
            raise HostUnreached(
                f"{to.address}: the connection was lost: {error}",
                f"A start that was under way is removed there within a minute. {_HINT}",
            ) from error
        finally:
            proc.end(process)

"""Commands on a host as root: one SSH connection and one sudo for all of them, or no SSH at all."""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.core import proc
from pipeline.core.model import Frozen
from pipeline.hosts.fleet import shell
from pipeline.hosts.fleet.promised import HostConnection

CONNECT_S = 10
# dpkg --verify reads all files of a toolkit, which are gigabytes
LIMIT_S = 120.0
# ssh, sudo and the start of Python on a busy host
_START_S = 60.0
_PROMPT = "sm120-sudo-password:"
# The program that ssh asks for the password. ssh also asks it whether to trust an unknown host and
# for passphrases of keys; the password must not be the reply to those.
_ASKPASS = """#!/bin/sh
case $1 in *yes/no*) echo no ;; *assphrase*) exit 1 ;; *) cat {} ;; esac
"""


class Unreached(Exception):
    """The host does not answer, or does not let us become root; the message says why."""


class CommandResult(Frozen):
    """Exit code and output of a command."""

    code: int
    out: bytes
    err: bytes

    @property
    def message(self) -> str:
        """The last line of its errors, or of its output, for a person."""
        return proc.last_line((self.err.strip() or self.out).decode("utf-8", errors="replace"))


class Remote:
    """A root shell on a host. It never prompts a person, and every command has a time limit."""

    def __init__(self, connection: HostConnection) -> None:
        self._to = connection
        self._process: subprocess.Popen[bytes] | None = None
        self._hung_up = False
        self._read = b""
        self._errors = b""

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            proc.end(self._process)

    def hang_up(self) -> None:
        """End the connection from another thread: commands that run or follow raise."""
        self._hung_up = True
        # another program may have the number of one that has ended
        if self._process is not None and self._process.poll() is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, command: str, limit_s: float = LIMIT_S) -> CommandResult:
        """Run one command; a host that cannot be reached raises."""
        if self._process is None:
            to = self._to
            if to.kind not in ("ssh", "local", "smart"):
                raise Unreached(
                    f"ansible_connection {to.kind} is not supported, only ssh and local"
                )
            if to.become_method != "sudo":
                raise Unreached(f"become_method {to.become_method} is not supported, only sudo")
            # our shell (shell.py), unbuffered: replies must not wait in a pipe
            code = f"python3 -u -c {shlex.quote(one_line(Path(shell.__file__)))}"
            # -S: the password comes over stdin, because there is no terminal
            sudo = f"sudo -S -p {shlex.quote(_PROMPT)} -- {code}"
            script = f'if [ "$(id -u)" = 0 ]; then exec {code}; else exec {sudo}; fi'
            is_local = to.kind == "local"
            words = ["/bin/sh", "-c"] if is_local else [*ssh_words(to), to.address, "--"]
            with ssh_environment(to) as env:
                self._process = proc.talk([*words, script], env=env)
                first = self._line(self._process, _START_S)
            if first != f"{shell.READY} 0".encode():
                raise Unreached(f"cannot become root: {first[:100]!r}")
        # only now, because hang_up cannot end a process that had not started yet
        if self._hung_up:
            raise Unreached("the connection was ended")
        request = json.dumps({"command": command, "limit_s": limit_s})
        try:
            proc.send_line(self._process, request.encode())
        except OSError as error:
            raise Unreached(f"the connection was lost: {error.strerror}") from error
        # longer than the shell's own limit, which ends the command and still replies
        reply = json.loads(self._line(self._process, limit_s + 30))
        out, err = (base64.b64decode(reply[k]) for k in ("out", "err"))
        return CommandResult(code=reply["code"], out=out, err=err)

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """The next line of output; replies to sudo's prompt on the way."""
        out, err = process.stdout, process.stderr
        assert out is not None
        assert err is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._read:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([out, err], [], [], left)
            if not ready:
                raise Unreached("no reply in time")
            pieces = {f: os.read(f.fileno(), 65536) for f in ready}
            self._read += pieces.get(out, b"")
            # the end is enough for sudo's prompt and for the reason; banners of sites can be long
            self._errors = (self._errors + pieces.get(err, b""))[-4096:]
            # sudo prompts on stderr: once for the password, again when it was wrong
            prompts = self._errors.count(_PROMPT.encode())
            if prompts and not self._to.become_password:
                raise Unreached("sudo needs a password; -K (--ask-become-pass) prompts for it")
            if prompts > 1:
                raise Unreached("sudo does not accept the password")
            if err in ready and self._errors.endswith(_PROMPT.encode()):
                proc.send_line(process, self._to.become_password.encode())
            if out in ready and not pieces[out]:
                errors = self._errors + os.read(err.fileno(), 4096)
                raise Unreached(proc.last_line(errors.decode("utf-8", errors="replace")))
        line, _, self._read = self._read.partition(b"\n")
        return line


def ssh_words(to: HostConnection) -> list[str]:
    """ssh with all of its options; the host and a command follow."""
    # without a password ssh must not prompt at all; with one it asks our program, once
    prompts = "NumberOfPasswordPrompts=1" if to.password else "BatchMode=yes"
    return [
        *(proc.find_tool("ssh", "Install an SSH client."), "-o", prompts),
        # ssh gives up after three unanswered messages: a host that vanishes is noticed in 45 s
        *("-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=15"),
        *(("-p", str(to.port)) if to.port else ()),
        *(("-l", to.user) if to.user else ()),
        *(("-i", to.key) if to.key else ()),
        *shlex.split(to.arguments),
    ]


@contextmanager
def ssh_environment(to: HostConnection) -> Iterator[dict[str, str]]:
    """The environment of ssh; its password comes from a program that exists only in this block."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
    env = proc.child_environment("SSH_AUTH_SOCK", "USER", PATH=path)
    if not to.password or to.kind == "local":
        yield env
        return
    with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
        secret, program = Path(folder, "password"), Path(folder, "ask")
        secret.touch(mode=0o600)
        secret.write_text(to.password + "\n", encoding="utf-8")
        program.write_text(_ASKPASS.format(shlex.quote(str(secret))), encoding="utf-8")
        program.chmod(0o700)
        yield env | {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force"}


def one_line(source: Path) -> str:
    """A Python file as an argument of `python3 -c`, for a host without this package."""
    packed = base64.b64encode(zlib.compress(source.read_bytes(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"

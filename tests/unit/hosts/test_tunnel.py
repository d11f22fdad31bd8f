"""One SSH connection: what goes through it, and what is said when it ends. ssh is a stand-in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.core.errors import HostUnreached, PreflightFailed
from pipeline.hosts.fleet.promised import HostConnection
from pipeline.hosts.fleet.tunnel import open_tunnel, plain_connection
from tests.unit.hosts.fake_host import LOCAL, program

# The connection itself waits for its input to end; programs and forwards need its socket.
SSH = """
# the first value of an option is the one that counts
for word; do case $word in ControlPath=*) : "${control:=${word#ControlPath=}}" ;; esac; done
if [ "$control" ]; then
    echo "$@" >ARGUMENTS; echo $$ >PID; : >"$control"; exec cat
fi
[ -e "$2" ] || { echo 'no connection' >&2; exit 255; }
for word; do
    case $last in -L) : >"${word%%:*}"; echo "${word#*:}" >FORWARDED; exit 0 ;; esac
    last=$word
done
while [ "$1" != -- ]; do shift; done
exec /bin/sh -c "$2"
"""


@pytest.fixture
def ssh(programs: Path, tmp_path: Path) -> Path:
    body = SSH
    for name in ("ARGUMENTS", "PID", "FORWARDED"):
        body = body.replace(name, str(tmp_path / name.lower()))
    program(programs, "ssh", body)
    return tmp_path


def to(**changes: object) -> HostConnection:
    return LOCAL.model_copy(update={"kind": "ssh", "address": "gpu1", **changes})


def test_programs_run_there_word_for_word_and_their_codes_come_back(ssh: Path) -> None:
    with open_tunnel(to()) as tunnel:
        done = tunnel.read(["printf", "%s|", "a b", "$HOME", "it's"])
        assert (done.code, done.out) == (0, b"a b|$HOME|it's|")
        assert tunnel.read(["sh", "-c", "exit 7"]).code == 7
        assert tunnel.read(["cat"], stdin=b"\xff\x00").out == b"\xff\x00"


def test_a_socket_or_port_there_becomes_a_socket_here_that_is_gone_afterwards(ssh: Path) -> None:
    with open_tunnel(to()) as tunnel:
        first = tunnel.forward("/var/run/docker.sock")
        assert (ssh / "forwarded").read_text() == "/var/run/docker.sock\n"
        second = tunnel.forward("127.0.0.1:8000")
        assert (ssh / "forwarded").read_text() == "127.0.0.1:8000\n"
        assert first != second
        assert len(str(first)) < 107
    assert not first.parent.exists()


def test_our_own_options_come_before_a_user_s_and_the_host_s_are_kept(ssh: Path) -> None:
    own = to(user="ops", port=2222, key="/k", arguments="-o ControlPath=/theirs")
    with open_tunnel(own):
        words = (ssh / "arguments").read_text().split()
    assert words.index("ControlPersist=no") < words.index("ControlPath=/theirs")
    for pair in (("-l", "ops"), ("-p", "2222"), ("-i", "/k")):
        assert words[words.index(pair[0]) + 1] == pair[1]


def test_the_connection_ends_with_the_block(ssh: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_tunnel(to()):
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(int((ssh / "pid").read_text()), 0)


def test_a_login_that_fails_is_named_with_ssh_s_own_words(programs: Path) -> None:
    program(programs, "ssh", "echo 'ops@gpu1: Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(HostUnreached, match=r"gpu1: .*Permission denied"), open_tunnel(to()):
        pass


def test_an_error_after_the_connection_was_lost_says_so(ssh: Path) -> None:
    def fails() -> None:
        with open_tunnel(to()):
            os.kill(int((ssh / "pid").read_text()), signal.SIGKILL)
            raise PreflightFailed("the port")

    with pytest.raises(HostUnreached, match="connection was lost: the port") as error:
        fails()
    assert "removed there" in error.value.hint


def test_an_error_of_its_own_stays_what_it_is(ssh: Path) -> None:
    with pytest.raises(PreflightFailed, match="the port"), open_tunnel(to()):
        raise PreflightFailed("the port")


def test_without_its_connection_nothing_runs_and_nothing_is_forwarded(ssh: Path) -> None:
    with open_tunnel(to()) as tunnel:
        os.kill(int((ssh / "pid").read_text()), signal.SIGKILL)
        tunnel.is_lost()
        for path in Path(tunnel.forward("127.0.0.1:1").parent).glob("control"):
            path.unlink()
        with pytest.raises(HostUnreached, match="the connection was lost"):
            tunnel.read(["true"])
        with pytest.raises(HostUnreached, match="cannot be forwarded: no connection"):
            tunnel.forward("127.0.0.1:2")


def test_a_program_that_hangs_there_is_ended(ssh: Path) -> None:
    with pytest.raises(HostUnreached, match="`sleep` did not finish"), open_tunnel(to()) as tunnel:
        tunnel.read(["sleep", "60"], limit_s=0.2)


@pytest.mark.parametrize("kind", ["local", "docker", "winrm"])
def test_other_ways_to_a_host_are_refused(kind: str) -> None:
    with pytest.raises(HostUnreached, match="only ssh"), open_tunnel(to(kind=kind)):
        pass


@pytest.mark.parametrize("name", ["", "-oProxyCommand=sh", "a b", "a\nb"])
def test_what_is_no_host_is_refused_before_ssh_sees_it(name: str) -> None:
    with pytest.raises(HostUnreached, match="not the name of a host"):
        plain_connection(name)


def test_a_host_is_written_as_for_ssh() -> None:
    assert plain_connection("ops@gpu1").address == "ops@gpu1"

"""One root shell for all commands: its results, and the reasons why there is none."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from pipeline.hosts.fleet.remote import Remote, Unreached
from tests.unit.hosts.fake_host import LOCAL, program


def as_somebody_else(folder: Path) -> None:
    """`id` reports that we are not root, so that sudo is used."""
    program(folder, "id", "echo 1000")


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root is root at once.")
def test_commands_answer_with_code_and_words_one_after_the_other() -> None:
    with Remote(LOCAL) as remote:
        first = remote.run("echo out; echo err >&2; exit 3")
        assert (first.code, first.out, first.err, first.message) == (3, b"out\n", b"err\n", "err")
        assert remote.run("printf '\\377\\n'").out == b"\xff\n"
        assert remote.run("cat").out == b""
        assert len(remote.run("head -c 300000 /dev/zero").out) == 300000


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root is root at once.")
def test_a_command_that_hangs_is_ended_with_its_children_and_the_next_one_answers() -> None:
    with Remote(LOCAL) as remote:
        begun = time.monotonic()
        done = remote.run("sleep 61 & sleep 62; echo never", 1)
        assert time.monotonic() - begun < 20
        assert done.code != 0
        assert "did not finish within 1 s" in done.message
        assert remote.run("echo again").out == b"again\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "winrm"}, "only ssh and local"),
        ({"become_method": "su"}, "only sudo"),
    ],
)
def test_ways_in_that_we_do_not_know_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(Unreached, match=message), Remote(LOCAL.model_copy(update=change)) as remote:
        remote.run("true")


def test_a_host_whose_ssh_fails_is_not_reached_with_the_words_of_ssh(programs: Path) -> None:
    program(programs, "ssh", "echo 'ssh: connect to host x: No route to host' >&2; exit 255")
    with pytest.raises(Unreached, match="No route to host"):
        Remote(LOCAL.model_copy(update={"kind": "ssh"})).run("true")


def test_a_password_is_given_once_and_only_where_sudo_asks(programs: Path, tmp_path: Path) -> None:
    as_somebody_else(programs)
    ask = 'while [ "$1" != -- ]; do [ "$1" != -p ] || prompt=$2; shift; done; shift\n'
    ask += f'printf %s "$prompt" >&2; read -r got; echo "$got" >> {tmp_path}/got\n'
    program(
        programs, "sudo", f'{ask}[ "$got" = right ] && exec "$@"\nprintf %s "$prompt" >&2; read x'
    )
    good = LOCAL.model_copy(update={"become_password": "right"})
    if os.geteuid() == 0:
        with Remote(good) as remote:
            assert remote.run("echo $PPID").code == 0
        assert (tmp_path / "got").read_text() == "right\n"
    wrong = LOCAL.model_copy(update={"become_password": "wrong"})
    with pytest.raises(Unreached, match="does not accept"), Remote(wrong) as remote:
        remote.run("true")
    with pytest.raises(Unreached, match="needs a password"), Remote(LOCAL) as remote:
        remote.run("true")


def test_a_process_that_is_not_root_is_not_believed(programs: Path) -> None:
    as_somebody_else(programs)
    program(programs, "sudo", "echo 'sm120 ready 1000'; cat >/dev/null")
    with pytest.raises(Unreached, match="cannot become root"), Remote(LOCAL) as remote:
        remote.run("true")


def test_a_connection_that_breaks_in_the_middle_is_said(programs: Path) -> None:
    program(programs, "ssh", "echo 'sm120 ready 0'; read line; echo 'closed by peer' >&2; exit 255")
    with pytest.raises(Unreached, match="closed by peer"):
        Remote(LOCAL.model_copy(update={"kind": "ssh"})).run("true")


OVER_SSH = LOCAL.model_copy(update={"kind": "ssh", "address": "n1"})


def ssh_words(programs: Path, **given: object) -> list[str]:
    """The arguments of ssh, up to the host's own."""
    program(programs, "ssh", f'printf "%s\\n" "$@" >{programs}/words; exit 255')
    with pytest.raises(Unreached):
        Remote(OVER_SSH.model_copy(update=given)).run("true")
    words = (programs / "words").read_text().splitlines()
    return words[: words.index("--")]


def test_the_inventorys_key_user_port_and_arguments_are_in_the_ssh_command(programs: Path) -> None:
    arguments = "-o 'ProxyJump=a b'"
    words = ssh_words(programs, key="/keys/a b", user="ops", port=2222, arguments=arguments)
    assert words[words.index("-i") + 1] == "/keys/a b"
    assert words[words.index("-l") + 1] == "ops"
    assert words[words.index("-p") + 1] == "2222"
    assert words[-3:] == ["-o", "ProxyJump=a b", "n1"]


def test_what_the_inventory_leaves_open_ssh_decides_itself(programs: Path) -> None:
    assert {"-i", "-l", "-p"} & set(ssh_words(programs)) == set()


# prompts as ssh does, and runs its command where the password is right
ASKING = """
got=$("$SSH_ASKPASS" "ops@n1's password: ") || exit 255
host=$("$SSH_ASKPASS" "Are you sure you want to continue connecting (yes/no/[fingerprint])? ")
"$SSH_ASKPASS" "Enter passphrase for key '/k': " && exit 9
[ "$host" = no ] || exit 8
[ "$got" = right ] || { echo 'Permission denied (publickey,password).' >&2; exit 255; }
ls "${SSH_ASKPASS%/*}" >SEEN
while [ "$1" != -- ]; do shift; done
exec /bin/sh -c "$2"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root is root at once.")
def test_ssh_gets_its_password_from_us_and_nothing_of_it_is_left(
    programs: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    program(programs, "ssh", ASKING.replace("SEEN", str(seen)))
    with Remote(OVER_SSH.model_copy(update={"password": "right"})) as remote:
        assert remote.run("env | grep -c -e right -e ASKPASS").out == b"0\n"
    assert seen.read_text().split() == ["ask", "password"]
    assert list(Path(tempfile.gettempdir()).glob("sm120-*/password")) == []
    with pytest.raises(Unreached, match="Permission denied"):
        Remote(OVER_SSH.model_copy(update={"password": "wrong"})).run("true")


def test_without_a_password_ssh_asks_nobody(programs: Path) -> None:
    assert ssh_words(programs)[:2] == ["-o", "BatchMode=yes"]
    assert "BatchMode=yes" not in ssh_words(programs, password="x")
    assert "NumberOfPasswordPrompts=1" in ssh_words(programs, password="x")

"""What the role nvidia_repository makes of a key and of apt's words, without a host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.playbook import ROOT, ansible_environment, ansible_program
from tests.testbed.signer import new_signer

ROLE = ROOT / "ansible" / "roles" / "nvidia_repository"
BINARY, ARMORED = (f"/etc/apt/keyrings/sm120-nvidia.{end}" for end in ("gpg", "asc"))


def evaluated(tmp_path: Path, expression: str, **values: Any) -> str:
    """What an expression over the role's variables gives."""
    play = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars_files": [str(ROLE / "vars" / "main.yml")],
            "tasks": [
                {
                    "ansible.builtin.copy": {
                        "content": f"{{{{ {expression} }}}}",
                        "dest": str(tmp_path / "answer"),
                        "mode": "0600",
                    }
                }
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    forced = {"ansible_python_interpreter": sys.executable, **values}
    command = [ansible_program("ansible-playbook"), "--inventory", "localhost,"]
    command += ["--extra-vars", json.dumps(forced), str(tmp_path / "play.yml")]
    env = {**ansible_environment(), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return (tmp_path / "answer").read_text()


def test_apt_gets_an_armored_key_and_a_binary_one_under_the_name_it_reads_them_by(
    tmp_path: Path,
) -> None:
    with new_signer("vendor@example.invalid") as signer:
        (tmp_path / "armored").write_bytes(signer.armored())
        (tmp_path / "binary").write_bytes(signer.keyring.read_bytes())
    places = [
        evaluated(tmp_path, "nvidia_repository_key_place", nvidia_repository_key=str(path))
        for path in (tmp_path / "armored", tmp_path / "binary", tmp_path / "missing")
    ]
    assert places == [ARMORED, BINARY, BINARY]


SQV = (
    "W: OpenPGP signature verification failed: http://m ./ InRelease: Sub-process /usr/bin/sqv "
    "returned an error code (1), error message is: Signing key on EB69 is not bound: No binding "
    "signature at time 2026-01-29T20:38:48Z   because: Policy rejected non-revocation signature "
    "(PositiveCertification) requiring second pre-image resistance   because: SHA1 is not "
    "considered secure since 2026-02-01T00:00:00Z\n"
    "E: The repository 'http://m ./ InRelease' is not signed.\n"
)
FORGED = "W: GPG error: http://m ./ InRelease: BADSIG 1234\nE: The repository is not signed.\n"
HELD = (
    "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 2517 (apt-get)\n"
    "E: Unable to lock directory /var/lib/apt/lists/\n"
)
LOST = "E: Failed to fetch http://m/./InRelease  Could not connect to m:80\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SQV, "is bound by SHA-1 only"),
        (FORGED, "was REFUSED"),
        (HELD, "Another program has been reading apt's indexes"),
        (LOST, "cannot be read from this host"),
    ],
    ids=["an old key", "a forged index", "a busy apt", "no way there"],
)
def test_each_reason_for_which_apt_refuses_is_told_as_what_it_is(
    tmp_path: Path, words: str, said: str
) -> None:
    answer = evaluated(
        tmp_path,
        "nvidia_repository_why",
        nvidia_repository_url="http://m",
        nvidia_repository_key="/k/3bf863cc.pub",
        pinned_packages_updated={"rc": 100, "stderr": words},
    )
    assert said in answer
    others = {"SHA-1 only", "was REFUSED", "Another program", "cannot be read"}
    assert sum(other in answer for other in others) == 1

"""What only ansible itself can read of an inventory reaches our checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipeline.cli.hosts import fleet_of
from pipeline.core.errors import FleetUnready
from pipeline.hosts.fleet.playbook import ansible_program, promises_of
from pipeline.images.spec.checkout import Checkout
from tests.testbed.playbook import NO_OPTIONS, ROOT


def test_what_ansible_knows_by_vault_and_environment_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "vault"
    key.write_text("open sesame\n")
    made = subprocess.run(
        [
            *(
                ansible_program("ansible-vault"),
                "encrypt_string",
                "--vault-password-file",
                str(key),
            ),
            *("--name", "ansible_become_password", "of sudo"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [
        *(f"ansible_python_interpreter: {sys.executable}", "ansible_connection: local"),
        *("ansible_password: of ssh", "nvidia_repository_url: http://x", "sm120_parts: []"),
        "nvidia_repository_key: /x.gpg",
    ]
    text = "\n".join([*rows, made.stdout.rstrip()]).replace("\n", "\n    ")
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(f"all:\n  hosts: {{n1: {{}}}}\n  vars:\n    {text}\n")
    monkeypatch.setenv("ANSIBLE_REMOTE_USER", "ops")
    monkeypatch.setenv("ANSIBLE_PRIVATE_KEY_FILE", "/keys/ops")
    monkeypatch.setenv("ANSIBLE_HOST_KEY_CHECKING", "False")
    monkeypatch.setattr(click, "prompt", lambda text, **_: "open sesame")
    fleet = fleet_of({**NO_OPTIONS, "inventories": (str(inventory),), "ask_vault_pass": True})
    with (
        fleet.password_files() as passwords,
        promises_of(Checkout(ROOT), [*fleet.arguments(), *passwords]) as promised,
    ):
        (to,) = [p.connection for p in promised]
    with (
        pytest.raises(FleetUnready, match="vault") as caught,
        promises_of(Checkout(ROOT), fleet.arguments()),
    ):
        pass
    assert "--ask-vault-pass" in caught.value.hint
    assert (to.user, to.key, to.port) == ("ops", "/keys/ops", 0)
    assert (to.password, to.become_password) == ("of ssh", "of sudo")
    assert to.arguments.split() == ["-o", "StrictHostKeyChecking=no"]

"""The script that looks for work on the GPUs before a reboot or a restart of Docker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.testbed.playbook import ROOT, ansible_environment, ansible_program

ROLES = ROOT / "ansible" / "roles"
# containers as `docker inspect` shows them in the script's form
CONTAINERS = {
    "a": '[{"Driver":"","Count":-1,"Capabilities":[["gpu"]]}] [] runc|/sglang',
    "b": '[{"Driver":"cdi","DeviceIDs":["nvidia.com/gpu=all"]}] [] runc|/by-cdi',
    "c": '[] [{"PathRemoteHost":"/dev/nvidia0"}] runc|/by-device',
    "d": "null null nvidia|/by-runtime",
    "e": "null null runc|/nvidia-exporter",
}


def busy(tmp_path: Path, *containers: str) -> list[str]:
    """What the script says of a machine whose cards are files in a folder."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    rows = "\\n".join(CONTAINERS[c] for c in containers)
    answer = f'echo "{" ".join(containers)}"', f"printf '{rows}\\n'"
    (tools / "docker").write_text(
        f"#!/bin/sh\ncase $1 in ps) {answer[0]} ;; *) {answer[1]} ;; esac\n"
    )
    (tools / "docker").chmod(0o755)
    script = (ROLES / "reboot" / "files" / "busy.sh").read_text()
    assert "'/dev/nvidia" in script
    done = subprocess.run(
        ["/bin/sh", "-c", script.replace("'/dev/nvidia", f"'{tmp_path}/dev/nvidia")],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@contextmanager
def holder(tmp_path: Path, device: str, name: str = "python3") -> Iterator[int]:
    """A process of that name that has a card open."""
    card = tmp_path / "dev" / device
    card.parent.mkdir(exist_ok=True)
    card.touch()
    program = tmp_path / name
    program.unlink(missing_ok=True)
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with card.open() as opened, subprocess.Popen([str(program), "60"], stdin=opened) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_machine_at_rest_is_not_busy(tmp_path: Path) -> None:
    assert busy(tmp_path) == []


@pytest.mark.parametrize("device", ["nvidia0", "nvidia15", "nvidia-uvm"])
def test_a_process_that_has_a_card_open_is_named(tmp_path: Path, device: str) -> None:
    with holder(tmp_path, device) as pid:
        assert f"process {pid} (python3)" in busy(tmp_path)
    assert busy(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["nvidia-persistenced", "nvidia-smi", "nv-hostengine", "nvidia-device-plugin"]
)
def test_what_only_watches_the_cards_is_no_work(tmp_path: Path, name: str) -> None:
    with holder(tmp_path, "nvidia0", name) as pid:
        assert [x for x in busy(tmp_path) if f" {pid} " in x] == []


def test_containers_that_were_given_cards_are_named_and_no_others(tmp_path: Path) -> None:
    result = busy(tmp_path, *CONTAINERS)
    names = ("sglang", "by-cdi by CDI", "by-device", "by-runtime")
    assert result == [f"container {name}" for name in names]


def test_work_is_looked_for_before_a_reboot_and_before_dockers_settings_are_written() -> None:
    for path, before in (
        ("reboot/tasks/main.yml", "Reboot"),
        ("container_runtime/tasks/docker.yml", "Write Docker's settings"),
        ("container_runtime/tasks/absent.yml", "Purge the toolkit"),
    ):
        tasks = yaml.safe_load((ROLES / path).read_text())
        at = [t["name"] for t in tasks].index(before)
        assert "busy" in str(tasks[at - 1]), path


PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  environment: {{PATH: "{path}"}}
  tasks:
    - ansible.builtin.include_role: {{name: reboot, tasks_from: busy}}
      vars: {{reboot_busy_for: Restarting Docker, reboot_busy_what: "{what}"}}
"""


@pytest.mark.parametrize(
    ("containers", "what", "more", "refused"),
    [
        (["a"], "in Docker$|^container", [], True),
        (["d"], ".", [], True),
        (["a"], ".", ["-e", "reboot_even_if_busy=true"], False),
        (["e"], ".", [], False),
    ],
)
def test_the_play_stops_at_work_on_the_gpus_unless_it_is_told_to_go_on(
    tmp_path: Path, containers: list[str], what: str, more: list[str], refused: bool
) -> None:
    busy(tmp_path, *containers)
    play = tmp_path / "play.yml"
    play.write_text(PLAY.format(path=f"{tmp_path}/bin:/usr/bin:/bin", what=what))
    python = ["-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(
        [ansible_program("ansible-playbook"), "-i", "localhost,", str(play), *python, *more],
        env={**ansible_environment(), "ANSIBLE_ROLES_PATH": str(ROLES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) is refused, done.stdout
    message = " ".join(done.stdout.split())
    named = CONTAINERS[containers[0]].rpartition("/")[2]
    output = f"Restarting Docker would end work on this host's GPUs: container {named}"
    assert (output in message) is refused
    assert ("--even-if-busy" in message) is refused

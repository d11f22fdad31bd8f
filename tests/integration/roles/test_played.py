"""What a run of a playbook says about each host, by a real ansible-playbook without a host."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pipeline.core import log
from pipeline.hosts.fleet.playbook import Played, stream_playbook
from pipeline.images.spec.checkout import Checkout

PLAY = """
- hosts: all
  connection: local
  gather_facts: false
  serial: 1
  tasks:
    - ansible.builtin.debug: {msg: reached}
    - ansible.builtin.fail: {msg: broken}
      when: inventory_hostname == broken
"""


@pytest.mark.parametrize(
    ("broken", "played"),
    [
        ("n1", Played(2, ["n1"], [], ["n2", "n3"])),
        ("n2", Played(2, ["n2"], ["n1"], ["n3"])),
        ("n9", Played(0, [], [], [])),
    ],
)
def test_a_run_names_the_failed_the_finished_and_the_untouched_hosts(
    tmp_path: Path, broken: str, played: Played
) -> None:
    (tmp_path / "ansible").mkdir()
    (tmp_path / "ansible" / "play.yml").write_text(PLAY)
    (tmp_path / "hosts").write_text("n1\nn2\nn3\n")
    arguments = ["-i", str(tmp_path / "hosts"), "-e", f"broken={broken}"]
    assert stream_playbook(Checkout(tmp_path), "play.yml", arguments) == played


def test_a_playbook_that_does_not_load_touches_no_host(tmp_path: Path) -> None:
    (tmp_path / "ansible").mkdir()
    (tmp_path / "ansible" / "play.yml").write_text("- hosts: [")
    (tmp_path / "hosts").write_text("n1\n")
    ended = stream_playbook(Checkout(tmp_path), "play.yml", ["-i", str(tmp_path / "hosts")])
    assert (ended.failed, ended.done) == ([], [])
    assert ended.summary == f"ansible-playbook ended with code {ended.code} before any host"


def test_a_task_that_takes_long_is_named_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "SAME_LINE_EVERY_S", 2.0)
    play = """
- hosts: all
  connection: local
  gather_facts: false
  tasks:
    - name: Install the driver
      ansible.builtin.command: sleep 6
"""
    (tmp_path / "ansible").mkdir()
    (tmp_path / "ansible" / "play.yml").write_text(play)
    (tmp_path / "hosts").write_text(f"n1 ansible_python_interpreter={sys.executable}\n")
    played = stream_playbook(Checkout(tmp_path), "play.yml", ["-i", str(tmp_path / "hosts")])
    assert played.code == 0
    assert re.search(
        r"^  Install the driver: still working after [\d.]+ s$", capfd.readouterr().err, re.M
    )

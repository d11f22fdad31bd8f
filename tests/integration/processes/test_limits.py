"""A limit is a limit, also for a program that cannot be killed: it is left behind and named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core import proc
from pipeline.core.known import Unknown
from pipeline.hosts.facts import capture
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.source import Capture
from pipeline.hosts.fleet import shell
from pipeline.hosts.fleet.remote import Remote
from tests.testbed.playbook import ROOT
from tests.testbed.unkillable import HELD_S
from tests.unit.hosts.fake_host import LOCAL

LIMITS_SH = ROOT / "ansible" / "roles" / "host_tuning" / "files" / "limits.sh"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (capture, shell, proc):
        monkeypatch.setattr(module, "_GRACE_S", 0.5)
    monkeypatch.setattr(capture, "_TIME_LIMIT_S", 1.0)


def seconds(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def test_facts_of_a_host_whose_driver_hangs_come_in_time_and_say_why(unkillable: str) -> None:
    taken: list[Capture] = []
    took = seconds(lambda: taken.append(Capture.model_validate(capture.take())))
    assert took < HELD_S / 2
    facts = gather_facts(taken[0])
    assert isinstance(facts.gpus, Unknown)
    assert facts.gpus.unknown == (
        "nvidia-smi did not answer within 1 s; it cannot be killed and was left behind"
    )
    # one process that cannot be killed is enough
    assert isinstance(facts.topology.links, Unknown)
    assert "left behind" in facts.topology.links.unknown
    # what others say is there all the same
    assert not isinstance(facts.kernel.release, Unknown)


def test_a_program_that_can_be_killed_is_not_called_left_behind(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = programs / "nvidia-smi"
    slow.write_text("#!/bin/sh\nsleep 30\n")
    slow.chmod(0o755)
    output = capture._output("nvidia-smi", ["nvidia-smi"], True)
    assert output == {"unknown": "nvidia-smi did not answer within 1 s"}


def test_a_program_that_is_read_with_a_limit_raises_at_it(unkillable: str) -> None:
    def ask() -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            proc.read([unkillable], timeout_s=1.0)

    assert seconds(ask) < HELD_S / 2


def test_a_program_beside_us_that_cannot_be_killed_does_not_hold_us(
    unkillable: str, tmp_path: Path
) -> None:
    def beside() -> None:
        with proc.running(
            [unkillable], env=proc.child_environment(), output=tmp_path / "out", cwd=tmp_path
        ):
            deadline = time.monotonic() + 10
            while "stuck" not in (tmp_path / "out").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)

    assert seconds(beside) < HELD_S / 2


def test_a_command_on_a_host_that_cannot_be_killed_is_answered_with_the_reason(
    unkillable: str,
) -> None:
    answers: list[dict[str, object]] = []
    request = {"command": f"echo first; exec {unkillable}", "limit_s": 1}
    took = seconds(lambda: answers.append(shell.run_on_host(request)))
    assert took < HELD_S / 2
    assert answers[0]["code"] == 124


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root is root at once.")
def test_the_next_command_on_that_host_answers(unkillable: str) -> None:
    with Remote(LOCAL) as remote:
        done = remote.run(f"exec {unkillable}", 1)
        assert "did not finish within 1 s; it cannot be killed and was left behind" in done.message
        assert remote.run("echo again").out == b"again\n"


def test_the_play_does_not_wait_for_it_either(unkillable: str, programs: Path) -> None:
    env = {"PATH": os.environ["PATH"], "LIMIT_S": "1"}
    done: list[subprocess.CompletedProcess[str]] = []
    took = seconds(
        lambda: done.append(
            subprocess.run(
                ["/bin/sh", str(LIMITS_SH)], env=env, capture_output=True, text=True, check=False
            )
        )
    )
    assert took < HELD_S / 2
    assert (done[0].returncode, done[0].stdout) == (124, "")
    assert "nvidia-smi did not answer within 1 s" in done[0].stderr


@pytest.mark.parametrize(
    ("body", "code", "out"), [("echo 600.00", 0, "600.00\n"), ("exit 9", 9, "")]
)
def test_the_play_hears_a_program_that_answers(
    programs: Path, body: str, code: int, out: str
) -> None:
    path = programs / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "LIMIT_S": "20"}
    done = subprocess.run(
        ["/bin/sh", str(LIMITS_SH)], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, out)


def test_every_nvidia_smi_of_the_roles_has_a_limit() -> None:
    """A oneshot service of systemd has none of its own."""
    for path in sorted((ROOT / "ansible").rglob("*")):
        if path.suffix not in (".yml", ".j2", ".service") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        starts = [x for x in text.splitlines() if "ExecStart=/usr/bin/nvidia-smi" in x]
        assert text.count("TimeoutStartSec=") >= len(starts), path
        assert "command: nvidia-smi" not in text, path


def test_the_stand_in_is_one_that_the_usual_way_waits_for(unkillable: str) -> None:
    """Else the tests above would prove nothing."""

    def usual() -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-c", f"import os; os.execv({unkillable!r}, ['x'])"],
                timeout=1,
                capture_output=True,
                check=False,
            )

    assert seconds(usual) > HELD_S / 2

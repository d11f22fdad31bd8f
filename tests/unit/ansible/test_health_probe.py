"""The program that takes a host out of service, over a journal and a queue that are stand-ins.

`tests/integration/test_operations.py` runs it with systemd's own journal.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.hosts.rules.judge import GRAVE_XIDS
from tests.testbed.playbook import ROOT

PROGRAM = ROOT / "ansible" / "roles" / "health" / "files" / "sm120_health.py"
# not imported: that would leave compiled files in the role
LOADED = runpy.run_path(str(PROGRAM))
LOST = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', GPU has fallen off the bus."
ASKED = (
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to"
    " 0x1 (GPU Reset Required)"
)
OVER = (
    "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required)"
    " to 0x0 (None)"
)
BOOT = "0123456789abcdef0123456789abcdef"
# prints what follows a cursor; `lost` is a cursor that it cannot seek to
JOURNALCTL = """#!{python}
import json, os, sys
home = os.environ["HOME"]
assert "_TRANSPORT=kernel" in sys.argv and "-k" not in sys.argv, sys.argv
after = [x.partition("=")[2] for x in sys.argv if x.startswith("--after-cursor=")]
assert after or "--boot" in sys.argv, sys.argv
with open(home + "/calls", "a") as calls: calls.write(" ".join(sys.argv[1:]) + "\\n")
if after == ["lost"]: sys.exit(1)
lines = open(home + "/journal", "rb").read().splitlines(keepends=True)
start = 0
for number, line in enumerate(lines):
    if after and ('"' + after[0] + '"').encode() in line: start = number + 1
sys.stdout.buffer.write(b"".join(lines[start:]))
"""
SCONTROL = """#!/bin/sh
if [ -e "$HOME/down" ]; then
    echo 'slurm_update error: Unable to contact slurm controller' >&2
    exit 1
fi
echo "$@" >>"$HOME/queue"
"""


class Watched:
    """A host below a folder, with a journal that grows."""

    def __init__(self, home: Path, *, has_slurm: bool = True) -> None:
        self.home, self.count = home, 0
        self.mark = home / "root/run/sm120/out-of-service"
        self.state = home / "root/var/lib/sm120/health/state.json"
        (home / "journal").touch()
        (home / "queue").touch()
        texts = {"journalctl": JOURNALCTL.replace("{python}", sys.executable)}
        texts |= {"scontrol": SCONTROL, "slurmd": "#!/bin/sh\n"} if has_slurm else {}
        (home / "bin").mkdir()
        for name, text in texts.items():
            (home / "bin" / name).write_text(text)
            (home / "bin" / name).chmod(0o755)

    def log(self, *texts: object, boot: str = BOOT) -> None:
        """Lines of the kernel."""
        with (self.home / "journal").open("a") as journal:
            for text in texts:
                self.count += 1
                entry = {"__CURSOR": f"c{self.count}", "_BOOT_ID": boot, "MESSAGE": text}
                journal.write(json.dumps(entry) + "\n")

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "--root", str(self.home / "root"), *words],
            env={"PATH": f"{self.home}/bin", "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def kept(self) -> Any:
        return json.loads(self.state.read_text())

    def asked(self) -> list[str]:
        return (self.home / "queue").read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.mark.parametrize("code", sorted(LOADED["FATAL"]))
def test_an_xid_after_which_the_catalogue_asks_for_a_reset_is_fatal(code: int) -> None:
    why = LOADED["reason_of"](f"NVRM: Xid (PCI:0000:C1:00): {code}, pid=77, name=vllm")
    assert why.startswith(f"Xid {code} at 0000:c1:00: ")


def test_every_fatal_xid_fails_the_rule_of_host_check_too() -> None:
    assert set(LOADED["FATAL"]) | {154} <= GRAVE_XIDS


HARMLESS = {
    "a program's fault": "NVRM: Xid (PCI:0000:c1:00): 13, Graphics SM Warp Exception",
    "a page fault": "NVRM: Xid (PCI:0000:c1:00): 31, pid=77, name=vllm, Ch 00000010",
    "a program that ended": "NVRM: Xid (PCI:0000:c1:00): 43, pid=77, name=vllm",
    "cleaned up after it": "NVRM: Xid (PCI:0000:c1:00): 45, pid=77, name=vllm",
    "a row replaced": "NVRM: Xid (PCI:0000:c1:00): 63, Row Remapper: New row marked for remapping",
    "single bits": "NVRM: Xid (PCI:0000:c1:00): 92, High single-bit ECC error rate",
    "a contained error": "NVRM: Xid (PCI:0000:c1:00): 94, Contained: CE User Channel (0x9)",
    "no action any more": OVER,
    "no action named": "NVRM: Xid (PCI:0000:c1:00): 154, something else",
    "a number that only begins so": "NVRM: Xid (PCI:0000:c1:00): 791, unknown",
    "another card's line that quotes it": f"amdgpu 0000:03:00.0: amdgpu: {LOST}",
    "a switch": "nvidia-nvswitch0: SXid (PCI:0000:c1:00): 12028, Non-fatal, Link 32 egress",
    "a bridge": "pcieport 0000:c0:01.1: AER: Uncorrectable (Fatal) error received: 0000:c1:00.0",
    "a disk": "nvme nvme0: I/O 79 QID 4 timeout, aborting",
    "another driver's line": "NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0xffff:2477)",
    "an address that is none": "NVRM: Xid (PCI:$(reboot)): 79, GPU has fallen off the bus.",
    "no number": "NVRM: Xid (PCI:0000:c1:00): abc, pid=2280636",
    "a number beyond all": f"NVRM: Xid (PCI:0000:c1:00): {'79' * 5000}",
    "a long line": "x" * 3_000_000 + LOST,
    "a program's name with a line break": f"NVRM: Xid (PCI:0000:c1:00): 31, name=a\n{LOST}",
    "nothing": "",
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_every_other_line_leaves_the_host_in_service(text: str) -> None:
    assert LOADED["reason_of"](text) == ""


def test_harmless_lines_move_the_cursor_and_nothing_else(host: Watched) -> None:
    host.log(*HARMLESS.values())
    host.run("check")
    # all but the long line, which is passed over unread
    assert host.kept() == {"cursor": f"c{len(HARMLESS)}", "out": None}
    assert not host.mark.exists()
    assert host.asked() == []
    assert host.run("status") == "in service\n"


def test_a_fatal_line_marks_the_host_and_drains_its_node_once(host: Watched) -> None:
    host.log("a line", LOST)
    assert "out of service: Xid 79 at 0000:c1:00" in host.run("check")
    name = host.asked()[0].split()[1]
    drained = f"update {name} State=DRAIN Reason=sm120-health: Xid 79 at 0000:c1:00"
    assert host.asked() == [drained]
    assert host.mark.read_text() == (
        "Xid 79 at 0000:c1:00: the GPU has fallen off the bus (RESTART_BM)\n"
    )
    # a failing card repeats itself, and a second one fails too: the first reason stays
    host.log(*[LOST] * 50, ASKED)
    assert host.run("check") == ""
    assert host.run("check") == ""
    assert host.asked() == [drained]
    assert host.kept()["cursor"] == "c53"
    assert "out of service since 2" in host.run("status", code=3)
    assert "Xid 79" in host.run("status", code=3)


def test_what_the_driver_asks_for_is_the_reason(host: Watched) -> None:
    host.log(ASKED)
    host.run("check")
    assert host.mark.read_text() == (
        "Xid 154 at 0008:01:00: the driver asks for: GPU Reset Required\n"
    )


def test_a_boot_makes_the_mark_anew_and_does_not_bring_the_host_back(host: Watched) -> None:
    host.log(LOST)
    host.run("check")
    host.mark.unlink()
    host.run("check")
    assert host.mark.exists()
    assert len(host.asked()) == 1


def test_a_host_without_slurm_is_marked_all_the_same(tmp_path: Path) -> None:
    host = Watched(tmp_path, has_slurm=False)
    host.log(LOST)
    host.run("check")
    assert host.mark.exists()
    host.log("more")
    host.run("check")
    assert host.asked() == []


def test_a_queue_that_does_not_answer_is_asked_again_until_it_does(host: Watched) -> None:
    (host.home / "down").touch()
    host.log(LOST)
    assert "Unable to contact slurm controller" in host.run("check")
    assert host.mark.exists()
    assert host.kept()["out"]["drained"] is False
    (host.home / "down").unlink()
    host.run("check")
    host.run("check")
    assert len(host.asked()) == 1


def test_a_person_brings_the_host_back_after_a_boot(host: Watched) -> None:
    host.log(LOST)
    host.run("check")
    assert host.run("return").endswith("back in service\n")
    assert not host.mark.exists()
    assert host.kept()["out"] is None
    assert host.asked()[1].endswith(" State=RESUME")
    assert host.run("check") == ""
    assert not host.mark.exists()
    assert host.run("return") == "in service; nothing to do\n"
    # a new error takes it out again
    host.log(LOST)
    host.run("check")
    assert host.mark.exists()
    assert len(host.asked()) == 3


def test_in_the_same_boot_the_card_must_have_been_reset(host: Watched) -> None:
    now = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    host.log(LOST, boot=now)
    host.run("check")
    output = host.run("return", code=1)
    assert "still out of service: Xid 79" in output
    assert "--card-was-reset" in output
    assert host.mark.exists()
    # lines about the card as it was, which no check has read yet
    host.log(LOST, LOST, boot=now)
    host.run("return", "--card-was-reset")
    host.run("check")
    assert not host.mark.exists()


def test_a_node_that_a_person_drained_stays_drained(host: Watched) -> None:
    (host.home / "down").touch()
    host.log(LOST)
    host.run("check")
    host.run("return")
    assert host.asked() == []


def test_a_cursor_that_the_journal_lost_means_this_boot_is_read(host: Watched) -> None:
    host.log("old")
    host.run("check")
    host.state.write_text('{"cursor": "lost", "out": null}')
    host.log(LOST)
    assert "reading this boot again" in host.run("check")
    assert host.mark.exists()
    assert "--boot" in (host.home / "calls").read_text().splitlines()[-1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cursor": 7, "out": "x"}', "\x00" * 100])
def test_a_damaged_state_is_as_none(host: Watched, text: str) -> None:
    host.log("old")
    host.run("check")
    host.state.write_text(text)
    assert host.run("check") == ""
    assert host.kept() == {"cursor": "c1", "out": None}
    host.log(LOST)
    host.run("check")
    assert host.mark.exists()


def test_garbage_in_the_journal_is_passed_over(host: Watched) -> None:
    second = json.dumps({"__CURSOR": "g4", "_BOOT_ID": "b", "MESSAGE": LOST}).encode()
    with (host.home / "journal").open("ab") as journal:
        for line in (
            b"not json",
            b"[]",
            b'{"__CURSOR": "g1"}',
            b'{"__CURSOR": "g2", "_BOOT_ID": "b", "MESSAGE": null}',
            b'{"__CURSOR": "g3", "_BOOT_ID": "b", "MESSAGE": [78, 86, 255]}',
            b"\xff\xfe\x00",
            b"[" * 60_000,
            # its second piece would be a line of its own
            b"x" * 64 * 1024 + second,
        ):
            journal.write(line + b"\n")
    host.run("check")
    assert not host.mark.exists()
    host.log(LOST)
    host.run("check")
    assert host.mark.exists()


def test_without_a_journal_it_fails_with_one_line(host: Watched) -> None:
    (host.home / "bin/journalctl").unlink()
    assert host.run("check", code=1).count("\n") == 1
    assert not host.mark.exists()

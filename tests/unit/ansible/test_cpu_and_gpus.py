"""The cards are counted on the bus, so that a driver which is not loaded yet does not matter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.testbed.packages import system_environment
from tests.testbed.playbook import ROOT

SCRIPT = ROOT / "ansible" / "roles" / "nccl" / "files" / "cpu_and_gpus.sh"
ZEN_5 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"


def look(root: Path) -> list[str]:
    done = subprocess.run(
        ["/bin/sh", str(SCRIPT), str(root)],
        env=system_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def machine(root: Path, cpu: str = ZEN_5) -> Path:
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text(cpu)
    (root / "sys" / "bus" / "pci" / "devices").mkdir(parents=True)
    return root


def add(root: Path, slot: int, vendor: str, kind: str) -> Path:
    place = root / "sys" / "bus" / "pci" / "devices" / f"0000:{slot:02x}:00.0"
    place.mkdir()
    (place / "vendor").write_text(f"{vendor}\n")
    (place / "class").write_text(f"{kind}\n")
    return place


def test_eight_cards_are_eight_before_any_driver_is_loaded(tmp_path: Path) -> None:
    root = machine(tmp_path)
    for slot in range(8):
        add(root, slot, "0x10de", "0x030200" if slot % 2 else "0x030000")
    assert look(root) == ["AuthenticAMD 26", "8"]


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [("0x10de", "0x040300"), ("0x10de", "0x068000"), ("0x1002", "0x030000"), ("0x1a03", "0x03")],
    ids=["its sound", "a switch of NVIDIA's", "a card of AMD's", "the BMC's"],
)
def test_what_is_no_card_of_nvidias_is_not_counted(tmp_path: Path, vendor: str, kind: str) -> None:
    root = machine(tmp_path)
    add(root, 1, "0x10de", "0x030200")
    add(root, 2, vendor, kind)
    assert look(root)[1] == "1"


def test_cards_of_guests_and_virtual_functions_are_not_counted(tmp_path: Path) -> None:
    root = machine(tmp_path)
    bound = add(root, 1, "0x10de", "0x030200")
    (bound / "driver").symlink_to("../../../drivers/nvidia")
    guest = add(root, 2, "0x10de", "0x030200")
    (guest / "driver").symlink_to("../../../drivers/vfio-pci")
    (add(root, 3, "0x10de", "0x030200") / "physfn").symlink_to(bound)
    assert look(root)[1] == "1"


def test_a_machine_without_a_bus_or_a_known_processor_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor : 0\nBogoMIPS : 50\n")
    assert look(tmp_path) == ["0"]

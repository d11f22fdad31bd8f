"""The program that switches ACS off, on a tree of bridges whose registers are a stand-in's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.testbed.playbook import ROOT

FILES = ROOT / "ansible" / "roles" / "pcie" / "files"
# a register is a file that holds its value; a second one holds the bits that cannot be changed
SETPCI = """#!/bin/sh
register=$HOME/acs/$2
[ -e "$register" ] || exit 1
case $3 in
*=*)
    wired=$(cat "$register.wired" 2>/dev/null || echo 0)
    printf '%04x\\n' $((0x${3##*=} | 0x$wired)) >"$register"
    ;;
*) cat "$register" ;;
esac
"""
BRIDGES = ("0000:00:01.0", "0000:02:00.0", "0000:03:00.0", "0000:05:00.0")


class Bus:
    """Two cards behind switches: 00:01.0 > 02:00.0 > 03:00.0 > card, and 05:00.0 > card."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        (home / "bin" / "setpci").write_text(SETPCI)
        (home / "bin" / "setpci").chmod(0o755)
        (home / "acs").mkdir()
        self.devices = home / "devices"
        self.devices.mkdir()
        self._card(BRIDGES[:3], "0000:04:00.0")
        self._card(BRIDGES[3:], "0000:06:00.0")
        text = (FILES / "sm120-acs").read_text()
        assert "/sys/bus/pci/devices" in text
        text = text.replace("/sys/bus/pci/devices", str(self.devices))
        self.program = home / "sm120-acs"
        self.program.write_text(text.replace("kept=/run/sm120/acs", f"kept={home}/kept"))

    def _card(self, above: tuple[str, ...], address: str) -> None:
        place = self.home / "sys"
        for bridge in above:
            place = place / bridge
            place.mkdir(parents=True)
            (place / "vendor").write_text("0x1000\n")
            (self.home / "acs" / bridge).write_text("001d\n")
        card = place / address
        card.mkdir()
        (card / "vendor").write_text("0x10de\n")
        (card / "class").write_text("0x030200\n")
        (self.devices / address).symlink_to(card)

    def wire(self, bridge: str, bits: str) -> None:
        """Bits that no write changes."""
        (self.home / "acs" / f"{bridge}.wired").write_text(f"{bits}\n")

    def run(self, word: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.home}/bin:/usr/bin:/bin", "HOME": str(self.home)}
        return subprocess.run(
            ["/bin/sh", str(self.program), word],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    def registers(self) -> list[str]:
        return [(self.home / "acs" / b).read_text().strip() for b in BRIDGES]


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    return Bus(tmp_path)


def test_acs_is_switched_off_on_every_bridge_above_a_card_and_given_back(bus: Bus) -> None:
    assert bus.run("off").returncode == 0
    assert bus.registers() == ["0000"] * 4
    # a second time what was first is still known
    assert bus.run("off").returncode == 0
    assert bus.run("restore").returncode == 0
    assert bus.registers() == ["001d"] * 4


@pytest.mark.parametrize("wired", BRIDGES)
def test_a_bridge_that_keeps_redirecting_is_named_and_all_others_are_switched_off(
    bus: Bus, wired: str
) -> None:
    bus.wire(wired, "0004")
    done = bus.run("off")
    assert done.returncode == 1
    assert bus.registers() == ["0004" if b == wired else "0000" for b in BRIDGES]
    assert f"ACS stays on at {wired}; switch it off in the firmware's setup" in done.stderr


def test_two_such_bridges_are_both_named(bus: Bus) -> None:
    bus.wire(BRIDGES[0], "0008")
    bus.wire(BRIDGES[3], "000c")
    assert f"ACS stays on at {BRIDGES[0]} {BRIDGES[3]};" in bus.run("off").stderr


def test_hard_wired_bits_that_redirect_nothing_are_said_and_harm_nothing(bus: Bus) -> None:
    bus.wire(BRIDGES[1], "0011")
    done = bus.run("off")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{BRIDGES[1]}: the bits that stay are hard-wired and redirect nothing" in done.stdout
    assert bus.registers() == ["0000", "0011", "0000", "0000"]


def test_a_bridge_without_acs_is_passed_over(bus: Bus) -> None:
    (bus.home / "acs" / BRIDGES[0]).unlink()
    assert bus.run("off").returncode == 0
    assert BRIDGES[0] not in bus.run("off").stdout


def test_acs_and_power_are_set_before_docker_starts_its_containers() -> None:
    unit = (FILES / "sm120-acs.service").read_text()
    assert "Before=docker.service" in unit.splitlines()
    power = (ROOT / "ansible" / "roles" / "host_tuning" / "vars" / "main.yml").read_text()
    assert "Before=docker.service" in power.partition("sm120-power-limit.service")[2]

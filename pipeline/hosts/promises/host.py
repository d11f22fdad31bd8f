"""Promises about every host that was provisioned, whatever its roles."""

from __future__ import annotations

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.promises.checks import Host, require, require_none


def test_its_facts_can_be_read(facts: HostFacts) -> None:
    """Everything below rests on them."""
    require(facts.software.os, "no system is named")


def test_no_change_waits_for_a_reboot(host: Host) -> None:
    """Roles write a reason to /run, which a reboot empties."""
    reasons = host.run("ls /run/sm120/reboot 2>/dev/null").stdout.split()
    require_none(reasons, "waits for a reboot", "Reboot the host, or run the playbook again.")


def test_no_package_is_left_half_installed(host: Host) -> None:
    """An interrupted run of apt."""
    broken = host.run("dpkg --audit").stdout.strip().splitlines()
    require(not broken, " ".join(broken[:2]), "dpkg --configure -a, or run the playbook again.")


def test_nobody_else_can_change_what_the_system_reads(host: Host) -> None:
    """Settings of apt, systemd, the boot loader, modules, knobs, logins; programs of root."""
    places = (
        "/etc/apt /etc/default /etc/environment /etc/environment.d /etc/modprobe.d /etc/profile"
        " /etc/profile.d /etc/sysctl.conf /etc/sysctl.d /etc/systemd /usr/local/bin /usr/local/sbin"
    )
    # our own files are judged with their roles
    form = f"find {places} -perm -0002 ! -type l ! -name '*sm120*' 2>/dev/null"
    fix = "chmod o-w what is named, and look who changed it."
    require_none(host.run(form).stdout.split(), "writable by everybody", fix)

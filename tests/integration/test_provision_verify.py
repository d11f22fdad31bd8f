"""Promises proved on fresh nodes over SSH, and broken there one after the other.

Real: SSH, sudo, apt, units, files. Stand-ins: packages' contents, kernel files and GRUB, as in
test_provision.py. Nodes have no GPU, so what needs one is seen to say so, and nothing more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from pipeline.core.errors import (
    HostOutlier,
    HostUnreached,
    LockStale,
    PromiseBroken,
    ProvisionFailed,
)
from tests.integration.host_command import AT_ONCE, Ended, Hosts, command, verify
from tests.integration.site import Site
from tests.testbed.playbook import ROOT, recap_of
from tests.testbed.snapshot import differences, snapshot

pytestmark = [pytest.mark.timeout(1800), pytest.mark.share(2)]


@pytest.fixture(scope="module")
def site(hosts: Hosts) -> Site:
    return hosts.site


@pytest.fixture(scope="module")
def provisioned(hosts: Hosts) -> Ended:
    """The first run of the whole command."""
    return hosts.first_run


def test_provision_ends_with_the_checks_and_keeps_a_record_of_each_host(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0, provisioned.out[-3000:] + provisioned.err
    assert "n1 changed: software.nccl_conf: unknown: /etc/nccl.conf" in provisioned.out
    for name in ("n1", "n2"):
        assert f"{name}: " in provisioned.out.rpartition("PLAY RECAP")[2]
        facts = json.loads((site.tmp / "records" / f"{name}.json").read_text())
        assert facts["host"] == name
        assert "NCCL_PROTO=LL" in facts["software"]["nccl_conf"]
    assert list((site.tmp / "records" / "captures").iterdir()) == []


BREAKS = {
    "nvidia_repository: the source is the one of the inventory": (
        "sed -i 's,^URIs:.*,URIs: http://elsewhere.invalid,'"
        " /etc/apt/sources.list.d/sm120-nvidia.sources"
    ),
    "nvidia_repository: the source is believed by its own key only": (
        "echo x >> /etc/apt/keyrings/sm120-nvidia.gpg"
    ),
    "nccl: programs on the host get the settings": "echo NCCL_DEBUG=INFO >> /etc/nccl.conf",
    "nccl: containers get the settings": "rm /etc/sm120/nccl.env",
    "host_tuning: the kernel knobs are in effect": "echo 60 > /proc/sys/vm/swappiness",
    "host_tuning: the governor is set at each boot": "systemctl disable sm120-governor",
    "host_tuning: the clock is kept": "systemctl stop chrony",
    "host_tuning: its files are as written": "echo x=1 >> /etc/sysctl.d/60-sm120.conf",
    "host_tuning: updates at night stay away from the driver": (
        "echo '#clear Unattended-Upgrade::Package-Blacklist;' > /etc/apt/apt.conf.d/99-mine"
    ),
    "nvidia_repository: nobody but root can change its files": "chmod 666 /etc/apt/keyrings/sm120*",
    "nvidia_repository: no source of the host is believed without a signature": (
        "echo 'deb [trusted=yes] http://elsewhere.invalid ./' > /etc/apt/sources.list.d/x.list"
    ),
    "nvidia_repository: apt checks signatures and certificates": (
        "echo 'APT::Get::AllowUnauthenticated true;' >> /etc/apt/apt.conf.d/99-mine"
    ),
    "nccl: no home has settings of its own": "echo NCCL_P2P_DISABLE=1 > /home/ops/.nccl.conf",
    "nccl: no environment has settings of its own": (
        "echo export NCCL_PROTO=Simple > /etc/profile.d/mine.sh"
    ),
    "host_tuning: no later file sets the kernel knobs otherwise": (
        "echo kernel.numa_balancing=1 > /etc/sysctl.d/99-mine.conf"
    ),
    "host: nobody else can change what the system reads": "chmod 777 /etc/profile.d",
    "host: no change waits for a reboot": "mkdir -p /run/sm120/reboot; touch /run/sm120/reboot/x",
}


# what is broken outside of our files, the play does not touch
TAKEN_BACK = (
    "rm -f /etc/apt/apt.conf.d/99-mine /run/sm120/reboot/x /etc/apt/sources.list.d/x.list"
    " /home/ops/.nccl.conf /etc/profile.d/mine.sh /etc/sysctl.d/99-mine.conf;"
    " chmod 755 /etc/profile.d"
)


def test_what_is_broken_on_one_node_is_named_there_with_its_fix_and_what_moved(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0
    for script in BREAKS.values():
        site.second.shell(script)
    result = verify(site)
    assert result.code == PromiseBroken.exit_code, result.err
    assert result.rows("n1", "failed", "unknown") == set()
    assert result.rows("n2", "failed") == set(BREAKS)
    assert result.rows("n2", "unknown") == set()
    assert all(r["fix"] for r in result.host("n2")["rows"] if r["verdict"] == "failed")
    moved = {d["field"] for d in result.host("n2")["drift"]}
    assert {"kernel.swappiness", "software.nccl_conf"} <= moved
    assert result.host("n1")["drift"] == []


@pytest.mark.big
def test_the_next_run_repairs_it_and_says_what_moved(site: Site, provisioned: Ended) -> None:
    site.second.shell(TAKEN_BACK)
    again = command(site, "provision", *AT_ONCE)
    assert again.code == 0, again.out[-3000:] + again.err
    assert "n2 changed: kernel.swappiness: 60 -> 0" in again.out
    assert "n1: no fact changed in this run" in again.out
    assert verify(site).code == 0


def test_a_node_that_is_down_is_not_reached_and_the_other_is_judged(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0
    site.second.stop()
    try:
        result = verify(site)
    finally:
        site.second.start()
    assert result.code == HostUnreached.exit_code
    assert result.host("n2")["verdict"] == "not reached"
    assert result.host("n2")["rows"] == []
    assert result.host("n1")["verdict"] == "passed"
    assert "not reached: n2" in result.err


@pytest.mark.big
def test_a_wrong_sudo_password_and_none_at_all_leave_nothing_called_passed(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0
    for password, message in (("wrong", "does not accept"), ("", "needs a password")):
        result = verify(site, "--limit", "n1", ansible_become_password=password)
        assert result.code == HostUnreached.exit_code
        assert message in result.host("n1")["unreached"]


def test_a_lock_that_answers_another_spec_stops_before_any_host_is_asked(
    site: Site, tmp_path: Path
) -> None:
    spec = site.checkout / "lockfiles" / "host.yaml"
    kept = spec.read_text()
    try:
        spec.write_text(kept.replace("branch: 580", "branch: 590"))
        ended = command(site, "provision", *AT_ONCE)
    finally:
        spec.write_text(kept)
    assert ended.code == LockStale.exit_code
    assert "PLAY" not in ended.out


@pytest.mark.big
def test_check_mode_proves_and_records_nothing_and_says_so(site: Site, provisioned: Ended) -> None:
    before = (site.tmp / "records" / "n1.json").read_bytes()
    ended = command(site, "provision", *AT_ONCE, "--check", "--diff", "--limit", "n1")
    assert ended.code == 0, ended.out[-2000:]
    assert "nothing is recorded or verified" in ended.err
    assert "passed" not in ended.out.rpartition("PLAY RECAP")[2]
    assert (site.tmp / "records" / "n1.json").read_bytes() == before


@pytest.mark.big
def test_a_canary_that_fails_leaves_the_others_untouched(site: Site, provisioned: Ended) -> None:
    site.second.shell("rm -f /etc/sm120/nccl.env")
    site.first.shell("cp /etc/nccl.conf /root/kept && echo '# mine' > /etc/nccl.conf")
    untouched = snapshot(site.second)
    try:
        ended = command(site, "provision")
    finally:
        site.first.shell("mv /root/kept /etc/nccl.conf")
    assert ended.code == ProvisionFailed.exit_code
    assert "was not written by this role and is left alone" in " ".join(ended.out.split())
    assert "n2" not in recap_of(ended.out)
    assert differences(untouched, snapshot(site.second), ()) == []
    assert "were not verified" in ended.err
    assert command(site, "provision", *AT_ONCE).code == 0


# what the other roles promise; kernel files and GRUB are stand-ins
HELD = "they are held"
CMDLINE = "/run/stand-in/_proc_cmdline"
ALL_BREAKS = {
    "nvidia_driver: the locked driver is the loaded one": (
        "sed -i s/580.95.05/580.82.07/ /proc/driver/nvidia/version"
    ),
    "nvidia_driver: the open kernel modules are loaded": (
        "sed -i 's/Open Kernel Module/Kernel Module/' /proc/driver/nvidia/version"
    ),
    "nvidia_driver: nouveau is kept away": "rm /etc/modprobe.d/sm120-nouveau.conf",
    "nvidia_driver: the driver stays initialised between jobs": (
        "systemctl stop nvidia-persistenced"
    ),
    f"nvidia_driver: {HELD} (driver)": "apt-mark unhold nvidia-open",
    "nvidia_driver: the preferences pin these and no others (driver)": (
        "printf '\\nPackage: old\\nPin: version 1\\nPin-Priority: 1001\\n'"
        " >> /etc/apt/preferences.d/sm120-driver.pref"
    ),
    "nvidia_driver: their files are as they came (driver)": (
        "echo 580.1 > /usr/lib/stand-in/nvidia-version"
    ),
    # in this order: apt installs nothing where a package lacks what it depends on
    "nvidia_driver: the headers that follow updates are installed": (
        "dpkg --remove linux-headers-stand-in"
    ),
    "nvidia_driver: dkms can build it for the running kernel": (
        "dpkg --remove linux-headers-$(uname -r)"
    ),
    "nvidia_driver: the kernel that boots next has the driver": "touch /boot/vmlinuz-9.9.9-new",
    "pcie: the kernel was booted with its arguments": f"sed s/iommu=pt// {CMDLINE} > /root/x",
    "pcie: links are kept awake": "sed -i s/pcie_aspm=off// /root/x",
    "pcie: the mitigations are on": (
        f"sed -i 's/$/ mitigations=off/' /root/x; cat /root/x > {CMDLINE}"
    ),
    "pcie: the next boot has its arguments too": "sed -i s/pcie_port_pm=off// /boot/grub/grub.cfg",
    "pcie: the modules options are written": "sed -i /hmm/d /etc/modprobe.d/sm120-pcie.conf",
    "pcie: the driver was loaded with its registry keys": (
        "sed -i s/ForceP2P=0x11/ForceP2P=0x0/ /proc/driver/nvidia/params"
    ),
    "pcie: acs is switched off at each boot": "echo '# x' >> /usr/local/sbin/sm120-acs",
    "pcie: the probes after the last change are kept": "rm /var/lib/sm120/pcie/after.txt",
    "nccl: the patched library is ours or none": (
        "mkdir -p /usr/local/lib/sm120; touch /usr/local/lib/sm120/libnccl.so.2"
    ),
    "container_runtime: the engine is installed and runs": "systemctl disable docker",
    "container_runtime: the limits are set": "sed -i s/16g/64m/ /etc/docker/daemon.json",
    "container_runtime: the engine was started with them": (
        "touch -d '+1 hour' /etc/docker/daemon.json"
    ),
    "container_runtime: cdi is made again after each change of the driver": (
        "systemctl disable nvidia-cdi-refresh"
    ),
    "container_runtime: the locked versions are installed (container_toolkit)": (
        "apt-get --yes --allow-downgrades --allow-change-held-packages install"
        " nvidia-container-toolkit=1.17.8-1 nvidia-container-toolkit-base=1.17.8-1"
    ),
    f"container_runtime: {HELD} (container_toolkit)": "true",
    "container_runtime: apt would install nothing else (container_toolkit)": (
        "printf 'Package: nvidia-container-toolkit\\nPin: version 1.17.8-1\\nPin-Priority: 1002\\n'"
        " > /etc/apt/preferences.d/aaa.pref"
    ),
    "cuda: the toolkit is the locked release": (
        'echo \'{"cuda": {"version": "12.9.1"}}\' > /usr/local/cuda-13.0/version.json'
    ),
    "cuda: their files are as they came (cuda)": "true",
    "registry: it runs and starts at boot": "systemctl stop docker-registry",
    "registry: it answers over tls and asks for a password": "true",
    "registry: the passwords are the inventorys": "chmod 644 /etc/sm120-registry/htpasswd",
    "registry: its settings are ours": "sed -i s/5000/5001/ /etc/sm120-registry/config.yml",
}


@pytest.fixture(scope="module")
def whole(site: Site) -> dict[str, Any]:
    """Every role on both nodes, where all promises hold; the variables of that."""
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(rounds=4)).decode()
    parts = ["nvidia_driver", "cuda", "pcie", "nccl", "container_runtime", "host_tuning"]
    values: dict[str, Any] = {
        "sm120_parts": [*parts, "registry"],
        "registry_name": "{{ ansible_host }}",
        "registry_htpasswd": [f"ops:{hashed}"],
    }
    site.offer("docker-registry")
    for node in site.fleet.nodes:
        node.shell(TAKEN_BACK)
        node.shell("apt-get --quiet update; apt-get --quiet --yes install linux-image-stand-in")
    ended = command(site, "provision", *AT_ONCE, **values)
    assert ended.code == 0, ended.out[-3000:] + ended.err
    return values


WHO = "nobody but root can change its files"
# what is planted, what takes it back, and the promise that must not hold any more
PLANTED = [
    ("chmod 777 /usr/local/sbin/sm120-acs", "chmod 755 /usr/local/sbin/sm120-acs", f"pcie: {WHO}"),
    (
        "chmod 666 /etc/apt/keyrings/sm120-nvidia.gpg /etc/apt/sources.list.d/sm120-nvidia.sources",
        "chmod 644 /etc/apt/keyrings/sm120-nvidia.gpg /etc/apt/sources.list.d/sm120-nvidia.sources",
        f"nvidia_repository: {WHO}",
    ),
    (
        "echo 'vm.swappiness = 60' > /etc/sysctl.d/99-local.conf",
        "rm /etc/sysctl.d/99-local.conf",
        "host_tuning: no later file sets the kernel knobs otherwise",
    ),
    (
        "echo 'GRUB_CMDLINE_LINUX_DEFAULT=\"quiet splash\"' > /etc/default/grub.d/99-local.cfg",
        "rm /etc/default/grub.d/99-local.cfg",
        "pcie: no other file of grub overrides its arguments",
    ),
    (
        "echo 'options nvidia_uvm uvm_disable_hmm=0' > /etc/modprobe.d/local.conf",
        "rm /etc/modprobe.d/local.conf",
        "pcie: no other file sets the modules options",
    ),
    (
        "echo NCCL_PROTO=Simple > /root/.nccl.conf",
        "rm /root/.nccl.conf",
        "nccl: no home has settings of its own",
    ),
    (
        "cp /etc/environment /root/kept || :; echo NCCL_P2P_DISABLE=1 >> /etc/environment",
        "rm /etc/environment; mv /root/kept /etc/environment || :",
        "nccl: no environment has settings of its own",
    ),
    (
        "mkdir /etc/systemd/system/nvidia-persistenced.service.d; printf '[Service]\\nNice=5\\n' >"
        " /etc/systemd/system/nvidia-persistenced.service.d/local.conf; systemctl daemon-reload",
        "rm -r /etc/systemd/system/nvidia-persistenced.service.d; systemctl daemon-reload",
        "nvidia_driver: the driver stays initialised between jobs",
    ),
    (
        "dpkg --remove linux-headers-stand-in",
        "apt-get --quiet --yes install linux-headers-stand-in",
        "nvidia_driver: the headers that follow updates are installed",
    ),
    (
        "printf 'Types: deb\\nURIs: http://elsewhere.invalid\\nSuites: ./\\nTrusted: yes\\n' >"
        " /etc/apt/sources.list.d/extra.sources",
        "rm /etc/apt/sources.list.d/extra.sources",
        "nvidia_repository: no source of the host is believed without a signature",
    ),
]


# what takes effect besides our files: what is planted, what takes it back, the promise, its reason
IN_EFFECT = [
    (
        "mkdir /opt/n; touch /opt/n/libnccl.so; echo LD_LIBRARY_PATH=/opt/n > /etc/profile.d/n.sh",
        "rm -r /opt/n /etc/profile.d/n.sh",
        "nccl: no other library takes the place of nccl",
        "no package brought: /opt/n/libnccl.so (by LD_LIBRARY_PATH)",
    ),
    (
        "echo export NCCL_P2P_DISABLE=1 >> /home/ops/.bashrc",
        "sed -i /NCCL_/d /home/ops/.bashrc",
        "nccl: no environment has settings of its own",
        "/home/ops/.bashrc has NCCL_P2P_DISABLE=1",
    ),
    (
        "mkdir -p /etc/cdi; echo 'hostPath: /usr/lib/libcuda.so.570.86.10' > /etc/cdi/nvidia.yaml",
        "rm -r /etc/cdi",
        "container_runtime: cdi is of the loaded driver",
        "/etc/cdi/nvidia.yaml is of driver 570.86.10",
    ),
    (
        "mkdir -p /etc/systemd/system/docker.service.d; printf '[Service]\\nLimitNOFILE=1024\\n' >"
        " /etc/systemd/system/docker.service.d/x.conf; systemctl daemon-reload;"
        " systemctl restart docker",
        "rm -r /etc/systemd/system/docker.service.d; systemctl daemon-reload;"
        " systemctl restart docker",
        "container_runtime: no limit of the engine is lower than a container needs",
        "docker runs with NOFILE=1024",
    ),
    (
        "mkdir -p /etc/nvidia-container-runtime; printf '[nvidia-container-cli]\\nno-cgroups = true"
        "\\n' > /etc/nvidia-container-runtime/config.toml",
        "rm -r /etc/nvidia-container-runtime",
        "container_runtime: the toolkit hands the cards to containers",
        "no-cgroups = true",
    ),
    (
        "chmod 644 /etc/sm120-registry/server.key",
        "chmod 600 /etc/sm120-registry/server.key",
        "registry: its key and its images are nobody elses",
        "/etc/sm120-registry/server.key is open to others (0644)",
    ),
    (
        "cp -a /etc/sm120-registry/ca.crt /root/kept.crt; echo >> /etc/sm120-registry/ca.crt",
        "mv /root/kept.crt /etc/sm120-registry/ca.crt",
        "registry: its certificates are those it was given",
        "replaced since the role made it: /etc/sm120-registry/ca.crt",
    ),
    (
        "echo 'GRUB_DEFAULT=\"Advanced>Linux 5.10.0-8\"' > /etc/default/grub.d/50-x.cfg",
        "rm /etc/default/grub.d/50-x.cfg",
        "nvidia_driver: the kernel that boots next has the driver",
        "GRUB_DEFAULT chooses `Advanced>Linux 5.10.0-8`",
    ),
    (
        "echo nouveau > /etc/modules-load.d/x.conf",
        "rm /etc/modules-load.d/x.conf",
        "nvidia_driver: nouveau is kept away",
        "the next boot loads nouveau by: /etc/modules-load.d/x.conf",
    ),
    (
        "mkdir -p /etc/dkms; echo 'AUTOINSTALL=\"no\"' > /etc/dkms/nvidia.conf",
        "rm -r /etc/dkms",
        "nvidia_driver: dkms builds it for each new kernel",
        "/etc/dkms/nvidia.conf has AUTOINSTALL=no",
    ),
    (
        "touch /var/lib/sm120/packages/driver/before.json",
        "rm /var/lib/sm120/packages/driver/before.json",
        "nvidia_driver: the packages to go back to are whole",
        "before.json is not the note that the role wrote",
    ),
    (
        'mkdir -p /etc/udev/rules.d; echo \'ATTR{vendor}=="0x10de", ATTR{power/control}="auto"\' >'
        " /etc/udev/rules.d/80-nv.rules",
        "rm /etc/udev/rules.d/80-nv.rules",
        "pcie: no rule lets the cards sleep",
        "/etc/udev/rules.d/80-nv.rules sets it",
    ),
    (
        "printf '#!/bin/sh\\necho 60 > /proc/sys/vm/swappiness\\n' > /etc/rc.local",
        "rm /etc/rc.local",
        "host_tuning: nothing started at boot sets the kernel knobs",
        "/etc/rc.local: echo 60 > /proc/sys/vm/swappiness",
    ),
    (
        "mkdir -p /etc/chrony; echo 'makestep 1 3' > /etc/chrony/chrony.conf",
        "rm -r /etc/chrony",
        "host_tuning: the clock is kept",
        "chrony's settings name no server, pool or clock",
    ),
    (
        "mkdir -p /etc/cron.d; echo '0 3 * * * root apt-get -y dist-upgrade' > /etc/cron.d/x",
        "rm /etc/cron.d/x",
        "host_tuning: updates at night stay away from the driver",
        "a job upgrades everything: /etc/cron.d/x",
    ),
    (
        "echo vm.nr_hugepages=900000 > /etc/sysctl.d/99-h.conf",
        "rm /etc/sysctl.d/99-h.conf",
        "host_tuning: huge pages leave memory to programs",
        "/etc/sysctl.d/99-h.conf reserves",
    ),
    (
        "echo 'Acquire::Check-Valid-Until \"false\";' > /etc/apt/apt.conf.d/99x",
        "rm /etc/apt/apt.conf.d/99x",
        "nvidia_repository: apt checks signatures and certificates",
        "Acquire::Check-Valid-Until is false",
    ),
    (
        "cp /usr/share/keyrings/system.gpg /etc/apt/trusted.gpg.d/x.gpg",
        "rm /etc/apt/trusted.gpg.d/x.gpg",
        "nvidia_repository: no foreign key speaks for every source",
        "no package brought: /etc/apt/trusted.gpg.d/x.gpg",
    ),
]


@pytest.mark.big
def test_what_takes_effect_besides_our_files_is_found_with_its_reason(
    site: Site, whole: dict[str, Any]
) -> None:
    for plant, _, _, _ in IN_EFFECT:
        site.second.shell(plant)
    result = verify(site, **whole)
    for _, undo, _, _ in IN_EFFECT:
        site.second.shell(undo)
    assert result.rows("n1", "failed", "unknown") == set()
    assert result.rows("n2", "failed", "unknown") == {promise for _, _, promise, _ in IN_EFFECT}
    reasons = {f"{r['role']}: {r['promise']}": r["why"] for r in result.host("n2")["rows"]}
    assert [why for _, _, promise, why in IN_EFFECT if why not in reasons[promise]] == []
    assert verify(site, "--limit", "n2", **whole).rows("n2", "failed", "unknown") == set()


@pytest.mark.big
def test_settings_that_others_planted_are_found_all_at_once_and_one_by_one(
    site: Site, whole: dict[str, Any]
) -> None:
    for plant, _, _ in PLANTED:
        site.second.shell(plant)
    result = verify(site, **whole)
    assert result.code == PromiseBroken.exit_code
    assert result.rows("n1", "failed", "unknown") == set()
    assert result.rows("n2", "failed", "unknown") == {promise for _, _, promise in PLANTED}
    for _, undo, _ in PLANTED:
        site.second.shell(undo)
    for plant, undo, promise in PLANTED:
        site.second.shell(plant)
        role = promise.partition(":")[0]
        alone = verify(site, "--limit", "n2", "--role", role, **whole)
        site.second.shell(undo)
        assert alone.rows("n2", "failed", "unknown") == {promise}
        (row,) = [r for r in alone.host("n2")["rows"] if r["verdict"] == "failed"]
        assert row["why"]
        assert row["fix"]


@pytest.mark.big
def test_every_role_is_proved_on_stand_ins_and_every_break_is_found(
    site: Site, whole: dict[str, Any], tmp_path: Path
) -> None:
    for script in ALL_BREAKS.values():
        site.second.shell(script)
    result = verify(site, "--functions", "sm120/vllm:none", "--output", str(tmp_path), **whole)
    assert result.code == PromiseBroken.exit_code
    assert result.rows("n1", "failed", "unknown") == set()
    assert result.rows("n2", "failed") == set(ALL_BREAKS)
    assert "module-proprietary" in [f["issue"]["id"] for f in result.host("n2")["findings"]]
    assert "driver.version" in {d["field"] for d in result.host("n2")["drift"]}
    (row,) = result.host("n1")["functions"]
    assert (row["verdict"], "no GPU is on the bus" in row["why"]) == ("unknown", True)

    # the third is the first's equal, so that the second is the one that differs
    (tmp_path / "n3.json").write_bytes((tmp_path / "n1.json").read_bytes())
    files = [str(tmp_path / f"n{n}.json") for n in (1, 2, 3)]
    odd = subprocess.run(
        [sys.executable, "-m", "pipeline", "host", "outliers", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert odd.returncode == HostOutlier.exit_code
    assert "n2" in odd.stdout
    assert "driver.version" in odd.stdout

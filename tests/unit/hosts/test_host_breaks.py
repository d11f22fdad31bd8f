"""What people plant on a host, one row for each: the promise that must fail, and its reason.

Texts are those that systemd nodes print. Most rows were planted on a node as well; not on one: an
insecure registry, swap, a world-writable /models, a changed tool, an emptied note, grubenv, chrony
without sources.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.hosts.promises import container_runtime as runtime
from pipeline.hosts.promises import host_tuning as tuning
from pipeline.hosts.promises import nccl, pcie, registry, weights
from pipeline.hosts.promises import nvidia_driver as driver
from pipeline.hosts.promises import nvidia_repository as repository
from pipeline.hosts.promises import pinned_packages as pins
from pipeline.hosts.promises.boot import READ_INITRAMFS, chosen_kernel
from pipeline.hosts.promises.checks import Broken, NotApplicable, Undecided
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import (
    CMDLINE,
    END,
    GOOD,
    GRUB_ARGUMENTS,
    GRUB_ROWS,
    LOCK,
    NCCL,
    PCIE,
    REGISTRY,
    RUNTIME,
    SYSCTL,
    TUNING,
    machine,
)
from tests.unit.hosts.promise_values import weights_with

FACTS = machine()
LIMITS = "Max locked memory  8388608  8388608  bytes\nMax open files  1024  {}  files\n"
DROP_IN = "/etc/systemd/system/docker.service.d/x.conf"
GREP = "grep -rIsE"
KEPT = "/var/lib/sm120/packages/driver"
PIN = {"name": "nvidia-open", "version": "595.58.03-1", "sha256": "0" * 64}
NOTE = json.dumps({"packages": ["nvidia-open"], "pins": [PIN]})
MENU = """set default="{}"
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'simple' {{
\tlinux /vmlinuz-6.8.0-11-generic root=/dev/vda
}}
submenu 'Advanced options' $menuentry_id_option 'advanced' {{
\tmenuentry 'Debian, with Linux 6.8.0-11-generic' --class debian $menuentry_id_option 'new' {{
\t\tlinux /boot/vmlinuz-6.8.0-11-generic root=/dev/vda
\t}}
\tmenuentry 'Debian, with Linux 5.10.0-8-amd64' --class debian $menuentry_id_option 'old' {{
\t\tlinux /boot/vmlinuz-5.10.0-8-amd64 root=/dev/vda
\t}}
}}
"""
INITRD = "/boot/initrd.img-6.8.0-11-generic"
INITRAMFS = {
    "ls -v /boot | sed": (0, f"{INITRD}\n"),
    "python3 -c \nimport re, subprocess": (
        0,
        "\x1e/etc/modprobe.d/sm120-pcie.conf\noptions a b=1\n\x1edriver\n\n\x1eend\n\n",
    ),
}
UDEV = 'ACTION=="add", SUBSYSTEM=="pci", ATTR{vendor}=="0x10de", ATTR{power/control}="auto"\n'
CDI = "hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{}\n"
HUGE = "MemTotal: 24653096 kB\nHugepagesize: 2048 kB\nHugetlb: {} kB\n"
CRT = GOOD.file("/reg/server.crt").sha256sum
CERTIFICATES = {
    "/reg/ca.crt": "ca",
    registry.NOTE: f"{FakeHost({'x': 'ca'}).file('x').sha256sum}  ca.crt\n{CRT}  server.crt\n",
}
HERE = GOOD.but(
    files={
        f"{KEPT}/working.json": NOTE,
        "/proc/7/limits": LIMITS.format(524288),
        "/reg/server.key": "key",
        "/boot/grub/grub.cfg": MENU.format("0"),
        "/etc/chrony/chrony.conf": "pool 2.debian.pool.ntp.org iburst\n",
        "/proc/meminfo": HUGE.format(0),
        "/proc/swaps": "Filename Type Size Used Priority\n",
        "/etc/cdi/nvidia.yaml": CDI.format("595.58.03"),
        **CERTIFICATES,
    },
    modes={"/reg/server.key": 0o600},
    outputs={
        **INITRAMFS,
        f"sha256sum {KEPT}": (0, f"{'0' * 64}  {KEPT}/nvidia-open.deb\n"),
        "systemctl show --property=DefaultLimit": (0, "DefaultLimitMEMLOCK=8388608\n"),
        "systemctl show docker --property=MainPID": (0, "MainPID=7\nExecStart={ dockerd }\n"),
        "systemctl show containerd --property": (0, "MainPID=7\nExecStart=\n"),
        "python3 -c \nimport glob, os, re": (0, "\n"),
        "python3 -I -c": (0, "[]\n"),
        "find /models": (0, ""),
        "find /images": (0, ""),
        "find /etc/apt/trusted.gpg": (0, "/etc/apt/trusted.gpg.d/debian.asc\n"),
        "dpkg -S": (0, "debian-archive-keyring: /etc/apt/trusted.gpg.d/debian.asc\n"),
        "dpkg -L dkms": (1, ""),
        "chronyc -n sources": (0, "MS Name\n===\n^* 192.0.2.1 2 6 377\n"),
        GREP: (1, ""),
        "for d in /sys": (0, "0000:01:00.0 on\n"),
        "systemctl is-enabled swap.target": (1, "masked\n"),
    },
)


def saying_here(begin: str, text: str, rc: int = 0) -> FakeHost:
    return HERE.but(outputs={begin: (rc, text)})


def holding(path: str, text: str | None) -> FakeHost:
    return HERE.but(files={path: text})


LIMITED = runtime.test_no_limit_of_the_engine_is_lower_than_a_container_needs
NO_SWAP = TUNING.model_copy(update={"swap": "off"})
# what was planted, the promise, what it is given besides the host, the host, the reason
BREAKS: list[tuple[str, Any, tuple[Any, ...], FakeHost, str]] = [
    (
        "NCCL settings in .bashrc of a user",
        *(nccl.test_no_environment_has_settings_of_its_own, (NCCL,)),
        holding("/home/ops/.bashrc", "export NCCL_P2P_DISABLE=1\n"),
        "/home/ops/.bashrc has NCCL_P2P_DISABLE=1",
    ),
    (
        "NCCL settings of a service",
        *(nccl.test_no_environment_has_settings_of_its_own, (NCCL,)),
        holding("/etc/systemd/system/vllm.service", "[Service]\nEnvironment=NCCL_ALGO=Ring\n"),
        "/etc/systemd/system/vllm.service has NCCL_ALGO=Ring",
    ),
    (
        "another NCCL by a folder of the linker",
        *(nccl.test_no_other_library_takes_the_place_of_nccl, (NCCL,)),
        saying_here(
            "python3 -c \nimport glob, os, re",
            "/opt/n/libnccl.so.2 (by /etc/ld.so.conf.d/n.conf)\n",
        ),
        "no package brought: /opt/n/libnccl.so.2 (by /etc/ld.so.conf.d/n.conf)",
    ),
    (
        "a stale CDI file",
        *(runtime.test_cdi_is_of_the_loaded_driver, (FACTS,)),
        holding("/etc/cdi/nvidia.yaml", CDI.format("570.86.10")),
        "loaded is 595.58.03: /etc/cdi/nvidia.yaml is of driver 570.86.10",
    ),
    (
        "small locked memory of Docker",
        *(LIMITED, (RUNTIME,)),
        holding(DROP_IN, "[Service]\nLimitMEMLOCK=64K\n"),
        f"too low: {DROP_IN} has LimitMEMLOCK=64K",
    ),
    (
        "few files for the running Docker",
        *(LIMITED, (RUNTIME,)),
        holding("/proc/7/limits", LIMITS.format(1024)),
        "too low: docker runs with NOFILE=1024, containerd runs with NOFILE=1024",
    ),
    (
        "small shared memory by a flag",
        *(LIMITED, (RUNTIME,)),
        saying_here(
            "systemctl show docker --property=MainPID",
            "MainPID=7\nExecStart={ argv[]=dockerd --default-shm-size=64m ; }\n",
        ),
        "docker is started with --default-shm-size=64m",
    ),
    (
        "DefaultLimitMEMLOCK of systemd",
        *(LIMITED, (RUNTIME,)),
        holding("/etc/systemd/system.conf.d/x.conf", "[Manager]\nDefaultLimitMEMLOCK=64K\n"),
        "/etc/systemd/system.conf.d/x.conf has LimitMEMLOCK=64K",
    ),
    (
        "no-cgroups",
        *(runtime.test_the_toolkit_hands_the_cards_to_containers, ()),
        holding(
            "/etc/nvidia-container-runtime/config.toml",
            "[nvidia-container-cli]\nno-cgroups = true\n",
        ),
        "/etc/nvidia-container-runtime/config.toml has: no-cgroups = true",
    ),
    (
        "our registry as an insecure one",
        *(runtime.test_the_private_registry_is_asked_over_tls_only, (RUNTIME,)),
        holding("/etc/docker/daemon.json", '{"insecure-registries": ["r:5000"]}'),
        "r:5000: /etc/docker/daemon.json lists r:5000 as insecure",
    ),
    (
        "every registry as an insecure one, by a flag",
        *(runtime.test_the_private_registry_is_asked_over_tls_only, (RUNTIME,)),
        saying_here(
            "systemctl show docker --property=ExecStart",
            "ExecStart={ argv[]=dockerd --insecure-registry 0.0.0.0/0 ; }\n",
        ),
        "docker.service lists 0.0.0.0/0 as insecure",
    ),
    (
        "a registry's key that all can read",
        *(registry.test_its_key_and_its_images_are_nobody_elses, (REGISTRY,)),
        HERE.but(modes={"/reg/server.key": 0o644}),
        "/reg/server.key is open to others (0644)",
    ),
    (
        "a registry's storage that all can write",
        *(registry.test_its_key_and_its_images_are_nobody_elses, (REGISTRY,)),
        saying_here("find /images", "/images\n"),
        "writable by everybody: /images",
    ),
    (
        "a registry's CA replaced",
        *(registry.test_its_certificates_are_those_it_was_given, (REGISTRY,)),
        holding("/reg/ca.crt", "another"),
        "replaced since the role made it: /reg/ca.crt",
    ),
    (
        "GRUB_DEFAULT pinned to a kernel without the driver",
        *(driver.test_the_kernel_that_boots_next_has_the_driver, (LOCK,)),
        holding("/boot/grub/grub.cfg", MENU.format("1>1")),
        "5.10.0-8-amd64 (by /boot/grub/grub.cfg) has no NVIDIA driver, locked is 595.58.03",
    ),
    (
        "GRUB_DEFAULT of the next update-grub",
        *(driver.test_the_kernel_that_boots_next_has_the_driver, (LOCK,)),
        saying_here("/bin/sh -c for f in /etc/default/grub", "advanced>old"),
        "5.10.0-8-amd64 (by GRUB_DEFAULT) has no NVIDIA driver",
    ),
    (
        "an entry that GRUB's menu does not have",
        *(driver.test_the_kernel_that_boots_next_has_the_driver, (LOCK,)),
        saying_here("grub-editenv", "next_entry=gone\n"),
        "next_entry of grubenv chooses `gone`, and GRUB's menu has no such kernel",
    ),
    (
        "a knob set by a unit",
        *(tuning.test_nothing_started_at_boot_sets_the_kernel_knobs, (TUNING,)),
        saying_here(
            GREP, "/etc/systemd/system/x.service:ExecStart=/sbin/sysctl -w vm.swappiness=60\n"
        ),
        "/etc/systemd/system/x.service: ExecStart=/sbin/sysctl -w vm.swappiness=60",
    ),
    (
        "a knob set by rc.local",
        *(tuning.test_nothing_started_at_boot_sets_the_kernel_knobs, (TUNING,)),
        saying_here(GREP, "/etc/rc.local:echo 60 > /proc/sys/vm/swappiness\n"),
        "set after sysctl.d: /etc/rc.local: echo 60 > /proc/sys/vm/swappiness",
    ),
    (
        "nouveau by modules-load.d",
        *(driver.test_nouveau_is_kept_away, ()),
        holding("/etc/modules-load.d/x.conf", "# comment\nnouveau\n"),
        "the next boot loads nouveau by: /etc/modules-load.d/x.conf",
    ),
    (
        "nouveau by the kernel's command line",
        *(driver.test_nouveau_is_kept_away, ()),
        holding("/proc/cmdline", f"{CMDLINE} modules-load=nouveau"),
        "booted with modules-load=nouveau",
    ),
    (
        "an option in the initramfs",
        *(pcie.test_the_initramfs_has_the_same_options, (PCIE,)),
        saying_here(
            "python3 -c \nimport re, subprocess",
            "\x1e/etc/modprobe.d/x.conf\noptions a b=0\n\x1eend\n\n",
        ),
        f"before the disk is mounted: {INITRD}:/etc/modprobe.d/x.conf has b=0",
    ),
    (
        "an initramfs that is older than our options",
        *(pcie.test_the_initramfs_has_the_same_options, (PCIE,)),
        saying_here("python3 -c \nimport re, subprocess", "\x1edriver\n\n\x1eend\n\n"),
        "has the driver and not /etc/modprobe.d/sm120-pcie.conf",
    ),
    (
        "udev's power control",
        *(pcie.test_no_rule_lets_the_cards_sleep, (PCIE,)),
        holding("/etc/udev/rules.d/80-nv.rules", UDEV),
        "idle cards may sleep: /etc/udev/rules.d/80-nv.rules sets it",
    ),
    (
        "a card that may sleep now",
        *(pcie.test_no_rule_lets_the_cards_sleep, (PCIE,)),
        saying_here("for d in /sys", "0000:01:00.0 auto\n"),
        "idle cards may sleep: 0000:01:00.0 is set to auto",
    ),
    (
        "the driver's own power management",
        *(pcie.test_no_rule_lets_the_cards_sleep, (PCIE,)),
        holding("/etc/modprobe.d/pm.conf", "options nvidia NVreg_DynamicPowerManagement=0x02\n"),
        "/etc/modprobe.d/pm.conf has NVreg_DynamicPowerManagement=0x02",
    ),
    (
        "nouveau before the driver",
        *(driver.test_nouveau_is_kept_away, ()),
        holding("/etc/modprobe.d/soft.conf", "softdep nvidia pre: nouveau\n"),
        "loads nouveau by: /etc/modprobe.d/soft.conf (softdep nvidia)",
    ),
    (
        "nouveau for every card",
        *(driver.test_nouveau_is_kept_away, ()),
        holding("/etc/modprobe.d/al.conf", "alias pci:v000010DEd*sv*sd*bc03sc*i* nouveau\n"),
        "loads nouveau by: /etc/modprobe.d/al.conf (alias pci:v000010DEd*sv*sd*bc03sc*i*)",
    ),
    (
        "holds that apt ignores",
        *(pins.test_they_are_held, (LOCK, "driver")),
        saying_here(
            "apt-config dump APT::Get::allow", 'APT::Get::allow-change-held-packages "true";\n'
        ),
        'apt\'s settings let every upgrade move them: APT::Get::allow-change-held-packages "true";',
    ),
    (
        "a module's option by the next update of GRUB",
        *(pcie.test_no_other_file_sets_the_modules_options, (PCIE,)),
        saying_here(GRUB_ARGUMENTS, f"{GRUB_ROWS}/etc/default/grub.d/70-x.cfg\tquiet a.b=0\n{END}"),
        "set otherwise: /etc/default/grub.d/70-x.cfg has b=0",
    ),
    (
        "mitigations=off by the next update of GRUB",
        *(pcie.test_the_mitigations_are_on, ()),
        saying_here(
            GRUB_ARGUMENTS, f"{GRUB_ROWS}/etc/default/grub.d/71.cfg\tmitigations=off\n{END}"
        ),
        "GRUB boots with mitigations=off, by: /etc/default/grub.d/71.cfg",
    ),
    (
        "a knob set by tmpfiles.d",
        *(tuning.test_nothing_started_at_boot_sets_the_kernel_knobs, (TUNING,)),
        saying_here(GREP, "/etc/tmpfiles.d/x.conf:w /proc/sys/vm/swappiness - - - - 60\n"),
        "/etc/tmpfiles.d/x.conf: w /proc/sys/vm/swappiness - - - - 60",
    ),
    (
        "a registry with other passwords",
        *(registry.test_its_settings_are_ours, (REGISTRY,)),
        holding(
            "/reg/config.yml", GOOD.files["/reg/config.yml"].replace("/reg/htpasswd", "/tmp/x")
        ),
        '/reg/config.yml lacks path: "/reg/htpasswd"',
    ),
    (
        "chrony without a server",
        *(tuning.test_the_clock_is_kept, (TUNING,)),
        holding("/etc/chrony/chrony.conf", "makestep 1 3\n# pool x\n"),
        "chrony's settings name no server, pool or clock",
    ),
    (
        "a running chrony without a server",
        *(tuning.test_the_clock_is_kept, (TUNING,)),
        saying_here("chronyc -n sources", "MS Name\n===\n"),
        "the running chrony asks no server",
    ),
    (
        "apt without date checks",
        *(repository.test_apt_checks_signatures_and_certificates, ()),
        saying_here("apt-config dump", 'Acquire::Check-Date "false";\n'),
        "apt's settings: Acquire::Check-Date is false",
    ),
    (
        "a source without date checks",
        *(repository.test_no_source_of_the_host_is_believed_without_a_signature, ()),
        holding("/etc/apt/sources.list", "deb [check-valid-until=no] http://x y main\n"),
        "/etc/apt/sources.list has check-valid-until=no",
    ),
    (
        "a foreign key",
        *(repository.test_no_foreign_key_speaks_for_every_source, ()),
        saying_here("find /etc/apt/trusted.gpg", "/etc/apt/trusted.gpg.d/x.gpg\n"),
        "no package brought: /etc/apt/trusted.gpg.d/x.gpg",
    ),
    (
        "a changed key of the system",
        *(repository.test_no_foreign_key_speaks_for_every_source, ()),
        saying_here("dpkg --verify", "??5?????? c /etc/apt/trusted.gpg.d/debian.asc\n"),
        "changed since its package brought it: /etc/apt/trusted.gpg.d/debian.asc",
    ),
    (
        "a cron job that upgrades everything",
        *(tuning.test_updates_at_night_stay_away_from_the_driver, (TUNING,)),
        saying_here(GREP, "/etc/cron.d/x:0 3 * * * root apt-get -y dist-upgrade\n"),
        "a job upgrades everything: /etc/cron.d/x: 0 3 * * * root apt-get -y dist-upgrade",
    ),
    (
        "huge pages",
        *(tuning.test_huge_pages_leave_memory_to_programs, (TUNING,)),
        holding("/proc/meminfo", HUGE.format(16 << 20)),
        "huge pages: the kernel reserves 16 of 23 GiB",
    ),
    (
        "huge pages of the next boot",
        *(tuning.test_huge_pages_leave_memory_to_programs, (TUNING,)),
        saying_here(SYSCTL, "# /etc/sysctl.d/99-h.conf\nvm.nr_hugepages=8192\n"),
        "huge pages: /etc/sysctl.d/99-h.conf reserves 16 of 23 GiB",
    ),
    (
        "swap",
        *(tuning.test_swap_stays_off, (NO_SWAP,)),
        holding("/proc/swaps", "Filename Type\n/swap.img file\n"),
        "in use: /swap.img",
    ),
    (
        "swap at the next boot",
        *(tuning.test_swap_stays_off, (NO_SWAP,)),
        saying_here("systemctl is-enabled swap.target", "static\n"),
        "the next boot may start swap.target (static)",
    ),
    (
        "weights that all can write",
        *(weights.test_nobody_else_can_change_the_weights, ("weights",)),
        saying_here("find /models", "/models\n"),
        "writable by everybody: /models",
    ),
    (
        "the installed tool changed",
        *(weights.test_the_installed_program_is_as_the_wheel_brought_it, ("weights",)),
        saying_here("python3 -I -c", '["/opt/sm120/venv/x.py was changed"]\n'),
        "not as installed: /opt/sm120/venv/x.py was changed",
    ),
    (
        "a truncated package of a rollback",
        *(driver.test_the_packages_to_go_back_to_are_whole, ()),
        saying_here(f"sha256sum {KEPT}", f"{'1' * 64}  {KEPT}/nvidia-open.deb\n"),
        "missing or damaged: nvidia-open 595.58.03-1",
    ),
    (
        "an emptied note of the driver before",
        *(driver.test_the_packages_to_go_back_to_are_whole, ()),
        holding(f"{KEPT}/before.json", ""),
        f"{KEPT}/before.json is not the note that the role wrote",
    ),
    (
        "no note of the driver that works",
        *(driver.test_the_packages_to_go_back_to_are_whole, ()),
        holding(f"{KEPT}/working.json", None),
        f"{KEPT}/working.json is missing",
    ),
    (
        "DKMS without autoinstall",
        *(driver.test_dkms_builds_it_for_each_new_kernel, ()),
        holding("/etc/dkms/nvidia.conf", 'AUTOINSTALL="no"\n'),
        "/etc/dkms/nvidia.conf has AUTOINSTALL=no",
    ),
    (
        "DKMS's flag against it",
        *(driver.test_dkms_builds_it_for_each_new_kernel, ()),
        holding("/etc/dkms/no-autoinstall", ""),
        "/etc/dkms/no-autoinstall switches it off",
    ),
]


@pytest.mark.parametrize(
    ("check", "given", "host", "why"), [pytest.param(*r[1:], id=r[0]) for r in BREAKS]
)
def test_what_was_planted_breaks_the_promise_and_is_named(
    check: Any, given: tuple[Any, ...], host: FakeHost, why: str, key: Path
) -> None:
    filled = [weights_with(key) if g == "weights" else g for g in given]
    check(HERE, *filled)
    with pytest.raises(Broken) as error:
        check(host, *filled)
    assert why in error.value.why


def test_what_a_site_may_set_is_no_break() -> None:
    LIMITED(holding(DROP_IN, "[Service]\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\n"), RUNTIME)
    LIMITED(holding(DROP_IN, "[Service]\nEnvironment=HTTP_PROXY=http://p\n"), RUNTIME)
    asked = runtime.test_the_private_registry_is_asked_over_tls_only
    asked(holding("/etc/docker/daemon.json", '{"insecure-registries": ["other:5000"]}'), RUNTIME)
    unit = "/etc/systemd/system/x.service:ExecStart=/sbin/sysctl -w vm.swappiness=0\n"
    tuning.test_nothing_started_at_boot_sets_the_kernel_knobs(saying_here(GREP, unit), TUNING)
    with pytest.raises(NotApplicable):
        tuning.test_swap_stays_off(holding("/proc/swaps", "F\n/swap.img file\n"), TUNING)
    with pytest.raises(Undecided):
        registry.test_its_certificates_are_those_it_was_given(
            holding(registry.NOTE, None), REGISTRY
        )


@pytest.mark.parametrize(
    ("choice", "kernel"),
    [
        ("", "6.8.0-11-generic"),
        ("1>1", "5.10.0-8-amd64"),
        ("advanced>old", "5.10.0-8-amd64"),
        ("Advanced options>Debian, with Linux 5.10.0-8-amd64", "5.10.0-8-amd64"),
        ("advanced", "6.8.0-11-generic"),
        ("2", None),
        ("1>7", None),
        ("gone", None),
    ],
)
def test_the_entry_that_grub_starts_is_found_by_number_title_and_id(
    choice: str, kernel: str | None
) -> None:
    assert chosen_kernel(MENU.format("0"), choice) == kernel


def cpio(name: str, data: bytes) -> bytes:
    fields = (1, 0o100644, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % x for x in fields) + name.encode() + b"\0"
    head += b"\0" * (-len(head) % 4)
    return head + data + b"\0" * (-len(data) % 4)


def test_modprobes_files_are_read_out_of_an_initramfs_behind_its_microcode(tmp_path: Path) -> None:
    early = cpio("kernel/x86/microcode/AuthenticAMD.bin", b"123") + cpio("TRAILER!!!", b"")
    early += b"\0" * (-len(early) % 512)
    main = cpio("etc/modprobe.d/x.conf", b"options a b=0\n")
    main += cpio("usr/lib/modules/6.8/updates/dkms/nvidia.ko.xz", b"ELF") + cpio("TRAILER!!!", b"")
    path = tmp_path / "initrd"
    path.write_bytes(early + gzip.compress(main))
    command = [sys.executable, "-c", READ_INITRAMFS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    parts = done.stdout.split("\x1e")[1:]
    assert parts[0].startswith("/etc/modprobe.d/x.conf\noptions a b=0\n")
    assert [x.strip() for x in parts[1:]] == ["driver", "end"]


def test_a_file_of_the_tool_that_was_changed_added_or_removed_is_named(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    (site / "pipeline").mkdir(parents=True)
    (site / "x.dist-info").mkdir()
    files = {"pipeline/a.py": b"a", "pipeline/b.py": b"b", "pipeline/c.py": b"c"}
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            (site / name).write_bytes(data)
    rows = [*files, "x.dist-info/RECORD"]
    (site / "x.dist-info/RECORD").write_text("".join(f"{n},,\n" for n in rows))

    def changed() -> list[str]:
        command = [sys.executable, "-I", "-c", weights.CHANGED, str(tmp_path), "x.whl"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [x.removeprefix(f"{site}/") for x in json.loads(done.stdout)]

    assert changed() == []
    (site / "pipeline/a.py").write_bytes(b"other")
    (site / "pipeline/b.py").unlink()
    (site / "evil.pth").write_text("import evil\n")
    assert changed() == [
        *("evil.pth is of no package", "pipeline/a.py was changed", "pipeline/b.py is missing"),
    ]

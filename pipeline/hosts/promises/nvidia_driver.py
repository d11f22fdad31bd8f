"""The locked driver with open kernel modules, loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pipeline.core.known import unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import DriverPromise
from pipeline.hosts.lock_model import TargetLock
from pipeline.hosts.promises import boot, checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

_LOADED = "/proc/driver/nvidia/version"
_MODULES = {"nvidia", "nvidia_uvm"}
ROLE_FILES = Path(__file__).resolve().parents[3] / "ansible" / "roles" / "nvidia_driver" / "files"
_KEPT = "/var/lib/sm120/packages/driver"
# modules that systemd or the initramfs load by name, whatever is blacklisted
_LOADED_BY_NAME = (
    *("/etc/modules", "/etc/initramfs-tools/modules"),
    *(f"{p}/modules-load.d/*.conf" for p in ("/etc", "/run", "/usr/lib")),
)
# a module's own settings, and then those of the site, which DKMS reads after them
_DKMS = ("/usr/src/nvidia-[0-9]*/dkms.conf", "/etc/dkms/nvidia.conf", "/etc/dkms/nvidia-*.conf")
# GRUB_DEFAULT as GRUB's settings files have it
_GRUB_DEFAULT = (
    "for f in /etc/default/grub /etc/default/grub.d/*.cfg; do"
    ' [ ! -e "$f" ] || . "$f" >/dev/null 2>&1; done; printf %s "$GRUB_DEFAULT"'
)
_BUILD = "Look at `dkms status` and `dmesg | grep -i nvrm`, then reboot."


def locked_driver(lock: TargetLock) -> str:
    """580.95.05-0ubuntu1 is 580.95.05."""
    pins = {pin.name: pin.version for pin in lock.driver.debs}
    # the driver's own version has neither epoch nor revision
    return re.sub(r"^\d+:|-[^-]*$", "", pins[lock.driver.packages[0]])


def test_the_locked_driver_is_the_loaded_one(host: Host, lock: TargetLock) -> None:
    """Installed is not loaded."""
    want = locked_driver(lock)
    require(host.file(_LOADED).exists, f"no driver is loaded; {want} is locked", _BUILD)
    first = checks.text_of(host, _LOADED).splitlines()[0]
    require(want in first.split(), f"loaded is `{first}`, locked {want}", _BUILD)


@checks.known_by("open module")
def test_the_open_kernel_modules_are_loaded(facts: HostFacts) -> None:
    """Blackwell runs with no others."""
    require(facts.driver.is_open, "the loaded module is the proprietary one", _BUILD)


def test_the_programs_are_of_the_same_version(host: Host, lock: TargetLock) -> None:
    """A library of another version ends every program with `Driver/library version mismatch`."""
    done = host.run("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    versions = sorted(set(done.stdout.split()))
    if done.rc != 0 or not versions:
        message = ((done.stdout + done.stderr).strip() or "no output").splitlines()[0]
        if "mismatch" in message:
            fix = "Reboot, so that module and library are one version again."
            raise checks.Broken(message, fix)
        raise checks.Undecided(f"nvidia-smi: {message}")
    good = versions == [locked_driver(lock)]
    require(good, f"nvidia-smi reports {', '.join(versions)}", _BUILD)


def test_nouveau_is_kept_away(host: Host) -> None:
    """Now and at the next boot."""
    want = "# Written by the role nvidia_driver.\nblacklist nouveau\noptions nouveau modeset=0\n"
    checks.require_text(host, "/etc/modprobe.d/sm120-nouveau.conf", want)
    loaded = host.run("grep -c '^nouveau ' /proc/modules").stdout.strip()
    require(loaded in ("", "0"), "nouveau is loaded", "Reboot the host.")
    wrong = [
        path
        for path, text in checks.texts_in(host, *_LOADED_BY_NAME).items()
        if any(line.split()[:1] == ["nouveau"] for line in text.splitlines())
    ]
    wrong += [
        f"booted with {a}"
        for a in checks.kernel_arguments(host)
        if a.startswith("modules-load=") and "nouveau" in a.partition("=")[2].split(",")
    ]
    # `softdep nvidia pre: nouveau` and `alias pci:v000010DE* nouveau`
    wrong += [
        f"{row.path} ({row.command} {row.module})"
        for row in boot.module_settings(host)
        if row.command in ("softdep", "alias", "install") and "nouveau" in row.rest.split()
    ]
    fix = "Take nouveau out of it (a kernel argument: out of GRUB's settings), then reboot."
    require_none(wrong, "the next boot loads nouveau by", fix)


def test_nothing_keeps_its_modules_from_loading(host: Host) -> None:
    """A line in any of modprobe's folders, or an argument of the kernel's command line."""
    wrong = []
    for row in boot.module_settings(host):
        # without its firmware the open module finds no card
        no_firmware = row.options.get("NVreg_EnableGpuFirmware") == "0" and row.command == "options"
        # `install nvidia modprobe …` still loads it; /bin/false does not
        other_program = row.command == "install" and "modprobe" not in row.rest
        blocks = row.command == "blacklist" or other_program or no_firmware
        if blocks and row.module in _MODULES:
            wrong.append(f"{row.path}: {row.command} {row.module} {row.rest}".strip())
    arguments = [a.partition("=") for a in checks.kernel_arguments(host)]
    wrong += [
        f"booted with {name}={value}"
        for name, _, value in arguments
        if name in ("modprobe.blacklist", "module_blacklist") and _MODULES & set(value.split(","))
    ]
    fix = "Remove it from that file (a kernel argument: from GRUB's settings), then reboot."
    require_none(wrong, "blocked by", fix)


def test_the_driver_stays_initialised_between_jobs(host: Host) -> None:
    """Without it settings are forgotten whenever the last program ends."""
    checks.require_unit(host, "nvidia-persistenced")
    checks.require_untouched_unit(host, "nvidia-persistenced.service")


def test_every_card_is_in_persistence_mode(facts: HostFacts) -> None:
    """As the cards report: the daemon may run with persistence mode switched off."""
    skip_unless(facts.pci.gpus, "no GPU is on the bus of this host")
    modes = {f"GPU {g.index}": g.persistence for g in checks.known(facts.gpus)}
    checks.require_known(modes.values() or [unknown("no card answers")])
    fix = "systemctl restart nvidia-persistenced; `systemctl cat` of it shows its options."
    require_none([n for n, mode in modes.items() if not mode], "the mode is off", fix)


def test_dkms_can_build_it_for_the_running_kernel(host: Host, wanted: DriverPromise) -> None:
    """After a kernel update there would be no module."""
    checks.require_packages(host, ["dkms", wanted.headers])


def test_dkms_builds_it_for_each_new_kernel(host: Host) -> None:
    """Automatically: else the host comes back from an update without its GPUs."""
    # the flag that DKMS's own service and hook of kernels look for
    flag = "/etc/dkms/no-autoinstall"
    require(not host.file(flag).exists, f"{flag} switches it off", f"rm {flag}")
    values = [
        (path, value)
        for path, text in checks.texts_in(host, *_DKMS).items()
        for value in re.findall(r"^\s*AUTOINSTALL=[\"']?([^\"'\s#]*)", text, re.M)
    ]
    off = [f"{p} has AUTOINSTALL={v}" for p, v in values[-1:] if v.lower() not in ("yes", "true")]
    require_none(off, "DKMS builds nothing by itself", "Take that line out of the file.")
    hook = "/etc/kernel/postinst.d/dkms"
    lost = host.run(f"dpkg -L dkms | grep -qx {hook} && ! test -x {hook}").rc == 0
    fix = f"apt-get install --reinstall -o Dpkg::Options::=--force-confmiss dkms; chmod 755 {hook}"
    require(not lost, f"{hook}, which builds it with a kernel's installation, is off", fix)


def test_the_packages_to_go_back_to_are_whole(host: Host) -> None:
    """Of the working driver and the one before, by the digests of their locks."""
    notes = checks.texts_in(host, f"{_KEPT}/working.json", f"{_KEPT}/before.json")
    working = f"{_KEPT}/working.json"
    require(working in notes, f"{working} is missing: `sm120 host rollback` has no way back")
    lines = host.run(f"sha256sum {_KEPT}/*.deb 2>/dev/null").stdout.splitlines()
    have = {line.split()[0] for line in lines if line.strip()}
    lost = []
    for path, text in notes.items():
        try:
            pins = json.loads(text)["pins"]
            lost += [f"{p['name']} {p['version']}" for p in pins if p["sha256"] not in have]
        except (ValueError, KeyError, TypeError):
            fix = f"rm {path}, then run the playbook; it notes the driver that works now."
            raise checks.Broken(f"{path} is not the note that the role wrote", fix) from None
    fix = (
        "Run the playbook: it brings what the lock names. Packages of the driver before are gone "
        f"where no mirror has them; then rm {_KEPT}/before.json."
    )
    require_none(lost, "missing or damaged", fix)


def test_the_headers_that_follow_updates_are_installed(host: Host) -> None:
    """linux-headers-generic for linux-image-generic: else the next kernel has no driver."""
    script = (ROLE_FILES / "following_headers.sh").read_text(encoding="utf-8")
    # the role's own script, so that both mean the same packages
    names = host.run("/bin/sh -c %s", script).stdout.split()
    skip_unless(names, "no kernel of this host follows updates")
    checks.require_packages(host, names)


def test_the_kernel_that_boots_next_has_the_driver(host: Host, lock: TargetLock) -> None:
    """After an update with a kernel but no headers, the host comes back without GPUs."""
    files = host.run("ls -v /boot").stdout.split()
    kernels = [f.removeprefix("vmlinuz-") for f in files if f.startswith("vmlinuz-")]
    grub = str(host.run("cat /boot/grub/grub.cfg").stdout)
    lines = host.run("grub-editenv /boot/grub/grubenv list 2>/dev/null").stdout.splitlines()
    env = dict(line.partition("=")[::2] for line in lines)
    made = [x for x in re.findall(r'set default="([^"]*)"', grub) if x != "${next_entry}"]
    setting = str(host.run("/bin/sh -c %s", _GRUB_DEFAULT).stdout).strip()
    # what GRUB will start now and after the next update-grub, by where that is written
    written = {"/boot/grub/grub.cfg": made[-1] if made else "", "GRUB_DEFAULT": setting}
    saved, means_saved = env.get("saved_entry", ""), ("saved", "${saved_entry}")
    choices = {where: saved if x in means_saved else x for where, x in written.items()}
    if env.get("next_entry"):
        choices = {"next_entry of grubenv": env["next_entry"]}
    booted: dict[str, str] = {}
    for where, choice in choices.items():
        kernel = boot.chosen_kernel(grub, choice)
        if kernel:
            booted[kernel] = f" (by {where})" if choice not in ("", "0") else ""
        elif choice not in ("", "0"):
            fix = "Remove GRUB_DEFAULT (`grub-editenv - unset saved_entry`), then update-grub."
            raise checks.Broken(
                f"{where} chooses `{choice}`, and GRUB's menu has no such kernel", fix
            )
    skip_unless(booted or kernels, "there is no kernel in /boot")
    for kernel, where in (booted or {kernels[-1]: ""}).items():
        done = host.run("/sbin/modinfo --set-version %s --field version nvidia", kernel)
        # 127, of the shell: there is no such program
        checks.undecided_unless(done.rc != 127, "modinfo is not installed")
        version, want = done.stdout.strip(), locked_driver(lock)
        fix = f"apt-get install linux-headers-{kernel}, look at `dkms status`, do not reboot yet."
        has = f"driver {version}" if version else "no NVIDIA driver"
        require(version == want, f"{kernel}{where} has {has}, locked is {want}", fix)


def test_no_other_driver_is_installed_beside_it(host: Host, lock: TargetLock) -> None:
    """Two branches at once overwrite each other's libraries."""
    form = "'${Package} ${db:Status-Status}\\n'"
    output = host.run(f"dpkg-query --show --showformat {form} 'nvidia-driver-*' nvidia-open").stdout
    have = [x.split()[0] for x in output.splitlines() if x.endswith(" installed")]
    ours = {pin.name for pin in lock.driver.debs}
    others = [n for n in have if n not in ours]
    fix = f"apt-get purge {' '.join(others)}; then run the playbook again and reboot."
    require_none(others, "also installed", fix)

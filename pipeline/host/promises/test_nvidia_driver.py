"""The locked driver with open kernel modules, loaded."""

from __future__ import annotations

import re

from pipeline.host.facts import HostFacts
from pipeline.host.fleet.promised import DriverPromise
from pipeline.host.promises.answers import Broken, Unsure, known_by, moot, require, require_none
from pipeline.host.promises.look import Host, require_packages, require_text, require_unit, text_of
from pipeline.lock.host_model import TargetLock

_LOADED = "/proc/driver/nvidia/version"
_BUILD = "Look at `dkms status` and `dmesg | grep -i nvrm`, then reboot."


def locked_driver(lock: TargetLock) -> str:
    """580.95.05-0ubuntu1 is 580.95.05."""
    pins = {pin.name: pin.version for pin in lock.driver.debs}
    return re.sub(r"^\d+:|-[^-]*$", "", pins[lock.driver.packages[0]])


def test_the_locked_driver_is_the_loaded_one(host: Host, lock: TargetLock) -> None:
    """Installed is not loaded."""
    want = locked_driver(lock)
    if not host.file(_LOADED).exists:
        raise Broken(f"no driver is loaded; {want} is locked", _BUILD)
    first = text_of(host, _LOADED).splitlines()[0]
    require(want in first.split(), f"loaded is `{first}`, locked {want}", _BUILD)


@known_by("open module")
def test_the_open_kernel_modules_are_loaded(facts: HostFacts) -> None:
    """Blackwell runs with no others."""
    require(facts.driver.is_open, "the loaded module is the proprietary one", _BUILD)


def test_the_programs_are_of_the_same_version(host: Host, lock: TargetLock) -> None:
    """A library of another version ends every program with `Driver/library version mismatch`."""
    said = host.run("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    found = sorted(set(said.stdout.split()))
    if said.rc != 0 or not found:
        first = (said.stdout + said.stderr).strip().splitlines()[:1]
        words = first[0] if first else "says nothing"
        if "mismatch" in words:
            raise Broken(words, "Reboot, so that module and library are one version again.")
        raise Unsure(f"nvidia-smi: {words}")
    require(found == [locked_driver(lock)], f"nvidia-smi says {', '.join(found)}", _BUILD)


def test_nouveau_is_kept_away(host: Host) -> None:
    """Now and at the next boot."""
    want = "# Written by the role nvidia_driver.\nblacklist nouveau\noptions nouveau modeset=0\n"
    require_text(host, "/etc/modprobe.d/sm120-nouveau.conf", want)
    loaded = host.run("grep -c '^nouveau ' /proc/modules").stdout.strip()
    require(loaded in ("", "0"), "nouveau is loaded", "Reboot the host.")


def test_the_driver_stays_initialised_between_jobs(host: Host) -> None:
    """Without it settings are forgotten whenever the last program ends."""
    require_unit(host, "nvidia-persistenced")


def test_dkms_can_build_it_for_the_running_kernel(host: Host, wanted: DriverPromise) -> None:
    """After a kernel update there would be no module."""
    require_packages(host, ["dkms", wanted.headers])


def test_the_kernel_that_boots_next_has_the_driver(host: Host, lock: TargetLock) -> None:
    """An update brought a kernel, and not its headers: the host comes back without its GPUs."""
    files = host.run("ls -v /boot").stdout.split()
    kernels = [f.removeprefix("vmlinuz-") for f in files if f.startswith("vmlinuz-")]
    if not kernels:
        moot("there is no kernel in /boot")
    said = host.run("/sbin/modinfo --set-version %s --field version nvidia", kernels[-1])
    if said.rc == 127:
        raise Unsure("there is no modinfo to ask")
    found, want = said.stdout.strip(), locked_driver(lock)
    cure = f"apt-get install linux-headers-{kernels[-1]}, look at `dkms status`, do not reboot yet."
    has = f"driver {found}" if found else "no NVIDIA driver"
    require(found == want, f"{kernels[-1]} has {has}, locked is {want}", cure)


def test_no_other_driver_is_installed_beside_it(host: Host, lock: TargetLock) -> None:
    """Two branches at once overwrite each other's libraries."""
    form = "'${Package} ${db:Status-Status}\\n'"
    said = host.run(f"dpkg-query --show --showformat {form} 'nvidia-driver-*' nvidia-open").stdout
    have = [x.split()[0] for x in said.splitlines() if x.endswith(" installed")]
    ours = {pin.name for pin in lock.driver.debs}
    require_none([n for n in have if n not in ours], "also installed")

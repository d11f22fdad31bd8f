"""Captures a machine: files and the output of a few programs, as one JSON value.

Needs only the standard library, so that it also runs on a host without this package:

    python3 pipeline/hosts/facts/capture.py OUT.json

It changes nothing, contacts no server, and gives every program a time limit. What cannot be read is
recorded with the reason.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from glob import glob as paths_like
from pathlib import Path
from typing import Any

# of one file or output; a kernel log on a machine in trouble grows without end
_LIMIT_BYTES = 8 * 1024 * 1024
_PIECE_BYTES = 64 * 1024
# nvidia-smi takes seconds on sixteen cards and never returns on a driver that hangs
_TIME_LIMIT_S = 30.0
# for a killed program to be gone
_GRACE_S = 5.0
# programs that ignored SIGKILL; kept referenced, so that Python does not warn about the children
_STUCK: dict[str, subprocess.Popen[bytes]] = {}

FILES = (
    # becomes a digest in the facts
    "/etc/machine-id",
    "/etc/nccl.conf",
    "/etc/os-release",
    "/proc/cmdline",
    "/proc/cpuinfo",
    # registry keys are read here: sysfs shows NVreg_RegistryDwords empty even where it is set
    # (noonghunna/club-3090#885)
    "/proc/driver/nvidia/params",
    # names the loaded module, open or proprietary; modinfo would name the installed one
    "/proc/driver/nvidia/version",
    "/proc/meminfo",
    "/proc/modules",
    # the locked memory that a program started by this login may have
    "/proc/self/limits",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/vm/swappiness",
    # the reason why the role `health` took the host out of service
    "/run/sm120/out-of-service",
    "/sys/class/dmi/id/bios_version",
    "/sys/class/dmi/id/board_name",
    "/sys/class/dmi/id/board_vendor",
    "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor",
    # what /proc/cpuinfo tells about sockets and cores only on x86
    "/sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id",
    "/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list",
    "/sys/devices/system/node/node[0-9]*/cpulist",
    # whether the IOMMU translates is decided for each group
    "/sys/kernel/iommu_groups/*/type",
    "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    "/sys/module/pcie_aspm/parameters/policy",
)
# Captured even if missing: that a file does not exist is a fact too.
_ALWAYS = [path for path in FILES if "*" not in path and "[" not in path]

PCI = "/sys/bus/pci/devices"
_PCI_FIELDS = (
    *("vendor", "device", "class", "numa_node", "resource"),
    *("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"),
)

COMMANDS = {
    "nvidia-smi": ["nvidia-smi", "-q", "-x"],
    "nvidia-smi topo": ["nvidia-smi", "topo", "-m"],
    # a claim of the driver, see the model; peer-to-peer is proved by the function tests
    "nvidia-smi p2p": ["nvidia-smi", "topo", "-p2p", "r"],
    # -q -x does not name the compute capability
    "nvidia-smi capability": [
        *("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"),
    ],
    "lsblk": ["lsblk", "-J", "-b", "-o", "NAME,TYPE,SIZE,ROTA,MODEL,FSTYPE,MOUNTPOINTS"],
    "shm": ["df", "-B1", "--output=size", "/dev/shm"],  # noqa: S108
    "dmesg": ["dmesg"],
    # also Xids of earlier boots: a card that fell off the bus is often reset by a reboot
    "journal": [
        *("journalctl", "-k", "-b", "all", "--no-pager", "-o", "short-iso", "-n", "4000"),
        *("--grep", "NVRM|AER:|pcieport"),
    ],
    "docker": ["docker", "version", "--format", "{{.Server.Version}}"],
    "podman": ["podman", "version", "--format", "{{.Client.Version}}"],
    "nvidia-ctk": ["nvidia-ctk", "--version"],
    "nvcc": ["nvcc", "--version"],
    "ldconfig": ["ldconfig", "-p"],
}
# Of the kernel log only lines about the devices: the rest may be private and is not needed.
_KEPT_LINES = {
    "dmesg": re.compile(r"NVRM|[Nn]vidia|AER|pcieport|IOMMU|iommu|DMAR|AMD-Vi|free_mem_region"),
    "ldconfig": re.compile(r"libnccl|libcudart|libcuda\.so|libnvidia-ml"),
}


def take(root: str = "/") -> dict[str, Any]:
    """Capture the machine below `root`; programs run only where that is the running system."""
    live = Path(root).resolve() == Path("/")
    base = "" if live else str(root).rstrip("/")
    existing = {p[len(base) :] for pattern in FILES for p in _glob(base + pattern)}
    files = {path: _read(base + path) for path in sorted(existing | set(_ALWAYS))}
    links = {}
    for folder in _glob(f"{base}{PCI}/*"):
        place = folder[len(base) :]
        fields = {f: _read(f"{folder}/{f}") for f in _PCI_FIELDS if Path(folder, f).exists()}
        files.update({f"{place}/{f}": content for f, content in fields.items()})
        kind = fields.get("class", {}).get("text", "")
        # configuration space of bridges and displays only: that is where ACS and links are
        if kind.startswith(("0x0604", "0x03")):
            files[f"{place}/config"] = _read(f"{folder}/config")
        # the place of the device in the tree, and its IOMMU group
        for path in (folder, f"{folder}/iommu_group"):
            if Path(path).is_symlink():
                links[path[len(base) :]] = str(Path(path).readlink())
    return {
        "version": 1,
        "taken_at": int(time.time()),
        "root": "live" if live else "tree",
        "files": dict(sorted(files.items())),
        "links": links,
        "commands": {name: _output(name, argv, live) for name, argv in COMMANDS.items()},
    }


def _glob(pattern: str) -> list[str]:
    return sorted(paths_like(pattern))  # noqa: PTH207 -- patterns are absolute


def _read(path: str) -> dict[str, str]:
    data = b""
    try:
        with Path(path).open("rb", buffering=0) as file:
            # in small pieces: the kernel refuses a read of megabytes from /proc/sys
            while len(data) < _LIMIT_BYTES and (piece := file.read(_PIECE_BYTES)):
                data += piece
    except OSError as error:
        return {"unknown": error.strerror or str(error)}
    if path.endswith("/config"):
        return {"base64": base64.b64encode(data).decode()}
    return {"text": data.decode("utf-8", errors="replace")}


def _output(name: str, argv: list[str], live: bool) -> dict[str, Any]:
    """Return a program's output; never restart one that could not be killed."""
    if not live:
        return {"unknown": "not run: this is a copied tree"}
    program = shutil.which(argv[0])
    if program is None:
        return {"unknown": f"{argv[0]} is not installed"}
    late = f"{argv[0]} did not answer within {_TIME_LIMIT_S:g} s"
    stuck = f"{late}; it cannot be killed and was left behind"
    if program in _STUCK and _STUCK[program].poll() is None:
        return {"unknown": stuck}
    try:
        process = subprocess.Popen(
            argv,
            # untranslated: the output is parsed
            env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # a group of its own, so that it is killed with its children
            start_new_session=True,
        )
    except OSError as error:
        return {"unknown": error.strerror or str(error)}
    try:
        out, err = process.communicate(timeout=_TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            # a process inside a driver that hangs ignores even SIGKILL
            _STUCK[program] = process
            return {"unknown": stuck}
        finally:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        return {"unknown": late}
    text = out[:_LIMIT_BYTES].decode("utf-8", errors="replace")
    if kept := _KEPT_LINES.get(name):
        lines = [x for x in text.splitlines(keepends=True) if kept.search(x)]
        # the kernel logs its command line, which may hold secrets
        text = "".join(x for x in lines if "ommand line:" not in x)
    # the reason is short; some programs print all of their help after it
    errors = err[:2000].decode("utf-8", errors="replace")
    return {"code": process.returncode, "out": text, "err": errors}


if __name__ == "__main__":
    # in ASCII: the locale that SSH brings along decides how stdout would encode the rest
    text = json.dumps(take(), indent=1, sort_keys=True) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)

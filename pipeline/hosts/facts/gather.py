"""Turn a captured machine into facts: the cards, the kernel's view of them, the machine around.

smi.py reads the cards, pci.py the bus between them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.core.model import sha256_of
from pipeline.hosts.facts.model import Cpu, Disk, Driver, HostFacts, Kernel, Software, Topology, Xid
from pipeline.hosts.facts.pci import read_pci
from pipeline.hosts.facts.smi import plain_address, read_field, read_gpus, read_matrix
from pipeline.hosts.facts.source import Capture

# NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")
# Arguments of the boot loader may hold passwords, and facts are published.
_SECRET = re.compile(
    r"(?i)\b([\w.-]*(?:pass(?:word|wd)?|secret|token|key|credential)[\w.-]*)=(\S+)"
)
# ARM's kernels give numbers; these are lscpu's names for them
# (util-linux/util-linux, sys-utils/lscpu-arm.c)
_IMPLEMENTERS = {
    **{"0x41": "ARM", "0x46": "FUJITSU", "0x48": "HiSilicon", "0x4e": "NVIDIA"},
    **{"0x50": "APM", "0x51": "Qualcomm", "0x61": "Apple", "0xc0": "Ampere"},
}
_ARM_PARTS = {
    **{"0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse-N1"},
    **{"0xd40": "Neoverse-V1", "0xd42": "Cortex-A78AE", "0xd49": "Neoverse-N2"},
    **{"0xd4f": "Neoverse-V2", "0xd84": "Neoverse-V3", "0xd85": "Cortex-X925"},
    **{"0xd87": "Cortex-A725", "0xd8e": "Neoverse-N3"},
}


def gather_facts(capture: Capture, name: str | None = None) -> HostFacts:
    """Gather all facts; give a reason for each missing value."""
    vendor, board = (capture.text(f"/sys/class/dmi/id/board_{x}") for x in ("vendor", "name"))
    if isinstance(vendor, str) and isinstance(board, str):
        board = f"{vendor} {board}"
    # values are quoted as for a shell, see os-release(5)
    system = then(
        capture.text("/etc/os-release"), lambda x: _pairs(shlex.split(x, comments=True), "=")
    )
    limits, memory = capture.text("/proc/self/limits"), capture.text("/proc/meminfo")
    kib = _found(memory, r"(?m)^MemTotal:\s*(\d+)", "/proc/meminfo names no MemTotal")
    locked = r"(?m)^Max locked memory\s+(\S+)"
    toolkit, version = capture.output("nvidia-ctk"), r"version (\d+\.\d+\.\d+\S*)"
    out = capture.text("/run/sm120/out-of-service")
    # Without a name: a digest of the machine id, which tells machines apart and reveals nothing.
    # systemd asks programs not to publish the id itself, see machine-id(5).
    identity, named = capture.text("/etc/machine-id"), "unnamed"
    if isinstance(identity, str) and len(identity) >= 32:
        named = sha256_of(f"sm120-host:{identity}".encode())
    capabilities = then(
        capture.output("nvidia-smi capability"),
        lambda text: (
            {
                plain_address(address.strip()): capability.strip()
                for address, capability in (
                    x.split(",") for x in text.splitlines() if x.count(",") == 1
                )
            }
            or unknown("nvidia-smi names no compute capability")
        ),
    )
    return HostFacts(
        host=name or named,
        taken_at=capture.taken_at,
        board=board,
        bios=capture.text("/sys/class/dmi/id/bios_version"),
        memory_bytes=then(kib, lambda x: int(x) * 1024),
        gpus=then(capture.output("nvidia-smi"), lambda x: read_gpus(x, capabilities)),
        topology=Topology(
            links=then(capture.output("nvidia-smi topo"), read_matrix),
            peers_claimed=then(
                capture.output("nvidia-smi p2p"), lambda x: read_matrix(x, peers=True)
            ),
        ),
        driver=_driver(capture),
        pci=read_pci(capture),
        kernel=Kernel(
            release=capture.text("/proc/sys/kernel/osrelease"),
            # what follows `--` is for init, not for the kernel; --redact removes more
            command_line=then(
                capture.text("/proc/cmdline"),
                lambda x: _SECRET.sub(
                    r"\1=[secret]", re.sub(r"(?s) -- .*", " -- [arguments of init]", x)
                ),
            ),
            swappiness=then(capture.text("/proc/sys/vm/swappiness"), int),
            numa_balancing=then(capture.text("/proc/sys/kernel/numa_balancing"), int),
            memlock=_found(limits, locked, "/proc/self/limits names no locked memory"),
            shm_bytes=then(capture.output("shm"), lambda x: int(x.split()[-1])),
        ),
        cpu=_cpu(capture),
        disks=then(capture.output("lsblk"), _disks),
        software=Software(
            os=then(system, lambda x: f"{x['ID']} {x.get('VERSION_ID', 'rolling')}"),
            docker=then(capture.output("docker"), lambda x: x.split()[0]),
            podman=then(capture.output("podman"), lambda x: x.split()[0]),
            container_toolkit=_found(toolkit, version, "nvidia-ctk names no version"),
            cuda_toolkit=_found(
                capture.output("nvcc"), r"release (\d+\.\d+)", "nvcc names no release"
            ),
            nccl=then(
                capture.output("ldconfig"),
                lambda x: (
                    sorted(set(re.findall(r"libnccl.*=> (.*\S)", x)))
                    or unknown("the dynamic linker lists no libnccl")
                ),
            ),
            nccl_conf=capture.text("/etc/nccl.conf"),
        ),
        xids=_xids(capture),
        out_of_service=None if isinstance(out, Unknown) else out[:400],
    )


def _found(text: Known[str], pattern: str, otherwise: str) -> Known[str]:
    """The group of a pattern in a text."""
    matched = then(text, lambda x: re.findall(pattern, x))
    return then(matched, lambda groups: groups[0] if groups else unknown(otherwise))


def _pairs(lines: Iterable[str], sign: str) -> dict[str, str]:
    """Name and value of each line that has the sign between them."""
    pairs = (line.partition(sign) for line in lines if sign in line)
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _driver(capture: Capture) -> Driver:
    """Module, flavour and parameters, from where the driver itself keeps them."""
    log = capture.output("nvidia-smi")
    first = then(capture.text("/proc/driver/nvidia/version"), lambda x: x.splitlines()[0])
    # 580.126 and 595.58.03: of the loaded module, while nvidia-smi reports that of the library
    pattern, otherwise = r"\b(\d{3}\.\d+(?:\.\d+)?)\b", "/proc/driver/nvidia/version names none"
    version = _found(first, pattern, otherwise)
    if isinstance(version, Unknown):
        reported = then(log, lambda x: read_field(x, "driver_version"))
        version = version if isinstance(reported, Unknown) else reported
    parameters = then(
        capture.text("/proc/driver/nvidia/params"),
        lambda x: (
            _pairs(x.splitlines(), ":") or unknown("/proc/driver/nvidia/params holds no parameter")
        ),
    )
    hmm_off = capture.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    no_module = unknown("/proc/driver/nvidia/version names no kernel module")
    return Driver(
        version=version,
        cuda=then(log, lambda x: read_field(x, "cuda_version")),
        is_open=then(
            first, lambda x: "Open Kernel Module" in x if "Kernel Module" in x else no_module
        ),
        modules=then(
            capture.text("/proc/modules"), lambda x: sorted(re.findall(r"(?m)^nvidia\S*", x))
        ),
        parameters=parameters,
        registry=then(parameters, lambda x: _pairs(x["RegistryDwords"].split(";"), "=")),
        hmm_disabled=then(hmm_off, lambda x: {"Y": True, "1": True, "N": False, "0": False}[x]),
    )


def _xids(capture: Capture) -> Known[list[Xid]]:
    """Count errors by card and kind: from the journal if there is one, else since boot."""
    logs = [capture.output(name) for name in ("journal", "dmesg")]
    # only the first: dmesg repeats the journal, which would count errors twice
    text = next((x for x in logs if not isinstance(x, Unknown)), logs[-1])
    journal = capture.commands.get("journal")
    # journalctl --grep ends with 1 and without output when nothing matches: there are no Xids
    none = journal is not None and journal.code == 1 and not (journal.out.strip() or journal.err)
    if isinstance(text, Unknown):
        return [] if none else text
    times: Counter[tuple[int, str]] = Counter()
    last: dict[tuple[int, str], str] = {}
    # a failing card repeats one Xid thousands of times: count them, and keep the last text
    for match in _XID.finditer(text):
        key = (int(match[2]), match[1].lower())
        times[key] += 1
        last[key] = match[3].lstrip(", ").strip()[:200]
    return [
        Xid(code=key[0], address=key[1], times=times[key], last_message=last[key])
        for key in sorted(times)
    ]


def _disks(text: str) -> Known[list[Disk]]:
    """Disks that hold something, with their file systems."""

    def file_systems(device: dict[str, Any]) -> list[tuple[str, str]]:
        # lsblk before util-linux 2.37 has one `mountpoint`
        places = device.get("mountpoints") or [device.get("mountpoint")]
        own = [(p, device.get("fstype") or "unknown") for p in places if p]
        return own + [x for child in device.get("children", []) for x in file_systems(child)]

    return [
        Disk(
            name=device["name"],
            model=(device.get("model") or "").strip() or unknown("the disk names no model"),
            size_bytes=int(device["size"]),
            rotating=bool(device["rota"]),
            file_systems=dict(sorted(file_systems(device))),
        )
        for device in json.loads(text)["blockdevices"]
        # a card reader without a card is a disk of no size
        if device["type"] == "disk" and int(device["size"]) > 0
    ]


def _cpu(capture: Capture) -> Cpu:
    """From /proc/cpuinfo, the same on every distribution; CPUs other than x86 list less in it."""

    def read(pattern: str) -> dict[str, str]:
        texts = {p: capture.text(p) for p in capture.matching(f"/sys/devices/system/{pattern}")}
        return {path: text for path, text in texts.items() if isinstance(text, str)}

    def differing(*fields: str) -> int:
        """How many processors differ in these fields; 0 if one lacks them."""
        values = [tuple(x.get(name) for name in fields) for x in processors]
        return 0 if any(None in x for x in values) else len({*values})

    def maker(processor: dict[str, str]) -> str:
        code = processor.get("CPU implementer", "")
        return _IMPLEMENTERS.get(code) or (code and f"implementer {code}")

    info = capture.text("/proc/cpuinfo")
    blocks = [] if isinstance(info, Unknown) else re.split(r"\n\s*\n", info)
    processors = [x for b in blocks if "processor" in (x := _pairs(b.splitlines(), ":"))]
    first = processors[0] if processors else {}
    why = unknown("the kernel does not say it on this processor")
    if not processors:
        why = info if isinstance(info, Unknown) else unknown("/proc/cpuinfo names no processor")
    # more than one name where a machine has fast and small cores
    names = {}
    for processor in processors:
        part = processor.get("CPU part", "")
        known = _ARM_PARTS.get(part) if processor.get("CPU implementer") == "0x41" else None
        arm = f"{maker(processor)} {known or f'part {part}'}" if maker(processor) and part else ""
        names[processor.get("model name") or arm] = True
    packages = {*read("cpu/cpu*/topology/physical_package_id").values()}
    # by the threads of each core: core ids repeat on each socket, or in each cluster
    siblings = {*read("cpu/cpu*/topology/thread_siblings_list").values()}
    governors = sorted({*read("cpu/cpu*/cpufreq/scaling_governor").values()})
    nodes = {PurePosixPath(p).parent.name: x for p, x in read("node/node*/cpulist").items()}
    # -1: the firmware does not say
    sockets = differing("physical id") or (len(packages) if "-1" not in packages else 0)
    cores = differing("physical id", "core id") or len(siblings)
    return Cpu(
        name=" + ".join(filter(None, names)) or why,
        vendor=first.get("vendor_id") or maker(first) or why,
        family=then(first.get("cpu family") or why, int),
        model=then(first.get("model") or why, int),
        sockets=sockets or why,
        cores=cores or why,
        threads=len(processors) or why,
        microcode=first.get("microcode") or why,
        governors=governors or unknown("the kernel offers no frequency scaling here"),
        numa_nodes=nodes or unknown("the kernel names no NUMA node"),
    )

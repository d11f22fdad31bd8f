"""From a captured machine to its facts: the cards, the kernel's side of them, the machine around.

smi.py reads the cards, pci.py the bus between them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
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
_UNSAID = "the kernel does not say it on this processor"
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
_Processor = dict[str, str]  # its fields in /proc/cpuinfo


def gather(capture: Capture, name: str | None = None) -> HostFacts:
    """All facts; a value that is missing has its reason."""
    vendor, board = (capture.text(f"/sys/class/dmi/id/board_{x}") for x in ("vendor", "name"))
    if isinstance(vendor, str) and isinstance(board, str):
        board = f"{vendor} {board}"
    capabilities = then(capture.output("nvidia-smi capability"), _capabilities)
    memory = _group(r"(?m)^MemTotal:\s*(\d+)", "/proc/meminfo names no MemTotal")
    memlock = _group(r"(?m)^Max locked memory\s+(\S+)", "/proc/self/limits names no locked memory")
    toolkit = _group(r"version (\d+\.\d+\.\d+\S*)", "nvidia-ctk names no version")
    cuda = _group(r"release (\d+\.\d+)", "nvcc names no release")
    peers = then(capture.output("nvidia-smi p2p"), lambda x: read_matrix(x, peers=True))
    # Without a name: a digest of the machine id, which tells machines apart and reveals nothing.
    # systemd asks programs not to publish the id itself, see machine-id(5).
    identity, named = capture.text("/etc/machine-id"), "unnamed"
    if isinstance(identity, str) and len(identity) >= 32:
        named = sha256_of(f"sm120-host:{identity}".encode())
    return HostFacts(
        host=name or named,
        taken_at=capture.taken_at,
        board=board,
        bios=capture.text("/sys/class/dmi/id/bios_version"),
        memory_bytes=then(then(capture.text("/proc/meminfo"), memory), lambda x: int(x) * 1024),
        gpus=then(capture.output("nvidia-smi"), lambda x: read_gpus(x, capabilities)),
        topology=Topology(
            links=then(capture.output("nvidia-smi topo"), read_matrix), peers_claimed=peers
        ),
        driver=_driver(capture),
        pci=read_pci(capture),
        kernel=Kernel(
            release=capture.text("/proc/sys/kernel/osrelease"),
            command_line=then(capture.text("/proc/cmdline"), without_secrets),
            swappiness=then(capture.text("/proc/sys/vm/swappiness"), int),
            numa_balancing=then(capture.text("/proc/sys/kernel/numa_balancing"), int),
            memlock=then(capture.text("/proc/self/limits"), memlock),
            shm_bytes=then(capture.output("shm"), lambda x: int(x.split()[-1])),
        ),
        cpu=_cpu(capture),
        disks=then(capture.output("lsblk"), _disks),
        software=Software(
            os=then(capture.text("/etc/os-release"), _os),
            docker=then(capture.output("docker"), lambda x: x.split()[0]),
            podman=then(capture.output("podman"), lambda x: x.split()[0]),
            container_toolkit=then(capture.output("nvidia-ctk"), toolkit),
            cuda_toolkit=then(capture.output("nvcc"), cuda),
            nccl=then(capture.output("ldconfig"), _nccl),
            nccl_conf=capture.text("/etc/nccl.conf"),
        ),
        xids=read_xids(capture),
    )


def _capabilities(text: str) -> Known[dict[str, str]]:
    pairs = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    capabilities = {plain_address(a.strip()): b.strip() for a, b in pairs}
    return capabilities or unknown("nvidia-smi names no compute capability")


def _group(pattern: str, otherwise: str) -> Callable[[str], Known[str]]:
    """Reads the group of a pattern out of a text."""

    def read(text: str) -> Known[str]:
        match = re.search(pattern, text)
        return match[1] if match else unknown(otherwise)

    return read


def without_secrets(text: str) -> Known[str]:
    """A kernel command line without passwords and tokens; --redact removes more.

    What follows `--` is for init, not for the kernel, and is left out.
    """
    kernel, _, init = text.partition(" -- ")
    return _SECRET.sub(r"\1=[secret]", kernel) + (" -- [arguments of init]" if init else "")


def _os(text: str) -> Known[str]:
    # values are quoted as for a shell, see os-release(5)
    settings = (x for line in text.splitlines() for x in shlex.split(line, comments=True))
    pairs = dict(x.split("=", 1) for x in settings if "=" in x)
    return f"{pairs['ID']} {pairs.get('VERSION_ID', 'rolling')}"


def _nccl(text: str) -> Known[list[str]]:
    files = sorted({x.rpartition("=> ")[2].strip() for x in text.splitlines() if "libnccl" in x})
    return files or unknown("the dynamic linker lists no libnccl")


def _driver(capture: Capture) -> Driver:
    """Module, flavour and parameters, from where the driver itself keeps them."""

    # 580.126 and 595.58.03
    version_in = _group(
        r"\A.*?\b(\d{3}\.\d+(?:\.\d+)?)\b", "/proc/driver/nvidia/version names none"
    )

    def is_open(text: str) -> Known[bool]:
        if "Kernel Module" not in text.splitlines()[0]:
            return unknown("/proc/driver/nvidia/version names no kernel module")
        return "Open Kernel Module" in text.splitlines()[0]

    def parameters_in(text: str) -> Known[dict[str, str]]:
        pairs = [x.partition(":") for x in text.splitlines() if ":" in x]
        parameters = {name.strip(): value.strip().strip('"') for name, _, value in pairs}
        return parameters or unknown("/proc/driver/nvidia/params holds no parameter")

    def registry_in(parameters: dict[str, str]) -> Known[dict[str, str]]:
        pairs = [x.partition("=") for x in parameters["RegistryDwords"].split(";") if x.strip()]
        return {name.strip(): value.strip() for name, _, value in pairs}

    log = capture.output("nvidia-smi")
    loaded = capture.text("/proc/driver/nvidia/version")
    # the loaded module's own version; nvidia-smi reports that of the library
    version = then(loaded, version_in)
    if isinstance(version, Unknown):
        reported = then(log, lambda x: read_field(x, "driver_version"))
        version = version if isinstance(reported, Unknown) else reported
    parameters = then(capture.text("/proc/driver/nvidia/params"), parameters_in)
    modules = capture.text("/proc/modules")
    hmm_off = capture.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    return Driver(
        version=version,
        cuda=then(log, lambda x: read_field(x, "cuda_version")),
        is_open=then(loaded, is_open),
        modules=then(modules, lambda x: sorted(re.findall(r"(?m)^nvidia\S*", x))),
        parameters=parameters,
        registry=then(parameters, registry_in),
        hmm_disabled=then(hmm_off, lambda x: {"Y": True, "1": True, "N": False, "0": False}[x]),
    )


def read_xids(capture: Capture) -> Known[list[Xid]]:
    """Errors by card and kind: from the journal where it is kept, else since boot."""
    logs = [capture.output(name) for name in ("journal", "dmesg")]
    readable = [x for x in logs if not isinstance(x, Unknown)]
    journal = capture.commands.get("journal")
    # journalctl --grep ends with 1 and without output when nothing matches: there are no Xids
    none = journal is not None and journal.code == 1 and not (journal.out.strip() or journal.err)
    if not readable and not none:
        return logs[-1] if isinstance(logs[-1], Unknown) else unknown("no kernel log can be read")
    # the first alone: dmesg repeats what the journal has, and errors are counted
    return find_xids("\n".join(readable[:1]))


def find_xids(text: str) -> list[Xid]:
    """Every kind of Xid in a kernel log."""
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

    def field(name: str) -> Known[str]:
        return then(blocks, lambda b: b[0].get(name) or unknown(_UNSAID))

    def vendor(processors: Sequence[_Processor]) -> Known[str]:
        first = processors[0]
        maker = first.get("vendor_id") or _maker(first.get("CPU implementer", ""))
        return maker or unknown(_UNSAID)

    def sockets(processors: Sequence[_Processor]) -> Known[int]:
        packages = {*read("cpu/cpu*/topology/physical_package_id").values()}
        # -1: the firmware does not say
        known = len(packages) if "-1" not in packages else 0
        return _count(processors, "physical id") or known or unknown(_UNSAID)

    def cores(processors: Sequence[_Processor]) -> Known[int]:
        # by the threads of each core: core ids repeat on each socket, or in each cluster
        siblings = {*read("cpu/cpu*/topology/thread_siblings_list").values()}
        counted = _count(processors, "physical id", "core id")
        return counted or len(siblings) or unknown(_UNSAID)

    blocks = then(capture.text("/proc/cpuinfo"), _processors)
    governors = sorted({*read("cpu/cpu*/cpufreq/scaling_governor").values()})
    nodes = {PurePosixPath(p).parent.name: x for p, x in read("node/node*/cpulist").items()}
    return Cpu(
        name=then(blocks, _cpu_name),
        vendor=then(blocks, vendor),
        family=then(field("cpu family"), int),
        model=then(field("model"), int),
        sockets=then(blocks, sockets),
        cores=then(blocks, cores),
        threads=then(blocks, len),
        microcode=field("microcode"),
        governors=governors or unknown("the kernel offers no frequency scaling here"),
        numa_nodes=nodes or unknown("the kernel names no NUMA node"),
    )


def _processors(text: str) -> Known[list[_Processor]]:
    processors = []
    for block in re.split(r"\n\s*\n", text):
        pairs = [x.partition(":") for x in block.splitlines() if ":" in x]
        values = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in values:
            processors.append(values)
    return processors or unknown("/proc/cpuinfo names no processor")


def _cpu_name(processors: Sequence[_Processor]) -> Known[str]:
    """More than one name where a machine has fast and small cores."""
    names = {}
    for processor in processors:
        maker, part = processor.get("CPU implementer", ""), processor.get("CPU part", "")
        known = _ARM_PARTS.get(part) if maker == "0x41" else None
        arm = f"{_maker(maker)} {known or f'part {part}'}" if maker and part else ""
        names[processor.get("model name") or arm] = True
    return " + ".join(filter(None, names)) or unknown(_UNSAID)


def _maker(implementer: str) -> str:
    return _IMPLEMENTERS.get(implementer) or (implementer and f"implementer {implementer}")


def _count(processors: Sequence[_Processor], *fields: str) -> int:
    """How many differ in these fields; none where one lacks them."""
    if not all(name in x for x in processors for name in fields):
        return 0
    return len({tuple(x[name] for name in fields) for x in processors})

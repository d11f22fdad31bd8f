"""The machine around the cards: processors, disks, system, and what is installed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import PurePosixPath
from typing import Any

from pipeline.host.facts.model import Cpu, Disk, Software
from pipeline.host.facts.source import Capture
from pipeline.known import Known, then, unknown

_GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_NODES = "/sys/devices/system/node/node*/cpulist"


def read_cpu(capture: Capture) -> Cpu:
    """From /proc/cpuinfo, the same on every distribution; CPUs other than x86 list less there."""
    blocks = then(capture.text("/proc/cpuinfo"), _blocks)

    def field(name: str) -> Known[str]:
        return then(blocks, lambda b: b[0][name])

    return Cpu(
        name=field("model name"),
        vendor=field("vendor_id"),
        family=then(field("cpu family"), int),
        model=then(field("model"), int),
        sockets=then(blocks, lambda b: len({x["physical id"] for x in b})),
        # core ids repeat on each socket
        cores=then(blocks, lambda b: len({(x["physical id"], x["core id"]) for x in b})),
        threads=then(blocks, len),
        microcode=field("microcode"),
        governors=_governors(capture),
        numa_nodes=_nodes(capture),
    )


def _blocks(text: str) -> Known[list[dict[str, str]]]:
    processors = []
    for block in re.split(r"\n\s*\n", text):
        pairs = [x.partition(":") for x in block.splitlines() if ":" in x]
        values = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in values:
            processors.append(values)
    return processors or unknown("/proc/cpuinfo names no processor")


def _governors(capture: Capture) -> Known[list[str]]:
    paths = capture.matching(_GOVERNORS)
    governors = {x for x in map(capture.text, paths) if isinstance(x, str)}
    return sorted(governors) or unknown("the kernel offers no frequency scaling here")


def _nodes(capture: Capture) -> Known[dict[str, str]]:
    texts = {PurePosixPath(p).parent.name: capture.text(p) for p in capture.matching(_NODES)}
    nodes = {name: text for name, text in texts.items() if isinstance(text, str)}
    return nodes or unknown("the kernel names no NUMA node")


def read_memory(capture: Capture) -> Known[int]:
    """All memory the kernel has."""

    def total(text: str) -> Known[int]:
        # without that line the empty one raises below, which `then` takes for unknown
        line = next(x for x in [*text.splitlines(), ""] if x.startswith("MemTotal:") or not x)
        return int(line.split()[1]) * 1024

    return then(capture.text("/proc/meminfo"), total)


def read_disks(capture: Capture) -> Known[list[Disk]]:
    """Disks that hold something, with their file systems."""
    return then(capture.output("lsblk"), _disks)


def _disks(text: str) -> Known[list[Disk]]:
    devices: list[dict[str, Any]] = json.loads(text)["blockdevices"]
    # a card reader without a card is a disk of no size
    return [_disk(d) for d in devices if d["type"] == "disk" and int(d["size"]) > 0]


def _disk(device: dict[str, Any]) -> Disk:
    model = (device.get("model") or "").strip()
    return Disk(
        name=device["name"],
        model=model or unknown("the disk names no model"),
        size_bytes=int(device["size"]),
        rotating=bool(device["rota"]),
        file_systems=dict(sorted(_file_systems(device))),
    )


def _file_systems(device: dict[str, Any]) -> list[tuple[str, str]]:
    # lsblk before util-linux 2.37 has one `mountpoint`
    places = device.get("mountpoints") or [device.get("mountpoint")]
    here = [(p, device.get("fstype") or "unknown") for p in places if p]
    return here + [x for child in device.get("children", []) for x in _file_systems(child)]


def read_software(capture: Capture) -> Software:
    """System, container runtime, CUDA and NCCL."""
    return Software(
        os=then(capture.text("/etc/os-release"), _os),
        docker=then(capture.output("docker"), lambda x: x.split()[0]),
        podman=then(capture.output("podman"), lambda x: x.split()[0]),
        container_toolkit=then(capture.output("nvidia-ctk"), _toolkit),
        cuda_toolkit=then(capture.output("nvcc"), _release),
        nccl=then(capture.output("ldconfig"), _nccl),
        nccl_conf=capture.text("/etc/nccl.conf"),
    )


def _os(text: str) -> Known[str]:
    # values are quoted as for a shell, see os-release(5)
    settings = (x for line in text.splitlines() for x in shlex.split(line, comments=True))
    pairs = dict(x.split("=", 1) for x in settings if "=" in x)
    return f"{pairs['ID']} {pairs.get('VERSION_ID', 'rolling')}"


def _toolkit(text: str) -> Known[str]:
    match = re.search(r"version (\d+\.\d+\.\d+\S*)", text)
    return match[1] if match else unknown(f"nvidia-ctk names no version: {text[:100]}")


def _release(text: str) -> Known[str]:
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else unknown("nvcc names no release")


def _nccl(text: str) -> Known[list[str]]:
    files = sorted({x.rpartition("=> ")[2].strip() for x in text.splitlines() if "libnccl" in x})
    return files or unknown("the dynamic linker lists no libnccl")

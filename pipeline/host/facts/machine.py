"""The machine around the cards: memory, disks, system, and what is installed."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from pipeline.host.facts.model import Disk, Software
from pipeline.host.facts.source import Capture
from pipeline.known import Known, then, unknown


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

"""Captured machines to change: a real one with one H200, and made-up ones in its likeness.

data/h200.json and data/h200-probes.json are what capture.py and the probes wrote on a machine with
one NVIDIA H200 (driver 580.159.04), redacted by our own code. Everything else here is synthetic:
- cards of other kinds are the H200's own XML with other names and numbers put in;
- topologies follow the table in public reports of LMDeploy users with eight cards (NODE
  within a socket, SYS between them);
- registers of bridges follow the list of capabilities that `lspci -vvv` prints for a PLX 8749
  (Express at 0x68; extended 0x100, 0xfb4, 0x138, 0x148, 0xe00, ACS at 0xf24), values set by us.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.hosts.facts.capture import PCI
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.source import Capture, CapturedCommand, CapturedFile, read_capture

DATA = Path(__file__).parent / "data"
H200 = DATA / "h200.json"
ACS_ON, ACS_OFF = 0x001D, 0x0000
_WORKSTATION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


def h200() -> Capture:
    return read_capture(H200)


def changed(
    capture: Capture,
    *,
    files: Mapping[str, str | bytes] | None = None,
    outputs: dict[str, str] | None = None,
    links: dict[str, str] | None = None,
) -> Capture:
    """The same machine with other files, outputs and links."""
    new = {p: _file(v) for p, v in (files or {}).items()}
    commands = {n: CapturedCommand(code=0, out=t) for n, t in (outputs or {}).items()}
    return capture.model_copy(
        update={
            "files": {**capture.files, **new},
            "commands": {**capture.commands, **commands},
            "links": {**capture.links, **(links or {})},
        }
    )


def _file(value: str | bytes) -> CapturedFile:
    if isinstance(value, bytes):
        return CapturedFile(base64=base64.b64encode(value).decode())
    return CapturedFile(text=value)


def xml() -> str:
    return h200().commands["nvidia-smi"].out


def card_xml(address: str, **fields: str) -> str:
    """The H200's description with other values between its tags (the first of each tag)."""
    text = xml()
    card = text[text.index("<gpu id=") : text.index("</gpu>") + len("</gpu>")]
    values = {"pci_bus_id": address, "product_name": _WORKSTATION, **fields}
    for tag, value in values.items():
        head, _, rest = card.partition(f"<{tag}>")
        assert rest, tag
        card = f"{head}<{tag}>{value}</{tag}>{rest.partition(f'</{tag}>')[2]}"
    return card


def log_of(cards: list[str]) -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
        "<nvidia_smi_log><driver_version>595.58.03</driver_version>"
        f"<cuda_version>13.2</cuda_version><attached_gpus>{len(cards)}</attached_gpus>"
        f"{''.join(cards)}</nvidia_smi_log>"
    )


def registers(control: int | None, *, aspm: int = 0, length: int = 4096, rebar: int = 0) -> bytes:
    """A bridge's registers; None is a bridge without ACS. `rebar`: sizes of a card's window."""
    data = bytearray(4096)
    data[0x06] = 0x10
    data[0x34] = 0x40
    for at, kind, after in ((0x40, 0x01, 0x48), (0x48, 0x05, 0x68), (0x68, 0x10, 0xA4)):
        data[at], data[at + 1] = kind, after
    data[0xA4] = 0x0D
    data[0x68 + 0x10] = aspm
    chain = [(0x100, 0x03), (0xFB4, 0x01), (0x138, 0x04), (0x148, 0x02), (0xE00, 0x12)]
    if control is not None:
        chain.append((0xF24, 0x0D))
        struct.pack_into("<H", data, 0xF24 + 6, control)
    if rebar:
        chain.append((0xF40, 0x15))
        # of one window, the second one
        struct.pack_into("<II", data, 0xF40 + 4, rebar << 4, 1 << 5 | 1)
    for (at, kind), after in zip(chain, [*(a for a, _ in chain[1:]), 0], strict=True):
        struct.pack_into("<I", data, at, kind | 1 << 16 | after << 20)
    struct.pack_into("<Q", data, 0x104, 0x1122334455667788)
    return bytes(data[:length])


# the sizes of 256 MiB and 64 to 256 GiB, one bit each, from 1 MiB on
WINDOWS = 1 << 8 | 0b111 << 16


def windows(base: int, size: int = 1 << 38) -> str:
    """A card's windows: registers, memory and a third, each in two lines, as sysfs has them."""
    ends = [(0xE0000000, 0xE3FFFFFF), (base, base + size - 1), (base + size, base + size + 0xFFFF)]
    return "".join(
        f"{a:#018x} {b:#018x} {0x14220C:#018x}\n" + f"{0:#018x} " * 3 + "\n" for a, b in ends
    )


def blackwell(
    count: int = 2, control: int | None = ACS_OFF, iommu: str | None = None, **fields: str
) -> Capture:
    """Made up: some workstation cards, each behind a root port of its own."""
    cards, caps = [], []
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    wanted = {
        "product_architecture": "Blackwell",
        **{"current_power_limit": "600.00 W", "max_power_limit": "600.00 W"},
        **fields,
    }
    base = h200()
    gone = {p for p in base.files if p.startswith(PCI)}
    for i in range(count):
        address, port = f"0000:{i + 1:02x}:00.0", f"0000:00:{i + 1:02x}.1"
        cards.append(card_xml(f"0000{address.upper()}", **wanted))
        caps.append(f"0000{address.upper()}, 12.0")
        place = f"{PCI}/{address}"
        files |= {f"{place}/vendor": "0x10de\n", f"{place}/class": "0x030000\n"}
        files |= {f"{place}/device": "0x2bb1\n", f"{PCI}/{port}/vendor": "0x1022\n"}
        files |= {f"{PCI}/{port}/class": "0x060400\n"}
        links[place] = f"../../../devices/pci0000:00/{port}/{address}"
        if iommu:
            links[f"{place}/iommu_group"] = f"../../../../kernel/iommu_groups/{i}"
            files[f"/sys/kernel/iommu_groups/{i}/type"] = f"{iommu}\n"
    raw: dict[str, str | bytes] = dict(files)
    for i in range(count):
        raw[f"{PCI}/0000:00:{i + 1:02x}.1/config"] = registers(control)
        raw[f"{PCI}/0000:{i + 1:02x}:00.0/config"] = registers(None, rebar=WINDOWS)
        raw[f"{PCI}/0000:{i + 1:02x}:00.0/resource"] = windows(0x60_0000_0000 + (i << 40))
    raw["/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"] = "Y\n"
    raw["/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"] = "performance\n"
    raw["/proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build\n"
    )
    small = base.model_copy(
        update={"files": {p: s for p, s in base.files.items() if p not in gone}, "links": {}}
    )
    output = {
        "nvidia-smi": log_of(cards),
        "nvidia-smi capability": "\n".join(caps) + "\n",
        "nvidia-smi topo": matrix(count),
        "nvidia-smi p2p": matrix(count, word="OK"),
    }
    return changed(small, files=raw, outputs=output, links=links)


def matrix(count: int, word: str | None = None) -> str:
    """Synthetic, as `topo -m` prints it: NODE within the halves, SYS between them."""
    names = "\t".join(f"GPU{i}" for i in range(count))
    lines = [f"\t\x1b[4m{names}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    half = max(1, count // 2)
    for a in range(count):
        cells = [
            " X " if a == b else word or ("NODE" if a // half == b // half else "SYS")
            for b in range(count)
        ]
        lines.append(f"GPU{a}\t" + "\t".join(cells) + f"\t0-63,128-191\t{a // half}\t\tN/A")
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n"


def facts(capture: Capture | None = None, **more: Any) -> HostFacts:
    return gather_facts(capture or h200(), **more)

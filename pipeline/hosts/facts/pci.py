"""The bus as the kernel shows it: bridges above cards, their ACS and ASPM, read from the registers.

lspci and setpci read the same bytes; parsing them here needs neither program.
"""

from __future__ import annotations

import re
import struct
from pathlib import PurePosixPath

from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.hosts.facts.capture import PCI
from pipeline.hosts.facts.model import Bridge, IommuMode, Pci, PciGpu
from pipeline.hosts.facts.source import Capture

# Capability numbers of the PCI Express Base Specification.
_EXPRESS = 0x10
_ACS = 0x000D
_REBAR = 0x0015
# ACS control bits that send peer traffic through the root complex, where NCCL then hangs
# (vllm-project/vllm#33041, NVIDIA/nccl#2079); source validation and forwarding do no harm.
_REDIRECT = 0x0004 | 0x0008  # request redirect, completion redirect
_ASPM = {0: "off", 1: "L0s", 2: "L1", 3: "L0s L1"}


def extended_capability(config: bytes, wanted: int) -> Known[int | None]:
    """Where an extended capability begins, or None where the device has none."""
    if len(config) <= 0x100:
        return unknown(
            f"only {len(config)} bytes of its registers can be read (root can read 4096)"
        )
    # extended capabilities begin after the first 256 bytes
    at, seen = 0x100, set()
    while at:
        if at in seen or at % 4 or at + 4 > len(config):
            return unknown(f"its list of capabilities is broken at {at:#x}")
        seen.add(at)
        (head,) = struct.unpack_from("<I", config, at)
        if head in (0, 0xFFFFFFFF):
            return None if head == 0 else unknown("the device is gone: all ones")
        # a header: 16 bits of number, 4 of version, 12 of where the next one begins
        if head & 0xFFFF == wanted:
            return at
        at = head >> 20
    return None


def capability(config: bytes, wanted: int) -> Known[int | None]:
    """Where a capability of the first 256 bytes begins, or None."""
    # this bit of the status register: the device has a list of capabilities
    if len(config) < 0x40 or (not config[0x06] & 0x10):
        return None if len(config) >= 0x40 else unknown(f"only {len(config)} bytes can be read")
    # the lowest two bits of every pointer are reserved
    at, seen = config[0x34] & 0xFC, set()
    while at:
        if at in seen or at + 2 > len(config):
            return unknown(f"registers beyond byte {len(config)} cannot be read")
        seen.add(at)
        if config[at] == wanted:
            return at
        at = config[at + 1] & 0xFC
    return None


def acs_control(config: bytes) -> Known[int | None]:
    """The ACS control register, or None where there is no ACS."""
    at = extended_capability(config, _ACS)
    if at is None or isinstance(at, Unknown):
        return at
    if at + 8 > len(config):
        return unknown("its ACS registers are cut off")
    # after the header and the register of what the bridge could do
    return int(struct.unpack_from("<H", config, at + 6)[0])


def rebar_max(config: bytes) -> Known[int]:
    """The largest window that a card offers; 0 where it has no Resizable BAR.

    For each window a register of its sizes, bit 4 for 1 MiB, and one of control, whose bits 5 to 7
    in the first say how many windows there are (PCI Express Base Specification, Resizable BAR).
    """
    at = extended_capability(config, _REBAR)
    if at is None or isinstance(at, Unknown):
        return at or 0
    if at + 12 > len(config):
        return unknown("its Resizable BAR registers are cut off")
    windows = max(1, config[at + 8] >> 5 & 7)
    pairs = range(at + 4, min(at + 4 + 8 * windows, len(config) - 3), 8)
    sizes = [struct.unpack_from("<I", config, place)[0] >> 4 for place in pairs]
    # the highest bit counts
    return max((1 << 20) << (bits.bit_length() - 1) if bits else 0 for bits in sizes)


def aspm_of(config: bytes) -> Known[str]:
    """Which link sleep states are on."""
    at = capability(config, _EXPRESS)
    if isinstance(at, Unknown):
        return at
    if at is None or at + 0x12 > len(config):
        return unknown("no PCI Express registers can be read")
    # the Link Control register
    return _ASPM[config[at + 0x10] & 3]


def read_pci(capture: Capture) -> Pci:
    """Cards, the bridges above them, and how the machine treats both."""
    gpus = []
    for path in capture.matching(f"{PCI}/*/vendor"):
        place = PurePosixPath(path).parent
        # NVIDIA's displays; cards without a display output are 3D controllers, 0x0302
        kind = str(capture.text(f"{place}/class"))
        if capture.text(path) == "0x10de" and kind.startswith("0x03"):
            gpus.append(_gpu(capture, place.name))
    bridges = []
    for address in sorted({b for gpu in gpus for b in gpu.bridges}):
        config = capture.data(f"{PCI}/{address}/config")
        control = config if isinstance(config, Unknown) else acs_control(config)
        register = unknown("the bridge has no ACS") if control is None else control
        bridges.append(
            Bridge(
                address=address,
                has_acs=control if isinstance(control, Unknown) else control is not None,
                acs_control=then(register, lambda value: f"{value:#06x}"),
                acs_redirect=then(control or 0, lambda value: bool(value & _REDIRECT)),
                aspm=then(config, aspm_of),
            )
        )
    paths = capture.matching("/sys/kernel/iommu_groups/*/type")
    types = {PurePosixPath(p).parent.name: p for p in paths}
    groups = {g.iommu_group for g in gpus if not isinstance(g.iommu_group, Unknown)}
    # the mode is decided per group; without cards all groups count
    kinds = [capture.text(types[g]) for g in sorted((groups or set(types)) & set(types))]
    known = {k for k in kinds if not isinstance(k, Unknown)}
    iommu: Known[IommuMode] = "passthrough" if known == {"identity"} else "translated"
    if not types and not groups:
        has_devices = capture.matching(f"{PCI}/*/vendor")
        iommu = "off" if has_devices else unknown("no PCI device is visible")
    elif not known or len(known) < len(set(map(str, kinds))):
        iommu = unknown("the kind of an IOMMU group cannot be read")
    policy = capture.text("/sys/module/pcie_aspm/parameters/policy")
    # `[default] performance powersave`: the one in brackets
    chosen = then(policy, lambda x: re.findall(r"\[(.*?)\]", x))
    return Pci(
        iommu=iommu,
        aspm_policy=then(
            chosen, lambda x: x[0] if x else unknown(f"no policy is chosen: {policy}")
        ),
        gpus=gpus,
        bridges=bridges,
    )


def _gpu(capture: Capture, address: str) -> PciGpu:
    place = f"{PCI}/{address}"
    group = capture.links.get(f"{place}/iommu_group")
    # the path in sysfs leads from the root over all bridges to the card
    path = PurePosixPath(capture.links.get(place, "")).parts[:-1]

    # the first six lines are BARs; after them come the ROM and the windows of virtual functions
    lines = then(capture.text(f"{place}/resource"), lambda x: x.replace(";", "\n").splitlines()[:6])
    ends = then(lines, lambda x: [[int(n, 16) for n in line.split()] for line in x])
    # 64-bit BARs take two lines each, of which one is empty
    sizes = then(ends, lambda x: [last - first + 1 for first, last, _ in x if last])
    bases = then(ends, lambda x: [first for first, last, _ in x if last])
    node = then(capture.text(f"{place}/numa_node"), int)
    return PciGpu(
        address=address,
        device=capture.text(f"{place}/device"),
        numa_node=then(node, lambda n: n if n >= 0 else unknown("the firmware names no NUMA node")),
        width=then(capture.text(f"{place}/current_link_width"), int),
        width_max=then(capture.text(f"{place}/max_link_width"), int),
        # the second window: the first holds the registers
        bar1_bytes=then(sizes, lambda x: x[1] if x[1:] else unknown("no second memory window")),
        bar1_base=then(bases, lambda x: x[1] if x[1:] else unknown("no second memory window")),
        rebar_max_bytes=then(capture.data(f"{place}/config"), rebar_max),
        iommu_group=PurePosixPath(group).name if group else unknown("in no IOMMU group"),
        aspm=then(capture.data(f"{place}/config"), aspm_of),
        bridges=[part for part in reversed(path) if part.count(":") == 2],
    )

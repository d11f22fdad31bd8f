"""The processors: on x86 from /proc/cpuinfo alone, on others also from where they sit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from pipeline.host.facts.model import Cpu
from pipeline.host.facts.source import Capture
from pipeline.known import Known, Unknown, then, unknown

_GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_NODES = "/sys/devices/system/node/node*/cpulist"
_TOPOLOGY = "/sys/devices/system/cpu/cpu*/topology/"
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


def read_cpu(capture: Capture) -> Cpu:
    """From /proc/cpuinfo, the same on every distribution; CPUs other than x86 list less there."""
    blocks = then(capture.text("/proc/cpuinfo"), _blocks)

    def field(name: str) -> Known[str]:
        return then(blocks, lambda b: b[0].get(name) or unknown(_UNSAID))

    return Cpu(
        name=then(blocks, _name),
        vendor=then(blocks, _vendor),
        family=then(field("cpu family"), int),
        model=then(field("model"), int),
        sockets=then(blocks, lambda b: _count(b, ("physical id",)) or _sockets(capture)),
        # core ids repeat on each socket
        cores=then(blocks, lambda b: _count(b, ("physical id", "core id")) or _cores(capture)),
        threads=then(blocks, len),
        microcode=field("microcode"),
        governors=_governors(capture),
        numa_nodes=_nodes(capture),
    )


def _blocks(text: str) -> Known[list[_Processor]]:
    processors = []
    for block in re.split(r"\n\s*\n", text):
        pairs = [x.partition(":") for x in block.splitlines() if ":" in x]
        values = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in values:
            processors.append(values)
    return processors or unknown("/proc/cpuinfo names no processor")


def _name(processors: Sequence[_Processor]) -> Known[str]:
    # more than one where a machine has fast and small cores
    names = dict.fromkeys(x.get("model name") or _arm_name(x) for x in processors)
    return " + ".join(filter(None, names)) or unknown(_UNSAID)


def _arm_name(processor: _Processor) -> str:
    implementer, part = processor.get("CPU implementer"), processor.get("CPU part")
    if not implementer or not part:
        return ""
    known = _ARM_PARTS.get(part) if implementer == "0x41" else None
    return f"{_maker(implementer)} {known or f'part {part}'}"


def _vendor(processors: Sequence[_Processor]) -> Known[str]:
    first = processors[0]
    maker = first.get("vendor_id") or _maker(first.get("CPU implementer", ""))
    return maker or unknown(_UNSAID)


def _maker(implementer: str) -> str:
    return _IMPLEMENTERS.get(implementer) or (implementer and f"implementer {implementer}")


def _count(processors: Sequence[_Processor], fields: Sequence[str]) -> int:
    """How many differ in these fields; none where one lacks them."""
    if not all(name in x for x in processors for name in fields):
        return 0
    return len({tuple(x[name] for name in fields) for x in processors})


def _sockets(capture: Capture) -> Known[int]:
    packages = _different(capture, "physical_package_id")
    # -1: the firmware does not say
    return len(packages) if packages and "-1" not in packages else unknown(_UNSAID)


def _cores(capture: Capture) -> Known[int]:
    # by the threads of each core: core ids may begin again in each cluster
    return len(_different(capture, "thread_siblings_list")) or unknown(_UNSAID)


def _different(capture: Capture, name: str) -> set[str]:
    texts = map(capture.text, capture.matching(f"{_TOPOLOGY}{name}"))
    return {text for text in texts if not isinstance(text, Unknown)}


def _governors(capture: Capture) -> Known[list[str]]:
    paths = capture.matching(_GOVERNORS)
    governors = {x for x in map(capture.text, paths) if isinstance(x, str)}
    return sorted(governors) or unknown("the kernel offers no frequency scaling here")


def _nodes(capture: Capture) -> Known[dict[str, str]]:
    texts = {PurePosixPath(p).parent.name: capture.text(p) for p in capture.matching(_NODES)}
    nodes = {name: text for name, text in texts.items() if isinstance(text, str)}
    return nodes or unknown("the kernel names no NUMA node")

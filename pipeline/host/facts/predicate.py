"""The facts as a signed record carries them: few enough to read, each with what it rests on."""

from __future__ import annotations

from typing import Any

from pipeline.host.facts.model import Gpu, HostFacts
from pipeline.known import Known, Unknown, unknown
from pipeline.model import canonical_json, sha256_of


def facts_digest(facts: HostFacts) -> str:
    """The digest under which a record speaks of these facts, and a benchmark of this host."""
    return sha256_of(canonical_json(facts.model_dump(mode="json")))


def predicate(facts: HostFacts) -> dict[str, Any]:
    """The body of a host-facts statement."""
    return {
        "host": facts.host,
        "os": _out(facts.software.os),
        "kernel": _out(facts.kernel.release),
        "kernel_command_line": _out(facts.kernel.command_line),
        "cpu": _out(facts.cpu.name),
        "cpu_sockets": _out(facts.cpu.sockets),
        "cpu_cores": _out(facts.cpu.cores),
        "cpu_microcode": _out(facts.cpu.microcode),
        "memory_bytes": _out(facts.memory_bytes),
        "driver": _out(facts.driver.version),
        "driver_is_open": _out(facts.driver.is_open),
        "cuda_driver": _out(facts.driver.cuda),
        "container_runtime": _out(_runtime(facts)),
        "iommu": _out(facts.pci.iommu),
        "acs_redirect": _out(_redirect(facts)),
        "aspm": _out(facts.pci.aspm_policy),
        "peer_to_peer": _out(_peers(facts)),
        "nccl": _out(_nccl(facts)),
        "gpus": _out(facts.gpus)
        if isinstance(facts.gpus, Unknown)
        else [_gpu(g) for g in facts.gpus],
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": _out(gpu.name),
        "uuid": _out(gpu.uuid),
        "compute_capability": _out(gpu.compute_capability),
        "memory_bytes": _out(gpu.memory_bytes),
        "bar1_bytes": _out(gpu.bar1_bytes),
        "vbios": _out(gpu.vbios),
        "power_limit_w": _out(gpu.power.limit_w),
        "pcie_generation": _out(gpu.link.generation_max),
        "pcie_width": _out(gpu.link.width),
    }


def _out(value: object) -> Any:
    return value.model_dump() if isinstance(value, Unknown) else value


def _runtime(facts: HostFacts) -> Known[str]:
    found = {"docker": facts.software.docker, "podman": facts.software.podman}
    words = [f"{name} {v}" for name, v in found.items() if not isinstance(v, Unknown)]
    return ", ".join(words) if words else unknown("neither docker nor podman answers")


def _redirect(facts: HostFacts) -> Known[bool]:
    """True when any bridge above a card redirects; unknown when one could not be read."""
    said = [b.acs_redirect for b in facts.pci.bridges]
    if True in said:
        return True
    lost = next((x for x in said if isinstance(x, Unknown)), None)
    if lost is not None:
        return lost
    return False if said else unknown("no bridge lies above a card")


def _peers(facts: HostFacts) -> Known[str]:
    claimed = facts.topology.peers_claimed
    if isinstance(claimed, Unknown):
        return claimed
    if not claimed:
        return unknown("one card has no peer")
    return f"claimed by the driver: {', '.join(sorted(set(claimed.values())))}"


def _nccl(facts: HostFacts) -> Known[str]:
    found = facts.software.nccl
    return found if isinstance(found, Unknown) else ", ".join(found)

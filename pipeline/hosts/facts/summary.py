"""The facts that a signed statement carries: few enough to read; the record has the rest."""

from __future__ import annotations

from pipeline.artifacts.attest.names import HOST_FACTS
from pipeline.artifacts.attest.predicates import HostSummary
from pipeline.artifacts.attest.strict import as_model
from pipeline.core.known import Unknown, then, unknown
from pipeline.hosts.facts.model import HostFacts


def summarise(facts: HostFacts) -> HostSummary:
    """Make the predicate of a host-facts statement; refuse facts that do not fit."""
    software, claimed = facts.software, facts.topology.peers_claimed
    # either may run the engine; a signed statement names all that there are
    engines = {"docker": software.docker, "podman": software.podman}
    present = [f"{name} {v}" for name, v in engines.items() if not isinstance(v, Unknown)]
    # true when any bridge above a card redirects; unknown when one could not be read
    redirects = [b.acs_redirect for b in facts.pci.bridges]
    unread = next((x for x in redirects if isinstance(x, Unknown)), False)
    redirect = (
        True in redirects or unread if redirects else unknown("there is no bridge above a card")
    )
    # `nvidia-smi topo -p2p` reports OK also where the first all_reduce hangs: only a claim
    peers = then(claimed or unknown("there are not two cards"), lambda x: sorted(set(x.values())))
    cards = [
        {
            "name": gpu.name,
            "uuid": gpu.uuid,
            "compute_capability": gpu.compute_capability,
            "memory_bytes": gpu.memory_bytes,
            "bar1_bytes": gpu.bar1_bytes,
            "vbios": gpu.vbios,
            "power_limit_w": gpu.power.limit_w,
            # the most that card and slot can do: an idle card lowers its current generation
            "pcie_generation": gpu.link.generation_max,
            "pcie_width": gpu.link.width,
        }
        for gpu in ([] if isinstance(facts.gpus, Unknown) else facts.gpus)
    ]
    values = {
        "host": facts.host,
        "os": software.os,
        "kernel": facts.kernel.release,
        "kernel_command_line": facts.kernel.command_line,
        "cpu": facts.cpu.name,
        "cpu_sockets": facts.cpu.sockets,
        "cpu_cores": facts.cpu.cores,
        "cpu_microcode": facts.cpu.microcode,
        "memory_bytes": facts.memory_bytes,
        "driver": facts.driver.version,
        "driver_is_open": facts.driver.is_open,
        "cuda_driver": facts.driver.cuda,
        "container_runtime": ", ".join(present) or unknown("neither docker nor podman answers"),
        "iommu": facts.pci.iommu,
        "acs_redirect": redirect,
        "aspm": facts.pci.aspm_policy,
        "peer_to_peer": then(peers, lambda x: f"claimed by the driver: {', '.join(x)}"),
        "nccl": then(software.nccl, ", ".join),
        "gpus": facts.gpus if isinstance(facts.gpus, Unknown) else cards,
    }
    return as_model(HostSummary, values, HOST_FACTS, "the predicate", strict=True)

"""What a report shows of the machine, from its recorded facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.artifacts.attest.predicates import GpuSummary, HostSummary
from pipeline.core.known import Known, Unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.summary import summarise
from pipeline.serving.report.model import Fact, RunData

HOST = "Host"  # the one fact that is a name
_HARDWARE = (
    *(("host", HOST), ("cpu", "CPU"), ("cpu_sockets", "Sockets"), ("cpu_cores", "Cores")),
    *(("memory_bytes", "RAM"), ("iommu", "IOMMU"), ("acs_redirect", "ACS redirection")),
    *(("aspm", "ASPM"), ("peer_to_peer", "Peer to peer")),
)
_SOFTWARE = (
    *(("os", "OS"), ("kernel", "Kernel"), ("driver", "NVIDIA driver"), ("nccl", "NCCL")),
    *(("cuda_driver", "CUDA of the driver"), ("container_runtime", "Container runtime")),
)


def with_host(run: RunData, facts: HostFacts) -> RunData:
    """A run with the machine that its server ran on."""
    summary = summarise(facts)
    gpus = [] if isinstance(summary.gpus, Unknown) else summary.gpus
    # cards of one kind in one row: a kind is all that a number depends on
    kinds = Counter(_card(gpu) for gpu in gpus)
    cards = "; ".join(f"{number}x {kind}" for kind, number in kinds.items())
    client = [fact for fact in run.hardware if fact.name == "Client's machine"]
    totals = {
        f"GPU {index}": round(gpu.memory_bytes / 2**30, 2)
        for index, gpu in enumerate(gpus)
        if not isinstance(gpu.memory_bytes, Unknown)
    }
    memory = [m.model_copy(update={"total": totals.get(m.name, m.total)}) for m in run.memory]
    hardware = [Fact(name="GPUs", value=cards or "none"), *_facts(summary, _HARDWARE), *client]
    software = [*run.software, *_facts(summary, _SOFTWARE)]
    return run.model_copy(update={"hardware": hardware, "software": software, "memory": memory})


def _facts(summary: HostSummary, fields: Sequence[tuple[str, str]]) -> list[Fact]:
    return [Fact(name=title, value=_text(name, getattr(summary, name))) for name, title in fields]


def _text(name: str, value: Known[Any]) -> str:
    if isinstance(value, Unknown):
        return f"unknown: {value.unknown}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value / 2**30:,.1f} GiB" if name.endswith("_bytes") else str(value)


def _card(gpu: GpuSummary) -> str:
    limit = gpu.power_limit_w
    parts = (
        _text("name", gpu.name),
        _text("memory_bytes", gpu.memory_bytes),
        f"PCIe {_text('', gpu.pcie_generation)} x{_text('', gpu.pcie_width)}",
        "power limit unknown" if isinstance(limit, Unknown) else f"{limit:.0f} W",
    )
    return ", ".join(parts)

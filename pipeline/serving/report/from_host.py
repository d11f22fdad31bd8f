"""What a report shows of the machine: from its recorded facts, and from the log of an engine."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.artifacts.attest.predicates import HostSummary
from pipeline.core.known import Known, Unknown
from pipeline.hosts.facts.model import HostFacts, gpus_of
from pipeline.hosts.facts.summary import summarise
from pipeline.serving.report.model import CardMemory, Fact, RunData
from pipeline.serving.serve.engine_log import LINES

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


def host_tables(facts: HostFacts) -> tuple[list[Fact], list[Fact]]:
    """Hardware and software of a machine, as pages show them."""
    summary = summarise(facts)
    gpus = [] if isinstance(summary.gpus, Unknown) else summary.gpus
    kinds: Counter[str] = Counter()
    for gpu in gpus:
        watts = gpu.power_limit_w
        parts = (
            _text("name", gpu.name),
            _text("memory_bytes", gpu.memory_bytes),
            f"PCIe {_text('', gpu.pcie_generation)} x{_text('', gpu.pcie_width)}",
            "power limit unknown" if isinstance(watts, Unknown) else f"{watts:.0f} W",
        )
        # cards of one kind in one row: a kind is all that a number depends on
        kinds[", ".join(parts)] += 1
    cards = "; ".join(f"{number}x {kind}" for kind, number in kinds.items())
    hardware = [Fact(name="GPUs", value=cards or "none"), *_facts(summary, _HARDWARE)]
    return hardware, _facts(summary, _SOFTWARE)


def with_host(run: RunData, facts: HostFacts) -> RunData:
    """Adds to a run the machine that its server ran on."""
    totals = {
        f"GPU {index}": round(gpu.memory_bytes / 2**30, 2)
        for index, gpu in enumerate(gpus_of(facts))
        if not isinstance(gpu.memory_bytes, Unknown)
    }
    memory = [m.model_copy(update={"total": totals.get(m.name, m.total)}) for m in run.memory]
    hardware, software = host_tables(facts)
    hardware += [fact for fact in run.hardware if fact.name == "Client's machine"]
    software = [*run.software, *software]
    return run.model_copy(update={"hardware": hardware, "software": software, "memory": memory})


def _facts(summary: HostSummary, fields: Sequence[tuple[str, str]]) -> list[Fact]:
    return [Fact(name=title, value=_text(name, getattr(summary, name))) for name, title in fields]


def _text(name: str, value: Known[Any]) -> str:
    if isinstance(value, Unknown):
        return f"unknown: {value.unknown}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value / 2**30:,.1f} GiB" if name.endswith("_bytes") else str(value)


# Workers name themselves in each line: `[… TP3]` in SGLang, `(Worker_TP3 pid=…)` in vLLM.
_RANK = re.compile(r"TP(\d+)")
_CUDA = re.compile(r"CUDA(\d+)")


def memory_of_log(lines: Iterable[str]) -> list[CardMemory]:
    """One entry for each card whose weights the log names; empty where it names none."""
    cards: dict[int, dict[str, float]] = defaultdict(dict)
    tokens: int | None = None
    for line in lines:
        for sign in LINES.memory:
            match = re.search(sign.pattern, line)
            if match is None:
                continue
            amount = sum(float(group.replace(",", "")) for group in match.groups())
            amount = amount / 1024 if sign.in_mib else amount
            # the same on every card: only one worker may print it
            if sign.field == "kv_tokens":
                tokens = round(amount)
                continue
            rank = _CUDA.search(line) or _RANK.search(line)
            card = cards[int(rank[1]) if rank else 0]
            card[sign.field] = amount + (card.get(sign.field, 0.0) if sign.adds else 0.0)
    about = {"unit": "GiB", "kv_tokens": tokens, "source": "the engine's log"}
    found = []
    for index, values in sorted(cards.items()):
        if "weights" in values:
            rounded = {name: round(value, 3) for name, value in values.items()}
            found.append(CardMemory.model_validate({**rounded, "name": f"GPU {index}", **about}))
    return found

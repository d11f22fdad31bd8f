"""One process of a test: does the steps of its job and logs each of them.

Copies between cards are checked on the card that received them. all_reduce is checked for its
values, then timed at the sizes that engines use.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .processes import Job, StepLog

# Knuth's multiplicative hash: neighbouring values look unrelated.
_SEED = 2654435761
# Not a multiple of any block size, so that the last, partial block is checked too.
_CHECKED_VALUES = 1024 * 1024 + 3
_REPEATS = 8


def main(job_path: str, log_path: str) -> None:
    """Run the job; each step has a name, so that a hang can be located."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    log = StepLog(Path(log_path), job)
    with log.step("start"):
        pass
    if job["kind"] == "card":
        with log.step("card") as found:
            found.update(card(job["device"]))
    elif job["kind"] == "copies":
        for source, target in job["pairs"]:
            with log.step(f"copy {source}->{target}") as found:
                found.update(_copy(log, job, source, target))
    elif job["kind"] == "writes":
        # Every card writes at once to the one `shift` further. Posted writes through some PCIe
        # switches collapse then (local-inference-lab/rtx6kpro).
        for shift in job["shifts"]:
            flows = [(i, (i + shift) % job["count"]) for i in range(job["count"])]
            with log.step(f"writes +{shift}") as found:
                found["alone_gb_per_s"] = [_rate(job, [flow]) for flow in flows]
                found["together_gb_per_s"] = _rate(job, flows)
    else:
        _reduce(log, job)


def card(device: str) -> dict[str, Any]:
    """The cards and versions that torch reports."""
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, AssertionError, ImportError):
        nccl = None
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "count": torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1,
    }
    if device == "cuda":
        kinds = [torch.cuda.get_device_properties(i) for i in range(report["count"])]
        report["cards"] = [
            {
                "name": k.name,
                "capability": f"{k.major}.{k.minor}",
                "memory_bytes": k.total_memory,
                "processors": k.multi_processor_count,
            }
            for k in kinds
        ]
    return report


def _place(job: Job, index: int) -> str:
    return f"cuda:{index}" if job["device"] == "cuda" else "cpu"


def _sync(job: Job, *indexes: int) -> None:
    if job["device"] == "cuda":
        for index in indexes or [job["rank"]]:
            torch.cuda.synchronize(index)


def _copy(log: StepLog, job: Job, source: int, target: int) -> dict[str, Any]:
    """Data, peer access, rate. A card with itself is also copied through host memory."""
    claims = None
    if job["device"] == "cuda" and source != target:
        claims = torch.cuda.can_device_access_peer(source, target)
    wrong = 0
    for turn in range(3):
        # another pattern each time: the values of an earlier copy must not pass
        seed = 7919 * (source * 64 + target) + turn
        sent = _pattern(_place(job, source), seed)
        received = torch.full_like(sent, -1, device=_place(job, target))
        _sync(job, source, target)
        received.copy_(sent)
        _sync(job, source, target)
        wrong += int((received != _pattern(_place(job, target), seed)).sum().item())
    if source == target:
        back = _pattern("cpu", 11).to(_place(job, source)).to("cpu")
        wrong += int((back != _pattern("cpu", 11)).sum().item())
    if log.faulty("slow"):
        time.sleep(1.0)
    return {
        "claims_peer": claims,
        "wrong_values": wrong + (1 if log.faulty("wrong") else 0),
        "gb_per_s": _rate(job, [(source, target)]),
    }


def _pattern(place: str, seed: int) -> Any:
    """Every value differs from its neighbours and from those of other copies."""
    numbers = torch.arange(_CHECKED_VALUES, dtype=torch.int64, device=place)
    return ((numbers * _SEED + seed) % 2147483647).to(torch.int32)


def _rate(job: Job, flows: list[tuple[int, int]]) -> float:
    """Gigabytes per second of all flows together, each on streams of its own."""
    count = job["bulk_bytes"] // 4
    sent = [torch.ones(count, dtype=torch.int32, device=_place(job, s)) for s, _ in flows]
    kept = [torch.zeros(count, dtype=torch.int32, device=_place(job, t)) for _, t in flows]
    ends = sorted({x for flow in flows for x in flow})
    # a copy orders the streams of both its cards, so flows that shared one would run in turn
    cuda = job["device"] == "cuda"
    streams = [[torch.cuda.Stream(x) for x in flow] if cuda else [] for flow in flows]

    def seconds(times: int) -> float:
        _sync(job, *ends)
        start = time.perf_counter()
        for _ in range(times):
            for target, source, own in zip(kept, sent, streams):  # noqa: B905
                with ExitStack() as current:
                    for stream in own:
                        current.enter_context(torch.cuda.stream(stream))
                    target.copy_(source, non_blocking=True)
        _sync(job, *ends)
        return time.perf_counter() - start

    seconds(2)  # first copies also set up peer mappings
    taken = seconds(_REPEATS)
    if any(int((k != 1).sum().item()) for k in kept):
        raise ValueError("a copy left other data than was sent")
    return float(count * 4 * len(flows) * _REPEATS / taken / 1e9)


def _reduce(log: StepLog, job: Job) -> None:
    """all_reduce of all ranks: its values, its latency at each size, its bandwidth."""
    cuda, rank, world = job["device"] == "cuda", job["rank"], job["world"]
    with log.step("join"):
        extra: dict[str, Any] = {}
        if cuda:
            torch.cuda.set_device(rank)
            extra["device_id"] = torch.device(f"cuda:{rank}")
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"file://{job['rendezvous']}",
            rank=rank,
            world_size=world,
            # the watching process decides what is too long, so the library must not give up first
            timeout=timedelta(hours=1),
            **extra,
        )
    with log.step("values") as found:
        # engines reduce in bfloat16; gloo on CPUs only stands in for them
        kinds = [torch.float32] + ([torch.bfloat16] if cuda else [])
        # a single value, an uneven number, and enough to be cut into pieces
        cases = [(kind, n, turn) for kind in kinds for n in (1, 1000, 262144) for turn in range(4)]
        wrong = sum(_wrong(job, count, kind, turn) for kind, count, turn in cases)
        found["wrong_values"] = wrong + (1 if log.faulty("wrong") else 0)
    for size in job["sizes"]:
        with log.step(f"latency {size}") as found:
            kind = kinds[-1]
            count = size // torch.finfo(kind).bits * 8
            found["wrong_values"] = _wrong(job, count, kind, 5)
            numbers = torch.zeros(count, dtype=kind, device=_place(job, rank))
            taken = []
            for turn in range(job["warmup"] + job["rounds"]):
                dist.barrier()
                _sync(job)
                start = time.perf_counter()
                if log.faulty("slow"):
                    time.sleep(0.05)
                dist.all_reduce(numbers)
                _sync(job)
                if turn >= job["warmup"]:
                    taken.append((time.perf_counter() - start) * 1e6)
            taken.sort()
            found.update(median_us=taken[len(taken) // 2], worst_us=taken[-1], rounds=len(taken))
            found["in_a_row_us"] = _in_a_row(job, numbers, job["rounds"])
    if job["bulk_bytes"]:
        with log.step("bandwidth") as found:
            values = job["bulk_bytes"] // 4
            numbers = torch.zeros(values, dtype=torch.float32, device=_place(job, rank))
            rounds = max(2, job["rounds"] // 10)
            _in_a_row(job, numbers, rounds)
            us = _in_a_row(job, numbers, rounds) + (1e6 if log.faulty("slow") else 0)
            found["gb_per_s"] = job["bulk_bytes"] / us / 1000
            # bus bandwidth as nccl-tests define it: what each link carries in a ring
            found["bus_gb_per_s"] = found["gb_per_s"] * 2 * (world - 1) / world
    with log.step("mapped") as found:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        paths = {fields[5] for line in maps if len(fields := line.split(maxsplit=5)) == 6}
        found["libraries"] = sorted(x for x in paths if Path(x).name.startswith("libnccl.so"))
    dist.destroy_process_group()


def _wrong(job: Job, count: int, kind: Any, turn: int) -> int:
    """How many sums are wrong; small whole numbers are exact in bfloat16 too."""
    base = (torch.arange(count, device=_place(job, job["rank"])) + turn) % 13
    numbers = (base + job["rank"] % 4 + 1).to(kind)
    dist.all_reduce(numbers)
    _sync(job)
    expected = base * job["world"] + sum(r % 4 + 1 for r in range(job["world"]))
    return int((numbers != expected.to(kind)).sum().item())


def _in_a_row(job: Job, numbers: Any, rounds: int) -> float:
    """Microseconds each, when they follow one another as in a model's layers."""
    _sync(job)
    start = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(numbers)
    _sync(job)
    return float((time.perf_counter() - start) * 1e6 / rounds)

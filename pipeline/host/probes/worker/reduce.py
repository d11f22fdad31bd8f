"""all_reduce over some ranks: the values, then how long it takes at the sizes engines use."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .processes import Job, StepLog


def run(log: StepLog, job: Job) -> None:
    """Join, check, measure; each step has a name, so that a hang can be located."""
    log.step("join", lambda: _join(job))
    log.step("values", lambda: _values(log, job))
    for size in job["sizes"]:
        log.step(f"latency {size}", lambda s=size: _latency(log, job, s))  # type: ignore[misc]
    if job["bulk_bytes"]:
        log.step("bandwidth", lambda: _bandwidth(log, job))
    log.step("mapped", lambda: {"libraries": _mapped("libnccl.so")})
    dist.destroy_process_group()


def _join(job: Job) -> dict[str, Any]:
    cuda = job["device"] == "cuda"
    extra: dict[str, Any] = {}
    if cuda:
        torch.cuda.set_device(job["rank"])
        extra["device_id"] = torch.device(f"cuda:{job['rank']}")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{job['rendezvous']}",
        rank=job["rank"],
        world_size=job["world"],
        # the watching process decides what is too long, so the library must not give up first
        timeout=timedelta(hours=1),
        **extra,
    )
    return {}


def _place(job: Job) -> str:
    return f"cuda:{job['rank']}" if job["device"] == "cuda" else "cpu"


def _sync(job: Job) -> None:
    if job["device"] == "cuda":
        torch.cuda.synchronize()


def _values(log: StepLog, job: Job) -> dict[str, Any]:
    # engines reduce in bfloat16; gloo on CPUs only stands in for them
    kinds = [torch.float32] + ([torch.bfloat16] if job["device"] == "cuda" else [])
    wrong = sum(
        _wrong(job, count, kind, turn)
        for kind in kinds
        # a single value, an uneven number, and enough to be cut into pieces
        for count in (1, 1000, 262144)
        for turn in range(4)
    )
    return {"wrong_values": wrong + (1 if log.faulty("wrong") else 0)}


def _wrong(job: Job, count: int, kind: Any, turn: int) -> int:
    """How many sums are wrong; small whole numbers are exact in bfloat16 too."""
    base = (torch.arange(count, device=_place(job)) + turn) % 13
    numbers = (base + job["rank"] % 4 + 1).to(kind)
    dist.all_reduce(numbers)
    _sync(job)
    world = job["world"]
    expected = base * world + sum(r % 4 + 1 for r in range(world))
    return int((numbers != expected.to(kind)).sum().item())


def _latency(log: StepLog, job: Job, size: int) -> dict[str, Any]:
    kind = torch.bfloat16 if job["device"] == "cuda" else torch.float32
    count = size // torch.finfo(kind).bits * 8
    wrong = _wrong(job, count, kind, 5)
    numbers = torch.zeros(count, dtype=kind, device=_place(job))
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
    return {
        "wrong_values": wrong,
        "median_us": taken[len(taken) // 2],
        "worst_us": taken[-1],
        "in_a_row_us": _in_a_row(job, numbers),
        "rounds": len(taken),
    }


def _in_a_row(job: Job, numbers: Any) -> float:
    """Microseconds each, when they follow one another as in a model's layers."""
    _sync(job)
    start = time.perf_counter()
    for _ in range(job["rounds"]):
        dist.all_reduce(numbers)
    _sync(job)
    return float((time.perf_counter() - start) * 1e6 / job["rounds"])


def _bandwidth(log: StepLog, job: Job) -> dict[str, Any]:
    numbers = torch.zeros(job["bulk_bytes"] // 4, dtype=torch.float32, device=_place(job))
    few = {**job, "rounds": max(2, job["rounds"] // 10)}
    _in_a_row(few, numbers)
    us = _in_a_row(few, numbers)
    if log.faulty("slow"):
        us += 1e6
    rate = job["bulk_bytes"] / us / 1000
    # bus bandwidth as nccl-tests define it: what each link carries in a ring
    world = job["world"]
    return {"gb_per_s": rate, "bus_gb_per_s": rate * 2 * (world - 1) / world}


def _mapped(name: str) -> list[str]:
    """The files of a library that this process has mapped."""
    files = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
        if Path(path).name.startswith(name):
            files.add(path)
    return sorted(files)

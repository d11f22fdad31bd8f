"""Copies between cards, with the data checked on the card that received it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from .processes import Job, StepLog

# Knuth's multiplicative hash: neighbouring values look unrelated.
_SEED = 2654435761
# Not a multiple of any block size, so that the last, partial block is checked too.
_CHECKED_BYTES = 4 * 1024 * 1024 + 12
_REPEATS = 8


def run(log: StepLog, job: Job) -> None:
    """Each pair: data, peer access, rate. A card with itself is also copied through host memory."""
    for source, target in job["pairs"]:
        name = f"copy {source}->{target}"
        log.step(name, lambda s=source, t=target: _pair(log, job, s, t))  # type: ignore[misc]


def _pair(log: StepLog, job: Job, source: int, target: int) -> dict[str, Any]:
    result: dict[str, Any] = {"claims_peer": None}
    if _cuda(job) and source != target:
        result["claims_peer"] = torch.cuda.can_device_access_peer(source, target)
    wrong = _wrong_values(job, source, target, _CHECKED_BYTES // 4)
    if source == target:
        wrong += _wrong_through_host(job, source)
    result["wrong_values"] = wrong + (1 if log.faulty("wrong") else 0)
    if log.faulty("slow"):
        time.sleep(1.0)
    result["gb_per_s"] = _rate(job, [(source, target)])
    return result


def _cuda(job: Job) -> bool:
    return bool(job["device"] == "cuda")


def _place(job: Job, index: int) -> str:
    return f"cuda:{index}" if _cuda(job) else "cpu"


def _sync(job: Job, *indexes: int) -> None:
    if _cuda(job):
        for index in indexes:
            torch.cuda.synchronize(index)


def _pattern(place: str, count: int, seed: int) -> Any:
    """Every value differs from its neighbours and from those of other copies."""
    numbers = torch.arange(count, dtype=torch.int64, device=place)
    return ((numbers * _SEED + seed) % 2147483647).to(torch.int32)


def _wrong_values(job: Job, source: int, target: int, count: int) -> int:
    wrong = 0
    for turn in range(3):
        # another pattern each time: what an earlier copy left behind must not pass
        seed = 7919 * (source * 64 + target) + turn
        sent = _pattern(_place(job, source), count, seed)
        received = torch.full((count,), -1, dtype=torch.int32, device=_place(job, target))
        _sync(job, source, target)
        received.copy_(sent)
        _sync(job, source, target)
        expected = _pattern(_place(job, target), count, seed)
        wrong += int((received != expected).sum().item())
    return wrong


def _wrong_through_host(job: Job, index: int) -> int:
    count = _CHECKED_BYTES // 4
    there = _pattern("cpu", count, 11).to(_place(job, index))
    back = there.to("cpu")
    return int((back != _pattern("cpu", count, 11)).sum().item())


def _rate(job: Job, flows: list[tuple[int, int]]) -> float:
    """Gigabytes per second of all flows together, each on streams of its own."""
    count = job["bulk_bytes"] // 4
    sent = [torch.ones(count, dtype=torch.int32, device=_place(job, s)) for s, _ in flows]
    kept = [torch.zeros(count, dtype=torch.int32, device=_place(job, t)) for _, t in flows]
    ends = sorted({x for flow in flows for x in flow})
    # a copy orders the streams of both its cards, so flows that shared one would run in turn
    streams = [[torch.cuda.Stream(x) for x in flow] if _cuda(job) else [] for flow in flows]

    def go(times: int) -> float:
        _sync(job, *ends)
        start = time.perf_counter()
        for _ in range(times):
            for there, here, own in zip(kept, sent, streams):  # noqa: B905
                with ExitStack() as current:
                    for stream in own:
                        current.enter_context(torch.cuda.stream(stream))
                    there.copy_(here, non_blocking=True)
        _sync(job, *ends)
        return time.perf_counter() - start

    go(2)  # first copies also set up peer mappings
    taken = go(_REPEATS)
    if any(int((k != 1).sum().item()) for k in kept):
        raise ValueError("a copy left other data than was sent")
    return float(count * 4 * len(flows) * _REPEATS / taken / 1e9)


def run_writes(log: StepLog, job: Job) -> None:
    """Every card writes at once to the one `shift` further.

    Posted writes through some PCIe switches collapse here (local-inference-lab/rtx6kpro).
    """
    for shift in job["shifts"]:
        log.step(f"writes +{shift}", lambda s=shift: _shift(job, s))  # type: ignore[misc]


def _shift(job: Job, shift: int) -> dict[str, Any]:
    flows = [(i, (i + shift) % job["count"]) for i in range(job["count"])]
    alone = [_rate(job, [flow]) for flow in flows]
    together = _rate(job, flows)
    return {"alone_gb_per_s": alone, "together_gb_per_s": together}

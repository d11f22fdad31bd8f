"""Verdicts over the results of ranks: data first, then how fast."""

from __future__ import annotations

from typing import Any

from .processes import RankResult

PASSED, FAILED, UNKNOWN, NOT_APPLICABLE = "passed", "failed", "unknown", "not applicable"

Row = dict[str, Any]
Floors = dict[str, float]

# Loose on purpose: they tell a broken path from a working one; a slow one shows against the floors
# of the machine's own good run. Posted writes that collapse behind a Broadcom PEX890xx switch go
# from 37 to 2.7 GB/s (local-inference-lab/rtx6kpro, posted-write-collapse).
DEFAULT_FLOORS: Floors = {
    "copy_gb_per_s": 1.0,
    "all_reduce_us": 5000.0,
    "all_reduce_bus_gb_per_s": 1.0,
    "writes_share": 0.25,
}

# CPUs take the place of cards only to test these tests: their speed means nothing.
NO_FLOORS: Floors = {**dict.fromkeys(DEFAULT_FLOORS, 0.0), "all_reduce_us": 1e9}


def row(check: str, subject: str, verdict: str, why: str = "", **measured: Any) -> Row:
    """One row of the report."""
    head = {"check": check, "subject": subject, "verdict": verdict, "why": why}
    return {**head, "measured": measured}


def overall(rows: list[Row]) -> str:
    """The worst that was seen; where nothing could be judged, unknown."""
    seen = {r["verdict"] for r in rows}
    return next((verdict for verdict in (FAILED, UNKNOWN, PASSED) if verdict in seen), UNKNOWN)


def loss(results: list[RankResult]) -> str:
    """Which ranks hung or died, as a sentence; empty when all finished."""
    for kind in ("died", "hung"):
        lost = [e for e in results if e.outcome == kind]
        # a rank that was killed takes down those that were talking to it
        lost = [e for e in lost if (e.code or 0) < 0] or lost
        if lost:
            first, code, step = lost[0], lost[0].code or 0, lost[0].step or "its end"
            if kind == "hung":
                how = f"hung in `{step}`"
            else:
                died = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                last = next((x for x in reversed(first.output.splitlines()) if x.strip()), "")
                how = f"{died} in `{step}`" + (f": {last.strip()[:300]}" if last else "")
            return f"rank {', '.join(str(e.rank) for e in lost)} {how}"
    return ""


def judge_copy(name: str, result: Row, floors: Floors) -> Row:
    """Right data first, then the rate."""
    wrong, rate = result["wrong_values"], result["gb_per_s"]
    measured = {"gb_per_s": round(rate, 2), "claims_peer": result["claims_peer"]}
    if wrong:
        return row("copy", name, FAILED, f"{wrong} values arrived wrong", **measured)
    if rate < floors["copy_gb_per_s"]:
        why = f"{rate:.2f} GB/s, below the floor of {floors['copy_gb_per_s']:g}"
        return row("copy", name, FAILED, why, **measured)
    why = "" if result["claims_peer"] is not False else "through host memory: no peer access"
    return row("copy", name, PASSED, why, **measured)


def judge_writes(name: str, result: Row, floors: Floors) -> Row:
    """The share of a flow's rate that remains when every card writes at once."""
    alone, together = result["alone_gb_per_s"], result["together_gb_per_s"]
    share = together / len(alone) / min(alone)
    measured = {
        "alone_gb_per_s": [round(x, 2) for x in alone],
        "together_gb_per_s": round(together, 2),
        "share": round(share, 3),
    }
    if share < floors["writes_share"]:
        why = f"posted writes collapse: {share:.0%} of a flow's rate remains"
        return row("writes", name, FAILED, why, **measured)
    return row("writes", name, PASSED, **measured)


def judge_reduce(
    world: int, results: list[RankResult], sizes: list[int], floors: Floors
) -> list[Row]:
    """The values, the latency at each size, the bandwidth: of the slowest rank."""
    subject = f"{world} ranks" if world > 1 else "1 rank"
    if why := loss(results):
        output = [r.output for r in results if r.output.strip()]
        return [row("all_reduce", subject, FAILED, f"all_reduce: {why}", output=output)]
    wrong = sum(int(s.get("wrong_values", 0)) for r in results for s in r.steps.values())
    if wrong:
        return [row("all_reduce", subject, FAILED, f"{wrong} values of the sums are wrong")]
    rows = [row("all_reduce", subject, PASSED)]
    for size in sizes:
        steps = [r.steps[f"latency {size}"] for r in results]
        names = ("median_us", "worst_us", "in_a_row_us")
        measured = {n: round(max(step[n] for step in steps), 1) for n in names}
        most, median = floors["all_reduce_us"], measured["median_us"]
        verdict, why = PASSED, ""
        if median > most:
            verdict, why = FAILED, f"median {median} µs, above {most:g}"
        name = f"{subject}, {size // 1024} KiB"
        rows.append(row("latency", name, verdict, why, size_bytes=size, **measured))
    if "bandwidth" in results[0].steps and world == 1:
        why = "one rank: nothing crosses a link"
        rows.append(row("bandwidth", subject, NOT_APPLICABLE, why))
    elif "bandwidth" in results[0].steps:
        steps = [r.steps["bandwidth"] for r in results]
        rates = ("gb_per_s", "bus_gb_per_s")
        measured = {n: round(min(step[n] for step in steps), 3) for n in rates}
        least, rate = floors["all_reduce_bus_gb_per_s"], measured["bus_gb_per_s"]
        verdict, why = PASSED, ""
        if rate < least:
            verdict, why = FAILED, f"{rate} GB/s, below {least:g}"
        rows.append(row("bandwidth", subject, verdict, why, **measured))
    return rows


def judge_library(results: list[RankResult], wanted: str | None, device: str) -> Row:
    """Which libnccl is really in use; two at once, or another than meant, is a failure."""
    files = sorted({x for r in results for x in r.steps.get("mapped", {}).get("libraries", [])})
    if device != "cuda":
        why = "NCCL needs CUDA devices"
        return row("libnccl", "mapped", NOT_APPLICABLE, why, libraries=files)
    if loss(results):
        why = "the ranks ended before this could be read"
        return row("libnccl", "mapped", UNKNOWN, why)
    if not files:
        return row("libnccl", "mapped", UNKNOWN, "no libnccl.so is mapped: linked in statically?")
    if len(files) > 1:
        why = f"{len(files)} different files are mapped"
        return row("libnccl", "mapped", FAILED, why, libraries=files)
    if wanted and files != [wanted]:
        return row("libnccl", "mapped", FAILED, f"is {files[0]}, not {wanted}", libraries=files)
    return row("libnccl", "mapped", PASSED, libraries=files)

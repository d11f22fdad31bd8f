"""From how processes ended and what they measured to verdicts that a person can act on."""

from __future__ import annotations

from typing import Any

from .processes import RankEnd

PASSED, FAILED, UNKNOWN, NOT_APPLICABLE = "passed", "failed", "unknown", "not applicable"

Row = dict[str, Any]
Floors = dict[str, float]

# Loose on purpose: they tell a broken path from a working one. A machine's own good run, given as
# floors, tells a slow one. The collapse of posted writes goes from 37 to 2.7 GB/s.
DEFAULT_FLOORS: Floors = {
    "copy_gb_per_s": 1.0,
    "all_reduce_us": 5000.0,
    "all_reduce_bus_gb_per_s": 1.0,
    "writes_share": 0.25,
}

# Processors stand in for cards only to try these tests: how fast they are says nothing.
NO_FLOORS: Floors = {**dict.fromkeys(DEFAULT_FLOORS, 0.0), "all_reduce_us": 1e9}


def row(check: str, subject: str, verdict: str, why: str = "", **measured: Any) -> Row:
    """One line of the answer."""
    return {
        "check": check,
        "subject": subject,
        "verdict": verdict,
        "why": why,
        "measured": measured,
    }


def overall(rows: list[Row]) -> str:
    """The worst that was seen; where nothing could be judged, unknown."""
    seen = {r["verdict"] for r in rows}
    for verdict in (FAILED, UNKNOWN, PASSED):
        if verdict in seen:
            return verdict
    return UNKNOWN


def loss(ends: list[RankEnd]) -> str:
    """What went wrong with a crew, as a sentence; empty when all finished."""
    for kind in ("died", "hung"):
        lost = [e for e in ends if e.ended == kind]
        # a rank that was killed takes down those that were talking to it
        lost = [e for e in lost if (e.code or 0) < 0] or lost
        if lost:
            names = ", ".join(str(e.rank) for e in lost)
            step = lost[0].at or "its end"
            how = f"hung in `{step}`" if kind == "hung" else _death(lost[0], step)
            return f"rank {names} {how}"
    return ""


def _death(end: RankEnd, step: str) -> str:
    code = end.code or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    last = next((x for x in reversed(end.words.splitlines()) if x.strip()), "")
    return f"{how} in `{step}`: {last.strip()[:300]}" if last else f"{how} in `{step}`"


def judge_copy(name: str, said: Row, floors: Floors) -> Row:
    """Right data first, then the rate."""
    wrong, rate = said["wrong_words"], said["gb_per_s"]
    measured = {"gb_per_s": round(rate, 2), "claims_peer": said["claims_peer"]}
    if wrong:
        return row("copy", name, FAILED, f"{wrong} words arrived wrong", **measured)
    if rate < floors["copy_gb_per_s"]:
        why = f"{rate:.2f} GB/s, below the floor of {floors['copy_gb_per_s']:g}"
        return row("copy", name, FAILED, why, **measured)
    why = "" if said["claims_peer"] is not False else "by host memory: the cards are no peers"
    return row("copy", name, PASSED, why, **measured)


def judge_writes(name: str, said: Row, floors: Floors) -> Row:
    """What is left of a flow's rate when every card writes at once."""
    alone, together = said["alone_gb_per_s"], said["together_gb_per_s"]
    share = together / len(alone) / min(alone)
    measured = {
        "alone_gb_per_s": [round(x, 2) for x in alone],
        "together_gb_per_s": round(together, 2),
        "share": round(share, 3),
    }
    if share < floors["writes_share"]:
        why = f"posted writes collapse: {share:.0%} of a flow's rate is left"
        return row("writes", name, FAILED, why, **measured)
    return row("writes", name, PASSED, **measured)


def judge_reduce(world: int, ends: list[RankEnd], sizes: list[int], floors: Floors) -> list[Row]:
    """The values, the latency at each size, the bandwidth: of the slowest rank."""
    subject = f"{world} ranks" if world > 1 else "1 rank"
    if why := loss(ends):
        return [row("all_reduce", subject, FAILED, f"all_reduce: {why}", words=_words(ends))]
    wrong = sum(_wrong(e) for e in ends)
    if wrong:
        return [row("all_reduce", subject, FAILED, f"{wrong} words of the sums are wrong")]
    rows = [row("all_reduce", subject, PASSED)]
    rows += [_latency(subject, size, ends, floors) for size in sizes]
    if "bandwidth" in ends[0].steps:
        rows.append(_bandwidth(subject, world, ends, floors))
    return rows


def _wrong(end: RankEnd) -> int:
    return sum(int(step.get("wrong_words", 0)) for step in end.steps.values())


def _words(ends: list[RankEnd]) -> list[str]:
    return [e.words for e in ends if e.words.strip()]


def _latency(subject: str, size: int, ends: list[RankEnd], floors: Floors) -> Row:
    said = [e.steps[f"latency {size}"] for e in ends]
    measured = {k: round(max(s[k] for s in said), 1) for k in ("median_us", "worst_us")}
    measured["in_a_row_us"] = round(max(s["in_a_row_us"] for s in said), 1)
    name = f"{subject}, {size // 1024} KiB"
    if measured["median_us"] > floors["all_reduce_us"]:
        why = f"median {measured['median_us']} µs, above {floors['all_reduce_us']:g}"
        return row("latency", name, FAILED, why, size_bytes=size, **measured)
    return row("latency", name, PASSED, size_bytes=size, **measured)


def _bandwidth(subject: str, world: int, ends: list[RankEnd], floors: Floors) -> Row:
    said = [e.steps["bandwidth"] for e in ends]
    measured = {k: round(min(s[k] for s in said), 3) for k in ("gb_per_s", "bus_gb_per_s")}
    if world == 1:
        why = "one rank: nothing crosses a link"
        return row("bandwidth", subject, NOT_APPLICABLE, why)
    if measured["bus_gb_per_s"] < floors["all_reduce_bus_gb_per_s"]:
        why = f"{measured['bus_gb_per_s']} GB/s, below {floors['all_reduce_bus_gb_per_s']:g}"
        return row("bandwidth", subject, FAILED, why, **measured)
    return row("bandwidth", subject, PASSED, **measured)


def judge_library(ends: list[RankEnd], wanted: str | None, device: str) -> Row:
    """Which libnccl is really in use; two at once, or another than meant, is a failure."""
    found = sorted({x for e in ends for x in e.steps.get("mapped", {}).get("libraries", [])})
    if device != "cuda":
        why = "NCCL needs CUDA devices"
        return row("libnccl", "mapped", NOT_APPLICABLE, why, libraries=found)
    if loss(ends):
        why = "the ranks were lost before they could say"
        return row("libnccl", "mapped", UNKNOWN, why)
    if not found:
        return row("libnccl", "mapped", UNKNOWN, "no libnccl.so is mapped: linked in statically?")
    if len(found) > 1:
        why = f"{len(found)} different files are mapped"
        return row("libnccl", "mapped", FAILED, why, libraries=found)
    if wanted and found != [wanted]:
        return row("libnccl", "mapped", FAILED, f"is {found[0]}, not {wanted}", libraries=found)
    return row("libnccl", "mapped", PASSED, libraries=found)

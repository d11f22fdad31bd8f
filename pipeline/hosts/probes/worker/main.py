"""Which tests a machine gets, one after the other; the verdicts and the report of them all."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from .processes import Limits, RankResult, run_processes

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
# exit codes, as the help of the folder's __main__ promises
CODES = {PASSED: 0, FAILED: 1, UNKNOWN: 2}
_TESTS = ("copy", "all_reduce", "writes")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="probes", description="Function tests of GPUs.")
    parser.add_argument("report", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="how many cards to use (CPU: processes)")
    parser.add_argument("--only", choices=_TESTS, action="append")
    parser.add_argument("--from-ranks", type=int, default=2, help="the smallest all_reduce")
    parser.add_argument("--sizes-kib", default="32,64,128,256")
    parser.add_argument("--bulk-bytes", type=int, default=64 * 1024 * 1024)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--step-limit-s", type=float, default=Limits.step_s)
    parser.add_argument("--floors", type=json.loads, default={}, help="JSON of floors to change")
    parser.add_argument("--library", help="the libnccl that must be in use")
    parser.add_argument("--fault", help="misbehave on purpose: hang|die|wrong|slow:RANK[:STEP]")
    return parser.parse_args(argv)


class Session:
    """One machine being tested."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.limits = Limits(step_s=asked.step_limit_s)
        usual = DEFAULT_FLOORS if asked.device == "cuda" else NO_FLOORS
        self.floors = {**usual, **asked.floors}
        self.sizes = [int(x) * 1024 for x in asked.sizes_kib.split(",") if x]
        self.fault: dict[str, Any] | None = None
        if asked.fault:
            kind, rank, *step = asked.fault.split(":")
            self.fault = {"kind": kind, "rank": int(rank), **({"step": step[0]} if step else {})}
        self.count = 0

    def run(self) -> list[Row]:
        """All rows; a test that hangs or dies is one of them."""
        device, ranks = self.asked.device, self.asked.ranks
        # a planted fault is for the tests, not for the look at the cards before them
        job = {**self._job("card"), "fault": None}
        # the first use of CUDA may take long, so it has the time limit of a start
        [result] = run_processes([job], Limits(self.limits.start_s, self.limits.start_s))
        if why := loss([result]):
            return [row("cards", device, UNKNOWN, f"torch: {why}", output=[result.output])]
        seen = result.steps["card"]
        count = int(seen["count"])
        if not count:
            return [row("cards", "cuda", UNKNOWN, "torch sees no CUDA device", **seen)]
        self.count = min(count, ranks or count) if device == "cuda" else ranks or 2
        rows = [row("cards", device, PASSED, **seen)]
        if device == "cuda" and ranks and ranks > count:
            why = f"{ranks} were asked for, torch sees {count}"
            rows = [row("cards", "cuda", FAILED, why, **seen)]
        wanted, cards = self.asked.only or _TESTS, range(self.count)
        one = "there is one card"
        if "copy" in wanted:
            pairs = [(a, b) for a in cards for b in cards]
            name = "copy {0[0]}->{0[1]}".format
            rows += self._each("copies", "pairs", pairs, name, judge_copy)
            if self.count == 1:
                rows.append(row("copy", "between cards", NOT_APPLICABLE, one))
        if "all_reduce" in wanted:
            results: list[RankResult] = []
            # each number of ranks: some machines hang only with many (local-inference-lab/rtx6kpro)
            for world in range(min(self.asked.from_ranks, self.count), self.count + 1):
                jobs = [self._job("reduce", world=world, sizes=self.sizes) for _ in range(world)]
                results = run_processes(jobs, self.limits)
                rows += judge_reduce(world, results, self.sizes, self.floors)
            if self.count == 1:
                rows.append(row("all_reduce", "2 or more ranks", NOT_APPLICABLE, one))
            rows.append(judge_library(results, self.asked.library, self.asked.device))
        if "writes" in wanted and self.count < 2:
            rows.append(row("writes", "concurrent", NOT_APPLICABLE, one))
        elif "writes" in wanted:
            shifts, name = list(cards)[1:], "writes +{}".format
            rows += self._each("writes", "shifts", shifts, name, judge_writes)
        return rows

    def _job(self, kind: str, **more: Any) -> dict[str, Any]:
        asked = self.asked
        # NCCL connects its ranks in the first rounds, which are not measured
        common = {"rounds": asked.rounds, "warmup": 5, "bulk_bytes": asked.bulk_bytes}
        return {"kind": kind, "device": asked.device, "fault": self.fault, **common, **more}

    def _each(self, kind: str, key: str, items: list[Any], name: Any, verdict: Any) -> list[Row]:
        """One process for all items; after one that hangs or dies, a new process for the rest."""
        rows: list[Row] = []
        left = list(items)
        while left:
            job = self._job(kind, count=self.count, **{key: left})
            [result] = run_processes([job], self.limits)
            done = [x for x in left if name(x) in result.steps]
            rows += [verdict(name(x), result.steps[name(x)], self.floors) for x in done]
            left = left[len(done) :]
            if left:
                check = "copy" if kind == "copies" else kind
                why = loss([result]) or "ended before it was done"
                rows.append(row(check, name(left[0]), FAILED, why, output=[result.output]))
                left = left[1:]
        return rows


def row(check: str, subject: str, verdict: str, why: str = "", **measured: Any) -> Row:
    """One row of the report."""
    head = {"check": check, "subject": subject, "verdict": verdict, "why": why}
    return {**head, "measured": measured}


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
    is_low = share < floors["writes_share"]
    why = f"posted writes collapse: {share:.0%} of a flow's rate remains" if is_low else ""
    return row("writes", name, FAILED if why else PASSED, why, **measured)


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
        why, name = "", f"{subject}, {size // 1024} KiB"
        if median > most:
            why = f"median {median} µs, above {most:g}"
        verdict = FAILED if why else PASSED
        rows.append(row("latency", name, verdict, why, size_bytes=size, **measured))
    if "bandwidth" in results[0].steps and world == 1:
        why = "one rank: nothing crosses a link"
        rows.append(row("bandwidth", subject, NOT_APPLICABLE, why))
    elif "bandwidth" in results[0].steps:
        steps = [r.steps["bandwidth"] for r in results]
        rates = ("gb_per_s", "bus_gb_per_s")
        measured = {n: round(min(step[n] for step in steps), 3) for n in rates}
        least, rate = floors["all_reduce_bus_gb_per_s"], measured["bus_gb_per_s"]
        why = f"{rate} GB/s, below {least:g}" if rate < least else ""
        rows.append(row("bandwidth", subject, FAILED if why else PASSED, why, **measured))
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


def main(argv: list[str]) -> int:
    """Test, write the report, print a line for each row."""
    asked = arguments(argv)
    session = Session(asked)
    start = time.monotonic()
    rows = session.run()
    seen = {r["verdict"] for r in rows}
    # the worst that was seen; where nothing could be judged, unknown
    verdict = next((x for x in (FAILED, UNKNOWN, PASSED) if x in seen), UNKNOWN)
    report = {
        "version": 1,
        "verdict": verdict,
        "device": asked.device,
        "count": session.count,
        "seconds": round(time.monotonic() - start, 2),
        "floors": session.floors,
        "rows": rows,
    }
    text = json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    asked.report.write_text(text, encoding="utf-8")
    for one in rows:
        line = f"{one['verdict']:<15}{one['check']:<12}{one['subject']}"
        print(f"{line}: {one['why']}" if one["why"] else line, file=sys.stderr)
    print(f"{verdict} in {report['seconds']} s", file=sys.stderr)
    return CODES[verdict]

"""Which tests a machine gets, one after the other, and the report of them all."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from . import judge
from .judge import NOT_APPLICABLE, UNKNOWN, Row, row
from .processes import Limits, RankResult, run_processes

# exit codes, as the help of the folder's __main__ promises
CODES = {judge.PASSED: 0, judge.FAILED: 1, judge.UNKNOWN: 2}
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
        usual = judge.DEFAULT_FLOORS if asked.device == "cuda" else judge.NO_FLOORS
        self.floors = {**usual, **asked.floors}
        self.sizes = [int(x) * 1024 for x in asked.sizes_kib.split(",") if x]
        self.fault: dict[str, Any] | None = None
        if asked.fault:
            kind, rank, *step = asked.fault.split(":")
            self.fault = {"kind": kind, "rank": int(rank), **({"step": step[0]} if step else {})}
        self.count = 0

    def run(self) -> list[Row]:
        """All rows; a test that hangs or dies is one of them."""
        rows = [self._card()]
        if self.count == 0:
            return rows
        wanted, cards = self.asked.only or _TESTS, range(self.count)
        one = "there is one card"
        if "copy" in wanted:
            pairs = [(a, b) for a in cards for b in cards]
            name = "copy {0[0]}->{0[1]}".format
            rows += self._each("copies", "pairs", pairs, name, judge.judge_copy)
            if self.count == 1:
                rows.append(row("copy", "between cards", NOT_APPLICABLE, one))
        if "all_reduce" in wanted:
            results: list[RankResult] = []
            # each number of ranks: some machines hang only with many (local-inference-lab/rtx6kpro)
            for world in range(min(self.asked.from_ranks, self.count), self.count + 1):
                jobs = [self._job("reduce", world=world, sizes=self.sizes) for _ in range(world)]
                results = run_processes(jobs, self.limits)
                rows += judge.judge_reduce(world, results, self.sizes, self.floors)
            if self.count == 1:
                rows.append(row("all_reduce", "2 or more ranks", NOT_APPLICABLE, one))
            rows.append(judge.judge_library(results, self.asked.library, self.asked.device))
        if "writes" in wanted and self.count < 2:
            rows.append(row("writes", "concurrent", NOT_APPLICABLE, one))
        elif "writes" in wanted:
            shifts, name = list(cards)[1:], "writes +{}".format
            rows += self._each("writes", "shifts", shifts, name, judge.judge_writes)
        return rows

    def _job(self, kind: str, **more: Any) -> dict[str, Any]:
        asked = self.asked
        # NCCL connects its ranks in the first rounds, which are not measured
        common = {"rounds": asked.rounds, "warmup": 5, "bulk_bytes": asked.bulk_bytes}
        return {"kind": kind, "device": asked.device, "fault": self.fault, **common, **more}

    def _card(self) -> Row:
        device, ranks = self.asked.device, self.asked.ranks
        # a planted fault is for the tests, not for the look at the cards before them
        job = {**self._job("card"), "fault": None}
        # the first use of CUDA may take long, so it has the time limit of a start
        [result] = run_processes([job], Limits(self.limits.start_s, self.limits.start_s))
        if why := judge.loss([result]):
            return row("cards", device, UNKNOWN, f"torch: {why}", output=[result.output])
        card = result.steps["card"]
        cards = int(card["count"])
        self.count = min(cards, ranks or cards)
        if not cards:
            return row("cards", "cuda", UNKNOWN, "torch sees no CUDA device", **card)
        if device == "cuda" and ranks and ranks > cards:
            why = f"{ranks} were asked for, torch sees {cards}"
            return row("cards", "cuda", judge.FAILED, why, **card)
        if device == "cpu":
            self.count = ranks or 2
        return row("cards", device, judge.PASSED, **card)

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
                why = judge.loss([result]) or "ended before it was done"
                rows.append(row(check, name(left[0]), judge.FAILED, why, output=[result.output]))
                left = left[1:]
        return rows


def main(argv: list[str]) -> int:
    """Test, write the report, print a line for each row."""
    asked = arguments(argv)
    session = Session(asked)
    start = time.monotonic()
    rows = session.run()
    verdict = judge.overall(rows)
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

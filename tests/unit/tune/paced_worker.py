"""A worker with a card of its own making: its times follow from the sizes, its faults are planted.

Speaks as `pipeline/serving/tune/worker` does. The first argument is a file with the faults, by a
size of a configuration such as `num_warps=8`; the second one counts the trials that were asked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DEFAULT = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
# How much a step away from these costs, in shares of the time.
BEST = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
CARD = {"name": "Card", "driver_version": "580.1", "compute_cap": "12.0"}


def microseconds(config: dict[str, int]) -> float:
    """Shorter the nearer a configuration is to the best."""
    away = sum(abs(config[k].bit_length() - BEST[k].bit_length()) for k in BEST)
    return 100.0 * (1 + 0.1 * away)


def answer(request: dict[str, Any], faults: dict[str, str]) -> dict[str, Any]:
    """One trial as a card would give it, or a planted fault."""
    config = request["config"] or DEFAULT
    fault = next((f for key, f in faults.items() if key in sizes(config, request)), "")
    if fault == "exits":
        os._exit(9)
    if fault == "hangs":
        time.sleep(1000)
    if fault == "garbage":
        return {"tried_us": "fast", "default_us": [None]}
    if fault == "endless":
        sys.stdout.write("9" * (5 << 20))
        sys.stdout.flush()
        time.sleep(1000)
    turns = [1 + 0.001 * (turn % 3) for turn in range(request["repeats"])]
    tried = [microseconds(config) * turn for turn in turns]
    if fault == "outlier":
        # faster by far, but for one time among many
        tried = [each / 10 for each in tried]
        tried[0] *= 40
    return {
        "default": DEFAULT,
        "error": {"wrong": 0.7, "nan": None}.get(fault, 1e-4),
        "default_us": [microseconds(DEFAULT) * turn for turn in turns],
        "tried_us": tried[1:] if fault == "untimed" else tried,
        "failed": "RuntimeError: CUDA error" if fault == "fails" else "",
        "card": {**CARD, "x.hw_slowdown": "Active" if fault == "hot" else "Not Active"},
    }


def sizes(config: dict[str, int], request: dict[str, Any]) -> set[str]:
    """What faults are planted by."""
    named = {f"{name}={value}" for name, value in config.items()}
    named.add(f"repeats={request['repeats']}")
    return {*named, "all", "default" if request["config"] is None else "tried"}


def main() -> None:
    """Answers until the input ends."""
    for line in sys.stdin:
        # again for each: a test may plant others in between
        faults = json.loads(Path(sys.argv[1]).read_text())
        request = json.loads(line)
        with Path(sys.argv[2]).open("a") as asked:
            asked.write(line)
        print(json.dumps({"id": request["id"], **answer(request, faults)}), flush=True)


if __name__ == "__main__":
    main()

"""Does the tuner find faster configurations on a card, and live through crashes and a SIGKILL?

    python -m tests.gpu.tune collect DIR         # here: engines, jobs, what the gate lets pass
    python -m tests.gpu.tune prove DIR RESULT    # on the machine with the card; torch, Triton
    python -m tests.gpu.tune judge DIR RESULT    # here: the tables that it wrote, by the gate

`collect` judges all configurations of a grid for sm_120, with the image's own Triton. `prove` tries
only those that passed, in processes of which some are made to crash or to hang, is killed once on
the way, and goes on. What it writes is of the card that is there, whatever that is.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from pipeline.core.model import canonical_json
from pipeline.serving.tune import search
from pipeline.serving.tune.moe import MoeShape, case_for
from pipeline.serving.tune.trials import Config, Journal, TrialWorker
from tests.gpu.warm import unpacked_job

ROOT = Path(__file__).resolve().parents[2]
# Kimi K2's experts in fp8 on eight cards, and GLM-4.5-Air's in bf16 on four.
SHAPES = {
    "vllm": MoeShape(experts=384, active=8, width=256, hidden=7168, dtype="fp8_w8a8", block=128),
    "sglang": MoeShape(experts=128, active=8, width=352, hidden=4096, dtype=None),
}
TOKENS, MOST = (512, 16), 18
GRID: dict[str, tuple[int, ...]] = {
    **search.STEPS,
    "BLOCK_SIZE_K": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
}


def collect(folder: Path) -> None:
    """For each engine: its code, its job, and every configuration that fits sm_120."""
    from pipeline.app.tune import gate_judge
    from pipeline.artifacts.store.store import default_root, open_store
    from pipeline.images.assemble.plan import plan_image
    from pipeline.images.gate.smem.image_gate import find_case, open_gate
    from pipeline.images.gate.smem.limits import card_for
    from tests.gpu.collect import gate_context

    context = gate_context(open_store(default_root()))
    for image, shape in SHAPES.items():
        with context.store.in_use():
            gate = open_gate(context, plan_image(context.checkout, image, "linux/amd64"))
            tree = gate.patched()
            case = case_for(gate.gates.cases(), shape)
            assert case
            judged = find_case(gate.gates, case["name"])
            job = gate.target(tree, card_for("sm_120")).job([judged])
            job |= {"case": case, "shape": shape.model_dump(), "gpu": 0}
            names = [name for name in GRID if name != "GROUP_SIZE_M"]
            # scales are for blocks of K
            grid = {**GRID, "BLOCK_SIZE_K": (shape.block,)} if shape.block else GRID
            configs = [
                dict(zip(names, sizes, strict=True))
                for sizes in itertools.product(*(grid[name] for name in names))
            ]
            passed = gate_judge(gate, card_for("sm_120"), judged)(configs)
        place = folder / image
        place.mkdir(parents=True, exist_ok=True)
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        (place / "passed.json").write_text(json.dumps(passed), encoding="utf-8")
        with tarfile.open(place / "engine.tar.xz", "w:xz") as archive:
            # with its metadata: vLLM looks up its own version
            for part in sorted(tree.folder.iterdir()):
                archive.add(part, part.name)
        print(f"{image}: {len(passed)} of {len(configs)} fit")


def tune_one(folder: Path, result: Path) -> None:
    """One engine, from where its journal ends."""
    search.STEPS.clear()
    search.STEPS.update(GRID)
    passed = {canonical_json(each) for each in json.loads((folder / "passed.json").read_text())}

    def judge(configs: Any) -> list[Config]:
        return [
            each
            for each in configs
            if canonical_json({k: v for k, v in each.items() if k != "GROUP_SIZE_M"}) in passed
        ]

    planted = Path(__file__).with_name("planted_worker.py")
    command = [sys.executable, str(planted), str(result / "job.json")]
    journal = Journal(result / "trials.jsonl")
    report: dict[str, Any] = {"kept": journal.read()}
    with (result / "worker.log").open("ab") as errors:
        worker = TrialWorker(command, dict(os.environ), errors)
        # a hang costs the whole limit
        ask = worker.ask
        worker.ask = lambda request, limit_s=25.0: ask(request, limit_s)  # type: ignore[method-assign]
        try:
            report["about"] = worker.ask({})
            rows, seeds = [], list[Config]()
            for tokens in TOKENS:
                row = search.tune_tokens(
                    worker, journal, tokens, judge=judge, seeds=seeds, most=MOST
                )
                rows.append(row.model_dump())
                seeds = [row.config] if row.is_faster else []
                (result / "rows.json").write_text(json.dumps({**report, "rows": rows}, indent=1))
        finally:
            worker.stop()


def prove(collected: Path, results: Path) -> None:
    """All engines: each is killed once in the middle, and goes on."""
    for folder in sorted(path for path in collected.iterdir() if (path / "job.json").is_file()):
        result = results / folder.name
        job = unpacked_job(folder, result)
        (result / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "tests.gpu.tune", "one", str(folder), str(result)]
        journal = result / "trials.jsonl"
        process = subprocess.Popen(command)
        while process.poll() is None and (
            not journal.exists() or len(journal.read_bytes().splitlines()) < 8
        ):
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = len(journal.read_bytes().splitlines())
        print(f"{folder.name}: killed after {kept} trials", flush=True)
        start = time.monotonic()
        subprocess.run(command, check=True)
        print(f"{folder.name}: went on for {time.monotonic() - start:.0f} s", flush=True)
        lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
        asked = [canonical_json([t["tokens"], t["config"], t["repeats"]]) for t in lines]
        assert len(asked) == len({*asked}), "a trial was asked twice"
        print(f"{folder.name}: {len(lines)} trials, each once", flush=True)
        for line in lines:
            if line["failed"]:
                print("  ", line["config"], line["failed"][:100], flush=True)
        for row in json.loads((result / "rows.json").read_text())["rows"]:
            print("  ", row, flush=True)


def judge(collected: Path, results: Path) -> None:
    """Every configuration of the tables is among those that the gate let pass."""
    for folder in sorted(path for path in collected.iterdir() if (path / "job.json").is_file()):
        rows = json.loads((results / folder.name / "rows.json").read_text())["rows"]
        passed = {canonical_json(each) for each in json.loads((folder / "passed.json").read_text())}
        for row in rows:
            config = {k: v for k, v in row["config"].items() if k != "GROUP_SIZE_M"}
            state = "fits" if canonical_json(config) in passed else "the engine's own choice"
            print(folder.name, row["tokens"], row["config"], state)


if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    work: Any = {"collect": collect, "one": tune_one, "prove": prove, "judge": judge}[name]
    work(*map(Path, paths))

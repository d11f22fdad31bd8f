"""Runs the engines' real kernels on a card: right against float64, and how fast with which blocks.

    python3 -m tests.gpu.kernels OUT.json --engine DIR [--only WORD]

DIR is what `python -m tests.gpu.collect` wrote. Needs torch, Triton and an NVIDIA card; no
network. OUT.json is written anew after every measurement, so a run that is stopped leaves what it
had. `--interpret` runs tiny inputs on the CPU under Triton's interpreter and times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

Json = dict[str, Any]
TINY = {
    **{"new": 70, "prefix": 45, "heads": 4, "batch": 3, "length": 77, "page": 16, "splits": 4},
    **{"tokens": 150, "head": 72, "value": 72, "keys": 2, "mask": 1},
}
KEPT = ("head", "value", "keys", "mask")


def facts(interpret: bool) -> Json:
    """Where the numbers come from."""
    import numpy
    import torch
    import triton

    report: Json = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "card": "none: Triton's interpreter",
    }
    if not interpret:
        card = torch.cuda.get_device_properties(0)
        report.update(
            card=card.name,
            capability=f"{card.major}.{card.minor}",
            multiprocessors=card.multi_processor_count,
            memory_bytes=card.total_memory,
            cuda=torch.version.cuda,
            # mma.sync in place of Hopper's wgmma, and launches padded to SM120's occupancy
            like_sm120=os.environ.get("DISABLE_MMA_V3") == "1",
            note="shared_bytes, registers and spills are of this card's machine code, not SM120's",
        )
    return report


def compare(got: Any, expected: Any, tolerance: float) -> Json:
    """Errors of a result; an element that was never written is not right."""
    import torch

    error = (got.double() - expected.want).abs()
    whole = bool(torch.isfinite(got.double()).all())
    share = (error / expected.size.clamp_min(1e-30)).max()
    relative = error.max() / expected.want.abs().max()
    return {
        "max_error": float(error.max()) if whole else None,
        "max_error_of_largest": float(relative) if whole else None,
        "max_error_share": float(share) if whole else None,
        "tolerance": tolerance,
        "right": whole and float(share) <= tolerance,
    }


def measure(subject: Any, shape: Any, variant: Any, folder: Path, given: Json, want: Any) -> Json:
    """One variant at one shape."""
    from tests.gpu.launches import watched

    row: Json = {"subject": subject.name, "shape": shape.name, "variant": variant.name}
    start = time.monotonic()
    try:
        module = subject.module(folder, variant)
        given[subject.output].fill_(float("nan"))
        with watched(variant.override) as kernels:
            subject.call(module, given)
            row["kernels"] = dict(kernels)
            row.update(compare(given[subject.output], want, subject.tolerance[shape.dtype]))
            if want.want.is_cuda:
                row.update(timed(lambda: subject.call(module, given)))
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    row["seconds"] = round(time.monotonic() - start, 2)
    return row


def timed(call: Any) -> Json:
    """Median of many calls, each after emptying the card's cache; and of a replayed CUDA graph."""
    from triton.testing import do_bench, do_bench_cudagraph

    middle, low, high = do_bench(call, warmup=50, rep=200, quantiles=[0.5, 0.2, 0.8])
    report = {"ms": middle, "ms_low": low, "ms_high": high}
    try:
        report["graph_ms"] = do_bench_cudagraph(call, rep=50, return_mode="median")
    except Exception as error:
        print(f"no graph: {error}", file=sys.stderr)
    return report


def with_ratios(rows: list[Json]) -> list[Json]:
    """Each row's time as a multiple of the first variant's at the same shape."""
    first: dict[tuple[str, str], Json] = {}
    for row in rows:
        base = first.setdefault((row["subject"], row["shape"]), row)
        for key in ("ms", "graph_ms"):
            if key in row and key in base:
                row[f"{key}_ratio"] = round(row[key] / base[key], 4)
    return rows


def say(row: Json) -> None:
    """One line a measurement."""
    shown = row.get("failed") or (
        f"{'right' if row['right'] else 'WRONG'} {row['max_error_share']}"
        f" {row.get('ms', 0):.4f} ms {row.get('ms_ratio', 1)}x {row['kernels']}"
    )
    print(f"{row['subject']} | {row['shape']} | {row['variant']}: {shown}", flush=True)


def tiny(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """One small shape of each type of number."""
    seen = set()
    for shape, variants in pairs:
        if shape.dtype not in seen:
            seen.add(shape.dtype)
            sizes = {**TINY, **{k: v for k, v in shape.sizes.items() if k in KEPT}}
            sizes = {k: sizes[k] for k in shape.sizes}
            yield replace(shape, name=f"{shape.dtype} {sizes}", sizes=sizes), variants


def run(out: Path, folder: Path, only: str, *, interpret: bool, candidates: bool) -> int:
    """Measure everything; 1 where something was wrong or failed."""
    import torch

    from tests.gpu.engine import install_imports
    from tests.gpu.subjects import subjects

    if interpret:
        from pipeline.images.gate.worker.interpreter import install

        install()
        torch.cuda.get_device_capability = lambda *a: (9, 0)
    device = "cpu" if interpret else "cuda"
    install_imports()
    engines = json.loads((folder / "engines.json").read_text(encoding="utf-8"))
    rows: list[Json] = []
    for subject in subjects():
        if only not in subject.name:
            continue
        pairs = subject.pairs(candidates)
        for shape, variants in tiny(pairs) if interpret else pairs:
            given = subject.make(shape, device)
            want = subject.expect(given)
            for variant in variants:
                rows.append(measure(subject, shape, variant, folder, given, want))
                with_ratios(rows)
                say(rows[-1])
                report = {"facts": facts(interpret), "engines": engines, "rows": rows}
                out.write_text(
                    json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8"
                )
    bad = [row for row in rows if "failed" in row or not row["right"]]
    print(f"{len(rows)} measured, {len(bad)} wrong or failed: {out}")
    return 1 if bad or not rows else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="", help="subjects whose name holds this")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--candidates", action="store_true", help="also blocks nobody chose yet")
    parser.add_argument(
        "--like-sm120",
        action="store_true",
        help="mma.sync only, and no more blocks on a multiprocessor than SM120 would hold",
    )
    given = parser.parse_args()
    if given.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    if given.like_sm120:
        from tests.gpu.launches import pad_launches

        os.environ["DISABLE_MMA_V3"] = "1"
        pad_launches()
    return run(
        *(given.out, given.engine, given.only),
        interpret=given.interpret,
        candidates=given.candidates,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Gathers the few engine files that the measurements on a card need, as published and patched.

    python -m tests.gpu.collect DIR

Reads the engines of the store (`SM120_STORE`), fetching them where they are missing, and writes
below 1 MB. The machine with the card then needs nothing but DIR, this checkout, torch and Triton.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import Store, default_root, open_store
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import read_settings
from pipeline.images.assemble.plan import plan_image
from pipeline.images.fetch.inputs import make_fetcher
from pipeline.images.gate.smem.engine import GateContext, WheelFinder
from pipeline.images.gate.smem.image_gate import ImageGate, open_gate
from pipeline.images.spec.checkout import Checkout

ROOT = Path(__file__).parents[2]
# what is measured, and the file of the engine it is in
FILES = {
    "sglang-k2": "sglang/srt/layers/attention/triton_ops/extend_attention.py",
    "sglang": "sglang/kernels/ops/attention/prefill_attention.py",
    "vllm": "vllm/v1/attention/ops/triton_decode_attention.py",
}


def gate_context(store: Store) -> GateContext:
    """What opens an image's gate."""
    client = NetClient(read_settings(()))
    return GateContext(
        Checkout(ROOT),
        store,
        host_platform(),
        lambda: make_fetcher(store, (), False),
        lambda: WheelFinder(client),
    )


def copy_engine(gate: ImageGate, source: str, folder: Path) -> dict[str, object]:
    """One engine's file in all its forms; returns what it is, for the result."""
    trees = {"published": gate.tree, "patched": gate.patched()}
    for name, series in gate.context.checkout.other_series(gate.plan.spec).items():
        trees[name] = gate.patched(series)
    sums = {}
    for form, tree in trees.items():
        data = (tree.folder / source).read_bytes()
        place = folder / form / Path(source).name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        sums[form] = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if sums["published"] == sums["patched"]:
        raise SystemExit(f"{gate.plan.spec.name}: its patches leave {source} as it was")
    return {
        "engine": gate.tree.project,
        "version": gate.tree.version,
        "file": source,
        "patches": [spec.file for spec in gate.series.patches],
        "sha256": sums,
    }


def collect(folder: Path) -> None:
    """Every engine's file, and a table of what they are."""
    context = gate_context(open_store(default_root()))
    report = {}
    with context.store.in_use():
        for image, source in FILES.items():
            plan = plan_image(context.checkout, image, "linux/amd64")
            report[image] = copy_engine(open_gate(context, plan), source, folder / image)
    text = json.dumps(report, indent=2, sort_keys=True) + "\n"
    (folder / "engines.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    collect(parser.parse_args().folder)

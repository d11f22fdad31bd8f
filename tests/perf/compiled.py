"""An edit of one line of a source: what is compiled again, against all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.model import sha256_of
from pipeline.source.toolchain import unpacked_root
from pipeline.store.store import open_store
from tests.perf.edited import ROOT, copy_checkout
from tests.perf.measure import Report
from tests.testbed.packages import CannotHave
from tests.testbed.tiny_source import FILES, Bench, toolchain_deb

# A tiny source of so many objects, of which one is edited.
_OBJECTS = 12
IK_LLAMA = "ik-llama"
_PATCH = "patches/no-cpu-flash-attention.patch"


@dataclass(frozen=True)
class Compiled:
    """One build."""

    wall_s: float
    compiled: int
    kept: int

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s, {self.compiled} compiled, {self.kept} kept"


def measure_tiny(report: Report, scratch: Path) -> None:
    """A source of a dozen files, compiled with this machine's own gcc."""
    try:
        deb = toolchain_deb(scratch / "mirror", compiler=True)
    except CannotHave as reason:
        report.add("edit one line of a source", "not measured here", str(reason))
        return
    names = [f"part{number}" for number in range(_OBJECTS)]
    files = {f"{name}.c": f"int {name}(void) {{ return 1; }}\n" for name in names}
    script = FILES["build.sh"].replace("one two", " ".join(names))
    outputs = tuple(f"{name}.o" for name in names)
    bench = Bench(scratch / "tiny", deb, {**files, "build.sh": script}, outputs)
    bench.home.mkdir()
    bench.write()
    # unpacked once for both
    unpacked_root(bench.store, bench._toolchain(bench.plan()))
    clean = _tiny(bench)
    bench.files["part3.c"] = bench.files["part3.c"].replace("1", "2")
    bench.write()
    _add(report, "tiny source", _tiny(bench), clean)


def _tiny(bench: Bench) -> Compiled:
    start = time.monotonic()
    bench.compile()
    objects = bench.tree().objects
    return Compiled(time.monotonic() - start, objects.compiled, objects.kept)


def measure_ik_llama(report: Report, scratch: Path) -> None:
    """ik_llama.cpp for the CPU, in a store of its own: some twenty CPU-minutes."""
    checkout, store = copy_checkout(scratch / "checkout"), open_store(scratch / "store")
    clean = _build(checkout, store.root)
    _edit(checkout, store.root)
    _add(report, f"{IK_LLAMA} cpu-avx2", _build(checkout, store.root), clean)


def _build(checkout: Path, store: Path) -> Compiled:
    start = time.monotonic()
    done = subprocess.run(_command(checkout, store), cwd=ROOT, stdout=subprocess.PIPE, check=True)
    objects = json.loads(done.stdout)["objects"]
    return Compiled(time.monotonic() - start, objects["compiled"], objects["kept"])


def _command(checkout: Path, store: Path) -> list[str]:
    head = [sys.executable, "-m", "pipeline", "--checkout", str(checkout), "--store", str(store)]
    return [*head, "source", "build", IK_LLAMA, "cpu-avx2", "--json"]


def _edit(checkout: Path, store: Path) -> None:
    """A comment more in a line that the patch adds, and the hash that the spec promises for it."""
    folder = checkout / "images" / "sources" / IK_LLAMA
    patch, spec = folder / _PATCH, folder / "source.yaml"
    lines = patch.read_text(encoding="utf-8").split("\n")
    at = next(i for i, x in enumerate(lines) if x.startswith("+") and x.rstrip().endswith(";"))
    lines[at] += " // edited"
    patch.write_text("\n".join(lines), encoding="utf-8")
    # the build itself says which hash the edited file has
    done = subprocess.run(
        _command(checkout, store), cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    found = re.search(r"after the patch is (\S+), source.yaml has (\S+)", done.stderr)
    if found is None:
        raise RuntimeError(f"the edited patch was taken: {sha256_of(patch.read_bytes())}")
    text = spec.read_text(encoding="utf-8").replace(found[2], found[1])
    spec.write_text(text, encoding="utf-8")


def _add(report: Report, what: str, edited: Compiled, clean: Compiled) -> None:
    ratio = f"1/{clean.wall_s / edited.wall_s:.1f}"
    report.add(f"edit one line of a source: {what}", str(edited), f"clean: {clean}", ratio)

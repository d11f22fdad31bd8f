"""An edit of one line of a source: what is compiled again, against all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from pipeline.artifacts.store.store import open_store
from pipeline.core.model import sha256_of
from pipeline.images.source.toolchain import unpacked_root
from tests.perf.edited import ROOT, copy_checkout
from tests.perf.measure import Cost, Report, measured, run
from tests.testbed.packages import CannotHave
from tests.testbed.tiny_source import FILES, Bench, toolchain_deb

# A tiny source of so many objects, of which one is edited.
_OBJECTS = 12
IK_LLAMA = "ik-llama"
_PATCH = "patches/no-cpu-flash-attention.patch"


def measure_tiny(report: Report, scratch: Path, turns: int) -> None:
    """A source of a dozen files, compiled with this machine's own gcc: all, then one edited."""
    try:
        deb = toolchain_deb(scratch / "mirror", compiler=True)
    except CannotHave as reason:
        report.fact("edit one line of a source, not measured", str(reason))
        return
    names = [f"part{number}" for number in range(_OBJECTS)]
    files = {f"{name}.c": f"int {name}(void) {{ return 1; }}\n" for name in names}
    script = FILES["build.sh"].replace("one two", " ".join(names))
    outputs = tuple(f"{name}.o" for name in names)
    clean: list[Cost] = []
    edited: list[Cost] = []
    for turn in range(turns):
        # an edit needs the clean build before it, so the order of the two cannot alternate
        bench = Bench(scratch / f"tiny-{turn}", deb, {**files, "build.sh": script}, outputs)
        bench.home.mkdir()
        bench.write()
        # unpacked once for both
        unpacked_root(bench.store, bench._toolchain(bench.plan()))
        clean.append(_compile_tiny(bench, compiled=_OBJECTS))
        bench.files["part3.c"] = bench.files["part3.c"].replace("1", "2")
        bench.write()
        edited.append(_compile_tiny(bench, compiled=1))
    more = f", 1 of {_OBJECTS} files compiled"
    report.compare("edit one line of a tiny source", edited, "compile all of it", clean, more)


def _compile_tiny(bench: Bench, compiled: int) -> Cost:
    with measured() as costs:
        bench.compile()
    assert bench.tree().objects.compiled == compiled
    return costs[0]


def measure_ik_llama(report: Report, scratch: Path) -> None:
    """ik_llama.cpp for the CPU, in a store of its own: some twenty CPU-minutes, once."""
    checkout, store = copy_checkout(scratch / "checkout"), open_store(scratch / "store")
    said = scratch / "built.json"
    clean = run(_command(checkout, store.root), cwd=ROOT, out=said)
    _edit(checkout, store.root)
    edited = run(_command(checkout, store.root), cwd=ROOT, out=said)
    objects = json.loads(said.read_bytes())["objects"]
    more = f", {objects['compiled']} compiled, {objects['kept']} kept"
    report.compare(f"edit one line of {IK_LLAMA} cpu-avx2", [edited], "compile all", [clean], more)


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

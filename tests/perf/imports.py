"""How long imports and a start take in an image: with Python files compiled before, and without."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path

from pipeline.artifacts.store.store import Store
from pipeline.images.assemble.image import find_built
from pipeline.images.assemble.plan import PYCACHE, plan_image
from pipeline.images.source.toolchain import unpacked
from pipeline.images.spec.checkout import Checkout
from pipeline.images.warm.target import RootedSandbox
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import merged_flags
from pipeline.serving.recipe.tiny import tiny_gguf
from tests.perf.measure import Cost, Report, in_turns, run

ROOT = Path(__file__).resolve().parents[2]
# Much of what a server imports; `sgl_kernel`, which the rest asks for, takes a driver's library.
_COMMON = "torch._inductor.compile_fx, transformers.models.auto.modeling_auto, fastapi, xgrammar"
ENGINES = {
    "sglang-k2-warm": f"import sglang.srt.server_args, {_COMMON}",
    "sglang-warm": f"import sglang.srt.server_args, {_COMMON}",
    # what `vllm serve` imports before it looks for a card, but its compiled operators
    "vllm-warm": f"import vllm.engine.arg_utils, vllm.entrypoints.launchers.cli_args, {_COMMON}",
}
# A whole start: from its first process until it listens. No health: the sandbox has no loopback.
TINY = "tiny-cpu"
_START = """
import subprocess, sys
said = []
with subprocess.Popen(
    sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
) as engine:
    for line in engine.stdout:
        said.append(line)
        if "serve.py: ready on" in line:
            engine.terminate()
            break
    else:
        sys.exit("it never listened: " + "".join(said[-5:]))
    engine.stdout.read()
"""


def measure_imports(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """In turns: what the warm layer brings, nothing, and what Python itself kept of a first run."""
    empty, home = scratch / "empty", scratch / "home"
    for folder in (empty, home):
        folder.mkdir()
    # where the sandbox shows it
    inside = {"HOME": f"/warm/{home.name}", "PATH": "/usr/bin:/bin", "PYTHONPATH": ""}
    for name, program in ENGINES.items():
        plan = plan_image(Checkout(ROOT), name, "linux/amd64")
        image = find_built(store, plan)
        if image is None:
            report.fact(f"imports of {name}", f"not measured: `sm120 build {name}` comes first")
            continue
        with unpacked(store, image) as top:
            sandbox = RootedSandbox(kind="namespaces", held=[], system=str(top.absolute()))
            words = ["/opt/venv/bin/python", "-c", program]
            command = sandbox.command(words, read=(), write=[home], root=empty, cwd=home)

            def cost(prefix: str, *, keep: bool = False, start: list[str] = command) -> Cost:
                kept = {} if keep else {"PYTHONDONTWRITEBYTECODE": "1"}
                return run(start, env={**inside, "PYTHONPYCACHEPREFIX": prefix, **kept})

            own = f"{inside['HOME']}/own"
            cost(own, keep=True)  # and files come from memory after it
            warm, cold, kept = in_turns(
                options.turns,
                partial(cost, f"/{PYCACHE}"),
                partial(cost, "/nowhere"),
                partial(cost, own),
            )
        report.compare(f"imports of {name}, compiled before", warm, "none compiled", cold)
        report.compare(f"imports of {name}, compiled before", warm, "Python's own, kept", kept)
    measure_tiny_start(report, store, scratch / "start", options)


def measure_tiny_start(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """The recipe tiny-cpu, whose launcher is Python: until it listens."""
    recipe = Recipes([ROOT / "recipes"]).read(TINY)
    image = find_built(store, plan_image(Checkout(ROOT), str(recipe.image), "linux/amd64"))
    if image is None:
        return report.fact(
            f"start of {TINY}", f"not measured: `sm120 build {recipe.image}` comes first"
        )
    empty, home, weights = (scratch / name for name in ("empty", "home", "weights"))
    for folder in (empty, home, weights):
        folder.mkdir(parents=True)
    (weights / "tiny.gguf").write_bytes(tiny_gguf())
    inside = {"HOME": f"/warm/{home.name}", "PATH": "/usr/bin:/bin", "PYTHONPATH": ""}
    with unpacked(store, image) as top:
        sandbox = RootedSandbox(kind="namespaces", held=[], system=str(top.absolute()))
        flags = ["--model", f"/warm/{weights.name}/tiny.gguf", *merged_flags(recipe).arguments()]
        words = ["/opt/venv/bin/python", "-c", _START, *image.plan.entrypoint, *flags]
        words += ["--host", "0.0.0.0", "--port", "8080"]
        command = sandbox.command(words, read=(), write=[home, weights], root=empty, cwd=home)

        def cost(*, keep: bool) -> Cost:
            more = {"PYTHONPYCACHEPREFIX": f"{inside['HOME']}/own" if keep else "/nowhere"}
            more |= {} if keep else {"PYTHONDONTWRITEBYTECODE": "1"}
            return run(command, env={**inside, **more})

        cost(keep=True)  # and files come from memory after it
        kept, cold = in_turns(options.turns, partial(cost, keep=True), partial(cost, keep=False))
    report.compare(
        f"start of {TINY} until it listens, Python files kept", kept, "none compiled", cold
    )

"""How long an engine's imports take in its image: with the files compiled before, and without."""

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
from tests.perf.measure import Cost, Report, in_turns, run

ROOT = Path(__file__).resolve().parents[2]
# Much of what a server imports; `sgl_kernel`, which the rest asks for, takes a driver's library.
_COMMON = "torch._inductor.compile_fx, transformers.models.auto.modeling_auto, fastapi, xgrammar"
ENGINES = {
    "sglang-k2-warm": f"import sglang.srt.server_args, {_COMMON}",
    "sglang-warm": f"import sglang.srt.server_args, {_COMMON}",
}


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

"""A module of FlashInfer compiled without a card: the same bytes twice, and found by FlashInfer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import WarmPlan, plan_image
from pipeline.images.gate.smem.image_gate import ImageGate, open_gate
from pipeline.images.gate.smem.run import ask_workers, kept_or_asked
from pipeline.images.spec.image import ModuleSpec, WarmSpec
from pipeline.images.warm.modules import (
    ARCH_LIST,
    ModuleTarget,
    module_cases,
    open_modules,
    pack_modules,
)
from tests.gpu.collect import gate_context

# the smallest of those with kernels, in both generations of FlashInfer
PAGE = ModuleSpec(name="page", make="flashinfer.jit.page:gen_page_module", recipes=["*"])
FAILING = "#!/bin/sh\necho no compiler >&2\nexit 1\n"
# In the image: FlashInfer's own way to a module, with what an engine has of it.
LOAD = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("compiler", "/warm-programs/compiler/__main__.py")
compiler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiler)
compiler.import_jit(sys.argv[1])
import flashinfer.jit.page
page = flashinfer.jit.page.gen_page_module()
found = {"is_aot": page.is_aot, "path": str(page.get_library_path())}
try:
    module = page.build_and_load()
    found["functions"] = [n for n in ("append_paged_kv_cache",) if hasattr(module, n)]
except Exception as error:
    found["error"] = type(error).__name__
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def gate(big_store: Path) -> Iterator[ImageGate]:
    context = gate_context(open_store(big_store))
    with context.store.in_use():
        yield open_gate(context, plan_image(context.checkout, "vllm", "linux/amd64"))


@pytest.fixture(scope="module")
def plan(gate: ImageGate) -> WarmPlan:
    plan = plan_image(gate.context.checkout, "vllm-warm", "linux/amd64").warm
    assert plan
    return replace(plan, spec=WarmSpec(modules=[PAGE]))


def loaded(target: ModuleTarget, script: Path, **env: str) -> dict[str, Any]:
    """What FlashInfer finds in the root, with compilers that fail."""
    variables = target.variables(module_cases(target.plan), Path("work"))
    done = target.sandbox.run(
        target.environment.command(str(script), f"/{target.plan.base.venv.site}"),
        read=[script],
        env={**variables, "FLASHINFER_DISABLE_JIT": "1", **env},
        timeout_s=180,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "said": done.stderr.decode()}


@pytest.mark.big
@pytest.mark.timeout(3600)  # on two cores that others use, too
def test_a_module_is_the_same_twice_and_flashinfer_loads_it_without_a_compiler(
    gate: ImageGate, plan: WarmPlan, tmp_path: Path
) -> None:
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    with open_modules(gate, plan) as target:
        # of an earlier day where the store has one, then by a new process with another number
        first = [answer for _, answer, _ in kept_or_asked(target, module_cases(plan))]
        modules, files = pack_modules(target, first)
        assert pack_modules(target, ask_workers(target, module_cases(plan))) == (modules, files)
        assert not any(str(gate.context.store.root).encode() in data for data in files.values())
        root = Path(target.sandbox.system)  # type: ignore[attr-defined]
        without = loaded(target, script)
        assert (without["is_aot"], without["error"]) == (False, "MissingJITCacheError")
        index = {"modules": modules.model_dump(mode="json")}
        for path, data in {**files, "opt/warm/index.json": json.dumps(index).encode()}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        for tool in ("usr/local/cuda/bin/nvcc", "opt/venv/bin/ninja", "usr/bin/g++"):
            (root / tool).unlink()
            (root / tool).write_text(FAILING)
            os.chmod(root / tool, 0o755)
        found = loaded(target, script)
        assert found["is_aot"], found["said"]
        assert found["path"] == "/opt/warm/flashinfer/page/page.so"
        assert found["functions"] == ["append_paged_kv_cache"]
        # FlashInfer itself looks at none of this before it loads a library
        refused = loaded(target, script, **{ARCH_LIST: "12.0a"})
        assert (refused["is_aot"], refused["error"]) == (False, "MissingJITCacheError")
        library = root / "opt/warm/flashinfer/page/page.so"
        whole = library.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:4096] + b"\1" + whole[4097:]):
            library.write_bytes(damaged)
            refused = loaded(target, script)
            assert (refused["is_aot"], refused["error"]) == (False, "MissingJITCacheError")
            assert "page.so is " in refused["said"]

"""Which modules of FlashInfer become part of a warm layer, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zlib
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import StepFailed
from pipeline.images.assemble.plan import MODULE_COMPILER, MODULE_READER, WarmPlan, plan_image
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ModuleSpec, WarmSpec
from pipeline.images.warm.modules import (
    ModuleAnswer,
    ModuleTarget,
    module_cases,
    pack_modules,
)
from pipeline.images.warm.target import RootedEnvironment, RootedSandbox
from tests.unit.gate.smem.test_run import FACTS
from tests.unit.warm.test_warm_layer import CHECKOUT, CUBINS

MAKE = "flashinfer.jit.page:gen_page_module"
PAGE = ModuleSpec(name="page", make=MAKE, recipes=["kimi-*"])
CODE = (CUBINS / "sm_120a.cubin").read_bytes()


def plan_with(*modules: ModuleSpec) -> WarmPlan:
    base = plan_image(CHECKOUT, "sglang-k2", "linux/amd64")
    spec = WarmSpec(modules=list(modules))
    return WarmPlan("warm-image", base, spec, (), "sha256:1", "sha256:2", "", "sha256:3")


def target_of(plan: WarmPlan, folder: Path) -> ModuleTarget:
    sandbox = RootedSandbox(kind="namespaces", held=[], system=str(folder / "root"))
    return ModuleTarget(
        open_store(folder / "store"),
        RootedEnvironment(folder / "environment", FACTS, ()),
        EngineTree(folder, "engine", "1", f"sha256:{'0' * 64}"),
        plan,
        f"sha256:{'2' * 64}",
        sandbox=sandbox,
    )


@pytest.fixture
def target(tmp_path: Path) -> ModuleTarget:
    return target_of(plan_with(PAGE), tmp_path)


def compiled(data: bytes = CODE, **more: object) -> ModuleAnswer:
    return ModuleAnswer.model_validate(
        {
            "case": "page",
            "ended": "compiled",
            "sha256": hashlib.sha256(data).hexdigest(),
            "library": base64.b85encode(zlib.compress(data)).decode(),
            **more,
        }
    )


def test_a_module_lies_where_its_reader_looks_with_its_digest_and_recipes(
    target: ModuleTarget,
) -> None:
    modules, files = pack_modules(target, [compiled()])
    assert files["opt/warm/flashinfer/page/page.so"] == CODE
    assert files[f"{target.plan.base.venv.site}/flashinfer_jit_cache.py"]
    entry = modules.entries["page"]
    assert entry.sha256 == hashlib.sha256(CODE).hexdigest()
    assert (entry.recipes, entry.size_bytes, entry.make) == (["kimi-*"], len(CODE), MAKE)
    assert (modules.flashinfer, modules.architectures) == ("0.6.1", "12.0a")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (CODE[:300], "unreadable"),
        ((CUBINS / "sm_90a.ptxas-12.8.cubin").read_bytes(), "no kernel image"),
        ((CUBINS / "hopper.so").read_bytes(), "no kernel image"),
        ((CUBINS / "plain.so").read_bytes(), "CUDA code"),
        ((CUBINS / "compute_120.fatbin").read_bytes(), ""),
        (b"no library", ""),
        (b"", ""),
    ],
)
def test_a_module_without_machine_code_for_the_card_stops_the_layer(
    data: bytes, reason: str, target: ModuleTarget
) -> None:
    with pytest.raises(StepFailed, match=f"warm-image warm kernels: page: .*{reason}"):
        pack_modules(target, [compiled(data)])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (compiled(sha256="0" * 64), "is not what its worker compiled"),
        (compiled(library="!"), "cannot be unpacked"),
        (compiled(library=base64.b85encode(b"text").decode()), "cannot be unpacked"),
        (compiled(ended="raised", message="RuntimeError: no nvcc"), r"\(raised\): RuntimeError"),
        (compiled(ended="died", message="the worker died"), r"\(died\)"),
        (compiled(ended="timed out"), r"\(timed out\)"),
    ],
)
def test_what_a_worker_did_not_compile_whole_stops_the_layer(
    answer: ModuleAnswer, reason: str, target: ModuleTarget
) -> None:
    with pytest.raises(StepFailed, match=reason):
        pack_modules(target, [answer])


def test_the_order_of_answers_decides_no_byte(tmp_path: Path) -> None:
    other = PAGE.model_copy(update={"name": "other"})
    target = target_of(plan_with(other, PAGE), tmp_path)
    answers = [compiled(), compiled(case="other")]
    first, second = (pack_modules(target, order) for order in (answers, answers[::-1]))
    assert first[0].model_dump_json() == second[0].model_dump_json()
    assert first[1] == second[1]


def test_a_module_that_is_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    large = PAGE.model_copy(update={"name": "fused_moe_120", "left_out": "an hour of CPU time"})
    plan = plan_with(PAGE, large)
    assert [case.name for case in module_cases(plan)] == ["page"]
    modules, files = pack_modules(target_of(plan, tmp_path), [compiled()])
    (lack,) = modules.missing
    assert (lack.module, lack.reason) == ("fused_moe_120", "an hour of CPU time")
    assert not any("fused_moe" in path for path in files)


def test_only_the_modules_of_a_recipe_are_compiled_for_it() -> None:
    other = PAGE.model_copy(update={"name": "other", "recipes": ["qwen-*", "glm-5"]})
    plan = plan_with(PAGE, other)
    assert [c.name for c in module_cases(plan, ["kimi-k2"])] == ["page"]
    assert [c.name for c in module_cases(plan, ["glm-5", "qwen-4"])] == ["other"]
    assert module_cases(plan, ["glm-52"]) == []


def test_whatever_decides_its_bytes_gives_a_module_another_key(tmp_path: Path) -> None:
    plan = plan_with(PAGE)
    target, (case,) = target_of(plan, tmp_path), module_cases(plan)
    known = target.key(case)
    assert known == target_of(plan_with(PAGE), tmp_path).key(case)
    # it may take longer elsewhere, and other recipes may call it
    assert target.key(case.model_copy(update={"timeout_s": 1})) == known
    base = plan.base
    pins = [
        pin.model_copy(update={"sha256": "0" * 64}) if pin.name == "flashinfer-python" else pin
        for pin in base.lock.wheels
    ]
    arch = base.spec.model_copy(
        update={"env": {**base.spec.env, "FLASHINFER_CUDA_ARCH_LIST": "12.0f"}}
    )
    changed = [
        target.key(case.model_copy(update={"arguments": {"dtype": "torch.float16"}})),
        target.key(case.model_copy(update={"make": "flashinfer.jit.page:gen_other"})),
        replace(target, base=f"sha256:{'3' * 64}").key(case),
        replace(target, environment=RootedEnvironment(tmp_path / "new", FACTS, ())).key(case),
        *(
            replace(target, plan=replace(plan, base=each)).key(case)
            for each in (
                replace(base, lock=base.lock.model_copy(update={"wheels": pins})),
                replace(base, spec=arch),
            )
        ),
    ]
    assert len({known, *changed}) == 7


def test_nvcc_makes_up_no_names_of_times_and_process_numbers(tmp_path: Path) -> None:
    """A source without a function that others see has such a name in it: CUTLASS's GEMMs do."""
    plan = plan_with(PAGE)
    variables = target_of(plan, tmp_path).variables(module_cases(plan), tmp_path)
    assert variables["NVCC_APPEND_FLAGS"] == "-frandom-seed=sm120"


def test_only_a_compiled_module_is_kept(target: ModuleTarget) -> None:
    (case,) = module_cases(target.plan)
    for ended in ("raised", "died", "timed out", "not imported"):
        target.keep(case, compiled(ended=ended))
        assert not target.answer_path(case).exists()
    target.keep(case, compiled())
    kept = ModuleAnswer.model_validate_json(target.answer_path(case).read_bytes())
    assert kept == compiled()


def test_modules_make_a_layer_stale_and_findings_do_not() -> None:
    plain, with_page = plan_with(), plan_with(PAGE)
    other = plan_with(PAGE.model_copy(update={"left_out": "it takes too long"}))
    assert "modules" not in plain.inputs
    assert len({plain.key, with_page.key, other.key}) == 3
    assert replace(with_page, module_reader="sha256:4").key != with_page.key
    finding = {
        "library": "CuTe DSL",
        "recipes": ["*"],
        "state": "none needed",
        "reason": "nobody calls it",
        "source": "engine/file.py",
    }
    told = with_page.spec.model_copy(update={"findings": [finding]})
    assert replace(with_page, spec=told).key == with_page.key


@pytest.mark.parametrize(
    "wrong",
    [
        {"make": "os:system"},
        {"make": "flashinfer.jit.page:load"},
        {"make": "flashinfer.jit.page"},
        {"name": "../page"},
        {"name": "page.so"},
        {"arguments": {"--flag": 1}},
        {"arguments": {"heads": [1]}},
        {"recipes": []},
    ],
)
def test_a_module_that_could_name_anything_else_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModuleSpec.model_validate({**PAGE.model_dump(), **wrong})


def test_a_module_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="page is listed twice"):
        WarmSpec(modules=[PAGE, PAGE])


# FlashInfer as far as the compiler's program uses it: specs that write a library.
FLASHINFER = {
    "jit/__init__.py": "",
    "jit/env.py": "import os, pathlib\n"
    "FLASHINFER_JIT_DIR = pathlib.Path(os.environ['FLASHINFER_WORKSPACE_BASE'])\n",
    "jit/page.py": """
import pathlib
from . import env
class Spec:
    sources = ["page.cu"]
    def __init__(self, name, data):
        self.name, self.data = name, data
    def build(self, verbose):
        if self.data is None:
            raise RuntimeError("Ninja failed.\\npage.cu(1): error: no such type\\nninja: stopped")
        folder = env.FLASHINFER_JIT_DIR / self.name
        folder.mkdir(parents=True)
        (folder / f"{self.name}.so").write_bytes(pathlib.Path(self.data).read_bytes())
def gen_page_module(data): return Spec("page", data)
def gen_other_module(): return Spec("another_name", "")
def gen_broken_module(): return Spec("broken", None)
""",
    "__init__.py": "raise ImportError('the whole package needs the engine')\n",
}


def test_the_program_takes_what_flashinfer_compiles_and_says_what_it_does_not(
    tmp_path: Path,
) -> None:
    for name, text in FLASHINFER.items():
        path = tmp_path / "site/flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "bin").mkdir()
    # what the image's own binutils do is no matter of this test
    (tmp_path / "bin/strip").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bin/strip").chmod(0o755)
    library = CUBINS / "mixed.so"
    cases = [
        {"name": "page", "make": MAKE, "arguments": {"data": str(library)}},
        {"name": "other", "make": "flashinfer.jit.page:gen_other_module", "arguments": {}},
        {"name": "broken", "make": "flashinfer.jit.page:gen_broken_module", "arguments": {}},
        {"name": "gone", "make": "flashinfer.jit.page:gen_gone_module", "arguments": {}},
    ]
    job, answers = tmp_path / "job.json", tmp_path / "answers"
    job.write_text(json.dumps({"site": str(tmp_path / "site"), "cases": cases}))
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    words = [sys.executable, str(MODULE_COMPILER), str(job), str(answers)]
    subprocess.run(words, env=env, check=True, timeout=60)
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["begins"] for line in lines[::2]] == [case["name"] for case in cases]
    page, *failed = (ModuleAnswer.model_validate(line) for line in lines[1::2])
    assert zlib.decompress(base64.b85decode(page.library)) == library.read_bytes()
    assert [each.ended for each in failed] == ["raised"] * 3
    assert "makes another_name" in failed[0].message
    assert failed[1].message == "RuntimeError: page.cu(1): error: no such type"
    assert "gen_gone_module" in failed[2].message


def test_shipped_modules_serve_recipes_that_are_there() -> None:
    from pipeline.serving.recipe.find import Recipes

    checkout = Checkout(CHECKOUT.root)
    recipes = Recipes([checkout.root / "recipes"])
    for name in checkout.images():
        spec = checkout.spec(name)
        if spec.warm is None:
            continue
        own = [n for n in recipes.names() if recipes.read(n).image in (name, spec.base)]
        named = {p for each in spec.warm.modules for p in each.recipes}
        named |= {p for each in spec.warm.findings for p in each.recipes}
        assert [p for p in named if not any(fnmatchcase(n, p) for n in own)] == [], name
    assert MODULE_READER.is_file()

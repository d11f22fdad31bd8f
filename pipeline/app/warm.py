"""Warm images: compile an engine's kernels before the first request, without a card."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pipeline.app.gate import make_gate_context
from pipeline.app.images import plans_of
from pipeline.app.on_slurm import SlurmNodes, SlurmOrder
from pipeline.app.workspace import Workspace
from pipeline.core import log
from pipeline.core.errors import SpecInvalid, StepFailed, UnknownImage
from pipeline.core.files import os_errors_explained, write_bytes
from pipeline.core.model import Frozen
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.layer import read_layer_file
from pipeline.images.assemble.plan import WarmPlan
from pipeline.images.gate.smem.cases import KernelCase, read_gates
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.smem.image_gate import open_gate
from pipeline.images.gate.smem.run import kept_or_asked
from pipeline.images.spec.image import Library
from pipeline.images.warm.bytecode import compile_python
from pipeline.images.warm.layer import WarmIndex, pack_entries, read_warm, write_warm
from pipeline.images.warm.modules import (
    WarmModules,
    module_cases,
    open_modules,
    pack_modules,
)
from pipeline.images.warm.target import WarmAnswer, open_warm
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import merged_flags

# What a start may compile beside Triton's kernels, by the wheels that bring the compilers' callers.
_LIBRARIES: dict[Library, tuple[str, ...]] = {
    "FlashInfer": ("flashinfer-python",),
    "CuTe DSL": ("nvidia-cutlass-dsl",),
    "DeepGEMM": ("deep-gemm", "sgl-kernel", "sglang-kernel", "vllm"),
}
# Torch compiles such a function with Inductor, for the card and the shapes of its first call.
_DECORATED = re.compile(rb"(?m)^[ \t]*@torch\.compile(?![\w.])")


@dataclass(frozen=True)
class WarmRequest:
    """Which image to warm, for which of its recipes and which card."""

    image: str
    platform: str | None = None
    recipes: tuple[str, ...] = ()  # none: all of its cases
    all_recipes: bool = False  # of the spec: a report is else about those that name the image
    arch: str | None = None
    output: Path | None = None
    mirrors: tuple[str, ...] = ()
    offline: bool = False


@dataclass(frozen=True)
class Warmed:
    """The compiled kernels: the index of all entries, and where they are."""

    plan: WarmPlan
    index: WarmIndex
    size_bytes: int  # of all files
    seconds: float  # that workers took for the cases that were not known before
    layer: str | None  # its digest; none where only a part of it was asked for


State = Literal["present", "missing", "unknown", "none needed"]


class LibraryNeeds(Frozen):
    """Which of a library's kernels a recipe needs, and which of them the layer has."""

    recipe: str
    library: str
    state: State
    needed: int | None = None  # none: not known
    present: int = 0
    missing: list[str] = []
    reason: str = ""

    @classmethod
    def of(
        cls, plan: WarmPlan, index: WarmIndex | None, recipe: str, library: Library
    ) -> LibraryNeeds:
        """Find what a recipe needs from a library other than Triton, as far as known."""
        named = plan.spec.modules if library == "FlashInfer" else []
        needed = {spec.name: spec for spec in named if spec.serves(recipe)}
        found = [
            each
            for each in plan.spec.findings
            if each.library == library and any(fnmatchcase(recipe, p) for p in each.recipes)
        ]
        held = index.modules.entries if index and index.modules else {}
        lacking = [
            f"{name}: {spec.left_out or 'not compiled'}"
            for name, spec in needed.items()
            if name not in held
        ]
        lacking += [f"{x.reason} ({x.source})" for x in found if x.state == "missing"]
        row = cls(recipe=recipe, library=library, state="unknown")
        wheels = [w for w in map(plan.base.find_wheel, _LIBRARIES[library]) if w]
        if not wheels:
            why = "its wheel is not in the image"
            return row.model_copy(update={"state": "none needed", "reason": why})
        if needed or lacking:
            counts = {"needed": len(needed), "present": len(needed.keys() & held)} if needed else {}
            why = f"of the {log.count(len(needed), 'module')} that the engine's code names for it"
            # an image without compilers rests on it: what nobody looked at is not there
            is_all = any(each.state == "all listed" for each in found)
            why += "" if is_all else "; others are not known"
            state = "missing" if lacking else "present" if is_all else "unknown"
            return row.model_copy(
                update={
                    **counts,
                    "state": state,
                    "missing": lacking,
                    "reason": why if needed else "",
                }
            )
        if found:
            why = "; ".join(f"{each.reason} ({each.source})" for each in found)
            return row.model_copy(update={"state": "none needed", "reason": why})
        why = f"{wheels[0].name} {wheels[0].version} compiles at run time; no case calls it"
        return row.model_copy(update={"reason": why})


def make_warm(context: GateContext, plans: Sequence[WarmPlan]) -> None:
    """Makes warm layers, and says what changed where an image had another one before."""
    golden = read_golden(context.checkout.golden_path).images
    for plan in plans:
        known = golden.get(f"{plan.image}.{plan.base.architecture}")
        before = known.inputs.get("warm") if known else None
        old = before if isinstance(before, dict) else plan.inputs
        moved = [n for n in {**plan.inputs, **old} if old.get(n) != plan.inputs.get(n)]
        if moved:
            log.say(f"{plan.title}: stale, as {', '.join(moved)} changed; compiled again")
        elif context.store.image_record(plan.image, plan.base.platform):
            why = "this version of the tool compiles in another way, or the layer is gone"
            log.say(f"{plan.title}: compiled again: {why}")
        with context.store.locked(f"warm-{plan.key.removeprefix('sha256:')}"):
            # another process may have made it meanwhile
            if not context.store.layer(plan.key):
                _, files, _ = compile_entries(context, plan, ())
                write_warm(context.store, plan, files)


def compile_entries(
    context: GateContext, plan: WarmPlan, recipes: Sequence[str]
) -> tuple[WarmIndex, dict[str, bytes], float]:
    """Compiles for all cases, or for those of some recipes; index, files and seconds."""
    gate = open_gate(context, plan.base)
    patterns = [p for name in recipes for p in plan.spec.recipes[name]]
    every = gate.gates.cases()
    for recipe, named in plan.spec.recipes.items():
        # it would count as served by kernels that nobody compiled
        if strange := _without_case(named, every):
            hint = f"`sm120 gate find '*' --image {plan.base.spec.name}` lists all cases."
            raise SpecInvalid(f"{plan.image}: {recipe}: {strange[0]!r} fits no case", hint)
    cases = [c for c in every if not patterns or any(fnmatchcase(c.name, p) for p in patterns)]
    title = f"Compiling the kernels of {log.count(len(cases), 'case')} for {plan.card}"
    with open_warm(gate, plan) as target:
        with log.step(title):
            answers = kept_or_asked(target, cases)
        lost = [a for _, a, _ in answers if a.ended in ("died", "timed out", "not imported")]
        # a kernel that does not compile is known by its record, and listed as missing
        lost += [a for _, a, _ in answers if isinstance(a, WarmAnswer) and a.may_pass]
        if lost:
            # without them, the layer would differ on the next machine
            first = f"{lost[0].case} {lost[0].ended}: {lost[0].message}"
            hint = "Run it again: the other cases are kept, and only these are asked."
            if lost[0].ended == "raised":
                hint += f" `sm120 gate run {plan.base.spec.name} --case {lost[0].case}` shows it."
            raise StepFailed(
                f"{plan.title}: {log.count(len(lost), 'case')} without an answer; {first}", hint
            )
        seconds = sum(answer.seconds for _, answer, is_known in answers if not is_known)
        # a part of the layer, or one for another card, is for looking at kernels
        is_whole = not patterns and not plan.arch
        python = compile_python(context, plan, target) if is_whole else {}
        modules: tuple[WarmModules | None, dict[str, bytes]] = (None, {})
        # FLASHINFER_CUDA_ARCH_LIST is the image's own: those for another card would not be found
        if asked := [] if plan.arch else module_cases(plan, recipes):
            with open_modules(gate, plan) as flashinfer:
                with log.step(f"Compiling {log.count(len(asked), 'module')} of FlashInfer"):
                    made = kept_or_asked(flashinfer, asked)
                modules = pack_modules(flashinfer, [answer for _, answer, _ in made])
            seconds += sum(answer.seconds for _, answer, is_known in made if not is_known)
        answered = [(c, a) for c, a, _ in answers if isinstance(a, WarmAnswer)]
        index, files = pack_entries(target, answered, python, modules)
    return index, files, seconds


def _without_case(patterns: Sequence[str], cases: Sequence[KernelCase]) -> list[str]:
    """Those patterns that the name of no case fits."""
    return [p for p in patterns if not any(fnmatchcase(case.name, p) for case in cases)]


def _warm_plan(workspace: Workspace, request: WarmRequest) -> WarmPlan:
    checkout = workspace.checkout()
    plan = plans_of(checkout, (request.image,), request.platform)[0]
    if plan.warm is None:
        on_it = [name for name in checkout.images() if checkout.spec(name).parent == request.image]
        warm = [name for name in on_it if checkout.spec(name).warm]
        hint = f"`sm120 image warm {warm[0]}` is it." if warm else "Add an image with `warm:`."
        raise UnknownImage(f"{request.image}: its spec has no `warm`", hint)
    strange = [name for name in request.recipes if name not in plan.warm.spec.recipes]
    if strange:
        known = ", ".join(plan.warm.spec.recipes) or "none"
        raise SpecInvalid(
            f"{request.image}: warm: has no recipe {strange[0]!r} (it has: {known})",
            "Name the cases that stand for it under `warm: recipes:` of its image.yaml.",
        )
    return replace(plan.warm, arch=request.arch or "")


def warm_image(
    workspace: Workspace, request: WarmRequest, slurm: SlurmOrder | None = None
) -> Warmed:
    """Compiles an image's kernels into its warm layer; or for some recipes, or for another card."""
    start = time.monotonic()
    plan = _warm_plan(workspace, request)
    context = make_gate_context(workspace, request.mirrors, request.offline)
    if slurm:
        words = ["gate", "answer", plan.image, "--only", "warm", "--arch", plan.card]
        words += ["--platform", plan.base.platform, *(["--offline"] if request.offline else [])]
        nodes = SlurmNodes(slurm, words, context.checkout.root)
        context = replace(context, ask=nodes.ask)
    with context.store.in_use():
        index, files, seconds = compile_entries(context, plan, request.recipes)
        is_whole = not request.recipes and not request.arch
        layer = write_warm(context.store, plan, files).digest if is_whole else None
    if request.output:
        with os_errors_explained(request.output):
            for path, data in files.items():
                write_bytes(request.output / path, data)
    log.say(f"  done in {log.seconds(time.monotonic() - start)}")
    size = sum(map(len, files.values()))
    return Warmed(plan, index, size, seconds, layer)


def report_warm(workspace: Workspace, request: WarmRequest) -> list[LibraryNeeds]:
    """For each recipe of an image: which kernels it needs, and which of them the layer has."""
    plan = _warm_plan(workspace, request)
    checkout, rows = workspace.checkout(), list[LibraryNeeds]()
    store = workspace.store_to_read()
    index = read_warm(store, plan)
    state: State
    cases = read_gates(checkout, plan.base.spec.name).cases()
    recipes = Recipes([checkout.root / "recipes"])
    images = (plan.image, plan.base.spec.name)
    own = [name for name in recipes.names() if recipes.read(name).image in images]
    engines = [w for w in map(plan.base.find_wheel, ("sglang", "vllm")) if w]
    decorated: int | None = 0
    for engine in engines[:1]:
        layer = next(each for each in plan.base.all_layers() if engine in each.pins)
        record, below = store.layer(layer.key), f"{plan.base.venv.site}/{engine.name}/"
        rest = store.contents(record) if record else []
        sources = [r for r in rest if r.path.startswith(below) and r.path.endswith(".py")]
        texts = (read_layer_file(store.blob_path(record.digest), r) for r in sources if record)
        decorated = sum(len(_DECORATED.findall(text)) for text in texts) if record else None
    for name in request.recipes or (plan.spec.recipes if request.all_recipes else own):
        patterns = plan.spec.recipes.get(name, [])
        recipe = recipes.read(name) if name in recipes.names() else None
        chosen = [c for c in cases if any(fnmatchcase(c.name, pattern) for pattern in patterns)]
        needed = {(case.name, kernel) for case in chosen for kernel in case.kernels}
        held = {
            (case, e.kernel) for e in (index.entries.values() if index else ()) for case in e.cases
        }
        reasons = {(lack.case, lack.kernel): lack.reason for lack in index.missing} if index else {}
        # another of its variants may be there
        held -= reasons.keys()
        lacking = sorted(needed - held)
        # a case is a call that somebody described, not an observed one
        counted = f"of the {log.count(len(chosen), 'case')} named for it; others are not known"
        cold = f"there is no layer yet: `sm120 image warm {plan.image}`"
        triton = LibraryNeeds(
            recipe=name,
            library="Triton",
            state="missing" if lacking or not index else "present",
            needed=len(needed),
            present=len(needed & held),
            missing=[f"{c}: {k}: {reasons.get((c, k), 'not compiled')}" for c, k in lacking],
            reason=counted if index else cold,
        )
        strange = _without_case(patterns, cases)
        if not patterns or strange:
            why = "no case is named for it under `warm: recipes:`"
            why = f"{strange[0]!r} under `warm: recipes:` fits no case" if strange else why
            triton = LibraryNeeds(recipe=name, library="Triton", state="unknown", reason=why)
        own_rows = [triton, *(LibraryNeeds.of(plan, index, name, each) for each in _LIBRARIES)]
        # they are part of the keys by which entries and modules are found; the folder is not
        compilers = ("TRITON_", "FLASHINFER_", "SM120_WARM")
        differing = [
            f"{key}={value}"
            for key, value in (recipe.variables() if recipe else {}).items()
            if key.startswith(compilers) and key != "TRITON_CACHE_DIR"
            if plan.base.variables.get(key) != value
        ]
        for row in own_rows:
            if differing and row.library in ("Triton", "FlashInfer") and row.state == "present":
                why = f"the recipe sets {differing[0]}, and the layer was compiled without it"
                row = row.model_copy(update={"state": "unknown", "reason": why})
            rows.append(row)
        words = merged_flags(recipe).arguments() if recipe else []
        variables = plan.base.variables
        variables |= recipe.variables() if recipe else {}
        state, why = "unknown", "there is no recipe of this name"
        if not plan.base.find_wheel("torch"):
            state, why = "none needed", "its engine has no torch"
        elif variables.get("TORCH_COMPILE_DISABLE") == "1":
            state, why = "none needed", "TORCH_COMPILE_DISABLE=1 turns it off"
        elif not engines:
            why = "nobody looked at what this engine compiles with torch"
        elif recipe and engines[0].name == "vllm" and "--enforce-eager" not in words:
            # it writes kernels for the shapes of the model on the card
            state, why = "missing", "vLLM compiles the model as it starts: no --enforce-eager"
        elif "--enable-torch-compile" in words:
            state, why = "missing", "SGLang compiles the model: --enable-torch-compile"
        elif recipe and decorated is None:
            why = f"{engines[0].name} {engines[0].version} is not in the store"
        elif recipe:
            # of vocabulary-parallel embeddings and of schedulers, for example
            state = "unknown" if decorated else "none needed"
            why = f"{log.count(decorated or 0, 'function')} of {engines[0].name} are compiled when"
            why += " first called, whatever the flags; TORCH_COMPILE_DISABLE=1 turns that off"
        rows.append(LibraryNeeds(recipe=name, library="torch.compile", state=state, reason=why))
    return rows

"""FlashInfer's modules, compiled ahead of time where the engine would compile them at run time.

FlashInfer asks a package `flashinfer_jit_cache` for compiled modules before it compiles one
(`flashinfer/jit/env.py`). What lies in its own cache is no place for them: ninja judges that by
file times and by the text of CUDA_HOME (https://github.com/flashinfer-ai/flashinfer/issues/4489).
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import StepFailed
from pipeline.core.files import os_errors_explained, unpacked_whole
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.images.assemble.image import assemble_images
from pipeline.images.assemble.plan import (
    MODULE_COMPILER,
    MODULE_FORMAT,
    MODULE_READER,
    WarmPlan,
    program_digest,
)
from pipeline.images.gate.arch import ObjectVerdict, judge_bytes
from pipeline.images.gate.smem.image_gate import ImageGate
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import CaseReply
from pipeline.images.gate.smem.run import WorkerTarget
from pipeline.images.source.toolchain import unpacked, unpacked_root
from pipeline.images.warm.target import (
    GIVEN,
    PROGRAMS,
    STUBS,
    RootedEnvironment,
    RootedSandbox,
    rooted_sandbox,
)

ARCH_LIST = "FLASHINFER_CUDA_ARCH_LIST"
# FlashInfer's sources, what it links with, the compiler, and CUDA's headers.
_WHEELS = ("flashinfer-python", "apache-tvm-ffi", "ninja")
_FOLDERS = ("flashinfer/", "tvm_ffi/", "nvidia/")
# What FlashInfer's code imports to download files; it decides no byte of a module.
_IMPORTED = ("requests/", "urllib3/", "idna/", "certifi/", "charset_normalizer/", "tqdm/")
# Of CUDA's libraries a module is linked with few, and torch's stubs stand for the others.
_LINKED = ("libcudart", "libcublas.", "libcublasLt.", "libnvrtc.", "libcudadevrt")
FOLDER = "opt/warm/flashinfer"
_SEED = "sm120"
# The largest, CUTLASS's fused MoE, has 100 MB.
_MOST_BYTES = 512 << 20


class ModuleCase(Frozen):
    """A module to compile, as a worker is asked for it."""

    name: str
    make: str
    arguments: dict[str, bool | int | str | None] = {}
    timeout_s: int = 3600


class ModuleAnswer(CaseReply):
    """What a worker reports of a module."""

    ended: Literal["compiled", "raised", "died", "timed out", "not imported"]
    seconds: float = 0.0  # of processor time
    sources: int = 0
    sha256: str = ""
    library: str = ""  # deflated, in base 85


class IndexedModule(Frozen):
    """A module of the layer: its library's digest and size, and whose engine calls it."""

    library: str = "FlashInfer"
    make: str
    sha256: str
    size_bytes: int
    recipes: list[str]


class LackingModule(Frozen):
    """A module that the layer does not have, and why."""

    module: str
    recipes: list[str]
    reason: str


class WarmModules(Frozen):
    """The modules of a layer, and the FlashInfer and architectures that they are for."""

    flashinfer: str
    architectures: str
    site: str
    entries: dict[str, IndexedModule]
    missing: list[LackingModule] = []


@dataclass(frozen=True)
class ModuleTarget(WorkerTarget[ModuleCase, ModuleAnswer]):
    """The modules of an image's FlashInfer, compiled for its architectures."""

    plan: WarmPlan
    base: str  # the digest of the image that has Python and the C compiler

    @property
    def program(self) -> Path:
        return MODULE_COMPILER

    @property
    def answer_type(self) -> type[ModuleAnswer]:
        return ModuleAnswer

    @property
    def most_bytes(self) -> int:
        """A library has up to 100 MB before it is deflated."""
        return 1 << 30

    def keep(self, case: ModuleCase, answer: ModuleAnswer) -> None:
        """Keeps a library; a compiler may fail for want of memory, and fare better next time."""
        if answer.ended == "compiled":
            super().keep(case, answer)

    def job(self, cases: Sequence[ModuleCase]) -> dict[str, Any]:
        listed = [case.model_dump() for case in cases]
        return {"site": f"/{self.plan.base.venv.site}", "cases": listed}

    def variables(self, cases: Sequence[ModuleCase], work: Path) -> dict[str, str]:
        folder = f"{GIVEN}/{work.name}"
        return {
            **{k: v for k, v in self.plan.base.variables.items() if "/home/" not in v},
            **dict.fromkeys(("HOME", "TMPDIR", "FLASHINFER_WORKSPACE_BASE"), folder),
            **{"PYTHONPATH": f"/{self.plan.base.venv.site}", "PYTHONDONTWRITEBYTECODE": "1"},
            **{"LD_LIBRARY_PATH": STUBS, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
            # without it nvcc makes up names, of a source's time and its own process number
            **{"NVCC_APPEND_FLAGS": f"-frandom-seed={_SEED}"},
            # there is a worker for every core
            **{"MAX_JOBS": "1", "OMP_NUM_THREADS": "1", "FLASHINFER_LOGGING_LEVEL": "error"},
        }

    @property
    def digests(self) -> dict[str, str]:
        wheels = {
            pin.name: pin.sha256
            for plan in self.plan.base.chain()
            for pin in plan.lock.wheels
            if pin.name in _WHEELS or pin.name.startswith("nvidia-cu")
        }
        return {
            "worker": program_digest(self.program),
            "environment": self.environment.key,
            "root": self.base,
            "wheels": sha256_of(canonical_json(wheels)),
            "links": sha256_of(canonical_json(self.plan.base.inputs["files"])),
        }

    def key(self, case: ModuleCase) -> str:
        """Everything that decides a module's bytes."""
        asked = [case.model_dump(exclude={"timeout_s"}), self.variables([case], Path("work"))]
        cuda = self.plan.base.spec.cuda
        folders = cuda.model_dump(mode="json", exclude={"architectures"}) if cuda else None
        decided = [self.digests, folders, asked]
        return sha256_of(canonical_json({"module": MODULE_FORMAT, "decided": decided}))


def pack_modules(
    target: ModuleTarget, answers: Sequence[ModuleAnswer]
) -> tuple[WarmModules, dict[str, bytes]]:
    """Judges modules and puts them together: what the index says, and the layer's files by path."""
    plan, card = target.plan, card_for(target.plan.card)
    specs = {spec.name: spec for spec in sorted(plan.spec.modules, key=lambda each: each.name)}
    files, entries = dict[str, bytes](), dict[str, IndexedModule]()
    for answer in answers:
        title, spec = f"{plan.title}: {answer.case}", specs[answer.case]
        if answer.ended != "compiled":
            raise StepFailed(
                f"{title} was not compiled ({answer.ended}): {answer.message}",
                "One that the pinned version cannot compile gets `left_out:` with the reason.",
            )
        try:
            data = unpacked_whole(base64.b85decode(answer.library), _MOST_BYTES)
        except ValueError as error:
            raise StepFailed(f"{title} cannot be unpacked ({error})") from error
        if hashlib.sha256(data).hexdigest() != answer.sha256:
            raise StepFailed(f"{title} is not what its worker compiled")
        # FlashInfer loads a library without a look at what it holds
        judged = judge_bytes(data, card.arch)
        if judged.verdict is not ObjectVerdict.RUNS:
            raise StepFailed(f"{title}: {judged.message}")
        files[f"{FOLDER}/{answer.case}/{answer.case}.so"] = data
        entries[answer.case] = IndexedModule(
            make=spec.make, sha256=answer.sha256, size_bytes=len(data), recipes=spec.recipes
        )
    files[f"{plan.base.venv.site}/{MODULE_READER.name}"] = MODULE_READER.read_bytes()
    wheel = plan.base.find_wheel(_WHEELS[0])
    assert wheel is not None, "a module was compiled by it"
    modules = WarmModules(
        flashinfer=wheel.version,
        architectures=plan.base.variables.get(ARCH_LIST, ""),
        site=f"/{plan.base.venv.site}",
        entries={name: entries[name] for name in sorted(entries)},
        missing=[
            LackingModule(module=name, recipes=spec.recipes, reason=spec.left_out)
            for name, spec in specs.items()
            if spec.left_out
        ],
    )
    return modules, files


def module_cases(plan: WarmPlan, recipes: Sequence[str] = ()) -> list[ModuleCase]:
    """The modules that a plan's layer is to have; or those of some recipes."""
    return [
        ModuleCase(name=spec.name, make=spec.make, arguments=spec.arguments)
        for spec in plan.spec.modules
        if not spec.left_out and (not recipes or any(map(spec.serves, recipes)))
    ]


@contextmanager
def open_modules(gate: ImageGate, plan: WarmPlan) -> Iterator[ModuleTarget]:
    """Makes the root that FlashInfer compiles in; it goes with the block."""
    context, environment, store = gate.context, gate.environment, gate.context.store
    sandbox, site = rooted_sandbox(context, plan), plan.base.venv.site
    python, base = assemble_images(
        context.checkout, store, [plan.base.chain()[0], plan.base], context.make_fetcher
    )
    system, places = (
        unpacked_root(store, python),
        tuple(f"{site}/{name}" for name in (*_FOLDERS, *_IMPORTED)),
    )

    def wanted(path: str) -> bool:
        name = path.rpartition("/")[2]
        if path.startswith(places):
            # sources, headers and programs: all that is small, and few of the libraries
            return ".so" not in name or name.startswith(_LINKED) or "/tvm_ffi/" in path
        return path.startswith("usr/local/cuda") or path == f"{plan.base.venv.bin}/ninja"

    def give(source: str, to: str) -> None:
        # a link costs no room; workers only read it
        if not os.path.lexists(to):
            os.link(source, to, follow_symlinks=False)

    with unpacked(store, base, wanted) as root, os_errors_explained(root):
        for source, to in {system: root, environment.folder / "site": root / site}.items():
            shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True, copy_function=give)
        shutil.copytree(environment.folder / "stubs", root / STUBS.strip("/"))
        shutil.copytree(MODULE_COMPILER, root / PROGRAMS.strip("/") / MODULE_COMPILER.name)
        # the image's libcuda.so leads to the driver's library, which a container brings
        driver = root / "usr/local/cuda/lib/stubs/libcuda.so"
        driver.unlink()
        shutil.copy(root / STUBS.strip("/") / "libcuda.so.1", driver)
        yield ModuleTarget(
            store,
            RootedEnvironment(environment.folder, environment.facts, environment.absent),
            gate.tree,
            plan,
            python.digest,
            sandbox=RootedSandbox(**sandbox.model_dump(), system=str(root.absolute())),
            ask=context.ask,
        )

"""Where kernels are compiled: the image's own Python, Triton and torch, without its GPU libraries.

An engine image unpacks to 10 GB, of which compiling a kernel needs a tenth: the interpreter,
Triton, torch's own libraries and NumPy. NVIDIA's libraries, which torch is linked with but which
no gate calls, are replaced by stubs. The image need not be built: the few layers that
matter are made or fetched if the store does not have them.

On another processor than the image's, the same versions of Triton, torch and the rest come from
the index for this one, and the result records it. Where torch, which only carries the tensors,
has no such wheel in this version, the nearest one stands in for it; nothing stands in for Triton.
The engine's files are always the image's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.artifacts.oci.record import FileRow
from pipeline.core import log
from pipeline.core.errors import GateEnvironment, LockMissing
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.images.assemble.plan import ImagePlan, LayerPlan, Work, plan_image
from pipeline.images.gate.smem.engine import (
    GateContext,
    for_host,
    layer_of,
    locked_wheel,
    mark_used,
    unpack_kept,
)
from pipeline.images.gate.smem.stub_libraries import make_stubs
from pipeline.images.lock.model import WheelPin

# Part of every environment's key: raised when the same inputs are unpacked differently.
FORMAT = 3
# torch and Triton, what they import, and NumPy, which carries torch's values to Python.
_BASE_WHEELS = (
    *("torch", "triton", "numpy", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath"),
    *("networkx", "packaging", "setuptools", "sympy", "typing-extensions"),
)
# Of torch: its linear algebra on GPUs, which it loads only when that is called.
_LEFT_OUT_FILES = ("libtorch_cuda_linalg.so",)
# For compiling C++ and CUDA against torch, and for profiling: nothing that a gate does.
_LEFT_OUT_SUFFIXES = (".a", ".h", ".hpp", ".cuh", ".cuinc", ".cmake")
_LEFT_OUT_FOLDERS = ("/cupti/", "/cupti-blackwell/", "torch/test/")
_TRIPLES = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_LINKERS = {"amd64": "ld-linux-x86-64.so.2", "arm64": "ld-linux-aarch64.so.1"}


class ModuleNames(Frozen):
    """Which modules a wheel is imported by, where its project has another name."""

    modules: dict[str, tuple[str, ...]]
    shared: dict[str, str]


@cache
def _module_names() -> ModuleNames:
    return read_yaml(Path(__file__).with_name("module_names.yaml"), ModuleNames)


def modules_of(project: str) -> tuple[str, ...]:
    """The top-level modules that a project's wheel brings."""
    names = _module_names()
    if project in names.modules:
        return names.modules[project]
    shared = [package for prefix, package in names.shared.items() if project.startswith(prefix)]
    return tuple(shared) or (project.replace("-", "_").replace(".", "_"),)


class EnvironmentFacts(Frozen):
    """Which files a gate's numbers come from; part of every result."""

    kind: Literal["image", "host wheels"]
    platform: str
    python: str
    triton: str  # empty, as torch is, where no kernels are compiled
    torch: str
    cuda: str  # what the image's torch is built for; engines choose by it
    stand_in: str | None = None  # the image's torch, where another version carries the tensors
    wheels: list[WheelPin]
    stubs: list[str]  # libraries of which only the names and symbols are there


@dataclass(frozen=True)
class Environment:
    """A folder with an interpreter and packages, ready for workers."""

    folder: Path
    facts: EnvironmentFacts
    # top-level modules of the image that are missing; a worker may put stand-ins in their place
    absent: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def readable(self) -> list[Path]:
        """What a program started by `command` must be able to read."""
        return [self.folder]

    def command(self, *args: str) -> list[str]:
        """Runs the image's interpreter by its own loader, whatever C library this machine has."""
        architecture = self.facts.platform.partition("/")[2]
        system = self.folder / "root" / "usr" / "lib" / _TRIPLES[architecture]
        paths = f"{self.folder / 'stubs'}:{system}"
        python = self.folder / "root" / "usr" / "bin" / f"python{self.facts.python}"
        loader = [str(system / _LINKERS[architecture]), "--library-path", paths]
        # -S: site.py would look for the image's folders, which are missing
        return [*loader, str(python), "-S", *args]

    def variables(self) -> dict[str, str]:
        return {
            "PYTHONHOME": str(self.folder / "root" / "usr"),
            "PYTHONPATH": str(self.folder / "site"),
            # sets have the same order in every run
            "PYTHONHASHSEED": "0",
        }


def make_environment(
    context: GateContext, plan: ImagePlan, wheels: Sequence[str], *, kernels: bool = True
) -> Environment:
    """Makes the environment of an image on this machine once, then finds it by its key.

    Without `kernels` it has no torch and no Triton, only the wheels that are named.
    """
    pins, root = _locked_pins(plan, wheels, kernels), _root_layer(context, plan)
    is_own = context.host == plan.platform
    if not is_own:
        wheels_folder, find = context.store.root / "gate" / "host-wheels", context.make_finder
        pins = [for_host(pin, plan.venv.version, context.host, wheels_folder, find) for pin in pins]
    own = locked_wheel(plan, "torch").version if kernels else ""
    used = _version(pins, "torch")
    stand_in = None if own == used else f"torch {used} carries the tensors of {own}"
    relation = {"kind": "image" if is_own else "host wheels", "stand_in": stand_in}
    folder = _folder(context, plan, root, pins)
    with context.store.locked(f"gate-{folder.name}"):
        facts = known_facts(folder)
        is_new = facts is None
        facts = facts or _make(context, plan, root, pins, relation, folder)
        # images for several platforms share a folder where their versions are the same
        facts = facts.model_copy(update=relation)
        # from the lock alone, whatever else the store holds: the same lock gives the same answers
        real = {module for pin in pins for module in modules_of(pin.name)}
        locked = {module for pin in plan.lock.wheels for module in modules_of(pin.name)}
        absent = tuple(sorted(name for name in locked - real if name.isidentifier()))
        environment = Environment(folder, facts, absent)
        if is_new:
            # Python keeps what it compiles of torch and Triton; workers may not write there. Only
            # files that the lock names run. Where it fails, workers start more slowly.
            compiled = ["-c", "import numpy, torch, triton"]
            if not kernels:
                compiled = ["-m", "compileall", "-q", str(folder / "site")]
            find_sandbox().run(
                environment.command(*compiled),
                write=[folder],
                env=environment.variables(),
            )
    mark_used(folder)
    return environment


def environment_work(
    context: GateContext, plan: ImagePlan, wheels: Sequence[str], *, kernels: bool = True
) -> Work | None:
    """What making the environment would fetch; none where an index must be asked first."""
    pins, root = _locked_pins(plan, wheels, kernels), _root_layer(context, plan)
    if context.host != plan.platform:
        return None
    if known_facts(_folder(context, plan, root, pins)):
        return Work((), (), ())
    return context.work(_layers_of(plan, root, pins))


def _locked_pins(plan: ImagePlan, wheels: Sequence[str], kernels: bool) -> list[WheelPin]:
    for name in ("triton", "torch") if kernels else ():
        locked_wheel(plan, name)  # an error where the image has none
    locked = {pin.name: pin for pin in plan.lock.wheels}
    base = _BASE_WHEELS if kernels else ()
    return [locked[n] for n in sorted({*base, *wheels}) if n in locked]


def _version(pins: Sequence[WheelPin], name: str) -> str:
    return next((pin.version for pin in pins if pin.name == name), "")


def _folder(
    context: GateContext, plan: ImagePlan, root: LayerPlan, pins: Sequence[WheelPin]
) -> Path:
    # all that decides what the folder holds; the same inputs never unpack twice
    wheels = [[p.name, p.sha256] for p in pins]
    inputs = canonical_json([FORMAT, context.host, root.key, cuda_of(plan), wheels])
    key = sha256_of(inputs).removeprefix("sha256:")[:32]
    return context.store.root / "gate" / "environments" / key


def _layers_of(plan: ImagePlan, root: LayerPlan, pins: Sequence[WheelPin]) -> list[LayerPlan]:
    """Debian's Python, then the layers that hold the wheels, each once."""
    plans = [layer_of(plan, pin, root.architecture) for pin in pins]
    return [root, *{p.key: p for p in plans}.values()]


def _root_layer(context: GateContext, plan: ImagePlan) -> LayerPlan:
    """The layer of Debian's Python: the image's own root, or the same for this processor."""
    root = plan.chain()[0]
    if root.lock.base_image is not None:
        raise GateEnvironment(
            f"{plan.spec.name}: stands on a foreign base image, whose Python the gate does not run",
            "The gate judges images whose base is assembled here (`debian` in image.yaml).",
        )
    if context.host != plan.platform:
        try:
            root = plan_image(context.checkout, root.spec.name, context.host)
        except LockMissing as error:
            raise GateEnvironment(
                f"{plan.spec.name}: is for {plan.platform}, this machine is {context.host}, and"
                f" {root.spec.name} has no lock for it"
            ) from error
    return root.layers[0]


def cuda_of(plan: ImagePlan) -> str:
    """The CUDA version that the image's torch is built for, by the runtime locked with it.

    Up to CUDA 12 the runtime's wheel carries the number in its name; an image may hold a newer
    one besides, to compile with.
    """
    locked = {pin.name: pin.version for pin in plan.lock.wheels}
    for name in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        if name in locked:
            return ".".join(locked[name].split(".")[:2])
    raise GateEnvironment(f"{plan.spec.name}: has no CUDA runtime, so its torch is not for GPUs")


def known_facts(folder: Path) -> EnvironmentFacts | None:
    """The facts in an environment's folder; none where it is not whole."""
    try:
        return EnvironmentFacts.model_validate_json((folder / "facts.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _make(
    context: GateContext,
    plan: ImagePlan,
    root: LayerPlan,
    pins: Sequence[WheelPin],
    relation: dict[str, Any],
    folder: Path,
) -> EnvironmentFacts:
    layers = context.layers(_layers_of(plan, root, pins))
    version, names = plan.venv.version, {pin.name for pin in pins}
    triple = _TRIPLES[context.host.partition("/")[2]]
    python = (f"usr/lib/python{version}/", f"usr/bin/python{version}")

    def place(row: FileRow) -> str | None:
        is_library = row.path.startswith(f"usr/lib/{triple}/") and ".so" in row.path
        if is_library or row.path.startswith(python):
            return f"root/{row.path}"
        path = row.path.removeprefix(f"{plan.venv.site}/")
        is_left_out = path.endswith((*_LEFT_OUT_SUFFIXES, *_LEFT_OUT_FILES)) or any(
            part in path for part in _LEFT_OUT_FOLDERS
        )
        is_site = row.owner in names and path != row.path
        return f"site/{path}" if is_site and not is_left_out else None

    with (
        context.store.scratch() as scratch,
        log.step(f"Unpacking what {plan.spec.name} is judged with"),
    ):
        work = scratch / "environment"
        unpack_kept(context.store, layers, place, work)
        usr, torch = work / "root" / "usr", work / "site" / "torch"
        libraries = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
        system = [*(usr / "lib" / triple).glob("*.so*"), *(usr / "bin").iterdir()]
        facts = EnvironmentFacts(
            **relation,
            platform=context.host,
            python=version,
            triton=_version(pins, "triton"),
            torch=_version(pins, "torch"),
            cuda=cuda_of(plan),
            wheels=list(pins),
            stubs=make_stubs(libraries, system, work / "stubs"),
        )
        (work / "facts.json").write_text(facts.model_dump_json(indent=2) + "\n", encoding="utf-8")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # in one step: a folder that is there is whole
        os.replace(work, folder)
    return facts

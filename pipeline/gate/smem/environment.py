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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline import log
from pipeline.assemble.plan import ImagePlan, LayerPlan, Work, plan_image
from pipeline.errors import GateEnvironment, LockMissing
from pipeline.gate.smem.context import GateContext, layer_of, locked_wheel, mark_used, unpack
from pipeline.gate.smem.module_names import absent_modules
from pipeline.gate.smem.stub_libraries import make_stubs
from pipeline.gate.smem.wheels import for_host
from pipeline.lock.model import WheelPin
from pipeline.model import Frozen, canonical_json, sha256_of
from pipeline.oci.record import FileRow
from pipeline.sandbox.sandbox import find_sandbox

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


class EnvironmentFacts(Frozen):
    """Which files a gate's numbers come from; part of every result."""

    kind: Literal["image", "host wheels"]
    platform: str
    python: str
    triton: str
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
    # top-level modules of the image that are not here; a worker may put stand-ins in their place
    absent: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def readable(self) -> list[Path]:
        """What a program started by `command` must be able to read."""
        return [self.folder]

    def command(self, *args: str) -> list[str]:
        """Run the image's interpreter by its own loader, whatever C library this machine has."""
        architecture = self.facts.platform.partition("/")[2]
        system = self.folder / "root" / "usr" / "lib" / _TRIPLES[architecture]
        paths = f"{self.folder / 'stubs'}:{system}"
        python = self.folder / "root" / "usr" / "bin" / f"python{self.facts.python}"
        loader = [str(system / _LINKERS[architecture]), "--library-path", paths]
        # -S: site.py would look for the image's folders, which are not here
        return [*loader, str(python), "-S", *args]

    def variables(self) -> dict[str, str]:
        return {
            "PYTHONHOME": str(self.folder / "root" / "usr"),
            "PYTHONPATH": str(self.folder / "site"),
            # sets have the same order in every run
            "PYTHONHASHSEED": "0",
        }


def make_environment(context: GateContext, plan: ImagePlan, wheels: Sequence[str]) -> Environment:
    """The environment of an image on this machine; made once, then taken by its key."""
    wanted = _locked_pins(plan, wheels)
    same = context.host == plan.platform
    pins = wanted if same else [_for_host(context, plan, pin) for pin in wanted]
    root = _root_layer(context, plan)
    folder = _folder(context, plan, root, pins)
    with context.store.locked(f"gate-{folder.name}"):
        facts = known_facts(folder)
        is_new = facts is None
        facts = facts or _make(context, plan, root, pins, folder)
        # images for several platforms share a folder where their versions are the same
        facts = facts.model_copy(update=_relation(context, plan, pins))
        absent = absent_modules((p.name for p in plan.lock.wheels), {p.name for p in pins})
        environment = Environment(folder, facts, absent)
        if is_new:
            _compile_modules(environment)
    mark_used(folder)
    return environment


def environment_work(context: GateContext, plan: ImagePlan, wheels: Sequence[str]) -> Work | None:
    """What making the environment would fetch; none where an index must be asked first."""
    pins, root = _locked_pins(plan, wheels), _root_layer(context, plan)
    if context.host != plan.platform:
        return None
    if known_facts(_folder(context, plan, root, pins)):
        return Work((), (), ())
    return context.work(_layers_of(plan, root, pins))


def _locked_pins(plan: ImagePlan, wheels: Sequence[str]) -> list[WheelPin]:
    for name in ("triton", "torch"):
        locked_wheel(plan, name)  # an error where the image has none
    locked = {pin.name: pin for pin in plan.lock.wheels}
    return [locked[n] for n in sorted({*_BASE_WHEELS, *wheels}) if n in locked]


def _folder(
    context: GateContext, plan: ImagePlan, root: LayerPlan, pins: Sequence[WheelPin]
) -> Path:
    # all that decides what the folder holds; the same inputs never unpack twice
    inputs = [
        FORMAT,
        context.host,
        root.key,
        cuda_of(plan),
        [[p.name, p.sha256] for p in pins],
    ]
    key = sha256_of(canonical_json(inputs)).removeprefix("sha256:")[:32]
    return context.store.root / "gate" / "environments" / key


def _layers_of(plan: ImagePlan, root: LayerPlan, pins: Sequence[WheelPin]) -> list[LayerPlan]:
    """Debian's Python, then the layers that hold the wheels, each once."""
    plans = [layer_of(plan, pin, root.architecture) for pin in pins]
    return [root, *{p.key: p for p in plans}.values()]


def _compile_modules(environment: Environment) -> None:
    """Let Python keep what it compiles of torch and Triton; workers may not write there.

    Only files that the lock names run here. If it does not succeed, workers start more slowly.
    """
    find_sandbox().run(
        environment.command("-c", "import numpy, torch, triton"),
        write=[environment.folder],
        env=environment.variables(),
    )


def _root_layer(context: GateContext, plan: ImagePlan) -> LayerPlan:
    """Debian's Python for this machine: the image's own root, or the same for this processor."""
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


def _for_host(context: GateContext, plan: ImagePlan, pin: WheelPin) -> WheelPin:
    folder = context.store.root / "gate" / "host-wheels"
    return for_host(pin, plan.venv.version, context.host, folder, context.make_finder)


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
    folder: Path,
) -> EnvironmentFacts:
    records = context.layers(_layers_of(plan, root, pins))
    site, names = f"{plan.venv.site}/", {pin.name for pin in pins}
    architecture = context.host.partition("/")[2]
    with (
        context.store.scratch() as scratch,
        log.step(f"Unpacking what {plan.spec.name} compiles with"),
    ):
        work = scratch / "environment"
        unpack(context.store, records[:1], _placing_root(architecture, plan.venv.version), work)
        unpack(context.store, records[1:], _placing_site(site, names), work)
        facts = EnvironmentFacts(
            **_relation(context, plan, pins),
            platform=context.host,
            python=plan.venv.version,
            triton=next(p.version for p in pins if p.name == "triton"),
            torch=next(p.version for p in pins if p.name == "torch"),
            cuda=cuda_of(plan),
            wheels=list(pins),
            stubs=_make_stubs(work, architecture),
        )
        (work / "facts.json").write_text(facts.model_dump_json(indent=2) + "\n", encoding="utf-8")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # in one step: a folder that is there is whole
        os.replace(work, folder)
    return facts


def _relation(context: GateContext, plan: ImagePlan, pins: Sequence[WheelPin]) -> dict[str, Any]:
    """How an environment stands to an image: its own files, or the same versions for this host."""
    kind = "image" if context.host == plan.platform else "host wheels"
    return {"kind": kind, "stand_in": _stand_in(plan, pins)}


def _stand_in(plan: ImagePlan, pins: Sequence[WheelPin]) -> str | None:
    own = next(pin.version for pin in plan.lock.wheels if pin.name == "torch")
    used = next(pin.version for pin in pins if pin.name == "torch")
    return None if own == used else f"torch {used} carries the tensors of {own}"


def _placing_root(architecture: str, version: str) -> Callable[[FileRow], str | None]:
    libraries = f"usr/lib/{_TRIPLES[architecture]}/"

    def place(row: FileRow) -> str | None:
        path = row.path
        is_library = path.startswith(libraries) and ".so" in path
        is_python = path.startswith((f"usr/lib/python{version}/", f"usr/bin/python{version}"))
        return f"root/{path}" if is_library or is_python else None

    return place


def _placing_site(site: str, names: set[str]) -> Callable[[FileRow], str | None]:
    def place(row: FileRow) -> str | None:
        path = row.path.removeprefix(site)
        if row.owner not in names or path == row.path:
            return None
        if path.endswith(_LEFT_OUT_SUFFIXES) or path.endswith(_LEFT_OUT_FILES):
            return None
        return None if any(part in path for part in _LEFT_OUT_FOLDERS) else f"site/{path}"

    return place


def _make_stubs(work: Path, architecture: str) -> list[str]:
    torch = work / "site" / "torch"
    libraries = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
    system = (work / "root" / "usr" / "lib" / _TRIPLES[architecture]).glob("*.so*")
    python = (work / "root" / "usr" / "bin").iterdir()
    return make_stubs(libraries, [*system, *python], work / "stubs")

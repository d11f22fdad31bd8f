"""Where kernels are compiled into entries: the gate's environment, at the image's own paths.

Triton's keys cover Triton's files, its options and variables; its results name source files. So
the worker sees what the image would show it: Debian's Python and compiler below /usr, Triton, torch
and the engine in /opt/venv, the image's variables. Nothing of this machine is in sight, and nothing
of it can get into an entry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.containers.sandbox import START, Paths, Sandbox, find_sandbox
from pipeline.artifacts.oci.tar_reader import MTIME
from pipeline.core import log
from pipeline.core.errors import GateEnvironment
from pipeline.core.files import os_errors_explained
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.images.assemble.image import assemble_images
from pipeline.images.assemble.plan import (
    BYTECODE,
    GATE_WORKER,
    MODULE_COMPILER,
    WARM_FORMAT,
    WARM_READER,
    WARM_WORKER,
    WarmPlan,
    program_digest,
)
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.engine import GateContext, layer_of, locked_wheel, unpack_kept
from pipeline.images.gate.smem.environment import Environment
from pipeline.images.gate.smem.image_gate import ImageGate
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import WorkerAnswer
from pipeline.images.gate.smem.run import GateTarget
from pipeline.images.source.toolchain import unpacked_root

# In the root that a worker sees: programs, which it only reads, and what it was given.
PROGRAMS, GIVEN = "/warm-programs", "/warm"
_GATE, STUBS = f"{PROGRAMS}/gate", f"{PROGRAMS}/stubs"
COMPILES_PYTHON = f"{PROGRAMS}/{BYTECODE.name}"
# The gate leaves headers out; Triton compiles a launcher for each kernel with these.
_HEADERS = "triton/backends/nvidia/include/"
# What Triton reports of a compiler that a signal ended, and of a machine without memory or disk.
_KILLED = re.compile(r"error code -\d|died with <Signals|Killed signal|^(MemoryError|OSError)")


class WarmEntry(Frozen):
    """A folder of Triton's cache: one kernel, or one launcher."""

    key: str
    kernel: str
    module: str = ""  # of the engine; empty for what Triton itself compiles
    files: dict[str, str]  # deflated, in base 85


class WarmAnswer(WorkerAnswer):
    """What a worker reports of a case, with the entries that its call reached."""

    entries: list[WarmEntry] = []

    @property
    def may_pass(self) -> bool:
        """Whether another try may fare better: a compiler was killed, or no kernel is to blame."""
        errors = [record.error for record in self.records if record.error]
        return any(map(_KILLED.search, errors)) or (self.ended == "raised" and not errors)


class RootedSandbox(Sandbox):
    """Namespaces with a root of our own; what is given lies at fixed places in it."""

    system: str

    def command(
        self, command: Sequence[str], *, read: Paths, write: Paths, root: Path, cwd: Path
    ) -> list[str]:
        """The command that starts another one inside; programs are in the root already."""
        given = [*write, *(path for path in read if path.is_file())]
        places = {str(path.absolute()): f"{GIVEN}/{path.name}" for path in given}
        request: dict[str, object] = {"kind": "namespaces", "held": [], "read": [], "write": []}
        request |= {"system": self.system, "root": str(root.absolute())}
        request |= {"cwd": places[str(cwd.absolute())], "mounts": list(places.items())}
        places |= {str(path): f"{PROGRAMS}/{path.name}" for path in (WARM_WORKER, MODULE_COMPILER)}
        words = [places.get(word, word) for word in command]
        return [sys.executable, "-I", "-S", str(START), json.dumps(request), *words]


@dataclass(frozen=True)
class RootedEnvironment(Environment):
    """The gate's environment, seen from inside."""

    @property
    def readable(self) -> list[Path]:
        return []

    def command(self, *args: str) -> list[str]:
        return [f"/usr/bin/python{self.facts.python}", "-S", *args]


@dataclass(frozen=True)
class WarmTarget(GateTarget):
    """An engine's kernels, compiled into entries for one card."""

    plan: WarmPlan
    base: str  # the digest of the image that has Python and the C compiler

    @property
    def program(self) -> Path:
        return WARM_WORKER

    @property
    def answer_type(self) -> type[WarmAnswer]:
        return WarmAnswer

    @property
    def writable(self) -> list[Path]:
        return []

    @property
    def site(self) -> str:
        return f"/{self.plan.base.venv.site}"

    def keep(self, case: KernelCase, answer: WorkerAnswer) -> None:
        """Keeps an answer that another try would give, too."""
        if not isinstance(answer, WarmAnswer) or not answer.may_pass:
            super().keep(case, answer)

    def job(self, cases: Sequence[KernelCase]) -> dict[str, Any]:
        return {**super().job(cases), "engine": self.site, "gate_worker": _GATE, "cache": None}

    def variables(self, cases: Sequence[KernelCase], work: Path) -> dict[str, str]:
        own = self.plan.base.variables
        folder = f"{GIVEN}/{work.name}"
        # caches below the image's home, which is not there
        own = {k: v.replace(own.get("HOME", "/root"), folder) for k, v in own.items()}
        return {
            # all that the image sets: some of it is part of Triton's keys
            **own,
            **dict.fromkeys(("HOME", "TMPDIR", "TRITON_HOME"), folder),
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "PYTHONPATH": self.site,
            "PYTHONPYCACHEPREFIX": "",  # the environment's own files lie beside their sources
            "PYTHONHASHSEED": "0",
            **dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), STUBS),
            **{"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin:/usr/sbin"},
        }

    @property
    def digests(self) -> dict[str, str]:
        gate = {"gate's worker": program_digest(GATE_WORKER), "root": self.base}
        return {**super().digests, **gate, "reader": self.plan.reader}

    def key(self, case: KernelCase) -> str:
        """Everything that decides the entries of a case."""
        job = {**self.job([case]), "cases": []}
        asked = case.model_dump(exclude={"gate", "stands_for", "kernels", "spill_free", "base"})
        decided = [self.digests, job, self.variables([case], Path("work")), asked]
        return sha256_of(canonical_json({"warm": WARM_FORMAT, "decided": decided}))


def rooted_sandbox(context: GateContext, plan: WarmPlan) -> Sandbox:
    """The sandbox in which a root of our own can be shown; refuses where there is none."""
    sandbox = find_sandbox()
    if sandbox.kind != "namespaces":
        raise GateEnvironment(
            f"kernels are compiled at the image's paths, which takes namespaces ({sandbox.reason})",
            "Allow user namespaces on this system, or run it as root outside of a container.",
        )
    if context.host != plan.base.platform:
        # Triton's key covers the bytes of its own library, which differ between processors
        raise GateEnvironment(
            f"{plan.image}: is for {plan.base.platform}, this machine is {context.host}: Triton for"
            " another processor writes entries that the image's own would not find",
            f"Build it on a machine for {plan.base.platform}, or submit it from one to Slurm.",
        )
    return sandbox


@contextmanager
def open_warm(gate: ImageGate, plan: WarmPlan) -> Iterator[WarmTarget]:
    """Makes the root that workers see; it goes with the block."""
    context, environment, store = gate.context, gate.environment, gate.context.store
    sandbox = rooted_sandbox(context, plan)
    tree, card = gate.patched(), card_for(plan.card)
    (python,) = assemble_images(
        context.checkout, store, [plan.base.chain()[0]], context.make_fetcher
    )
    base, site = unpacked_root(store, python), plan.base.venv.site
    triton = locked_wheel(plan.base, "triton")
    layers = context.layers([layer_of(plan.base, triton, plan.base.architecture)])
    with store.scratch() as scratch:
        root = scratch / "root"
        below = {name: root / name.strip("/") for name in (site, STUBS, _GATE, PROGRAMS)}
        linked = {base: root, environment.folder / "site": below[site], tree.folder: below[site]}
        # ptxas writes the time of each source that it finds into the code: they have the image's
        timed = (f"{environment.folder}/site/", f"{tree.folder}/")

        def give(source: str, to: str) -> None:
            if source.endswith(".py") and source.startswith(timed):
                shutil.copyfile(source, to)
                os.utime(to, (MTIME, MTIME))
            else:  # a link costs no room; workers only read it
                os.link(source, to, follow_symlinks=False)

        with log.step(f"Preparing the root of {plan.base.spec.name}"), os_errors_explained(root):
            for source, to in linked.items():
                shutil.copytree(
                    *(source, to),
                    symlinks=True,
                    dirs_exist_ok=True,
                    copy_function=give,
                )
            shutil.copytree(environment.folder / "stubs", below[STUBS])
            # what -lcuda asks for; the driver brings the real one
            (below[STUBS] / "libcuda.so").symlink_to("libcuda.so.1")
            shutil.copytree(GATE_WORKER, below[_GATE])
            shutil.copytree(WARM_WORKER, below[PROGRAMS] / WARM_WORKER.name)
            shutil.copy(BYTECODE, below[PROGRAMS])
            shutil.copy(WARM_READER, below[site])
            unpack_kept(
                *(store, layers),
                lambda row: row.path if row.path.startswith(f"{site}/{_HEADERS}") else None,
                root,
            )
        yield WarmTarget(
            store,
            RootedEnvironment(environment.folder, environment.facts, environment.absent),
            tree,
            gate.gates.setup,
            card,
            plan,
            python.digest,
            sandbox=RootedSandbox(**sandbox.model_dump(), system=str(root.absolute())),
            ask=context.ask,
        )

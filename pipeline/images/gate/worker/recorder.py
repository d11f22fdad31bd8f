"""Compiles what an engine launches, records what each kernel needs, and launches nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
import types
from pathlib import Path
from typing import Any

from .driver import compiling_driver
from .errors import Json, Stopped


class Recorder:
    """Takes the place of Triton's compiler: compiles, records what came out, launches nothing."""

    def __init__(self, card: Json, cache: str | None) -> None:
        self.card, self._kept = card, KeptKernels(cache)
        self.records: list[Json] = []
        self.strict = True
        self.tuning: str | None = None
        self.override: Json | None = None
        self._ptxas_output = ""

    def install(self) -> None:
        import triton
        from triton.backends.nvidia import compiler as nvidia
        from triton.runtime import autotuner, jit
        from triton.runtime.driver import driver

        driver.set_active(compiling_driver(self.card))
        # what Triton goes back to when code resets its driver
        driver._default = driver._active
        # modules take `compile` by three names, depending on how they import Triton
        self._real = triton.compiler.compiler.compile
        for place in (triton.compiler.compiler, triton.compiler, triton):
            place.compile = self.compile
        nvidia.subprocess = ListeningSubprocess(self)
        self._wrap_autotuner(autotuner.Autotuner)
        self._wrap_launches(jit.JITFunction)

    def _wrap_autotuner(self, kind: Any) -> None:
        recorder, real = self, kind.run

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            # every configuration is compiled, the first that fits is taken
            recorder.tuning = f"{tuner.base_fn.__name__}#{len(recorder.records)}"
            try:
                return real(tuner, *args, **kwargs)
            finally:
                recorder.tuning = None

        kind.run = run

    def _wrap_launches(self, kind: Any) -> None:
        recorder, real = self, kind.run

        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = recorder.override
            if wanted and wanted["kernel"] == function.fn.__name__:
                for name, value in wanted["values"].items():
                    # every launch has warps and stages; a block size, only where the kernel has it
                    if name not in kwargs and not name.startswith("num_"):
                        raise Stopped(f"{function.fn.__name__} is launched without {name}")
                    kwargs[name] = value
            return real(function, *args, **kwargs)

        kind.run = run

    def compile(self, src: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
        """What triton.compile is while the gate runs."""
        options = options or {}
        record: Json = {
            "kernel": src.fn.__name__,
            "module": src.fn.__module__,
            "group": self.tuning,
            "blocks": _blocks(src),
        }
        start = time.monotonic()
        # patches leave most kernels as they were, and trees are judged with and without them
        key = kernel_key(src, options, self.card["arch"])
        needs = self._kept.read(key)
        if needs is None:
            try:
                needs = self._compiled(src, target, options, kwargs)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
                self.records.append(record)
                raise
            needs["seconds"] = round(time.monotonic() - start, 3)
            self._kept.write(key, needs)
        record.update(needs)
        self.records.append(record)
        # Triton's launcher ends so on the card, and engines may catch it
        limit = self.card["shared_bytes"]
        if self.strict and needs["shared_bytes"] > limit:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(needs["shared_bytes"], limit, "shared memory")
        return Compiled(src, needs)

    def _compiled(self, src: Any, target: Any, options: Any, kwargs: Any) -> Json:
        self._ptxas_output = ""
        kernel = self._real(src, target=target, options=options, **kwargs)
        message = self._ptxas_output
        import triton

        return {
            "faults": compiler_faults(
                kernel.asm["ttir"], kernel.asm["ptx"], triton.__version__, self.card["arch"]
            ),
            "uses": means_used(kernel.asm["ttir"], kernel.asm["ptx"]),
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "num_stages": kernel.metadata.num_stages,
            "registers": _number(r"Used (\d+) registers", message),
            "spill_bytes": _number(r"(\d+) bytes spill stores", message),
            "stack_bytes": _number(r"(\d+) bytes stack frame", message),
        }

    def add_ptxas_output(self, message: str) -> None:
        self._ptxas_output += message


def compiler_faults(ttir: str, ptx: str, triton: str, arch: str) -> list[str]:
    """What this version of Triton is known to compile wrong for the card.

    An interpreter on the CPU cannot see it: the kernel's own code is right.
    """
    if triton != "3.8.0" or not arch.startswith("sm_12"):
        return []
    faults = []
    # https://github.com/triton-lang/triton/issues/11733
    for line in ttir.splitlines():
        if "dot_scaled" in line and "e2m1" in line and re.search(r"[lr]hs_k_pack = false", line):
            faults.append("MN-packed mxfp4 dot_scaled gives wrong numbers (triton#11733)")
            break
    # A peer's shared memory is read, and nothing keeps the peer until then:
    # https://github.com/triton-lang/triton/issues/11730
    before_end = ptx.rpartition("ret;")[0].rstrip().splitlines()[-3:]
    if "mapa." in ptx and not any("barrier.cluster.wait" in line for line in before_end):
        faults.append("a multi-CTA kernel ends while its peers read from it (triton#11730)")
    return faults


def means_used(ttir: str, ptx: str) -> list[str]:
    """TMA, and one program for each multiprocessor: what code for data-centre cards relies on.

    Both run on SM12x, but their tiles are often too large for it; see sgl-project/sglang#16975.
    """
    used = []
    # its loop over tiles begins with the program's own number
    own = set(re.findall(r"(%\w+) = tt\.get_program_id ", ttir))
    own |= {new for new, old in re.findall(r"(%\w+) = arith\.ext[su]i (%\w+) ", ttir) if old in own}
    if own & set(re.findall(r"scf\.for %\w+ = (%\w+) to ", ttir)):
        used.append("persistent")
    if "cp.async.bulk.tensor" in ptx:
        used.append("TMA")
    return used


def _blocks(src: Any) -> Json:
    """The compile-time numbers that shape a kernel."""
    names = src.fn.arg_names
    shown = {}
    for path, value in src.constants.items():
        name = names[path[0] if isinstance(path, tuple) else path]
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            # Lq, Lk and Lv are head sizes in attention kernels
            and name.isupper() | (name[0] == "L")
        ):
            shown[name] = value
    return shown


def _number(pattern: str, message: str) -> int | None:
    numbers = re.findall(pattern, message)
    # ptxas reports functions that were not inlined one by one
    return max(map(int, numbers)) if numbers else None


class ListeningSubprocess:
    """`subprocess` as Triton's NVIDIA backend sees it.

    Registers and spills are only in what `ptxas -v` prints, which Triton throws away.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, args: Any, *more: Any, **kwargs: Any) -> Any:
        done = subprocess.run(args, *more, **kwargs)
        log = getattr(kwargs.get("stderr"), "name", None)
        if isinstance(log, str) and "ptxas" in str(args[0]):
            self._recorder.add_ptxas_output(Path(log).read_text(encoding="utf-8", errors="replace"))
        return done


class Compiled:
    """What Triton's launcher wants of a compiled kernel, and nothing behind it."""

    def __init__(self, src: Any, needs: Json) -> None:
        self.name, self.hash = src.fn.__name__, "gate"
        self.n_regs, self.n_spills = needs["registers"], needs["spill_bytes"]
        self.n_max_threads = 1024
        self.metadata = types.SimpleNamespace(
            shared=needs["shared_bytes"],
            num_warps=needs["num_warps"],
            num_stages=needs["num_stages"],
            name=self.name,
        )
        self.asm: Json = {}
        # anything but none: Triton takes the kernel for loaded, and loads nothing
        self.function = 1
        self.module = 1
        self.packed_metadata = (needs["num_warps"], 1, needs["shared_bytes"])

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _init_handles(self) -> None:
        return None

    def __getitem__(self, grid: Any) -> Any:
        return self.run


class KeptKernels:
    """What kernels need, one file for each; without a folder nothing is kept."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def read(self, key: str) -> Json | None:
        """What was kept before; a file that is half-written or foreign counts as none."""
        if self._folder is None:
            return None
        path = self._folder / key
        try:
            needs = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # `sm120 store trim` takes what was not used for a month; Landlock's sandbox forbids this
        with contextlib.suppress(OSError):
            os.utime(path)
        whole = isinstance(needs, dict) and isinstance(needs.get("shared_bytes"), int)
        return needs if whole and needs.pop("key", None) == key else None

    def write(self, key: str, needs: Json) -> None:
        """Keep what a kernel needs; another process may be writing the same."""
        if self._folder is None:
            return
        # not by process number: in a namespace of its own, every worker has the same one
        temporary = self._folder / f"{key}.{os.urandom(8).hex()}"
        temporary.write_text(json.dumps({**needs, "key": key}), encoding="utf-8")
        os.replace(temporary, self._folder / key)


def kernel_key(src: Any, options: Json, arch: str) -> str:
    """Everything that decides what compiling a kernel gives."""
    import triton

    # the hash covers the kernel's source, its helpers and what it is specialised for
    # raised when more of a compiled kernel is looked at
    parts = ["3", src.hash(), placeless(options), triton.__version__, arch]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def placeless(options: Json) -> str:
    """Compile options as text, without the folder that Triton's own libraries lie in."""
    shown = json.dumps(options, sort_keys=True, default=str)
    return re.sub(r'[^"\'\s(]*/site/triton/', "triton/", shown)

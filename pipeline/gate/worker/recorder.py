"""Compiles what an engine launches, notes what came out, and launches nothing."""

from __future__ import annotations

import re
import subprocess
import time
import types
from pathlib import Path
from typing import Any

from .driver import compiling_driver
from .endings import Json, Stopped
from .kept import KeptKernels, kernel_key


class Recorder:
    """Stands where Triton's compiler stood: compiles, notes what came out, launches nothing."""

    def __init__(self, card: Json, cache: str | None) -> None:
        self.card, self._kept = card, KeptKernels(cache)
        self.records: list[Json] = []
        self.strict = True
        self.tuning: str | None = None
        self.override: Json | None = None
        self._ptxas_words = ""

    def install(self) -> None:
        import triton
        from triton.backends.nvidia import compiler as nvidia
        from triton.runtime import autotuner, jit
        from triton.runtime.driver import driver

        driver.set_active(compiling_driver(self.card))
        driver._default = driver._active
        self._real = triton.compiler.compiler.compile
        for place in (triton.compiler.compiler, triton.compiler, triton):
            place.compile = self.compile
        nvidia.subprocess = Listening(self)
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
        key = kernel_key(src, options, self.card["arch"])
        found = self._kept.read(key)
        if found is None:
            try:
                found = self._compiled(src, target, options, kwargs)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
                self.records.append(record)
                raise
            found["seconds"] = round(time.monotonic() - start, 3)
            self._kept.write(key, found)
        record.update(found)
        self.records.append(record)
        limit = self.card["shared_bytes"]
        if self.strict and found["shared_bytes"] > limit:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(found["shared_bytes"], limit, "shared memory")
        return Compiled(src, found)

    def _compiled(self, src: Any, target: Any, options: Any, kwargs: Any) -> Json:
        self._ptxas_words = ""
        kernel = self._real(src, target=target, options=options, **kwargs)
        message = self._ptxas_words
        return {
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "num_stages": kernel.metadata.num_stages,
            "registers": _number(r"Used (\d+) registers", message),
            "spill_bytes": _number(r"(\d+) bytes spill stores", message),
            "stack_bytes": _number(r"(\d+) bytes stack frame", message),
        }

    def heard(self, message: str) -> None:
        self._ptxas_words += message


def _blocks(src: Any) -> Json:
    """The compile-time numbers that shape a kernel."""
    names = src.fn.arg_names
    shown = {}
    for path, value in src.constants.items():
        name = names[path[0] if isinstance(path, tuple) else path]
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name.isupper() | (name[0] == "L")
        ):
            shown[name] = value
    return shown


def _number(pattern: str, message: str) -> int | None:
    found = re.findall(pattern, message)
    return max(map(int, found)) if found else None


class Listening:
    """`subprocess` as Triton's NVIDIA backend sees it: what ptxas says is kept."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, args: Any, *more: Any, **kwargs: Any) -> Any:
        done = subprocess.run(args, *more, **kwargs)
        log = getattr(kwargs.get("stderr"), "name", None)
        if isinstance(log, str) and "ptxas" in str(args[0]):
            self._recorder.heard(Path(log).read_text(encoding="utf-8", errors="replace"))
        return done


class Compiled:
    """What Triton's launcher wants of a compiled kernel, and nothing behind it."""

    def __init__(self, src: Any, found: Json) -> None:
        self.name, self.hash = src.fn.__name__, "gate"
        self.n_regs, self.n_spills = found["registers"], found["spill_bytes"]
        self.n_max_threads = 1024
        self.metadata = types.SimpleNamespace(
            shared=found["shared_bytes"],
            num_warps=found["num_warps"],
            num_stages=found["num_stages"],
            name=self.name,
        )
        self.asm: Json = {}
        self.function = 1
        self.module = 1
        self.packed_metadata = (found["num_warps"], 1, found["shared_bytes"])

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _init_handles(self) -> None:
        return None

    def __getitem__(self, grid: Any) -> Any:
        return self.run

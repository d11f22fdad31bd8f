"""The gate's recorder, which also takes what Triton's own cache holds of each kernel."""

from __future__ import annotations

import base64
import contextlib
import types
import zlib
from pathlib import Path
from typing import Any

import sm120_warm  # type: ignore[import-not-found]  # noqa: F401 - keys as the image asks for them
from gate_worker.recorder import Recorder  # type: ignore[import-not-found]
from gate_worker.stand_ins import StandIn  # type: ignore[import-not-found]
from triton.backends.nvidia import driver
from triton.runtime import build

Json = dict[str, Any]
# What a start reads of an entry: machine code and its description, or a launcher. The stages before
# machine code are for people only; CompiledKernel of triton/compiler/compiler.py takes what is
# there, and TRITON_STORE_BINARY_ONLY keeps no more.
KEPT = (".cubin", ".json", ".so")
# The list of an entry's files, with absolute paths: the image's own reader makes it at the start.
GROUP = "__grp__"
# A new name for each run would stand in what the C compiler makes (`__FILE__`).
C_SOURCES = Path.cwd() / "c"
C_SOURCES.mkdir()
build.tempfile = types.SimpleNamespace(
    TemporaryDirectory=lambda: contextlib.nullcontext(str(C_SOURCES))
)


class Warming(Recorder):  # type: ignore[misc]
    """Compiles as the gate does, keeps entries, and compiles the launcher of each kernel."""

    entries: dict[str, Json]

    def _compiled(self, src: Any, target: Any, options: Any, kwargs: Any) -> Json:
        kernel, loaded = self._real(src, target=target, options=options, **kwargs), list[str]()

        def load(name: str, path: str) -> Any:
            # loading it takes a driver; by now it is in the cache
            loaded.append(path)
            return StandIn()

        about = kernel.metadata
        path = next(path for name, path in kernel.metadata_group.items() if name.endswith(".json"))
        self.take(path, src.fn.__name__, src.fn.__module__)
        # more would never be launched
        if about.shared <= self.card["shared_bytes"]:
            build._load_module_from_path = load
            driver.CudaUtils()
            # since 3.7 one launcher in C, in CudaUtils, serves all kernels
            if hasattr(driver, "make_launcher"):
                driver.CudaLauncher(src, about)
            for path in loaded:
                self.take(path, Path(path).name.partition(".")[0], "")
        return {
            "shared_bytes": about.shared,
            "num_warps": about.num_warps,
            "num_stages": about.num_stages,
            **dict.fromkeys(("registers", "spill_bytes", "stack_bytes")),
        }

    def take(self, path: str, kernel: str, module: str) -> None:
        """Notes the entry that a file lies in."""
        folder = Path(path).parent
        if folder.name in self.entries:
            return
        files = {
            file.name: base64.b85encode(zlib.compress(file.read_bytes(), 9)).decode()
            for file in sorted(folder.iterdir())
            if file.suffix in KEPT and not file.name.startswith(GROUP)
        }
        self.entries[folder.name] = {
            "key": folder.name,
            "kernel": kernel,
            "module": module,
            "files": files,
        }

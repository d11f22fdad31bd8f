"""Compiles FlashInfer's modules ahead of time. Runs at the image's own paths, without a card.

    python compiler JOB ANSWERS

JOB names modules by the function of FlashInfer that describes each, with its arguments. FlashInfer
writes its own sources and compiler commands (`JitSpec.build`), and ANSWERS gets a line when a
module begins, and one with its library. Only FlashInfer's `jit` package is imported: its other
modules load the engine's libraries, and describe nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import types
import zlib
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# Names of temporary files, and what the linker makes of them: all that differs between two runs.
STRIPPED = ("--strip-all", "--remove-section=.note.gnu.build-id", "--remove-section=.comment")
_DTYPE = re.compile(r"torch\.(\w+)")
_LAST_LINES = 3


def import_jit(site: str) -> None:
    """Makes FlashInfer's `jit` importable without what its top-level package imports."""
    sys.path.insert(0, site)
    package = types.ModuleType("flashinfer")
    package.__path__ = [str(Path(site) / "flashinfer")]
    sys.modules["flashinfer"] = package
    importlib.import_module("flashinfer.jit")


def argument(value: Any) -> Any:
    """An argument as the function takes it: `torch.bfloat16` is a type of torch."""
    found = _DTYPE.fullmatch(value) if isinstance(value, str) else None
    return getattr(importlib.import_module("torch"), found[1]) if found else value


def compile_module(case: Json) -> Json:
    """One module: FlashInfer's own name for it, its library, and how many sources it has."""
    module, _, function = case["make"].partition(":")
    made = getattr(importlib.import_module(module), function)
    spec = made(**{name: argument(value) for name, value in case["arguments"].items()})
    if spec.name != case["name"]:
        return {"ended": "raised", "message": f"{case['make']} makes {spec.name}"}
    spec.build(verbose=False)
    built = Path(importlib.import_module("flashinfer.jit.env").FLASHINFER_JIT_DIR)
    path = built / spec.name / f"{spec.name}.so"
    subprocess.run(["strip", *STRIPPED, str(path)], check=True)
    data = path.read_bytes()
    return {
        "ended": "compiled",
        "sources": len(spec.sources),
        "sha256": hashlib.sha256(data).hexdigest(),
        "library": base64.b85encode(zlib.compress(data, 6)).decode(),
    }


def main(job_path: str, answers_path: str) -> None:
    """Works through a job's modules, one line of answer after the other."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    import_jit(job["site"])
    # what this interpreter was started with is not for compilers
    os.environ.pop("LD_LIBRARY_PATH", None)
    with Path(answers_path).open("a", encoding="utf-8") as answers:
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            try:
                answer = compile_module(case)
            except Exception as error:
                # a compiler's message, or FlashInfer's own: this module is for other cards
                lines = [x for x in str(error).splitlines() if "error" in x] or [str(error)]
                text = f"{type(error).__name__}: {' '.join(lines[:_LAST_LINES])}"
                answer = {"ended": "raised", "message": text[:1000]}
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            answer |= {"case": case["name"], "seconds": round(seconds, 1)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

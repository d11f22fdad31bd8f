"""Compiles an engine's kernels into entries of Triton's cache. Runs at the image's own paths.

    python inside JOB ANSWERS

JOB is a job of the gate's worker, with the folder that this worker lies in (`gate_worker`); ANSWERS
gets the same lines as the gate's, and in each answer the entries that its case reached. Engine,
card and calls are those of the gate; only what Triton's compiler makes is kept here, and the C
launcher that goes with each kernel is compiled, too.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(job_path: str, answers_path: str) -> None:
    """Works through a job's cases, one line of answer after the other."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]
    for name, folder in (("gate_worker", job["gate_worker"]), ("warm_worker", HERE)):
        # as packages, without putting their folders on the import path
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    calling, card, engines, stand_ins = (
        importlib.import_module(f"gate_worker.{name}")
        for name in ("calling", "card", "engines", "stand_ins")
    )
    sys.path.insert(0, job["engine"])
    import numpy
    import torch
    import triton

    card.pretend_card(job["card"], job["cuda"])
    recorder = importlib.import_module("warm_worker.warming").Warming(job["card"], None)
    recorder.install()
    absent = stand_ins.StandIns(job["absent"])
    bare = stand_ins.BarePackages(job["engine"], job["bare"])
    # as the gate's worker has them: before Python's own finders, and after them
    sys.meta_path.insert(0, bare)
    sys.meta_path.append(absent)
    if prepare := engines.PREPARE.get(job["package"]):
        prepare(job["card"])
    versions = {m.__name__: str(m.__version__) for m in (numpy, torch, triton)}
    with Path(answers_path).open("a", encoding="utf-8") as answers:
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            recorder.entries = {}
            answer = calling.judge(case, recorder, job["package"])
            answer.update(versions=versions, stand_ins=sorted({*absent.used, *bare.used}))
            answer["entries"] = list(recorder.entries.values())
            print(json.dumps(answer), file=answers, flush=True)
            compiled = all("error" not in record for record in answer["records"])
            if answer["ended"] in ("raised", "not imported") and compiled:
                # modules may be half imported now; the next case gets a process of its own
                return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

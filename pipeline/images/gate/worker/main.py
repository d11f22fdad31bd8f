"""A job's cases, one line of answer after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .calling import compiling
from .card import pretend_card
from .engines import PREPARE
from .numbers import interpreting
from .stand_ins import BarePackages, StandIns


def main(job_path: str, answers_path: str) -> None:
    """Work through a job's cases, one line of answer after the other."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    sys.path.insert(0, job["engine"])
    import numpy
    import torch
    import triton

    card = job["card"]
    pretend_card(card, job["cuda"])
    judge = interpreting(card) if job["interpret"] else compiling(card, job["cache"])
    stand_ins = StandIns(job["absent"])
    bare = BarePackages(job["engine"], job["bare"])
    # bare packages before Python's own finders, which would run their __init__.py; stand-ins after
    # them, for what they do not find
    sys.meta_path.insert(0, bare)
    sys.meta_path.append(stand_ins)
    prepare = PREPARE.get(job["package"])
    if prepare:
        prepare(card)
    versions = {m.__name__: str(m.__version__) for m in (numpy, torch, triton)}
    versions["cuda"] = job["cuda"]
    with Path(answers_path).open("a", encoding="utf-8") as answers:
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            answer = judge(case, job["package"])
            answer.update(versions=versions, stand_ins=sorted({*stand_ins.used, *bare.used}))
            print(json.dumps(answer), file=answers, flush=True)
            compiled = all("error" not in record for record in answer["records"])
            if answer["ended"] in ("raised", "not imported") and compiled:
                # modules may be half imported now; the next case gets a process of its own
                return

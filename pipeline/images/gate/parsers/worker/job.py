"""A job's cases, one line of answer after the other."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from .answers import Json
from .conversations import judge_conversation
from .endpoints import NoEndpoint
from .judging import judge_cut_off, judge_whole
from .sglang_endpoints import SGLANG
from .stand_ins import install_stand_ins
from .tokens import TOKENIZERS
from .vllm_endpoints import VLLM

ENDPOINTS: dict[str, Any] = {"sglang": SGLANG, "vllm": VLLM}
_MOST_SHOWN = 400  # characters of an engine's error


def work_through(job_path: str, answers_path: str) -> None:
    """Imports each endpoint of the engine once, then judges case after case."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    used = install_stand_ins(job["engine"], job["bare"], job["left_out"])
    # engines log every call that they could not parse
    logging.disable(logging.CRITICAL)
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    endpoints: dict[str, Any] = {}
    with Path(answers_path).open("a", encoding="utf-8") as answers:
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            begun, kind = time.monotonic(), case["endpoint"]
            if kind not in endpoints:
                try:
                    endpoints[kind] = ENDPOINTS[job["package"]][kind]()
                except Exception as error:
                    endpoints[kind] = error
            answer = {"case": case["name"], **_judged(case, endpoints[kind])}
            answer |= {"stand_ins": used(), "versions": versions}
            answer["seconds"] = round(time.monotonic() - begun, 3)
            print(json.dumps(answer), file=answers, flush=True)


def _judged(case: Json, endpoint: Any) -> Json:
    if isinstance(endpoint, NoEndpoint):
        return {"ended": "no endpoint", "message": str(endpoint)[:_MOST_SHOWN]}
    if isinstance(endpoint, Exception):
        return {"ended": "not imported", "message": _message(endpoint)}
    try:
        tokenizer = TOKENIZERS[case["vocabulary"]](case["markers"], case["end"])
        form = endpoint.serve(case, tokenizer)
    except Exception as error:
        return {"ended": "no parser", "message": _message(error)}
    judge: Any = judge_cut_off if case["cut_off"] else judge_whole
    judge = judge_conversation if case["conversation"] else judge
    about = {"ended": "judged", "route": endpoint.route, "address": endpoint.address, "form": form}
    written = {**case, "text": case["forms"].get(form) or case["text"]}
    return {**about, **judge(written, tokenizer, endpoint)}


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_SHOWN]

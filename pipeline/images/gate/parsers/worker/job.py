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
from .endpoints import ENDPOINTS
from .judging import judge_cut_off, judge_whole
from .stand_ins import install_stand_ins
from .tokens import ByteTokenizer

_MOST_SHOWN = 400  # characters of an engine's error


def work_through(job_path: str, answers_path: str) -> None:
    """Imports the engine's chat endpoint once, then judges case after case."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    used = install_stand_ins(job["engine"], job["bare"], job["left_out"])
    failure, endpoint = "", None
    try:
        endpoint = ENDPOINTS[job["package"]]()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:_MOST_SHOWN]
    # engines log every call that they could not parse
    logging.disable(logging.CRITICAL)
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    with Path(answers_path).open("a", encoding="utf-8") as answers:
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            begun, tokenizer = time.monotonic(), ByteTokenizer(case["markers"])
            answer: Json = {"case": case["name"], "ended": "not imported", "message": failure}
            if endpoint is not None:
                judge: Any = judge_cut_off if case["cut_off"] else judge_whole
                judge = judge_conversation if case["conversation"] else judge
                try:
                    endpoint.serve(case, tokenizer)
                    answer |= {"ended": "judged", "route": endpoint.route}
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"[:_MOST_SHOWN]
                    answer |= {"ended": "no parser", "message": message}
                else:
                    answer |= judge(case, tokenizer, endpoint)
            answer |= {"stand_ins": used(), "versions": versions}
            answer["seconds"] = round(time.monotonic() - begun, 3)
            print(json.dumps(answer), file=answers, flush=True)

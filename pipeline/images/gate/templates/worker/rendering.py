"""A job's conversations, one line of answer after the other."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from .engines import RENDERERS, Refused

_MOST_SHOWN = 400  # characters of an engine's error


def render_all(job_path: str, answers_path: str) -> None:
    """Imports the engine once, then renders conversation after conversation."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    failure, renderer = "", None
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    try:
        # before there are stand-ins, which it would take for the packages themselves
        transformers = importlib.import_module("transformers")
        asked = importlib.import_module("transformers.utils.import_utils")
        for name, function in list(vars(asked).items()):
            if name.startswith("is_") and name.endswith("_available"):
                # each remembers its answer; some want arguments, or a package's version
                with contextlib.suppress(Exception):
                    function()
        versions["transformers"] = str(transformers.__version__)
    except Exception as error:
        failure = _shown(error)
    install: Any = importlib.import_module("parser_worker.stand_ins").install_stand_ins
    used = install(job["engine"], job["bare"], job["left_out"])
    try:
        if not failure:
            renderer = RENDERERS[job["package"]]()
    except Exception as error:
        failure = _shown(error)
    # engines log what they find in templates, and each request that they refuse
    logging.disable(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    with Path(answers_path).open("a", encoding="utf-8") as answers:
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            begun = time.monotonic()
            answer: dict[str, Any] = {"case": case["name"], "ended": "not imported"}
            answer["message"] = failure
            if renderer is not None:
                try:
                    text = loop.run_until_complete(renderer.render(case))
                    # who reads this takes what cannot be printed out of all texts
                    data = base64.b64encode(text.encode(errors="surrogatepass")).decode()
                    answer |= {"ended": "rendered", "data": data, "route": renderer.route}
                except Refused as error:
                    answer |= {"ended": "refused", "message": _shown(error.reason)}
                    answer["route"] = renderer.route
                # in a server this is status 500, or worse
                except Exception as error:
                    answer |= {"ended": "broke", "message": _shown(error)}
            answer |= {"stand_ins": used(), "versions": versions}
            answer["seconds"] = round(time.monotonic() - begun, 3)
            print(json.dumps(answer), file=answers, flush=True)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_SHOWN]

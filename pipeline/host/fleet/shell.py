"""Runs on a host as root: commands come as lines of JSON, answers go back as lines of JSON.

One such process serves a whole look at a host, so that SSH and sudo are asked once, not a hundred
times. It stands alone (standard library only) and ends when its input does.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from typing import Any

READY = "sm120 ready"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Run one command to its end, or to its limit."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", asked["command"]],
        env={"PATH": _PATH, "HOME": "/root", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=asked["limit_s"])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += b"\ndid not end within %d s" % asked["limit_s"]
    texts = {"out": out, "err": err}
    return {"code": process.returncode} | {
        k: base64.b64encode(v).decode() for k, v in texts.items()
    }


def serve() -> None:
    """Say who we are, then answer until there is nothing more to read."""
    print(f"{READY} {os.geteuid()}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()

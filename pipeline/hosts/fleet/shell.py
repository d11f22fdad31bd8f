"""Runs on a host as root: commands come as lines of JSON, results go back as lines of JSON.

One such process serves all commands of a verification, so that SSH and sudo authenticate once, not
a hundred times. It needs only the standard library and ends when its input does.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

READY = "sm120 ready"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# until a killed command is gone
_GRACE_S = 5.0
_LEFT_CODE = 124  # as timeout(1) ends
# kept referenced, so that Python does not warn about a child without a wait
_LEFT_BEHIND: list[subprocess.Popen[bytes]] = []


def run_on_host(request: dict[str, Any]) -> dict[str, Any]:
    """Run one command to its end, or to its time limit."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", request["command"]],
        # untranslated: promises read the output
        env={"PATH": _PATH, "HOME": "/root", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a group of its own, so that it is killed with its children
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=request["limit_s"])
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired as error:
            # a process inside a driver that hangs ignores even SIGKILL; its output so far
            _LEFT_BEHIND.append(process)
            out, err = error.stdout or b"", error.stderr or b""
        err += b"\ndid not finish within %d s" % request["limit_s"]
        if process.returncode is None:
            err += b"; it cannot be killed and was left behind"
    texts = {"out": out, "err": err}
    code = _LEFT_CODE if process.returncode is None else process.returncode
    return {"code": code} | {k: base64.b64encode(v).decode() for k, v in texts.items()}


if __name__ == "__main__":
    print(f"{READY} {os.geteuid()}", flush=True)
    # until the input ends
    for line in sys.stdin:
        print(json.dumps(run_on_host(json.loads(line))), flush=True)

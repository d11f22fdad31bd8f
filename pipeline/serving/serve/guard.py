"""Runs on a host while an engine starts there: removes the container if the connection is lost.

The machine that starts the engine writes a line now and then, and `keep` once it is served. When
the lines stop (a lost connection, a machine that died) or the input ends without `keep`, the
guard removes the container of that attempt. It needs only the standard library.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

KEEP, KEPT, BEAT = b"keep\n", b"kept\n", b"beat\n"
# three lines may be lost; a network that is slow for a moment must not end a start of an hour
BEAT_S, LIMIT_S = 10.0, 45.0
# A container that was ordered just before the connection broke appears a moment later.
_AGAIN_S = (0.0, 3.0, 10.0)
_LABEL = "sm120.attempt"


def is_kept() -> bool:
    """Waits for `keep`; false when the other end is gone."""
    while select.select([0], [], [], LIMIT_S)[0]:
        data = os.read(0, 4096)
        if KEEP in data:
            return True
        if not data:
            return False
    return False


class UnixConnection(http.client.HTTPConnection):
    """HTTP through a socket of this machine."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("127.0.0.1", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def guard_main(kind: str, place: str, name: str, attempt: str) -> None:
    """Waits, then removes the container unless `keep` came; `place` is a socket or a program."""
    # the end of the login must not end the guard
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if is_kept():
        os.write(1, KEPT)
        return
    for pause in _AGAIN_S:
        time.sleep(pause)
        try:
            if kind == "docker":
                # through its socket: the host may lack Docker's program
                with closing(UnixConnection(place, 60)) as docker:
                    docker.request("GET", f"/containers/{name}/json")
                    answer = docker.getresponse()
                    body = json.loads(answer.read() or b"{}")
                    # another user's container of the same name stays
                    if answer.status == 200 and body["Config"]["Labels"].get(_LABEL) == attempt:
                        docker.request("DELETE", f"/containers/{body['Id']}?force=true&v=true")
                        docker.getresponse().read()
            else:
                label = f'{{{{index .Config.Labels "{_LABEL}"}}}}'
                words = [place, "inspect", "--format", label, name]
                done = subprocess.run(words, capture_output=True, check=False)
                if done.stdout.decode(errors="replace").strip() == attempt:
                    words = [place, "rm", "--force", "--ignore", "--time=0", "--volumes", name]
                    subprocess.run(words, capture_output=True, check=False)
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            continue


if __name__ == "__main__":
    guard_main(*sys.argv[1:5])

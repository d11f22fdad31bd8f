#!/usr/bin/env python3
"""A program that SIGKILL does not end for a while, as one that waits inside a driver that hangs.

Its own child traces it: what is killed stays in the process table until its tracer lets it go, so
whoever waits for it waits as for a process in uninterruptible sleep. With `--try` it only
says by its exit code whether this machine can have that.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

_SEIZE = 0x4206  # PTRACE_SEIZE
_MAY_TRACE = 0x59616D61  # PR_SET_PTRACER, for systems with Yama
HELD_S = 12.0
CANNOT = 77


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_MAY_TRACE, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    heard, say = os.pipe()
    if os.fork() == 0:
        hold(libc, say)
    if os.read(heard, 1) != b"0":
        sys.exit(CANNOT)
    if "--try" in sys.argv:
        return
    print("stuck", flush=True)
    time.sleep(10 * HELD_S)


def hold(libc: ctypes.CDLL, say: int) -> None:
    """Trace the parent; give back every file of its, so that only waiting for it takes long."""
    os.setsid()
    failed = libc.ptrace(_SEIZE, os.getppid(), None, None) != 0
    os.write(say, b"1" if failed else b"0")
    for number in (0, 1, 2):
        os.close(number)
    time.sleep(0 if failed or "--try" in sys.argv else HELD_S)
    os._exit(0)


if __name__ == "__main__":
    main()

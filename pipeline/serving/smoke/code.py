"""Code that a model wrote, run where it can reach nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.artifacts.containers.start import SYSTEM
from pipeline.serving.smoke.client import NotOffered, Unsound

_LONGEST_S = 20.0


def run_in_sandbox(program: str) -> str:
    """What a program prints; it has no network and no files."""
    sandbox = find_sandbox()
    if not sandbox.isolates:
        raise NotOffered(f"code of a model is not run here: {sandbox.sentence()}")
    # the real one: a virtual environment lies in the user's folders
    python = Path(sys.executable).resolve()
    prefix = Path(sys.base_prefix).resolve()
    read = [] if any(prefix.is_relative_to(folder) for folder in SYSTEM) else [prefix]
    try:
        done = sandbox.run(
            [str(python), "-I", "-S", "-c", program], read=read, timeout_s=_LONGEST_S
        )
    except subprocess.TimeoutExpired as error:
        raise Unsound(f"the code ran longer than {_LONGEST_S:g} s") from error
    if done.returncode:
        raise Unsound(f"the code ends with {done.stderr.decode(errors='replace')[-300:]!r}")
    return done.stdout.decode(errors="replace")

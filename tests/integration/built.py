"""Building real images from the checkout's own locks."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.artifacts.containers.box import Wanted
from pipeline.artifacts.containers.container_engine import find_way
from pipeline.core.errors import MirrorUnknown, SandboxUnavailable, SourceUnreachable
from tests.testbed.forked import ROOT, run_forked

NO_SOURCE = (MirrorUnknown.exit_code, SourceUnreachable.exit_code)


@dataclass(frozen=True)
class Built:
    """An image in a store."""

    store: Path
    name: str
    platform: str
    digest: str


def sm120(store: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would; a failure shows what it said."""
    done = run_sm120(store, *args, **env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def run_sm120(store: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command, whatever comes of it."""
    return run_forked("--checkout", str(ROOT), "--store", str(store), *args, env=env)


def need_sandbox(wanted: Wanted = "auto") -> None:
    """Skip where no program of an image can run: a bare chroot has no user namespaces."""
    try:
        find_way(wanted)
    except SandboxUnavailable as error:
        pytest.skip(f"No program of an image can run here: {error}.")


def build_image(store: Path, name: str, platform: str, *more: str) -> Built:
    """Build an image; skip where this machine reaches neither an index nor a mirror."""
    done = run_sm120(store, "build", name, "--platform", platform, "--json", *more)
    if done.returncode in NO_SOURCE:
        pytest.skip(f"the locked files cannot be fetched here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)[0]
    return Built(store, name, platform, found["digest"])

"""Building real images from the checkout's own locks."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pipeline.artifacts.containers.backend import Wanted
from pipeline.artifacts.containers.container_engine import find_backend
from pipeline.core.errors import MirrorUnknown, SandboxUnavailable, SourceUnreachable
from tests.testbed.forked import ROOT, run_forked

# an environment that no digest may depend on
STRANGE = {
    "TZ": "Pacific/Kiritimati",
    "LC_ALL": "C",
    "LANG": "tr_TR.UTF-8",
    "PYTHONHASHSEED": "4711",
    "SOURCE_DATE_EPOCH": "1",
    "PYTHONUTF8": "0",
}
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
    return run_forked("--checkout", str(checkout_of(store)), "--store", str(store), *args, env=env)


def checkout_of(store: Path) -> Path:
    """The checkout whose images a store holds: one that lies beside it, or this one."""
    beside = store.parent / "checkout"
    return beside if beside.is_dir() else ROOT


def make_lean(folder: Path) -> Path:
    """A checkout and a store whose images have no compilers, for who only serves or sends them.

    They have two fifths of the bytes, and whatever a test does with an image costs less for it.
    """
    checkout, store = folder / "checkout", folder / "store"
    for name in ("images", "lockfiles", "recipes"):
        shutil.copytree(ROOT / name, checkout / name)
    (checkout / "ansible").symlink_to(ROOT / "ansible")
    spec = checkout / "images" / "debian-python" / "image.yaml"
    body = yaml.safe_load(spec.read_text(encoding="utf-8"))
    body["debs"] = [d for d in body["debs"] if d not in ("g++", "gcc") and "-dev" not in d]
    spec.write_text(yaml.safe_dump(body), encoding="utf-8")
    store.mkdir()
    names = ("debian-python", "llama-cpp-cpu")
    # a machine without an index or a mirror skips where a test asks for an image
    if run_sm120(store, "image", "lock", *names).returncode == 0:
        run_sm120(store, "build", *names, "--accept")
    return folder


def need_sandbox(wanted: Wanted = "auto") -> None:
    """Skip where no program of an image can run: a bare chroot has no user namespaces."""
    try:
        find_backend(wanted)
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

"""The toolkit, and a driver new enough for it and for every image."""

from __future__ import annotations

import json

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import CudaPromise, Promised
from pipeline.hosts.lock_model import HostLock, read_host_lock
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless


def whole_lock(promised: Promised) -> HostLock:
    """The lock, for its rules."""
    assert promised.lock_file is not None
    return read_host_lock(promised.lock_file)


@checks.known_by("driver")
def test_the_loaded_driver_runs_what_these_releases_compile(
    facts: HostFacts, promised: Promised, wanted: CudaPromise
) -> None:
    """Of the toolkit and of every image named in the inventory."""
    lock = whole_lock(promised)
    branch = int(checks.known(facts.driver.version).split(".")[0])
    # kernels are compiled on the host: an older driver refuses PTX of a newer CUDA
    # (NVIDIA/nvbandwidth#61)
    releases = (lock.cuda_release, *wanted.image_releases)
    least = {release: lock.cuda_oldest_branches.get(release) for release in releases}
    unlisted = ", ".join(r for r, oldest in least.items() if oldest is None)
    why = f"lockfiles/host.yaml names no driver for CUDA {unlisted}"
    checks.undecided_unless(not unlisted, why)
    wrong = [f"CUDA {r} needs {b}" for r, b in least.items() if b is not None and b > branch]
    fix = "Name a newer driver branch in lockfiles/host.yaml, or use images of an older CUDA."
    require_none(wrong, f"driver {branch}", fix)


def test_the_toolkit_is_the_locked_release(
    host: Host, promised: Promised, wanted: CudaPromise
) -> None:
    """By the toolkit's own version file."""
    skip_unless(wanted.toolkit, "this host only runs containers")
    release = whole_lock(promised).cuda_release
    path = f"/usr/local/cuda-{release}/version.json"
    version = json.loads(checks.text_of(host, path))["cuda"]["version"]
    fix = f"apt-get install --reinstall the package that `dpkg -S {path}` names."
    require(version.startswith(f"{release}."), f"{path} names {version}", fix)

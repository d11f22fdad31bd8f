"""Unit tests reach nothing but loopback and own nothing but their folder."""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import pipeline
from pipeline.core import log
from tests import makers
from tests.testbed.fault_server import FaultServer, fault_server
from tests.testbed.oci_door import Door, oci_door
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.support import Command

_CLEARED = ("PIP_", "UV_", "SM120_", "XDG_", "HF_")
_NOWHERE = "http://127.0.0.1:9"
# a busy machine is no fault of the code
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")


def pytest_collection_finish() -> None:
    """All is loaded before anything is patched: a module that is loaded under one would keep it.

    The processes that run the tests are forked later: none need load it again.
    """
    for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
        # those run elsewhere, beside an engine
        if ".worker." not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """A folder of that name and a number; `mktemp` would list thousands of them for a free one.

    It lies in memory, if there is enough of it. A disk is written for each fsync and for each
    folder that comes or goes: a tenth of these tests' CPU time, and a third of their wall time.
    """
    numbers, memory = itertools.count(), Path("/dev/shm")
    # not what is free: after a while caches of the disk fill all memory, and give way
    known = Path("/proc/meminfo").read_text()
    free = int(re.findall(r"(?m)^MemAvailable: *(\d+) kB", known)[0]) << 10
    with suppress(OSError, ValueError):  # a container's limit; "max" is none
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with ExitStack() as stack:
        if os.access(memory, os.W_OK) and min(free, shutil.disk_usage(memory).free) > 8 << 30:
            kept = tempfile.TemporaryDirectory(
                prefix="sm120-unit-", dir=memory, ignore_cleanup_errors=True
            )
            folders = Path(stack.enter_context(kept))
        else:
            folders = tmp_path_factory.mktemp("unit")

        def make(name: str) -> Path:
            folder = folders / f"{name}{next(numbers)}"
            folder.mkdir()
            return folder

        yield make


@pytest.fixture
def other_disk(tmp_path: Path) -> Path:
    """A folder on another disk than the test's own."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return next(place for place in places if place.stat().st_dev != tmp_path.stat().st_dev)


@pytest.fixture
def tmp_path(new_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """As pytest's own, but found at once."""
    return new_folder(re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture(autouse=True)
def stay_at_home(
    monkeypatch: pytest.MonkeyPatch, new_folder: Callable[[str], Path]
) -> Iterator[None]:
    """Settings of this machine stay out, and so does the network beyond loopback."""
    home = new_folder("home")
    for name in [n for n in os.environ if n.startswith(_CLEARED) or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    # programs that tests start have sockets of their own: their way out is a closed door
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, _NOWHERE)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SM120_STORE", str(home / "store"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    # without settings pip has nothing to say, and takes half a second for it
    monkeypatch.setattr("pipeline.core.net.settings._pip_config_list", lambda: "")
    monkeypatch.setattr(socket.socket, "connect", _only_loopback(socket.socket.connect))
    monkeypatch.setattr(socket, "getaddrinfo", _only_numbers(socket.getaddrinfo))
    yield
    log.set_quiet(False)


def _only_loopback(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        is_inet = self.family in (socket.AF_INET, socket.AF_INET6)
        if is_inet and not str(address[0]).startswith(("127.", "::1", "localhost")):
            raise AssertionError(f"a unit test tried to reach {address}")
        return connect(self, address)

    return guarded


def _only_numbers(getaddrinfo: Any) -> Any:
    def guarded(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if not name.startswith(("127.", "::1", "localhost", "0.0.0.0")):
            raise socket.gaierror(socket.EAI_NONAME, f"unit tests know no {name}")
        return getaddrinfo(host, *args, **kwargs)

    return guarded


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """An index and file server that misbehaves on request."""
    with fault_server() as running:
        yield running


@pytest.fixture
def tiny() -> TinyRegistry:
    """A small registry."""
    return TinyRegistry()


@pytest.fixture
def door(tiny: TinyRegistry) -> Iterator[Door]:
    """The way to the small registry, which sees and spoils what goes through."""
    with oci_door(tiny) as running:
        yield running


@pytest.fixture
def no_slow_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds start no processes: that takes seconds, and other tests do it."""
    monkeypatch.setattr("pipeline.images.assemble.locked_layers._workers", makers.threads)


@pytest.fixture
def sm120(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """The command, run in this process inside the test's folder."""
    return Command(capfd, monkeypatch, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("Only root can mount a small disk here.")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def store_root(tmp_path: Path) -> Path:
    return tmp_path / "store"

"""What all trials share: servers behind wires, a folder for the state, and how a command starts."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests import makers
from tests.chaos.judge import Ended
from tests.chaos.wire import Wire, write_names
from tests.testbed.fault_server import FaultServer, fault_server
from tests.testbed.hub import TestHub, test_hub
from tests.testbed.oci_door import Door, oci_door
from tests.testbed.packages import find_program
from tests.testbed.tiny_registry import TinyRegistry

ROOT = Path(__file__).resolve().parents[2]
HUB, CDN, INDEX, REGISTRY, PEER, MODEL = (
    f"{n}.chaos.test" for n in ("hub", "cdn", "index", "registry", "peer", "model")
)
REPOSITORY = "org/tiny"
# longer than any trial that ends by itself: the longest silence that the product allows is a minute
LIMIT_S = 240.0
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


@dataclass
class Process:
    """A command that runs, with its output in files outside of the state."""

    popen: subprocess.Popen[bytes]
    out: Path
    err: Path
    began: float
    was_killed: bool = False

    def kill(self, *, whole: bool = True) -> None:
        """kill -9: of all that it started, or of itself alone, as the kernel does out of memory."""
        self.was_killed = self.popen.poll() is None
        with suppress(ProcessLookupError):
            (os.killpg if whole else os.kill)(self.popen.pid, signal.SIGKILL)

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self.popen.wait(limit_s)
        # whoever is left of it: what a killed parent did not take along
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        out, err = (p.read_text(encoding="utf-8", errors="replace") for p in (self.out, self.err))
        return Ended(code, out, err, self.was_killed and code == -signal.SIGKILL)


@dataclass
class World:
    """One run of chaos: its folder, its servers, and what to end."""

    home: Path
    stack: ExitStack
    hub: TestHub
    index: FaultServer
    registry: TinyRegistry
    door: Door
    wires: dict[str, Wire] = field(default_factory=dict)
    more_env: dict[str, str] = field(default_factory=dict)
    shelf: tuple[dict[Any, Any], ...] = ()  # what a registry held when a stage began
    n_started: int = 0

    @property
    def place(self) -> Path:
        """Where each state lies while it is used: always here, so that paths stay true."""
        return self.home / "place"

    @property
    def parts(self) -> Path:
        """Wheels and the like, which no trial changes."""
        return self.home / "parts"

    def add_wire(self, name: str, target: Callable[[], str]) -> Wire:
        """A name and a port before a server whose address the call tells."""

        def found() -> tuple[str, int]:
            parts = urlsplit(target())
            return parts.hostname or "", parts.port or 0

        self.wires[name] = Wire(name, found)
        write_names(tuple(self.wires))
        return self.wires[name]

    def calm(self) -> None:
        """No fault is left on any wire, and every name is known."""
        for wire in self.wires.values():
            wire.calm()
            wire.come_back()
        write_names(tuple(self.wires))

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.place / "home"),
            "PYTHONPATH": str(ROOT),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.wires[INDEX].url}/simple/",
            "UV_CACHE_DIR": str(self.home / "uv"),
            "SM120_STORE": str(self.place / "store"),
            "XDG_CONFIG_HOME": str(self.place / "config"),
            "HF_ENDPOINT": self.wires[HUB].url,
            "LC_ALL": "C.UTF-8",
            **self.more_env,
        }

    def start(
        self, words: Sequence[str], before: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Process:
        """`sm120 WORDS` in the state's checkout, in a session of its own."""
        self.n_started += 1
        out, err = (self.home / "logs" / f"{self.n_started:05}.{n}" for n in ("out", "err"))
        cwd = self.place / "checkout"
        with out.open("wb") as to_out, err.open("wb") as to_err:
            popen = subprocess.Popen(
                [*before, sys.executable, "-m", "pipeline", *words],
                cwd=cwd if cwd.is_dir() else self.home,
                env={**self.environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,
            )
        return Process(popen, out, err, time.monotonic())

    def sm120(
        self, *words: str, expect: int | None = 0, env: Mapping[str, str] | None = None
    ) -> Ended:
        """The command to its end, for what is prepared or looked at between trials."""
        ended = self.start(words, env=env).wait()
        if expect is not None and ended.code != expect:
            raise RuntimeError(f"sm120 {' '.join(words)}: {ended.code}: {ended.err[-2000:]}")
        return ended

    def clear(self) -> None:
        """An empty place."""
        if self.place.exists():
            shutil.rmtree(self.place)

    def copy_state(self, state: Path) -> None:
        """A fresh copy of what was prepared, with its times."""
        self.place.mkdir(parents=True, exist_ok=True)
        copy = [find_program("cp"), "-a", f"{state}/.", str(self.place)]
        subprocess.run(copy, check=True)


def new_world(home: Path, stack: ExitStack) -> World:
    """Servers of real bytes, each behind a wire of its own name."""
    for name in ("logs", "parts", "states"):
        (home / name).mkdir(parents=True)
    # a file of our own over the machine's: only this namespace sees it
    names = home / "hosts"
    names.write_text("")
    subprocess.run([find_program("mount"), "--bind", str(names), "/etc/hosts"], check=True)
    hub = stack.enter_context(test_hub())
    index = stack.enter_context(fault_server())
    registry = TinyRegistry()
    door = stack.enter_context(oci_door(registry))
    world = World(home, stack, hub, index, registry, door)
    to_hub, to_cdn = hub.url, hub.cdn_url
    world.add_wire(HUB, lambda: to_hub)
    world.add_wire(INDEX, lambda: index.url)
    world.add_wire(REGISTRY, lambda: door.url)
    # the Hub sends clients to its CDN by name
    hub.cdn_url = world.add_wire(CDN, lambda: to_cdn).url
    dice = random.Random(120)
    for name, size in (("thing", 4_000_000), ("other", 1_500_000), ("small", 20_000)):
        data = makers.Part(dice.randbytes(size), method=0)
        wheel = makers.make_wheel(world.parts / "wheels", name, {f"{name}/data": data})
        index.add(wheel.name, wheel.read_bytes())
    hub.add(REPOSITORY, weights_files())
    return world


def weights_files() -> dict[str, bytes]:
    """A small set: two shards, and two files that Git has itself."""
    dice = random.Random(7)
    return {
        "config.json": b'{"model_type": "tiny"}',
        "README.md": b"It is only here to be fetched.\n",
        "model-00001-of-00002.safetensors": dice.randbytes(6_000_000),
        "model-00002-of-00002.safetensors": dice.randbytes(2_500_000),
    }

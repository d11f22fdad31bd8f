"""Kill it, stop it, run it twice at once: the store stays true and the next run ends the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.testbed.fault_server import FaultServer, fault_server
from tests.unit.support import make_checkout, misnamed, temporary_files

ROOT = Path(__file__).resolve().parents[2]
BIG = "big-1.0-py3-none-any.whl"
BIG_BYTES = 30_000_000


@dataclass
class Bench:
    """A checkout with one image, an index that has its wheels, and a store of its own."""

    checkout: Checkout
    server: FaultServer
    home: Path
    digest: str = ""
    stores: list[Path] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.stores[-1]

    def new_store(self) -> Path:
        self.stores.append(self.home / f"store-{len(self.stores)}")
        return self.store

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.server.index,
            "SM120_STORE": str(self.store),
            **more,
        }

    def start(self, *args: str, program: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """The command in a session of its own, as a terminal would run it."""
        door = [str(program)] if program else ["-m", "pipeline"]
        return subprocess.Popen(
            [sys.executable, *door, *args],
            cwd=self.checkout.root,
            env=self.environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def build(self, *args: str) -> str:
        """Build to the end; returns the digest."""
        child = self.start("build", "tiny", "--json", *args)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        return str(json.loads(out)[0]["digest"])

    def big_partial_bytes(self) -> int:
        pin = makers.wheel_pin(self.home / "wheels" / BIG)
        path = self.store / "partial" / pin.sha256
        return path.stat().st_size if path.exists() else 0


def stored(data: bytes) -> makers.Part:
    return makers.Part(data, method=0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    home = tmp_path_factory.mktemp("bench")
    wheels = [
        makers.make_wheel(home / "wheels", "big", {"big/data": stored(os.urandom(BIG_BYTES))}),
        makers.make_wheel(home / "wheels", "mid", {"mid/data": stored(os.urandom(18_000_000))}),
        *(makers.make_wheel(home / "wheels", name) for name in ("one", "two", "three")),
    ]
    checkout = make_checkout(home / "checkout", wheels)
    with fault_server() as server:
        for wheel in wheels:
            server.add(wheel.name, wheel.read_bytes())
        made = Bench(checkout, server, home)
        made.new_store()
        made.digest = made.build("--accept")
        yield made


@pytest.fixture(autouse=True)
def fresh(bench: Bench) -> None:
    """Each test has an empty store and a server that remembers nothing."""
    bench.new_store()
    bench.server.asked.clear()
    bench.server.sent_bytes.clear()
    bench.server.bytes_per_s = 0


def wait_until(is_so: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def kill(child: subprocess.Popen[str]) -> None:
    """SIGKILL for the command alone, as the kernel does it when memory is short."""
    child.kill()
    child.communicate()


def session_of(child: subprocess.Popen[str]) -> list[int]:
    """The living processes of the command's session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == child.pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_killed_download_goes_on_where_it_stopped(bench: Bench) -> None:
    bench.server.bytes_per_s = 5_000_000
    chance = random.Random(1)
    kept = [0]
    for _ in range(4):
        before = kept[-1]
        child = bench.start("build", "tiny", "--keep-inputs")
        wait_until(lambda: bench.big_partial_bytes() > before)  # noqa: B023
        time.sleep(chance.uniform(0, 0.15))
        kill(child)
        kept.append(bench.big_partial_bytes())
    assert 0 < kept[1] < kept[2] < kept[3] < kept[4] < BIG_BYTES
    bench.server.bytes_per_s = 0
    assert bench.build("--keep-inputs") == bench.digest
    assert bench.server.starts(BIG) == kept
    assert misnamed(bench.store) == []


def test_two_processes_share_one_download(bench: Bench) -> None:
    bench.server.bytes_per_s = 30_000_000
    folders = [bench.home / f"usb-{n}" for n in range(2)]
    children = [
        bench.start("image", "collect", "tiny", "--output", str(folder)) for folder in folders
    ]
    for child in children:
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
    files = sorted(p.name for p in (bench.home / "wheels").iterdir())
    assert all(sorted(p.name for p in folder.iterdir()) == files for folder in folders)
    assert all(bench.server.starts(name) == [0] for name in files)


def test_two_builds_at_once_both_end_well(bench: Bench) -> None:
    children = [bench.start("build", "tiny", "--json") for _ in range(3)]
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert json.loads(out)[0]["digest"] == bench.digest
    assert misnamed(bench.store) == []
    assert temporary_files(bench.store) == []


def interrupt(child: subprocess.Popen[str], number: signal.Signals) -> None:
    """Ctrl-C goes to all of a terminal's processes, SIGTERM to the one that is named."""
    if number is signal.SIGINT:
        os.killpg(child.pid, number)
    else:
        child.send_signal(number)


def catches_sigterm(child: subprocess.Popen[str]) -> bool:
    """Whether the command has come so far that it can end in an orderly way."""
    status = Path(f"/proc/{child.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


STAGES = ("the download", "a layer", "the config", "the index")


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        # each stage meets one signal, and each signal two stages
        *((stage, signal.SIGINT) for stage in STAGES[:2]),
        *((stage, signal.SIGTERM) for stage in STAGES[2:]),
        *(pytest.param(s, signal.SIGTERM, marks=pytest.mark.big) for s in STAGES[:2]),
        *(pytest.param(s, signal.SIGINT, marks=pytest.mark.big) for s in STAGES[2:]),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_a_stopped_build_says_so_leaves_nothing_and_goes_on(
    bench: Bench, stage: str, number: signal.Signals
) -> None:
    flag = bench.store.with_suffix(".flag")
    if stage == "the download":
        bench.server.bytes_per_s = 10_000_000
    child = bench.start(
        *("build", "tiny"),
        program=ROOT / "tests" / "testbed" / "slow_main.py",
        STAGE=stage,
        STAGE_FLAG=str(flag),
    )
    wait_until(lambda: flag.exists() or (stage == STAGES[0] and bench.big_partial_bytes() > 0))
    start = time.monotonic()
    interrupt(child, number)
    _, err = child.communicate(timeout=30)
    assert time.monotonic() - start < 20
    assert child.returncode == 130, err
    assert err.rstrip().splitlines()[-2:] == [
        "sm120: stopped",
        "       No file is left half-written; run it again to continue.",
    ]
    assert "Traceback" not in err
    wait_until(lambda: session_of(child) == [])
    assert temporary_files(bench.store) == []
    assert misnamed(bench.store) == []
    bench.server.bytes_per_s = 0
    assert bench.build() == bench.digest


def test_a_server_that_stalls_does_not_hold_up_ctrl_c(bench: Bench) -> None:
    bench.server.bytes_per_s = 1000
    child = bench.start("build", "tiny")
    wait_until(lambda: any("/files/" in asked.path for asked in bench.server.asked))
    start = time.monotonic()
    interrupt(child, signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == 130
    assert time.monotonic() - start < 20


def test_a_build_stopped_at_any_moment_ends_quietly(bench: Bench, kills: int) -> None:
    chance = random.Random(3)
    stopped = 0
    for number in [signal.SIGINT, signal.SIGTERM] * (kills // 2):
        bench.server.bytes_per_s = chance.choice([0, 40_000_000])
        child = bench.start("build", "tiny")
        wait_until(lambda: catches_sigterm(child))  # noqa: B023
        time.sleep(chance.uniform(0, 1.5))
        interrupt(child, number)
        _, err = child.communicate(timeout=30)
        # CPython kills itself by SIGINT when one came inside exec(); a shell sees 130 either way
        assert child.returncode in (0, 130, -signal.SIGINT), err
        assert "Traceback" not in err
        assert misnamed(bench.store) == []
        assert temporary_files(bench.store) == []
        stopped += child.returncode != 0
        if child.returncode == 0:
            bench.new_store()
    assert stopped >= kills // 4
    bench.server.bytes_per_s = 0
    assert bench.build() == bench.digest


def test_a_build_killed_at_any_moment_leaves_a_true_store(bench: Bench, kills: int) -> None:
    chance = random.Random(2)
    killed = 0
    while killed < kills:
        bench.server.bytes_per_s = chance.choice([0, 40_000_000])
        child = bench.start("build", "tiny")
        time.sleep(chance.uniform(0.3, 2.0))
        if child.poll() is not None:
            child.communicate()
            bench.new_store()
            continue
        kill(child)
        killed += 1
        assert misnamed(bench.store) == []
    bench.server.bytes_per_s = 0
    assert bench.build() == bench.digest
    assert misnamed(bench.store) == []
    assert temporary_files(bench.store) == []


def test_the_workers_of_a_killed_build_do_not_live_on(bench: Bench) -> None:
    flag = bench.store.with_suffix(".flag")
    child = bench.start(
        *("build", "tiny"),
        program=ROOT / "tests" / "testbed" / "slow_main.py",
        STAGE="a layer",
        STAGE_FLAG=str(flag),
    )
    wait_until(flag.exists)
    kill(child)
    wait_until(lambda: session_of(child) == [], limit_s=5)
    assert bench.build() == bench.digest

"""One set to eight hosts over links of a limited rate: all from the origin, peers, libtorrent.

The links are so slow that two cores can fill all of them: the network is the limit, not the CPU.
Wall time is from the start of all hosts' programs until the last host has every byte; what the
origin sent is counted at its link, headers included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import log
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.disk.receipt import lock_folder
from pipeline.weights.model import WeightsLock, lock_path, write_weights_lock
from tests.perf.measure import Cost, Report, as_users_run, spread
from tests.testbed.packages import CannotHave
from tests.testbed.rack import RackHost, rack

ROOT = Path(__file__).resolve().parents[2]
_PORT, _SHARE = 8080, 8790
_TORRENT = Path(__file__).with_name("torrent.py")


@dataclass(frozen=True)
class PeerSizes:
    """How many hosts, how fast their links, how much is fetched."""

    hosts: int = 8
    mbit: int = 50
    files: int = 10
    file_bytes: int = 15_000_000

    @property
    def size_bytes(self) -> int:
        return self.files * self.file_bytes


@dataclass(frozen=True)
class Spread:
    """How long it took until all had it, and how many copies the origin sent."""

    cost: Cost
    copies: float


def measure_peers(
    report: Report, scratch: Path, sizes: PeerSizes, turns: int, environments: Path | None
) -> None:
    """Every way to bring one set to all hosts, in turns; without environments, ours alone."""
    source = scratch / "set"
    source.mkdir()
    for number in range(sizes.files):
        (source / f"model-{number}.safetensors").write_bytes(os.urandom(sizes.file_bytes))
    lock = lock_folder(source)
    checkout = Checkout(scratch / "checkout")
    (checkout.root / "images").mkdir(parents=True)
    lock_path(checkout, lock.name).parent.mkdir(parents=True)
    write_weights_lock(lock_path(checkout, lock.name), lock)
    side = Side(scratch, source, lock, sizes)
    ways = {"all from the origin": side.plain, "peers": side.peers}
    try:
        if environments is not None:
            side.torrent = torrent_of(source, scratch, environments)
            ways |= {"libtorrent": side.seeded, "libtorrent, super-seeding": side.super_seeded}
    except (OSError, subprocess.CalledProcessError) as error:
        report.fact("libtorrent", f"not measured: {error}")
    found: dict[str, list[Spread]] = {name: [] for name in ways}
    try:
        for turn in range(turns):
            names = list(ways)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with rack(sizes.hosts + 1, sizes.mbit) as hosts:
                    found[name].append(ways[name](hosts))
    except CannotHave as error:
        return report.fact("weights to several hosts", f"not measured: {error}")
    what = (
        f"{log.size(sizes.size_bytes)} of weights to {sizes.hosts} hosts, each link"
        f" {sizes.mbit} Mbit/s both ways"
    )
    for name, done in found.items():
        if name != "peers":
            ours = [each.cost for each in found["peers"]]
            report.compare(f"{what}, by peers", ours, name, [each.cost for each in done])
    ideal_s = sizes.size_bytes * 8 / sizes.mbit / 1e6
    for name, done in found.items():
        copies = spread([each.copies for each in done], "", 2)
        walls = spread([each.cost.wall_s for each in done], " s")
        report.fact(f"{what}, {name}", f"{walls}; the origin sent {copies} copies")
    report.fact(f"{what}, one copy over one link", f"{ideal_s:.1f} s")


def torrent_of(source: Path, scratch: Path, environments: Path) -> list[str]:
    """A torrent of the set, and the command that takes part in it."""
    python = environments / "libtorrent" / "bin" / "python"
    if not python.exists():
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "-q", str(python.parents[1])], check=True)
        subprocess.run([*uv, "pip", "install", "-q", "-p", str(python), "libtorrent"], check=True)
    file = scratch / "set.torrent"
    command = [str(python), "-W", "ignore", str(_TORRENT)]
    subprocess.run([*command, "make", str(source), str(file)], check=True)
    return command


@dataclass
class Side:
    """The ways to bring the set to the hosts; the first host of a rack is the origin."""

    scratch: Path
    source: Path
    lock: WeightsLock
    sizes: PeerSizes
    torrent: Sequence[str] = ()

    def plain(self, hosts: Sequence[RackHost]) -> Spread:
        return self._fetched(hosts, [[] for _ in hosts[1:]])

    def peers(self, hosts: Sequence[RackHost]) -> Spread:
        named = ",".join(f"http://{host.address}:{_SHARE}" for host in hosts[1:])
        return self._fetched(
            hosts,
            [["--peers", named, "--share", f"{host.address}:{_SHARE}"] for host in hosts[1:]],
        )

    def seeded(self, hosts: Sequence[RackHost], role: str = "seed") -> Spread:
        own = [f"{host.address}:6881" for host in hosts]
        file = str(self.scratch / "set.torrent")
        command = [*self.torrent, role, file, str(self.source.parent), own[0]]
        with _running(hosts[0].inside(*command)) as origin:
            assert origin.stdout is not None
            assert origin.stdout.readline() == b"ready\n"
            return self._timed(
                hosts,
                [
                    host.inside(*self.torrent, "peer", file, str(self._target(host)), mine, *own)
                    for host, mine in zip(hosts[1:], own[1:], strict=True)
                ],
                b"done",
            )

    def super_seeded(self, hosts: Sequence[RackHost]) -> Spread:
        return self.seeded(hosts, "super")

    def _fetched(self, hosts: Sequence[RackHost], more: Sequence[Sequence[str]]) -> Spread:
        head = [
            sys.executable,
            "-m",
            "pipeline",
            "-q",
            "--checkout",
            str(self.scratch / "checkout"),
        ]
        address = hosts[0].address
        serve = ["weights", "serve", str(self.source), "--host", address, "--port", str(_PORT)]
        with _running(hosts[0].inside(*head, *serve)) as origin:
            assert origin.stdout is not None
            assert b"HF_ENDPOINT" in origin.stdout.readline()
            fetch = ["weights", "fetch", self.lock.repository, "--output"]
            endpoint = f"HF_ENDPOINT=http://{address}:{_PORT}"
            commands = [
                host.inside("env", endpoint, *head, *fetch, str(self._target(host)), *options)
                for host, options in zip(hosts[1:], more, strict=True)
            ]
            return self._timed(hosts, commands, b"")

    def _target(self, host: RackHost) -> Path:
        return self.scratch / host.address

    def _timed(
        self, hosts: Sequence[RackHost], commands: Sequence[Sequence[str]], word: bytes
    ) -> Spread:
        """Run them all at once until each has printed its line; every file must be right then."""
        for host in hosts[1:]:
            self._target(host).mkdir()
        os.sync()
        before, cpu_s = hosts[0].sent_bytes(), _children_cpu_s()
        with ExitStack() as stack:
            start = time.monotonic()
            running = [stack.enter_context(_running(command)) for command in commands]
            for each in running:
                assert each.stdout is not None
                line = each.stdout.readline()
                assert line.startswith(word), line
                assert line, "a host ended without a result"
            wall_s = time.monotonic() - start
            sent = hosts[0].sent_bytes() - before
        for host in hosts[1:]:
            for pin in self.lock.files:
                found = next(self._target(host).rglob(pin.path))
                hasher = pin.new_hash()
                hasher.update(found.read_bytes())
                assert hasher.hexdigest() == pin.want, f"{host.address}: {pin.path}"
            shutil.rmtree(self._target(host))
        cost = Cost(wall_s, _children_cpu_s() - cpu_s)
        return Spread(cost, sent / self.sizes.size_bytes)


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ends when its input is closed, or else is told to."""
    env = {**os.environ, **as_users_run(), "HF_HUB_OFFLINE": "", "SM120_KEY": ""}
    child = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(0.5)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait()

"""Damage by chance: each detected, each repaired over HTTP, none missed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import plain_settings
from pipeline.weights.check.repair import RouteSupply, repair_damage
from pipeline.weights.disk import receipt
from pipeline.weights.disk.hashing import BLOCK_BYTES
from pipeline.weights.transfer.sources import find_routes
from tests.testbed import hub_faults
from tests.testbed.hub import TestHub, test_hub
from tests.unit.weights.disk_set import DiskSet, flip, make_set, random_bytes, settle

ROOT = Path(__file__).resolve().parents[2]
SHARDS = ("model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
SHARD_BYTES = 2 * BLOCK_BYTES + 54_321


def some_files() -> dict[str, bytes]:
    return {
        SHARDS[0]: random_bytes(1, SHARD_BYTES),
        SHARDS[1]: random_bytes(2, SHARD_BYTES),
        SHARDS[2]: random_bytes(3, SHARD_BYTES - 12_345),
        "config.json": b'{"a": 1}\n',
        "tokenizer/vocab.json": random_bytes(4, 3000),
        "modeling.py": b"print('hello')\n",
    }


@pytest.fixture
def hub() -> Iterator[TestHub]:
    with test_hub(redirects=True) as running:
        running.add("org/tiny", some_files())
        yield running


def make_locked(folder: Path, hub: TestHub, *, hub_cache: bool) -> DiskSet:
    """A set on disk whose commit the Hub knows."""
    made = make_set(folder, some_files(), hub_cache=hub_cache)
    (commit,) = hub.repositories["org/tiny"].commits
    blobs = hub.repositories["org/tiny"].commits.pop(commit)
    hub.repositories["org/tiny"].commits[made.place.lock.commit] = blobs
    return made


def supply_of(a_set: DiskSet, hub: TestHub) -> RouteSupply:
    client = NetClient(plain_settings(), first_wait_s=0.01)
    routes = find_routes(client, a_set.place.lock, endpoint=hub.url, token=None)
    return RouteSupply(routes[:1], client)


Chance = random.Random
Fault = Callable[[DiskSet, Chance], set[str]]


def any_file(a_set: DiskSet, chance: Chance) -> str:
    return chance.choice([*SHARDS, *sorted(a_set.files)])


def flipped(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    flip(a_set.path(path), chance.randrange(len(a_set.files[path])))
    return {path}


def truncated(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    os.truncate(a_set.path(path), chance.randrange(len(a_set.files[path])))
    return {path}


def grown(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    with a_set.path(path).open("ab") as handle:
        handle.write(chance.randbytes(chance.choice([1, 1000, BLOCK_BYTES])))
    return {path}


def swapped(a_set: DiskSet, chance: Chance) -> set[str]:
    one, two = a_set.path(SHARDS[0]), a_set.path(SHARDS[1])
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)
    return {SHARDS[0], SHARDS[1]}


def missing(a_set: DiskSet, chance: Chance) -> set[str]:
    gone = {any_file(a_set, chance) for _ in range(chance.choice([1, 1, 3]))}
    for path in gone:
        a_set.path(path).unlink()
    return gone


def zeroed(a_set: DiskSet, chance: Chance) -> set[str]:
    path = chance.choice(SHARDS)
    length = chance.choice([512, 4096, BLOCK_BYTES])
    with a_set.path(path).open("r+b") as handle:
        handle.seek(chance.randrange(len(a_set.files[path]) - length))
        handle.write(bytes(length))
    return {path}


def overwritten_with_its_times_put_back(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    before = a_set.path(path).stat()
    flip(a_set.path(path), chance.randrange(before.st_size))
    os.utime(a_set.path(path), ns=(before.st_atime_ns, before.st_mtime_ns))
    return {path}


def replaced_by_another_of_its_size(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    fresh = a_set.path(path).with_suffix(".x")
    fresh.write_bytes(chance.randbytes(len(a_set.files[path])))
    os.replace(fresh, a_set.path(path))
    return {path}


def linked_out(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    a_set.path(path).unlink()
    a_set.path(path).symlink_to(a_set.copy / path)
    return {path}


def linked_to_another(a_set: DiskSet, chance: Chance) -> set[str]:
    a_set.path(SHARDS[0]).unlink()
    a_set.path(SHARDS[0]).symlink_to(a_set.path(SHARDS[1]))
    return {SHARDS[0]}


def hard_linked_to_another(a_set: DiskSet, chance: Chance) -> set[str]:
    a_set.path(SHARDS[0]).unlink()
    os.link(a_set.path(SHARDS[1]), a_set.path(SHARDS[0]))
    return {SHARDS[0]}


def a_folder_instead(a_set: DiskSet, chance: Chance) -> set[str]:
    path = any_file(a_set, chance)
    a_set.path(path).unlink()
    a_set.path(path).mkdir()
    return {path}


def extra_code(a_set: DiskSet, chance: Chance) -> set[str]:
    name = f"{chance.choice(['', 'tokenizer/', 'new/'])}x{chance.randrange(9)}.py"
    (a_set.place.snapshot / name).parent.mkdir(exist_ok=True)
    (a_set.place.snapshot / name).write_bytes(b"import os")
    return {name}


def several_bytes(a_set: DiskSet, chance: Chance) -> set[str]:
    damaged = set()
    for _ in range(5):
        damaged |= flipped(a_set, chance)
    return damaged


FAULTS: tuple[Fault, ...] = (
    *(flipped, truncated, grown, swapped, missing, zeroed, several_bytes),
    *(overwritten_with_its_times_put_back, replaced_by_another_of_its_size),
    *(linked_out, linked_to_another, hard_linked_to_another, a_folder_instead, extra_code),
)


@pytest.mark.parametrize(
    "hub_cache", [False, pytest.param(True, marks=pytest.mark.big)], ids=["plain", "hub"]
)
def test_of_many_random_faults_each_is_found_and_repaired(
    tmp_path: Path, hub: TestHub, monkeypatch: pytest.MonkeyPatch, hub_cache: bool, is_long: bool
) -> None:
    rounds = len(FAULTS) * (10 if is_long else 3)
    monkeypatch.setattr(receipt, "CLOCK_TICK_NS", 10_000_000)
    a_set = make_locked(tmp_path, hub, hub_cache=hub_cache)
    supply = supply_of(a_set, hub)
    chance = random.Random(120)
    settle()
    assert a_set.report().is_whole
    for number in range(rounds):
        fault = FAULTS[number % len(FAULTS)]
        wrong = fault(a_set, chance)
        checked = a_set.check()
        damaged = {f.path for f in checked.report.damage}
        # a byte flipped twice is right again, so the bytes themselves are asked, too
        assert damaged <= wrong, fault.__name__
        assert damaged == wrong or (fault is several_bytes and damaged), fault.__name__
        repair_damage(a_set.place, checked, supply)
        assert a_set.holds_all(), fault.__name__
        settle()
        assert a_set.report().is_whole, fault.__name__
    assert a_set.report(full=True).is_whole
    assert a_set.report().files_read == 0


def test_a_flip_in_a_large_file_costs_one_block_over_http(tmp_path: Path, hub: TestHub) -> None:
    a_set = make_locked(tmp_path, hub, hub_cache=False)
    assert a_set.report().is_whole
    flip(a_set.path(SHARDS[0]), BLOCK_BYTES + 7)
    repair_damage(a_set.place, a_set.check(), supply_of(a_set, hub))
    assert a_set.holds_all()
    assert hub.sent_bytes() == BLOCK_BYTES


def test_bytes_that_are_wrong_on_the_wire_are_not_kept(tmp_path: Path, hub: TestHub) -> None:
    a_set = make_locked(tmp_path, hub, hub_cache=False)
    assert a_set.report().is_whole
    flip(a_set.path(SHARDS[0]), 7)
    hub.fail(SHARDS[0], hub_faults.flip(100))
    repair_damage(a_set.place, a_set.check(), supply_of(a_set, hub))
    assert a_set.holds_all()
    assert hub.sent_bytes() == BLOCK_BYTES + SHARD_BYTES


def test_a_source_that_stays_wrong_leaves_the_file_as_it_was(tmp_path: Path, hub: TestHub) -> None:
    a_set = make_locked(tmp_path, hub, hub_cache=True)
    flip(a_set.path(SHARDS[0]), 7)
    before = a_set.path(SHARDS[0]).read_bytes()
    hub.fail(SHARDS[0], hub_faults.flip(100), times=1000)
    (repaired,) = repair_damage(a_set.place, a_set.check(), supply_of(a_set, hub))
    assert repaired.error
    assert a_set.path(SHARDS[0]).read_bytes() == before
    assert a_set.kinds() == {SHARDS[0]: "changed"}


def start(a_set: DiskSet, hub: TestHub, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", "weights", "verify", str(a_set.place.root), "--repair"],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "PIP_CONFIG_FILE": os.devnull,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "hub_cache", [pytest.param(False, marks=pytest.mark.big), True], ids=["plain", "hub"]
)
def test_a_repair_killed_at_any_moment_leaves_no_less_than_before(
    tmp_path: Path, hub: TestHub, hub_cache: bool, kills: int
) -> None:
    a_set = make_locked(tmp_path, hub, hub_cache=hub_cache)
    assert a_set.report().is_whole
    flip(a_set.path(SHARDS[0]), 5)
    os.truncate(a_set.path(SHARDS[1]), BLOCK_BYTES + 9)
    a_set.path(SHARDS[2]).unlink()
    damaged = {path: a_set.path(path).read_bytes() for path in SHARDS[:2]}
    hub.bytes_per_s = 1_500_000
    chance = random.Random(9)
    killed = 0
    for _ in range(kills):
        child = start(a_set, hub, tmp_path)
        deadline = time.monotonic() + chance.uniform(0.3, 2.2)
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        killed += child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.communicate()
        for path, before in damaged.items():
            assert a_set.path(path).read_bytes() in (before, a_set.files[path])
        gone = a_set.path(SHARDS[2])
        assert not gone.exists() or gone.read_bytes() == a_set.files[SHARDS[2]]
    assert killed >= kills // 2
    hub.bytes_per_s = 0
    child = start(a_set, hub, tmp_path)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    assert a_set.holds_all()
    assert list(a_set.place.partial_folder.glob("*")) == []

"""Fetches that are killed, stopped and raced, in processes of their own; the stock client reads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from pipeline.core.errors import DigestMismatch, HubBroken, SourceUnreachable
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.hub import Hub
from pipeline.weights.model import (
    WeightsLock,
    WeightsSpec,
    lock_path,
    sealed_weights_lock,
    write_weights_lock,
)
from pipeline.weights.place import LockedFolder, new_place
from pipeline.weights.transfer.fetch import fetch_files
from pipeline.weights.transfer.sources import find_routes
from pipeline.weights.transfer.workers import NOTE_BYTES, Options
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, TestHub, test_hub

ROOT = Path(__file__).resolve().parents[2]
JOBS = 2
# what the kernel holds of a connection that nobody reads any more
SOCKET_BYTES = 8 << 20
TOKEN = "hf_only-for-the-hub"
SPEC = WeightsSpec(
    name="tiny",
    repository="org/tiny",
    format="safetensors",
    quant="bf16",
    about="A set of weights that is only here for the tests.",
)


@pytest.fixture
def hub() -> Iterator[TestHub]:
    with test_hub() as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    (root / "images").mkdir(parents=True)
    folder = root / "lockfiles" / "weights"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text(SPEC.model_dump_json(), encoding="utf-8")
    return Checkout(root)


def locked(hub: TestHub, checkout: Checkout) -> WeightsLock:
    commit = hub.repositories["org/tiny"].refs["main"]
    asker = Hub(NetworkSettings(()), endpoint=hub.url, token=TOKEN)
    lock = sealed_weights_lock(SPEC, commit, asker.files("org/tiny", commit))
    write_weights_lock(lock_path(checkout, "tiny"), lock)
    return lock


def start(hub: TestHub, checkout: Checkout, to: Path, *args: str) -> subprocess.Popen[str]:
    """`sm120 weights fetch` in a process of its own."""
    head = [sys.executable, "-m", "pipeline", "--checkout", str(checkout.root)]
    command = [*head, "weights", "fetch", "tiny", "--output", str(to), "--jobs", str(JOBS), *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    return subprocess.Popen(command, env=env, text=True, stderr=subprocess.PIPE)


def write_random(path: Path, size: int, seed: int) -> Path:
    chance = random.Random(seed)
    with path.open("wb") as out:
        for at in range(0, size, 1 << 20):
            out.write(chance.randbytes(min(1 << 20, size - at)))
    return path


def require_same(place: LockedFolder, files: dict[str, Path]) -> None:
    for name, source in files.items():
        assert (place.snapshot / name).read_bytes() == source.read_bytes(), name


def wait_until_it_flows(hub: TestHub, sent: int, child: subprocess.Popen[str]) -> None:
    while hub.sent_bytes() <= sent and child.poll() is None:
        time.sleep(0.01)


def test_kill_9_at_any_moment_loses_at_most_what_was_in_flight(
    hub: TestHub, checkout: Checkout, tmp_path: Path, kills: int
) -> None:
    files = {
        f"model-{i}.safetensors": write_random(tmp_path / f"source-{i}", 160 << 20, i)
        for i in range(3)
    }
    hub.add("org/tiny", files)
    place = new_place(tmp_path / "weights", locked(hub, checkout), hub_cache=False)
    total = place.lock.size_bytes
    hub.bytes_per_s = 24 << 20
    chance, lost = random.Random(7), []
    for _ in range(kills):
        before, kept = hub.sent_bytes(), kept_bytes(place)
        child = start(hub, checkout, place.root)
        wait_until_it_flows(hub, before, child)
        time.sleep(chance.uniform(0.0, 0.8))
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        time.sleep(0.1)
        lost.append(hub.sent_bytes() - before - (kept_bytes(place) - kept))
        require_only_right_files(place, files)
    print(
        f"lost per kill: at most {max(lost) / 1e6:.1f} MB, {sum(lost) / len(lost) / 1e6:.1f} mean"
    )
    hub.bytes_per_s = 0
    child = start(hub, checkout, place.root)
    assert child.wait() == 0, child.communicate()[1]
    child.communicate()
    require_same(place, files)
    assert max(lost) <= JOBS * (NOTE_BYTES + SOCKET_BYTES)
    assert hub.sent_bytes() - total <= kills * JOBS * (NOTE_BYTES + SOCKET_BYTES)
    assert hub.sent_bytes() - total <= sum(lost) + 1


def kept_bytes(place: LockedFolder) -> int:
    """What a later run would not ask for: finished files, and what the journals name."""
    from pipeline.weights.transfer.workers import PartialFile

    partial_files = [PartialFile(pin, place.partial_folder, 64 << 20) for pin in place.lock.files]
    partial = sum(partial_file.kept_bytes for partial_file in partial_files)
    return partial + sum(p.size_bytes for p in place.lock.files if place.file(p).exists())


def require_only_right_files(place: LockedFolder, files: dict[str, Path]) -> None:
    """At any moment: what stands under a name is complete and right."""
    for name, source in files.items():
        path = place.snapshot / name
        assert not path.exists() or path.stat().st_size == source.stat().st_size
    if place.root.exists():
        assert {p.name for p in place.root.iterdir()} <= {".sm120", *files}


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.big)]
)
def test_a_stopped_fetch_leaves_only_its_own_folder_and_goes_on(
    hub: TestHub, checkout: Checkout, tmp_path: Path, number: signal.Signals
) -> None:
    files = {"model.safetensors": write_random(tmp_path / "source", 60 << 20, 1)}
    hub.add("org/tiny", files)
    place = new_place(tmp_path / "weights", locked(hub, checkout), hub_cache=False)
    hub.bytes_per_s = 8 << 20
    child = start(hub, checkout, place.root)
    wait_until_it_flows(hub, 20 << 20, child)
    child.send_signal(number)
    _, output = child.communicate(timeout=20)
    assert child.returncode == 130, output
    assert "Traceback" not in output
    assert [p.name for p in place.root.iterdir()] == [".sm120"]
    hub.bytes_per_s = 0
    sent = hub.sent_bytes()
    again = start(hub, checkout, place.root)
    assert again.wait() == 0, again.communicate()[1]
    again.communicate()
    require_same(place, files)
    # what a stop interrupts is noted to the last byte that was written
    assert hub.sent_bytes() - sent <= place.lock.size_bytes - (20 << 20) + JOBS * SOCKET_BYTES


def test_two_processes_at_once_fetch_everything_once(
    hub: TestHub, checkout: Checkout, tmp_path: Path
) -> None:
    files = {"model.safetensors": write_random(tmp_path / "source", 30 << 20, 1)}
    hub.add("org/tiny", files)
    place = new_place(tmp_path / "weights", locked(hub, checkout), hub_cache=False)
    hub.bytes_per_s = 20 << 20
    children = [start(hub, checkout, place.root) for _ in range(2)]
    output = [child.communicate()[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], output
    assert hub.sent_bytes() == place.lock.size_bytes
    require_same(place, files)


def test_the_stock_client_finds_the_hub_layout_without_network(
    hub: TestHub, checkout: Checkout, tmp_path: Path
) -> None:
    files = {
        "model.safetensors": write_random(tmp_path / "source", 3 << 20, 1),
        "sub/config.json": write_random(tmp_path / "small", 100, 2),
    }
    hub.add("org/tiny", files)
    place = new_place(tmp_path / "cache", locked(hub, checkout), hub_cache=True)
    child = start(hub, checkout, tmp_path / "cache", "--hub-cache")
    assert child.wait() == 0, child.communicate()[1]
    child.communicate()
    hub.asked.clear()
    for revision in ("main", place.lock.commit):
        downloaded = huggingface_hub.snapshot_download(
            "org/tiny", revision=revision, cache_dir=tmp_path / "cache", local_files_only=True
        )
        assert Path(downloaded) == place.snapshot
        for name, source in files.items():
            one = huggingface_hub.hf_hub_download(
                "org/tiny",
                name,
                revision=revision,
                cache_dir=tmp_path / "cache",
                local_files_only=True,
            )
            assert Path(one).read_bytes() == source.read_bytes()
    assert hub.asked == []
    # and online: the stock client sees that nothing is missing, and its own check passes
    huggingface_hub.snapshot_download(
        "org/tiny", cache_dir=tmp_path / "cache", endpoint=hub.url, token=False
    )
    assert hub.sent_bytes() == 0
    scanned = huggingface_hub.scan_cache_dir(tmp_path / "cache")
    assert (len(scanned.repos), scanned.warnings) == (1, [])
    api = huggingface_hub.HfApi(endpoint=hub.url, token=False)
    verdict = api.verify_repo_checksums("org/tiny", cache_dir=tmp_path / "cache")
    assert (verdict.checked_count, verdict.mismatches, verdict.missing_paths) == (2, [], [])


def test_two_hundred_random_wire_faults_and_not_one_wrong_byte(
    hub: TestHub, checkout: Checkout, tmp_path: Path
) -> None:
    data = random.Random(3).randbytes(1_500_000)
    hub.add("org/tiny", {"model.safetensors": data, "config.json": data[:3000]})
    lock = locked(hub, checkout)
    client = NetClient(NetworkSettings(()))
    chance, mended, refused = random.Random(11), 0, 0
    for turn in range(200):
        hub.forgive()
        times = chance.choice((1, 1, 1, 2, ALWAYS))
        kind = random_fault(chance, len(data))
        hub.fail("model.safetensors", kind, times)
        place = new_place(tmp_path / f"weights-{turn}", lock, hub_cache=chance.random() < 0.5)
        routes = find_routes(client, lock, endpoint=hub.url, token=TOKEN, stall_s=0.2)
        options = Options(jobs=chance.randrange(1, 5), range_bytes=1 << 18, first_wait_s=0.001)
        try:
            fetch_files(place, lock.files, routes, client=client, options=options)
        except (DigestMismatch, SourceUnreachable, HubBroken):
            assert not (place.snapshot / "model.safetensors").exists()
            refused += 1
        else:
            assert (place.snapshot / "model.safetensors").read_bytes() == data
            mended += 1
    print(f"{mended} mended, {refused} refused")
    assert mended > 100
    assert refused > 10


def random_fault(chance: random.Random, size: int) -> fault.Fault:
    at, by = chance.randrange(size), chance.randrange(1, 5000)
    return chance.choice(
        [
            fault.flip(at, 1 << chance.randrange(8)),
            fault.flip(at, 1 << chance.randrange(8)),
            fault.cut(at),
            fault.reset(at),
            fault.short(by),
            fault.long(by),
            fault.shifted(by),
            fault.lying_shift(by),
            fault.whole_file(),
            fault.stall(at),
            fault.instead(b"<html>" * by),
        ]
    )

"""Publishing that is killed or interrupted: what the tag names then, and what is sent next."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.bench import Bench, complete_digest, make_bench
from tests.testbed.forked import ROOT
from tests.testbed.oci_door import Door, behind, oci_door
from tests.testbed.registry import Registry, oci_registry


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Another image of the same name, which the tag names before."""
    return make_bench(tmp_path_factory.mktemp("older"), thing=10_000)


@contextmanager
def fresh_door(folder: Path) -> Iterator[tuple[Door, Registry]]:
    with ExitStack() as stack:
        registry = stack.enter_context(oci_registry(folder))
        yield stack.enter_context(oci_door(behind(registry.host_port))), registry


def held_bytes(registry: Registry) -> dict[str, int]:
    """Every blob that the repository holds, as the registry's own disk has it."""
    at = registry.storage / "docker" / "registry" / "v2"
    names = [p.name for p in (at / "repositories/app/_layers/sha256").glob("*") if any(p.iterdir())]
    return {n: (at / "blobs/sha256" / n[:2] / n / "data").stat().st_size for n in names}


def require_valid(bench: Bench, door: Door, keys: Path, digest: str) -> None:
    """`sm120 verify` finds the tag on this image, and all its evidence there and true."""
    trust = ("--trust", str(keys / "trust.yaml"), "--deep")
    ended = bench.run("verify", f"{door.host_port}/app:v1", *trust)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert digest in ended.stdout.partition("\n")[0]


def kill_at(bench: Bench, door: Door, publish: list[str], n_bytes: float, n_asked: int) -> bool:
    """Start to publish and kill it at a moment; whether that was before its end."""
    door.asked.clear()
    door.bytes_per_s = 16_000_000
    process = subprocess.Popen(
        bench.command("-q", *publish),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        if door.uploaded_bytes >= n_bytes and len(door.asked) >= n_asked:
            break
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.02))
    process.send_signal(signal.SIGKILL)
    was_running = process.wait() == -signal.SIGKILL
    door.bytes_per_s = 0
    door.wait_until_idle()
    return was_running


@pytest.mark.parametrize(
    "signed", [pytest.param(False, marks=pytest.mark.big), True], ids=["bare", "signed"]
)
def test_killed_at_any_moment_the_tag_is_never_on_something_incomplete(
    bench: Bench, older: Bench, keys: Path, tmp_path: Path, kills: int, signed: bool
) -> None:
    dice = random.Random(os.getpid())
    more = ["--key", str(keys / "builder.pem")] if signed else ["--no-evidence"]
    with fresh_door(tmp_path / "whole") as (door, _):
        bench.publish(door, "v1", *more)
        all_bytes, all_asked = door.uploaded_bytes, len(door.asked)
    moments, cut_short = [], 0
    for number in range(kills):
        with fresh_door(tmp_path / str(number)) as (door, registry):
            before = older.publish(door, "v1", *more)["digest"]
            publish = ["publish", "tiny", f"{door.host_port}/app:v1", *more]
            # by bytes, most of which are the image's, or by requests, most of which are evidence's
            by_bytes = dice.uniform(0, all_bytes) if number % 2 else 0
            by_asked = 0 if number % 2 else dice.randrange(1, all_asked)
            cut_short += kill_at(bench, door, publish, by_bytes, by_asked)
            moments.append((door.uploaded_bytes, len(door.asked)))
            named = complete_digest(door)
            assert named
            if signed:
                require_valid(older if named == before else bench, door, keys, named)
            held = held_bytes(registry)
            door.asked.clear()
            done = bench.publish(door, "v1", *more)
            new = sum(size for name, size in held_bytes(registry).items() if name not in held)
            assert door.uploaded_bytes == done["sent_bytes"] + done["attached_bytes"] == new
            assert complete_digest(door) == done["digest"]
            assert named in (before, done["digest"])
            if signed:
                require_valid(bench, door, keys, done["digest"])
    print(f"killed {cut_short} of {kills} in time, after (bytes, requests) {sorted(moments)}")
    print(f"of {all_bytes} bytes in {all_asked} requests")
    assert cut_short >= kills // 2


@pytest.mark.parametrize("signed", [False, True], ids=["bare", "signed"])
def test_ctrl_c_ends_within_seconds_and_the_next_run_goes_on(
    bench: Bench, door: Door, keys: Path, signed: bool
) -> None:
    """Bare in the middle of a layer, signed in the middle of the evidence."""
    more = ["--key", str(keys / "builder.pem")] if signed else ["--no-evidence"]
    if signed:
        bench.publish(door, "other", "--no-evidence")
        door.asked.clear()
    door.bytes_per_s = 10_000 if signed else 500_000
    process = subprocess.Popen(
        bench.command("publish", "tiny", f"{door.host_port}/app:v1", *more),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    enough = 2_000 if signed else 200_000
    while door.uploaded_bytes < enough and process.poll() is None:
        time.sleep(0.01)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert time.monotonic() - start < 20
    assert "Traceback" not in said
    assert complete_digest(door) is None
    door.bytes_per_s = 0
    door.wait_until_idle()
    done = bench.publish(door, "v1", *more)
    assert complete_digest(door) == done["digest"]
    if signed:
        require_valid(bench, door, keys, done["digest"])

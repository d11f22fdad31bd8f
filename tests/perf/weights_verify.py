"""`weights verify` against hashlib's own rate and against `hf cache verify`, on the same files.

python -m tests.perf.weights_verify [FOLDER]; needs 4.3 GB of disk, and memory to cache as much.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.weights.check.verify import VerifyOptions, verify
from pipeline.weights.disk import receipt
from pipeline.weights.disk.hashing import cores, read_file
from pipeline.weights.model import FilePin, WeightsSpec, sealed
from pipeline.weights.place import Place
from tests.perf.measure import Cost, Report, run
from tests.testbed.hub import TestHub, test_hub

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "org/perf"


@dataclass(frozen=True)
class VerifySizes:
    """How much is verified, how many times, and how many small files by their receipt."""

    files: int = 10
    file_bytes: int = 430_000_000
    rounds: int = 5
    small_files: int = 100


def measure_verify(report: Report, scratch: Path, sizes: VerifySizes) -> None:
    """All claims about verifying."""
    load = os.getloadavg()[0]
    report.add("verify: load of the machine before", f"{load:.1f} on {cores()} cores")
    with test_hub() as hub:
        place = make_place(scratch / "verified", hub, sizes)
        compare_rates(report, place, hub, sizes.rounds)
    compare_core(report, place, sizes)
    measure_memory(report, place, scratch)
    measure_cold(report, place, sizes.file_bytes)
    measure_receipt(report, scratch, sizes)


def make_place(folder: Path, hub: TestHub, sizes: VerifySizes) -> Place:
    """Random files, a Hub that has them, and their lock."""
    folder.mkdir(parents=True)
    paths = [folder / f"model-{n:02}.safetensors" for n in range(sizes.files)]
    for path in paths:
        write_random(path, sizes.file_bytes)
    commit = hub.add(REPOSITORY, {path.name: path for path in paths})
    blobs = hub.repositories[REPOSITORY].commits[commit]
    pins = [
        FilePin(path=path, size_bytes=blob.size, sha256=blob.sha256) for path, blob in blobs.items()
    ]
    place = Place(folder, sealed(perf_spec(), commit, pins))
    place.keep_lock()
    return place


def perf_spec() -> WeightsSpec:
    """A spec of files that are only measured."""
    return WeightsSpec(
        name="perf",
        repository=REPOSITORY,
        format="safetensors",
        quant="none",
        about="Random bytes for a measurement of verify.",
    )


def write_random(path: Path, size_bytes: int) -> None:
    """A file of random bytes."""
    with path.open("wb") as out:
        for at in range(0, size_bytes, 1 << 24):
            out.write(os.urandom(min(1 << 24, size_bytes - at)))


@dataclass(frozen=True)
class Rate:
    """Bytes a second, by the clock on the wall and by that of the CPU."""

    wall: float
    cpu: float


def compare_rates(report: Report, place: Place, hub: TestHub, rounds: int) -> None:
    """Whole commands, turn by turn, so that neighbours on the machine disturb all alike."""
    total = place.lock.size_bytes
    ours, theirs, one_core, inside = [], [], [], []
    for _ in range(rounds):
        one_core.append(hashlib_rate(total // cores()))  # as long as a core works below
        inside.append(timed(lambda: verify(place, VerifyOptions(full=True)), total))
        ours.append(of(total, run(sm120_verify(place), cwd=ROOT)))
        theirs.append(of(total, hf_verify(place, hub)))
    best, other = max(r.wall for r in ours), max(r.wall for r in theirs)
    report.add(
        f"verify {log.size(total)}, whole command (≥ 1.8×)",
        f"{log.size(best)}/s",
        f"hf cache verify: {log.size(other)}/s",
        f"{best / other:.2f}×",
    )
    report.add(
        "  the same, CPU a GB",
        f"{1e9 / max(r.cpu for r in ours):.2f} s",
        f"hf cache verify: {1e9 / max(r.cpu for r in theirs):.2f} s",
        f"{max(r.cpu for r in theirs) / max(r.cpu for r in ours):.2f}",
    )
    report.add(
        "  the same, median of the turns",
        f"{log.size(middle(ours))}/s",
        f"hf cache verify: {log.size(middle(theirs))}/s",
        f"{middle(ours) / middle(theirs):.2f}×",
    )
    for title, rates in ((" itself (≥ 0.9)", inside), (", whole command", ours)):
        report.add(
            f"verify{title}, against cores × hashlib in memory, median",
            f"{log.size(middle(rates))}/s",
            f"{cores()} × {log.size(middle(one_core))}/s",
            f"{middle(rates) / (cores() * middle(one_core)):.2f}",
        )


def middle(rates: list[Rate]) -> float:
    """The median by the wall clock."""
    return statistics.median(rate.wall for rate in rates)


def of(total: int, cost: Cost) -> Rate:
    """What a command reached."""
    return Rate(total / cost.wall_s, total / cost.cpu_s)


def sm120_verify(place: Place) -> list[str]:
    """Ours, reading everything."""
    return [sys.executable, "-m", "pipeline", "-q", "weights", "verify", "--full", str(place.root)]


def hf_verify(place: Place, hub: TestHub) -> Cost:
    """Theirs; it needs a Hub to ask for the hashes."""
    program = str(Path(sys.executable).with_name("hf"))
    args = ["cache", "verify", REPOSITORY, "--local-dir", str(place.root)]
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}
    return run([program, *args, "--revision", place.lock.commit], env=env)


def hashlib_rate(size_bytes: int) -> Rate:
    """One core's SHA-256 of bytes that are in its cache: the most there is."""
    data = os.urandom(1 << 20)

    def hash_it() -> None:
        total = hashlib.sha256()
        for _ in range(size_bytes >> 20):
            total.update(data)

    return timed(hash_it, size_bytes)


def timed(work: Callable[[], object], size_bytes: int) -> Rate:
    """One thread's rate."""
    start, cpu = time.monotonic(), time.thread_time()
    work()
    return Rate(size_bytes / (time.monotonic() - start), size_bytes / (time.thread_time() - cpu))


def compare_core(report: Report, place: Place, sizes: VerifySizes) -> None:
    """What one core does per second that it really works: neighbours do not count in this."""
    path = place.file(place.lock.files[0])
    pure, ours, plain = [], [], []
    for _ in range(3 * sizes.rounds):
        pure.append(hashlib_rate(1 << 27).cpu)
        ours.append(timed(lambda: read_file(path, hashlib.sha256()), sizes.file_bytes).cpu)
        plain.append(timed(lambda: file_digest(path), sizes.file_bytes).cpu)
    report.add(
        "one core, per CPU second: verify against hashlib in memory (≥ 0.9)",
        f"{log.size(statistics.median(ours))}/s",
        f"{log.size(statistics.median(pure))}/s",
        f"{statistics.median(ours) / statistics.median(pure):.2f}",
    )
    report.add(
        "one core, per CPU second: verify against hashlib.file_digest",
        f"{log.size(statistics.median(ours))}/s",
        f"{log.size(statistics.median(plain))}/s",
        f"{statistics.median(ours) / statistics.median(plain):.2f}",
    )


def file_digest(path: Path) -> str:
    """The standard library's own way."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def measure_memory(report: Report, place: Place, scratch: Path) -> None:
    """The peak must not grow with the files."""
    big = run(sm120_verify(place), cwd=ROOT)
    small_pin = FilePin(path="a.safetensors", size_bytes=30_000_000, sha256="0" * 64)
    folder = scratch / "small"
    folder.mkdir()
    write_random(folder / small_pin.path, small_pin.size_bytes)
    digest = file_digest(folder / small_pin.path)
    pins = [small_pin.model_copy(update={"sha256": digest})]
    small = Place(folder, sealed(perf_spec(), place.lock.commit, pins))
    small.keep_lock()
    little = run([*sm120_verify(small)], cwd=ROOT)
    report.add(
        "verify: peak memory (flat)",
        f"{log.size(place.lock.size_bytes)}: {log.size(big.peak_bytes)}",
        f"30 MB: {log.size(little.peak_bytes)}",
    )


def measure_cold(report: Report, place: Place, file_bytes: int) -> None:
    """From the disk, not from memory; and the page cache stays as it was."""
    for pin in place.lock.files:
        drop(place.file(pin))
    before = cached_bytes()
    cold = run(sm120_verify(place), cwd=ROOT)
    grown = max(0, cached_bytes() - before)
    dd = min(time_dd(place, n) for n in range(2))
    report.add(
        "verify from the disk, nothing cached",
        f"{log.size(place.lock.size_bytes / cold.wall_s)}/s, page cache grew {log.size(grown)}",
        f"dd iflag=direct, one file: {log.size(file_bytes / dd)}/s",
    )


def drop(path: Path) -> None:
    """Out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def cached_bytes() -> int:
    """How much the page cache holds."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


def time_dd(place: Place, number: int) -> float:
    """What the disk gives to a plain reader."""
    path = place.file(place.lock.files[number])
    drop(path)
    start = time.monotonic()
    args = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"]
    subprocess.run(args, check=True, capture_output=True)
    return time.monotonic() - start


def measure_receipt(report: Report, scratch: Path, sizes: VerifySizes) -> None:
    """Many small files that were verified before."""
    folder = scratch / "receipts"
    folder.mkdir()
    pins = []
    for n in range(sizes.small_files):
        path = folder / f"{n:03}.safetensors"
        write_random(path, 5_000_000)
        size = path.stat().st_size
        pins.append(FilePin(path=path.name, size_bytes=size, sha256=file_digest(path)))
    place = Place(folder, sealed(perf_spec(), "0" * 40, pins))
    place.keep_lock()
    time.sleep(receipt._CLOCK_TICK_NS / 1e9 + 0.1)  # else the files would count as just written
    assert verify(place, VerifyOptions()).report.is_whole
    times = []
    for _ in range(sizes.rounds):
        start = time.monotonic()
        again = verify(place, VerifyOptions()).report
        times.append(time.monotonic() - start)
        assert (again.is_whole, again.files_read) == (True, 0)
    whole = min(
        run([sys.executable, "-m", "pipeline", "-q", "weights", "verify", str(folder)]).wall_s
        for _ in range(sizes.rounds)
    )
    report.add(
        f"verify again by receipt, {sizes.small_files} files (< 0.2 s)",
        f"{min(times) * 1000:.0f} ms, worst of {sizes.rounds}: {max(times) * 1000:.0f} ms",
        f"whole command, with Python's start: {whole:.2f} s",
    )


def main() -> None:
    """Only these measurements."""
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    scratch = Path(tempfile.mkdtemp(dir=parent))
    report = Report()
    try:
        measure_verify(report, scratch, VerifySizes())
    finally:
        shutil.rmtree(scratch)
    print(report)


if __name__ == "__main__":
    main()

"""`weights verify` beside `hf cache verify` and beside SHA-256 in memory, on the same files.

python -m tests.perf.weights_verify [FOLDER]; needs 4.3 GB of disk, and memory to cache as much.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import log
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk import receipt
from pipeline.weights.model import FilePin, WeightsSpec, sealed_weights_lock
from pipeline.weights.place import LockedFolder
from tests.perf.measure import TURNS, Cost, Report, in_turns, measured, run
from tests.testbed.hub import TestHub, test_hub

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "org/perf"


@dataclass(frozen=True)
class VerifySizes:
    """How much is verified, and how many small files by their receipt."""

    files: int = 10
    file_bytes: int = 430_000_000
    small_files: int = 100


def measure_verify(report: Report, scratch: Path, sizes: VerifySizes, turns: int) -> None:
    """All claims about verifying."""
    with test_hub() as hub:
        place = make_place(scratch / "verified", hub, sizes)
        compare_rates(report, place, hub, turns)
    measure_memory(report, place, scratch)
    measure_cold(report, place, sizes.file_bytes)
    measure_receipt(report, scratch, sizes, turns)


def make_place(folder: Path, hub: TestHub, sizes: VerifySizes) -> LockedFolder:
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
    place = LockedFolder(folder, sealed_weights_lock(perf_spec(), commit, pins))
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


def compare_rates(report: Report, place: LockedFolder, hub: TestHub, turns: int) -> None:
    """The whole command beside the Hub's own, and beside nothing but SHA-256 in memory."""
    total = place.lock.size_bytes
    ours, theirs, pure = in_turns(
        turns,
        lambda: run(sm120_verify(place), cwd=ROOT),
        lambda: hf_verify(place, hub),
        lambda: hash_in_memory(total),
    )
    title = f"verify {log.size(total)} of weights, every byte read"
    report.compare(title, ours, "hf cache verify", theirs)
    report.compare(title, ours, "hashlib in memory, one thread", pure)


def sm120_verify(place: LockedFolder) -> list[str]:
    """Ours, reading everything."""
    return [sys.executable, "-m", "pipeline", "-q", "weights", "verify", "--full", str(place.root)]


def hf_verify(place: LockedFolder, hub: TestHub) -> Cost:
    """Theirs; it needs a Hub to ask for the hashes."""
    program = str(Path(sys.executable).with_name("hf"))
    args = ["cache", "verify", REPOSITORY, "--local-dir", str(place.root)]
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}
    return run([program, *args, "--revision", place.lock.commit], env=env)


def hash_in_memory(size_bytes: int) -> Cost:
    """SHA-256 of as many bytes that are in a core's cache: what no reader of files can beat."""
    data, total = os.urandom(1 << 20), hashlib.sha256()
    with measured() as costs:
        for _ in range(size_bytes >> 20):
            total.update(data)
    return costs[0]


def file_digest(path: Path) -> str:
    """The standard library's own way."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def measure_memory(report: Report, place: LockedFolder, scratch: Path) -> None:
    """The peak must not grow with the files."""
    big = run(sm120_verify(place), cwd=ROOT)
    small_pin = FilePin(path="a.safetensors", size_bytes=30_000_000, sha256="0" * 64)
    folder = scratch / "small"
    folder.mkdir()
    write_random(folder / small_pin.path, small_pin.size_bytes)
    digest = file_digest(folder / small_pin.path)
    pins = [small_pin.model_copy(update={"sha256": digest})]
    small = LockedFolder(folder, sealed_weights_lock(perf_spec(), place.lock.commit, pins))
    small.keep_lock()
    little = run([*sm120_verify(small)], cwd=ROOT)
    report.fact(
        f"verify, most memory with 30 MB and with {log.size(place.lock.size_bytes)}",
        f"{log.size(little.peak_bytes)} and {log.size(big.peak_bytes)}",
    )


def measure_cold(report: Report, place: LockedFolder, file_bytes: int) -> None:
    """From the disk, not from memory; and the page cache stays as it was."""
    for pin in place.lock.files:
        drop(place.file(pin))
    before = cached_bytes()
    cold = run(sm120_verify(place), cwd=ROOT)
    grown = max(0, cached_bytes() - before)
    dd = min(time_dd(place, n) for n in range(2))
    report.fact(
        "verify from the disk, nothing cached (once)",
        f"{log.size(place.lock.size_bytes / cold.wall_s)}/s, page cache grew {log.size(grown)};"
        f" dd iflag=direct of one file: {log.size(file_bytes / dd)}/s",
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


def time_dd(place: LockedFolder, number: int) -> float:
    """What the disk gives to a plain reader."""
    path = place.file(place.lock.files[number])
    drop(path)
    start = time.monotonic()
    args = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"]
    subprocess.run(args, check=True, capture_output=True)
    return time.monotonic() - start


def measure_receipt(report: Report, scratch: Path, sizes: VerifySizes, turns: int) -> None:
    """Many small files that were verified before."""
    folder = scratch / "receipts"
    folder.mkdir()
    pins = []
    for n in range(sizes.small_files):
        path = folder / f"{n:03}.safetensors"
        write_random(path, 5_000_000)
        size = path.stat().st_size
        pins.append(FilePin(path=path.name, size_bytes=size, sha256=file_digest(path)))
    place = LockedFolder(folder, sealed_weights_lock(perf_spec(), "0" * 40, pins))
    place.keep_lock()
    time.sleep(receipt.CLOCK_TICK_NS / 1e9 + 0.1)  # else the files would count as just written
    assert verify_files(place, WeightsVerifyOptions()).report.is_whole
    again = verify_files(place, WeightsVerifyOptions()).report
    assert (again.is_whole, again.files_read) == (True, 0)
    command = [sys.executable, "-m", "pipeline", "-q", "weights", "verify", str(folder)]
    costs = in_turns(turns, lambda: run(command, cwd=ROOT))[0]
    report.alone(f"verify {sizes.small_files} files again by their receipt", costs)


def main() -> None:
    """Only these measurements."""
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    scratch = Path(tempfile.mkdtemp(dir=parent))
    report = Report()
    try:
        measure_verify(report, scratch, VerifySizes(), TURNS)
    finally:
        shutil.rmtree(scratch)
    print(report)


if __name__ == "__main__":
    main()

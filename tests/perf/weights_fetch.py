"""Fetching weights over loopback, side by side with the Hub's own client on the same server.

The server is a process of its own and not counted. Ours hashes every byte and syncs every file;
`snapshot_download` does neither, so the row after it adds `hf cache verify`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import log
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.hub import Hub
from pipeline.weights.model import WeightsSpec, lock_path, sealed_weights_lock, write_weights_lock
from tests.perf.measure import Cost, Report, in_turns, run
from tests.testbed.hub import test_hub

ROOT = Path(__file__).resolve().parents[2]
_SPEC = WeightsSpec(
    name="perf",
    repository="org/perf",
    format="safetensors",
    quant="none",
    about="Random bytes to be measured with, not a model.",
)
_STOCK = """\
import sys, huggingface_hub
huggingface_hub.snapshot_download("org/perf", local_dir=sys.argv[1], endpoint=sys.argv[2])
"""


@dataclass(frozen=True)
class FetchSizes:
    """How much is fetched: several files at once, then one small and one large."""

    files: int = 8
    file_bytes: int = 240_000_000
    peaks: tuple[int, int] = (200_000_000, 2_000_000_000)


def measure_fetch(report: Report, scratch: Path, sizes: FetchSizes, turns: int) -> None:
    """Time and CPU against the stock client, then memory for a small and a large file."""
    source = scratch / "source"
    source.mkdir()
    for i in range(sizes.files):
        _write_random(source / f"model-{i}.safetensors", sizes.file_bytes)
    with _served(source, scratch) as url:
        checked: list[Cost] = []
        ours, theirs = in_turns(
            turns, lambda: _ours(url, scratch), lambda: _stock(url, scratch, checked)
        )
    total = log.size(sizes.files * sizes.file_bytes)
    title = f"fetch {total} of weights over loopback (ours hashes and syncs)"
    report.compare(title, ours, "snapshot_download", theirs)
    report.compare(title, ours, "snapshot_download, hf cache verify", checked)
    shutil.rmtree(source)
    peaks = [_peak(size, scratch) for size in sizes.peaks]
    report.fact(
        f"fetch, most memory with one file of {', of '.join(map(log.size, sizes.peaks))}",
        " and ".join(log.size(peak) for peak in peaks),
    )


def _peak(size: int, scratch: Path) -> int:
    source = scratch / "source"
    source.mkdir()
    with (source / "model.safetensors").open("wb") as out:
        out.write(os.urandom(1 << 20))
        out.truncate(size)
    with _served(source, scratch) as url:
        cost = _ours(url, scratch)
    shutil.rmtree(source)
    return cost.peak_bytes


def _write_random(path: Path, size_bytes: int) -> None:
    with path.open("wb") as out:
        for at in range(0, size_bytes, 1 << 20):
            out.write(os.urandom(min(1 << 20, size_bytes - at)))


def _ours(url: str, scratch: Path) -> Cost:
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(scratch / "checkout")]
    command = [*head, "weights", "fetch", "perf", "--output", str(scratch / "target")]
    os.sync()  # what the side before has not written yet is not this one's to wait for
    cost = run(command, env={"HF_ENDPOINT": url}, cwd=ROOT)
    shutil.rmtree(scratch / "target")
    return cost


def _stock(url: str, scratch: Path, checked: list[Cost]) -> Cost:
    """Their download; `checked` gets its cost with that of hashing, which ours does in one."""
    target = str(scratch / "target")
    env = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.sync()
    cost = run([sys.executable, "-c", _STOCK, target, url], env=env, cwd=ROOT)
    hf = str(Path(sys.executable).with_name("hf"))
    check = [hf, "cache", "verify", _SPEC.repository, "--local-dir", target]
    checked.append(cost + run(check, env=env))
    shutil.rmtree(target)
    return cost


@contextmanager
def _served(source: Path, scratch: Path) -> Iterator[str]:
    """The files on a Hub in another process, and their lock in a checkout."""
    command = [sys.executable, "-m", "tests.perf.weights_fetch", str(source)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        url, commit = child.stdout.readline().decode().split()
        _write_lock(Checkout(scratch / "checkout"), url, commit)
        yield url
    finally:
        child.stdin.close()
        child.wait()


def _write_lock(checkout: Checkout, url: str, commit: str) -> None:
    path = lock_path(checkout, _SPEC.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    (checkout.root / "images").mkdir(exist_ok=True)
    path.with_name(f"{_SPEC.name}.yaml").write_text(_SPEC.model_dump_json(), encoding="utf-8")
    files = Hub(NetworkSettings(()), endpoint=url).files(_SPEC.repository, commit)
    write_weights_lock(path, sealed_weights_lock(_SPEC, commit, files))


def serve(folder: Path) -> None:
    """Be the server until whoever started us hangs up."""
    with test_hub() as hub:
        commit = hub.add(_SPEC.repository, {path.name: path for path in folder.iterdir()})
        print(hub.url, commit, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

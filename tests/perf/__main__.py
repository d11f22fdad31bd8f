"""`nox -s perf`: our claims, measured side by side with the usual way, in one run.

Builds sglang-k2 first if it is not there (5 GB of downloads). The comparison with Docker needs
root for a private daemon; without it those rows say so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from isal import igzip

from pipeline import log
from pipeline.cli.context import host_platform
from pipeline.lock.model import read_lock
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, open_store
from tests.perf import dockerfile
from tests.perf.bench_clients import compare_clients
from tests.perf.compiled import measure_ik_llama, measure_tiny
from tests.perf.edited import ENGINE, copy_checkout, edit_patch
from tests.perf.measure import Cost, Report, run
from tests.perf.publish import compare_engine, compare_engine_edit, compare_publish
from tests.perf.weights_fetch import FetchSizes, measure_fetch
from tests.perf.weights_verify import VerifySizes, measure_verify
from tests.testbed.dockerd import DockerDaemon, docker_daemon
from tests.testbed.packages import CannotHave
from tests.testbed.registry import Registry, oci_registry

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ENGINE


def sm120(store: Store, checkout: Path, *args: str) -> Cost:
    """Run the command on a checkout and a store, and measure it."""
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(checkout)]
    return run([*head, "--store", str(store.root), *args], cwd=ROOT)


PARTS = ("sources", "weights", "bench", "engine", "docker", "publish")
# sizes with which every command of a part is run, and whose numbers mean nothing
QUICK_FETCH = FetchSizes(files=2, file_bytes=1_000_000, peaks=(1_000_000, 2_000_000))
QUICK_VERIFY = VerifySizes(files=2, file_bytes=1 << 20, rounds=1, small_files=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything this machine can measure."""
    options = read_options(arguments)
    report, store = Report(), open_store()
    with _term_ends_blocks(), tempfile.TemporaryDirectory() as folder:
        for part in chosen_parts(options):
            # a folder of its own, which is there and empty: no part meets what another one left
            own = Path(folder) / part
            own.mkdir()
            _MEASURE[part](report, store, own, options)
            shutil.rmtree(own)
    print(report)


@contextmanager
def _term_ends_blocks() -> Iterator[None]:
    """By default SIGTERM ends Python at once, and gigabytes would stay in the temporary folder."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_options(arguments: Sequence[str] | None) -> Namespace:
    """What follows `nox -s perf --`."""
    parser = argparse.ArgumentParser(prog="nox -s perf --", description=__doc__)
    parser.add_argument("--no-docker", action="store_true", help="leave the Docker rows out")
    alone = parser.add_mutually_exclusive_group()
    for part, rows in (
        ("docker", "the Docker rows"),
        ("weights", "the weights rows"),
        ("publish", "the publishing rows"),
        ("sources", "the row of a compiled source"),
        ("bench", "the load clients"),
    ):
        title = f"measure {rows} alone"
        alone.add_argument(
            f"--only-{part}", dest="only", action="store_const", const=part, help=title
        )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a trial of the measurements of sources and weights with files of some megabytes",
    )
    parser.add_argument(
        "--bench-environments",
        type=Path,
        metavar="DIR",
        default=ROOT / ".nox" / "bench-clients",
        help="folder with an environment for each load client; what is missing is installed",
    )
    parser.add_argument(
        "--ik-llama", action="store_true", help="compile ik_llama.cpp, too (20 CPU-minutes)"
    )
    parser.add_argument(
        "--docker-wheels-below",
        type=int,
        metavar="MB",
        default=10_000,
        help="give Docker only wheels below this size, where disk is short (kinder to Docker)",
    )
    return parser.parse_args(arguments)


def chosen_parts(options: Namespace) -> list[str]:
    """The parts to measure, in their order."""
    parts = [part for part in PARTS if options.only in (None, part)]
    if options.quick:
        # the others build an engine image of gigabytes, or install the clients of others
        parts = [part for part in parts if part in ("sources", "weights")]
    return [part for part in parts if part != "docker" or not options.no_docker]


def measure_sources(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """One edited line of a source."""
    measure_tiny(report, scratch / "tiny")
    if options.ik_llama:
        measure_ik_llama(report, scratch / "ik-llama")


def measure_weights(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """Fetching and verifying, with the same random bytes in either order."""
    for name, measure in (
        ("fetch", partial(measure_fetch, sizes=QUICK_FETCH if options.quick else FetchSizes())),
        ("verify", partial(measure_verify, sizes=QUICK_VERIFY if options.quick else VerifySizes())),
    ):
        (scratch / name).mkdir()
        measure(report, scratch / name)


def measure_bench(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """The load client beside others."""
    compare_clients(report, scratch / "clients", options.bench_environments)


def measure_engine(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """An engine image: built, found built, and built cold from local files."""
    build = sm120(store, ROOT, "build", IMAGE)
    report.add("build sglang-k2 (or find it built)", f"{build.wall_s:.1f} s")
    no_op = sm120(store, ROOT, "build", IMAGE)
    report.add("no-op build", f"{no_op.wall_s:.2f} s")
    wheels = fetch_wheels(store, scratch)
    compare_layer(report, find_torch(wheels), scratch)
    measure_memory(report, wheels, scratch)


def measure_docker(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """The same image through a Dockerfile."""
    sm120(store, ROOT, "build", IMAGE)
    wheels = fetch_wheels(store, scratch)
    limit = options.docker_wheels_below * 1_000_000
    theirs = [w for w in wheels if w.stat().st_size < limit]
    checkout = copy_checkout(scratch / "checkout")
    try:
        compare_docker(report, store, checkout, theirs, find_torch(wheels), scratch)
    except CannotHave as reason:
        report.add("against docker build", "not measured here", str(reason))


def measure_publish(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """Sending an image, beside the tools that others use for it."""
    try:
        compare_publish(report, store, scratch, no_docker=options.no_docker)
        compare_engine(report, store, scratch)
        compare_engine_edit(report, store, scratch)
    except CannotHave as reason:
        report.add("publish", "not measured here", str(reason))


_MEASURE = {
    "sources": measure_sources,
    "weights": measure_weights,
    "bench": measure_bench,
    "engine": measure_engine,
    "docker": measure_docker,
    "publish": measure_publish,
}


def find_torch(wheels: list[Path]) -> Path:
    """The largest of the wheels that compress well."""
    return next(w for w in wheels if w.name.startswith("torch-2"))


def fetch_wheels(store: Store, scratch: Path) -> list[Path]:
    """All wheels of the image under their own names; those that became layers come again."""
    lock = read_lock(Checkout(ROOT).lock_path(IMAGE, "linux/amd64"))
    folder = scratch / "wheels"
    head = ["image", "collect", IMAGE, "--to", str(folder)]
    sm120(store, ROOT, *head)
    return [folder / pin.file for pin in lock.wheels]


def compare_layer(report: Report, torch: Path, scratch: Path) -> None:
    """The torch layer: ours against compressing the same tar."""
    out = scratch / "torch.tgz"
    ours = run([sys.executable, "-m", "tests.perf.layer", str(torch), str(out)], cwd=ROOT)
    tar = scratch / "torch.tar"
    with tar.open("wb") as handle:
        shutil.copyfileobj(_gunzip(out), handle)
    theirs = run(["gzip", "-6", "-k", str(tar)])
    size = log.size((scratch / "torch.tar.gz").stat().st_size)
    report.add(
        "torch layer, CPU (ours ≤ 1/6)",
        f"{ours.cpu_s:.1f} s, {log.size(out.stat().st_size)}",
        f"gzip -6: {theirs.cpu_s:.1f} s, {size}",
        f"1/{theirs.cpu_s / ours.cpu_s:.1f}",
    )
    for path in (out, tar, scratch / "torch.tar.gz"):
        path.unlink(missing_ok=True)


def _gunzip(path: Path) -> IO[bytes]:
    opened: IO[bytes] = igzip.open(path, "rb")  # type: ignore[no-untyped-call]
    return opened


def measure_memory(report: Report, wheels: list[Path], scratch: Path) -> None:
    """A cold build from a folder of files: time, and the most memory the process tree had."""
    store = open_store(scratch / "cold")
    folder = wheels[0].parent
    cold = sm120(store, ROOT, "build", IMAGE, "--offline", "--mirror", str(folder))
    report.add(
        "cold build from local files (peak < 500 MB)",
        f"{cold.wall_s:.0f} s, {cold.cpu_s:.0f} CPU s, peak {log.size(cold.peak_bytes)}",
    )
    shutil.rmtree(store.root)


def compare_docker(
    report: Report,
    store: Store,
    checkout: Path,
    wheels: list[Path],
    torch: Path,
    scratch: Path,
) -> None:
    """The same closure through a Dockerfile; then one edited line, up to a pushed image."""
    with ExitStack() as stack:
        daemon = stack.enter_context(docker_daemon(scratch / "docker"))
        registry = stack.enter_context(oci_registry(scratch / "registry"))
        base = load_base(store, daemon)
        pip_wheel = download_pip(scratch)
        compare_torch(report, daemon, base, torch, pip_wheel, scratch)
        compare_edit(report, store, checkout, daemon, registry, base, wheels, pip_wheel, scratch)


def load_base(store: Store, daemon: DockerDaemon) -> str:
    """Our base image in the daemon, as the Dockerfile's FROM."""
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(ROOT)]
    head += ["--store", str(store.root)]
    run([*head, "build", "debian-python", "--platform", host_platform()], cwd=ROOT)
    args = ["load", "debian-python", "--platform", host_platform(), "--tag", "perf-base:1"]
    run([*head, *args], env={"DOCKER_HOST": daemon.socket_url}, cwd=ROOT)
    return "perf-base:1"


def download_pip(scratch: Path) -> Path:
    """pip's own wheel, from the configured index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(scratch),
        "pip",
    ]
    run(command)
    return next(scratch.glob("pip-*.whl"))


def compare_torch(
    report: Report, daemon: DockerDaemon, base: str, torch: Path, pip_wheel: Path, scratch: Path
) -> None:
    """torch alone: our layer against docker build and docker save."""
    context = scratch / "torch-context"
    dockerfile.write_context(context, base, [torch], pip_wheel)
    out = scratch / "torch.tgz"
    ours = run([sys.executable, "-m", "tests.perf.layer", str(torch), str(out)], cwd=ROOT)
    built = dockerfile.docker(daemon, "build", "-q", "-t", "perf-torch", str(context))
    saved = dockerfile.docker(daemon, "save", "-o", str(scratch / "torch.tar"), "perf-torch")
    wall, machine = built.wall_s + saved.wall_s, built.machine_cpu_s + saved.machine_cpu_s
    report.add(
        "torch into an image, machine CPU",
        f"{ours.machine_cpu_s:.1f} s ({ours.wall_s:.1f} s wall)",
        f"docker build + save: {machine:.1f} s ({wall:.1f} s wall)",
        f"1/{machine / ours.machine_cpu_s:.1f}",
    )
    (scratch / "torch.tar").unlink()
    shutil.rmtree(context)


def compare_edit(
    report: Report,
    store: Store,
    checkout: Path,
    daemon: DockerDaemon,
    registry: Registry,
    base: str,
    wheels: list[Path],
    pip_wheel: Path,
    scratch: Path,
) -> None:
    """One edited line to a pushed image, both sides warm."""
    publish(store, checkout, registry)
    context = scratch / "context"
    dockerfile.write_context(context, base, wheels, pip_wheel)
    theirs_ref = f"{registry.host_port}/theirs:perf"
    first = dockerfile.docker(daemon, "build", "-q", "-t", theirs_ref, str(context))
    first_push = dockerfile.docker(daemon, "push", "-q", theirs_ref)
    total = log.size(sum(w.stat().st_size for w in wheels))
    report.add(
        "first build and push",
        "see the cold build above",
        f"docker, {len(wheels)} wheels, {total}: {first.wall_s:.0f} s + {first_push.wall_s:.0f} s",
    )
    edit_patch(checkout, "edited for a measurement")
    made = sm120(store, checkout, "build", IMAGE, "--accept")
    sent, pushed = publish(store, checkout, registry)
    dockerfile.edit(context, "second")
    again = dockerfile.docker(daemon, "build", "-q", "-t", theirs_ref, str(context))
    again_push = dockerfile.docker(daemon, "push", "-q", theirs_ref)
    ours_s, theirs_s = made.wall_s + pushed, again.wall_s + again_push.wall_s
    report.add("edit a patch line → new image (≤ 2 s)", f"{made.wall_s:.2f} s")
    report.add("bytes pushed after the edit (< 1 MB)", log.size(sent))
    report.add(
        "edit → pushed image (≥ 20×)",
        f"{ours_s:.2f} s",
        f"docker, warm cache: {theirs_s:.1f} s",
        f"{theirs_s / ours_s:.0f}×",
    )
    sm120(store, ROOT, "build", IMAGE)


def publish(store: Store, checkout: Path, registry: Registry) -> tuple[int, float]:
    """Publish what the registry lacks; bytes sent and seconds."""
    start = time.monotonic()
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(checkout)]
    args = ["publish", IMAGE, f"{registry.host_port}/ours:perf", "--json"]
    # what is measured here is sending, also of an image whose edited patch no gate has seen
    args += ["--force-ungated", "a measurement"]
    said = subprocess.run(
        [*head, "--store", str(store.root), *args], cwd=ROOT, check=True, capture_output=True
    )
    return int(json.loads(said.stdout)["sent_bytes"]), time.monotonic() - start


if __name__ == "__main__":
    main()

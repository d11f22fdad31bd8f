"""`nox -s perf`: our claims, measured side by side with the usual way, in one run.

Builds sglang-k2 first if it is not there (5 GB of downloads). The comparison with Docker needs
root for a private daemon; without it those rows say so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from isal import igzip

from pipeline import log
from pipeline.lock.model import read_lock
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, open_store
from tests.perf import dockerfile
from tests.perf.bench_clients import compare_clients
from tests.perf.compiled import measure_ik_llama, measure_tiny
from tests.perf.edited import ENGINE, copy_checkout, edit_patch
from tests.perf.measure import Cost, Report, run
from tests.perf.publish import compare_engine, compare_engine_edit, compare_publish
from tests.perf.weights_fetch import measure_fetch
from tests.perf.weights_verify import measure_verify
from tests.testbed.dockerd import DockerDaemon, docker_daemon
from tests.testbed.packages import CannotHave
from tests.testbed.registry import Registry, oci_registry

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ENGINE


def sm120(store: Store, checkout: Path, *args: str) -> Cost:
    """Run the command on a checkout and a store, and measure it."""
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(checkout)]
    return run([*head, "--store", str(store.root), *args], cwd=ROOT)


def main() -> None:
    """Measure everything this machine can measure."""
    parser = argparse.ArgumentParser(prog="nox -s perf --", description=__doc__)
    parser.add_argument("--no-docker", action="store_true", help="leave the Docker rows out")
    parser.add_argument("--only-docker", action="store_true", help="measure the Docker rows alone")
    parser.add_argument(
        "--only-weights", action="store_true", help="measure the weights rows alone"
    )
    parser.add_argument(
        "--only-publish", action="store_true", help="measure the publishing rows alone"
    )
    parser.add_argument(
        "--only-sources", action="store_true", help="measure the row of a compiled source alone"
    )
    parser.add_argument("--only-bench", action="store_true", help="measure the load clients alone")
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
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        scratch, store = Path(folder), open_store()
        if options.only_bench:
            compare_clients(report, scratch / "bench", options.bench_environments)
            return print(report)
        if not (options.only_publish or options.only_docker or options.only_weights):
            measure_tiny(report, scratch / "source")
        if options.ik_llama:
            measure_ik_llama(report, scratch / "ik-llama")
        if options.only_sources:
            return print(report)
        if options.only_publish:
            compare_publish(report, store, scratch, no_docker=options.no_docker)
            compare_engine(report, store, scratch)
            compare_engine_edit(report, store, scratch)
            return print(report)
        if not options.only_docker:
            measure_fetch(report, scratch)
            measure_verify(report, scratch)
            compare_clients(report, scratch / "bench", options.bench_environments)
        if options.only_weights:
            return print(report)
        build = sm120(store, ROOT, "build", IMAGE)
        report.add("build sglang-k2 (or find it built)", f"{build.wall_s:.1f} s")
        no_op = sm120(store, ROOT, "build", IMAGE)
        report.add("no-op build", f"{no_op.wall_s:.2f} s")
        wheels = fetch_wheels(store, scratch)
        torch = next(w for w in wheels if w.name.startswith("torch-2"))
        if not options.only_docker:
            compare_layer(report, torch, scratch)
            measure_memory(report, wheels, scratch)
        checkout = copy_checkout(scratch / "checkout")
        if options.no_docker:
            return print(report)
        try:
            limit = options.docker_wheels_below * 1_000_000
            theirs = [w for w in wheels if w.stat().st_size < limit]
            compare_docker(report, store, checkout, theirs, torch, scratch)
            compare_publish(report, store, scratch / "publish")
            compare_engine(report, store, scratch / "publish")
            compare_engine_edit(report, store, scratch / "publish")
        except CannotHave as reason:
            report.add("against docker build", "not measured here", str(reason))
    print(report)


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
    run([*head, "build", "debian-python", "--platform", "linux/amd64"], cwd=ROOT)
    args = ["load", "debian-python", "--platform", "linux/amd64", "--tag", "perf-base:1"]
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

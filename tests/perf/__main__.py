"""`nox -s perf`: our commands beside those that people use, in turns, in one run.

Builds sglang-k2 first if it is not there (5 GB of downloads). The comparison with Docker needs
root for a private daemon; without it those rows say so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO

from isal import igzip

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core import log
from pipeline.images.lock.model import read_lock
from pipeline.images.spec.checkout import Checkout
from tests.integration.cluster import two_nodes
from tests.perf import dockerfile
from tests.perf.bench_clients import compare_clients
from tests.perf.compiled import measure_ik_llama, measure_tiny
from tests.perf.edited import ENGINE, copy_checkout, edit_patch
from tests.perf.first_calls import measure_first_calls
from tests.perf.imports import measure_imports
from tests.perf.measure import TURNS, Cost, Report, in_turns, run, spread
from tests.perf.publish import compare_engine, compare_engine_edit, compare_publish
from tests.perf.weights_fetch import FetchSizes, measure_fetch
from tests.perf.weights_peers import PeerSizes, measure_peers
from tests.perf.weights_verify import VerifySizes, measure_verify
from tests.testbed.debian import BOOKWORM
from tests.testbed.dockerd import DockerDaemon, docker_daemon
from tests.testbed.nodes import USER
from tests.testbed.packages import CannotHave
from tests.testbed.registry import Registry, oci_registry

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ENGINE


def sm120(store: Store, checkout: Path, *args: str, out: Path | None = None) -> Cost:
    """Run the command on a checkout and a store, and measure it."""
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(checkout)]
    return run([*head, "--store", str(store.root), *args], cwd=ROOT, out=out)


PARTS = (
    *("sources", "weights", "peers", "bench", "engine", "docker", "publish", "slurm", "imports"),
    "first-calls",
)
# sizes with which every command of a part is run, and whose numbers mean nothing
QUICK_FETCH = FetchSizes(files=2, file_bytes=1_000_000, peaks=(1_000_000, 2_000_000))
QUICK_VERIFY = VerifySizes(files=2, file_bytes=1 << 20, small_files=2)
QUICK_PEERS = PeerSizes(hosts=2, mbit=200, files=2, file_bytes=3_000_000)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything this machine can measure."""
    options = read_options(arguments)
    report, store = Report(), open_store()
    stopped = False
    with _term_ends_blocks(), tempfile.TemporaryDirectory() as folder:
        try:
            for part in chosen_parts(options):
                # a folder of its own, there and empty: no part meets what another one left
                own = Path(folder) / part
                own.mkdir()
                _MEASURE[part](report, store, own, options)
                shutil.rmtree(own)
        except KeyboardInterrupt:
            stopped = True
    print(report)
    if stopped:
        print("stopped: the tables have what was measured before", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


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
    parser.add_argument(
        "--turns", type=int, metavar="N", help=f"how often each side runs ({TURNS}; --quick: 1)"
    )
    alone = parser.add_mutually_exclusive_group()
    for part, rows in (
        ("docker", "the Docker rows"),
        ("weights", "the weights rows"),
        ("peers", "the rows of one set to eight hosts"),
        ("engine", "a build with nothing to do, and its largest layer"),
        ("publish", "the publishing rows"),
        ("sources", "the row of a compiled source"),
        ("bench", "the load clients"),
        ("slurm", "a chunk of a gate over Slurm"),
        ("imports", "an engine's imports in a warm image"),
        ("first-calls", "a kernel's first call on a card"),
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
        help="folder with an environment for each program of others; what is missing is installed",
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
    options = parser.parse_args(arguments)
    if options.turns is None:
        options.turns = 1 if options.quick else TURNS
    if options.turns < 1:
        parser.error("--turns: at least 1")
    return options


def chosen_parts(options: Namespace) -> list[str]:
    """The parts to measure, in their order."""
    parts = [part for part in PARTS if options.only in (None, part)]
    if options.quick:
        # the others build an engine image of gigabytes, or install the clients of others
        parts = [part for part in parts if part in ("sources", "weights", "peers")]
    return [part for part in parts if part != "docker" or not options.no_docker]


def measure_sources(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """One edited line of a source."""
    measure_tiny(report, scratch, options.turns)
    if options.ik_llama:
        measure_ik_llama(report, scratch / "ik-llama")


def measure_weights(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """Fetching and verifying, with the same random bytes in either order."""
    for name, measure in (
        ("fetch", partial(measure_fetch, sizes=QUICK_FETCH if options.quick else FetchSizes())),
        ("verify", partial(measure_verify, sizes=QUICK_VERIFY if options.quick else VerifySizes())),
    ):
        (scratch / name).mkdir()
        measure(report, scratch / name, turns=options.turns)


def measure_rack(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """One set to eight hosts; a trial installs nothing of others."""
    if options.quick:
        return measure_peers(report, scratch, QUICK_PEERS, options.turns, None)
    measure_peers(report, scratch, PeerSizes(), options.turns, options.bench_environments)


def measure_bench(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """The load client beside others."""
    compare_clients(report, scratch / "clients", options.bench_environments, options.turns)


def measure_engine(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """An engine image: found built, and built cold from local files; its largest layer."""
    sm120(store, ROOT, "build", IMAGE)
    report.alone(
        f"{IMAGE}: build again, nothing changed",
        in_turns(options.turns, lambda: sm120(store, ROOT, "build", IMAGE))[0],
    )
    wheels = fetch_wheels(store, scratch)
    compare_layer(report, find_torch(wheels), scratch, options.turns)
    # its time is in the row beside Docker's
    peak = log.size(build_cold(wheels, scratch).peak_bytes)
    report.fact(f"{IMAGE}: most memory of a cold build", peak)


def measure_docker(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """The same image through a Dockerfile."""
    sm120(store, ROOT, "build", IMAGE)
    wheels = fetch_wheels(store, scratch)
    limit = options.docker_wheels_below * 1_000_000
    theirs = [w for w in wheels if w.stat().st_size < limit]
    try:
        compare_docker(report, store, wheels, theirs, scratch, options.turns)
    except CannotHave as reason:
        report.fact("against docker build, not measured", str(reason))


def measure_publish(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """Sending an image, beside the tools that others use for it."""
    try:
        compare_publish(report, store, scratch, options.turns, no_docker=options.no_docker)
        compare_engine(report, store, scratch, options.turns)
        compare_engine_edit(report, store, scratch, options.turns)
    except CannotHave as reason:
        report.fact("publish, not measured", str(reason))


def measure_slurm(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """What Slurm adds to a chunk: one without cases, over `srun` and without it.

    On a machine of no cluster, two nodes of the testbed are one, and this is asked on its head.
    """
    tool = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(ROOT)]
    prefix, place, where = list[str](), str(store.root), "this cluster"
    with ExitStack() as stack:
        if shutil.which("srun") is None:
            try:
                daemon = stack.enter_context(docker_daemon(scratch))
                # nodes have no network: they get the gate's environment from here
                sm120(store, ROOT, "gate", "run", IMAGE, "--only", "parsers", "--case", "kimi-k2/*")
                cluster = stack.enter_context(two_nodes(daemon, scratch, BOOKWORM))
            except CannotHave as reason:
                report.fact("a chunk over Slurm, not measured", str(reason))
                return
            cluster.site.run("--tags", "slurm").require_good()
            prefix = ["docker", f"--host={daemon.socket_url}", "exec", f"--user={USER}"]
            prefix += [f"--workdir={ROOT}", f"--env=PYTHONPATH={ROOT}", cluster.head.container]
            place, where = "/srv/sm120", "two nodes in containers, Debian 12"
        words = ["--store", place, "gate", "answer", IMAGE, "--only", "parsers", "--offline"]
        # no keys: what is left is the start of Python, the store and the environment
        alone = ["/bin/sh", "-c", 'exec "$@" </dev/null', "sh", *tool, *words]
        over = ["srun", "--nodes=1", "--ntasks=1", "--time=5", *alone]
        for command in (alone, over):
            run([*prefix, *command], cwd=ROOT)
        ours, theirs = in_turns(
            options.turns,
            lambda: run([*prefix, *over], cwd=ROOT),
            lambda: run([*prefix, *alone], cwd=ROOT),
        )
    # no CPU: the nodes' own is not seen from here
    walls = [spread([cost.wall_s for cost in costs], " s") for costs in (ours, theirs)]
    report.fact(f"a chunk without cases ({where})", f"{walls[0]} over srun, {walls[1]} without")
    added = [o.wall_s - t.wall_s for o, t in zip(ours, theirs, strict=True)]
    report.fact("what Slurm adds to a chunk", spread(added, " s"))


_MEASURE = {
    "sources": measure_sources,
    "weights": measure_weights,
    "peers": measure_rack,
    "bench": measure_bench,
    "engine": measure_engine,
    "docker": measure_docker,
    "publish": measure_publish,
    "slurm": measure_slurm,
    "imports": measure_imports,
    "first-calls": measure_first_calls,
}


def find_torch(wheels: list[Path]) -> Path:
    """The largest of the wheels that compress well."""
    return next(w for w in wheels if w.name.startswith("torch-2"))


def fetch_wheels(store: Store, scratch: Path) -> list[Path]:
    """All wheels of the image under their own names; those that became layers come again."""
    lock = read_lock(Checkout(ROOT).lock_path(IMAGE, "linux/amd64"))
    folder = scratch / "wheels"
    head = ["image", "collect", IMAGE, "--output", str(folder)]
    sm120(store, ROOT, *head)
    return [folder / pin.file for pin in lock.wheels]


def compare_layer(report: Report, torch: Path, scratch: Path, turns: int) -> None:
    """The torch layer: wheel to compressed layer, against gzip of the finished tar alone."""
    out, tar = scratch / "torch.tgz", scratch / "torch.tar"
    write_layer(torch, out)
    with tar.open("wb") as handle:
        shutil.copyfileobj(_gunzip(out), handle)
    ours, theirs = in_turns(
        turns, lambda: write_layer(torch, out), lambda: run(["gzip", "-6", "-k", "-f", str(tar)])
    )
    sizes = [log.size(path.stat().st_size) for path in (out, tar.with_name("torch.tar.gz"))]
    report.compare("torch: wheel to layer", ours, "gzip -6 of its tar", theirs)
    report.fact("torch layer, bytes", f"ours {sizes[0]}, gzip -6 {sizes[1]}")
    for path in (out, tar, scratch / "torch.tar.gz"):
        path.unlink(missing_ok=True)


def write_layer(wheel: Path, out: Path) -> Cost:
    """One wheel to one layer, as a build's worker does it."""
    return run([sys.executable, "-m", "tests.perf.layer", str(wheel), str(out)], cwd=ROOT)


def _gunzip(path: Path) -> IO[bytes]:
    opened: IO[bytes] = igzip.open(path, "rb")  # type: ignore[no-untyped-call]
    return opened


def build_cold(wheels: list[Path], scratch: Path) -> Cost:
    """A build from a folder of files into an empty store."""
    store = open_store(scratch / "cold")
    folder = str(wheels[0].parent)
    cost = sm120(store, ROOT, "build", IMAGE, "--offline", "--mirror", folder)
    shutil.rmtree(store.root)
    return cost


def compare_docker(
    report: Report,
    store: Store,
    wheels: list[Path],
    theirs: list[Path],
    scratch: Path,
    turns: int,
) -> None:
    """torch alone, the whole closure, then one edited line up to a pushed image."""
    with ExitStack() as stack:
        daemon = stack.enter_context(docker_daemon(scratch / "docker"))
        (scratch / "probe").mkdir()
        dockerfile.require_buildkit(daemon, scratch / "probe")
        registry = stack.enter_context(oci_registry(scratch / "registry"))
        base, pip_wheel = load_base(store, daemon), download_pip(scratch)
        compare_torch(report, daemon, base, find_torch(wheels), pip_wheel, scratch, turns)
        context = scratch / "context"
        dockerfile.write_context(context, base, theirs, pip_wheel)
        place = f"{registry.host_port}/theirs:perf"
        # --no-cache runs every step again; the context that was sent before stays in the daemon
        args = ("build", "-q", "--no-cache", "-t", place, str(context))

        def build_theirs() -> Cost:
            dockerfile.remove_earlier_builds(daemon)
            return dockerfile.docker(daemon, *args)

        ours, others = in_turns(turns, partial(build_cold, wheels, scratch), build_theirs)
        size = log.size(sum(wheel.stat().st_size for wheel in theirs))
        title = f"docker build --no-cache ({len(theirs)} of {len(wheels)} wheels, {size})"
        report.compare(f"{IMAGE}: all of it from local files", ours, title, others)
        compare_edit(
            report,
            store,
            copy_checkout(scratch / "checkout"),
            daemon,
            registry,
            context,
            scratch,
            turns,
        )


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
    report: Report,
    daemon: DockerDaemon,
    base: str,
    torch: Path,
    pip_wheel: Path,
    scratch: Path,
    turns: int,
) -> None:
    """torch alone: our layer, a file that can be carried, against docker build and docker save."""
    context, out, tar = scratch / "torch-context", scratch / "torch.tgz", scratch / "torch.tar"
    dockerfile.write_context(context, base, [torch], pip_wheel)
    built: list[Cost] = []

    def build_and_save() -> Cost:
        head = ("build", "-q", "--no-cache", "-t", "perf-torch", str(context))
        built.append(dockerfile.docker(daemon, *head))
        return built[-1] + dockerfile.docker(daemon, "save", "-o", str(tar), "perf-torch")

    ours, theirs = in_turns(turns, lambda: write_layer(torch, out), build_and_save)
    report.compare("torch into an image", ours, "docker build", built)
    report.compare("torch into a file to carry", ours, "docker build, docker save", theirs)
    shutil.rmtree(context)
    for path in (out, tar):
        path.unlink()


def compare_edit(
    report: Report,
    store: Store,
    checkout: Path,
    daemon: DockerDaemon,
    registry: Registry,
    context: Path,
    scratch: Path,
    turns: int,
) -> None:
    """One edited line to a pushed image, both sides warm: everything else is built and pushed."""
    theirs_at, ours_at = (f"{registry.host_port}/{name}:perf" for name in ("theirs", "ours"))
    said, edits = scratch / "published.json", count()

    def publish() -> Cost:
        # what is measured is sending, also of an image whose edited patch no gate has seen
        more = ("--json", "--force-ungated", "a measurement")
        return sm120(store, checkout, "publish", IMAGE, ours_at, *more, out=said)

    def build_and_push() -> Cost:
        built = dockerfile.docker(daemon, "build", "-q", "-t", theirs_at, str(context))
        return built + dockerfile.docker(daemon, "push", "-q", theirs_at)

    def ours() -> Cost:
        edit_patch(checkout, f"edited {next(edits)}")
        return sm120(store, checkout, "build", IMAGE, "--accept") + publish()

    def theirs() -> Cost:
        dockerfile.edit(context, f"edited {next(edits)}")
        return build_and_push()

    publish()
    build_and_push()
    costs = in_turns(turns, ours, theirs)
    title = f"{IMAGE}: edit one line, build, push"
    report.compare(title, costs[0], "docker build, docker push", costs[1])
    sent = int(json.loads(said.read_bytes())["sent_bytes"])
    report.fact(f"{IMAGE}: bytes that an edit sends", log.size(sent))
    sm120(store, ROOT, "build", IMAGE)


if __name__ == "__main__":
    main()

"""Publishing side by side with `docker push` and `skopeo copy`: the same image, equal registries.

Every push goes to a registry of its own, so that nothing is there already and no tool can use
what it remembers. CPU is the client's: for Docker that is its daemon's too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.cli.context import host_platform
from pipeline.store.store import Store, open_store
from tests.perf.edited import ENGINE, copy_checkout, edit_patch
from tests.perf.measure import Report, run, tree_cpu_s
from tests.testbed.dockerd import DockerDaemon, docker_daemon
from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program
from tests.testbed.registry import Registry, oci_registry

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "llama-cpp-cpu"
ROUNDS = 3


@dataclass(frozen=True)
class Push:
    """One push."""

    wall_s: float
    cpu_s: float


Ways = dict[str, Callable[[Registry], Push]]


def compare_publish(
    report: Report, store: Store, scratch: Path, rounds: int = ROUNDS, *, no_docker: bool = False
) -> None:
    """All three, round by round, so that a busy moment of the machine hits all alike."""
    platform = host_platform()
    sm120(store, ROOT, "build", IMAGE, "--platform", platform)
    size = store_size(store, IMAGE, platform)
    found: dict[str, list[Push]] = {"ours": [], "skopeo copy": [], "docker push": []}
    with ExitStack() as stack:
        ways: Ways = {"ours": lambda r: ours(store, r, IMAGE, platform)}
        ways |= skopeo_way(store, scratch / "layout", IMAGE)
        ways |= {} if no_docker else docker_way(store, scratch, stack, report)
        warm_up(ways, scratch)
        for tls in (False, True):
            for number in range(rounds):
                for name, push in ways.items():
                    with oci_registry(scratch / f"{name}-{number}-{tls}", tls=tls) as registry:
                        found[name].append(push(registry))
                        print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
            tell(report, found, size, "TLS" if tls else "http")
            found = {name: [] for name in found}
    compare_edit(report, store, scratch, platform)


def compare_engine(report: Report, store: Store, scratch: Path) -> None:
    """An image of gigabytes, where starting a program no longer counts; once, without Docker."""
    platform = "linux/amd64"
    sm120(store, ROOT, "build", ENGINE, "--platform", platform)
    ways: Ways = {"ours": lambda r: ours(store, r, ENGINE, platform)}
    ways |= skopeo_way(store, scratch / "engine-layout", ENGINE)
    for tls in (False, True):
        found: dict[str, list[Push]] = {}
        for name, push in ways.items():
            with oci_registry(scratch / f"engine-{name}-{tls}", tls=tls) as registry:
                found[name] = [push(registry)]
        size = store_size(store, ENGINE, platform)
        tell(report, found, size, "TLS" if tls else "http")


def warm_up(ways: Ways, scratch: Path) -> None:
    """Once unmeasured, but for Docker, which takes a minute: files are read, modules compiled."""
    for name in ("ours", "skopeo copy"):
        with oci_registry(scratch / f"{name}-warm") as registry:
            ways[name](registry)


def sm120(store: Store, checkout: Path, *args: str) -> None:
    subprocess.run(
        command(store, checkout, *args),
        cwd=ROOT,
        check=True,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )


def command(store: Store, checkout: Path, *args: str) -> list[str]:
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(checkout)]
    return [*head, "--store", str(store.root), *args]


def environment() -> dict[str, str]:
    """As a user has it: compiled modules are kept."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/sm120-perf-pycache"}


def store_size(store: Store, image: str, platform: str) -> int:
    record = store.image_record(image, platform)
    assert record is not None
    return record.size_bytes


def ours(store: Store, registry: Registry, image: str, platform: str) -> Push:
    ca = ("--ca", str(registry.ca_file)) if registry.ca_file else ()
    place = f"{registry.host_port}/perf:v1"
    # the others send no evidence either; gates are no matter here
    more = ("--platform", platform, "--no-evidence", "--force-ungated", "a measurement")
    args = command(store, ROOT, "publish", image, place, *more, *ca)
    cost = run(args, cwd=ROOT, env=environment())
    return Push(cost.wall_s, cost.cpu_s)


def skopeo_way(store: Store, layout: Path, image: str) -> Ways:
    """skopeo, from an OCI layout of the same blobs."""
    ensure_debian_packages(["skopeo"])
    sm120(store, ROOT, "image", "export", image, str(layout))

    def push(registry: Registry) -> Push:
        trust = ["--dest-tls-verify=false"]
        if registry.ca_file:
            # a folder with nothing but the CA: skopeo takes every key in it for a client's
            folder = tempfile.mkdtemp(dir=layout.parent)
            shutil.copyfile(registry.ca_file, Path(folder) / "ca.crt")
            trust = [f"--dest-cert-dir={folder}"]
        args = [find_program("skopeo"), "copy", "--quiet", "--preserve-digests", *trust]
        cost = run([*args, f"oci:{layout}", f"docker://{registry.host_port}/perf:v1"])
        return Push(cost.wall_s, cost.cpu_s)

    return {"skopeo copy": push}


def docker_way(store: Store, scratch: Path, stack: ExitStack, report: Report) -> Ways:
    """Docker, from its own storage, where the image was loaded before."""
    try:
        daemon = stack.enter_context(docker_daemon(scratch / "docker"))
    except CannotHave as reason:
        report.add("docker push", "not measured here", str(reason))
        return {}
    load = command(store, ROOT, "load", IMAGE, "--tag", "perf:v1")
    run(load, cwd=ROOT, env={"DOCKER_HOST": daemon.socket_url})
    return {"docker push": lambda registry: push_with_docker(daemon, registry)}


def push_with_docker(daemon: DockerDaemon, registry: Registry) -> Push:
    env = {"DOCKER_HOST": daemon.socket_url}
    docker, place = find_program("docker"), f"{registry.host_port}/perf:v1"
    run([docker, "tag", "perf:v1", place], env=env)
    before = tree_cpu_s(daemon.pid)
    cost = run([docker, "push", "--quiet", place], env=env)
    # Docker compresses again what it unpacked when it was loaded
    return Push(cost.wall_s, cost.cpu_s + tree_cpu_s(daemon.pid) - before)


def tell(report: Report, found: dict[str, list[Push]], size: int, how: str) -> None:
    wall = {n: statistics.median(p.wall_s for p in ps) for n, ps in found.items() if ps}
    cpu = {n: statistics.median(p.cpu_s for p in ps) for n, ps in found.items() if ps}
    for name in ("skopeo copy", "docker push"):
        if name not in wall:
            continue
        report.add(
            f"publish {log.size(size)} over {how}, median of {len(found['ours'])}",
            f"{wall['ours']:.2f} s, {cpu['ours']:.2f} CPU s",
            f"{name}: {wall[name]:.2f} s, {cpu[name]:.2f} CPU s",
            f"{wall[name] / wall['ours']:.1f}× / {cpu[name] / cpu['ours']:.1f}× CPU",
        )


def compare_edit(report: Report, store: Store, scratch: Path, platform: str) -> None:
    """One edited line of the image's own code, from the edit to the registry, signed."""
    checkout = copy_checkout(scratch / "edited")
    path = checkout / "images" / IMAGE / "serve.py"

    def edit() -> None:
        path.write_text(path.read_text(encoding="utf-8") + "# edited for a measurement\n")

    measure_edit(report, store, scratch / "small", IMAGE, platform, checkout, edit)


def compare_engine_edit(report: Report, store: Store, scratch: Path) -> None:
    """One edited line of an engine's patch; the image of gigabytes is in the registry before."""
    checkout = copy_checkout(scratch / "edited-engine")
    measure_edit(
        *(report, store, scratch / "engine", ENGINE, "linux/amd64", checkout),
        lambda: edit_patch(checkout, "edited for a measurement"),
    )


def measure_edit(
    report: Report,
    store: Store,
    scratch: Path,
    image: str,
    platform: str,
    checkout: Path,
    edit: Callable[[], None],
) -> None:
    """Publish, edit, build and publish again: seconds, and every byte that was sent."""
    sm120(store, ROOT, "build", image, "--platform", platform)
    sm120(store, ROOT, "evidence", "new-key", "perf", "--to", str(scratch))
    # no gate has seen the edited image; what is measured here is sending
    more = ("--platform", platform, "--key", str(scratch / "perf.pem"), "--force-ungated", "perf")
    with oci_registry(scratch) as registry:
        place = f"{registry.host_port}/perf"
        sm120(store, ROOT, "publish", image, f"{place}:v1", *more)
        edit()
        start = time.monotonic()
        sm120(store, checkout, "build", image, "--platform", platform, "--accept")
        said = subprocess.run(
            command(store, checkout, "publish", image, f"{place}:v2", *more, "--json"),
            cwd=ROOT,
            check=True,
            capture_output=True,
            env=environment(),
        )
        wall_s = time.monotonic() - start
        done = json.loads(said.stdout)
        sent, evidence = int(done["sent_bytes"]), int(done["attached_bytes"])
        report.add(
            f"one edited line of {image} → built, signed, published (< 1 MB sent)",
            f"{wall_s:.2f} s, {log.size(sent + evidence)}: image {log.size(sent)} of"
            f" {log.size(int(done['total_bytes']))}, evidence {log.size(evidence)}",
        )
    sm120(store, ROOT, "build", image, "--platform", platform)


def main() -> None:
    """`python -m tests.perf.publish`: these rows alone, in some minutes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-docker", action="store_true", help="leave `docker push` out")
    parser.add_argument(
        "--engine", action="store_true", help=f"also with {ENGINE}: 5 GB, sent five times"
    )
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        store = open_store()
        compare_publish(report, store, place, options.rounds, no_docker=options.no_docker)
        if options.engine:
            compare_engine(report, store, place)
            compare_engine_edit(report, store, place)
    print(report)


if __name__ == "__main__":
    main()

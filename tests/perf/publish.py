"""Publishing side by side with `docker push` and `skopeo copy`: the same image, equal registries.

Every push goes to a registry of its own, so that nothing is there already and no tool can use
what it remembers. CPU is the client's; Docker's daemon is counted apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core import log
from tests.perf.dockerfile import docker
from tests.perf.edited import ENGINE, copy_checkout, edit_patch
from tests.perf.measure import TURNS, Cost, Report, in_turns, run
from tests.testbed.dockerd import DockerDaemon, docker_daemon
from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program
from tests.testbed.registry import Registry, oci_registry

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "llama-cpp-cpu"


Pushes = dict[str, Callable[[Registry], Cost]]


def compare_publish(
    report: Report, store: Store, scratch: Path, turns: int, *, no_docker: bool = False
) -> None:
    """All three in turns, so that a busy moment of the machine hits all alike."""
    platform = host_platform()
    sm120(store, ROOT, "build", IMAGE, "--platform", platform)
    with ExitStack() as stack:
        pushes: Pushes = {"ours": lambda r: ours(store, r, IMAGE, platform)}
        pushes |= with_skopeo(store, scratch / "layout", IMAGE)
        pushes |= {} if no_docker else with_docker(store, scratch, stack, report)
        for name in ("ours", "skopeo copy"):
            # once unmeasured, but for Docker, which takes a minute: files are read
            with oci_registry(scratch / f"{name}-warm") as registry:
                pushes[name](registry)
        push_in_turns(report, store, scratch, pushes, IMAGE, platform, turns)
    compare_edit(report, store, scratch, platform, turns)


def compare_engine(report: Report, store: Store, scratch: Path, turns: int) -> None:
    """An image of gigabytes, where starting a program no longer counts; without Docker."""
    platform = "linux/amd64"
    sm120(store, ROOT, "build", ENGINE, "--platform", platform)
    pushes: Pushes = {"ours": lambda r: ours(store, r, ENGINE, platform)}
    pushes |= with_skopeo(store, scratch / "engine-layout", ENGINE)
    push_in_turns(report, store, scratch, pushes, ENGINE, platform, turns)


def push_in_turns(
    report: Report,
    store: Store,
    scratch: Path,
    pushes: Pushes,
    image: str,
    platform: str,
    turns: int,
) -> None:
    """Each push to an empty registry of its own, over plain HTTP and over TLS."""
    size = log.size(store_size(store, image, platform))
    folders = count()

    def side(push: Callable[[Registry], Cost], tls: bool) -> Cost:
        folder = scratch / f"{image}-{next(folders)}"
        with oci_registry(folder, tls=tls) as registry:
            cost = push(registry)
        shutil.rmtree(folder)  # gigabytes each
        return cost

    for tls in (False, True):
        sides = [partial(side, push, tls) for push in pushes.values()]
        costs = dict(zip(pushes, in_turns(turns, *sides), strict=True))
        mine = costs.pop("ours")
        for name, theirs in costs.items():
            how = "TLS" if tls else "HTTP"
            report.compare(f"publish {image}, {size}, over {how}", mine, name, theirs)


def sm120(store: Store, checkout: Path, *args: str, out: Path | None = None) -> Cost:
    return run(command(store, checkout, *args), cwd=ROOT, out=out)


def command(store: Store, checkout: Path, *args: str) -> list[str]:
    head = [sys.executable, "-m", "pipeline", "-q", "--checkout", str(checkout)]
    return [*head, "--store", str(store.root), *args]


def store_size(store: Store, image: str, platform: str) -> int:
    record = store.image_record(image, platform)
    assert record is not None
    return record.size_bytes


def ours(store: Store, registry: Registry, image: str, platform: str) -> Cost:
    ca = ("--ca", str(registry.ca_file)) if registry.ca_file else ()
    place = f"{registry.host_port}/perf:v1"
    # the others send no evidence either; gates are no matter here
    more = ("--platform", platform, "--no-evidence", "--force-ungated", "a measurement")
    return sm120(store, ROOT, "publish", image, place, *more, *ca)


def with_skopeo(store: Store, layout: Path, image: str) -> Pushes:
    """skopeo, from an OCI layout of the same blobs."""
    ensure_debian_packages(["skopeo"])
    sm120(store, ROOT, "image", "export", image, str(layout))

    def push(registry: Registry) -> Cost:
        trust = ["--dest-tls-verify=false"]
        if registry.ca_file:
            # a folder with nothing but the CA: skopeo takes every key in it for a client's
            folder = tempfile.mkdtemp(dir=layout.parent)
            shutil.copyfile(registry.ca_file, Path(folder) / "ca.crt")
            trust = [f"--dest-cert-dir={folder}"]
        args = [find_program("skopeo"), "copy", "--quiet", "--preserve-digests", *trust]
        return run([*args, f"oci:{layout}", f"docker://{registry.host_port}/perf:v1"])

    return {"skopeo copy": push}


def with_docker(store: Store, scratch: Path, stack: ExitStack, report: Report) -> Pushes:
    """Docker, from its own storage, where the image was loaded before."""
    try:
        daemon = stack.enter_context(docker_daemon(scratch / "docker"))
    except CannotHave as reason:
        report.fact("docker push, not measured", str(reason))
        return {}
    load = command(store, ROOT, "load", IMAGE, "--tag", "perf:v1")
    run(load, cwd=ROOT, env={"DOCKER_HOST": daemon.socket_url})
    return {"docker push": lambda registry: push_with_docker(daemon, registry)}


def push_with_docker(daemon: DockerDaemon, registry: Registry) -> Cost:
    # the daemon compresses again what it unpacked when it was loaded
    place = f"{registry.host_port}/perf:v1"
    docker(daemon, "tag", "perf:v1", place)
    return docker(daemon, "push", "--quiet", place)


def compare_edit(report: Report, store: Store, scratch: Path, platform: str, turns: int) -> None:
    """One edited line of the image's own code, from the edit to the registry, signed."""
    checkout = copy_checkout(scratch / "edited")
    path = checkout / "images" / IMAGE / "serve.py"

    def edit(turn: int) -> None:
        path.write_text(path.read_text(encoding="utf-8") + f"# edited {turn}\n", encoding="utf-8")

    measure_edit(report, store, scratch / "small", IMAGE, platform, checkout, edit, turns)


def compare_engine_edit(report: Report, store: Store, scratch: Path, turns: int) -> None:
    """One edited line of an engine's patch; the image of gigabytes is in the registry before."""
    checkout = copy_checkout(scratch / "edited-engine")
    measure_edit(
        *(report, store, scratch / "engine", ENGINE, "linux/amd64", checkout),
        lambda turn: edit_patch(checkout, f"edited {turn}"),
        turns,
    )


def measure_edit(
    report: Report,
    store: Store,
    scratch: Path,
    image: str,
    platform: str,
    checkout: Path,
    edit: Callable[[int], None],
    turns: int,
) -> None:
    """Publish; then edit, build and publish again: time, and every byte that was sent."""
    sm120(store, ROOT, "build", image, "--platform", platform)
    sm120(store, ROOT, "evidence", "new-key", "perf", "--output", str(scratch))
    # no gate has seen the edited image; what is measured is sending
    more = ("--platform", platform, "--key", str(scratch / "perf.pem"), "--force-ungated", "perf")
    said, edits = scratch / "published.json", count()
    with oci_registry(scratch) as registry:
        place = f"{registry.host_port}/perf"
        sm120(store, ROOT, "publish", image, f"{place}:first", *more)

        def one() -> Cost:
            edit(number := next(edits))
            built = sm120(store, checkout, "build", image, "--platform", platform, "--accept")
            args = ("publish", image, f"{place}:v{number}", *more, "--json")
            return built + sm120(store, checkout, *args, out=said)

        report.alone(f"{image}: edit one line, build, sign, publish", in_turns(turns, one)[0])
    done = json.loads(said.read_bytes())
    sent, evidence = int(done["sent_bytes"]), int(done["attached_bytes"])
    report.fact(
        f"{image}: bytes that an edit sends",
        f"image {log.size(sent)} of {log.size(int(done['total_bytes']))},"
        f" evidence {log.size(evidence)}",
    )
    sm120(store, ROOT, "build", image, "--platform", platform)


def main() -> None:
    """`python -m tests.perf.publish`: these rows alone, in some minutes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--no-docker", action="store_true", help="leave `docker push` out")
    parser.add_argument(
        "--engine", action="store_true", help=f"also with {ENGINE}: 5 GB, sent four times a turn"
    )
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        store = open_store()
        compare_publish(report, store, place, options.turns, no_docker=options.no_docker)
        if options.engine:
            compare_engine(report, store, place, options.turns)
            compare_engine_edit(report, store, place, options.turns)
    print(report)


if __name__ == "__main__":
    main()

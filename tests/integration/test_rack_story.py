"""The story of docs/rack.md: fresh nodes become a benchmarked rack, in the order of the page.

Real: systemd, sshd, sudo, Ansible, apt, Docker on each node, TLS and logins of the registry, the
engine, the smoke test, the benchmark. Stand-ins: the packages of NVIDIA, and there is no card. The
nodes' Docker is this machine's, so that the role container_runtime is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.core.errors import EvidenceIncomplete, HostUnreached, NumberChanged, RolledBack
from tests.demo.breaks import with_other_digit
from tests.integration.built import checkout_of
from tests.integration.rack import RECIPE, Rack, outcomes, rack_of
from tests.integration.site import unlocked_site
from tests.testbed.docker_node import with_docker
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.playbook import write_inventory

pytestmark = [pytest.mark.big, pytest.mark.timeout(5400)]
# more once in a while: SM120_TEST_NODES=20 is a rack
NODES = [f"n{number + 1}" for number in range(int(os.environ.get("SM120_TEST_NODES", "4")))]
MEASURED = NODES[:4]
PARTS = ["nccl"]


@pytest.fixture(scope="module")
def rack(
    docker_daemon: DockerDaemon,
    lean_store: Path,
    keys: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rack]:
    checkout = checkout_of(lean_store)
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp("story")
        part = unlocked_site(docker_daemon, tmp, NODES, checkout, with_parts=with_docker)
        site = stack.enter_context(part)
        site.lock()
        made = stack.enter_context(rack_of(site.fleet, lean_store, keys, tmp))
        write_inventory(made.inventory, site.fleet, {**site.values, "sm120_parts": PARTS})
        yield made


class Story:
    """Runs commands, and keeps what was typed and printed, with the time, for the page."""

    def __init__(self, rack: Rack) -> None:
        self.rack, self.file = rack, rack.folder / "story.txt"

    def keep(
        self, begun: float, done: subprocess.CompletedProcess[str], *words: str
    ) -> subprocess.CompletedProcess[str]:
        took = time.monotonic() - begun
        with self.file.open("a") as out:
            out.write(f"$ sm120 {' '.join(words)}\n{done.stdout}--- stderr\n{done.stderr[-6000:]}")
            out.write(f"--- ended with {done.returncode} after {took:.0f} s\n\n")
        return done

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        begun, key = time.monotonic(), (self.rack.keys / "builder.pem").read_text()
        return self.keep(begun, self.rack.run(*words, SM120_SIGNING_KEY=key), *words)

    def deploy(self, *more: str) -> subprocess.CompletedProcess[str]:
        begun = time.monotonic()
        done = self.rack.deploy("--lan", "--batch", str(max(3, len(NODES) // 4)), *more)
        return self.keep(begun, done, "host deploy", *more)


def test_fresh_hosts_become_a_benchmarked_rack(rack: Rack) -> None:
    story, inventory = Story(rack), ("-i", str(rack.inventory))
    rack.add()
    done = story.run("host", "provision", *inventory, "-e", "sm120_batches=100%")
    assert done.returncode == 0, done.stderr[-3000:]

    # one node dies while the canary is being proved
    def kill() -> None:
        deadline = time.monotonic() + 900
        while RECIPE not in rack.nodes["n1"].shell("docker ps", check=False):
            assert time.monotonic() < deadline
            time.sleep(1)
        rack.nodes[NODES[-1]].stop()

    killer = threading.Thread(target=kill)
    killer.start()
    first = story.deploy()
    killer.join()
    assert first.returncode == HostUnreached.exit_code, first.stderr[-3000:]
    good = dict.fromkeys(NODES[:-1], "deployed")
    assert outcomes(first) == {**good, NODES[-1]: "not reached"}

    rack.nodes[NODES[-1]].start()
    second = story.deploy()
    assert outcomes(second) == {**dict.fromkeys(good, "unchanged"), NODES[-1]: "deployed"}

    with rack.pretender():
        failed = story.deploy()
    assert failed.returncode == RolledBack.exit_code, failed.stderr[-3000:]
    untouched = dict.fromkeys(NODES[1:], "not touched")
    assert outcomes(failed) == {"n1": "rolled back", **untouched}

    third = story.deploy()
    assert outcomes(third) == dict.fromkeys(NODES, "unchanged"), third.stderr[-3000:]
    assert third.stderr.count("changed=0") == len(NODES)

    recipes = ("--recipes", str(rack.folder / "recipes"))
    smoke = story.run(
        "smoke", RECIPE, "--on", "n2", *inventory, *recipes, "--quick", "--up-to", "streams"
    )
    assert smoke.returncode == 0, smoke.stderr[-3000:]

    runs = rack.folder / "bench"
    for name in MEASURED:
        facts = rack.folder / "records" / f"{name}.json"
        words = ("bench", RECIPE, "--on", name, *inventory, *recipes, "--host-facts", str(facts))
        small = ("--requests", "4", "--repeats", "1", "--concurrency", "1")
        done = story.run(*words, *small, "--output", str(runs / name))
        assert done.returncode == 0, done.stderr[-3000:]
    page = rack.folder / "rack.html"
    done = story.run(
        "report", *(str(runs / name / "tiny") for name in MEASURED), "--output", str(page)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(name in page.read_text() for name in MEASURED)
    # from the page back to the runs, the hosts' facts and the image; which weights a unit read is
    # known to its host alone
    look = ("--look-in", str(runs), "--look-in", str(rack.folder / "records"))
    check = ("verify", str(page), *look, "--trust", str(rack.keys / "trust.yaml"))
    done = story.run(*check)
    assert done.returncode in (0, EvidenceIncomplete.exit_code), done.stdout[-3000:] + done.stderr
    assert rack.image.digest in done.stdout
    whole = page.read_bytes()
    page.write_bytes(with_other_digit(whole))
    assert story.run(*check).returncode == NumberChanged.exit_code
    page.write_bytes(whole)

    done = story.run("host", "verify", *inventory, "--brief")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    done = story.run("host", "verify", *inventory, "--role", "engine", "--json")
    rows = [row for host in json.loads(done.stdout)["hosts"] for row in host["rows"]]
    engines = [row["verdict"] for row in rows if row["role"] == "engine"]
    assert engines == ["passed"] * 6 * len(NODES)

"""A recipe served on another host: a node with sshd and a Docker daemon of its own.

Real: SSH, the daemon there, the image loaded through the connection, the engine and its port. The
node has no GPU, so that what needs one is judged in the unit tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import default_root
from pipeline.core.errors import (
    AlreadyServed,
    DockerUnavailable,
    FleetUnready,
    HostUnreached,
    Interrupted,
    NothingServed,
    PreflightFailed,
    StartFailed,
    WeightsUnknown,
)
from pipeline.core.files import sha256_of_file
from tests.integration.built import Built, build_image, checkout_of, run_sm120
from tests.integration.test_serve_recipe import SHORT, failed, tiny_recipe
from tests.testbed.docker_node import docker_node
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.forked import ROOT
from tests.testbed.nodes import USER, Fleet, Node, base_tar
from tests.testbed.tiny_gguf import expected_text

pytestmark = pytest.mark.timeout(900)
PORT = 8080  # of the node, whose ports are its own
# listens where nobody asks, so that there is time to break something
DEAF = {"ours": {"extra": ["--port", "8099"]}}


@pytest.fixture(scope="module")
def image(lean_store: Path) -> Built:
    return build_image(lean_store, "llama-cpp-cpu", host_platform())


@pytest.fixture(scope="module")
def host(docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        tar = base_tar(default_root().parent / "sm120-testbed")
        tmp = tmp_path_factory.mktemp("host")
        yield stack.enter_context(docker_node(docker_daemon, tar, "rig1", tmp))


@dataclass(frozen=True)
class Rig:
    """A host in an inventory, a store with the image and a folder of recipes."""

    node: Node
    image: Built
    folder: Path

    def add(self, name: str, **changes: Any) -> None:
        body = tiny_recipe(name, PORT, **changes)
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(body))

    def words(self, *words: str, on: str = "rig1") -> list[str]:
        return [*words, "--on", on, "-i", str(self.folder / "inventory.json")]

    def run(self, *words: str, on: str = "rig1") -> subprocess.CompletedProcess[str]:
        return run_sm120(self.image.store, *self.words(*words, on=on))

    def serve(self, name: str, *more: str, on: str = "rig1") -> subprocess.CompletedProcess[str]:
        return self.run("serve", name, "--recipes", str(self.folder), "--json", *more, on=on)

    def started(self, name: str) -> subprocess.Popen[str]:
        """A serve that waits for its engine, at the moment when the container runs."""
        checkout = str(checkout_of(self.image.store))
        command = [sys.executable, "-m", "pipeline", "--checkout", checkout]
        words = ["serve", name, "--recipes", str(self.folder), "--skip-preflight", "flags"]
        words = self.words(*words, "--json")
        process = subprocess.Popen(
            [*command, "--store", str(self.image.store), *words],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            # a group of its own, as a terminal gives it: Ctrl-C reaches all of it
            start_new_session=True,
        )
        self.wait_until(lambda: f"{name} Up" in self.containers(), 60)
        return process

    def containers(self) -> str:
        return self.node.shell("docker ps --all --format '{{.Names}} {{.Status}}'")

    def wait_until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, self.containers()
            time.sleep(0.1)

    def last_attempt(self) -> dict[str, Any]:
        done = run_sm120(self.image.store, "recipe", "attempts", "--on", "rig1", "--json")
        last: dict[str, Any] = json.loads(done.stdout)[-1]
        return last


@pytest.fixture
def rig(host: Fleet, image: Built, tmp_path: Path) -> Iterator[Rig]:
    node = host.nodes[0]
    there = {"ansible_host": node.name, "ansible_ssh_common_args": f"-F {node.ssh_config}"}
    hosts = {"rig1": there, "gone": {"ansible_host": "192.0.2.1"}}
    inventory = {"all": {"hosts": hosts, "children": {"rigs": {"hosts": hosts}}}}
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    yield Rig(node, image, tmp_path)
    node.shell("docker ps --all --quiet | xargs --no-run-if-empty docker rm --force")


def test_a_recipe_is_served_on_another_host_looked_at_and_stopped_there(rig: Rig) -> None:
    rig.add("tiny-cpu")
    done = rig.serve("tiny-cpu")
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)
    assert (served["host"], served["url"]) == ("rig1", f"http://127.0.0.1:{PORT}/v1")
    # asked on the host itself, by a program that is none of ours
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0}
    ask = (
        "import json,sys,urllib.request as u;"
        f"r=u.Request('http://127.0.0.1:{PORT}/v1/chat/completions',data=sys.argv[1].encode(),"
        "headers={'Content-Type':'application/json'});"
        "print(json.load(u.urlopen(r))['choices'][0]['message']['content'],end='')"
    )
    assert rig.node.shell(f"python3 -c \"{ask}\" '{json.dumps(body)}'") == expected_text(8)

    (row,) = json.loads(rig.run("recipe", "status", "--json").stdout)
    assert (row["recipe"], row["healthy"], row["built"]) == ("tiny-cpu", True, "same")
    assert row["digest"] == rig.image.digest
    assert "model loaded" in rig.run("recipe", "logs", "tiny-cpu").stdout
    failed(rig.serve("tiny-cpu"), AlreadyServed)

    # nothing of ours runs there but the container
    assert "-c import base64" not in rig.node.shell("ps ax -o args")
    assert "tiny-cpu stopped" in rig.run("recipe", "stop", "tiny-cpu").stdout
    assert rig.containers() == ""
    failed(rig.run("recipe", "stop", "tiny-cpu", "--json"), NothingServed)
    mine = [a for a in json.loads(attempts(rig)) if a["id"] == served["attempt"]]
    assert [end["outcome"] for end in mine[0]["ends"]] == ["serving", "stopped"]
    assert mine[0]["host"] == "rig1"


def test_a_recipe_on_another_host_passes_the_ladder_and_is_restarted_there(rig: Rig) -> None:
    rig.add("tiny-cpu")
    recipes = ("--recipes", str(rig.folder))
    failed(rig.run("smoke", "tiny-cpu", *recipes, "--json"), NothingServed)
    assert rig.serve("tiny-cpu").returncode == 0
    before = rig.node.shell("docker inspect --format '{{.State.StartedAt}}' sm120-tiny-cpu")
    ladder = ("smoke", "tiny-cpu", *recipes, *SHORT, "--up-to", "memory", "--json")
    done = rig.run(*ladder, "--restart")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["last_good"]) == ("passed", "memory")
    assert result["url"] == f"http://127.0.0.1:{PORT} on rig1"
    after = rig.node.shell("docker inspect --format '{{.State.StartedAt}}' sm120-tiny-cpu")
    assert after > before
    assert (rig.last_attempt()["kind"], rig.last_attempt()["outcome"]) == ("smoke", "passed")


def attempts(rig: Rig) -> str:
    return run_sm120(rig.image.store, "recipe", "attempts", "--json").stdout


@pytest.mark.big
def test_a_failed_start_ends_with_the_engine_s_words_and_leaves_nothing_there(rig: Rig) -> None:
    rig.add("wrong", flags={"ours": {"extra": ["--no-such-flag"]}})
    error = failed(rig.serve("wrong", "--skip-preflight", "flags"), StartFailed)
    assert "unrecognized arguments: --no-such-flag" in error["message"]
    assert rig.containers() == ""
    assert rig.last_attempt()["outcome"] == "failed"


def test_a_port_that_is_taken_there_is_found_before_anything_starts(rig: Rig) -> None:
    rig.add("tiny-cpu")
    listen = f"import socket,time;s=socket.create_server(('127.0.0.1',{PORT}));time.sleep(99)"
    rig.node.shell(f'systemd-run --quiet --unit=taken python3 -c "{listen}"')
    try:
        rig.wait_until(lambda: f":{PORT}" in rig.node.shell("ss -ltn"), 10)
        assert str(PORT) in failed(rig.serve("tiny-cpu"), PreflightFailed)["message"]
    finally:
        rig.node.shell("systemctl stop taken")
    assert rig.containers() == ""


def test_ctrl_c_takes_the_container_away_over_the_same_connection(rig: Rig) -> None:
    rig.add("slow", flags=DEAF)
    process = rig.started("slow")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code, said
    assert rig.containers() == ""
    assert rig.last_attempt()["outcome"] == "interrupted"


def test_a_lost_connection_leaves_no_container_that_nobody_proved(rig: Rig) -> None:
    rig.add("slow", flags=DEAF)
    process = rig.started("slow")
    # the login's own sshd: what a cut cable does once it is noticed
    rig.node.shell(f"pkill --full '[s]shd: {USER}'")
    _, said = process.communicate(timeout=90)
    assert process.returncode == HostUnreached.exit_code, said
    assert "the connection was lost" in said
    rig.wait_until(lambda: rig.containers() == "", 30)
    assert rig.last_attempt()["outcome"] == "failed"


@pytest.mark.big
def test_a_start_that_is_killed_leaves_no_container_either(rig: Rig) -> None:
    rig.add("slow", flags=DEAF)
    process = rig.started("slow")
    process.kill()
    process.communicate()
    rig.wait_until(lambda: rig.containers() == "", 30)
    rig.wait_until(lambda: f"sshd: {USER}" not in rig.node.shell("ps ax -o args"), 30)


@pytest.mark.parametrize(
    ("on", "kind", "words"),
    [
        ("gone", HostUnreached, "192.0.2.1: "),
        ("rigs", FleetUnready, "is not one host"),
        pytest.param("nobody", FleetUnready, "", marks=pytest.mark.big),
    ],
)
def test_a_host_that_is_not_there_or_not_one_is_named(
    rig: Rig, on: str, kind: type[Exception], words: str
) -> None:
    rig.add("tiny-cpu")
    assert words in failed(rig.serve("tiny-cpu", on=on), kind)["message"]


def test_a_login_without_rights_to_docker_is_told_what_it_lacks(rig: Rig, is_long: bool) -> None:
    rig.add("tiny-cpu")
    rig.node.shell("chmod 600 /var/run/docker.sock")
    try:
        error = failed(rig.serve("tiny-cpu", "--runtime", "docker"), DockerUnavailable)
        if is_long:
            failed(rig.serve("tiny-cpu"), DockerUnavailable)
    finally:
        rig.node.shell("chmod 660 /var/run/docker.sock")
    assert "may not use Docker's socket" in error["message"]
    assert "group `docker`" in error["hint"]


def test_weights_are_those_of_the_host_and_unproved_ones_stop_the_start(rig: Rig) -> None:
    model = {"repository": "org/tiny", "file": "tiny.gguf", "name": "tiny"}
    rig.add("given", model=model)
    # a folder of this machine is none of the host's
    here = failed(rig.serve("given", "--weights", str(rig.folder)), WeightsUnknown)
    assert "is not a folder there" in here["message"]
    rig.node.shell("mkdir -p /models/tiny")
    missing = failed(rig.serve("given", "--weights", "/models/tiny"), PreflightFailed)
    assert "tiny.gguf is not in /models/tiny" in missing["message"]
    rig.node.shell("touch /models/tiny/tiny.gguf")
    unproved = failed(rig.serve("given", "--weights", "/models/tiny"), PreflightFailed)
    assert "no sm120 that could prove them" in unproved["message"]
    assert rig.containers() == ""


@pytest.mark.big
def test_numbers_of_another_host_are_bound_to_its_own_facts(rig: Rig, tmp_path: Path) -> None:
    rig.add("tiny-cpu")
    assert rig.serve("tiny-cpu").returncode == 0
    out, few = tmp_path / "bench", ("--concurrency", "1", "--requests", "2", "--repeats", "1")
    words = ("bench", "tiny-cpu", "--recipes", str(rig.folder), *few, "--no-self-test")
    done = rig.run(*words, "--allow-loops", "--output", str(out))
    assert done.returncode == 0, done.stderr
    (run,) = [json.loads(file.read_text()) for file in out.glob("*/bench.json")]
    facts = out / "host-rig1.json"
    assert run["inputs"]["host"] == sha256_of_file(facts)
    assert run["inputs"]["host_name"] == "rig1"
    # the node's own, and not this machine's
    there = rig.node.shell("docker version --format '{{.Server.Version}}'")
    assert json.loads(facts.read_text())["software"]["docker"] == there.strip()
    page = tmp_path / "page.html"
    made = run_sm120(rig.image.store, "report", str(out), "--output", str(page))
    assert made.returncode == 0, made.stderr
    assert '"name":"Host","value":"rig1"' in page.read_text()


def test_the_status_of_a_rack_has_a_row_for_every_host_also_for_a_dead_one(
    rig: Rig, tmp_path: Path
) -> None:
    rig.add("tiny-cpu")
    assert rig.serve("tiny-cpu").returncode == 0
    there = {"ansible_host": rig.node.name, "ansible_ssh_common_args": f"-F {rig.node.ssh_config}"}
    secret = {"ansible_become_password": "correct-horse-battery"}
    hosts = {"rig1": {**there, **secret}, "again": there, "gone": {"ansible_host": "192.0.2.1"}}
    inventory = tmp_path / "rack.json"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    page = tmp_path / "status.html"
    words = ("host", "status", "-i", str(inventory), "--html", str(page), "--json")
    done = run_sm120(rig.image.store, *words)
    rows = {row["host"]: row for row in json.loads(done.stdout)}
    # of two names for one machine only the first is asked, whichever that is
    asked = rows[rows["again"]["twin"] or "again"]
    assert sorted(str(rows[name]["twin"]) for name in ("again", "rig1"))[0] == "None"
    (line,) = asked["served"]
    assert (line["status"]["recipe"], line["status"]["healthy"]) == ("tiny-cpu", True)
    assert (line["status"]["built"], line["status"]["digest"]) == ("same", rig.image.digest)
    assert rows["gone"]["unreached"]
    assert done.returncode == FleetUnready("").exit_code, done.stderr
    assert "correct-horse" not in done.stdout + done.stderr + page.read_text()
    assert "tiny-cpu" in page.read_text()

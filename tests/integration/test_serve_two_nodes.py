"""One engine over two hosts: nodes with sshd and a Docker daemon each, and a stub of an engine.

Real: SSH, both daemons, the image loaded through the connections, the hosts' networks, and ranks
that meet across them as vLLM's do. The engine is a stand-in of twenty lines, and there is no GPU.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import default_root
from pipeline.core.errors import PreflightFailed, StartFailed
from tests.integration.built import Built, build_image, checkout_of, run_sm120, sm120
from tests.integration.test_serve_recipe import failed
from tests.testbed.docker_node import start_docker, with_docker
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import Node, base_tar, fleet

pytestmark = [pytest.mark.big, pytest.mark.timeout(1800)]
PORT, MEETING = 8000, 29501
# Rank 0 answers once all others have come, and ends when one goes.
ENGINE = """
import argparse, http.server, json, os, socket, sys, threading, time
parser = argparse.ArgumentParser()
for name in ("--nnodes", "--node-rank", "--master-port", "--port"):
    parser.add_argument(name, type=int)
for name in ("--master-addr", "--host"):
    parser.add_argument(name)
parser.add_argument("--headless", action="store_true")
given, _ = parser.parse_known_args()
me = {"rank": given.node_rank, "own": os.environ["VLLM_HOST_IP"], "host": socket.gethostname()}
if os.path.exists("/models/broken"):
    sys.exit("NCCL WARN no such device")
if given.node_rank:
    assert given.headless
    for _ in range(300):
        try:
            met = socket.create_connection((given.master_addr, given.master_port), 2)
            break
        except OSError:
            time.sleep(0.2)
    met.settimeout(None)
    met.sendall(json.dumps(me).encode() + b"\\n")
    met.recv(1)
    sys.exit("rank 0 is gone")
door, all_ = socket.create_server((given.master_addr, given.master_port)), [me]
def watch(one):
    one.recv(1)
    os._exit(7)
while len(all_) < given.nnodes:
    one, _ = door.accept()
    all_.append(json.loads(one.makefile().readline()))
    threading.Thread(target=watch, args=(one,), daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = all_ if self.path == "/ranks" else {"data": [{"id": "ranks"}]}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Rack:
    """Two hosts in an inventory, a store with the stub's image and a folder of recipes."""

    nodes: Sequence[Node]
    image: Built
    folder: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        inventory = str(self.folder / "inventory.json")
        return run_sm120(self.image.store, *words, "--on", "rig1,rig2", "-i", inventory)

    def serve(self, *more: str) -> subprocess.CompletedProcess[str]:
        skipped = ("--skip-preflight", "weights", "--skip-preflight", "flags")
        where = ("--recipes", str(self.folder), "--weights", "/data/ranks")
        return self.run("serve", "ranks", *where, *skipped, "--json", *more)

    def containers(self) -> list[str]:
        asked = "docker ps --all --format '{{.Names}}'"
        return [node.shell(asked).strip() for node in self.nodes]

    def asks(self, path: str) -> Any:
        code = "import sys,urllib.request as u;print(u.urlopen(sys.argv[1]).read().decode())"
        url = f"http://127.0.0.1:{PORT}{path}"
        return json.loads(self.nodes[0].shell(f"python3 -c '{code}' {url}"))


@pytest.fixture(scope="module")
def image(lean_store: Path) -> Built:
    folder = checkout_of(lean_store) / "images" / "ranks"
    folder.mkdir()
    (folder / "engine.py").write_text(ENGINE)
    spec = {
        "name": "ranks",
        "summary": "A stub of an engine over several nodes",
        "base": "debian-python",
        "platforms": [host_platform()],
        "files": [{"from": "engine.py", "to": "/opt/engine.py", "mode": "0755"}],
        "entrypoint": ["/usr/bin/python3", "/opt/engine.py"],
        "command": ["--help"],
        "ports": [PORT],
        "user": "engine",
    }
    (folder / "image.yaml").write_text(yaml.safe_dump(spec))
    sm120(lean_store, "image", "lock", "ranks")
    return build_image(lean_store, "ranks", host_platform(), "--accept")


@pytest.fixture(scope="module")
def rack(
    image: Built, docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rack]:
    tmp = tmp_path_factory.mktemp("rack")
    tar = base_tar(default_root().parent / "sm120-testbed")
    with fleet(docker_daemon, tar, ["rig1", "rig2"], tmp, with_docker) as nodes:
        hosts = {}
        for node in nodes.nodes:
            (tmp / node.name).mkdir()
            start_docker(node, tmp / node.name)
            node.shell("mkdir --parents /data/ranks")
            arguments = f"-F {node.ssh_config}"
            hosts[node.name] = {"ansible_host": node.name, "ansible_ssh_common_args": arguments}
        (tmp / "inventory.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        recipe = {
            "name": "ranks",
            "summary": "a stub over two nodes",
            "backing": "unproved",
            "sources": {"ours": {"kind": "ours", "title": "this project", "why": "a test"}},
            "image": "ranks",
            "engine": "vllm",
            "model": {"repository": "org/ranks", "name": "ranks"},
            "hardware": {"cards": 0},
            "nodes": 2,
            "port": PORT,
        }
        (tmp / "ranks.yaml").write_text(yaml.safe_dump(recipe))
        yield Rack(nodes.nodes, image, tmp)


def test_two_hosts_serve_one_model_and_are_stopped_by_one_command(rack: Rack) -> None:
    planned = rack.serve("--dry-run")
    assert planned.returncode == 0, planned.stderr
    rows = [row for row in json.loads(planned.stdout)["checks"] if row["rule"] == "nodes"]
    verdicts = {row["subject"]: row["verdict"] for row in rows}
    assert verdicts["image"] == verdicts["ports"] == verdicts["clocks"] == "passed"
    assert rack.containers() == ["", ""]

    done = rack.serve("--timeout", "120")
    assert done.returncode == 0, done.stderr
    first, second = rack.nodes
    assert [(each["rank"], each["own"]) for each in rack.asks("/ranks")] == [
        (0, first.address),
        (1, second.address),
    ]
    # clients are served on the first host's loopback alone
    listening = first.shell("ss -ltn")
    assert f"127.0.0.1:{PORT}" in listening
    assert f"{first.address}:{MEETING}" in listening
    assert rack.containers() == ["sm120-ranks", "sm120-ranks"]
    stopped = rack.run("recipe", "stop", "ranks")
    assert stopped.returncode == 0, stopped.stderr
    assert rack.containers() == ["", ""]


def test_a_rank_that_fails_leaves_nothing_on_either_host(rack: Rack) -> None:
    rack.nodes[1].shell("touch /data/ranks/broken")
    try:
        error = failed(rack.serve("--timeout", "60"), StartFailed)
    finally:
        rack.nodes[1].shell("rm /data/ranks/broken")
    assert "rank 1 ended (1): NCCL WARN no such device" in error["message"]
    assert rack.containers() == ["", ""]


def test_a_meeting_port_that_is_taken_starts_nothing(rack: Rack) -> None:
    listen = f"import socket,time;s=socket.create_server(('127.0.0.1',{MEETING}));time.sleep(99)"
    rack.nodes[0].shell(f'systemd-run --quiet --unit=taken python3 -c "{listen}"')
    try:
        error = failed(rack.serve(), PreflightFailed)
    finally:
        rack.nodes[0].shell("systemctl stop taken")
    assert error["message"].startswith(f"nodes: ports: rig1: {MEETING}: ")
    assert rack.containers() == ["", ""]

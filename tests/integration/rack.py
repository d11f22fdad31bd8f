"""Nodes with Docker, a private registry that they trust, and a small signed image in it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import default_root
from tests.integration.built import Built, build_image, checkout_of, run_sm120, sm120
from tests.integration.published import PASSWORD, USER, keep_login
from tests.integration.test_serve_recipe import tiny_recipe
from tests.testbed.docker_node import start_docker, with_docker
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import Fleet, Node, base_tar, fleet
from tests.testbed.playbook import write_inventory
from tests.testbed.registry import Registry, oci_registry

IMAGE, RECIPE, PORT = "llama-cpp-cpu", "tiny-cpu", 8080
# healthy, with the right model, and without one right answer
PRETENDER = """
import http.server, json, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({"data": [{"id": "tiny"}], "status": "ok"})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say({"choices": [{"message": {"content": ""}, "finish_reason": "stop", "index": 0}]})
    def say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("0.0.0.0", port), Answers).serve_forever()
"""


@dataclass(frozen=True)
class Rack:
    """A fleet, a registry, a store with the image, and a folder for recipes and the inventory."""

    fleet: Fleet
    registry: Registry
    image: Built
    keys: Path
    config: str  # of Docker's command: the login
    folder: Path

    @property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.fleet.nodes}

    @property
    def place(self) -> str:
        return f"{self.registry.host_port}/team/{IMAGE}"

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.json"

    def add(self, name: str = RECIPE, **changes: Any) -> None:
        body = tiny_recipe(name, **{"port": PORT, **changes})
        (self.folder / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(body))

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run_sm120(self.image.store, *words, DOCKER_CONFIG=self.config, **env)

    def deploy(
        self, *more: str, recipe: str = RECIPE, **env: str
    ) -> subprocess.CompletedProcess[str]:
        words = ["host", "deploy", recipe, "-i", str(self.inventory)]
        words += ["--recipes", str(self.folder / "recipes"), "--registry", self.place]
        words += ["--trust", str(self.keys / "trust.yaml"), "--ca", str(self.registry.ca_file)]
        return self.run(*words, "--timeout", "60", *more, **env)

    def publish(self, tag: str) -> str:
        """Publish what the store has of the image, signed; returns its digest."""
        key = ("--key", str(self.keys / "builder.pem"), "--ca", str(self.registry.ca_file))
        words = ("publish", IMAGE, f"{self.place}:{tag}", "--platform", host_platform(), "--json")
        done = sm120(self.image.store, *words, *key, DOCKER_CONFIG=self.config)
        digest: str = json.loads(done.stdout)["digest"]
        return digest

    @contextmanager
    def pretender(self) -> Iterator[str]:
        """The next version of the image, published: healthy, and its answers are empty.

        The checkout is at that version in the block: an image of another state is stale evidence.
        """
        program = checkout_of(self.image.store) / "images" / IMAGE / "serve.py"
        text, build = program.read_text(), ("build", IMAGE, "--accept", "--platform")
        try:
            program.write_text(PRETENDER)
            sm120(self.image.store, *build, host_platform())
            yield self.publish("bad")
        finally:
            program.write_text(text)
            sm120(self.image.store, *build, host_platform())

    def write_inventory(self, **values: Any) -> None:
        # nothing is provisioned, but promises are read as the inventory of a whole site has them
        repository = {"nvidia_repository_url": "http://mirror.invalid/", "sm120_parts": []}
        repository["nvidia_repository_key"] = str(self.registry.ca_file)
        write_inventory(self.inventory, self.fleet, {**repository, **values})


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What was done on each host, by the command's table."""
    assert done.stdout, done.stderr[-4000:]
    rows = [re.split(r" {2,}", line) for line in done.stdout.splitlines()[2:]]
    return {row[0]: row[1].strip() for row in rows}


def trust_registry(node: Node, registry: Registry, tmp: Path) -> None:
    """What the role container_runtime does: the CA for Docker, and root's login."""
    files = tmp / f"trust-{node.name}"
    certs = files / "etc/docker/certs.d" / registry.host_port
    certs.mkdir(parents=True)
    assert registry.ca_file is not None
    shutil.copyfile(registry.ca_file, certs / "ca.crt")
    (files / "root/.docker").mkdir(parents=True)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (files / "root/.docker/config.json").write_text(
        json.dumps({"auths": {registry.host_port: {"auth": auth}}})
    )
    node.put(files, "/")


@contextmanager
def new_rack(
    daemon: DockerDaemon, lean: Path, keys: Path, tmp: Path, names: Sequence[str]
) -> Iterator[Rack]:
    """Fresh nodes, nothing provisioned, and the image in a registry that they trust."""
    tar = base_tar(default_root().parent / "sm120-testbed")
    with (
        fleet(daemon, tar, names, tmp, with_docker) as nodes,
        rack_of(nodes, lean, keys, tmp) as rack,
    ):
        rack.write_inventory()
        yield rack


@contextmanager
def rack_of(nodes: Fleet, lean: Path, keys: Path, tmp: Path) -> Iterator[Rack]:
    """Docker on each node, a registry that they trust, and the image published in it."""
    image = build_image(lean, IMAGE, host_platform())
    login = {USER: PASSWORD}
    with oci_registry(tmp, tls=True, htpasswd=login, address=nodes.gateway) as registry:
        for node in nodes.nodes:
            place = tmp / node.name
            place.mkdir()
            start_docker(node, place)
            trust_registry(node, registry, tmp)
        (tmp / "recipes").mkdir()
        config = keep_login(tmp / "login", registry.host_port, f"{USER}:{PASSWORD}")
        rack = Rack(nodes, registry, image, keys, config, tmp)
        rack.publish("v1")
        yield rack

"""The closed side of an air gap: a network namespace without a route, and all that lives in it.

Run by `unshare`, with the folder of a site: its bundle, the maker's public key, and a root file
system for nodes. Nodes, their bridge, Docker and every command are in that namespace.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bcrypt
from docker.types import Mount

from tests.integration.published import PASSWORD, USER
from tests.testbed.debian import BOOKWORM
from tests.testbed.docker_node import DATA, REMOUNT
from tests.testbed.dockerd import docker_daemon
from tests.testbed.nodes import USER as LOGIN
from tests.testbed.nodes import Fleet, Node, fleet
from tests.testbed.own_wheel import build_wheel
from tests.testbed.packages import find_program
from tests.testbed.playbook import write_inventory
from tests.testbed.registry import make_certificates

REGISTRY, SYSTEM = "registry.site.invalid", BOOKWORM.target.replace("/", "-")
OUTSIDE = "192.0.2.1"  # of an archive or anything else that is not on this side
PARTS = ["nccl", "container_runtime", "registry", "weights"]
# of Debian's own unit: a node is a container itself, see tests/testbed/docker_node.py
DOCKER_UNIT = f"""[Service]
Environment="DOCKER_OPTS=--iptables=false --ip-forward=false --ip-masq=false"
ExecStartPre=/bin/sh -c "{REMOUNT.replace("$", "$$")}"
"""
# Docker is set to raise a limit of its containers, which root of a node may not do: before runc
RUNC = """#!/usr/bin/python3
import json, os, sys
if "--bundle" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        body = json.load(file)
    body["process"].pop("rlimits", None)
    with open(path, "w") as file:
        json.dump(body, file)
os.execv("/usr/sbin/runc", sys.argv)
"""
Outcome = subprocess.CompletedProcess[str]


class ClosedSide:
    """Commands as a person there types them, with nothing but what the bundle brought."""

    def __init__(self, site: Path) -> None:
        self.site, self.place = site, site / "place"
        self.env = {"HOME": str(site / "their-home"), "ANSIBLE_TIMEOUT": "90"}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def sm120(
        self, *words: str, store: str = "their-store", code: str = "place/checkout"
    ) -> Outcome:
        begun = time.monotonic()
        command = [sys.executable, "-m", "pipeline", "--store", str(self.site / store), *words]
        # the tool, too, is the one of the bundle
        done = subprocess.run(
            command,
            cwd=self.site / code,
            env={**self.env, "PYTHONPATH": str(self.site / code), "PYTHONDONTWRITEBYTECODE": "1"},
            text=True,
            capture_output=True,
        )
        took = f"ended with {done.returncode} after {time.monotonic() - begun:.0f} s"
        with (self.site / "closed.log").open("a") as log:
            log.write(f"$ sm120 {' '.join(words)}\n{done.stderr}{done.stdout}--- {took}\n\n")
        return done

    def good(self, *words: str, **where: str) -> Outcome:
        done = self.sm120(*words, **where)
        assert done.returncode == 0, f"{words}: {(done.stdout + done.stderr)[-3000:]}"
        return done


def require_no_route(node: Node | None = None) -> None:
    """Nothing outside answers: no route, no names, no package index, no archive."""
    if node is not None:
        # apt, too, on a fresh host, whose own source names an archive that it cannot reach
        only = "-o Dir::Etc::SourceList=/etc/apt/sources.list.d/debian.sources"
        update = f"apt-get update {only} -o Dir::Etc::SourceParts=- -o Acquire::Retries=0 2>&1"
        connect = f"timeout 20 bash -c 'echo > /dev/tcp/{OUTSIDE}/443' 2>&1 || echo Failed"
        # The bridge, which has no route, says so; its word may meet a socket that is still busy
        # with sending. Then the packet is lost without one.
        for command in (update, connect):
            said = node.shell(command, check=False)
            assert "Failed" in said, said
        return
    routes = json.loads(subprocess.check_output(["ip", "-json", "route", "show", "default"]))
    assert routes == [], routes
    begun = time.monotonic()
    for family, address in ((socket.AF_INET, OUTSIDE), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family) as probe:
            probe.settimeout(20)
            code = probe.connect_ex((address, 443))
            assert code in (errno.ENETUNREACH, errno.EADDRNOTAVAIL), os.strerror(code)
    # at once, not after a time-out: there is no way, rather than a slow one
    assert time.monotonic() - begun < 15
    pip = [sys.executable, "-m", "pip", "download", "--isolated", "--no-deps", "--retries", "0"]
    asked = subprocess.run([*pip, "click", "--dest", "/nowhere"], capture_output=True, text=True)
    assert asked.returncode != 0
    assert "No matching distribution found" in asked.stderr, asked.stderr


def require_whole_bundles_only(side: ClosedSide) -> dict[str, str]:
    """A byte of each kind of member, one that is missing, a stranger's: each is refused."""
    usb, refused = side.site / "usb", {}
    kinds = {
        "wheel": "mirror/*.whl",
        "tool": "mirror/tool/*.whl",
        "locked package": f"hosts/{SYSTEM}/*.deb",
        "system package": f"system/{SYSTEM}/pool/**/*.deb",
        "index": f"system/{SYSTEM}/dists/**/InRelease",
        "layer": "images/*/blobs/sha256/*",
        "weights": "weights/tiny/tiny.gguf",
        "checkout": "checkout.tar",
        "plan": "plan/plan.yaml",
        "key": "keys/*.pub",
        "manifest": "bundle.json",
    }
    key = ("--key", str(side.site / "maker.pub"))

    def refuse(what: str, code: int, *names: str, key: tuple[str, ...] = key) -> None:
        done = side.sm120("unbundle", str(usb), *key, "--output", str(side.place), code="code")
        assert done.returncode == code, (what, done.stderr)
        assert all(name in done.stderr for name in names), (what, done.stderr)
        assert not side.place.exists()
        assert not (side.site / "their-store" / "images").exists()
        refused[what] = done.stderr.splitlines()[-2]

    for what, pattern in kinds.items():
        path = max(usb.glob(pattern), key=lambda path: path.stat().st_size)
        aside = path.rename(side.site / "aside")
        data = bytearray(aside.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        refuse(what, 71, "" if what == "manifest" else path.name)
        if what == "layer":
            path.unlink()
            refuse("missing", 71, path.name, "is missing")
        aside.replace(path)
    # their own key, which signs what follows, vouches for nothing that was brought
    side.good("evidence", "new-key", "site", code="code")
    strange = side.site / "their-home" / ".config" / "sm120" / "keys" / "site.pub"
    refuse("stranger", 71, key=("--key", str(strange)))
    (usb / "bundle.json.dsse.json").rename(side.site / "aside")
    refuse("unsigned", 72, "nobody vouches")
    (side.site / "aside").rename(usb / "bundle.json.dsse.json")
    return refused


def with_own_docker(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a node on which Debian's docker.io can run, once it is installed."""
    disk = Mount(target=DATA, source=None, type="volume")
    return {**settings, "cap_add": [*settings["cap_add"], "NET_ADMIN"], "mounts": [disk]}


@contextmanager
def served_bundle(side: ClosedSide, address: str) -> Iterator[str]:
    """`sm120 unbundle --serve` on the bridge."""
    command = [sys.executable, "-m", "pipeline", "--store", str(side.site / "their-store")]
    command += ["unbundle", str(side.site / "usb"), "--key", str(side.site / "maker.pub")]
    command += ["--output", str(side.place), "--serve", "--host", address, "--port", "0", "--json"]
    with subprocess.Popen(
        command,
        cwd=side.site / "code",
        env={**side.env, "PYTHONPATH": str(side.site / "code")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            yield json.loads(process.stdout.readline())["endpoint"]
        finally:
            process.terminate()


def prepare_node(node: Node, folder: Path) -> None:
    """As a site's installer leaves a host: a name for the registry, an archive out of reach."""
    node.shell(f"echo '{node.address} {REGISTRY}' >> /etc/hosts")
    node.shell(f"groupadd --force docker && usermod --append --groups docker {LOGIN}")
    drop_in = folder / "node/etc/systemd/system/docker.service.d/testbed.conf"
    source = folder / "node/etc/apt/sources.list.d/debian.sources"
    runc = folder / "node/usr/local/sbin/runc"
    for path in (drop_in, source, runc):
        path.parent.mkdir(parents=True)
    drop_in.write_text(DOCKER_UNIT)
    runc.write_text(RUNC)
    runc.chmod(0o755)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    where = f"Types: deb\nURIs: http://{OUTSIDE}/debian\nSuites: bookworm\n"
    source.write_text(f"{where}Components: main\nSigned-By: {key}\n")
    node.put(folder / "node", "/")


def write_hosts(side: ClosedSide, nodes: Fleet, endpoint: str) -> None:
    """The inventory: every address in it is of this side."""
    plan, held = side.place / "plan", side.place
    certs = side.site / "certs"
    certs.mkdir()
    ca = make_certificates(certs, REGISTRY)
    shutil.copyfile(ca, plan / "ca.crt")
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(rounds=4)).decode()
    values = {
        "sm120_parts": PARTS,
        "sm120_free_mib": 100,
        "nccl_profile": "latency",
        "nvidia_repository_url": f"{endpoint}/hosts/{SYSTEM}",
        "nvidia_repository_key": str(held / "hosts" / SYSTEM / "keyring"),
        "nvidia_repository_system_address": f"{endpoint}/system/{SYSTEM}",
        "container_runtime_registry": f"{REGISTRY}:5000",
        "container_runtime_registry_ca": str(ca),
        "container_runtime_registry_login": f"{USER}:{PASSWORD}",
        "container_runtime_shm_size": "64m",
        "registry_name": REGISTRY,
        "registry_certificate": str(certs / "server.crt"),
        "registry_key": str(certs / "server.key"),
        "registry_htpasswd": [f"{USER}:{hashed}"],
        "weights_wheel": str(build_wheel(side.site / "wheel")),
        "weights_requirements": str(held / "checkout" / "lockfiles" / "tool" / "run.txt"),
        "weights_wheelhouse": f"{endpoint}/mirror/tool/",
        "weights_checkout": str(held / "checkout"),
        "weights_sets": ["tiny"],
        "weights_neighbour": endpoint,
    }
    write_inventory(plan / "inventory.json", nodes, values)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (side.site / "docker").mkdir()
    login = {"auths": {f"{REGISTRY}:5000": {"auth": auth}}}
    (side.site / "docker" / "config.json").write_text(json.dumps(login))
    side.env["DOCKER_CONFIG"] = str(side.site / "docker")
    names = Path("/etc/hosts").read_text() + f"{nodes.nodes[0].address} {REGISTRY}\n"
    (side.site / "hosts").write_text(names)
    # in this mount namespace alone
    subprocess.run(["mount", "--bind", str(side.site / "hosts"), "/etc/hosts"], check=True)


def main(site: Path) -> None:
    """The whole story; what it found is in `closed.json`."""
    subprocess.run([find_program("ip"), "link", "set", "lo", "up"], check=True)
    require_no_route()
    side, found = ClosedSide(site), dict[str, Any]()
    found["refused"] = require_whole_bundles_only(side)
    tar = Path((site / "node.txt").read_text())
    with (
        docker_daemon(site / "docker-data") as daemon,
        fleet(daemon, tar, ["n1"], site, with_own_docker) as nodes,
        served_bundle(side, nodes.gateway) as endpoint,
    ):
        require_no_route()
        (node,) = nodes.nodes
        prepare_node(node, site)
        require_no_route(node)
        write_hosts(side, nodes, endpoint)
        side.env |= {"SM120_MIRRORS": f"{endpoint}/mirror", "HF_ENDPOINT": endpoint}
        plan = side.place / "plan" / "plan.yaml"
        # an empty store: the image is built again, from its inputs alone
        ran = side.sm120("run", str(plan), "--json", store="fresh")
        shutil.copytree(site / "fresh" / "plans", site / "plans", dirs_exist_ok=True)
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
        found["stages"] = json.loads(ran.stdout)["stages"]
        again = side.good("run", str(plan), "--json", store="fresh")
        found["again"] = [row["state"] for row in json.loads(again.stdout)["stages"]]
        built = side.good("build", "llama-cpp-cpu", "--platform", "host", "--json", store="fresh")
        found["digest"] = json.loads(built.stdout)[0]["digest"]
        installed = node.shell("dpkg-query --show docker.io docker-registry containerd")
        found["installed"] = installed.splitlines()
        require_no_route()
        require_no_route(node)
    (site / "closed.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The story, one function a step; each returns the line that the overview shows of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import docker
from docker.errors import DockerException

from pipeline.serving.recipe.tiny import tiny_gguf
from tests.demo import breaks
from tests.demo.checkout import IMAGE, RECIPE, REPOSITORY, WEIGHTS, write_checkout, write_recipe
from tests.demo.overview import LeftOut
from tests.demo.shell import StepFailed
from tests.demo.world import (
    BENCH,
    BUILD,
    FACTS,
    NODES_STEP,
    PUBLISH,
    REPORT,
    SERVE,
    WEIGHTS_STEP,
    World,
    needed,
)
from tests.integration.published import PASSWORD, USER, keep_login
from tests.integration.site import unlocked_site
from tests.testbed.docker_node import start_docker, with_docker
from tests.testbed.dockerd import docker_daemon
from tests.testbed.hub import test_hub
from tests.testbed.own_wheel import REQUIREMENTS, build_wheel, neighbour_serving, wheelhouse
from tests.testbed.packages import find_program
from tests.testbed.playbook import write_inventory
from tests.testbed.programs import daemon, wait_for
from tests.testbed.registry import oci_registry

NODES = ("n1", "n2")
PARTS = ["nccl", "host_tuning"]
TAG = "v1"


def begin(world: World) -> str:
    """A checkout of a user's own, and a key that signs all that follows."""
    write_checkout(world.checkout)
    world.shell.sm120("evidence", "new-key", "builder")
    return f"{IMAGE} with a patch in {world.checkout}, and a key in {world.folder}/config"


def weights(world: World) -> str:
    """From a Hub on this machine, which has real bytes and the Hub's own answers."""
    place = world.folder / "models" / WEIGHTS
    with test_hub() as hub:
        hub.add(REPOSITORY, {"tiny.gguf": tiny_gguf(), "README.md": b"It can only recite.\n"})
        env = {"HF_ENDPOINT": hub.url}
        world.shell.sm120("weights", "lock", WEIGHTS, env=env)
        world.shell.sm120("weights", "fetch", WEIGHTS, "--output", str(place), env=env)
    done = world.shell.sm120("weights", "verify", str(place), "--full", "--json")
    world.weights = place
    (found,) = json.loads(done.out)["sets"]
    return f"{found['files']} files are as locked, by {found['lock'][:19]}…"


def build(world: World) -> str:
    """Assembled from locked wheels and packages with our patch, judged, stated and signed."""
    options = ("--platform", "host", "--accept", "--gate", "--json")
    done = world.shell.sm120("build", IMAGE, *options)
    built = json.loads(done.out)[0]
    world.image = built["digest"]
    gates = [f"gate {each['gate']} {each['verdict']}" for each in built["gates"]["results"]]
    statements = len(built["evidence"]["statements"])
    return f"{built['digest']}, {', '.join(gates)}, {statements} statements, signed"


def publish(world: World) -> str:
    """A private registry with TLS and a password; verified from there, down to each byte."""
    needed(world.image, BUILD)
    part = oci_registry(world.folder, tls=True, htpasswd={USER: PASSWORD})
    world.registry = world.stack.enter_context(part)
    login = keep_login(world.short / "docker", world.registry.host_port, f"{USER}:{PASSWORD}")
    world.shell.env["DOCKER_CONFIG"] = login
    place, ca = f"{world.place_of(IMAGE)}:{TAG}", ("--ca", str(world.registry.ca_file))
    world.shell.sm120("publish", IMAGE, place, "--platform", "host", *ca)
    done = world.shell.sm120("verify", place, "--deep", *ca, "--json")
    return f"{place} is {json.loads(done.out)['verdict']}"


def nodes(world: World) -> str:
    """Two machines that no play has touched, with a signed package archive."""
    stack = world.stack
    for name in ("docker", "site", "cp"):
        # throwaway machines leave no keys and archives, either
        stack.callback(shutil.rmtree, world.folder / name, ignore_errors=True)
    world.daemon = stack.enter_context(docker_daemon(world.folder / "docker"))
    tmp = world.folder / "site"
    tmp.mkdir()
    part = unlocked_site(world.daemon, tmp, NODES, world.checkout, with_parts=with_docker)
    world.site = stack.enter_context(part)
    stack.callback(end_connections, world)
    start_docker(world.site.first, tmp)
    return f"{' and '.join(NODES)}: systemd, sshd and sudo; n1 has a Docker of its own"


def end_connections(world: World) -> None:
    """Ansible keeps its connections for a minute."""
    for control in (world.folder / "cp").glob("*"):
        command = [find_program("ssh"), "-S", str(control), "-O", "exit", "any"]
        subprocess.run(command, capture_output=True, check=False)


def provision(world: World) -> str:
    """Over SSH: settings and checks on both, our command and the weights on the first."""
    site = needed(world.site, NODES_STEP)
    place = needed(world.weights, WEIGHTS_STEP)
    options = ("--repository", site.repository.url, "--keyring", str(site.repository.keyring))
    world.shell.sm120("host", "lock", "--target", site.system.target, *options)
    site.first.put(wheelhouse(world.folder / "wheels"), "/srv/wheels")
    site.values["sm120_batches"] = "100%"
    with neighbour_serving(place, site.fleet.gateway) as url:
        shared = world.shell.shown(f"$ sm120 weights serve {place} --host {site.fleet.gateway} &")
        world.overview.typed(shared)
        own = {
            "sm120_parts": [*PARTS, "weights"],
            "weights_wheel": str(build_wheel(world.folder / "wheel")),
            "weights_requirements": str(REQUIREMENTS),
            "weights_wheelhouse": "/srv/wheels",
            "weights_checkout": str(world.checkout),
            "weights_sets": [WEIGHTS],
            "weights_neighbour": url,
        }
        write_inventories(world, own)
        batches = ("-e", "sm120_batches=100%")
        world.shell.sm120("host", "provision", "-i", str(world.inventory), *batches)
    shutil.rmtree(world.folder / "wheels")
    return "both hosts are as locked, and n1 has the weights"


def write_inventories(world: World, first: dict[str, Any]) -> None:
    """Both nodes; the first has parts of its own."""
    site = needed(world.site, NODES_STEP)
    write_inventory(world.inventory, site.fleet, {**site.values, "sm120_parts": PARTS})
    body = json.loads(world.inventory.read_text())
    body["all"]["hosts"]["n1"] |= first
    world.inventory.write_text(json.dumps(body, indent=1) + "\n")


def facts(world: World) -> str:
    """What the host is, signed; and every promise of every role, proved over SSH."""
    if world.site is None:
        return own_facts(world)
    world.facts = world.folder / "records" / "n1.json"
    done = world.shell.sm120("host", "verify", "-i", str(world.inventory), "--json")
    hosts = json.loads(done.out)["hosts"]
    world.shell.sm120("verify", str(world.facts))
    promises = sum(len(host["rows"]) for host in hosts)
    return f"{promises} promises hold on {len(hosts)} hosts; the record of n1 is signed"


def own_facts(world: World) -> str:
    """Without nodes, this machine is the host."""
    world.facts = world.folder / "records" / "this-machine.json"
    world.facts.parent.mkdir()
    done = world.shell.sm120("host", "facts", "--name", "this-machine", "--json")
    world.facts.write_text(done.out, encoding="utf-8")
    world.shell.sm120("host", "attest", str(world.facts))
    world.shell.sm120("verify", str(world.facts))
    return "of this machine, signed: there are no nodes"


def serve(world: World) -> str:
    """The container is compared with what was built; its log must show the patch."""
    digest = needed(world.image, BUILD)
    place = needed(world.weights, WEIGHTS_STEP)
    world.port = free_port()
    write_recipe(world.checkout, world.port)
    if world.site:
        world.shell.sm120("serve", RECIPE, "--weights", f"/models/{WEIGHTS}", *world.on_node)
        world.container_env = tunnel(world)
        where = "on n1"
    else:
        world.container_env = docker_here(world)
        world.stack.callback(stop_here, world)
        world.shell.sm120("serve", RECIPE, "--weights", str(place), env=world.container_env)
        where = "on this machine"
    return f"{where}, port {world.port}, {digest[:19]}…, proved weights"


def free_port() -> int:
    """Of this machine: the node's port is brought here under the same number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def docker_here(world: World) -> dict[str, str]:
    """Where there is no node: our own daemon, else the user's."""
    if world.daemon:
        return {"DOCKER_HOST": world.daemon.socket_url}
    try:
        docker.from_env(timeout=5).ping()
    except DockerException as error:
        raise LeftOut("there is no node, and no Docker answers here") from error
    return {"DOCKER_HOST": os.environ["DOCKER_HOST"]} if "DOCKER_HOST" in os.environ else {}


def stop_here(world: World) -> None:
    """Whatever came after: no container stays."""
    with suppress(StepFailed):
        world.shell.sm120("recipe", "stop", RECIPE, env=world.container_env)


def tunnel(world: World) -> dict[str, str]:
    """The node's port and Docker on this machine, as one types it for ssh."""
    site = needed(world.site, NODES_STEP)
    there, port = world.short / "n1.sock", world.port
    words = ["-N", "-L", f"{there}:/var/run/docker.sock", "-L", f"{port}:127.0.0.1:{port}", "n1"]
    world.overview.typed(f"$ ssh {' '.join(words)} &")
    command = [find_program("ssh"), "-F", str(site.first.ssh_config), *words]
    log_file = world.folder / "logs" / "ssh.txt"
    process = world.stack.enter_context(daemon(command, log_file, 5))
    if not wait_for(process, there.exists, 30):
        raise LeftOut(f"n1's port cannot be brought here: {log_file.read_text()[-200:]}")
    return {"DOCKER_HOST": f"unix://{there}"}


def smoke(world: World) -> str:
    """Only what any sound server guarantees: this model can but recite."""
    env = needed(world.container_env, SERVE)
    options = ("--no-quality", "--quick", "--json", "--output", str(world.folder / "smoke"))
    done = world.shell.sm120("smoke", RECIPE, *options, env=env)
    result = json.loads(done.out)
    return f"{result['verdict']}, last good rung: {result['last_good']}"


def bench(world: World) -> str:
    """Every raw request is kept, and what stood behind the numbers is stated and signed."""
    env = needed(world.container_env, SERVE)
    options = (
        "--host-facts",
        str(needed(world.facts, FACTS)),
        "--output",
        str(world.folder / "bench"),
    )
    done = world.shell.sm120("bench", RECIPE, *options, "--json", env=env)
    (result,) = json.loads(done.out)
    world.run = world.folder / "bench" / "tiny"
    best = max(result["cells"], key=lambda c: c["intervals"]["output_tok_s"]["mean"])
    mean = best["intervals"]["output_tok_s"]["mean"]
    way = ", through ssh" if world.site else ""
    return f"{mean:,.1f} output tok/s at {best['cell']['name']}{way}"


def report(world: World) -> str:
    run = needed(world.run, BENCH)
    path = world.folder / "report.html"
    others = ("--output", str(path.with_suffix(".md")))
    # what verify will find must be what the page says of it
    world.shell.sm120("report", str(run), "--output", str(path), *others, *look_in(world))
    world.report = path
    return f"{path}: one file that needs no network"


def look_in(world: World) -> list[str]:
    """Where what a report names lies in this folder."""
    folders = [world.weights, world.facts.parent if world.facts else None, world.folder / "bench"]
    return [word for folder in folders if folder for word in ("--look-in", str(folder))]


def verify(world: World) -> str:
    """Without a network: to the host, the image, its patch and wheel, and the weights' files."""
    path = needed(world.report, REPORT)
    # only root may be in a network that has nothing; for others nothing is asked, either
    alone = ("unshare", "--net") if os.geteuid() == 0 else ()
    words = ("verify", str(path), *look_in(world), "--deep", "--json")
    done = world.shell.sm120(*words, before=alone)
    tree = json.loads(done.out)
    return f"{tree['verdict']}: {', '.join(breaks.proved_titles(tree))}"


def break_things(world: World) -> str:
    """One thing of each kind, and who notices."""
    missed = breaks.break_all(world, look_in(world))
    found = f"{len(world.overview.noticed)} breaks, each noticed"
    return f"{found}; left out: {'; '.join(missed)}" if missed else found


Step = Callable[[World], str]
STORY: dict[str, Step] = {
    "A checkout with a patch, and a key": begin,
    WEIGHTS_STEP: weights,
    BUILD: build,
    PUBLISH: publish,
    NODES_STEP: nodes,
    "Provision them over SSH": provision,
    FACTS: facts,
    SERVE: serve,
    "Smoke": smoke,
    BENCH: bench,
    REPORT: report,
    "Walk the number back": verify,
    "Break one thing of each kind": break_things,
}

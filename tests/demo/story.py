"""The story: parts that are started, a plan that runs, and what is walked back and broken.

What a command can do is a stage of `plan.yaml`, which `sm120 run` runs: before there are hosts, and
again after, when it goes on where it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import docker
import yaml
from docker.errors import DockerException

from pipeline.serving.recipe.tiny import tiny_gguf
from tests.demo import breaks
from tests.demo.checkout import IMAGE, RECIPE, REPOSITORY, WEIGHTS, write_checkout, write_recipe
from tests.demo.overview import StepRecord
from tests.demo.shell import StepFailed
from tests.demo.world import BUILD, NODES_STEP, PUBLISH, REPORT, WEIGHTS_STAGE, World, needed
from tests.integration.published import PASSWORD, USER, keep_login
from tests.integration.site import unlocked_site
from tests.testbed.docker_node import start_docker, with_docker
from tests.testbed.dockerd import docker_daemon
from tests.testbed.hub import test_hub
from tests.testbed.own_wheel import REQUIREMENTS, build_wheel, neighbour_serving, wheelhouse
from tests.testbed.packages import CannotHave, find_program
from tests.testbed.playbook import write_inventory
from tests.testbed.ports import unused_port
from tests.testbed.registry import oci_registry

NODES = ("n1", "n2")
PARTS = ["nccl", "host_tuning"]
LOOK_IN = f"--look-in models/{WEIGHTS} --look-in records --look-in bench"


class Stage(NamedTuple):
    """A command of the plan, and what the overview says of its answer."""

    run: str
    says: Callable[[Any], str]
    needs: tuple[str, ...] = ()
    lasts: bool = True


def begin(world: World) -> str:
    """A checkout of a user's own, and a key that signs all that follows."""
    write_checkout(world.checkout)
    # of this machine, which serves where there is no node
    world.port = unused_port()
    write_recipe(world.checkout, world.port)
    world.shell.sm120("evidence", "new-key", "builder")
    return f"{IMAGE} with a patch in {world.checkout}, and a key in {world.folder}/config"


def first_stages(world: World) -> str:
    """A Hub with real bytes and the Hub's own answers; a registry with TLS and a password."""
    hub = world.stack.enter_context(test_hub())
    hub.add(REPOSITORY, {"tiny.gguf": tiny_gguf(), "README.md": b"It can only recite.\n"})
    world.shell.env["HF_ENDPOINT"] = hub.url
    login = world.folder / "login"
    world.stack.callback(shutil.rmtree, login, ignore_errors=True)
    try:
        part = oci_registry(world.folder, tls=True, htpasswd={USER: PASSWORD})
        world.registry = world.stack.enter_context(part)
        config = keep_login(login, world.registry.host_port, f"{USER}:{PASSWORD}")
        world.shell.env["DOCKER_CONFIG"] = config
    except CannotHave as why:
        world.overview.ended(StepRecord(PUBLISH, "left out", result=str(why)))
    return run_plan(world)


def run_plan(world: World) -> str:
    """Write the plan as far as its parts are there, and run what has not run."""
    plan, path = stages(world), world.folder / "plan.yaml"
    body = {
        name: {"run": s.run, "needs": list(s.needs), **({} if s.lasts else {"lasts": False})}
        for name, s in plan.items()
    }
    text = yaml.safe_dump({"format": 1, "stages": body}, sort_keys=False, width=200)
    path.write_text(text, encoding="utf-8")
    done = world.shell.sm120("run", str(path), "--json")
    ran = [row for row in json.loads(done.out)["stages"] if row["state"] == "run"]
    for row in ran:
        (kept,) = (world.folder / "store" / "plans").glob(f"*/{row['stage']}.log")
        record = StepRecord(row["stage"], "done", row["seconds"])
        record.result = plan[row["stage"]].says(answer_of(kept.read_text(encoding="utf-8")))
        world.overview.ended(record)
    return f"{len(ran)} of {len(plan)} stages ran; {path}"


def answer_of(text: str) -> Any:
    """The JSON among the lines of a command's progress; None where there is none."""
    for found in re.finditer(r"^[{\[]", text, re.M):
        with suppress(ValueError):
            return json.JSONDecoder().raw_decode(text, found.start())[0]
    return None


def stages(world: World) -> dict[str, Stage]:
    """The plan, without what this machine cannot have."""
    models, plan = world.folder / "models" / WEIGHTS, dict[str, Stage]()

    def proved(told: Any) -> str:
        (found,), world.weights = told["sets"], models
        return f"{found['files']} files are as locked, by {found['lock'][:19]}…"

    def built(told: Any) -> str:
        (image,) = told
        world.image = image["digest"]
        gates = [f"gate {x['gate']} {x['verdict']}" for x in image["gates"]["results"]]
        statements = len(image["evidence"]["statements"])
        return f"{world.image}, {', '.join(gates)}, {statements} statements, signed"

    def measured(told: Any) -> str:
        cells = told[0]["cells"]
        best = max(cells, key=lambda c: c["intervals"]["output_tok_s"]["mean"])
        mean = best["intervals"]["output_tok_s"]["mean"]
        way = ", through ssh" if world.site else ""
        return f"{mean:,.1f} output tok/s at {best['cell']['name']}{way}"

    def reported(_: Any) -> str:
        world.report = world.folder / "report.html"
        return f"{world.report}: one file that needs no network"

    plan["lock"] = Stage(f"weights lock {WEIGHTS}", lambda _: "as the Hub has it")
    fetch, verify = f"weights fetch {WEIGHTS} --output ", f"weights verify models/{WEIGHTS} --full"
    plan[WEIGHTS_STAGE] = Stage(f"{fetch}models/{WEIGHTS}", lambda _: str(models), ("lock",))
    plan["proof"] = Stage(f"{verify} --json", proved, (WEIGHTS_STAGE,))
    # assembled from locked wheels and packages with our patch, judged, stated and signed
    plan[BUILD] = Stage(f"build {IMAGE} --platform host --accept --gate --json", built)
    if world.registry:
        place, ca = f"{world.place_of(IMAGE)}:v1", f"--ca {world.registry.ca_file}"
        push = f"publish {IMAGE} {place} --platform host {ca}"
        plan[PUBLISH] = Stage(push, lambda _: place, (BUILD,))
        # from there, down to each byte
        check = f"verify {place} --deep {ca} --json"
        plan["published"] = Stage(check, lambda told: f"{place} is {told['verdict']}", (PUBLISH,))
    facts, hosts = "this-machine", tuple[str, ...]()
    if site := world.site:
        facts, hosts = "n1", ("hosts",)
        given = f"--repository {site.repository.url} --keyring {site.repository.keyring}"
        lock = f"host lock --target {site.system.target} {given}"
        plan["packages"] = Stage(lock, lambda _: f"of {site.system.target}, each by its hash")
        provision = "host provision -i inventory.json -e sm120_batches=100%"
        result = "both hosts are as locked, and n1 has the weights"
        plan["provision"] = Stage(provision, lambda _: result, ("packages", "proof"))

        # every promise of every role, proved over SSH
        def kept(told: Any) -> str:
            promises = sum(len(host["rows"]) for host in told["hosts"])
            return f"{promises} promises hold on {len(told['hosts'])} hosts"

        plan["hosts"] = Stage("host verify -i inventory.json --json", kept, ("provision",))
    if not (world.folder / "records").exists() and not site:
        return plan
    signed = f"verify records/{facts}.json"
    plan["record"] = Stage(signed, lambda _: f"what {facts} is, signed", hosts)
    if "DOCKER_HOST" not in world.shell.env and not site:
        return plan
    on = " --on n1 -i inventory.json" if site else ""
    models_there = f"/models/{WEIGHTS}" if site else f"models/{WEIGHTS}"
    where = "on n1" if site else "on this machine"
    plan["serve"] = Stage(
        # the container is compared with what was built; its log must show the patch
        f"serve {RECIPE} --weights {models_there}{on}",
        lambda _: f"{where}, port {world.port}, {(world.image or '')[:19]}…, proved weights",
        (*hosts, BUILD, "proof"),
        lasts=False,
    )
    plan["smoke"] = Stage(
        # only what any sound server guarantees: this model can but recite
        f"smoke {RECIPE}{on} --no-quality --quick --json --output smoke",
        lambda told: f"{told['verdict']}, last good rung: {told['last_good']}",
        ("serve",),
    )
    # every raw request is kept, and what stood behind the numbers is stated and signed
    bench = f"bench {RECIPE}{on} --host-facts records/{facts}.json --output bench --json"
    plan["bench"] = Stage(bench, measured, ("serve", "smoke", "record"))
    # what verify will find must be what the page says of it
    page = f"report bench/tiny --output report.html --output report.md {LOOK_IN}"
    plan[REPORT] = Stage(page, reported, ("bench",))
    return plan


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


def last_stages(world: World) -> str:
    """Over SSH: settings and checks on both hosts, the weights and the engine on the first."""
    if world.site is None:
        return without_nodes(world)
    site, place = world.site, needed(world.weights, WEIGHTS_STAGE)
    site.first.put(wheelhouse(world.folder / "wheels"), "/srv/wheels")
    shutil.rmtree(world.folder / "wheels")
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
        values = {**site.values, "sm120_batches": "100%", "sm120_parts": PARTS}
        write_inventory(world.inventory, site.fleet, values, host_values={"n1": own})
        return run_plan(world)


def without_nodes(world: World) -> str:
    """This machine is the host, and serves where a Docker answers."""
    facts = world.folder / "records" / "this-machine.json"
    facts.parent.mkdir()
    done = world.shell.sm120("host", "facts", "--name", "this-machine", "--json")
    facts.write_text(done.out, encoding="utf-8")
    world.shell.sm120("host", "attest", str(facts))
    # our own daemon, else the user's
    address = world.daemon.socket_url if world.daemon else os.environ.get("DOCKER_HOST")
    address = address or "unix:///var/run/docker.sock"
    try:
        docker.DockerClient(base_url=address, timeout=5).ping()
        world.shell.env["DOCKER_HOST"] = address
    except DockerException:
        why = "there is no node, and no Docker answers here"
        world.overview.ended(StepRecord("serve", "left out", result=why))
    try:
        return run_plan(world)
    finally:
        # whatever came of it: no container stays
        with suppress(StepFailed):
            world.shell.sm120("recipe", "stop", RECIPE)


def look_in(world: World) -> list[str]:
    """Where what a report names lies in this folder."""
    folders = [world.weights, world.folder / "records", world.folder / "bench"]
    there = [folder for folder in folders if folder and folder.exists()]
    return [word for folder in there for word in ("--look-in", str(folder))]


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
    "A plan: weights, an image, a registry": first_stages,
    NODES_STEP: nodes,
    "The plan goes on: hosts, an engine, a number": last_stages,
    "Walk the number back": verify,
    "Break one thing of each kind": break_things,
}

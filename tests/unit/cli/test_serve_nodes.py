"""`sm120 serve RECIPE --on A,B`: a rank on each host. The containers and hosts are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.app import serve as serve_module
from pipeline.app.serve import RemoteHost
from pipeline.core.known import Known
from pipeline.serving.serve.site import Site
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.support import Command, Ended

pytestmark = pytest.mark.usefixtures("checkout")
HOSTS = ("--on", "rig1,rig2", "--hosts", "10.0.0.1,10.0.0.2")


@dataclass
class Rig(Site):
    """Another host."""

    name: str
    clock: float = 0.0
    port: str = ""

    @property
    def host(self) -> str:
        return self.name

    def port_problem(self, port: int) -> Known[str]:
        return self.port

    def clock_s(self) -> Known[float]:
        return self.clock


class Nodes(LiveRecipe):
    """Two hosts: the first has the model server, the second a worker."""

    rigs: dict[str, Rig]
    worker: FakeEngine

    def on_both(self, *more: str) -> Ended:
        return self.serve(*HOSTS, *more)


@pytest.fixture
def world(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Nodes]:
    with live_recipe(sm120, monkeypatch, tmp_path, Nodes) as world:
        world.rigs = {name: Rig(name) for name in ("rig1", "rig2")}
        world.worker = FakeEngine(images=dict(world.engine.images))
        world.worker.image_of_container = world.engine.image_of_container
        world.recipe(nodes=2)

        @contextmanager
        def machine(workspace: object, on: RemoteHost, *more: object) -> Iterator[Any]:
            engine = world.engine if on.host == "rig1" else world.worker
            yield world.rigs[on.host], engine

        monkeypatch.setattr(serve_module, "machine_on", machine)
        yield world


def test_the_workers_start_first_and_the_first_host_answers(world: Nodes) -> None:
    done = world.on_both()
    assert done.code == 0, done.err
    (first,), (second,) = world.engine.created, world.worker.created
    assert first.arguments[-10:] == [
        *("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1"),
        *("--master-port", "29501", "--host", "127.0.0.1"),
    ]
    assert second.arguments[-1] == "--headless"
    assert (first.host_network, second.host_network) == (True, True)
    assert (first.labels["sm120.rank"], second.labels["sm120.rank"]) == ("0/2", "1/2")
    assert second.environment["VLLM_HOST_IP"] == "10.0.0.2"
    assert "rig2: rank 1 started" in done.err
    assert "ssh -N -L" in done.out
    assert "rig1` brings it" in done.out
    kept = [(each["host"], each["outcome"]) for each in world.attempts()]
    assert kept == [("rig2", "serving"), ("rig1", "serving")]


def test_a_worker_that_ends_ends_the_start_and_no_rank_stays(world: Nodes) -> None:
    world.worker.ends_with = 3
    world.worker.log = [b"NCCL WARN no route\n"]
    # rank 0 waits for the others for ever, as engines do
    world.engine.start = lambda identity: None  # type: ignore[method-assign]
    done = world.on_both("--timeout", "5")
    assert done.error == "StartFailed"
    assert "rank 1 ended (3)" in done.err
    assert world.engine.known == world.worker.known == {}


def test_a_first_rank_that_never_answers_takes_the_workers_along(world: Nodes) -> None:
    world.engine.start = lambda identity: None  # type: ignore[method-assign]
    done = world.on_both("--timeout", "1")
    assert done.error == "StartFailed"
    assert "did not answer within" in done.err
    assert world.worker.known == {}
    assert [each["outcome"] for each in world.attempts()] == ["stopped", "failed"]


def test_a_dry_run_compares_the_nodes_and_names_every_container(world: Nodes) -> None:
    done = world.on_both("--dry-run", "--json")
    assert done.code == 0, done.err
    subjects = [row["subject"] for row in done.json["checks"] if row["rule"] == "nodes"]
    assert subjects == ["platform", "image", "driver", "cards", "addresses", "ports", "clocks"]
    assert [command[-1] for command in done.json["commands"]] == ["127.0.0.1", "--headless"]
    assert world.engine.created == world.worker.created == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clock": 99.0}, "nodes: clocks: are 99.0 s apart"),
        ({"port": "Address already in use"}, "nodes: ports: rig2: "),
    ],
)
def test_nodes_that_are_not_equal_start_nothing(
    world: Nodes, changes: dict[str, Any], message: str
) -> None:
    world.rigs["rig2"] = Rig("rig2", **changes)
    done = world.on_both()
    assert done.error == "PreflightFailed"
    assert message in done.err
    assert world.engine.created == world.worker.created == []


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--on", "rig1,rig2,rig3"), "RecipeInvalid", "is for 2 nodes, and --on names 3"),
        (("--on", "rig1"), "RecipeInvalid", "brainy: is for 2 nodes"),
        ((*HOSTS[:3], "10.0.0.1,10.0.0.1"), "RecipeInvalid", "and 1 are named"),
        (("--on", "rig1", *HOSTS[2:]), "", "--hosts are the addresses of several hosts"),
        ((*HOSTS, "--with-fallback"), "", "are for one host"),
    ],
)
def test_hosts_that_do_not_fit_the_recipe_are_refused(
    world: Nodes, words: tuple[str, ...], error: str, message: str
) -> None:
    done = world.serve(*words)
    assert done.code == (10 if error else 2), done
    assert message in done.err
    assert world.engine.created == world.worker.created == []


def test_one_command_stops_all_ranks(world: Nodes) -> None:
    assert world.on_both().code == 0
    done = world.sm120("recipe", "stop", "brainy", "--on", "rig1,rig2")
    assert done.code == 0, done.err
    assert world.engine.known == world.worker.known == {}


def test_what_asks_one_server_takes_one_host() -> None:
    hosts = RemoteHost("rig1,rig2", ("inventory.yml",)).each()
    assert [each.words() for each in hosts] == [
        "--on rig1 -i inventory.yml",
        "--on rig2 -i inventory.yml",
    ]


def test_a_command_for_one_server_refuses_several_hosts(sm120: Command) -> None:
    done = sm120("recipe", "logs", "brainy", "--on", "rig1,rig2")
    assert done.error == "HostUnreached"
    assert "names several hosts, of which only the first answers clients" in done.err
    assert "--on rig1." in done.err


@pytest.mark.parametrize("option", ["--serve", "--restart"])
def test_a_test_restarts_no_rank_alone(world: Nodes, option: str) -> None:
    done = world.sm120("smoke", "brainy", "--on", "rig1", option)
    assert done.error == "RecipeInvalid"
    assert "its 2 ranks can only be started together" in done.err

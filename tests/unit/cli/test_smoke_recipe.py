"""`sm120 smoke RECIPE`: what was served is found, restarted, rolled back, kept and stated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from pipeline.app import bench as bench_module
from pipeline.app import serve as job_module
from pipeline.app.serve import RemoteHost
from pipeline.images.gate.runs import ImageRun, ImageRuns
from pipeline.serving.bench.record import read_run
from pipeline.serving.bench.stub import Pacing
from pipeline.serving.serve.site import Site
from tests.testbed.bench_faults import FaultyConnection
from tests.testbed.bench_faults import World as StubWorld
from tests.testbed.model_faults import FAULTS
from tests.testbed.model_server import Asked, Fault, Refusal
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.support import Command, Ended

pytestmark = pytest.mark.usefixtures("checkout")
SMALL = ("--quick", "--lengths", "4", "--pressure", "2")
DRAFTS = {"method": "mtp", "tokens": 3, "source": "ours"}


def fault(name: str) -> Fault:
    return next(each for each in FAULTS if each.name == name)


class World(LiveRecipe):
    """A smoke test of the recipe, and what is kept of it."""

    def smoke(self, *more: str) -> Ended:
        return self.sm120("smoke", "brainy", *SMALL, *more)

    def timeline(self) -> list[tuple[str, str, bool | None]]:
        """What was tried, how it ended, and whether its draft model was on."""
        return [
            (
                row["kind"],
                row["ends"][0]["outcome"],
                (row["options"] or {}).get("overrides", {}).get("enable_eagle3"),
            )
            for row in self.attempts()
        ]

    def runs(self) -> list[ImageRun]:
        path = next(self.store.glob("images/tiny/*/runs.json"))
        return ImageRuns.model_validate_json(path.read_bytes()).runs


@pytest.fixture
def world(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with live_recipe(sm120, monkeypatch, tmp_path, World) as made:
        yield made


def test_what_is_served_is_found_tested_restarted_and_kept_with_its_digests(world: World) -> None:
    world.serve()
    result = world.smoke("--restart", "--json").json
    assert (result["verdict"], result["last_good"]) == ("passed", "memory")
    checks = {c["name"]: c for rung in result["rungs"] for c in rung["checks"]}
    assert checks["restart"]["verdict"] == "passed"
    assert world.engine.model.restarts == 1
    serve, smoke = world.attempts()
    assert (smoke["kind"], smoke["outcome"], smoke["id"]) == ("smoke", "passed", result["attempt"])
    assert (smoke["image_digest"], smoke["after"]) == (world.digest, serve["id"])
    assert smoke["recipe_digest"] == serve["recipe_digest"]


def test_a_result_is_stated_of_the_image_with_what_else_ran(world: World) -> None:
    world.serve()
    assert world.smoke("--up-to", "first-answer").code == 0
    (run,) = world.runs()
    assert (run.verdict, run.recipe, run.last_good) == ("passed", "brainy", "first-answer")
    assert {"recipes/brainy.yaml", "recipe", "exchanges.jsonl"} <= set(run.inputs)
    world.engine.model.fault = fault("wrong arithmetic")
    assert world.smoke("--up-to", "answers").error == "SmokeFailed"
    (run,) = world.runs()
    assert (run.verdict, run.last_good) == ("failed", "first-answer")


def test_a_failed_ladder_is_kept_with_its_reason(world: World) -> None:
    world.recipe(fallback="other")
    world.serve()
    world.engine.model.fault = fault("content null")
    ended = world.smoke()
    assert (ended.code, ended.error) == (92, "SmokeFailed")
    assert "`sm120 smoke other --serve`" in ended.err
    last = world.attempts()[-1]
    assert (last["kind"], last["outcome"]) == ("smoke", "failed")
    assert "first-answer: one answer: content is null" in last["failure"]


def test_what_was_kept_from_before_a_restart_is_caught(world: World) -> None:
    world.serve()
    world.engine.model.fault = fault("stale KV after restart")
    ended = world.smoke("--restart")
    assert ended.error == "SmokeFailed"
    assert "memory: restart" in ended.err
    assert "last good rung: responses" in ended.out


def test_a_server_that_does_not_come_back_after_a_restart_fails_the_rung(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve()
    monkeypatch.setattr(world.engine, "start", lambda identity: world.engine.known.clear())
    ended = world.smoke("--restart")
    assert ended.error == "SmokeFailed"
    assert "memory: restart: sm120-brainy: is gone after a restart" in ended.err


def test_a_server_that_goes_on_although_it_was_stopped_is_no_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve()
    monkeypatch.setattr(world.engine, "stop", lambda identity, timeout_s: None)
    assert "still answers" in world.smoke("--restart").err


def test_without_leave_nothing_is_restarted(world: World) -> None:
    world.recipe(speculation=DRAFTS)
    world.serve("--enable-eagle3")
    result = world.smoke("--json").json
    assert result["verdict"] == "passed"
    skipped = {c["name"]: c["message"] for r in result["rungs"] for c in r["checks"]}
    assert skipped["restart"] == skipped["draft model"] == "only with --restart"
    assert world.engine.stopped == []
    assert world.engine.model.is_drafting


def test_a_draft_model_is_turned_on_last_and_stays_where_it_changes_nothing(world: World) -> None:
    world.recipe(speculation=DRAFTS)
    world.serve("--enable-eagle3")
    result = world.smoke("--restart", "--json").json
    assert (result["verdict"], result["last_good"]) == ("passed", "speculation")
    assert world.engine.model.is_drafting
    assert world.timeline() == [
        ("serve", "serving", True),
        ("serve", "serving", False),
        ("smoke", "passed", None),
        ("serve", "serving", True),
    ]


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("draft changes answers when it is turned on", "serving"),
        ("draft breaks JSON", "serving"),
        ("draft model does not come up", "failed"),
    ],
)
def test_a_draft_model_that_does_not_hold_is_taken_back(
    world: World, name: str, outcome: str
) -> None:
    world.recipe(speculation=DRAFTS)
    world.serve("--enable-eagle3")
    world.engine.model.fault = fault(name)
    ended = world.smoke("--restart")
    assert (ended.code, ended.error) == (92, "SmokeFailed")
    assert "speculation: " in ended.err
    assert "It is served without its draft model now." in ended.err
    assert not world.engine.model.is_drafting
    assert world.sm120("recipe", "status", "--json").json[0]["healthy"]
    *_, smoke, drafting, rolled_back = world.attempts()
    assert (smoke["kind"], smoke["outcome"]) == ("smoke", "failed")
    assert drafting["ends"][0]["outcome"] == outcome
    assert (rolled_back["kind"], rolled_back["after"]) == ("serve", smoke["id"])
    assert rolled_back["options"]["overrides"]["enable_eagle3"] is False


def test_a_rung_before_the_last_leaves_it_without_its_draft_model(world: World) -> None:
    world.recipe(speculation=DRAFTS)
    world.serve("--enable-eagle3")
    world.engine.model.fault = fault("wrong arithmetic")
    ended = world.smoke("--restart")
    assert "answers: arithmetic" in ended.err
    assert [row[2] for row in world.timeline()] == [True, False, None]


def test_a_recipe_can_be_started_for_the_test_and_is_stopped_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = world.sm120.cwd / "recipes"
    body = yaml.safe_load((folder / "brainy.yaml").read_text())
    model = {"tiny": True, "file": "tiny.gguf", "name": "brain-1"}
    body |= {"engine": "llama-cpp", "model": model}
    (folder / "brainy.yaml").write_text(yaml.safe_dump(body))
    world.engine.model.can_count_only = True
    monkeypatch.setattr(job_module, "_refused", lambda checkout, launch: ())
    result = world.smoke("--serve", "--json").json
    assert (result["verdict"], result["last_good"]) == ("passed", "memory")
    assert world.engine.known == {}
    assert [row[:2] for row in world.timeline()] == [("serve", "serving"), ("smoke", "passed")]
    world.engine.model.fault = fault("content null")
    assert world.smoke("--serve").error == "SmokeFailed"
    assert world.engine.known == {}


def test_what_is_not_served_is_said_with_the_commands_that_start_it(world: World) -> None:
    ended = world.smoke()
    assert ended.error == "NothingServed"
    assert "`sm120 serve brainy`" in ended.err
    assert "`sm120 smoke brainy --serve`" in ended.err
    assert world.attempts() == []


def test_a_container_that_does_not_answer_or_is_of_another_image_is_not_tested(
    world: World,
) -> None:
    world.serve()
    world.engine.live.close()
    assert world.smoke().error == "ServerGone"
    world.engine.live.open()
    facts = world.engine.known["sm120-brainy"]
    world.engine.known["sm120-brainy"] = facts.model_copy(update={"image": "sha256:" + "9" * 64})
    assert world.smoke().error == "ImageDiffers"


def test_a_recipe_that_changed_since_it_was_served_is_not_tested(world: World) -> None:
    world.serve()
    world.recipe(summary="another one")
    ended = world.smoke()
    assert ended.error == "RecipeInvalid"
    assert "has changed since it was served" in ended.err


def test_a_smoke_test_at_an_address_is_kept_where_a_recipe_is_named(world: World) -> None:
    world.engine.live.open()
    url = f"http://127.0.0.1:{world.engine.live.port}"
    words = ("smoke", url, *SMALL, "--up-to", "first-answer")
    assert world.sm120(*words).code == 0
    assert world.attempts() == []
    assert world.sm120(*words, "--recipe", "brainy").code == 0
    (row,) = world.attempts()
    assert (row["kind"], row["outcome"], row["image_digest"]) == ("smoke", "passed", None)


@pytest.mark.parametrize(
    "words",
    [
        ("http://127.0.0.1:9", "--serve"),
        ("http://127.0.0.1:9", "--weights", "."),
        ("http://127.0.0.1:9", "--restart"),
        ("brainy", "--recipe", "brainy"),
        ("brainy", "--weights", "."),
    ],
)
def test_options_of_the_other_kind_of_target_are_refused(
    world: World, words: tuple[str, ...]
) -> None:
    assert world.sm120("smoke", *words).code == 2


def test_a_recipe_that_nobody_knows_is_refused(world: World) -> None:
    assert world.sm120("smoke", "nobody").error == "UnknownRecipe"


class NearSite(Site):
    """This machine as another host's site sees it: its port is a socket here."""

    host = "rig1"

    def __init__(self, socket: Path, port: int) -> None:
        self.socket, self.port = socket, port

    def door(self, port: int) -> Path:
        assert port == self.port
        return self.socket


def test_a_benchmark_of_a_recipe_on_another_host_goes_through_its_connection(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world.serve()
    live, socket = world.engine.live, tmp_path / "door.sock"
    loop = live._loop

    stub = StubWorld(fault="", pacing=Pacing(0.01, 0.002))
    making = loop.create_unix_server(lambda: FaultyConnection(stub), socket)
    running = asyncio.run_coroutine_threadsafe(making, loop).result(30)

    @contextmanager
    def near(context: object, on: RemoteHost | None, wanted: object) -> Iterator[object]:
        assert on is not None
        yield NearSite(socket, live.port), [world.engine]

    monkeypatch.setattr(bench_module, "machine_of_all", near)
    monkeypatch.setattr("pipeline.serving.serve.run.is_healthy", lambda door: door == socket)
    small = (
        "--concurrency",
        "1",
        "--requests",
        "2",
        "--input-tokens",
        "60",
        "--output-tokens",
        "5",
    )
    words = ("--on", "rig1", *small, "--repeats", "1", "--model", "stub")
    ended = world.sm120("bench", "brainy", *words, "--no-self-test", "--output", tmp_path / "out")
    loop.call_soon_threadsafe(running.close)
    assert "through the SSH connection to rig1" in ended.err
    run = read_run(tmp_path / "out" / "quick")
    assert run.server.url == f"http://127.0.0.1:{live.port} on rig1, through SSH"
    assert run.cells[0].trials[0].metrics.completed == 2
    wrong = world.sm120("bench", "gpu1:8000", "--on", "rig1")
    assert (wrong.code, "--on is for a recipe" in wrong.err) == (2, True)


LADDER_WORDS = ("--context-ladder", "--contexts", "1024,2048,4096")


def contexts_served(world: World) -> list[str]:
    """The context of each container that was made, in order."""
    words = [made.arguments for made in world.engine.created]
    return [each[each.index("--max-model-len") + 1] for each in words]


def test_a_ladder_of_contexts_keeps_the_last_good_one(world: World) -> None:
    world.engine.model.context = 2048
    ended = world.serve(*LADDER_WORDS)
    assert ended.code == 0, ended.err
    assert "brainy is served with 2048 tokens of context" in ended.out
    assert "No more: 4096 tokens: context 4096: the recipe expects 4096 tokens" in ended.out
    assert contexts_served(world) == ["1024", "2048", "4096", "2048"]
    assert world.sm120("recipe", "status", "--json").json[0]["healthy"]
    kinds = [(row["kind"], row["outcome"]) for row in world.attempts()]
    assert kinds.count(("smoke", "passed")) == 2
    assert kinds.count(("smoke", "failed")) == 1


def test_a_ladder_whose_first_step_fails_leaves_nothing_served(world: World) -> None:
    world.engine.model.fault = fault("content null")
    ended = world.serve(*LADDER_WORDS)
    assert ended.error == "SmokeFailed"
    assert world.engine.known == {}
    assert contexts_served(world) == ["1024"]


def test_a_ladder_does_not_end_what_is_served_already(world: World) -> None:
    world.serve()
    ended = world.serve(*LADDER_WORDS)
    assert ended.error == "AlreadyServed"
    assert world.engine.stopped == []
    for words in (("--contexts", "1024"), ("--context-ladder", "--max-model-len", "1024")):
        assert world.serve(*words).code == 2


def _refuses_tools(asked: Asked) -> None:
    if "tools" in asked.body:
        raise Refusal(400, "tools are not supported by this server")


def _has_no_messages(asked: Asked) -> None:
    _refuses_tools(asked)
    if asked.path == "/v1/messages":
        raise Refusal(404, "Not Found")


@pytest.mark.parametrize(
    ("server", "more"),
    [
        (Fault(asked=_refuses_tools), ()),
        # the whole rung is skipped
        (Fault(asked=_has_no_messages), ("--no-quality",)),
        (Fault(), ()),
    ],
    ids=["tools refused", "neither tools nor messages", "with tools"],
)
def test_a_recipe_without_tools_passes_whether_or_not_the_server_has_them(
    world: World, server: Fault, more: tuple[str, ...]
) -> None:
    world.recipe(smoke={"streams": [1, 2], "tools": True})
    path = world.sm120.cwd / "recipes" / "without-tools.yaml"
    path.write_text("name: without-tools\nextends: brainy\nsmoke: {tools: false}\n")
    world.engine.model.fault = server
    skipped = ("--skip-preflight", "weights", "--skip-preflight", "flags")
    world.sm120("serve", "without-tools", "--weights", world.weights, *skipped)
    ended = world.sm120("smoke", "without-tools", *SMALL, *more, "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["verdict"], ended.json["last_good"]) == ("passed", "memory")
    calls = {"scenarios", "parallel calls", "tool result", "tool calls at once"}
    checks = [c for rung in ended.json["rungs"] for c in rung["checks"] if c["name"] in calls]
    assert {c["name"]: c["verdict"] for c in checks} == dict.fromkeys(calls, "skipped")
    (run,) = world.runs()
    assert (run.recipe, run.verdict) == ("without-tools", "passed")


def test_a_recipe_with_tools_fails_where_the_server_refuses_them(world: World) -> None:
    world.engine.model.fault = Fault(asked=_refuses_tools)
    world.serve()
    ended = world.smoke()
    assert ended.error == "SmokeFailed"
    assert "tools are refused (--no-tools expects none)" in ended.err

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from pipeline.app import serve as job_module
from pipeline.app import serve as on_host_module
from pipeline.artifacts.attest.statement import stamp
from pipeline.artifacts.containers.facts import own_user
from pipeline.core.errors import StartFailed
from pipeline.core.yaml_file import read_yaml
from pipeline.hosts.fleet.tunnel import Tunnel
from pipeline.images.engine.parser_flags import ParserFlags, flags_folder, write_parser_flags
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.serve import run as run_module
from pipeline.serving.serve.attempts import AttemptList, Begun
from pipeline.serving.serve.run import ServeJob
from pipeline.serving.serve.site import RemoteSite
from pipeline.serving.serve.start import Served
from tests.testbed.ports import unused_port
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.near_tunnel import NearTunnel, said
from tests.unit.support import AMD64, ROOT, Command, build_tiny

pytestmark = pytest.mark.usefixtures("checkout")
PORT = unused_port()


class World:
    """A checkout with a built image `tiny`, a folder of recipes and a container engine."""

    def __init__(self, sm120: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sm120, self.engine = sm120, FakeEngine()
        self.jobs: list[ServeJob] = []
        self.failing: set[str] = set()
        monkeypatch.setattr(on_host_module, "find_engine", lambda wanted: self.engine)
        monkeypatch.setattr(on_host_module, "find_engines", lambda wanted: [self.engine])
        monkeypatch.setattr(job_module, "pick_platform", lambda spec, chosen: AMD64)
        monkeypatch.setattr("pipeline.app.images.pick_platform", lambda spec, chosen: AMD64)
        monkeypatch.setattr(run_module, "start_engine", self.start)

    def start(self, engine: Any, store: Any, start: Any) -> Served:
        if start.name in self.failing:
            raise StartFailed(f"{start.name}: ended")
        self.jobs.append(start)
        return Served(f"sm120-{start.name}", "http://127.0.0.1:1/v1", start.launch.model, 1.5)

    def recipe(self, name: str, **changes: Any) -> None:
        body = {
            "name": name,
            "summary": "a tiny model",
            "backing": "proved",
            "sources": {"ours": {"kind": "ours", "title": "this project", "why": "a test"}},
            "image": "tiny",
            "engine": "llama-cpp",
            "model": {"tiny": True, "file": "tiny.gguf", "name": "tiny"},
            "hardware": {"cards": 0},
            "port": PORT,
            **changes,
        }
        folder = self.sm120.cwd / "recipes"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(body))


@pytest.fixture
def world(sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> World:
    assert build_tiny(sm120, "--platform", AMD64, "--accept").code == 0
    shipped = read_yaml(flags_folder(Checkout(ROOT)) / "llama-cpp-cpu.yaml", ParserFlags)
    write_parser_flags(flags_folder(checkout), shipped.model_copy(update={"image": "tiny"}))
    return World(sm120, monkeypatch)


def test_a_dry_run_shows_checks_and_container_and_starts_nothing(world: World) -> None:
    world.recipe("one")
    ended = world.sm120("serve", "one", "--dry-run")
    assert ended.code == 0
    assert "port" in ended.out
    assert f"--publish=127.0.0.1:{PORT}:{PORT}" in ended.out
    answer = world.sm120("serve", "one", "--dry-run", "--json").json
    assert {row["verdict"] for row in answer["checks"]} <= {"passed", "not applicable"}
    assert answer["command"][-2:] == ["--port", str(PORT)]
    assert world.jobs == []
    assert world.sm120("recipe", "attempts", "--json").json == []


def test_a_dry_run_writes_nothing_to_the_store(world: World) -> None:
    world.recipe("one")
    root = Path(os.environ["SM120_STORE"])
    before = sorted(root.rglob("*"))
    command = world.sm120("serve", "one", "--dry-run", "--json").json["command"]
    assert sorted(root.rglob("*")) == before
    # the same folder as that of a start
    assert world.sm120("serve", "one").code == 0
    (weights,) = (root / "tiny").iterdir()
    assert any(str(weights) in word for word in command)


def test_a_dry_run_makes_no_store(world: World) -> None:
    world.recipe("one")
    ended = world.sm120("--store", world.sm120.cwd / "none", "serve", "one", "--dry-run")
    assert ended.error == "PreflightFailed"
    assert not (world.sm120.cwd / "none").exists()


def test_a_dry_run_ends_with_the_error_that_the_start_would_have(world: World) -> None:
    world.recipe("wrong", flags={"ours": {"extra": ["--ctx-sizes", "512"]}})
    ended = world.sm120("serve", "wrong", "--dry-run")
    assert (ended.error, world.jobs) == ("PreflightFailed", []), ended
    assert "failed" in ended.out


def test_a_flag_that_the_engine_does_not_know_stops_before_anything_starts(world: World) -> None:
    world.recipe("wrong", flags={"ours": {"extra": ["--ctx-sizes", "512"]}})
    ended = world.sm120("serve", "wrong")
    assert (ended.error, ended.code) == ("PreflightFailed", 91)
    assert "--ctx-sizes: is no flag of llama.cpp" in ended.err
    assert "did you mean --ctx-size" in ended.err
    assert world.jobs == []
    assert world.sm120("serve", "wrong", "--skip-preflight", "flags").code == 0


def test_an_image_whose_flags_nobody_read_is_not_taken_on_trust(
    world: World, checkout: Checkout
) -> None:
    (flags_folder(checkout) / "tiny.yaml").unlink()
    world.recipe("tiny-cpu")
    ended = world.sm120("serve", "tiny-cpu")
    assert (ended.error, world.jobs) == ("PreflightFailed", [])
    assert "`sm120 recipe flags tiny --accept` reads them" in ended.err


def attempts(world: World) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = world.sm120("recipe", "attempts", "--json").json
    return rows


def test_a_recipe_of_the_checkout_is_served_and_kept(world: World) -> None:
    world.recipe("tiny-cpu")
    answer = world.sm120("serve", "tiny-cpu", "--json").json
    (attempt,) = attempts(world)
    assert answer["attempt"] == attempt["id"]
    assert (attempt["outcome"], attempt["recipe"]) == ("serving", "tiny-cpu")
    assert "tiny is served at" in world.sm120("serve", "tiny-cpu").out


def test_options_come_before_variables_and_variables_before_the_recipe(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.recipe("tiny-cpu", overrides=["PORT", "SERVED_MODEL_NAME"])
    monkeypatch.setenv("PORT", "18997")
    monkeypatch.setenv("SERVED_MODEL_NAME", "named")
    world.sm120("serve", "tiny-cpu")
    world.sm120("serve", "tiny-cpu", "--port", "18998")
    first, second = (job.launch for job in world.jobs)
    assert (first.port, first.model) == (18997, "named")
    assert (second.port, second.model) == (18998, "named")


def test_a_fallback_is_offered_and_tried_only_where_it_is_wanted(world: World) -> None:
    world.recipe("first", fallback="second")
    world.recipe("second")
    world.failing = {"first"}
    ended = world.sm120("serve", "first")
    assert ended.error == "StartFailed"
    assert "`sm120 serve second`" in ended.err
    assert world.sm120("serve", "first", "--with-fallback", "--json").json["recipe"] == "second"
    outcomes = [(row["recipe"], row["outcome"]) for row in attempts(world)]
    assert outcomes == [("first", "failed"), ("first", "failed"), ("second", "serving")]


def test_where_the_fallback_fails_too_its_error_is_the_last(world: World) -> None:
    world.recipe("first", fallback="second")
    world.recipe("second", fallback="first")
    world.failing = {"first", "second"}
    ended = world.sm120("serve", "first", "--with-fallback")
    assert ended.error == "RecipeInvalid"
    assert "first → second → first has no end" in ended.err


def test_an_image_that_is_not_built_stops_at_preflight(world: World, tmp_path: Path) -> None:
    world.recipe("tiny-cpu")
    ended = world.sm120("--store", tmp_path / "other", "serve", "tiny-cpu")
    assert ended.error == "PreflightFailed"
    assert "sm120 build tiny" in ended.err


def test_a_recipe_without_a_container_is_not_for_serving(world: World) -> None:
    world.recipe("bare", image=None)
    ended = world.sm120("serve", "bare")
    assert ended.error == "RecipeInvalid"
    assert "--as shell" in ended.err


def test_weights_must_be_named(world: World) -> None:
    model = {"repository": "org/kimi", "name": "kimi", "file": "a.gguf"}
    world.recipe("kimi", model=model)
    ended = world.sm120("serve", "kimi")
    assert ended.error == "PreflightFailed"
    assert "--weights" in ended.err
    skipped = world.sm120("serve", "kimi", "--skip-preflight", "weights")
    assert skipped.error == "WeightsUnknown"


def test_the_variable_names_a_folder_and_the_option_comes_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = {"repository": "org/kimi", "name": "kimi"}
    world.recipe("kimi", engine="vllm", model=model, overrides=["MODEL_PATH"])
    # the image has another engine than the recipe says
    words = ("serve", "kimi", "--skip-preflight", "weights", "--skip-preflight", "flags")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    monkeypatch.setenv("MODEL_PATH", str(first))
    assert world.sm120(*words).code == 0
    assert world.sm120(*words, "--weights", second).code == 0
    hosts = [[mount.host for mount in job.launch.mounts] for job in world.jobs]
    assert hosts == [[str(first)], [str(second)]]
    assert all(job.launch.arguments[0] == "/models" for job in world.jobs)


def test_snapshots_of_a_hub_cache_are_mounted_with_the_blobs_that_their_links_lead_to(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the model, of its draft model, and of a link that a user made to one of them."""
    snapshots = [
        tmp_path / f"models--org--{name}" / "snapshots" / "1" for name in ("kimi", "eagle")
    ]
    for snapshot in snapshots:
        snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshots[0])
    world.recipe(
        "kimi",
        engine="vllm",
        model={"repository": "org/kimi", "name": "kimi"},
        speculation={"method": "eagle3", "repository": "org/eagle", "tokens": 3, "source": "ours"},
        overrides=["MODEL_PATH"],
    )
    skipped = ("--skip-preflight", "weights", "--skip-preflight", "flags")
    words = ("serve", "kimi", "--eagle3", "--draft", snapshots[1], *skipped)
    assert world.sm120(*words, "--weights", snapshots[0]).code == 0
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "link"))
    assert world.sm120(*words).code == 0
    for job in world.jobs:
        hosts = {mount.inside: mount.host for mount in job.launch.mounts}
        assert hosts == {
            "/models": str(snapshots[0].parent.parent),
            "/draft": str(snapshots[1].parent.parent),
        }
        assert job.launch.arguments[0] == "/models/snapshots/1"
        assert '"model":"/draft/snapshots/1"' in job.launch.arguments[-1]


def test_the_options_of_a_start_are_kept_with_it(world: World, tmp_path: Path) -> None:
    world.recipe("tiny-cpu", overrides=["PORT"])
    world.sm120("serve", "tiny-cpu", "--port", "18998", "--lan", "--timeout", "77")
    (attempt,) = attempts(world)
    options = attempt["options"]
    assert (options["overrides"]["port"], options["lan"], options["timeout_s"]) == (18998, True, 77)


@pytest.mark.parametrize("args", [["--gpus", "a"], ["--skip-preflight", "all"], ["--timeout", "0"]])
def test_a_wrong_option_is_refused(world: World, args: list[str]) -> None:
    world.recipe("tiny-cpu")
    assert world.sm120("serve", "tiny-cpu", *args).code == 2


def test_nothing_served_is_said_as_such(world: World) -> None:
    assert world.sm120("recipe", "status").out == "nothing is served in Docker\n"
    assert world.sm120("recipe", "logs", "nobody").error == "NothingServed"
    assert world.sm120("recipe", "stop", "nobody").error == "NothingServed"
    assert world.sm120("recipe", "stop", "--all").error == "NothingServed"
    assert world.sm120("recipe", "stop").code == 2
    assert world.sm120("recipe", "attempts").out == "nothing was tried yet\n"


def test_what_runs_in_podman_is_found_while_docker_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = FakeEngine(kind="podman", log=[b"one\n"])
    engines = [world.engine, podman]
    monkeypatch.setattr(on_host_module, "find_engines", lambda wanted: engines)
    assert "nothing is served in Docker and Podman" in world.sm120("recipe", "status").out
    for name in ("tiny-cpu", "other"):
        podman.put(f"sm120-{name}", {"sm120.recipe": name})
    assert "tiny-cpu" in world.sm120("recipe", "status").out
    assert world.sm120("recipe", "logs", "tiny-cpu").out == "one\n"
    assert world.sm120("recipe", "stop", "tiny-cpu").code == 0
    assert world.sm120("recipe", "stop", "--all").code == 0
    assert [name for name, _ in podman.stopped] == ["sm120-tiny-cpu", "sm120-other"]
    ended = world.sm120("recipe", "stop", "--all")
    assert "nothing is served in Docker and Podman" in ended.err


def test_a_container_of_another_image_fails_the_status_and_is_still_listed(world: World) -> None:
    store = Path(world.sm120("store", "show", "--json").json["root"])
    record = json.loads(next(store.glob("images/tiny/*/image.json")).read_bytes())
    labels = {"sm120.recipe": "tiny-cpu", "sm120.digest": record["descriptor"]["digest"]}
    world.engine.put("sm120-tiny-cpu", labels)
    ended = world.sm120("recipe", "status")
    assert ended.error == "ImageDiffers"
    assert "other" in ended.out


def test_logs_and_stop_work_on_what_is_served(world: World) -> None:
    world.engine.log = [b"one\n", b"two\n"]
    world.engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu"})
    assert world.sm120("recipe", "logs", "tiny-cpu").out == "one\ntwo\n"
    assert world.sm120("recipe", "stop", "tiny-cpu", "--timeout", "9").out.startswith(
        "tiny-cpu stopped after"
    )
    assert world.engine.stopped == [("sm120-tiny-cpu", 9)]


def test_a_damaged_list_of_attempts_is_shown_as_far_as_it_can_be_read(world: World) -> None:
    store = Path(world.sm120("store", "show", "--json").json["root"])
    known = AttemptList(store / "attempts")
    digest = "sha256:" + "1" * 64
    known.add(
        Begun(
            id="20261116T120000-abcdef",
            kind="serve",
            recipe="tiny-cpu",
            recipe_digest=digest,
            at=stamp(),
        )
    )
    with known.path.open("ab") as file:
        file.write(b"half a li")
    ended = world.sm120("recipe", "attempts")
    assert "1 line cannot be read" in ended.err
    assert "unfinished" in ended.out


def test_another_host_is_named_in_the_attempt_and_in_what_to_type_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnel = NearTunnel({"uname": said("x86_64\n")})
    site = RemoteSite(cast(Tunnel, tunnel), "gpu1", "docker", "/var/run/docker.sock")

    @contextmanager
    def connected(*given: object) -> Iterator[NearTunnel]:
        yield tunnel

    monkeypatch.setattr(on_host_module, "connected", connected)
    monkeypatch.setattr(on_host_module, "find_remote_site", lambda *given: (site, world.engine))
    world.recipe("tiny-cpu")
    done = world.sm120("serve", "tiny-cpu", "--on", "gpu1")
    assert done.code == 0, done.err
    assert "is served on gpu1 at" in done.out
    assert "`sm120 recipe stop tiny-cpu --on gpu1` ends it." in done.out
    (start,) = cast(list[Any], world.jobs)
    assert start.door == tunnel.socket
    rows = json.loads(world.sm120("recipe", "attempts", "--on", "gpu1", "--json").out)
    assert [row["host"] for row in rows] == ["gpu1"]
    assert json.loads(world.sm120("recipe", "attempts", "--on", "gpu2", "--json").out) == []


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "tiny-cpu"),
        ("recipe", "status"),
        ("recipe", "logs", "tiny-cpu"),
        ("recipe", "stop", "tiny-cpu"),
    ],
)
def test_an_inventory_without_a_host_and_a_host_that_is_none_are_refused(
    world: World, words: tuple[str, ...]
) -> None:
    world.recipe("tiny-cpu")
    assert world.sm120(*words, "-i", "inventory.yml").code == 2
    assert world.sm120(*words, "--on", "-oProxyCommand=x").error == "HostUnreached"


def test_a_dry_run_without_weights_mounts_no_nameless_folder(world: World) -> None:
    world.recipe("kimi", engine="vllm", model={"repository": "org/kimi", "name": "kimi"})
    ended = world.sm120("serve", "kimi", "--dry-run", "--skip-preflight", "flags")
    assert ended.error == "PreflightFailed"
    assert "--volume=DIR:/models:ro" in ended.out
    assert "--volume=:" not in ended.out
    assert "--weights DIR" in ended.err


def test_weights_and_a_model_path_are_never_both_taken_in_silence(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"repository": "org/kimi", "name": "kimi"}
    world.recipe("kimi", engine="vllm", model=model, overrides=["MODEL_PATH"])
    other = tmp_path / "other"
    other.mkdir()
    words = ("kimi", "--weights", tmp_path)
    monkeypatch.setenv("MODEL_PATH", str(other))
    skips = ("--skip-preflight", "flags", "--skip-preflight", "weights")
    for ended in (
        world.sm120("serve", *words, "--dry-run", *skips),
        world.sm120("render", *words, "--as", "shell"),
    ):
        assert f"MODEL_PATH={other} is not used: --weights names {tmp_path}" in ended.err
        assert str(other) not in ended.out
    both = world.sm120("serve", *words, "--model-path", other, "--dry-run")
    assert both.error == "RecipeInvalid"
    assert "both name the model" in both.err


def test_a_tiny_recipe_is_served_with_the_weights_that_are_named(
    world: World, tmp_path: Path
) -> None:
    world.recipe("one")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    words = ("serve", "one", "--weights", tmp_path, "--dry-run", "--skip-preflight", "weights")
    assert f"--volume={tmp_path}:/models:ro" in world.sm120(*words).out


BOB = "uid 4711, /home/bob"


def test_what_another_user_serves_is_named_and_neither_stopped_nor_replaced(world: World) -> None:
    world.recipe("one")
    labels = {"sm120.recipe": "one", "sm120.port": "1"}
    world.engine.put("sm120-one", {**labels, "sm120.owner": BOB})
    for words in (("recipe", "stop", "one"), ("serve", "one")):
        ended = world.sm120(*words)
        assert ended.error == "AlreadyServed"
        assert f"its container sm120-one is another user's ({BOB})" in ended.err
    every = world.sm120("recipe", "stop", "--all")
    assert every.error == "NothingServed"
    assert f"another user serves it ({BOB}), so it keeps running" in every.err
    world.engine.ends_with = 0  # also what has ended is theirs to look at
    world.engine.put("sm120-one", {**labels, "sm120.owner": BOB})
    assert world.sm120("serve", "one").error == "AlreadyServed"
    assert [*world.engine.known] == ["sm120-one"]
    assert world.engine.stopped == []
    assert BOB in world.sm120("recipe", "status").err


def test_what_oneself_or_an_older_version_started_is_stopped(world: World) -> None:
    world.recipe("one")
    for owner in ({}, {"sm120.owner": own_user()}):
        world.engine.put("sm120-one", {"sm120.recipe": "one", **owner})
        assert world.sm120("recipe", "stop", "--all").code == 0
        assert world.engine.known == {}

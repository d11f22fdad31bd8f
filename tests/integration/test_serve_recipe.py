"""A recipe, served for real: the small image in Docker and in Podman, from the start to the end."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import (
    AlreadyServed,
    BackendDiffers,
    ContainerRefused,
    ImageDiffers,
    Interrupted,
    NothingServed,
    PreflightFailed,
    StartFailed,
)
from pipeline.images.gate.runs import read_runs
from tests.integration.built import Built, build_image, checkout_of, run_sm120, sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.engine import chat, chat_many, is_healthy
from tests.testbed.forked import ROOT
from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program
from tests.testbed.ports import unused_port
from tests.testbed.tiny_gguf import expected_text

PODMAN_PACKAGES = ("podman", "runc")
# every rung, with little work for the engine: these tests are about containers
SHORT = ("--quick", "--streams", "1,2", "--lengths", "4", "--pressure", "2")


def tiny_recipe(name: str, port: int, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "summary": "A tiny model that is made on the spot, on the CPU",
        "backing": "proved",
        "sources": {
            "ours": {"kind": "ours", "title": "this project", "why": "it runs on any machine"}
        },
        "image": "llama-cpp-cpu",
        "engine": "llama-cpp",
        "model": {"tiny": True, "file": "tiny.gguf", "name": "tiny"},
        "hardware": {"cards": 0},
        "port": port,
        "flags": {"ours": {"ctx_size": 4096, "parallel": 4, "threads": 1}},
        "expect": {
            "log": [{"pattern": "model loaded", "why": "the engine itself says so"}],
            "never": [{"pattern": "failed to load", "why": "half a model is none"}],
        },
        **changes,
    }


@dataclass(frozen=True)
class Bench:
    """A store with the image, a folder for recipes, and a container engine."""

    image: Built
    recipes: Path
    env: Mapping[str, str]
    engine: str
    port: int

    def add(self, name: str, **changes: Any) -> None:
        body = tiny_recipe(name, self.port, **changes)
        (self.recipes / f"{name}.yaml").write_text(yaml.safe_dump(body))

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        return sm120(self.image.store, "recipe", *args, "--runtime", self.engine, **self.env)

    def serve(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        return run_sm120(self.image.store, *self.serve_words(name, *more), **self.env)

    def serve_words(self, name: str, *more: str) -> list[str]:
        recipes = str(self.recipes)
        return ["serve", name, "--recipes", recipes, "--runtime", self.engine, "--json", *more]

    def smoke(self, name: str, *more: str) -> dict[str, Any]:
        words = ["smoke", name, "--recipes", str(self.recipes), "--runtime", self.engine, "--json"]
        result: dict[str, Any] = json.loads(
            sm120(self.image.store, *words, *more, **self.env).stdout
        )
        return result

    def status(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.command("status", "--json").stdout)
        return rows

    def attempts(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(
            sm120(self.image.store, "recipe", "attempts", "--json").stdout
        )
        return rows


def failed(done: subprocess.CompletedProcess[str], kind: type[Exception]) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(done.stderr.strip().splitlines()[-1])
    assert error["error"] == kind.__name__, done.stderr
    return error


@pytest.fixture(scope="module")
def image(lean_store: Path) -> Built:
    """llama-cpp-cpu for this machine's architecture."""
    return build_image(lean_store, "llama-cpp-cpu", host_platform())


@pytest.fixture
def bench(image: Built, docker_daemon: DockerDaemon, tmp_path: Path) -> Iterator[Bench]:
    """Docker; whatever a test leaves is removed."""
    env = {"DOCKER_HOST": docker_daemon.socket_url}
    yield Bench(image, tmp_path, env, "docker", unused_port())
    with closing(docker.DockerClient(base_url=docker_daemon.socket_url)) as client:
        for left in client.containers.list(all=True, filters={"label": "sm120.recipe"}):
            left.remove(force=True)


def test_a_recipe_is_served_asked_looked_at_and_stopped(bench: Bench) -> None:
    """The recipe that is shipped."""
    served = json.loads(bench.serve("tiny-cpu", "--port", str(bench.port)).stdout)
    url = f"http://127.0.0.1:{bench.port}"
    assert served["url"] == f"{url}/v1"
    assert chat(url, max_tokens=32) == expected_text(32)
    assert chat_many(url, streams=4, max_tokens=32) == [expected_text(32)] * 4

    (row,) = bench.status()
    assert (row["recipe"], row["healthy"], row["built"]) == ("tiny-cpu", True, "same")
    assert row["digest"] == bench.image.digest
    assert "model loaded" in bench.command("logs", "tiny-cpu").stdout
    assert len(bench.command("logs", "tiny-cpu", "--tail", "2").stdout.splitlines()) == 2

    failed(bench.serve("tiny-cpu", "--port", str(bench.port)), AlreadyServed)
    assert bench.status() == [row]

    assert "tiny-cpu stopped after" in bench.command("stop", "tiny-cpu").stdout
    assert bench.status() == []
    last = [each for each in bench.attempts() if each["id"] == served["attempt"]]
    assert [end["outcome"] for end in last[0]["ends"]] == ["serving", "stopped"]
    assert last[0]["image_digest"] == bench.image.digest


def test_a_served_recipe_passes_the_ladder_is_restarted_and_stated(bench: Bench) -> None:
    bench.add("tiny-cpu", smoke={"tools": False})
    assert bench.serve("tiny-cpu").returncode == 0
    (before,) = bench.status()
    result = bench.smoke("tiny-cpu", *SHORT, "--restart")
    assert (result["verdict"], result["last_good"]) == ("passed", "memory")
    checks = {c["name"]: c["verdict"] for r in result["rungs"] for c in r["checks"]}
    assert checks["restart"] == "passed"
    (after,) = bench.status()
    assert after["started_at"] > before["started_at"]
    assert {**after, "started_at": ""} == {**before, "started_at": ""}

    attempt = bench.attempts()[-1]
    assert (attempt["kind"], attempt["outcome"]) == ("smoke", "passed")
    assert (attempt["id"], attempt["after"]) == (result["attempt"], before["attempt"])
    assert attempt["image_digest"] == bench.image.digest
    assert attempt["weights_digest"].startswith("sha256:")
    platform = bench.image.platform
    runs = read_runs(open_store(bench.image.store), "llama-cpp-cpu", platform, bench.image.digest)
    run = next(each for each in runs if each.recipe == "tiny-cpu")
    assert (run.verdict, run.last_good) == ("passed", "memory")
    assert run.inputs["weights"] == attempt["weights_digest"]


def test_a_recipe_is_served_for_the_ladder_and_nothing_is_left(bench: Bench) -> None:
    bench.add("tiny-cpu", smoke={"tools": False, "streams": [1, 2]})
    assert bench.smoke("tiny-cpu", "--serve", "--up-to", "answers")["verdict"] == "passed"
    assert bench.status() == []
    serve, smoke = bench.attempts()[-2:]
    assert [end["outcome"] for end in serve["ends"]] == ["serving", "stopped"]
    assert (smoke["kind"], smoke["after"]) == ("smoke", serve["id"])


def test_the_container_can_neither_write_the_weights_nor_gain_rights(
    bench: Bench, docker_daemon: DockerDaemon
) -> None:
    bench.add("tiny-cpu")
    assert bench.serve("tiny-cpu").returncode == 0
    with closing(docker.DockerClient(base_url=docker_daemon.socket_url)) as client:
        container = client.containers.get("sm120-tiny-cpu")
        code, output = container.exec_run(["touch", "/models/new"])
        assert (code, output) == (1, b"touch: cannot touch '/models/new': Read-only file system\n")
        # no new rights, none to gain, and not root
        for line in ("NoNewPrivs:\t1", "CapBnd:\t0000000000000000", "Uid:\t1000\t1000"):
            assert container.exec_run(["grep", "-q", f"^{line}", "/proc/1/status"]).exit_code == 0


def test_a_wrong_flag_ends_with_the_engine_s_own_words_and_leaves_no_container(
    bench: Bench,
) -> None:
    flags = {"ours": {"ctx_size": 4096, "extra": ["--no-such-flag"]}}
    bench.add("wrong", flags=flags, fallback="tiny-cpu")
    bench.add("tiny-cpu")
    assert "--no-such-flag" in failed(bench.serve("wrong"), PreflightFailed)["message"]
    skipped = ("--skip-preflight", "flags")
    error = failed(done := bench.serve("wrong", *skipped), StartFailed)
    assert "unrecognized arguments: --no-such-flag" in error["message"]
    assert "sm120 serve tiny-cpu" in error["hint"]
    assert "| serve.py: error: unrecognized arguments" in done.stderr
    assert bench.status() == []
    assert bench.attempts()[-1]["outcome"] == "failed"


def test_the_fallback_is_tried_where_it_is_wanted_and_both_are_kept(bench: Bench) -> None:
    bench.add("wrong", flags={"ours": {"extra": ["--no-such-flag"]}}, fallback="tiny-cpu")
    bench.add("tiny-cpu")
    served = json.loads(bench.serve("wrong", "--with-fallback", "--skip-preflight", "flags").stdout)
    assert served["recipe"] == "tiny-cpu"
    first, second = bench.attempts()[-2:]
    assert (first["recipe"], first["outcome"]) == ("wrong", "failed")
    assert (second["recipe"], second["outcome"]) == ("tiny-cpu", "serving")
    assert second["after"] == first["id"]


@pytest.mark.parametrize(
    ("expect", "reason"),
    [
        ({"log": [{"pattern": "Using TRITON_MLA", "why": "no fallback"}]}, "nothing in the log"),
        ({"never": [{"pattern": "model loaded", "why": "a planted one"}]}, "must not have"),
    ],
)
def test_a_log_that_shows_another_backend_leaves_no_container(
    bench: Bench, expect: dict[str, Any], reason: str
) -> None:
    bench.add("tiny-cpu", expect=expect)
    assert reason in failed(bench.serve("tiny-cpu"), BackendDiffers)["message"]
    assert bench.status() == []


def test_a_port_in_use_is_found_before_anything_is_started(bench: Bench) -> None:
    bench.add("tiny-cpu")
    with socket.socket() as other:
        other.bind(("127.0.0.1", bench.port))
        other.listen()
        assert str(bench.port) in failed(bench.serve("tiny-cpu"), PreflightFailed)["message"]
        # the container engine finds it, too
        failed(bench.serve("tiny-cpu", "--skip-preflight", "port"), ContainerRefused)
    assert bench.status() == []


def test_ctrl_c_while_it_waits_leaves_no_container(bench: Bench) -> None:
    # it answers at once; then a line is waited for that never comes
    bench.add("tiny-cpu", expect={"log": [{"pattern": "never said", "why": "time to press keys"}]})
    words = bench.serve_words("tiny-cpu")
    store = bench.image.store
    command = [sys.executable, "-m", "pipeline", "--checkout", checkout_of(store), "--store", store]
    process = subprocess.Popen(
        [*map(str, command), *words],
        env={**os.environ, **bench.env},
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not is_healthy(f"http://127.0.0.1:{bench.port}") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    # where the machine is slow, the wait for the line may be over by then
    assert process.returncode in (Interrupted.exit_code, BackendDiffers.exit_code), said
    assert bench.status() == []
    assert bench.attempts()[-1]["outcome"] in ("interrupted", "failed")


def test_a_container_of_another_image_is_refused(bench: Bench, docker_daemon: DockerDaemon) -> None:
    """Planted: the labels of a served recipe on a container of another image."""
    bench.add("tiny-cpu")
    assert bench.serve("tiny-cpu").returncode == 0
    with closing(docker.DockerClient(base_url=docker_daemon.socket_url)) as client:
        real = client.containers.get("sm120-tiny-cpu")
        labels = real.labels
        real.remove(force=True)
        client.api.import_image_from_data(empty_layer(), repository="other", tag="1")
        client.containers.create("other:1", ["/nothing"], name="sm120-tiny-cpu", labels=labels)
        done = run_sm120(bench.image.store, "recipe", "status", "--json", **bench.env)
        assert "its image is sha256:" in failed(done, ImageDiffers)["message"]
        assert json.loads(done.stdout)[0]["built"] == "other"


def test_a_tag_that_was_moved_to_another_image_is_not_followed(
    bench: Bench, docker_daemon: DockerDaemon
) -> None:
    bench.add("tiny-cpu")
    with closing(docker.DockerClient(base_url=docker_daemon.socket_url)) as client:
        tag = bench.image.digest[7:19]
        client.api.import_image_from_data(empty_layer(), repository="sm120/llama-cpp-cpu", tag=tag)
        assert bench.serve("tiny-cpu").returncode == 0
        assert bench.status()[0]["built"] == "same"
        moved = client.images.get(f"sm120/llama-cpp-cpu:{tag}")
        running = client.api.inspect_container("sm120-tiny-cpu")["Image"]
        assert running != moved.id
        # other tests of this daemon may use the name
        client.images.remove(f"sm120/llama-cpp-cpu:{tag}")
        client.images.get(running).tag("sm120/llama-cpp-cpu", tag)


def test_what_is_not_served_can_be_neither_read_nor_stopped(bench: Bench) -> None:
    for verb in ("logs", "stop"):
        done = run_sm120(
            bench.image.store, "recipe", verb, "nobody", "--runtime", "docker", **bench.env
        )
        assert done.returncode == NothingServed.exit_code


def empty_layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("nothing"))
    return buffer.getvalue()


def podman_settings(folder: Path) -> dict[str, str]:
    """Settings with the first storage driver that this machine allows."""
    conf, storage = folder / "containers.conf", folder / "storage.conf"
    conf.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        # `system reset` below clears it: with the shared one, Podman forgets what else runs
        f'tmp_dir = "{folder}/tmp"\n'
    )
    env = {"CONTAINERS_CONF": str(conf), "CONTAINERS_STORAGE_CONF": str(storage)}
    places = f'runroot = "{folder}/run"\ngraphroot = "{folder}/images"\n'
    for driver in ("overlay", "vfs"):
        storage.write_text(f'[storage]\ndriver = "{driver}"\n{places}')
        command = [find_program("podman"), "info"]
        if not subprocess.run(command, env={**os.environ, **env}, capture_output=True).returncode:
            return env
    raise CannotHave("Podman finds no place for its images here.")


@pytest.fixture
def podman(image: Built, tmp_path: Path) -> Iterator[Bench]:
    """Podman with images in a folder of its own, and limits that any root may set."""
    if os.geteuid() != 0:
        raise CannotHave("Podman with storage of its own needs root here.")
    ensure_debian_packages(PODMAN_PACKAGES)
    env = podman_settings(tmp_path)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    yield Bench(image, recipes, env, "podman", unused_port())
    for words in (["rm", "--all", "--force", "--time=0"], ["system", "reset", "--force"]):
        with suppress(CannotHave):
            program = find_program("podman")
            subprocess.run([program, *words], env={**os.environ, **env}, capture_output=True)


def test_podman_serves_the_same_recipe_and_compares_it_with_what_was_built(
    podman: Bench, is_long: bool
) -> None:
    podman.add("tiny-cpu")
    done = podman.serve("tiny-cpu")
    if "could not start" in done.stderr and "rlimit" in done.stderr:
        raise CannotHave("Podman's runtime may not set its limits on this machine.")
    assert done.returncode == 0, done.stderr
    assert chat(f"http://127.0.0.1:{podman.port}", max_tokens=32) == expected_text(32)
    (row,) = podman.status()
    assert (row["healthy"], row["built"]) == (True, "same")
    assert "model loaded" in podman.command("logs", "tiny-cpu").stdout
    if is_long:
        checks = {
            check["name"]: check["verdict"]
            for rung in podman.smoke("tiny-cpu", *SHORT, "--restart")["rungs"]
            for check in rung["checks"]
        }
        assert checks["restart"] == "passed"
    podman.command("stop", "tiny-cpu")
    assert podman.status() == []
    podman.add("wrong", flags={"ours": {"extra": ["--no-such-flag"]}})
    error = failed(podman.serve("wrong", "--skip-preflight", "flags"), StartFailed)
    assert "unrecognized arguments: --no-such-flag" in error["message"]
    assert podman.status() == []

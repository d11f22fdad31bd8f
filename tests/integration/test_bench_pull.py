"""From the pull of an image to its first right answer: a real registry, a real Docker daemon."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import docker
import docker.errors
import pytest

from pipeline.app.workspace import host_platform
from pipeline.serving.bench.record import read_run
from tests.integration.built import Built, build_image, sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.registry import oci_registry

IMAGE = "llama-cpp-cpu"


@pytest.fixture(scope="module")
def image(small_store: Path) -> Built:
    return build_image(small_store, IMAGE, host_platform())


def test_the_clock_of_a_pull_runs_to_an_answer_that_is_right(
    image: Built, docker_daemon: DockerDaemon, tmp_path: Path
) -> None:
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    for known in client.images.list(name=f"sm120/{IMAGE}"):
        # a start whose image is there has nothing to pull
        with suppress(docker.errors.NotFound):
            client.images.remove(str(known.id), force=True)
    with oci_registry(tmp_path / "registry") as registry:
        place = f"{registry.host_port}/tiny"
        sm120(image.store, "publish", IMAGE, place)
        words = ("--workload", "start", "--pull", place, "--output", str(tmp_path / "out"))
        done = sm120(image.store, "bench", "tiny-cpu", *words, DOCKER_HOST=docker_daemon.socket_url)
    run = read_run(tmp_path / "out/start")
    cold, warm = (cell.trials[0].metrics for cell in run.cells)
    assert run.inputs.image == image.digest
    assert cold.pull_s
    assert cold.ready_s
    assert cold.start_to_right_answer_s
    assert cold.pull_to_right_answer_s
    # in between Docker loads it, and the machine is checked
    assert cold.pull_to_right_answer_s > cold.pull_s + cold.start_to_right_answer_s
    assert cold.start_to_right_answer_s > (cold.start_to_first_token_s or 0.0) > cold.ready_s
    assert warm.pull_s is None
    assert warm.start_to_right_answer_s
    assert "The pull is not measured: tiny-cpu's image is loaded" in done.stderr

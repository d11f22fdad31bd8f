"""Function tests inside a real engine image, started as `sm120 host check` starts them.

gloo takes the place of NCCL and cards. No card is handed in, and no page is locked, which a daemon
in a container may not allow; all else is as on a GPU host.
`SM120_STORE=… pytest --big`; a store that has the image built spares 5 GB of downloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import docker
import pytest

from pipeline.core.errors import ProbeUnstarted
from pipeline.hosts.probes import runner
from tests.integration.built import build_image, sm120
from tests.integration.test_host_probes import EASY, QUICK
from tests.testbed.dockerd import DockerDaemon

pytestmark = pytest.mark.timeout(1800)
LENIENT = (*QUICK, "--floors", EASY)


@pytest.fixture(scope="module")
def image(big_store: Path, docker_daemon: DockerDaemon) -> str:
    """The tag under which Docker has sglang-k2."""
    built = build_image(big_store, "sglang-k2", "linux/amd64")
    sm120(big_store, "load", "sglang-k2", DOCKER_HOST=docker_daemon.socket_url)
    return f"sm120/sglang-k2:{built.digest[7:19]}"


@pytest.fixture
def here(docker_daemon: DockerDaemon, monkeypatch: pytest.MonkeyPatch) -> docker.DockerClient:
    """The daemon that the tests are run with."""
    given = runner.container_command

    def without_cards(
        image: str,
        folder: Path,
        arguments: Sequence[str],
        settings: dict[str, str],
        *,
        name: str,
        cards: Sequence[str],
        nccl: Sequence[str],
    ) -> list[str]:
        assert cards
        message = given(image, folder, arguments, settings, name=name, cards=(), nccl=nccl)
        at = message.index("--ulimit")
        return message[:at] + message[at + 2 :]

    monkeypatch.setenv("DOCKER_HOST", docker_daemon.socket_url)
    monkeypatch.setattr(runner, "container_command", without_cards)
    return docker.DockerClient(base_url=docker_daemon.socket_url)


def test_the_tests_run_with_the_images_torch_as_the_images_user(
    image: str, here: docker.DockerClient
) -> None:
    answer = runner.run_in_image(image, [*LENIENT, "--ranks", "2"])
    assert answer.verdict == "passed", answer.rows
    checks = {row.check for row in answer.rows if row.verdict == "passed"}
    assert checks == {"cards", "copy", "all_reduce", "latency", "bandwidth", "writes"}
    assert here.containers.list(all=True) == []


@pytest.mark.parametrize("fault", ["hang:1", "wrong:0"])
def test_a_rank_that_misbehaves_in_the_image_is_named_and_nothing_is_left_running(
    image: str, here: docker.DockerClient, fault: str
) -> None:
    arguments = ["--ranks", "2", "--only", "all_reduce", "--step-limit-s", "10", "--fault", fault]
    answer = runner.run_in_image(image, [*LENIENT, *arguments])
    assert answer.verdict == "failed"
    assert here.containers.list(all=True) == []


@pytest.mark.usefixtures("here")
def test_an_image_that_is_not_there_is_not_pulled_and_named() -> None:
    with pytest.raises(ProbeUnstarted, match="sm120/none"):
        runner.run_in_image("sm120/none:1", [*QUICK])

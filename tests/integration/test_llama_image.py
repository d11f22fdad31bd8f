"""The small image, built here from its committed lock, run by a real Docker daemon."""

from __future__ import annotations

import subprocess
from pathlib import Path

import docker
import pytest

from pipeline.app.workspace import host_platform
from tests.integration.built import Built, build_image, sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.engine import chat, chat_many, running_container
from tests.testbed.packages import ensure_debian_packages, find_program
from tests.testbed.registry import Registry
from tests.testbed.tiny_gguf import expected_text

SERVE = ["-m", "/models/tiny.gguf", "-t", "1", "-np", "8", "-c", "4096"]


@pytest.fixture(scope="module")
def image(small_store: Path) -> Built:
    """llama-cpp-cpu for this machine's architecture."""
    return build_image(small_store, "llama-cpp-cpu", host_platform())


def test_the_loaded_image_answers_eight_streams_with_the_known_text(
    image: Built, docker_daemon: DockerDaemon, tiny_model: Path
) -> None:
    done = sm120(image.store, "load", "llama-cpp-cpu", DOCKER_HOST=docker_daemon.socket_url)
    assert "is in Docker as sha256:" in done.stdout
    ref = f"sm120/llama-cpp-cpu:{image.digest[7:19]}"
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    assert client.images.get("sm120/llama-cpp-cpu:latest").id == client.images.get(ref).id
    with running_container(docker_daemon, ref, SERVE, tiny_model.parent) as url:
        assert chat(url, max_tokens=32) == expected_text(32)
        assert chat_many(url, streams=8, max_tokens=64) == [expected_text(64)] * 8


def test_the_image_pulled_from_a_registry_by_digest_is_the_image_built(
    image: Built, docker_daemon: DockerDaemon, registry: Registry, tiny_model: Path, tmp_path: Path
) -> None:
    sm120(image.store, "image", "export", "llama-cpp-cpu", str(tmp_path / "layout"))
    repository = f"{registry.host_port}/llama-cpp-cpu"
    copy_to_registry(tmp_path / "layout", f"{repository}:test")
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    pulled = client.images.pull(repository, tag=image.digest)
    # other tests of this daemon may have pulled it from another place, there also by its index
    names = [name for name in pulled.attrs["RepoDigests"] if name.startswith(f"{repository}@")]
    assert names == [f"{repository}@{image.digest}"]
    with running_container(
        docker_daemon, f"{repository}@{image.digest}", SERVE, tiny_model.parent
    ) as url:
        assert chat_many(url, streams=8, max_tokens=64) == [expected_text(64)] * 8


def copy_to_registry(layout: Path, reference: str) -> None:
    """skopeo is an independent reader of our layout and an independent pusher."""
    ensure_debian_packages(["skopeo"])
    command = [str(find_program("skopeo")), "copy", "--dest-tls-verify=false"]
    command += ["--preserve-digests", f"oci:{layout}", f"docker://{reference}"]
    subprocess.run(command, check=True, capture_output=True)

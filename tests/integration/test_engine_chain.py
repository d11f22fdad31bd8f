"""The whole chain with a real engine image: gigabytes, from the build to another Docker daemon.

`SM120_STORE=… pytest --big tests/integration/test_engine_chain.py`; a store that has the image
built and judged spares 5 GB of downloads and its gates. Registry and daemon need some 20 GB
beside it while this runs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import docker
import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.gate.evidence import read_evidence
from tests.integration.built import Built, sm120
from tests.integration.published import (
    Site,
    publish_site,
    require_cosign_agrees,
    require_docker_pulls_the_same,
    require_oras_finds_all,
)
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.registry import Registry

IMAGE = "sglang-k2"
PLATFORM = "linux/amd64"
DAEMON_BYTES = 20 * 10**9  # 11 GB unpacked, and compressed layers that wait for their turn


@pytest.fixture(scope="module")
def site(
    big_store: Path, at_the_bridge: Registry, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    """Built, gated, recorded, signed and published."""
    (made,) = json.loads(sm120(big_store, "build", IMAGE, "--json").stdout)
    built = Built(big_store, IMAGE, PLATFORM, made["digest"])
    if read_evidence(open_store(big_store), IMAGE, PLATFORM, built.digest) is None:
        sm120(big_store, "build", IMAGE, "--gate")
    return publish_site(built, at_the_bridge, keys, tmp_path_factory.mktemp("login"))


def test_verify_from_the_registry_reads_every_byte_and_is_green(site: Site) -> None:
    assert site.done["digest"] == site.built.digest
    done = site.verify(f"{site.place}:v1", "--deep", "--json")
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    for gate in ("smem", "numerics", "arch", "patches"):
        assert f"gate {gate} on sm_120" in done.stdout


def test_cosign_and_oras_agree(site: Site, cosign: Path, oras: Path, tmp_path: Path) -> None:
    sm120(site.built.store, "evidence", "new-key", "other", "--output", str(tmp_path))
    require_cosign_agrees(site, cosign, tmp_path / "other.pub")
    require_oras_finds_all(site, oras)


def test_a_pull_by_digest_brings_the_bytes_that_were_built(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "pulled"
    pull = ("registry", "pull", site.by_digest, str(folder), "--evidence")
    sm120(site.built.store, *pull, "--ca", str(site.registry.ca_file), DOCKER_CONFIG=site.config)
    manifest = json.loads(site.blob(site.built.digest).read_bytes())
    parts = [site.built.digest, *(d["digest"] for d in (manifest["config"], *manifest["layers"]))]
    for digest in parts:
        pulled = folder / "blobs" / "sha256" / digest.removeprefix("sha256:")
        assert same_bytes(pulled, site.blob(digest)), digest
    done = site.verify(str(folder))
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]


def same_bytes(one: Path, two: Path) -> bool:
    with one.open("rb") as left, two.open("rb") as right:
        while True:
            piece = left.read(1 << 20)
            if piece != right.read(1 << 20):
                return False
            if not piece:
                return True


def test_another_docker_daemon_pulls_the_same_image_by_digest(
    site: Site, docker_daemon: DockerDaemon
) -> None:
    free = shutil.disk_usage(docker_daemon.log_file.parent).free
    if free < DAEMON_BYTES:
        pytest.skip(f"Docker unpacks 11 GB: {free / 1e9:.0f} GB are free, 20 are needed.")
    pulled = require_docker_pulls_the_same(site, docker_daemon, save=False)
    client = docker.DockerClient(base_url=docker_daemon.socket_url, timeout=600)
    ask = ["/opt/venv/bin/python", "-c", "import torch; print(torch.__version__)"]
    said = client.containers.run(pulled, ask[1:], entrypoint=ask[:1], remove=True)
    assert said.decode().strip().startswith("2.9.1")

"""An image on a foreign base by digest: real registry, real Docker, the same digest twice."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from pipeline.app.workspace import host_platform
from pipeline.core.errors import (
    EvidenceIncomplete,
    RegistryUnreachable,
    ResolveFailed,
    UnknownImage,
)
from tests.integration.built import NO_SOURCE, Built, build_image, sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.forked import run_forked
from tests.testbed.registry import Registry

BASE = "debian-python"
REPOSITORY = f"bases/{BASE}"
SAY = "import pathlib, packaging\nprint(packaging.__name__, pathlib.Path('/opt/own').read_text())\n"


@dataclass(frozen=True)
class Site:
    """A checkout of one image on a base that a registry has."""

    checkout: Path
    registry: Registry

    def run(self, store: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        place = ["--checkout", str(self.checkout), "--store", str(store)]
        registries = {"SM120_BASE_REGISTRIES": self.registry.host_port}
        return run_forked(*place, *args, env={**registries, **env})

    def do(self, store: Path, *args: str, **env: str) -> str:
        done = self.run(store, *args, **env)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    @property
    def spec(self) -> Path:
        return self.checkout / "images" / "mine" / "image.yaml"


@pytest.fixture(scope="module")
def base(lean_store: Path, registry: Registry) -> Built:
    """An image of ours in a registry: from there on it is anybody's."""
    built = build_image(lean_store, BASE, host_platform())
    place = f"{registry.host_port}/{REPOSITORY}:v1"
    sm120(lean_store, "publish", BASE, place, "--platform", host_platform())
    return built


@pytest.fixture(scope="module")
def site(base: Built, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A wheel and two files of ours on that base, locked."""
    folder = tmp_path_factory.mktemp("site")
    found = Site(folder / "checkout", registry)
    (found.checkout / "lockfiles").mkdir(parents=True)
    found.spec.parent.mkdir(parents=True)
    spec: dict[str, Any] = {
        "name": "mine",
        "summary": "a wheel and files of ours on a base from a registry",
        "base": f"{REPOSITORY}@{base.digest}",
        "platforms": [host_platform()],
        "python": {"requirements": ["packaging==25.0"]},
        "files": [
            {"from": "say.py", "to": "/opt/say.py"},
            {"from": "own", "to": "/opt/own"},
            {"from": "own", "to": "/home/engine/own"},
        ],
        "entrypoint": ["python", "/opt/say.py"],
        "user": "engine",
    }
    found.spec.write_text(yaml.safe_dump(spec))
    (found.spec.parent / "say.py").write_text(SAY)
    (found.spec.parent / "own").write_text("ours")
    done = found.run(folder / "store", "image", "lock", "mine")
    if done.returncode in (*NO_SOURCE, ResolveFailed.exit_code):
        pytest.skip(f"the wheel cannot be looked up here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return found


def build_in(site: Site, store: Path, *more: str) -> str:
    done = json.loads(site.do(store, "build", "mine", "--accept", "--json", *more))
    return str(done[0]["digest"])


@pytest.fixture(scope="module")
def store(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("foreign") / "store"
    build_in(site, found)
    return found


def test_two_stores_give_one_digest_and_the_bases_own_layers(
    site: Site, store: Path, base: Built, lean_store: Path, tmp_path: Path
) -> None:
    digest = build_in(site, store)
    assert build_in(site, tmp_path / "other") == digest
    # where the base was built itself, its layers are known as ours as well
    assert build_in(site, lean_store) == digest
    blobs = store / "oci" / "blobs" / "sha256"
    ours, theirs = (
        json.loads((place / d.removeprefix("sha256:")).read_text())["layers"]
        for place, d in ((blobs, digest), (blobs, base.digest))
    )
    assert [x["digest"] for x in ours[: len(theirs)]] == [x["digest"] for x in theirs]


def test_docker_runs_it_loaded_and_pulled_by_digest(
    site: Site, store: Path, docker_daemon: DockerDaemon
) -> None:
    digest = build_in(site, store)
    site.do(store, "load", "mine", DOCKER_HOST=docker_daemon.socket_url)
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    loaded = f"sm120/mine:{digest[7:19]}"
    assert client.containers.run(loaded, remove=True) == b"packaging ours\n"
    place = f"{site.registry.host_port}/team/mine"
    site.do(store, "publish", "mine", f"{place}:v1")
    pulled = client.images.pull(place, tag=digest)
    assert f"{place}@{digest}" in pulled.attrs["RepoDigests"]
    command = ["-c", "id -u; id -g; stat -c '%u:%g %a' /home/engine; echo $(cat /home/engine/own)"]
    out = client.containers.run(f"{place}@{digest}", command, entrypoint="/bin/sh", remove=True)
    assert out == b"1000\n1000\n1000:1000 755\nours\n"


def test_a_rebuild_without_network_is_identical(site: Site, store: Path) -> None:
    out = site.do(store, "image", "rebuild", "mine", "--offline", "--mirror", str(store / "inputs"))
    assert "identical" in out


def test_the_chain_leads_to_the_base_and_never_calls_its_contents_valid(
    site: Site, store: Path, base: Built, tmp_path: Path
) -> None:
    entry = site.do(store, "evidence", "new-key", "builder", "--output", str(tmp_path))
    key, trust = tmp_path / "builder.pem", tmp_path / "trust.yaml"
    trust.write_text(f"format: 1\nkeys:\n{entry[entry.index('- name:') :]}\n")
    site.do(store, "evidence", "make", "mine", "--key", str(key))
    done = site.run(store, "verify", "mine", "--trust", str(trust))
    assert done.returncode == EvidenceIncomplete.exit_code, done.stdout + done.stderr
    assert f"base image {REPOSITORY}@{base.digest}" in done.stdout
    vouched = f'bases: {{"{base.digest}": "built and published by us"}}\n'
    trust.write_text(trust.read_text() + vouched)
    out = site.do(store, "verify", "mine", "--trust", str(trust))
    assert "accepted as published: built and published by us" in out
    said = site.do(store, "image", "explain", "mine", "/usr/bin/python3.11")
    assert f"from   the base image {REPOSITORY}@{base.digest}" in said


def made_by_docker(client: docker.DockerClient, source: str, place: str) -> str:
    """Docker changes an image, commits and pushes it; the digest is the registry's."""
    change = "rm /usr/bin/tac; rm -r /usr/share/zoneinfo/Asia; mkdir -m 750 /srv/own;"
    change += "chown 7:8 /srv/own; echo made >/srv/made"
    container = client.containers.run(
        source, ["-c", change], entrypoint="/bin/sh", user="0", detach=True
    )
    assert container.wait()["StatusCode"] == 0, container.logs()
    container.commit(repository=place, tag="v1", conf={"Labels": {"by": "docker"}})
    container.remove()
    lines = client.images.push(place, tag="v1", stream=True, decode=True)
    return str(next(x["aux"]["Digest"] for x in lines if "Digest" in x.get("aux", {})))


def test_an_image_that_docker_made_and_pushed_is_a_base_too(
    base: Built, registry: Registry, docker_daemon: DockerDaemon, tmp_path: Path
) -> None:
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    source = f"{registry.host_port}/{REPOSITORY}"
    client.images.pull(source, tag=base.digest)
    place = f"{registry.host_port}/bases/made"
    digest = made_by_docker(client, f"{source}@{base.digest}", place)
    site, store = Site(tmp_path / "checkout", registry), tmp_path / "store"
    (site.checkout / "lockfiles").mkdir(parents=True)
    site.spec.parent.mkdir(parents=True)
    look = "cat /srv/made /srv/own/file; test -e /usr/bin/tac || echo gone;"
    look += "stat -c '%u:%g %a' /srv/own"
    spec = {
        "name": "mine",
        "summary": "a file of ours on what Docker made",
        "base": f"bases/made@{digest}",
        "platforms": [host_platform()],
        "files": [{"from": "file", "to": "/srv/own/file"}],
        "entrypoint": ["/bin/sh", "-c", look],
        "user": "root",
    }
    site.spec.write_text(yaml.safe_dump(spec))
    (site.spec.parent / "file").write_text("ours\n")
    site.do(store, "image", "lock", "mine")
    built = build_in(site, store)
    site.do(store, "load", "mine", DOCKER_HOST=docker_daemon.socket_url)
    out = client.containers.run(f"sm120/mine:{built[7:19]}", remove=True)
    assert out == b"made\nours\ngone\n7:8 750\n"
    assert "the base image" in site.do(store, "image", "explain", "mine", "/srv/made")
    assert (
        site.run(store, "image", "explain", "mine", "/usr/bin/tac").returncode
        == UnknownImage.exit_code
    )
    labels = client.images.get(f"sm120/mine:{built[7:19]}").labels
    assert "by" not in labels


def test_a_registry_that_is_gone_stops_only_who_needs_it(
    site: Site, store: Path, tmp_path: Path
) -> None:
    nowhere = {"SM120_BASE_REGISTRIES": "127.0.0.1:9"}
    site.do(store, "build", "mine", **nowhere)
    done = site.run(tmp_path / "empty", "build", "mine", **nowhere)
    assert done.returncode == RegistryUnreachable.exit_code, done.stderr

"""The whole chain with real parts: build, gate, sign, publish, pull elsewhere, verify.

The registry has TLS and a password, cosign and oras judge what lies there, and another Docker
daemon pulls it by digest.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from pipeline.cli.common import host_platform
from pipeline.cli.registry import open_registry
from pipeline.model import sha256_of
from pipeline.registry.reference import parse_repository
from tests.integration.built import Built, build_image, run_sm120, sm120
from tests.integration.conftest import entered_or_skipped
from tests.integration.test_publish import PASSWORD, USER, keep_login, layout_blobs
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.registry import Registry, oci_registry, trusted_by_docker

IMAGE = "llama-cpp-cpu"


@dataclass(frozen=True)
class Site:
    """A published image, and all that is needed to check it."""

    built: Built
    registry: Registry
    config: str
    home: Path
    done: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.registry.host_port}/team/{IMAGE}"

    @property
    def public(self) -> Path:
        return self.home / "builder.pub"

    def verify(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        given = ("verify", name, "--trust", f"{self.home}/trust.yaml", *more)
        ca = ("--ca", str(self.registry.ca_file)) if "/" in name and ":" in name else ()
        return run_sm120(self.built.store, *given, *ca, DOCKER_CONFIG=self.config)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A builder's key and the trust file that knows it."""
    home = tmp_path_factory.mktemp("keys")
    entry = sm120(home, "keys", "new", "builder", "--to", str(home)).stdout
    (home / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    return home


@pytest.fixture(scope="module")
def guarded(
    docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Registry]:
    """On the daemon's bridge, where Docker checks the CA; with TLS and a password."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("guarded")
        part = oci_registry(
            folder, tls=True, htpasswd={USER: PASSWORD}, address=docker_daemon.gateway
        )
        registry = entered_or_skipped(stack, part)
        stack.enter_context(trusted_by_docker(registry))
        yield registry


@pytest.fixture(scope="module")
def site(
    small_store: Path, guarded: Registry, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    """Built, gated, recorded, signed and published."""
    built = build_image(small_store, IMAGE, host_platform())
    sm120(small_store, "gate-arch", IMAGE)
    config = keep_login(
        tmp_path_factory.mktemp("login") / "docker", guarded.host_port, f"{USER}:{PASSWORD}"
    )
    place = f"{guarded.host_port}/team/{IMAGE}:v1"
    key = ("--key", str(keys / "builder.pem"))
    publish = ("publish", IMAGE, place, "--platform", "host", *key, "--json")
    done = json.loads(sm120(small_store, *publish, DOCKER_CONFIG=config).stdout)
    return Site(built, guarded, config, keys, done)


def ask(site: Site, program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a judge that knows the registry's login and CA, and nothing else."""
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(site.home),
        "DOCKER_CONFIG": site.config,
        "SSL_CERT_FILE": str(site.registry.ca_file),
    }
    return subprocess.run(
        [str(program), *args], env=env, cwd=site.home, capture_output=True, text=True, check=False
    )


def test_what_was_published_is_what_was_built_and_says_what_is_attached(site: Site) -> None:
    assert site.done["digest"] == site.built.digest
    assert site.done["evidence"] == "signed"
    kinds = [a["artifact_type"] for a in site.done["attached"]]
    assert kinds.count("application/vnd.dsse.envelope.v1+json") >= 4
    assert "application/vnd.cyclonedx+json" in kinds
    assert "application/spdx+json" in kinds


def test_verify_from_the_registry_is_green_down_to_every_package(site: Site) -> None:
    done = site.verify(f"{site.place}:v1", "--deep", "--json")
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    tree = json.loads(done.stdout)
    assert tree["verdict"] == "valid"
    assert "signed under it" in tree["children"][0]["words"]
    assert "every byte read" in tree["children"][1]["words"]
    assert "gate arch on sm_120" in done.stdout
    by_digest = site.verify(f"{site.place}@{site.built.digest}")
    assert by_digest.returncode == 0, by_digest.stderr


def test_cosign_agrees_and_no_other_key_does(site: Site, cosign: Path, tmp_path: Path) -> None:
    image = f"{site.place}@{site.built.digest}"
    loose = ("--insecure-ignore-tlog=true", "--key")
    attested = ("verify-attestation", "--type")
    sm120(site.built.store, "keys", "new", "other", "--to", str(tmp_path))
    checks: list[tuple[str, ...]] = [
        ("verify",),
        *((*attested, kind) for kind in ("slsaprovenance1", "cyclonedx")),
        (*attested, "https://spdx.dev/Document/v2.3"),
        (*attested, "https://in-toto.io/attestation/test-result/v0.1"),
    ]
    for check in checks:
        good = ask(site, cosign, *check, *loose, str(site.public), image)
        assert good.returncode == 0, (check, good.stderr)
    for check in checks[:2]:
        bad = ask(site, cosign, *check, *loose, f"{tmp_path}/other.pub", image)
        assert bad.returncode != 0


def test_oras_finds_the_same_evidence_by_the_fallback_tag(site: Site, oras: Path) -> None:
    ca = ("--ca-file", str(site.registry.ca_file))
    image = f"{site.place}@{site.built.digest}"
    done = ask(site, oras, "discover", "--format", "json", *ca, image)
    assert done.returncode == 0, done.stderr
    found = {m["digest"] for m in json.loads(done.stdout)["manifests"]}
    listed = {a["digest"] for a in site.done["attached"] if a["found_by"] == "fallback tag"}
    assert found == listed


def test_another_docker_daemon_pulls_the_same_image_by_digest(
    site: Site, docker_daemon: DockerDaemon
) -> None:
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    login = {"username": USER, "password": PASSWORD}
    pulled = client.images.pull(site.place, tag=site.built.digest, auth_config=login)
    assert pulled.attrs["RepoDigests"] == [f"{site.place}@{site.built.digest}"]
    blobs = site.built.store / "oci" / "blobs" / "sha256"
    manifest = json.loads((blobs / site.built.digest.removeprefix("sha256:")).read_bytes())
    # Docker's own name for an image is the digest of its config, and it checks every layer's diffID
    assert pulled.id == manifest["config"]["digest"]
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    assert pulled.attrs["RootFS"]["Layers"] == config["rootfs"]["diff_ids"]
    saved = b"".join(pulled.save())
    with tarfile.open(fileobj=io.BytesIO(saved)) as archive:
        layers = [m for m in archive.getmembers() if m.isfile() and m.size > 4096]
        hashes = {sha256_of(archive.extractfile(m).read()) for m in layers}  # type: ignore[union-attr]
    assert set(config["rootfs"]["diff_ids"]) <= hashes


def test_a_layout_pulled_with_its_evidence_is_the_image_built_and_verifies(
    site: Site, tmp_path: Path
) -> None:
    folder = tmp_path / "pulled"
    pull = ("pull", f"{site.place}@{site.built.digest}", str(folder), "--evidence")
    sm120(site.built.store, *pull, "--ca", str(site.registry.ca_file), DOCKER_CONFIG=site.config)
    sm120(site.built.store, "export", IMAGE, str(tmp_path / "built"), "--platform", "host")
    built, pulled = layout_blobs(tmp_path / "built"), layout_blobs(folder)
    assert all(name == digest for name, digest in pulled.items())
    assert built.items() <= pulled.items()
    done = site.verify(str(folder))
    assert done.returncode == 0, done.stderr + done.stdout
    spoiled = next(iter(built))
    (folder / "blobs" / "sha256" / spoiled).write_bytes(b"other")
    assert site.verify(str(folder)).returncode in (86, 80)


def test_a_tag_that_is_moved_after_signing_is_found_out(site: Site, tmp_path: Path) -> None:
    previous = os.environ.get("DOCKER_CONFIG")
    os.environ["DOCKER_CONFIG"] = site.config
    try:
        repository = open_registry(parse_repository(site.place), False, site.registry.ca_file)
        real = repository.manifest(site.built.digest)
        changed = json.loads(real.data)
        changed["annotations"]["note"] = "evil"
        repository.put_manifest("moved", json.dumps(changed).encode(), real.media_type)
        key = ("--key", str(site.home / "builder.pem"))
        sm120(
            *(site.built.store, "publish", IMAGE, f"{site.place}:stable", "--platform", "host"),
            *(*key, "--ca", str(site.registry.ca_file)),
            DOCKER_CONFIG=site.config,
        )
        assert site.verify(f"{site.place}:stable").returncode == 0
        repository.put_manifest("stable", json.dumps(changed).encode(), real.media_type)
    finally:
        os.environ.pop("DOCKER_CONFIG")
        if previous is not None:
            os.environ["DOCKER_CONFIG"] = previous
    done = site.verify(f"{site.place}:stable")
    assert done.returncode == 79, done.stderr
    assert "moved after signing" in done.stderr
    assert site.verify(f"{site.place}:v1").returncode == 0


def test_a_stranger_who_trusts_another_key_is_told_so(site: Site, tmp_path: Path) -> None:
    entry = sm120(site.built.store, "keys", "new", "other", "--to", str(tmp_path)).stdout
    (tmp_path / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    ca = ("--ca", str(site.registry.ca_file))
    given = ("verify", f"{site.place}:v1", "--trust", f"{tmp_path}/trust.yaml", *ca)
    done = run_sm120(site.built.store, *given, DOCKER_CONFIG=site.config)
    assert done.returncode == 86
    assert "does not know" in done.stderr


def test_an_image_published_bare_is_never_called_valid(site: Site) -> None:
    place = f"{site.registry.host_port}/bare/{IMAGE}:v1"
    options = ("--platform", "host", "--no-evidence", "--json", "--ca", str(site.registry.ca_file))
    done = sm120(site.built.store, "publish", IMAGE, place, *options, DOCKER_CONFIG=site.config)
    assert json.loads(done.stdout)["evidence"] == "left out"
    assert site.verify(place).returncode == 87

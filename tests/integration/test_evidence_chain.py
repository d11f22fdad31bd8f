"""The whole chain with real parts: build, gate, sign, publish, pull elsewhere, verify.

The registry has TLS and a password, cosign and oras judge what lies there, and another Docker
daemon pulls it by digest.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.app.registry import open_registry
from pipeline.app.workspace import host_platform
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.core.errors import EvidenceBroken, EvidenceIncomplete, RecordInvalid, TagMoved
from tests.integration.built import build_image, run_sm120, sm120
from tests.integration.published import (
    Site,
    layout_blobs,
    publish_site,
    require_cosign_agrees,
    require_docker_pulls_the_same,
    require_oras_finds_all,
)
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.registry import Registry

IMAGE = "llama-cpp-cpu"


@pytest.fixture(scope="module")
def site(
    small_store: Path, at_the_bridge: Registry, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    """Built, gated, recorded, signed and published."""
    built = build_image(small_store, IMAGE, host_platform())
    sm120(small_store, "gate", "run", IMAGE, "--only", "arch")
    return publish_site(built, at_the_bridge, keys, tmp_path_factory.mktemp("login"))


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
    assert "signed under it" in tree["children"][0]["message"]
    assert "every byte read" in tree["children"][1]["message"]
    assert "gate arch on sm_120" in done.stdout
    by_digest = site.verify(f"{site.place}@{site.built.digest}")
    assert by_digest.returncode == 0, by_digest.stderr


def test_cosign_agrees_and_no_other_key_does(site: Site, cosign: Path, tmp_path: Path) -> None:
    sm120(site.built.store, "evidence", "new-key", "other", "--output", str(tmp_path))
    require_cosign_agrees(site, cosign, tmp_path / "other.pub")


def test_oras_finds_the_same_evidence_by_the_fallback_tag(site: Site, oras: Path) -> None:
    require_oras_finds_all(site, oras)


def test_another_docker_daemon_pulls_the_same_image_by_digest(
    site: Site, docker_daemon: DockerDaemon
) -> None:
    require_docker_pulls_the_same(site, docker_daemon)


def test_a_layout_pulled_with_its_evidence_is_the_image_built_and_verifies(
    site: Site, tmp_path: Path
) -> None:
    folder = tmp_path / "pulled"
    pull = ("registry", "pull", f"{site.place}@{site.built.digest}", str(folder), "--evidence")
    sm120(site.built.store, *pull, "--ca", str(site.registry.ca_file), DOCKER_CONFIG=site.config)
    sm120(site.built.store, "image", "export", IMAGE, str(tmp_path / "built"), "--platform", "host")
    built, pulled = layout_blobs(tmp_path / "built"), layout_blobs(folder)
    assert all(name == digest for name, digest in pulled.items())
    assert built.items() <= pulled.items()
    done = site.verify(str(folder))
    assert done.returncode == 0, done.stderr + done.stdout
    spoiled = next(iter(built))
    (folder / "blobs" / "sha256" / spoiled).write_bytes(b"other")
    assert site.verify(str(folder)).returncode in (
        EvidenceBroken.exit_code,
        RecordInvalid.exit_code,
    )


def test_a_tag_that_is_moved_after_signing_is_found_out(site: Site, tmp_path: Path) -> None:
    previous = os.environ.get("DOCKER_CONFIG")
    os.environ["DOCKER_CONFIG"] = site.config
    try:
        access = Access(site.registry.ca_file)
        with open_registry(parse_repository(site.place), access) as repository:
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
    assert done.returncode == TagMoved.exit_code, done.stderr
    assert "moved after signing" in done.stderr
    assert site.verify(f"{site.place}:v1").returncode == 0


def test_a_stranger_who_trusts_another_key_is_told_so(site: Site, tmp_path: Path) -> None:
    entry = sm120(
        site.built.store, "evidence", "new-key", "other", "--output", str(tmp_path)
    ).stdout
    (tmp_path / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    ca = ("--ca", str(site.registry.ca_file))
    given = ("verify", f"{site.place}:v1", "--trust", f"{tmp_path}/trust.yaml", *ca)
    done = run_sm120(site.built.store, *given, DOCKER_CONFIG=site.config)
    assert done.returncode == EvidenceBroken.exit_code
    assert "does not know" in done.stderr


def test_an_image_published_bare_is_never_called_valid(site: Site) -> None:
    place = f"{site.registry.host_port}/bare/{IMAGE}:v1"
    options = ("--platform", "host", "--no-evidence", "--json", "--ca", str(site.registry.ca_file))
    done = sm120(site.built.store, "publish", IMAGE, place, *options, DOCKER_CONFIG=site.config)
    assert json.loads(done.stdout)["evidence"] == "left out"
    assert site.verify(place).returncode == EvidenceIncomplete.exit_code

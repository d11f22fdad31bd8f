"""Evidence of a real image, judged by cosign: what we sign, others can check offline."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from pipeline.app.workspace import host_platform
from pipeline.artifacts.attest.cosign import Content, attestation_attachment, signature_attachment
from pipeline.artifacts.attest.envelope import enclose, read_envelope
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key, public_pem, write_key
from pipeline.artifacts.attest.names import HOST_FACTS, PROVENANCE
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.core.errors import EvidenceBroken
from pipeline.core.model import canonical_json, sha256_of
from tests.integration.built import Built, build_image, run_sm120, sm120
from tests.testbed.registry import Registry

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
REPOSITORY = "sm120/engine"


def ask(cosign: Path, home: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run cosign where it knows nothing of this machine."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    command = [str(cosign), *map(str, args)]
    return subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Recorded:
    """A real image with its evidence."""

    built: Built
    key: Path
    trust: Path

    @property
    def records(self) -> Path:
        platform = self.built.platform.replace("/", "-")
        folder = self.built.store / "images" / self.built.name / platform / "records"
        return folder / self.built.digest.removeprefix("sha256:")

    @property
    def manifest(self) -> Path:
        folder = self.built.store / "oci" / "blobs" / "sha256"
        return folder / self.built.digest.removeprefix("sha256:")

    def verify(self, *more: str | Path) -> subprocess.CompletedProcess[str]:
        given = map(str, (self.built.name, "--trust", self.trust, *more))
        return run_sm120(self.built.store, "verify", *given)


@pytest.fixture(scope="module")
def recorded(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The small llama.cpp image, built, recorded and signed."""
    built = build_image(small_store, "llama-cpp-cpu", host_platform())
    home = tmp_path_factory.mktemp("keys")
    entry = sm120(small_store, "evidence", "new-key", "builder", "--output", str(home)).stdout
    (home / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    sm120(small_store, "evidence", "make", built.name, "--spdx", "--key", str(home / "builder.pem"))
    return Recorded(built, home / "builder.pem", home / "trust.yaml")


def test_a_real_images_evidence_is_valid_down_to_every_package(recorded: Recorded) -> None:
    done = recorded.verify("--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    provenance = tree["children"][0]
    titles = {child["title"]: child for child in provenance["children"]}
    debs = next(child for title, child in titles.items() if "Debian packages" in title)
    assert len(debs["children"]) > 50
    assert {child["verdict"] for child in debs["children"]} == {"valid"}


def test_a_real_image_is_not_valid_with_another_trust_file(
    recorded: Recorded, tmp_path: Path
) -> None:
    entry = sm120(
        recorded.built.store, "evidence", "new-key", "other", "--output", str(tmp_path)
    ).stdout
    (tmp_path / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    done = run_sm120(
        recorded.built.store, "verify", recorded.built.name, "--trust", f"{tmp_path}/trust.yaml"
    )
    assert done.returncode == EvidenceBroken.exit_code
    assert "does not know" in done.stderr


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ("provenance", "slsaprovenance1"),
        ("provenance", PROVENANCE),
        ("sbom-cyclonedx", "cyclonedx"),
        ("sbom-spdx", "https://spdx.dev/Document/v2.3"),
    ],
)
def test_cosign_accepts_our_statements_offline(
    recorded: Recorded, cosign: Path, tmp_path: Path, record: str, kind: str
) -> None:
    public = recorded.key.with_suffix(".pub")
    envelope = recorded.records / f"{record}.dsse.json"
    check = ("verify-blob-attestation", "--insecure-ignore-tlog", "--signature", envelope)
    good = ask(cosign, tmp_path, *check, "--key", public, "--type", kind, recorded.manifest)
    assert good.returncode == 0, good.stderr
    other = tmp_path / "other.pub"
    other.write_text(public_pem(make_private_key().public_key()))
    for wrong in (
        ("--key", other, "--type", kind, recorded.manifest),
        ("--key", public, "--type", "vuln", recorded.manifest),
        ("--key", public, "--type", kind, public),
    ):
        assert ask(cosign, tmp_path, *check, *wrong).returncode != 0


def test_cosign_accepts_a_predicate_of_our_own(cosign: Path, tmp_path: Path) -> None:
    key = make_private_key()
    public = write_key(tmp_path / "k.pem", key)
    said = make_statement("x", sha256_of(b"facts"), HOST_FACTS, {"host": "x"}, moment())
    (tmp_path / "x").write_bytes(b"facts")
    (tmp_path / "x.dsse.json").write_bytes(enclose(said, [LocalSigner(key)]).dump())
    check = ("verify-blob-attestation", "--insecure-ignore-tlog", "--key", public)
    named = ("--signature", tmp_path / "x.dsse.json", "--type", HOST_FACTS, tmp_path / "x")
    done = ask(cosign, tmp_path, *check, *named)
    assert done.returncode == 0, done.stderr


class RegistryFolder:
    """As much of a registry's client as these tests need."""

    def __init__(self, registry: Registry) -> None:
        self._base = f"{registry.url}/v2/{REPOSITORY}"
        self.name = f"{registry.host_port}/{REPOSITORY}"

    def blob(self, data: bytes) -> str:
        begun = requests.post(f"{self._base}/blobs/uploads/", timeout=10)
        place, digest = begun.headers["Location"], sha256_of(data)
        requests.put(place, params={"digest": digest}, data=data, timeout=10).raise_for_status()
        return digest

    def manifest(self, tag: str, config: bytes, layers: Sequence[Content]) -> str:
        described = [
            {
                "mediaType": x.media_type,
                "digest": self.blob(x.data),
                "size": len(x.data),
                "annotations": x.annotations,
            }
            for x in layers
        ]
        body: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": self.blob(config), "size": len(config)},
            "layers": described,
        }
        data = canonical_json(body)
        head = {"Content-Type": MANIFEST}
        done = requests.put(f"{self._base}/manifests/{tag}", data=data, headers=head, timeout=10)
        done.raise_for_status()
        return sha256_of(data)


def config_of(layers: Sequence[Content]) -> bytes:
    ids = [sha256_of(x.data) for x in layers]
    return canonical_json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": ids},
        }
    )


def test_cosign_verifies_signature_and_attestation_in_a_registry(
    cosign: Path, registry: Registry, tmp_path: Path
) -> None:
    evidence_folder, key = RegistryFolder(registry), make_private_key()
    public, signer = write_key(tmp_path / "k.pem", key), LocalSigner(key)
    layer = Content(b"layer", "application/vnd.oci.image.layer.v1.tar+gzip", {})
    digest = evidence_folder.manifest("v1", config_of([layer]), [layer])
    tag = digest.replace(":", "-")
    signature = signature_attachment(digest, evidence_folder.name, signer)
    evidence_folder.manifest(f"{tag}.sig", config_of([signature]), [signature])
    said = make_statement("engine", digest, PROVENANCE, {"runDetails": {}}, moment())
    attestation = attestation_attachment(enclose(said, [signer]))
    assert read_envelope(attestation.data, "it").statement == said
    evidence_folder.manifest(f"{tag}.att", config_of([attestation]), [attestation])
    image = f"{evidence_folder.name}@{digest}"
    loose = ("--insecure-ignore-tlog", "--allow-http-registry", "--allow-insecure-registry")
    done = ask(cosign, tmp_path, "verify", *loose, "--key", public, image)
    assert done.returncode == 0, done.stderr
    attested = ("verify-attestation", *loose, "--key", public, "--type", "slsaprovenance1")
    done = ask(cosign, tmp_path, *attested, image)
    assert done.returncode == 0, done.stderr
    other = tmp_path / "other.pub"
    other.write_text(public_pem(make_private_key().public_key()))
    assert ask(cosign, tmp_path, "verify", *loose, "--key", other, image).returncode != 0
    wrong = ("verify-attestation", *loose, "--key", other, "--type", "slsaprovenance1")
    assert ask(cosign, tmp_path, *wrong, image).returncode != 0

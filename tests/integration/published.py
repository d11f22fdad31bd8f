"""A published image and all that is needed to check it: registry, login, keys and judges."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import docker
from docker.models.images import Image

from tests.integration.built import Built, run_sm120, sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.registry import Registry

USER, PASSWORD = "ann", "correct horse"


@dataclass(frozen=True)
class Site:
    """A published image, and where and by whom."""

    built: Built
    registry: Registry
    config: str
    home: Path
    done: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.registry.host_port}/team/{self.built.name}"

    @property
    def by_digest(self) -> str:
        return f"{self.place}@{self.built.digest}"

    @property
    def public(self) -> Path:
        return self.home / "builder.pub"

    def verify(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        given = ("verify", name, "--trust", f"{self.home}/trust.yaml", *more)
        ca = ("--ca", str(self.registry.ca_file)) if "/" in name and ":" in name else ()
        return run_sm120(self.built.store, *given, *ca, DOCKER_CONFIG=self.config)

    def blob(self, digest: str) -> Path:
        return self.built.store / "oci" / "blobs" / "sha256" / digest.removeprefix("sha256:")


def publish_site(built: Built, registry: Registry, keys: Path, home: Path) -> Site:
    """Publish with the builder's key, as somebody who is logged in."""
    config = keep_login(home / "docker", registry.host_port, f"{USER}:{PASSWORD}")
    place = f"{registry.host_port}/team/{built.name}:v1"
    key = ("--key", str(keys / "builder.pem"), "--ca", str(registry.ca_file))
    publish = ("publish", built.name, place, "--platform", built.platform, "--spdx", *key)
    done = json.loads(sm120(built.store, *publish, "--json", DOCKER_CONFIG=config).stdout)
    return Site(built, registry, config, keys, done)


def keep_login(folder: Path, host_port: str, login: str) -> str:
    """What `docker login` leaves behind."""
    folder.mkdir()
    auth = base64.b64encode(login.encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host_port: {"auth": auth}}}))
    return str(folder)


def layout_blobs(folder: Path) -> dict[str, str]:
    """Every blob of a layout with the hash of its bytes."""
    found = {}
    for path in (folder / "blobs" / "sha256").iterdir():
        with path.open("rb") as handle:
            found[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


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


def require_cosign_agrees(site: Site, cosign: Path, other_public: Path) -> None:
    """cosign verifies signature and statements with the builder's key, and with no other."""
    loose = ("--insecure-ignore-tlog=true", "--key")
    attested = ("verify-attestation", "--type")
    checks: list[tuple[str, ...]] = [
        ("verify",),
        *((*attested, kind) for kind in ("slsaprovenance1", "cyclonedx")),
        (*attested, "https://spdx.dev/Document/v2.3"),
        (*attested, "https://in-toto.io/attestation/test-result/v0.1"),
    ]
    for check in checks:
        good = ask(site, cosign, *check, *loose, str(site.public), site.by_digest)
        assert good.returncode == 0, (check, good.stderr)
    for check in checks[:2]:
        bad = ask(site, cosign, *check, *loose, str(other_public), site.by_digest)
        assert bad.returncode != 0


def require_oras_finds_all(site: Site, oras: Path) -> None:
    """oras discovers exactly what was said to be attached."""
    ca = ("--ca-file", str(site.registry.ca_file))
    done = ask(site, oras, "discover", "--format", "json", *ca, site.by_digest)
    assert done.returncode == 0, done.stderr
    found = {m["digest"] for m in json.loads(done.stdout)["manifests"]}
    listed = {a["digest"] for a in site.done["attached"] if a["found_by"] == "fallback tag"}
    assert found == listed


def require_docker_pulls_the_same(site: Site, daemon: DockerDaemon, *, save: bool = True) -> Image:
    """Another daemon pulls by digest and holds the bytes that were built, layer by layer.

    `save` also reads them back out of it, for which Docker needs the unpacked size once more.
    """
    client = docker.DockerClient(base_url=daemon.socket_url, timeout=1800)
    login = {"username": USER, "password": PASSWORD}
    pulled = client.images.pull(site.place, tag=site.built.digest, auth_config=login)
    # the daemon may know it from another registry too
    assert site.by_digest in pulled.attrs["RepoDigests"]
    manifest = json.loads(site.blob(site.built.digest).read_bytes())
    # Docker's own name for an image is the digest of its config, and it checks every layer's diffID
    assert pulled.id == manifest["config"]["digest"]
    config = json.loads(site.blob(manifest["config"]["digest"]).read_bytes())
    diff_ids = config["rootfs"]["diff_ids"]
    assert pulled.attrs["RootFS"]["Layers"] == diff_ids
    assert not save or set(diff_ids) <= set(_file_hashes(pulled.save()))
    return pulled


def _file_hashes(archive: Iterable[bytes]) -> Iterator[str]:
    """The digest of every file in a tar as it streams by, which may be larger than memory."""
    with tarfile.open(fileobj=cast("IO[bytes]", _Stream(archive)), mode="r|") as members:
        for member in members:
            content = members.extractfile(member) if member.isfile() else None
            if content is not None:
                sha = hashlib.sha256()
                while piece := content.read(1 << 20):
                    sha.update(piece)
                yield f"sha256:{sha.hexdigest()}"


class _Stream:
    """Pieces of bytes as a file that can be read once."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._rest = iter(pieces), bytearray()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._rest += piece
        found = bytes(self._rest[:size])
        del self._rest[:size]
        return found

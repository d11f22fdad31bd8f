"""Publishing to a real registry, with others as judges of what arrived."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pipeline.app.registry import open_registry
from pipeline.app.workspace import host_platform
from pipeline.artifacts.attest.cosign import Content
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.core.errors import (
    DeleteDisabled,
    NotInRegistry,
    PipelineError,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
)
from pipeline.evidence.publish.attachment import Attachment, attach
from tests.integration.bench import Bench, complete_digest
from tests.integration.built import Built, build_image, run_sm120, sm120
from tests.integration.published import PASSWORD, USER, keep_login, layout_blobs
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.engine import chat, running_container
from tests.testbed.oci_door import (
    Door,
    Fault,
    Reply,
    behind,
    changed,
    cut,
    drop,
    lose_answer,
    oci_door,
    status,
    with_headers,
)
from tests.testbed.packages import ensure_debian_packages, find_program
from tests.testbed.registry import Registry, oci_registry
from tests.testbed.tiny_gguf import expected_text

Kind = type[PipelineError]
IMAGE = "llama-cpp-cpu"


@pytest.fixture(scope="module")
def image(lean_store: Path) -> Built:
    """llama-cpp-cpu for both architectures; the digest is this machine's."""
    for platform in ("linux/amd64", "linux/arm64"):
        build_image(lean_store, IMAGE, platform)
    return build_image(lean_store, IMAGE, host_platform())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry with TLS and passwords."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("guarded")
        part = oci_registry(folder, tls=True, htpasswd={USER: PASSWORD})
        yield stack.enter_context(part)


@pytest.fixture
def docker_config(guarded: Registry, tmp_path: Path) -> str:
    return keep_login(tmp_path / "docker", guarded.host_port, f"{USER}:{PASSWORD}")


def test_through_tls_and_password_and_back_every_byte_is_the_same(
    image: Built, guarded: Registry, docker_config: str, tmp_path: Path
) -> None:
    place = f"{guarded.host_port}/team/{IMAGE}"
    options = ("--ca", str(guarded.ca_file), "--json")
    done = json.loads(
        sm120(
            image.store, "publish", IMAGE, f"{place}:v1", *options, DOCKER_CONFIG=docker_config
        ).stdout
    )
    assert done["platforms"][host_platform()] == image.digest
    again = sm120(
        image.store, "publish", IMAGE, f"{place}:v1", *options, DOCKER_CONFIG=docker_config
    )
    assert json.loads(again.stdout)["sent_bytes"] == 0
    reference = f"{place}@{done['digest']}"
    sm120(
        image.store,
        "registry",
        "pull",
        reference,
        str(tmp_path / "out"),
        *options,
        DOCKER_CONFIG=docker_config,
    )
    sm120(image.store, "image", "export", IMAGE, str(tmp_path / "built"))
    pulled, built = layout_blobs(tmp_path / "out"), layout_blobs(tmp_path / "built")
    assert all(name == digest for name, digest in pulled.items())
    assert built.items() <= pulled.items()
    for name in built:
        one, two = (tmp_path / f / "blobs" / "sha256" / name for f in ("out", "built"))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("login", "with_ca", "error"),
    [
        (f"{USER}:wrong", True, RegistryRefused),
        ("", True, RegistryRefused),
        (f"{USER}:{PASSWORD}", False, RegistryUnreachable),
    ],
)
def test_without_the_password_or_the_ca_nothing_is_published(
    image: Built, guarded: Registry, tmp_path: Path, login: str, with_ca: bool, error: Kind
) -> None:
    config = keep_login(tmp_path / "docker", guarded.host_port if login else "other", login)
    ca = ("--ca", str(guarded.ca_file)) if with_ca else ()
    ended = run_sm120(
        image.store, "publish", IMAGE, f"{guarded.host_port}/x:v1", *ca, DOCKER_CONFIG=config
    )
    assert ended.returncode == error.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_oras_reads_what_was_attached_and_its_own_pull_agrees(
    image: Built, guarded: Registry, docker_config: str, oras: Path, tmp_path: Path
) -> None:
    place = f"{guarded.host_port}/judged/{IMAGE}"
    (tmp_path / "note.json").write_text('{"seen": true}\n')
    note = f"{tmp_path}/note.json:application/vnd.example.note+json"
    per_platform = f"{host_platform()}={note}"
    done = json.loads(
        sm120(
            *(image.store, "publish", IMAGE, f"{place}:v1", "--ca", str(guarded.ca_file)),
            *("--attach", note, "--attach", per_platform, "--no-evidence", "--json"),
            DOCKER_CONFIG=docker_config,
        ).stdout
    )
    assert [a["found_by"] for a in done["attached"]] == ["fallback tag"] * 2

    def ask(*args: str, ca_option: str = "--ca-file") -> str:
        command = [str(oras), *args, ca_option, str(guarded.ca_file)]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DOCKER_CONFIG": docker_config}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    for subject, attached in zip((done["digest"], image.digest), done["attached"], strict=True):
        found = json.loads(ask("discover", "--format", "json", f"{place}@{subject}"))
        assert [m["digest"] for m in found["manifests"]] == [attached["digest"]]
        ask("pull", "-o", str(tmp_path / "got"), f"{place}@{attached['digest']}")
        assert (tmp_path / "got" / "note.json").read_text() == '{"seen": true}\n'
        shutil.rmtree(tmp_path / "got")
    copy = ("cp", "--to-oci-layout", f"{place}:v1", f"{tmp_path}/oras:v1")
    ask(*copy, ca_option="--from-ca-file")
    sm120(
        *(image.store, "registry", "pull", f"{place}:v1", str(tmp_path / "ours")),
        *("--ca", str(guarded.ca_file)),
        DOCKER_CONFIG=docker_config,
    )
    assert layout_blobs(tmp_path / "oras") == layout_blobs(tmp_path / "ours")


def test_what_oras_attached_is_found_by_us_and_stays_when_we_attach(
    image: Built, registry: Registry, oras: Path, tmp_path: Path
) -> None:
    place = f"{registry.host_port}/both/{IMAGE}"
    (tmp_path / "note.txt").write_text("ours")
    (tmp_path / "theirs.txt").write_text("theirs")
    one = ("publish", IMAGE, f"{place}:v1", "--platform", "host", "--no-evidence", "--json")
    done = json.loads(sm120(image.store, *one).stdout)
    command = [str(oras), "attach", "--plain-http", "--artifact-type", "text/theirs"]
    subprocess.run(
        [*command, f"{place}@{done['digest']}", "theirs.txt"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    sm120(image.store, *one, "--attach", f"{tmp_path}/note.txt:text/ours")
    out = sm120(
        image.store,
        "registry",
        "pull",
        f"{place}:v1",
        str(tmp_path / "out"),
        "--evidence",
        "--json",
    )
    layout = json.loads((tmp_path / "out" / "index.json").read_bytes())
    kinds = [m.get("artifactType") for m in layout["manifests"]]
    assert sorted(kinds[1:]) == ["text/ours", "text/theirs"]
    assert len(json.loads(out.stdout)["evidence"]) == 2


def test_cosign_verifies_a_signature_that_was_attached_under_its_tag_and_no_other_key_does(
    bench: Bench, registry: Registry, cosign: Path, tmp_path: Path
) -> None:
    place = f"{registry.host_port}/signed/tiny"
    said = bench.run("publish", "tiny", f"{place}:v1", "--json")
    digest = json.loads(said.stdout)["digest"]
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    with open_registry(parse_repository(place), Access()) as repository:
        attach(repository, repository.manifest(digest), [signature(key, place, digest)])

    def verify(public: ec.EllipticCurvePrivateKey) -> int:
        pem = public.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / "key.pem").write_bytes(pem)
        command = [str(cosign), "verify", "--key", str(tmp_path / "key.pem")]
        command += ["--insecure-ignore-tlog=true", "--allow-http-registry", f"{place}@{digest}"]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, check=False).returncode

    assert verify(key) == 0
    assert verify(other) != 0


def test_published_again_from_a_fresh_store_the_image_verifies_as_it_did(
    bench: Bench, registry: Registry, keys: Path, tmp_path: Path
) -> None:
    """As CI does: each run builds in a store of its own, and signs with the same key."""
    place = f"{registry.host_port}/ci/tiny"
    key, mirror = ("--key", str(keys / "builder.pem")), str(bench.store.parent / "mirror")
    # neither is the module's own store: what is signed there shows in other tests
    first, fresh = (Bench(bench.checkout, tmp_path / name) for name in ("first", "second"))
    for store, tag in ((first, "v1"), (fresh, "v2")):
        built = store.run("build", "tiny", "--offline", "--mirror", mirror)
        assert built.returncode == 0, built.stderr
        published = store.run("publish", "tiny", f"{place}:{tag}", *key)
        assert published.returncode == 0, published.stderr
        time.sleep(1.1)  # statements have whole seconds
    layout = tmp_path / "layout"
    assert fresh.run("registry", "pull", f"{place}:v2", str(layout), "--evidence").returncode == 0
    trust = ("--trust", str(keys / "trust.yaml"))
    for what in (f"{place}:v1", f"{place}:v2", str(layout)):
        judged = fresh.run("verify", what, *trust)
        assert judged.returncode == 0, judged.stdout + judged.stderr
        assert "replaced by a statement of the latest set" in judged.stdout


def signature(key: ec.EllipticCurvePrivateKey, place: str, digest: str) -> Attachment:
    """What cosign looks for beside an image."""
    critical = {
        "identity": {"docker-reference": place},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    payload = json.dumps({"critical": critical, "optional": None}).encode()
    signed = base64.b64encode(key.sign(payload, ec.ECDSA(hashes.SHA256()))).decode()
    layer = Content(
        media_type="application/vnd.dev.cosign.simplesigning.v1+json",
        data=payload,
        annotations={"dev.cosignproject.cosign/signature": signed},
    )
    config = Content(media_type="application/vnd.oci.image.config.v1+json", data=b"{}")
    tag = f"{fallback_tag(digest)}.sig"
    return Attachment(artifact_type=None, layers=(layer,), config=config, tag=tag)


def test_skopeo_copies_the_index_with_the_same_digests(
    image: Built, registry: Registry, tmp_path: Path
) -> None:
    ensure_debian_packages(["skopeo"])
    place = f"{registry.host_port}/copied/{IMAGE}"
    done = json.loads(sm120(image.store, "publish", IMAGE, f"{place}:v1", "--json").stdout)
    command = [find_program("skopeo"), "copy", "--all", "--preserve-digests"]
    command += ["--src-tls-verify=false", f"docker://{place}@{done['digest']}"]
    subprocess.run([*command, f"oci:{tmp_path}/copy"], check=True, capture_output=True)
    index = json.loads((tmp_path / "copy" / "index.json").read_bytes())
    assert index["manifests"][0]["digest"] == done["digest"]


def test_another_docker_daemon_pulls_by_digest_and_runs_what_was_published(
    image: Built,
    at_the_bridge: Registry,
    docker_daemon: DockerDaemon,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    place = f"{at_the_bridge.host_port}/team/{IMAGE}"
    config = keep_login(tmp_path / "docker", at_the_bridge.host_port, f"{USER}:{PASSWORD}")
    published = sm120(image.store, "publish", IMAGE, f"{place}:v1", "--json", DOCKER_CONFIG=config)
    digest = json.loads(published.stdout)["digest"]
    client = docker.DockerClient(base_url=docker_daemon.socket_url)
    login = {"username": USER, "password": PASSWORD}
    pulled = client.images.pull(place, tag=digest, auth_config=login)
    names = pulled.attrs["RepoDigests"]
    assert f"{place}@{digest}" in names
    # the daemon may know it from another registry too
    assert [name for name in names if name.startswith(f"{place}@")] == [f"{place}@{digest}"]
    serve = ["-m", "/models/tiny.gguf", "-t", "1", "-c", "512"]
    with running_container(docker_daemon, f"{place}@{digest}", serve, tiny_model.parent) as url:
        assert chat(url, max_tokens=16) == expected_text(16)


def lost_session(reply: Reply) -> Reply:
    return Reply(404, {}, b"")


FAULTS: dict[str, tuple[str, str, Fault, int]] = {
    "500 at HEAD": ("HEAD", "blobs", status(500), 2),
    "500 at POST": ("POST", "uploads", status(500), 2),
    "500 at PUT of a blob": ("PUT", "uploads", status(500), 2),
    "500 at PUT of a manifest": ("PUT", "manifests/sha256", status(500), 2),
    "500 at PUT of the tag": ("PUT", "manifests/v1", status(500), 2),
    "500 at reading back": ("GET", "manifests/", status(500), 2),
    "429 with Retry-After": ("PUT", "uploads", status(429, Retry_After="1"), 1),
    "no answer to HEAD": ("HEAD", "blobs", drop(), 2),
    "cut in mid-blob": ("PUT", "uploads", cut(700_000), 2),
    "cut at the first byte": ("PUT", "uploads", cut(0), 1),
    "answer to a blob lost": ("PUT", "uploads", lose_answer(), 1),
    "answer to POST lost": ("POST", "uploads", lose_answer(), 1),
    "answer to the tag lost": ("PUT", "manifests/v1", lose_answer(), 1),
    "upload session lost": ("PUT", "uploads", changed(lost_session), 1),
}


# Faults of different requests meet one upload together.
TOGETHER = [
    tuple(name for name in FAULTS if name.startswith("500")),
    ("429 with Retry-After", "no answer to HEAD", "answer to POST lost", "answer to the tag lost"),
    *[("cut in mid-blob",), ("cut at the first byte",)],
    *[("answer to a blob lost",), ("upload session lost",)],
]


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_faults_that_pass_are_survived(bench: Bench, door: Door, names: tuple[str, ...]) -> None:
    for name in names:
        method, place, fault, times = FAULTS[name]
        door.fail(method, place, fault, times)
    done = bench.publish(door)
    assert not door.faults, "a fault never happened"
    assert complete_digest(door) == done["digest"]


def test_every_fault_that_passes_is_met() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(FAULTS)


def truncated(reply: Reply) -> Reply:
    return replace(reply, body=reply.body[:-5])


WRONG = "sha256:" + "0" * 64
LASTING: dict[str, tuple[str, str, Fault, int, Kind]] = {
    "401 for ever": (
        *("HEAD", "blobs", status(401, WWW_Authenticate='Basic realm="x"')),
        *(99, RegistryRefused),
    ),
    "403": ("POST", "uploads", status(403), 99, RegistryRefused),
    "429 for ever": ("PUT", "uploads", status(429, Retry_After="0"), 99, RegistryUnreachable),
    "500 for ever": ("PUT", "manifests/sha256", status(500), 99, RegistryUnreachable),
    "a blob's digest answered wrongly": (
        *("PUT", "uploads", with_headers(Docker_Content_Digest=WRONG)),
        *(1, RegistryBroken),
    ),
    "a manifest's digest answered wrongly": (
        *("GET", "manifests/sha256", with_headers(Docker_Content_Digest=WRONG)),
        *(9, RegistryBroken),
    ),
    "a truncated manifest": ("GET", "manifests/sha256", changed(truncated), 9, RegistryBroken),
    "no Location": ("POST", "uploads", status(202), 9, RegistryBroken),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_lasts_ends_with_its_own_code_and_no_tag(
    bench: Bench, door: Door, name: str
) -> None:
    method, place, fault, times, error = LASTING[name]
    door.fail(method, place, fault, times)
    ended = bench.run("publish", "tiny", f"{door.host_port}/app:v1")
    assert ended.returncode == error.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    door.faults.clear()
    assert complete_digest(door) is None
    # what was sent before is of use, whatever ended it
    if error is RegistryUnreachable:
        bench.publish(door)
        assert complete_digest(door)


def test_uploads_and_blobs_that_lie_elsewhere_get_no_login(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        part = oci_registry(tmp_path, htpasswd={USER: PASSWORD})
        registry = stack.enter_context(part)
        door = stack.enter_context(oci_door(behind(registry.host_port)))
        elsewhere = stack.enter_context(oci_door(lambda request: Reply(403)))
        config = keep_login(tmp_path / "docker", door.host_port, f"{USER}:{PASSWORD}")
        monkeypatch.setenv("DOCKER_CONFIG", config)
        for method, place in (("POST", "uploads/"), ("PUT", "uploads/"), ("HEAD", "blobs")):
            away = status(307, Location=f"{elsewhere.url}/v2/app/blobs/uploads/1")
            door.fail(method, place, away)
            assert (
                bench.run("publish", "tiny", f"{door.host_port}/app:v1").returncode
                == RegistryRefused.exit_code
            )
            assert not door.faults
            door.faults.clear()
        assert elsewhere.asked
        assert [a.headers.get("authorization") for a in elsewhere.asked if a] == [None] * len(
            elsewhere.asked
        )
        bench.publish(door)
        assert any(a.headers.get("authorization") for a in door.asked)


def test_clearing_leaves_kept_images_pullable_and_their_evidence_in_place(
    bench: Bench, door: Door, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("note")
    kept = bench.publish(door, "v1", "--attach", f"{tmp_path}/note.txt:text/plain")
    gone = bench.publish(door, "old", "--index")
    at = f"{door.host_port}/app"
    planned = json.loads(bench.run("registry", "clean", at, "--keep", "v*", "--json").stdout)
    assert [h["digest"] for h in planned[0]["gone"]] == [gone["digest"]]
    assert door.count("DELETE") == 0
    assert bench.run("registry", "clean", at, "--keep", "v*", "--yes").returncode == 0
    assert complete_digest(door) == kept["digest"]
    assert (
        bench.run("registry", "pull", f"{at}@{gone['digest']}", str(tmp_path / "a")).returncode
        == NotInRegistry.exit_code
    )
    pulled = bench.run("registry", "pull", f"{at}:v1", str(tmp_path / "b"), "--evidence", "--json")
    assert len(json.loads(pulled.stdout)["evidence"]) == 1


def test_a_registry_that_does_not_delete_says_what_it_needs(bench: Bench, tmp_path: Path) -> None:
    with ExitStack() as stack:
        registry = stack.enter_context(oci_registry(tmp_path, delete=False))
        door = stack.enter_context(oci_door(behind(registry.host_port)))
        bench.publish(door)
        bench.publish(door, "old", "--index")
        ended = bench.run("registry", "clean", f"{door.host_port}/app", "--keep", "v1", "--yes")
        assert ended.returncode == DeleteDisabled.exit_code
        assert "delete: enabled: true" in ended.stderr

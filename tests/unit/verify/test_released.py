"""What earlier releases signed stays valid; one changed byte of it does not.

Nothing here makes a file: the artefacts are those of the release, and are never made again.
`python -m tests.released --add VERSION` adds those of a new one.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.artifacts.attest.keys import make_private_key, public_pem
from pipeline.core.model import canonical_json
from pipeline.serving.quality.model import QualityResult
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.smoke.model import SmokeResult
from tests.released import ARTEFACTS, MOST_BYTES, RELEASED, changes, digests, verify_artefact
from tests.unit.support import Command
from tests.unit.verify.world import sign_bytes

RELEASES = sorted(path.name for path in RELEASED.iterdir() if path.is_dir())


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, as a user's own folder: weights get a receipt when they are read."""
    return Path(shutil.copytree(RELEASED / request.param, tmp_path / "release"))


@pytest.mark.parametrize("artifact", ARTEFACTS)
def test_what_a_release_signed_is_valid(release: Path, sm120: Command, artifact: str) -> None:
    ended = verify_artefact(sm120, release, artifact)
    assert ended.code == 0, ended.out + ended.err
    assert "by released" in ended.out


def test_a_smoke_result_of_a_release_can_be_read(release: Path) -> None:
    result = SmokeResult.model_validate_json((release / "smoke" / "smoke.json").read_bytes())
    assert (result.verdict, result.last_good) == ("passed", "memory")


# file, bytes before, bytes after, the artifact that must fail, its exit code, its reason
CHANGES = [
    ("report.html", b'"mean":', b'"mean":9', "report.html", 77, "which was not signed"),
    ("report.html", b"Benchmark of", b"benchmark of", "report.html", 77, "which was not signed"),
    ("report.html", b"<style>", b"<style> ", "report.html", 77, "which was not signed"),
    ("bench/quick/bench.json", b'"p99":', b'"p99":1', "bench/quick", 77, "bench.json has sha256:"),
    ("bench/quick/requests.jsonl", b'"chunks":8', b'"chunks":7', "report.html", 77, "requests"),
    ("host/n1.json", b"n1", b"n2", "host/n1.json", 71, "subject"),
    ("host/n1.json", b"n1", b"n2", "report.html", 77, "n1.json: has sha256:"),
    ("weights/model.safetensors", b"weights", b"Weights", "weights", 71, "model.safetensors"),
    ("weights/config.json", b"tiny", b"tinY", "report.html", 71, "config.json"),
    ("layout/index.json", b"sha256:2", b"sha256:3", "layout", 71, "manifest"),
    ("layout/records/run-smoke-brainy.dsse.json", b'"sig":"', b'"sig":"A', "layout", 71, ""),
    ("bench/quick/bench.json.dsse.json", b'"sig":"', b'"sig":"A', "bench/quick", 71, ""),
    ("report.html.dsse.json", b'"sig":"', b'"sig":"A', "report.html", 71, ""),
]


@pytest.mark.parametrize(("file", "old", "new", "artifact", "code", "reason"), CHANGES)
def test_a_changed_byte_is_found(
    release: Path,
    sm120: Command,
    file: str,
    old: bytes,
    new: bytes,
    artifact: str,
    code: int,
    reason: str,
) -> None:
    path = release / file
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    ended = verify_artefact(sm120, release, artifact)
    assert ended.code == code, ended.out + ended.err
    assert reason in ended.err


@pytest.mark.parametrize("blob", range(4))
def test_a_changed_byte_of_a_blob_is_found(release: Path, sm120: Command, blob: int) -> None:
    path = sorted((release / "layout" / "blobs" / "sha256").iterdir())[blob]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    ended = verify_artefact(sm120, release, "layout")
    assert ended.code == 71, ended.out + ended.err
    assert path.name[:12] in ended.err


def test_a_release_that_somebody_else_signed_is_not_valid(release: Path, sm120: Command) -> None:
    assert sm120("evidence", "new-key", "other", "--output", release / "keys").code == 0
    shutil.copy(release / "keys" / "other.pub", release / "released.pub")
    assert [verify_artefact(sm120, release, artifact).code for artifact in ARTEFACTS] == [71] * 5


# each is made by a command of its own; a set of later than the first holds all of them
STATED = ("audit", "gate-parsers", "gate-smem", "provenance", "rebuild", "run-smoke", "sbom")


def test_the_latest_set_has_a_statement_of_every_kind() -> None:
    release = RELEASED / RELEASES[-1]
    names = [path.name for path in (release / "layout" / "records").iterdir()]
    missing = [kind for kind in STATED if not any(name.startswith(kind) for name in names)]
    assert missing == []
    assert (release / "weights" / ".sm120" / "model.sig").is_file()
    assert (release / "weights" / ".sm120" / "record.dsse.json").is_file()
    assert Recipes([release / "checkout" / "recipes"]).read("brainy").image == "tiny"


def _records(release: Path) -> list[Path]:
    return [*release.rglob("*.dsse.json"), *release.rglob("model.sig")]


def test_a_flipped_byte_of_any_statement_is_found(release: Path, sm120: Command) -> None:
    for path in _records(release):
        data = path.read_bytes()
        found = re.search(rb'"payload": ?"', data)
        assert found is not None
        at = found.end() + 40
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        parts = path.relative_to(release).parts
        artefact = "bench/quick" if parts[0] == "bench" else parts[0].removesuffix(".dsse.json")
        artefact = "host/n1.json" if parts[0] == "host" else artefact
        assert verify_artefact(sm120, release, artefact).code == 71, path
        path.write_bytes(data)
        assert verify_artefact(sm120, release, artefact).code == 0, path


# file, its version, a later one, what reads it, what it says
LATER = [
    ("bench/quick/bench.json", b"sm120-bench/1", b"sm120-bench/9", ("report", "bench/quick")),
    ("report.html", b"sm120-report/1", b"sm120-report/9", ("verify", "report.html")),
    ("host/n1.json", b'"version":1', b'"version":9', ("host", "drift", "host/n1.json")),
    ("weights/.sm120/lock.yaml", b"format: 1", b"format: 9", ("verify", "weights")),
    (
        "checkout/lockfiles/images/tiny.amd64.lock.yaml",
        b"format: 1",
        b"format: 9",
        ("image", "lock", "tiny", "--check"),
    ),
]


@pytest.mark.parametrize(("file", "version", "later", "words"), LATER, ids=[r[0] for r in LATER])
def test_a_file_of_a_later_version_is_refused_with_the_reason(
    release: Path, sm120: Command, file: str, version: bytes, later: bytes, words: tuple[str, ...]
) -> None:
    path = release / file
    data = path.read_bytes()
    assert version in data
    path.write_bytes(data.replace(version, later, 1))
    sm120.cwd = release
    ended = sm120("--checkout", release / "checkout", *words)
    assert ended.code
    assert "and this version of sm120 reads" in ended.err
    assert "take a newer one" in ended.err


@pytest.mark.parametrize(
    ("file", "model"), [("smoke/smoke.json", SmokeResult), ("none", QualityResult)]
)
def test_a_result_of_a_later_version_is_refused_with_the_reason(
    release: Path, file: str, model: type[SmokeResult] | type[QualityResult]
) -> None:
    path = release / file
    body = json.loads(path.read_bytes()) if path.is_file() else {}
    with pytest.raises(ValidationError, match="this version of sm120 reads 'sm120-"):
        model.model_validate({**body, "format": "sm120-later/9"})


def test_a_statement_of_a_later_kind_is_refused_with_the_reason(
    release: Path, sm120: Command
) -> None:
    path = release / "host" / "n1.json.dsse.json"
    body = json.loads(base64.b64decode(json.loads(path.read_bytes())["payload"]))
    assert body["predicateType"].endswith(":v1")
    body["predicateType"] = body["predicateType"].replace(":v1", ":v9")
    key = make_private_key()
    path.write_bytes(sign_bytes(canonical_json(body), key).dump())
    (release / "released.pub").write_text(public_pem(key.public_key()))
    ended = verify_artefact(sm120, release, "host/n1.json")
    assert ended.code not in (0, 72), ended.out
    assert "host-facts:v9" in ended.out + ended.err


def test_no_file_of_a_release_was_edited_removed_or_added() -> None:
    assert changes(RELEASED) == []


def test_an_edited_a_removed_and_a_new_file_are_named(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(RELEASED, tmp_path / "released"))
    first = RELEASES[0]
    (copy / first / "report.html").write_bytes(b"another")
    (copy / first / "released.pub").unlink()
    (copy / first / "new").write_bytes(b"")
    assert changes(copy) == [
        f"{first}/new: is not listed",
        f"{first}/released.pub: was removed",
        f"{first}/report.html: was edited",
    ]
    shutil.rmtree(copy / first)
    assert len(changes(copy)) == sum(name.startswith(f"{first}/") for name in digests(RELEASED))


def test_the_sets_stay_small() -> None:
    sizes = [path.stat().st_size for path in RELEASED.rglob("*") if path.is_file()]
    assert sum(sizes) < MOST_BYTES

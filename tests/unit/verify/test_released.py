"""What earlier releases signed stays valid; one changed byte of it does not.

Nothing here makes a file: the artefacts are those of the release, and are never made again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.serving.smoke.model import SmokeResult
from tests.unit.support import Command, Ended

RELEASED = Path(__file__).parents[2] / "fixtures" / "released"
RELEASES = sorted(path.name for path in RELEASED.iterdir() if path.is_dir())
ARTIFACTS = ("report.html", "bench/quick", "layout", "weights", "host/n1.json")


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, as a user's own folder: weights get a receipt when they are read."""
    return Path(shutil.copytree(RELEASED / request.param, tmp_path / "release"))


def _verify(sm120: Command, release: Path, artifact: str) -> Ended:
    folders = [release, *(release / name for name in ("layout", "weights", "host"))]
    look_in = [word for folder in folders for word in ("--look-in", folder)]
    words = ("--key", release / "released.pub", "--deep", *look_in)
    if artifact in ("layout", "weights", "host/n1.json"):
        words = words[:3]
    return sm120("--checkout", release / "checkout", "verify", release / artifact, *words)


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_what_a_release_signed_is_valid(release: Path, sm120: Command, artifact: str) -> None:
    ended = _verify(sm120, release, artifact)
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
    ended = _verify(sm120, release, artifact)
    assert ended.code == code, ended.out + ended.err
    assert reason in ended.err


@pytest.mark.parametrize("blob", range(4))
def test_a_changed_byte_of_a_blob_is_found(release: Path, sm120: Command, blob: int) -> None:
    path = sorted((release / "layout" / "blobs" / "sha256").iterdir())[blob]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    ended = _verify(sm120, release, "layout")
    assert ended.code == 71, ended.out + ended.err
    assert path.name[:12] in ended.err


def test_a_release_that_somebody_else_signed_is_not_valid(release: Path, sm120: Command) -> None:
    assert sm120("evidence", "new-key", "other", "--output", release / "keys").code == 0
    shutil.copy(release / "keys" / "other.pub", release / "released.pub")
    assert [_verify(sm120, release, artifact).code for artifact in ARTIFACTS] == [71] * 5

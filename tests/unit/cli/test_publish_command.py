from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.images.lock.model import read_lock
from pipeline.images.spec.checkout import Checkout
from tests.testbed.oci_door import Door
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.support import AMD64, ARM64, Command, build_tiny, lock_to, write_spec
from tests.unit.support import tiny_spec as spec_of

PLACE = "team/tiny"


@pytest.fixture
def built(checkout: Checkout, sm120: Command) -> str:
    return str(build_tiny(sm120, "--accept", "--json").json[0]["digest"])


def test_an_image_is_published_listed_pulled_and_cleared(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    at = f"{door.host_port}/{PLACE}"
    done = sm120("publish", "tiny", f"{at}:v1", "--json").json
    assert (done["digest"], done["tag"]) == (built, "v1")
    assert done["gates"] == [{"platform": "linux/amd64", "state": "no gates", "message": ""}]
    assert sm120("publish", "tiny", at, "--json").json["tag"] == built[7:19]
    listed = sm120("registry", "tags", at, "--json").json
    assert {row["tag"] for row in listed} == {"v1", built[7:19]}
    pulled = sm120("registry", "pull", f"{at}:v1", tmp_path / "out", "--json").json
    assert pulled["digest"] == built
    layout = json.loads((tmp_path / "out/index.json").read_bytes())
    assert layout["manifests"][0]["digest"] == built
    cleared = sm120("registry", "clean", at, "--keep", "v1", "--json").json
    assert cleared[0]["gone"] == []


def test_of_what_a_pull_finds_in_its_folder_only_what_is_damaged_comes_again(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    at, out = f"{door.host_port}/{PLACE}:v1", tmp_path / "out"
    sm120("publish", "tiny", at)
    assert sm120("registry", "pull", at, out, "--json").json["digest"] == built
    (first, *_) = sorted((out / "blobs" / "sha256").iterdir(), key=lambda p: -p.stat().st_size)
    before = first.read_bytes()
    first.write_bytes(b"x")
    again = sm120("registry", "pull", at, out, "--json").json
    assert again["received_bytes"] == len(before)
    assert first.read_bytes() == before


def test_a_pull_refuses_a_folder_that_holds_something_else(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    at = f"{door.host_port}/{PLACE}:v1"
    sm120("publish", "tiny", at)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.pdf").write_text("mine")
    ended = sm120("registry", "pull", at, tmp_path / "out")
    assert ended.error == "StoreUnwritable"


def test_what_a_person_reads(built: str, sm120: Command, door: Door, tmp_path: Path) -> None:
    at = f"{door.host_port}/{PLACE}"
    done = sm120("publish", "tiny", f"{at}:v1", "--attach", "mirror/../images/tiny/image.yaml:a/b")
    assert "tiny for linux/amd64 has no gates" in done.err
    assert f"{at}:v1 is {built}" in done.out
    assert "attached a/b" in done.out
    assert built in sm120("registry", "tags", at).out
    assert built in sm120("registry", "pull", f"{at}@{built}", tmp_path / "out", "--evidence").out
    assert "would go" in sm120("registry", "clean", at, "--keep", "v1").out
    assert "would be sent" in sm120("publish", "tiny", f"{at}:v2", "--dry-run").out


def test_an_image_that_is_not_built_is_not_published(
    checkout: Checkout, sm120: Command, door: Door
) -> None:
    ended = sm120("publish", "tiny", f"{door.host_port}/{PLACE}:v1")
    assert ended.error == "UnknownImage"
    assert not door.asked


@pytest.fixture
def two_platforms(checkout: Checkout) -> None:
    """The image is locked for two platforms."""
    write_spec(checkout, spec_of(platforms=[AMD64, ARM64]))
    wheels = read_lock(checkout.lock_path("tiny", AMD64)).wheels
    for platform in (AMD64, ARM64):
        lock_to(checkout, "tiny", wheels, platform)


@pytest.mark.usefixtures("two_platforms")
def test_a_platform_that_was_never_built_is_named_and_left_out(sm120: Command, door: Door) -> None:
    (built,) = build_tiny(sm120, "--accept", "--platform", ARM64, "--json").json
    ended = sm120("publish", "tiny", f"{door.host_port}/{PLACE}:v1", "--json")
    assert ended.json["platforms"] == {ARM64: built["digest"]}
    assert f"tiny for {AMD64} was never built, and is left out" in ended.err


@pytest.mark.usefixtures("two_platforms")
def test_a_platform_that_is_asked_for_is_not_left_out(sm120: Command, door: Door) -> None:
    build_tiny(sm120, "--accept", "--platform", ARM64)
    ended = sm120("publish", "tiny", f"{door.host_port}/{PLACE}:v1", "--platform", AMD64)
    assert ended.error == "UnknownImage"
    assert not door.asked


@pytest.mark.usefixtures("two_platforms")
def test_a_platform_that_was_built_before_a_change_is_not_left_out(
    checkout: Checkout, sm120: Command, door: Door
) -> None:
    build_tiny(sm120, "--accept")
    write_spec(checkout, spec_of(platforms=[AMD64, ARM64], env={"A": "b"}))
    build_tiny(sm120, "--accept", "--platform", ARM64)
    ended = sm120("publish", "tiny", f"{door.host_port}/{PLACE}:v1")
    assert ended.code != 0
    assert f"tiny for {AMD64} is" in ended.err
    assert not door.asked


@pytest.mark.parametrize("place", ["tiny", "team/tiny:v1", "Reg/x:y", "http://127.0.0.1/x"])
def test_a_place_that_is_none_is_refused(built: str, sm120: Command, place: str) -> None:
    assert sm120("publish", "tiny", place).error == "ReferenceInvalid"


def test_another_digest_than_the_one_named_is_refused(
    built: str, sm120: Command, door: Door
) -> None:
    place = f"{door.host_port}/{PLACE}@sha256:{'0' * 64}"
    assert sm120("publish", "tiny", place).error == "ReferenceInvalid"
    assert door.uploaded_bytes == 0


def test_an_image_whose_gates_were_not_run_is_refused_until_a_reason_is_given(
    checkout: Checkout, built: str, sm120: Command, door: Door, tiny: TinyRegistry
) -> None:
    write_spec(checkout, spec_of(gates=["smem"]))
    done = build_tiny(sm120, "--accept", "--json")
    assert done.code == 0, done.err
    place = f"{door.host_port}/{PLACE}:v1"
    refused = sm120("publish", "tiny", place)
    assert refused.error == "PublishRefused"
    assert "its gates were not run" in refused.err
    assert not tiny.tags
    for reason in ("", "   ", "x" * 501):
        assert sm120("publish", "tiny", place, "--force-ungated", reason).code != 0
    forced = sm120("publish", "tiny", place, "--force-ungated", "no card here", "--json").json
    assert forced["ungated_reason"] == "no card here"
    assert [a["artifact_type"] for a in forced["attached"]] == [
        "application/vnd.sm120.ungated.v1+json"
    ]


def test_clearing_needs_to_know_what_stays(sm120: Command, door: Door) -> None:
    assert sm120("registry", "clean", f"{door.host_port}/{PLACE}").code == 2

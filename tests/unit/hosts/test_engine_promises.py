"""Promises about deployed engines: kept on a host that has them, broken where one thing differs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.hosts.fleet.promised import EnginePromise, EngineRecord
from pipeline.hosts.promises import engine
from pipeline.hosts.promises.checks import Broken
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import OURS_IN, shown

CONFIG, DIGEST = "sha256:" + "c" * 64, "sha256:" + "d" * 64
UNIT = f"{OURS_IN}/sm120-tiny.service"
RECORD = EngineRecord(
    recipe="tiny",
    recipe_digest="sha256:" + "a" * 64,
    recipe_body={"name": "tiny"},
    image=f"registry.example/team/tiny@{DIGEST}",
    image_digest=DIGEST,
    image_ids=[CONFIG, DIGEST],
    layers=["sha256:" + "e" * 64],
    platform="linux/amd64",
    runtime="docker",
    name="sm120-tiny",
    unit="[Service]\n",
    unit_path=UNIT,
    port=8080,
    model="tiny",
    weights="/models/tiny",
    weights_digest=None,
)
WANTED = EnginePromise(state="present", engines=[RECORD])
PASSED = "/var/lib/sm120-engine/tiny/passed.json"
SHOW = "systemctl show sm120-tiny.service --property=FragmentPath"
INSPECT = "docker container inspect"
KEPT = FakeHost(
    files={UNIT: RECORD.unit, PASSED: json.dumps({**RECORD.model_dump(), "at": "now"})},
    units={"sm120-tiny.service": (True, True)},
    outputs={
        SHOW: (0, shown("sm120-tiny.service", fragment=OURS_IN)),
        INSPECT: (0, f"{CONFIG} true\n"),
        "python3 -c": (0, "200\n"),
    },
)


def told(**changes: Any) -> FakeHost:
    return KEPT.but(outputs=changes.pop("outputs", {}), **changes)


def record(**changes: str) -> FakeHost:
    return KEPT.but(files={PASSED: json.dumps({**RECORD.model_dump(), **changes})})


BAD: list[tuple[Any, FakeHost, str]] = [
    (
        engine.test_each_service_starts_at_boot_and_runs,
        KEPT.but(units={"sm120-tiny.service": (False, True)}),
        "does not start at boot",
    ),
    (
        engine.test_each_service_starts_at_boot_and_runs,
        KEPT.but(units={"sm120-tiny.service": (True, False)}),
        "does not run",
    ),
    (
        engine.test_each_service_starts_at_boot_and_runs,
        told(outputs={SHOW: (0, shown("sm120-tiny.service", "/etc/x.conf", fragment=OURS_IN))}),
        "is changed by: /etc/x.conf",
    ),
    (
        engine.test_each_unit_is_as_it_was_deployed,
        KEPT.but(files={UNIT: "[Service]\nUser=me\n"}),
        "was changed",
    ),
    (engine.test_each_unit_is_as_it_was_deployed, KEPT.but(files={UNIT: None}), "is missing"),
    (
        engine.test_each_record_is_of_the_version_that_was_deployed,
        record(image_digest=CONFIG),
        f"image_digest is {CONFIG}, deployed was {DIGEST}",
    ),
    (
        engine.test_each_record_is_of_the_version_that_was_deployed,
        record(recipe_digest="sha256:1"),
        "recipe_digest is sha256:1",
    ),
    (
        engine.test_each_record_is_of_the_version_that_was_deployed,
        KEPT.but(files={PASSED: "{"}),
        "is no JSON",
    ),
    (
        engine.test_each_container_runs_the_image_that_passed,
        told(outputs={INSPECT: (0, f"sha256:{'0' * 64} true\n")}),
        "runs the image sha256:000",
    ),
    (
        engine.test_each_container_runs_the_image_that_passed,
        told(outputs={INSPECT: (0, f"{CONFIG} false\n")}),
        "does not run",
    ),
    (
        engine.test_each_container_runs_the_image_that_passed,
        told(outputs={INSPECT: (1, "")}),
        "no such container",
    ),
    (engine.test_each_engine_answers, told(outputs={"python3 -c": (0, "503\n")}), "says 503"),
    (engine.test_each_engine_answers, told(outputs={"python3 -c": (1, "")}), "says nothing"),
]


@pytest.mark.parametrize(("check", "host", "why"), BAD)
def test_a_promise_of_an_engine_is_kept_and_broken_for_the_right_reason(
    check: Any, host: FakeHost, why: str
) -> None:
    check(KEPT, WANTED)
    with pytest.raises(Broken) as error:
        check(host, WANTED)
    assert why in error.value.why


def test_podman_names_the_same_image_without_its_algorithm() -> None:
    said = (0, f"{'c' * 64} true\n")
    podman = EngineRecord(**{**RECORD.model_dump(), "runtime": "podman"})
    host = KEPT.but(outputs={"podman container inspect": said})
    wanted = EnginePromise(state="present", engines=[podman])
    engine.test_each_container_runs_the_image_that_passed(host, wanted)
    with pytest.raises(Broken, match="no such container"):
        engine.test_each_container_runs_the_image_that_passed(KEPT, wanted)

"""`sm120 image test`: what it shows, keeps and ends with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.app import gate as start
from pipeline.artifacts.store.store import default_root, open_store
from pipeline.core.verdict import TestVerdict
from pipeline.evidence.statements.evidence_set import evidence_folder
from pipeline.images.gate.runs import ImageRun, read_runs
from pipeline.images.spec.checkout import Checkout
from tests.testbed.oci_door import Door
from tests.unit.statements.test_runs import a_start
from tests.unit.support import Command, build_tiny

AMD64 = "linux/amd64"


@pytest.fixture
def built(checkout: Checkout, sm120: Command) -> str:
    return str(build_tiny(sm120, "--accept", "--json").json[0]["digest"])


def ends_with(monkeypatch: pytest.MonkeyPatch, verdict: TestVerdict) -> None:
    def prove_start(*_: Any) -> ImageRun:
        return a_start(verdict, "libfoo.so.1 is missing from the image")

    monkeypatch.setattr(start, "prove_start", prove_start)
    monkeypatch.setattr(start, "find_backend", lambda wanted: None)


def test_an_image_that_starts_says_so_and_keeps_the_statement(
    built: str, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, "passed")
    done = sm120("image", "test", "tiny")
    assert done.code == 0, done.err
    assert "tiny for linux/amd64 starts: 2 passed" in done.out
    store = open_store(default_root())
    assert [run.verdict for run in read_runs(store, "tiny", AMD64, built)] == ["passed"]
    assert (evidence_folder(store, "tiny", AMD64, built) / "run-start.dsse.json").is_file()
    shown = sm120("verify", "tiny")
    assert "start  valid: starts: 2 passed, 0 skipped" in shown.out


@pytest.mark.parametrize(
    ("verdict", "error"), [("failed", "StartFails"), ("unknown", "StartUnknown")]
)
def test_an_image_that_does_not_start_is_an_error_and_is_stated_too(
    built: str,
    sm120: Command,
    monkeypatch: pytest.MonkeyPatch,
    verdict: TestVerdict,
    error: str,
) -> None:
    ends_with(monkeypatch, verdict)
    done = sm120("image", "test", "tiny")
    assert (done.code, done.error) == (92, error)
    assert "libraries: libfoo.so.1 is missing" in done.err
    store = open_store(default_root())
    assert [run.verdict for run in read_runs(store, "tiny", AMD64, built)] == [verdict]
    assert sm120("verify", "tiny").code in (71, 73)


def test_the_same_as_json_also_of_a_failure(
    built: str, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, "failed")
    (row,) = json.loads(sm120("image", "test", "tiny", "--json").out)
    assert (row["image"], row["platform"], row["digest"]) == ("tiny", AMD64, built)
    assert (row["kind"], row["verdict"]) == ("start", "failed")
    assert row["tests"][1]["name"] == "libraries"


def test_an_image_that_is_not_built_is_named_with_the_fix(
    checkout: Checkout, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, "passed")
    done = sm120("image", "test", "tiny")
    assert done.error == "UnknownImage"
    assert "sm120 build tiny" in done.err


def test_publish_shows_how_far_an_image_was_proved(
    built: str, sm120: Command, monkeypatch: pytest.MonkeyPatch, door: Door
) -> None:
    ends_with(monkeypatch, "passed")
    sm120("image", "test", "tiny")
    done = sm120("publish", "tiny", f"{door.host_port}/team/tiny:v1")
    assert "proved for linux/amd64: assembled, has no gates, starts, no smoke ladder" in done.out

"""`sm120 quality`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.testbed.model_server import in_thread
from tests.testbed.quality_faults import FAULTS
from tests.testbed.quality_server import CONFIG, QualityFault, QualityServer
from tests.unit.support import Command

SMALL = ["--tool-cases", "200", "--at-once", "16"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return folder


def fault(name: str) -> QualityFault:
    return next(each for each in FAULTS if each.name == name)


def test_a_sound_server_passes_all_parts_and_the_result_is_stated(
    sm120: Command, tmp_path: Path, weights: Path
) -> None:
    reference, kept = tmp_path / "reference.json", tmp_path / "kept"
    with in_thread(QualityServer()) as url:
        done = sm120("quality", url, "--weights", weights, "--record", reference)
        assert (done.code, done.out) == (0, f"{reference}: 768 places of counter-1\n")
        told: list[str | Path] = [
            "--weights",
            weights,
            "--reference",
            reference,
            "--output",
            kept,
            *SMALL,
        ]
        done = sm120("quality", "run", url, *told, "--json")
    result = json.loads(done.out)
    assert (done.code, result["verdict"]) == (0, "passed")
    assert [(p["name"], p["verdict"]) for p in result["parts"]] == [
        ("tokens", "passed"),
        ("schema", "passed"),
        ("agreement", "passed"),
    ]
    assert json.loads((kept / "quality.json").read_bytes()) == result
    lines = (kept / "quality-exchanges.jsonl").read_bytes().count(b"\n")
    assert lines == result["exchanges"] > 1000
    assert not list(kept.glob("*.part.*"))
    stated = json.loads((kept / "quality.json.dsse.json").read_bytes())
    assert stated["payloadType"] == "application/vnd.in-toto+json"


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["off by a constant", "broken once in ten", "other logits"])
def test_a_fault_ends_with_its_part_and_a_code_of_its_own(
    sm120: Command, tmp_path: Path, weights: Path, name: str
) -> None:
    reference = tmp_path / "reference.json"
    with in_thread(QualityServer()) as url:
        sm120("quality", url, "--weights", weights, "--record", reference)
    with in_thread(QualityServer(fault(name))) as url:
        told: list[str | Path] = ["--weights", weights, "--reference", reference, *SMALL]
        done = sm120("quality", url, *told, "--only", fault(name).part)
    assert done.code == 92
    assert f"{fault(name).part}: " in done.err
    assert done.out.splitlines()[2].split()[:2] == ["failed", fault(name).part]


def test_the_statement_of_a_result_is_verified_and_a_changed_one_is_found(
    sm120: Command, tmp_path: Path, weights: Path
) -> None:
    kept = tmp_path / "kept"
    with in_thread(QualityServer()) as url:
        told: list[str | Path] = ["--weights", weights, "--output", kept, "--only", "tokens"]
        assert sm120("quality", url, *told).code == 0
    done = sm120("verify", kept)
    # of an address nobody knows what served, and nobody signed it
    assert done.code != 0
    assert "quality of an address" in done.out
    assert "quality-exchanges.jsonl  valid: these bytes" in done.out
    exchanges = kept / "quality-exchanges.jsonl"
    exchanges.write_bytes(exchanges.read_bytes().replace(b"Hello", b"Jello", 1))
    assert "which was not stated" in sm120("verify", kept).out


def test_a_run_that_was_stopped_goes_on_with_what_is_finished(
    sm120: Command, tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, server = tmp_path / "kept", QualityServer()
    told: list[str | Path] = ["--weights", weights, "--output", kept, *SMALL]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with in_thread(server) as url:
        with monkeypatch.context() as patched:
            patched.setattr("pipeline.app.quality.judge_schema", stop)
            stopped = sm120("quality", url, *told)
        assert stopped.code == 130
        assert sorted(path.name for path in kept.iterdir()) == [
            "tokens.part.json",
            "tokens.part.jsonl",
        ]
        asked = server.requests
        # with another plan the finished part does not count
        other = sm120("quality", url, *told, "--seed", "7", "--only", "tokens")
        assert "kept from" not in other.err
        assert server.requests > asked
        with monkeypatch.context() as patched:
            patched.setattr("pipeline.app.quality.judge_schema", stop)
            sm120("quality", url, *told)
        asked = server.requests
        done = sm120("quality", url, *told)
    assert done.code == 0
    assert "tokens: kept from the run that was stopped" in done.err
    assert server.requests == asked + 1 + 400  # the model's name, and the tool calls
    result = json.loads((kept / "quality.json").read_bytes())
    lines = (kept / "quality-exchanges.jsonl").read_bytes().count(b"\n")
    assert lines == result["exchanges"]


def test_what_cannot_be_judged_says_why_and_is_no_success(sm120: Command) -> None:
    with in_thread(QualityServer()) as url:
        done = sm120("quality", url, "--only", "tokens")
        assert done.code == 92
        assert "name their folder with --weights" in done.out
        partly = sm120("quality", url, *SMALL)
    assert partly.code == 0  # the tools were judged, and the rest was left out
    assert partly.out.count("skipped") == 2


def test_nobody_at_the_address_is_said_at_once(sm120: Command) -> None:
    done = sm120("quality", "http://127.0.0.1:9", "--only", "schema")
    assert done.code == 92
    assert "ServerGone" in done.err or "http://127.0.0.1:9" in done.err


@pytest.mark.parametrize(
    "told",
    [["--record", "a.json", "--reference", __file__], ["--only", "speed"], ["--weights", "none"]],
)
def test_options_that_make_no_sense_are_refused(sm120: Command, told: list[str]) -> None:
    assert sm120("quality", "http://127.0.0.1:9", *told).code == 2


def test_a_report_shows_the_numbers_with_their_bars(
    sm120: Command, tmp_path: Path, weights: Path
) -> None:
    kept = tmp_path / "kept"
    with in_thread(QualityServer()) as url:
        sm120("quality", url, "--weights", weights, "--output", kept, *SMALL)
    targets: list[str | Path] = ["--output", tmp_path / "r.html", "--output", tmp_path / "r.md"]
    done = sm120("report", "--quality", kept, *targets)
    assert done.code == 0, done.err
    text = (tmp_path / "r.md").read_text()
    assert "## Quality" in text
    assert "| valid, streamed | 100.0% \\[98.1%, 100.0%\\] | ≥ 98.0% |" in text
    assert "18 of 18 counts exact" in (tmp_path / "r.html").read_text()
    assert sm120("verify", tmp_path / "r.html").code in (0, 72, 73)
    (kept / "quality.json").write_text("{}")
    assert sm120("report", "--quality", kept, *targets).code == 10

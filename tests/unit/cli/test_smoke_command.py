"""`sm120 smoke`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.app.recipes import is_address
from pipeline.app.smoke import SmokeExpectations
from pipeline.hosts.rules.issues import known_issues
from pipeline.serving.smoke.ladder import LADDER
from tests.testbed.model_faults import FAULTS
from tests.testbed.model_server import ModelServer, in_thread
from tests.unit.support import ROOT, Command

SMALL = ["--quick", "--streams", "1,2", "--lengths", "4", "--pressure", "2"]


def test_a_tiny_server_passes_every_rung_and_the_result_is_json(
    sm120: Command, tmp_path: Path
) -> None:
    with in_thread(ModelServer(can_count_only=True)) as url:
        done = sm120("smoke", url, "--no-quality", *SMALL, "--json", "--output", tmp_path / "kept")
    result = json.loads(done.out)
    assert (done.code, result["verdict"], result["last_good"]) == (0, "passed", "memory")
    assert json.loads((tmp_path / "kept" / "smoke.json").read_bytes()) == result


def test_a_soak_is_in_place_of_the_ladder_and_its_result_is_json(sm120: Command) -> None:
    with in_thread(ModelServer(can_count_only=True)) as url:
        done = sm120("smoke", url, "--no-quality", *SMALL, "--soak", "2s", "--json")
    result = json.loads(done.out)
    assert (done.code, [rung["name"] for rung in result["rungs"]]) == (0, ["first-answer", "soak"])


def test_a_broken_server_ends_with_the_rung_and_a_code_of_its_own(sm120: Command) -> None:
    fault = next(f for f in FAULTS if f.name == "content null")
    with in_thread(ModelServer(fault)) as url:
        done = sm120("smoke", url, *SMALL)
    assert (done.code, done.error) == (92, "SmokeFailed")
    assert "first-answer: one answer: content is null" in done.err
    assert "last good rung: none" in done.out


@pytest.mark.parametrize(
    ("name", "issue"),
    [("frozen logits", "wrong-frozen-logits"), ("wrong arithmetic", "wrong-quality")],
)
def test_a_failed_rung_names_the_known_issue_with_its_fix(
    sm120: Command, name: str, issue: str
) -> None:
    fault = next(f for f in FAULTS if f.name == name)
    with in_thread(ModelServer(fault)) as url:
        done = sm120("smoke", url, *SMALL)
    assert done.error == "SmokeFailed"
    assert f"Perhaps {issue}: " in done.err
    assert "Use it no further than its last good rung" in done.err


def test_a_failure_that_no_known_issue_explains_names_none(sm120: Command) -> None:
    fault = next(f for f in FAULTS if f.name == "tool call id missing")
    with in_thread(ModelServer(fault)) as url:
        done = sm120("smoke", url, *SMALL)
    assert done.error == "SmokeFailed"
    assert "Perhaps" not in done.err


def test_known_issues_name_rungs_that_exist() -> None:
    named = {symptom.rung for issue in known_issues() for symptom in issue.rungs}
    assert named <= {rung.name for rung in LADDER}


def test_nobody_at_the_address_is_told_apart(sm120: Command) -> None:
    done = sm120("smoke", "http://127.0.0.1:9")
    assert (done.code, done.error) == (92, "ServerGone")


def test_a_baseline_is_recorded_and_held_against_the_same_server(
    sm120: Command, tmp_path: Path
) -> None:
    with in_thread(ModelServer()) as url:
        first = sm120("smoke", url, "--record", tmp_path / "base.json")
        again = sm120("smoke", url, *SMALL, "--baseline", tmp_path / "base.json", "--json")
    assert first.out == f"{tmp_path / 'base.json'}: 30 answers of brain-1\n"
    assert (again.code, json.loads(again.out)["last_good"]) == (0, "speculation")


def test_what_cannot_be_tested_is_refused_before_anything_is_sent(
    sm120: Command, tmp_path: Path
) -> None:
    assert sm120("smoke", "ftp://gpu1").error == "InputInvalid"
    assert sm120("smoke", "http://127.0.0.1:9", "--streams", "1,x").code == 2
    assert sm120("smoke", "http://127.0.0.1:9", "--streams", "0").code == 2
    unknown = ("--recipe", "nobody", "--recipes", tmp_path)
    assert sm120("smoke", "http://127.0.0.1:9", *unknown).error == "UnknownRecipe"


@pytest.mark.parametrize(
    ("target", "is_server"),
    [
        ("gpu1:8000", True),
        ("http://gpu1", True),
        ("gpu1/v1", True),
        ("[::1]:8000/v1", True),
        ("tiny-cpu", False),
        ("qwen38-27b-nvfp4-sglang-1x", False),
        ("gpu1.lan", False),
    ],
)
def test_smoke_and_bench_take_the_same_words_for_an_address(target: str, is_server: bool) -> None:
    assert is_address(target) is is_server


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("ftp://gpu1",), "InputInvalid"),
        (("tiny-cpuu",), "UnknownRecipe"),
        (("http://gpu1:8000", "--recipe", "nobody"), "UnknownRecipe"),
        (("http://gpu1:8000", "--serve"), ""),
        (("http://gpu1:8000", "--soak", "30"), ""),
        (("http://gpu1:8000", "--soak", "0m"), ""),
        (("http://gpu1:8000", "--soak", "30m", "--record", "base.json"), ""),
        (("http://gpu1:8000", "--up-to", "stream"), ""),
        (("tiny-cpu", "--on", "rig1", "--serve", "--weights", "here"), ""),
    ],
)
def test_what_cannot_be_tested_is_refused_before_a_server_is_asked(
    sm120: Command, words: tuple[str, ...], error: str
) -> None:
    ended = sm120("--checkout", ROOT, "smoke", *words)
    assert ended.code != 0
    # a mistake in the words themselves is click's
    assert (ended.error, error or ended.code) == (error, error or 2)


def test_what_was_typed_counts_before_the_plan_of_any_server() -> None:
    plan = SmokeExpectations(text_only=True, streams=[1, 3], no_tools=True, contexts=[512]).plan(
        None
    )
    assert (plan.text_only, plan.streams, plan.tools) == (True, [1, 3], False)
    assert plan.served_tokens is None


FIRST_RUNGS = ("--no-quality", *SMALL, "--up-to", "first-answer")


@pytest.fixture
def kept(sm120: Command, tmp_path: Path) -> Path:
    """The folder of a smoke test of an address, with its signed statement."""
    assert sm120("evidence", "new-key", "me").code == 0
    with in_thread(ModelServer(can_count_only=True)) as url:
        done = sm120("smoke", url, *FIRST_RUNGS, "--output", tmp_path / "kept")
    assert done.code == 0, done.err
    assert f"{tmp_path / 'kept' / 'smoke.json.dsse.json'}, signed by me" in done.err
    return tmp_path / "kept"


def test_a_smoke_of_an_address_is_stated_with_what_nobody_knows_of_it(
    sm120: Command, kept: Path
) -> None:
    ended = sm120("verify", kept, "--json")
    assert ended.error == "EvidenceIncomplete"
    tree = json.loads(ended.out)
    (stated, exchanges) = tree["children"]
    assert exchanges == {
        "title": "exchanges.jsonl",
        "verdict": "valid",
        "message": "these bytes",
    }
    signature, subject, ladder = stated["children"]
    assert (signature["verdict"], subject["verdict"]) == ("valid", "valid")
    assert ladder["title"] == "smoke of an address"
    judged = {node["title"]: node["verdict"] for node in ladder["children"]}
    assert judged == dict.fromkeys(("image", "weights", "recipe"), "incomplete")
    assert sm120("verify", kept / "smoke.json").error == "EvidenceIncomplete"


@pytest.mark.parametrize("name", ["smoke.json", "exchanges.jsonl"])
def test_a_changed_file_of_a_stated_ladder_is_broken(sm120: Command, kept: Path, name: str) -> None:
    path = kept / name
    path.write_bytes(path.read_bytes().replace(b"127.0.0.1", b"127.0.0.2") + b" ")
    assert sm120("verify", kept).error == "EvidenceBroken"


def test_a_smoke_test_that_another_key_signed_is_not_believed(
    sm120: Command, kept: Path, tmp_path: Path
) -> None:
    assert sm120("evidence", "new-key", "other", "--output", tmp_path / "usb").code == 0
    trust = tmp_path / "trust.yaml"
    sm120("evidence", "trust-key", tmp_path / "usb" / "other.pub", "--trust", trust)
    assert sm120("verify", kept, "--trust", trust).error == "EvidenceBroken"


def test_a_smoke_test_whose_exchanges_are_gone_says_so(sm120: Command, kept: Path) -> None:
    (kept / "exchanges.jsonl").unlink()
    ended = sm120("verify", kept)
    assert ended.error == "EvidenceIncomplete"
    assert "exchanges.jsonl  incomplete: is not beside the result" in ended.out


def test_a_smoke_of_an_address_without_a_folder_is_kept_in_the_store(
    sm120: Command, tmp_path: Path
) -> None:
    fault = next(f for f in FAULTS if f.name == "content null")
    with in_thread(ModelServer(fault)) as url:
        done = sm120("--store", tmp_path / "store", "smoke", url, *FIRST_RUNGS)
    assert done.error == "SmokeFailed"
    (path,) = (tmp_path / "store" / "smoke").glob("*/smoke.json.dsse.json")
    assert f"statement: {path}, unsigned" in done.err
    ended = sm120("verify", path.parent)
    assert ended.error == "EvidenceIncomplete"
    assert "failed: first-answer: one answer" in ended.out


def test_a_smoke_test_is_shown_also_where_the_store_cannot_keep_it(
    sm120: Command, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file in the place of the store")
    with in_thread(ModelServer(can_count_only=True)) as url:
        done = sm120("--store", tmp_path / "store", "smoke", url, *FIRST_RUNGS)
    assert done.code == 0, done.err
    assert "Nothing is stated: " in done.err

"""Results as a user handles them: compared, gated, signed, verified, and one digit changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.bench.metrics import intervals
from pipeline.serving.bench.model import BenchRun, Trial
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.bench.record import read_run, write_run
from tests.unit.bench.example_run import FOLDER
from tests.unit.support import Command

FOREIGN = FOLDER.parent / "foreign_results"
PLACE = "/cells/0/trials/1/metrics/ttft_ms/p99"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def key(
    checkout: Checkout, sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that signs, and a trust file that knows it."""
    entry = sm120("evidence", "new-key", "bench", "--output", tmp_path / "keys").out
    (checkout.root / "lockfiles" / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    monkeypatch.setenv("SM120_SIGNING_KEY", (tmp_path / "keys" / "bench.pem").read_text())


def _slower(folder: Path, times: float) -> Path:
    """A copy with another output throughput in every trial."""
    target = folder.with_name(f"times-{times}")
    shutil.copytree(folder, target)
    run = read_run(folder)
    write_run(target, _scaled(run, times))
    # they say otherwise
    (target / "requests.jsonl").unlink()
    return target


def _scaled(run: BenchRun, times: float) -> BenchRun:
    def scaled(trial: Trial) -> Trial:
        speed = {"output_tok_s": trial.metrics.output_tok_s * times}
        return trial.model_copy(update={"metrics": trial.metrics.model_copy(update=speed)})

    cells = []
    for cell in run.cells:
        trials = [scaled(trial) for trial in cell.trials]
        more = {"trials": trials, "intervals": intervals(trials)}
        cells.append(cell.model_copy(update=more))
    return run.model_copy(update={"cells": cells})


def _edit(folder: Path, old: str, new: str) -> None:
    path = folder / RUN_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_comparison_says_what_changed_and_names_its_statistic(sm120: Command, run: Path) -> None:
    done = sm120("bench", "compare", run, _slower(run, 0.5))
    assert done.code == 0
    assert "inputs: the same" in done.out
    assert "-50.0 %" in done.out
    assert "worse" in done.out
    assert "no winner: not surely more than 10 % apart" in done.out
    assert "Welch's t" in done.out


def test_a_comparison_is_there_for_programs_too(sm120: Command, run: Path) -> None:
    body = sm120("bench", "compare", run, _slower(run, 2.0), "--json").json
    numbers = {n["name"]: n for n in body["cells"][0]["numbers"]}
    assert numbers["output_tok_s"]["verdict"] == "better"
    assert numbers["ttft_ms.mean"]["why"] == "not surely more than 10 % apart"


def test_a_gate_has_an_exit_code_for_worse_and_one_for_undecided(sm120: Command, run: Path) -> None:
    only = ("--metric", "output_tok_s")
    assert sm120("bench", "compare", run, run, "--gate", *only).code == 0
    worse = sm120("bench", "compare", run, _slower(run, 0.5), "--gate", *only)
    assert (worse.code, worse.error) == (94, "BenchWorse")
    assert "c1 output_tok_s: -50.0 %" in worse.err
    near = sm120("bench", "compare", run, _slower(run, 0.95), "--gate", *only)
    assert (near.code, near.error) == (95, "BenchUndecided")
    assert (
        sm120("bench", "compare", run, _slower(run, 0.9), "--gate", *only, "--allow", "20").code
        == 0
    )


@pytest.mark.parametrize("name", ["speed", "duration_s", "ttft"])
def test_a_gate_over_no_number_is_refused(sm120: Command, run: Path, name: str) -> None:
    assert sm120("bench", "compare", run, run, "--gate", "--metric", name).code == 10


def test_results_of_others_are_put_beside_without_a_winner(sm120: Command, run: Path) -> None:
    done = sm120(
        "bench", "compare", FOREIGN / "sglang.jsonl", FOREIGN / "profile_export_aiperf.json"
    )
    assert done.code == 0
    assert "mean_tpot_ms / inter_token_latency.avg" in done.out
    assert "inter_token_latency.avg counts tokens with its own tokenizer" in done.out
    assert "  better" not in done.out
    gate = sm120(
        "bench",
        "compare",
        FOREIGN / "sglang.jsonl",
        FOREIGN / "profile_export_aiperf.json",
        "--gate",
    )
    assert gate.code == 95


@pytest.mark.usefixtures("key")
def test_a_run_is_signed_and_verified_and_a_changed_file_and_digit_are_named(
    sm120: Command, run: Path
) -> None:
    signed = sm120("bench", "attest", run)
    assert signed.code == 0
    assert "signed by" in signed.out
    good = sm120("verify", run)
    assert good.code == 73  # served from nothing that has a digest
    assert "benchmark-run (bench.json.dsse.json)  valid" in good.out
    assert "numbers  valid: the same again from 36 requests of 6 trials" in good.out
    was = read_run(run).cells[0].trials[1].metrics.ttft_ms
    assert was is not None
    _edit(run, f'"p99":{was.p99}', '"p99":0.5')
    for named in (run, run / RUN_FILE, run / f"{RUN_FILE}{SUFFIX}"):
        changed = sm120("verify", named)
        assert (changed.code, changed.error) == (77, "NumberChanged")
        assert "result  changed: bench.json has sha256:" in changed.out
        why = f"is 0.5, by its requests and samples it is {was.p99}"
        assert f"{PLACE} (cell c1)  changed: {why}" in changed.out


@pytest.mark.usefixtures("key")
def test_a_signed_run_without_its_requests_is_answered_with_what_is_missing(
    sm120: Command, run: Path
) -> None:
    assert sm120("bench", "attest", run).code == 0
    (run / "requests.jsonl").unlink()
    ended = sm120("verify", run)
    assert ended.error == "EvidenceIncomplete"
    assert "requests.jsonl is not beside the run" in ended.err
    assert "Put the run's own requests.jsonl back" in ended.err.splitlines()[-1]


@pytest.mark.usefixtures("key")
def test_a_number_that_does_not_follow_is_not_signed(sm120: Command, run: Path) -> None:
    write_run(run, _scaled(read_run(run), 2.0))
    refused = sm120("bench", "attest", run)
    assert refused.code == 77
    assert "output_tok_s" in refused.err
    assert not (run / f"{RUN_FILE}{SUFFIX}").exists()
    requests = run / "requests.jsonl"
    shutil.copy(FOLDER / RUN_FILE, run / RUN_FILE)
    requests.write_bytes(requests.read_bytes().replace(b'"worker":0', b'"worker":1', 1))
    data = requests.read_bytes().replace(b'"characters":32', b'"characters":33', 1)
    requests.write_bytes(data)
    assert "other requests" in sm120("bench", "attest", run).err


@pytest.mark.usefixtures("key")
def test_one_changed_digit_in_a_reports_data_is_named(sm120: Command, run: Path) -> None:
    assert sm120("bench", "attest", run).code == 0
    page = run.parent / "report.html"
    assert sm120("report", run, "--output", page).code == 0
    assert sm120("verify", page).code == 73
    text = page.read_text()
    mean = json.dumps(read_run(run).cells[0].intervals["output_tok_s"].mean)
    assert f'"mean":{mean}' in text
    page.write_text(text.replace(f'"mean":{mean}', f'"mean":9{mean[1:]}', 1))
    changed = sm120("verify", page, "--json")
    assert (changed.code, changed.error) == (77, "NumberChanged")
    assert f"{page} sha256:" in changed.err
    assert "which was not signed" in changed.err
    assert "/numbers/output_tok_s/mean" in changed.out


@pytest.mark.parametrize("damage", ["number", "requests", "cut"])
def test_a_comparison_with_an_edited_run_is_refused(sm120: Command, run: Path, damage: str) -> None:
    edited, requests = run.with_name("edited"), run.with_name("edited") / "requests.jsonl"
    shutil.copytree(run, edited)
    if damage == "number":
        write_run(edited, _scaled(read_run(run), 2.0))
    else:
        data = requests.read_bytes()
        changed = data.replace(b'"characters":32', b'"characters":33', 1)
        requests.write_bytes(changed if damage == "requests" else data[:-50])
    for words in ((run, edited), (edited, run), (run, edited, "--gate")):
        refused = sm120("bench", "compare", *words)
        assert refused.code == (10 if damage == "cut" else 77)
        assert "edited" in refused.err
        assert refused.out == ""


def test_a_statement_that_cannot_be_written_is_an_error_where_it_is_all_that_was_asked_for(
    sm120: Command, run: Path
) -> None:
    # in anybody's way, also in root's
    (run / f"{RUN_FILE}{SUFFIX}").mkdir()
    assert sm120("bench", "attest", run).code == 40
    (run / f"{RUN_FILE}{SUFFIX}").rmdir()
    assert sm120("bench", "attest", run).code == 0


@pytest.mark.parametrize("name", ["requests.jsonl", RUN_FILE])
def test_nobody_waits_for_a_pipe_in_the_place_of_a_file(
    sm120: Command, run: Path, name: str
) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    assert sm120("bench", "attest", run).code == 10
    assert sm120("verify", run).code in (41, 71, 73)
    shown = sm120("report", run, "--output", "r.html")
    assert shown.code == (0 if name == "requests.jsonl" else 10)


def test_a_run_that_is_none_is_refused_in_one_sentence(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert sm120("bench", "attest", tmp_path / "x").code == 10
    assert sm120("bench", "compare", tmp_path / "x", tmp_path / "x").code == 10


def test_the_folder_of_out_stands_for_the_run_in_it(sm120: Command, run: Path, key: None) -> None:
    out = run.parent / "night"
    shutil.copytree(run, out / "quick")
    assert "no winner" in sm120("bench", "compare", out, run).out
    assert sm120("bench", "attest", out).code == 0
    assert (out / "quick" / f"{RUN_FILE}{SUFFIX}").is_file()
    assert "numbers  valid" in sm120("verify", out).out
    assert sm120("report", out, "--output", "r.html").code == 0
    # three folders below the page, and never named
    found = sm120("verify", "r.html").out
    assert "numbers of the report  valid" in found


def test_of_several_runs_a_comparison_asks_which(sm120: Command, run: Path) -> None:
    out = run.parent / "night"
    shutil.copytree(run, out / "quick")
    shutil.copytree(run, out / "tiny")
    asked = sm120("bench", "compare", out, run)
    assert asked.error == "RunInvalid"
    assert "quick, tiny" in asked.err
    assert sm120("verify", out).out.count("numbers  valid") == 2
    assert sm120("report", out, "--output", "r.md").code == 0


def test_a_folder_without_a_run_is_still_refused(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "none" / "quick").mkdir(parents=True)
    assert sm120("bench", "compare", tmp_path / "none", tmp_path / "none").error == "RunInvalid"
    assert sm120("bench", "attest", tmp_path / "none").error == "RunInvalid"


def test_large_numbers_are_no_powers_of_ten(sm120: Command, run: Path) -> None:
    slow = _slower(run, 1234567.0)
    assert "e+0" not in sm120("bench", "compare", run, slow).out


def test_two_nights_of_one_workload_are_told_apart_in_a_report(sm120: Command, run: Path) -> None:
    workload = read_run(run).workload.name
    for night in ("monday", "tuesday"):
        shutil.copytree(run, run.parent / night / workload)
    assert sm120("report", "monday", "tuesday", "--output", "r.html", "--output", "r.md").code == 0
    text = (run.parent / "r.md").read_text()
    assert f"(monday/{workload})" in text
    assert f"(tuesday/{workload})" in text
    assert sm120("verify", "r.html").out.count("numbers of the report  valid") == 2
    assert sm120("report", "monday", "tuesday", "--output", "public.md", "--redact").code == 0
    assert "monday" not in (run.parent / "public.md").read_text()


def test_live_servers_that_do_not_answer_are_named(sm120: Command, tmp_path: Path) -> None:
    ended = sm120("bench", "compare", "--live", "http://127.0.0.1:9", "http://127.0.0.1:9")
    assert (ended.code, "http://127.0.0.1:9" in ended.err) == (93, True)
    assert sm120("bench", "compare", tmp_path / "none", tmp_path).code == 2


def test_a_log_is_recorded_as_it_is_typed(sm120: Command, tmp_path: Path) -> None:
    line = "[2026-11-18 12:00:0{}] {}: obj=GenerateReqInput(rid='q', input_ids=[1, 2, 3]){}\n"
    ended = ", out={'meta_info': {'completion_tokens': 12}}"
    (tmp_path / "log").write_text(line.format(5, "Receive", "") + line.format(7, "Finish", ended))
    words = ("bench", "record", str(tmp_path / "log"), "--output", str(tmp_path / "t.jsonl"))
    done = sm120(*words)
    assert (done.code, "1 request in 1 session, blocks of 64 tokens" in done.out) == (0, True)
    made = json.loads(sm120(*words, "--json").out)
    assert made == {"requests": 1, "sessions": 1, "unfinished": 0, "block_tokens": 64}
    (tmp_path / "log").write_text("nothing\n")
    assert sm120(*words).error == "WorkloadInvalid"

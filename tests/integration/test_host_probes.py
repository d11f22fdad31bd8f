"""Function tests with real processes: gloo on the CPU takes the place of NCCL and cards.

What this proves is the watching, ending and judging. Cards, NCCL over several of them, and switches
need a machine that has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.hosts.probes.runner import ProbeReport, run_probes
from pipeline.hosts.probes.tune import Setting, sweep, workloads

PYTHON = os.environ.get("SM120_TORCH_PYTHON", sys.executable)
QUICK = ["--device", "cpu", "--rounds", "3", "--bulk-bytes", "65536", "--sizes-kib", "32,64"]
EASY = json.dumps({"copy_gb_per_s": 0, "all_reduce_us": 1e6, "all_reduce_bus_gb_per_s": 0})


@pytest.fixture(scope="module", autouse=True)
def torch() -> None:
    message = "import torch.distributed as d; assert d.is_gloo_available()"
    if subprocess.run([PYTHON, "-c", message], capture_output=True, check=False).returncode:
        pytest.skip("No Python with torch and gloo here; name one in SM120_TORCH_PYTHON.")


def probe(*arguments: str) -> ProbeReport:
    floors = [] if "--floors" in arguments else ["--floors", EASY]
    return run_probes(PYTHON, [*QUICK, *floors, *arguments])


def reasons(report: ProbeReport) -> list[str]:
    return [r.why for r in report.rows if r.verdict == "failed"]


def test_two_good_ranks_pass_everything() -> None:
    report = probe("--ranks", "2")
    assert report.verdict == "passed", reasons(report)
    checks = {r.check for r in report.rows if r.verdict == "passed"}
    assert checks == {"cards", "copy", "all_reduce", "latency", "bandwidth", "writes"}


def test_three_ranks_are_tested_as_two_and_as_three() -> None:
    report = probe("--ranks", "3", "--only", "all_reduce")
    subjects = [r.subject for r in report.rows if r.check == "all_reduce"]
    assert subjects == ["2 ranks", "3 ranks"]


def test_one_rank_is_not_called_a_proof_of_many() -> None:
    report = probe("--ranks", "1", "--only", "all_reduce")
    verdicts = {r.subject: r.verdict for r in report.rows if r.check == "all_reduce"}
    assert verdicts == {"1 rank": "passed", "2 or more ranks": "not applicable"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hang:1", "hung in `values`"),
        ("hang:0:join", "hung in `join`"),
        ("hang:1:latency 65536", "hung in `latency 65536`"),
        ("die:1", "rank 1 was killed by signal 9 in `values`"),
        ("wrong:1", "1 values of the sums are wrong"),
    ],
)
def test_a_faulty_rank_is_named(fault: str, message: str) -> None:
    start = time.monotonic()
    report = probe("--ranks", "2", "--only", "all_reduce", "--step-limit-s", "10", "--fault", fault)
    assert report.verdict == "failed"
    assert message in reasons(report)[0]
    assert time.monotonic() - start < 120


def test_a_slow_rank_is_below_the_floor() -> None:
    floors = json.dumps({"all_reduce_us": 40000.0, "all_reduce_bus_gb_per_s": 0})
    report = probe(
        *("--ranks", "2", "--only", "all_reduce", "--fault", "slow:0", "--floors", floors)
    )
    assert all("above 40000" in why for why in reasons(report))
    assert len(reasons(report)) == 2


def test_a_copy_that_hangs_does_not_keep_the_others_from_their_turn() -> None:
    arguments = ("--ranks", "2", "--only", "copy", "--step-limit-s", "10")
    report = probe(*arguments, "--fault", "hang:0:copy 0->1")
    verdicts = {r.subject: r.verdict for r in report.rows if r.check == "copy"}
    assert verdicts == {
        "copy 0->0": "passed",
        "copy 0->1": "failed",
        "copy 1->0": "passed",
        "copy 1->1": "passed",
    }


def test_a_copy_with_wrong_data_fails() -> None:
    report = probe("--ranks", "2", "--only", "copy", "--fault", "wrong:0")
    assert len(reasons(report)) == 4


def test_a_machine_without_cards_is_unknown() -> None:
    report = run_probes(PYTHON, ["--rounds", "1"])
    if report.count:
        pytest.skip("This machine has cards.")
    assert report.verdict == "unknown"


def test_nothing_is_left_behind_when_the_tests_are_killed(tmp_path: Path) -> None:
    message = [PYTHON, "pipeline/hosts/probes/worker", str(tmp_path / "out.json"), *QUICK]
    process = subprocess.Popen(
        [*message, "--ranks", "2", "--only", "all_reduce", "--fault", "hang:0"]
    )
    deadline = time.monotonic() + 90
    while len(_ranks(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks = _ranks(process.pid)
    assert len(ranks) == 2
    time.sleep(5)  # until the ranks have asked to end with their parent
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{r}").exists() for r in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [r for r in ranks if Path(f"/proc/{r}").exists()] == []


def _ranks(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(x) for x in children.read_text().split()] if children.exists() else []


def test_a_sweep_runs_with_real_ranks_and_refuses_the_setting_that_hangs() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        fault = ["--fault", "hang:1"] if setting.variables else []
        kib = ",".join(map(str, sizes))
        asked = ("--ranks", "2", "--only", "all_reduce", "--step-limit-s", "10", *fault)
        return probe(*asked, "--sizes-kib", kib)

    settings = [Setting(variables={}), Setting(variables={"NCCL_PROTO": "LL"})]
    tuning = sweep(settings, workloads(1024, 1, 32), run, ranks=2, device="cpu")
    assert [bool(t.refused) for t in tuning.tried] == [False, True]
    assert [w.setting.variables for w in tuning.winners] == [{}, {}]

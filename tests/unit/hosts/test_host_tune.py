"""Sweeps with a made-up runner, and verdicts over made-up ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import FactsUnreadable, ProbeUnstarted
from pipeline.core.known import unknown
from pipeline.hosts.probes.runner import (
    ProbeReport,
    ProbeRow,
    card_options,
    container_command,
    parse_report,
    run_in_image,
    run_probes,
)
from pipeline.hosts.probes.tune import Setting, plan, sweep, workloads
from pipeline.hosts.probes.worker.main import (
    CODES,
    DEFAULT_FLOORS,
    Session,
    judge_copy,
    judge_library,
    judge_reduce,
    judge_writes,
    loss,
    main,
    row,
)
from pipeline.hosts.probes.worker.processes import RankResult
from pipeline.hosts.rules.issues import match_lines
from tests.unit.hosts.machines import DATA

LOADS = workloads(7168, 1, 32)
CARDS: dict[str, Any] = {"ranks": 2, "device": "cuda"}


def latency(us: float, size_kib: int) -> ProbeRow:
    measured = {"size_bytes": size_kib * 1024, "in_a_row_us": us}
    return ProbeRow(check="latency", subject="x", verdict="passed", why="", measured=measured)


def report(*rows: ProbeRow) -> ProbeReport:
    return ProbeReport(
        version=1, verdict="passed", device="cuda", count=2, seconds=1.0, floors={}, rows=[*rows]
    )


REDUCED = ProbeRow(check="all_reduce", subject="x", verdict="passed", why="", measured={})


def fast(us: float) -> ProbeReport:
    return report(REDUCED, *(latency(us, s) for load in LOADS for s in load.sizes_kib))


def hung(why: str = "hung") -> ProbeReport:
    return report(REDUCED.model_copy(update={"verdict": "failed", "why": why}))


def test_the_sizes_are_those_of_a_models_rows() -> None:
    assert [(w.name, w.sizes_kib) for w in LOADS] == [
        ("latency", [14, 28]),
        ("throughput", [448, 896]),
    ]


def test_nccls_own_choice_is_tried_first_and_nothing_twice() -> None:
    for full in (False, True):
        labels = [s.label for s in plan(full=full, graph_file="/g.xml")]
        assert labels[0] == "NCCL's choice"
        assert len(labels) == len(set(labels))
        assert labels[-1] == "NCCL_GRAPH_FILE=/g.xml"
    assert len(plan(full=True)) == 60
    assert len(plan()) == 13


def test_the_fastest_setting_wins_with_its_numbers() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        return fast(10.0 if setting.variables.get("NCCL_PROTO") == "LL" else 20.0)

    tuning = sweep(plan(), LOADS, run, **CARDS)
    winner = tuning.winners[0]
    assert winner.setting.variables == {"NCCL_PROTO": "LL"}
    assert (winner.us, winner.us_untuned, winner.gain) == (20.0, 40.0, 0.5)
    assert winner.conf.endswith("NCCL_PROTO=LL\n")


def test_workloads_may_have_other_winners() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        small = setting.variables == {"NCCL_PROTO": "LL"}
        large = setting.variables == {"NCCL_PROTO": "Simple"}
        us = {s: 5.0 if (small and s < 100) or (large and s >= 100) else 20.0 for s in sizes}
        return report(REDUCED, *(latency(us[s], s) for s in sizes))

    first, second = sweep(plan(), LOADS, run, **CARDS).winners
    assert first.setting.label == "NCCL_PROTO=LL"
    assert second.setting.label == "NCCL_PROTO=Simple"


def test_a_setting_that_hangs_is_refused_however_fast_it_was() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        if setting.variables:
            return hung("all_reduce: rank 0, 1 hung in `values`")
        return fast(20.0)

    tuning = sweep(plan(), LOADS, run, **CARDS)
    assert [w.setting.variables for w in tuning.winners] == [{}, {}]
    assert sum("hung" in t.refused for t in tuning.tried) == len(plan()) - 1


def test_where_nothing_finishes_nothing_wins() -> None:
    tuning = sweep(plan(), LOADS, lambda s, z: hung(), **CARDS)
    assert tuning.winners == []


def test_no_result_is_a_refusal() -> None:
    tuning = sweep(plan(), LOADS, lambda s, z: report(), **CARDS)
    assert {t.refused for t in tuning.tried} == {"no all_reduce was made"}


def test_a_size_that_was_not_measured_is_a_refusal() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        return report(*fast(5.0).rows[:2])

    assert all(
        "nothing was measured at" in t.refused for t in sweep(plan(), LOADS, run, **CARDS).tried
    )


def test_noise_does_not_beat_nccls_own_choice() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        return fast(19.8 if setting.variables else 20.0)

    winner = sweep(plan(), LOADS, run, **CARDS).winners[0]
    assert winner.setting.variables == {}
    assert winner.gain == 0.0


def test_where_nccls_own_choice_hangs_the_best_of_the_rest_wins() -> None:
    def run(setting: Setting, sizes: list[int]) -> ProbeReport:
        good = setting.variables == {"NCCL_P2P_DISABLE": "1"}
        return fast(50.0) if good else hung()

    winner = sweep(plan(), LOADS, run, **CARDS).winners[0]
    assert winner.setting.variables == {"NCCL_P2P_DISABLE": "1"}
    assert winner.gain is None


def end(rank: int, ended: Any = "finished", code: Any = 0, **steps: Any) -> RankResult:
    output = {
        "values": {"wrong_values": 0},
        "latency 32768": {"median_us": 20.0, "worst_us": 40.0, "in_a_row_us": 15.0},
        "bandwidth": {"gb_per_s": 20.0, "bus_gb_per_s": 20.0},
        "mapped": {"libraries": ["/lib/libnccl.so.2"]},
        **steps,
    }
    return RankResult(rank, ended, "" if ended == "finished" else "values", code, output, "")


def reduce(*ends: RankResult, **floors: float) -> list[str]:
    rows = judge_reduce(len(ends), list(ends), [32768], {**DEFAULT_FLOORS, **floors})
    return [r["verdict"] for r in rows]


def test_good_ranks_pass() -> None:
    assert reduce(end(0), end(1)) == ["passed", "passed", "passed"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (end(1, "hung", -9), "rank 1 hung in `values`"),
        (end(1, "died", -11), "rank 1 was killed by signal 11 in `values`"),
        (end(1, "died", 3), "rank 1 ended with code 3 in `values`"),
    ],
)
def test_a_lost_rank_is_named(second: RankResult, message: str) -> None:
    assert loss([end(0), second]) == message
    assert reduce(end(0), second) == ["failed"]


def test_the_rank_that_was_killed_is_blamed_and_not_those_it_took_along() -> None:
    assert loss([end(0, "died", 1), end(1, "died", -9)]).startswith("rank 1 was killed")


def test_one_wrong_word_on_one_rank_fails() -> None:
    assert reduce(end(0), end(1, values={"wrong_values": 1})) == ["failed"]


def test_a_wrong_word_while_measuring_fails_too() -> None:
    bad = {"median_us": 1.0, "worst_us": 1.0, "in_a_row_us": 1.0, "wrong_values": 3}
    assert reduce(end(0), end(1, **{"latency 32768": bad})) == ["failed"]


def test_the_slowest_rank_counts() -> None:
    slow = {"median_us": 9000.0, "worst_us": 9000.0, "in_a_row_us": 9000.0}
    assert reduce(end(0), end(1, **{"latency 32768": slow})) == ["passed", "failed", "passed"]


def test_too_little_bandwidth_fails() -> None:
    assert reduce(end(0), end(1), all_reduce_bus_gb_per_s=30.0)[-1] == "failed"


def test_one_rank_has_no_bandwidth_to_judge() -> None:
    assert reduce(end(0))[-1] == "not applicable"


def test_copies_are_judged_by_data_then_by_rate() -> None:
    good = {"wrong_values": 0, "gb_per_s": 40.0, "claims_peer": True}
    assert judge_copy("0->1", good, DEFAULT_FLOORS)["verdict"] == "passed"
    assert judge_copy("0->1", {**good, "wrong_values": 1}, DEFAULT_FLOORS)["verdict"] == "failed"
    assert judge_copy("0->1", {**good, "gb_per_s": 0.2}, DEFAULT_FLOORS)["verdict"] == "failed"
    through_host = judge_copy("0->1", {**good, "claims_peer": False}, DEFAULT_FLOORS)
    assert list(match_lines("tests", [through_host["why"]])) == ["peers-refused"]


def test_a_collapse_of_writes_fails_and_sharing_a_link_does_not() -> None:
    def verdict(together: float) -> str:
        output = {"alone_gb_per_s": [37.0] * 4, "together_gb_per_s": together}
        return str(judge_writes("+1", output, DEFAULT_FLOORS)["verdict"])

    assert verdict(4 * 37.0) == "passed"
    assert verdict(2 * 37.0) == "passed"
    assert verdict(4 * 2.7) == "failed"
    assert verdict(0.0) == "failed"


def test_the_library_in_use_must_be_one_and_the_one_meant() -> None:
    def verdict(ends: list[RankResult], wanted: str | None = None, device: str = "cuda") -> str:
        return str(judge_library(ends, wanted, device)["verdict"])

    other = end(1, mapped={"libraries": ["/opt/libnccl.so.2"]})
    assert verdict([end(0)]) == "passed"
    assert verdict([end(0)], "/lib/libnccl.so.2") == "passed"
    assert verdict([end(0)], "/opt/libnccl.so.2") == "failed"
    assert verdict([end(0), other]) == "failed"
    assert verdict([end(0, mapped={"libraries": []})]) == "unknown"
    assert verdict([end(0, "hung", mapped={})]) == "unknown"
    assert verdict([end(0)], device="cpu") == "not applicable"


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (("passed", "failed", "unknown"), "failed"),
        (("passed", "unknown"), "unknown"),
        (("passed", "not applicable"), "passed"),
        (("not applicable",), "unknown"),
        ((), "unknown"),
    ],
)
def test_the_worst_verdict_is_that_of_the_machine(
    verdicts: tuple[str, ...], worst: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "run", lambda _: [row("x", "y", v) for v in verdicts])
    assert main([str(tmp_path / "report.json")]) == CODES[worst]
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == worst


def test_the_answer_of_a_real_card_is_read() -> None:
    result = parse_report((DATA / "h200-probes.json").read_bytes(), "h200")
    assert (result.verdict, result.count, result.device) == ("passed", 1, "cuda")
    assert {r.verdict for r in result.rows} == {"passed", "not applicable"}


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2}', "not json"])
def test_a_damaged_answer_is_refused(text: str) -> None:
    with pytest.raises(FactsUnreadable):
        parse_report(text.encode(), "answer")


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(ProbeUnstarted, match="no such program"):
        run_probes("/nowhere/python3", [])


def test_tests_that_leave_no_answer_are_no_pass(tmp_path: Path) -> None:
    mute = tmp_path / "python"
    mute.write_text("#!/bin/sh\necho torch is broken >&2\nexit 0\n")
    mute.chmod(0o755)
    with pytest.raises(ProbeUnstarted, match="torch is broken"):
        run_probes(str(mute), [])


@pytest.mark.parametrize(
    ("engine", "version", "message"),
    [
        ("docker", "29.0.1\n", "--device nvidia.com/gpu=all"),
        ("docker", "25.0.0-rc.1", "--device nvidia.com/gpu=all"),
        ("docker", "20.10.24+dfsg1\n", "--gpus all"),
        ("docker", "24.0.7", "--gpus all"),
        ("docker", "", "--device nvidia.com/gpu=all"),
        ("docker", unknown("no docker"), "--device nvidia.com/gpu=all"),
        ("podman", "4.3.1", "--device nvidia.com/gpu=all"),
    ],
)
def test_a_docker_that_does_not_know_cdi_is_asked_in_its_own_way(
    engine: str, version: object, message: str
) -> None:
    assert " ".join(card_options(engine, version)) == message


def test_the_images_user_may_write_the_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    look = 'for x in "$@"; do case "$x" in *:/report) stat -c %a "${x%%:*}" >&2;; esac; done'
    docker.write_text(f"#!/bin/sh\n[ $1 = run ] || exec echo 20.10.24\necho $@ >&2\n{look}\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ProbeUnstarted, match=r"^777"):
        run_in_image("sm120/vllm:1", [])


def test_a_container_gets_all_cards_and_no_network(tmp_path: Path) -> None:
    message = container_command("sm120/vllm:1", tmp_path, ["--ranks", "8"], {"NCCL_PROTO": "LL"})
    line = " ".join(message)
    assert "--pull=never --network=none --ipc=host --ulimit memlock=-1" in line
    assert "--device nvidia.com/gpu=all" in line
    assert "--env NCCL_PROTO=LL" in line
    assert line.endswith("sm120/vllm:1 /probes /report/report.json --ranks 8")

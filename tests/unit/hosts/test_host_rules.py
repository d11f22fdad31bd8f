"""Rules and known issues: what must be reported of which machine, and what must not."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import yaml

from pipeline.core.known import Unknown
from pipeline.core.verdict import RuleResult, worst
from pipeline.hosts.facts.source import Capture, CapturedCommand
from pipeline.hosts.rules.issues import (
    Issue,
    issue_findings,
    known_issues,
    match_lines,
    match_rules,
    match_rungs,
)
from pipeline.hosts.rules.judge import judge_rules
from tests.unit.hosts.machines import ACS_ON, DATA, blackwell, changed, facts, h200

SAMPLES: dict[str, dict[str, list[str]]] = yaml.safe_load(
    (DATA / "issue_samples.yaml").read_text("utf-8")
)
RUNG_SAMPLES: dict[str, dict[str, list[list[str]]]] = yaml.safe_load(
    (DATA / "rung_samples.yaml").read_text("utf-8")
)


def verdicts(capture: Capture, rule: str, cuda: str | None = None) -> list[str]:
    rows = [r for r in judge_rules(facts(capture), cuda) if r.rule == rule]
    assert rows, rule
    return [r.verdict for r in rows]


def test_a_good_machine_passes_every_rule() -> None:
    rows = judge_rules(facts(blackwell(8, iommu="identity")), "13.2")
    assert [r for r in rows if r.verdict != "passed"] == []
    assert worst([r.verdict for r in rows], "unknown") == "passed"


def test_every_failure_names_a_fix() -> None:
    bad = blackwell(4, ACS_ON, "DMA-FQ", persistence_mode="Disabled", current_link_width="8x")
    failed = [r for r in judge_rules(facts(bad), "13.3") if r.verdict == "failed"]
    assert {r.rule for r in failed} >= {"IOMMU", "ACS", "driver", "persistence", "link width"}
    assert all(r.fix for r in failed)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("persistence", {"persistence_mode": "Disabled"}),
    ("link width", {"current_link_width": "4x"}),
    ("power", {"current_power_limit": "700.00 W"}),
    ("power", {"current_power_limit": "100.00 W"}),
    ("clocks", {"clocks_event_reason_hw_slowdown": "Active"}),
    ("clocks", {"clocks_event_reason_hw_power_brake_slowdown": "Active"}),
]


@pytest.mark.parametrize(("rule", "fields"), BAD)
def test_a_bad_card_fails_its_rule(rule: str, fields: dict[str, Any]) -> None:
    assert verdicts(blackwell(1, **fields), rule) == ["failed"]
    assert verdicts(blackwell(1), rule) == ["passed"]


SEEN_CLOSED = {
    "/proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.58.03  Release Build\n"
    )
}
# rule, a machine on which it must fail, the reason then, and the text of a good machine
TEXTS = [
    (
        "open module",
        changed(blackwell(2), files=SEEN_CLOSED),
        "the proprietary module is loaded",
        "the open module is loaded",
    ),
    (
        "persistence",
        blackwell(2, persistence_mode="Disabled"),
        "persistence mode is off",
        "persistence mode is on",
    ),
    (
        "HMM",
        changed(blackwell(2), files={"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "N\n"}),
        "nvidia_uvm runs with HMM",
        "nvidia_uvm runs without HMM",
    ),
    (
        "mitigations",
        changed(blackwell(2), files={"/proc/cmdline": "quiet mitigations=off\n"}),
        "the kernel was booted with mitigations=off",
        "the mitigations are on",
    ),
    (
        "IOMMU",
        blackwell(2, ACS_ON, "DMA-FQ"),
        "the IOMMU translates addresses",
        "the IOMMU is in mode passthrough",
    ),
    (
        "ACS",
        blackwell(2, ACS_ON, "DMA-FQ"),
        "ACS redirects (control 0x001d)",
        "ACS control is 0x0000",
    ),
    ("link width", blackwell(2, current_link_width="4x"), "only x4 of x16", "x16 of x16"),
    (
        "clocks",
        blackwell(2, clocks_event_reason_hw_slowdown="Active"),
        "held down by: hw_slowdown",
        "not held down",
    ),
    (
        "power",
        blackwell(2, current_power_limit="700.00 W"),
        "700.0 W is outside of what Workstation allows: 150.0 to 600.0",
        "600.0 W; Workstation allows 150.0 to 600.0",
    ),
]


@pytest.mark.parametrize(("rule", "bad", "why", "passed"), TEXTS, ids=[row[0] for row in TEXTS])
def test_a_rule_that_fails_names_the_fault_and_not_the_text_of_a_pass(
    rule: str, bad: Capture, why: str, passed: str
) -> None:
    def texts(capture: Capture, verdict: str) -> set[str]:
        rows = [r for r in judge_rules(facts(capture), "13.2") if r.rule == rule]
        assert {r.verdict for r in rows} == {verdict}
        return {r.why for r in rows}

    assert texts(bad, "failed") == {why}
    assert texts(blackwell(2, iommu="identity"), "passed") == {passed}


def test_no_rule_passes_and_fails_with_one_text() -> None:
    good = judge_rules(facts(blackwell(4, iommu="identity")), "13.2")
    bad = [r for row in TEXTS for r in judge_rules(facts(row[1]), "13.3") if r.verdict == "failed"]
    assert len({r.rule for r in bad}) > len(TEXTS)
    assert {(r.rule, r.why) for r in good} & {(r.rule, r.why) for r in bad} == set()


@pytest.mark.parametrize(("rule", "fields"), BAD)
def test_a_card_that_does_not_say_is_unknown(rule: str, fields: dict[str, Any]) -> None:
    if rule == "clocks":
        capture = blackwell(1)
        text = capture.commands["nvidia-smi"].out.replace("clocks_event_reasons", "reasons")
        capture = changed(capture, outputs={"nvidia-smi": text})
    else:
        capture = blackwell(1, **cast("dict[str, Any]", dict.fromkeys(fields, "[Unknown Error]")))
        if rule == "power":
            text = capture.commands["nvidia-smi"].out.replace("requested_power", "x_power")
            capture = changed(capture, outputs={"nvidia-smi": text})
    assert verdicts(capture, rule) == ["unknown"]


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "passed"),
        ({"current_link_gen": "1"}, "unknown"),
        ({"max_link_gen": "4", "current_link_gen": "4"}, "failed"),
        ({"max_link_gen": "3", "current_link_gen": "1"}, "failed"),
        ({"max_device_link_gen": "N/A"}, "unknown"),
    ],
)
def test_a_slot_slower_than_its_card_fails_and_an_idle_card_is_not_judged(
    fields: dict[str, Any], verdict: str
) -> None:
    assert verdicts(blackwell(1, **fields), "link generation") == [verdict]


def test_a_small_window_fails() -> None:
    text = blackwell(1).commands["nvidia-smi"].out.replace("262144 MiB", "256 MiB")
    assert verdicts(changed(blackwell(1), outputs={"nvidia-smi": text}), "BAR1") == ["failed"]


def test_blackwell_needs_the_open_module() -> None:
    message = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.58.03  Release Build\n"
    closed = {"/proc/driver/nvidia/version": message}
    assert verdicts(changed(blackwell(2), files=closed), "open module") == ["failed"] * 2
    assert verdicts(changed(h200(), files=closed), "open module") == ["not applicable"]


@pytest.mark.parametrize(
    ("cuda", "verdict"),
    [("13.2", "passed"), ("13.0", "passed"), ("13.3", "failed"), ("14.0", "unknown")],
)
def test_the_driver_must_not_be_older_than_the_image(cuda: str, verdict: str) -> None:
    assert verdicts(blackwell(1), "driver", cuda) == [verdict]


def test_hmm_left_on_fails_where_there_are_peers() -> None:
    on = {"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "N\n"}
    assert verdicts(changed(blackwell(2), files=on), "HMM") == ["failed"]
    assert verdicts(changed(blackwell(1), files=on), "HMM") == ["not applicable"]


@pytest.mark.parametrize("policy", ["powersave", "powersupersave"])
def test_links_that_may_sleep_fail(policy: str) -> None:
    message = {"/sys/module/pcie_aspm/parameters/policy": f"default performance [{policy}]\n"}
    assert verdicts(changed(blackwell(2), files=message), "ASPM") == ["failed"]
    off = {**message, "/proc/cmdline": "quiet pcie_aspm=off\n"}
    assert verdicts(changed(blackwell(2), files=off), "ASPM") == ["passed"]


def test_a_card_on_the_bus_without_a_driver_fails() -> None:
    lost = CapturedCommand(code=9, err="NVIDIA-SMI has failed")
    capture = blackwell(2)
    capture = capture.model_copy(update={"commands": {**capture.commands, "nvidia-smi": lost}})
    assert verdicts(capture, "cards") == ["failed"]


def test_a_card_that_the_driver_lost_fails() -> None:
    two, one = blackwell(2), blackwell(1)
    output = {"nvidia-smi": one.commands["nvidia-smi"].out}
    assert verdicts(changed(two, outputs=output), "cards") == ["failed"]


def test_a_grave_xid_fails_and_a_program_fault_does_not() -> None:
    lost = "NVRM: Xid (PCI:0000:23:00): 79, GPU has fallen off the bus.\n"
    assert verdicts(changed(h200(), outputs={"dmesg": lost}), "Xid") == ["failed"]
    fault = "NVRM: Xid (PCI:0000:23:00): 31, MMU Fault\n"
    assert verdicts(changed(h200(), outputs={"dmesg": fault}), "Xid") == ["passed"]


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n", "governor"),
        ("/proc/cmdline", "quiet mitigations=off\n", "mitigations"),
    ],
)
def test_a_host_set_up_badly_fails(path: str, text: str, rule: str) -> None:
    assert verdicts(changed(blackwell(1), files={path: text}), rule) == ["failed"]


LITTLE = {"/proc/self/limits": "Max locked memory  8388608  8388608  bytes\n"}


def test_the_limit_of_the_login_does_not_fail_a_host_whose_containers_have_their_own() -> None:
    assert verdicts(changed(blackwell(1), files=LITTLE), "memlock") == ["not applicable"]
    free = {"/proc/self/limits": "Max locked memory  unlimited  unlimited  bytes\n"}
    assert verdicts(changed(blackwell(1), files=free), "memlock") == ["passed"]
    nothing = {"/proc/self/limits": "Max cpu time  unlimited\n"}
    assert verdicts(changed(blackwell(1), files=nothing), "memlock") == ["unknown"]


def test_registers_nobody_may_read_leave_acs_unknown() -> None:
    capture = blackwell(2)
    files = {p: s for p, s in capture.files.items() if not p.endswith("/config")}
    assert set(verdicts(capture.model_copy(update={"files": files}), "ACS")) == {"unknown"}


def test_every_issue_has_samples_and_every_sample_an_issue() -> None:
    assert set(SAMPLES) == {i.id for i in known_issues() if i.symptoms}
    assert all(s["match"] and len(s["other"]) >= 2 for s in SAMPLES.values())
    assert set(RUNG_SAMPLES) == {i.id for i in known_issues() if i.rungs}
    assert all(len(s["other"]) >= 2 * len(s["match"]) for s in RUNG_SAMPLES.values())


@pytest.mark.parametrize("issue", sorted(RUNG_SAMPLES))
def test_a_failed_rung_names_its_issue_and_no_other(issue: str) -> None:
    for rung, message in RUNG_SAMPLES[issue]["match"]:
        assert list(match_rungs([(rung, message)])) == [issue], message
    for rung, message in RUNG_SAMPLES[issue]["other"]:
        assert issue not in match_rungs([(rung, message)]), message


def test_an_issue_that_nothing_could_recognise_is_refused() -> None:
    row = {"id": "x", "title": "x", "cause": "x", "fix": "x", "sources": ["x"]}
    with pytest.raises(ValueError, match="symptoms"):
        Issue.model_validate(row)
    with pytest.raises(re.error, match="unterminated"):
        Issue.model_validate({**row, "rungs": [{"rung": "answers", "message": "("}]})


@pytest.mark.parametrize("issue", sorted(SAMPLES))
def test_an_issue_is_recognised_by_its_lines_and_by_no_others(issue: str) -> None:
    for line in SAMPLES[issue]["match"]:
        assert issue in match_lines("log", [line]), line
    for line in SAMPLES[issue]["other"]:
        assert issue not in match_lines("log", [line]), line


@pytest.mark.parametrize("issue", sorted(SAMPLES))
def test_no_line_gives_away_two_issues(issue: str) -> None:
    for line in SAMPLES[issue]["match"]:
        assert list(match_lines("log", [line])) == [issue]


def test_a_healthy_kernel_log_has_no_issue() -> None:
    assert match_lines("dmesg", h200().commands["dmesg"].out.splitlines()) == {}


def test_issues_name_rules_that_exist() -> None:
    rules = {r.rule for r in judge_rules(facts(blackwell(2)), "13.2")}
    named = {rule for issue in known_issues() for rule in issue.rules}
    assert named <= rules


def test_a_failed_rule_points_to_its_issue_and_an_unknown_one_does_not() -> None:
    def row(verdict: Any) -> RuleResult:
        return RuleResult(rule="HMM", subject="host", verdict=verdict, why="x", fix="y")

    assert list(match_rules([row("failed")])) == ["hmm-kaslr"]
    assert match_rules([row("unknown"), row("passed")]) == {}


def test_many_lines_are_counted_and_a_few_kept() -> None:
    lines = [SAMPLES["gpu-lost"]["match"][0]] * 50
    [result] = issue_findings([match_lines("log", lines)])
    assert (result.times, len(result.seen)) == (50, 5)
    assert result.seen[0].startswith("log:1: ")


def test_a_line_of_megabytes_is_no_trouble() -> None:
    assert match_lines("log", ["all_reduce: rank " + "0, " * 1_000_000]) == {}


def test_the_facts_of_a_lost_card_do_not_pass() -> None:
    result = facts(blackwell(1, product_name="[Unknown Error]"))
    assert not isinstance(result.gpus, Unknown)
    assert isinstance(result.gpus[0].name, Unknown)


def test_a_small_limit_is_told_apart_from_that_of_containers() -> None:
    (row,) = [
        r for r in judge_rules(facts(changed(blackwell(1), files=LITTLE))) if r.rule == "memlock"
    ]
    assert row.why.startswith("8 MiB in this shell; containers get theirs from")


def test_a_machine_without_cards_is_not_said_to_have_one() -> None:
    rows = judge_rules(facts(blackwell(0)))
    assert {r.why for r in rows if r.rule in ("IOMMU", "HMM")} == {"there are not two cards"}

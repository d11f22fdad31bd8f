"""The commands about hosts, as a user runs them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.app import host as doctor
from tests.unit.hosts.machines import DATA, H200, blackwell, changed, h200
from tests.unit.support import ROOT, Command


def keep(path: Path, value: object) -> Path:
    text = value if isinstance(value, str) else value.model_dump_json(exclude_none=True)  # type: ignore[attr-defined]
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return keep(tmp_path / "good.json", blackwell(8, iommu="identity"))


def test_facts_are_said_and_written(sm120: Command) -> None:
    ended = sm120("host", "facts", "--root", H200)
    assert ended.code == 0
    assert "NVIDIA H200" in ended.out
    facts = json.loads(sm120("host", "facts", "--root", H200, "--json").out)
    assert facts["driver"]["version"] == "580.159.04"
    assert facts["gpus"][0]["bar1_bytes"] == 256 << 30


def test_facts_of_a_machine_without_cards_say_so(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    ended = sm120("host", "facts", "--root", tmp_path / "tree")
    assert ended.code == 0
    assert "no GPUs: not run: this is a copied tree" in ended.out


def test_a_capture_can_be_redacted(sm120: Command, tmp_path: Path) -> None:
    named = changed(h200(), files={"/etc/machine-id": "0123456789abcdef0123456789abcdef\n"})
    path = keep(tmp_path / "named.json", named)
    capture = sm120("host", "facts", "--root", path, "--capture", "--redact")
    assert "0123456789abcdef" not in capture.out
    again = keep(tmp_path / "again.json", capture.out)
    assert sm120("host", "facts", "--root", again).code == 0


def test_a_damaged_capture_is_refused_in_one_line(sm120: Command, tmp_path: Path) -> None:
    path = keep(tmp_path / "bad.json", H200.read_text("utf-8")[:5000])
    ended = sm120("host", "facts", "--root", path)
    assert ended.error == "FactsUnreadable"
    assert ended.err.count("\n") == 2


def test_a_good_host_passes_its_rules(sm120: Command, good: Path) -> None:
    assert sm120("host", "check", "--facts", "--root", good, "--cuda", "13.2").code == 0


def test_a_driver_too_old_is_named_with_its_issue(sm120: Command, good: Path) -> None:
    ended = sm120("host", "check", "--facts", "--root", good, "--cuda", "13.3", "--json")
    assert ended.error == "HostUnfit"
    result = json.loads(ended.out)
    assert result["verdict"] == "failed"
    assert [f["issue"]["id"] for f in result["findings"]] == ["ptx-too-new"]


def test_unknown_is_an_ending_of_its_own(sm120: Command) -> None:
    ended = sm120("host", "check", "--facts", "--root", H200, "--cuda", "13.0")
    assert ended.error == "HostUnknown"
    assert "governor" in ended.out


def test_drift_is_found_and_has_its_code(sm120: Command, tmp_path: Path, good: Path) -> None:
    old = keep(tmp_path / "old.json", sm120("host", "facts", "--root", good, "--json").out)
    assert sm120("host", "drift", old, "--root", good).code == 0
    assert sm120("host", "drift", old, "live", "--root", good).code == 0
    assert sm120("host", "drift", old, old).code == 0
    assert sm120("host", "drift", old, tmp_path / "nowhere.json").error == "FactsUnreadable"
    lame = keep(tmp_path / "lame.json", blackwell(8, iommu="identity", current_link_width="8x"))
    ended = sm120("host", "drift", old, "--root", lame, "--json")
    assert ended.error == "HostDrifted"
    assert len(json.loads(ended.out)) == 8


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "host": "x"}', "[1]"])
def test_facts_that_are_none_are_refused(sm120: Command, tmp_path: Path, text: str) -> None:
    assert sm120("host", "drift", keep(tmp_path / "x.json", text)).error == "FactsUnreadable"


def test_the_odd_host_is_found(sm120: Command, tmp_path: Path, good: Path) -> None:
    same = sm120("host", "facts", "--root", good, "--json").out
    files = [keep(tmp_path / f"n{i}.json", same) for i in range(3)]
    assert sm120("host", "outliers", *files).code == 0
    odd = keep(tmp_path / "odd-capture.json", blackwell(8, iommu="identity", vbios_version="1"))
    files.append(keep(tmp_path / "odd.json", sm120("host", "facts", "--root", odd, "--json").out))
    ended = sm120("host", "outliers", *files)
    assert ended.error == "HostOutlier"
    assert "odd GPU 0" in ended.out


def test_checks_of_a_fleet_are_compared_too(sm120: Command, tmp_path: Path, good: Path) -> None:
    same = sm120("host", "facts", "--root", good, "--json").out
    files = [keep(tmp_path / f"n{i}.json", same) for i in range(3)]
    answer = json.loads((DATA / "h200-probes.json").read_text("utf-8"))
    slow = json.loads(json.dumps(answer))
    for row in slow["rows"]:
        if "in_a_row_us" in row["measured"]:
            row["measured"]["in_a_row_us"] *= 4
    checks = [
        keep(tmp_path / f"c{i}.json", json.dumps({"functions": a}))
        for i, a in enumerate((answer, answer, slow))
    ]
    options = [x for c in checks for x in ("--checks", c)]
    ended = sm120("host", "outliers", *files, *options)
    assert ended.error == "HostOutlier"
    assert "n2" in ended.out
    deep = keep(tmp_path / "deep.json", "[" * 100_000)
    odd = keep(tmp_path / "odd.json", json.dumps({"functions": {"rows": [1]}}))
    for wrong in (files[0], deep, odd):
        given = [x for c in (*checks[:2], wrong) for x in ("--checks", c)]
        assert sm120("host", "outliers", *files, *given).error == "FactsUnreadable"


def test_the_doctor_names_cause_and_fix(sm120: Command, tmp_path: Path) -> None:
    log = keep(
        tmp_path / "engine.log",
        "fine\nCUDA error: no kernel image is available for execution on the device\n\udcff".encode(
            "utf-8", "surrogateescape"
        ).decode("latin-1"),
    )
    ended = sm120("doctor", "--no-facts", log)
    assert ended.error == "IssueFound"
    assert "no-kernel-image" in ended.out
    assert "engine.log:2:" in ended.out
    assert "fix:" in ended.out


def test_the_doctor_also_looks_at_the_machine(sm120: Command, tmp_path: Path) -> None:
    lost = "[1.0] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
    sick = keep(tmp_path / "sick.json", changed(blackwell(2, iommu="DMA"), outputs={"dmesg": lost}))
    ended = sm120("host", "doctor", "--root", sick, "--json")
    assert ended.error == "IssueFound"
    assert [f["issue"]["id"] for f in json.loads(ended.out)] == ["gpu-lost", "nccl-hang"]


README_LINE = (
    "triton.runtime.errors.OutOfResources: "
    "shared memory, Required: 106496, Hardware limit: 101376\n"
)


@pytest.fixture
def stdin(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Sends text to standard input, as a shell does with `<` and `|`."""
    kept = os.dup(0)

    def send(text: str) -> None:
        with keep(tmp_path / "sent", text).open() as file:
            os.dup2(file.fileno(), 0)

    yield send
    os.dup2(kept, 0)
    os.close(kept)


def test_the_line_that_the_readme_opens_with_names_image_patch_and_command(
    sm120: Command, tmp_path: Path
) -> None:
    assert README_LINE.split(": ", 1)[1].strip() in (ROOT / "README.md").read_text("utf-8")
    log = keep(tmp_path / "engine.log", README_LINE)
    ended = sm120("--checkout", ROOT, "doctor", "--no-facts", log)
    assert (ended.code, ended.error) == (80, "IssueFound")
    assert "_fwd_kernel of sglang, gate smem-extend-attention (Kimi K2" in ended.out
    assert "sglang-k2: 0001-extend-attention-sm120-blocks.patch" in ended.out
    assert "sm120 build sglang-k2 && sm120 load sglang-k2" in ended.out


def test_outside_a_checkout_the_doctor_says_what_one_would_add(
    sm120: Command, tmp_path: Path
) -> None:
    ended = sm120("doctor", "--no-facts", keep(tmp_path / "engine.log", README_LINE))
    assert ended.error == "IssueFound"
    assert "--checkout DIR" in ended.out


@pytest.mark.parametrize("named", [["-"], []])
def test_a_log_may_come_from_a_pipe(
    sm120: Command, stdin: Callable[[str], None], named: list[str]
) -> None:
    stdin(README_LINE)
    ended = sm120("--checkout", ROOT, "doctor", "--no-facts", *named, "--json")
    [finding] = json.loads(ended.out)
    assert finding["issue"]["id"] == "shared-memory-101376"
    assert finding["seen"][0].startswith("stdin:1: ")
    assert finding["kernels"][0]["known"][0]["image"] == "sglang-k2"


@pytest.fixture
def pipe() -> Iterator[int]:
    """Standard input is a pipe that nobody closes; the end to write to."""
    kept, (out, into) = os.dup(0), os.pipe()
    os.dup2(out, 0)
    os.close(out)
    yield into
    os.dup2(kept, 0)
    os.close(kept)
    with suppress(OSError):
        os.close(into)


def test_a_pipe_in_which_nothing_comes_does_not_keep_the_doctor_from_the_machine(
    sm120: Command, pipe: int, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "FIRST_BYTES_S", 0.0)
    ended = sm120("doctor", "--root", good)
    assert (ended.code, "no known issue was recognised" in ended.out) == (0, True)
    assert "`-` waits" in ended.err
    assert "standard input is not read" in ended.err


def test_without_a_log_and_without_the_machine_there_is_nothing_to_judge(
    sm120: Command, pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "FIRST_BYTES_S", 0.0)
    ended = sm120("doctor", "--no-facts")
    assert (ended.code, "name a log" in ended.err) == (2, True)
    assert "no known issue" not in ended.out


def test_a_pipe_that_begins_late_is_read_to_its_end(sm120: Command, pipe: int) -> None:
    def send() -> None:
        os.write(pipe, b"fine\n")
        os.write(pipe, README_LINE.encode())
        os.close(pipe)

    timer = threading.Timer(0.1, send)
    timer.start()
    ended = sm120("doctor", "--no-facts")
    timer.join()
    assert (ended.error, "stdin:2: " in ended.out) == ("IssueFound", True)


def test_a_socket_is_read_as_sshd_gives_one(sm120: Command) -> None:
    here, there = socket.socketpair()
    kept = os.dup(0)
    os.dup2(here.fileno(), 0)
    try:
        there.sendall(README_LINE.encode())
        there.close()
        assert sm120("doctor", "--no-facts").error == "IssueFound"
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        here.close()


def test_in_a_checkout_the_doctor_does_not_send_anybody_to_one(
    sm120: Command, tmp_path: Path
) -> None:
    log = keep(tmp_path / "engine.log", README_LINE)
    ended = sm120("--checkout", ROOT, "doctor", "--no-facts", log)
    assert "checkout" not in ended.out
    assert "sm120 doctor" not in ended.out


@pytest.mark.parametrize(
    ("data", "program"),
    [
        (gzip.compress(README_LINE.encode(), mtime=0), "zcat"),
        (lzma.compress(README_LINE.encode()), "xzcat"),
        (bytes.fromhex("28b52ffd2400"), "zstdcat"),
    ],
)
def test_a_compressed_log_is_not_called_free_of_issues(
    sm120: Command, tmp_path: Path, data: bytes, program: str
) -> None:
    (tmp_path / "engine.log.1").write_bytes(data)
    ended = sm120("doctor", "--no-facts", tmp_path / "engine.log.1")
    assert ended.error == "SpecInvalid"
    assert f"`{program} {tmp_path}/engine.log.1 | sm120 doctor -`" in ended.err
    assert "no known issue" not in ended.out


def test_a_log_that_is_named_is_read_in_place_of_a_pipe(
    sm120: Command, stdin: Callable[[str], None], tmp_path: Path
) -> None:
    stdin(README_LINE)
    assert sm120("doctor", "--no-facts", keep(tmp_path / "fine.log", "fine\n")).code == 0


def test_bytes_that_no_gate_knows_are_said_to_be_unknown(sm120: Command, tmp_path: Path) -> None:
    log = keep(tmp_path / "engine.log", README_LINE.replace("106496", "106498"))
    ended = sm120("--checkout", ROOT, "doctor", "--no-facts", log)
    assert ended.error == "IssueFound"
    assert "has these bytes" in ended.out
    assert "sglang-k2" not in ended.out


def test_a_healthy_machine_is_not_called_proved(sm120: Command, good: Path) -> None:
    ended = sm120("doctor", "--root", good)
    assert ended.code == 0
    assert "does not prove" in ended.out


def test_tests_that_cannot_start_have_their_code(sm120: Command, tmp_path: Path) -> None:
    ended = sm120("host", "check", "--functions", "--python", tmp_path / "none")
    assert ended.error == "ProbeUnstarted"


@pytest.mark.parametrize("floors", ["x", "[]", '{"a": "b"}'])
def test_floors_that_are_no_numbers_are_refused(sm120: Command, floors: str) -> None:
    assert sm120("host", "check", "--functions", "--floors", floors).code == 2


def fake_python(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_failed_function_test_has_its_code_and_fix(sm120: Command, tmp_path: Path) -> None:
    answer = json.loads((DATA / "h200-probes.json").read_text("utf-8"))
    row = {"check": "all_reduce", "subject": "2 ranks", "verdict": "failed", "measured": {}}
    row["why"] = "all_reduce: rank 0, 1 hung in `values`"
    kept = keep(tmp_path / "kept.json", json.dumps({**answer, "rows": [row], "verdict": "failed"}))
    python = fake_python(tmp_path, f'cp {kept} "$2"; exit 1')
    ended = sm120("host", "check", "--functions", "--python", python)
    assert ended.error == "ProbeFailed"
    assert "nccl-hang" in ended.out
    assert "ACS" in ended.out


def test_a_real_answer_passes(sm120: Command, tmp_path: Path) -> None:
    python = fake_python(tmp_path, f'cp {DATA / "h200-probes.json"} "$2"')
    ended = sm120("host", "check", "--functions", "--python", python, "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["functions"]["count"] == 1


def test_a_sweep_without_an_end_has_its_code(sm120: Command, tmp_path: Path) -> None:
    row = {
        "check": "all_reduce",
        "subject": "x",
        "verdict": "failed",
        "why": "hung",
        "measured": {},
    }
    answer = json.loads((DATA / "h200-probes.json").read_text("utf-8"))
    kept = keep(tmp_path / "kept.json", json.dumps({**answer, "rows": [row], "verdict": "failed"}))
    python = fake_python(tmp_path, f'cp {kept} "$2"')
    ended = sm120("host", "tune-nccl", tmp_path / "out.json", "--ranks", "2", "--python", python)
    assert ended.error == "NothingTuned"
    assert json.loads((tmp_path / "out.json").read_text())["winners"] == []


def test_one_rank_cannot_be_tuned(sm120: Command, tmp_path: Path) -> None:
    assert sm120("host", "tune-nccl", tmp_path / "out.json", "--ranks", "1").code == 2

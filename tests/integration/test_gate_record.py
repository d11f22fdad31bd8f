"""The gates of real images as a stage of their build, and what stays of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import GateInvalid, GateUnknown
from tests.integration.built import run_sm120, sm120
from tests.testbed.forked import ROOT

AMD64 = ("--platform", "linux/amd64")
ENGINES = ["sglang-k2", "sglang", "vllm", "vllm-b12x"]
SPARK = ["sglang arm64", "vllm arm64"]
OLD = "sglang.srt.layers.attention.triton_ops.extend_attention:extend_attention_fwd"
NEW = "sglang.kernels.ops.attention.extend_attention"


@pytest.mark.parametrize("image", [*ENGINES, *SPARK])
def test_a_build_leaves_one_record_of_all_its_gates(big_store: Path, image: str) -> None:
    name, _, processor = image.partition(" ")
    platform, card = ("linux/arm64", "sm_121") if processor else ("linux/amd64", "sm_120")
    asked = ("build", name, "--platform", platform, "--gate", "--json")
    (built,) = json.loads(sm120(big_store, *asked).stdout)
    result = {e["gate"]: e for e in built["gates"]["results"] if e["arch"] == card}
    assert result.keys() == {"smem", "numerics", "patches", "arch"}
    assert {e["verdict"] for e in result.values()} <= {"passed", "accepted"}
    made_by = result["smem"]["made_by"]
    assert {"sm120-pipeline", "triton", "torch", "python", "ptxas", "worker"} <= made_by.keys()
    assert result["smem"]["card"]["shared_bytes"] == 101376
    assert all(row["facts"]["kernels"] for row in result["smem"]["rows"])
    beside = big_store / "images" / name / platform.replace("/", "-") / "gates.json"
    assert json.loads(beside.read_text())["image_digest"] == built["digest"]


@pytest.mark.parametrize("image", ["sglang-k2", "sglang", "vllm"])
def test_at_least_sixty_kernels_of_each_engine_are_reached(big_store: Path, image: str) -> None:
    result = json.loads(run_sm120(big_store, "gate", "run", image, "--json", *AMD64).stdout)["smem"]
    assert result["coverage"]["reached"] >= 60


def test_sglang_s_extend_attention_moved_in_0_5_16_and_the_gate_says_where_it_is(
    big_store: Path, tmp_path: Path
) -> None:
    for name in ("images", "lockfiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    path = tmp_path / "images" / "common" / "gates" / "sglang" / "smem-extend-attention.yaml"
    path.write_text(path.read_text().replace(f"      - {NEW}:extend_attention_fwd\n", ""))
    result = judged(tmp_path, big_store)
    message = {c["name"]: c["message"] for c in result["cases"]}["extend-mla-576-512"]
    assert f"has no {OLD}" in message
    assert f"now in {NEW}" in message


def judged(checkout: Path, store: Path) -> Any:
    command = [sys.executable, "-m", "pipeline", "--checkout", str(checkout), "--store", str(store)]
    done = subprocess.run(
        [*command, "gate", "run", "sglang", "--json", *AMD64],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == GateUnknown.exit_code, done.stderr[-2000:]
    return json.loads(done.stdout)["smem"]


@pytest.mark.parametrize("arch", ["sm_100", "sm_90", "sm_89"])
def test_other_cards_are_judged_too(big_store: Path, arch: str) -> None:
    result = json.loads(
        run_sm120(big_store, "gate", "run", "sglang-k2", "--arch", arch, "--json").stdout
    )["smem"]
    verdicts = {c["name"]: c["verdict"] for c in result["cases"]}
    assert verdicts["extend-mla-576-512"] == "passed"


def test_the_assembler_of_triton_3_5_does_not_know_sm_121(big_store: Path) -> None:
    some = ("--case", "extend-*")
    done = run_sm120(big_store, "gate", "run", "sglang-k2", "--arch", "sm_121", *some, "--json")
    assert done.returncode == GateUnknown.exit_code
    result = json.loads(done.stdout)["smem"]
    assert all("'sm_121a' is not defined" in c["message"] for c in result["cases"])


def test_an_unknown_card_is_refused_with_the_known(big_store: Path) -> None:
    done = run_sm120(big_store, "gate", "run", "sglang-k2", "--arch", "sm_999")
    assert done.returncode == GateInvalid.exit_code
    assert "sm_120, sm_121, sm_100, sm_90, sm_89, sm_86" in done.stderr

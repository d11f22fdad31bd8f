"""The gate on an engine of one kernel: fit, numbers and planted defects, in half a minute.

torch and Triton for amd64 are more than a gigabyte, so nothing is fetched for this: it runs where
some gate has already made an environment, and skips with a reason where none has.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.app.workspace import host_platform
from pipeline.artifacts.store.store import default_root, open_store
from pipeline.core import log
from pipeline.core.model import sha256_of
from pipeline.images.assemble.plan import GATE_WORKER
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.numerics import NumericsSpec, check_numbers, numeric
from pipeline.images.gate.smem.cases import GateFile, Gates
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.smem.environment import Environment, known_facts
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.run import GateTarget, judge_cases

HERE = Path(__file__).parent
TOKENS = {"shape": ["tokens", "heads", 128], "dtype": "float32"}
GATE = {
    "engine": "tinyengine",
    "why": "an engine of one kernel, to see that the gate itself works",
    "cases": [
        {
            "name": "tiny",
            "stands_for": ["nobody"],
            "function": ["tinyengine.attention:attention"],
            "dims": {"tokens": 150, "heads": 2},
            "arguments": {
                **{name: {"tensor": TOKENS} for name in "qkvo"},
                "b_start_loc": {"tensor": {"shape": [2], "dtype": "int32", "values": [0, 131]}},
                "b_seq_len": {"tensor": {"shape": [2], "dtype": "int32", "values": [131, 19]}},
                "max_input_len": 131,
                "is_causal": True,
            },
            "kernels": ["_tiny_kernel"],
        }
    ],
}
NUMERICS = {"reference": "prefill-attention", "outputs": ["o"], "rounds_to": "float32"}
MUTANTS = {
    "block for another card": ("[0] == 12 else", "[0] == 13 else", "smem"),
    "function renamed": ("def attention(", "def attend(", "smem"),
    "mask off by one": ("row[:, None] >= key", "row[:, None] + 1 >= key", "numerics"),
    "K in place of V": ("tl.load(V + there", "tl.load(K + there", "numerics"),
    "no rescaling": ("acc = acc * again[:, None]", "acc = acc", "numerics"),
    "scale forgotten": ("tl.trans(k)) * scale", "tl.trans(k))", "numerics"),
    "half of the rows written": (
        "/ total[:, None], mask=row",
        "/ total[:, None], mask=2 * row",
        "numerics",
    ),
}


@pytest.fixture(scope="module")
def environment() -> Environment:
    """Any environment that a gate has made on this machine."""
    for facts in sorted((default_root() / "gate" / "environments").glob("*/facts.json")):
        report = known_facts(facts.parent)
        if report is None:
            continue
        # that of the parser gate has neither torch nor Triton
        if report.platform == host_platform() and report.triton:
            return Environment(facts.parent, report, ())
    pytest.skip("No gate has made an environment with Triton here: run `sm120 gate run sglang-k2`.")


def judge(environment: Environment, root: Path, gate: str, change: tuple[str, str]) -> str:
    """One verdict on the tiny engine with one replacement."""
    shutil.copytree(HERE / "tinyengine", root / "engine" / "tinyengine")
    path = root / "engine" / "tinyengine" / "attention.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(change[0]) == 1, f"{change[0]!r} is not there exactly once"
    path.write_text(text.replace(*change), encoding="utf-8")
    tree = EngineTree(root / "engine", "tinyengine", "1", sha256_of(path.read_bytes()))
    setup = EngineSetup(package="tinyengine")
    gates = Gates(setup=setup, gates={"smem-tiny": GateFile.model_validate(GATE)})
    target = GateTarget(open_store(root / "store"), environment, tree, setup, card_for("sm_120"))
    if gate == "smem":
        (fit,) = judge_cases(target, gates, gates.cases())
        return f"{fit.verdict} {fit.message}"
    spec = gates.gates["smem-tiny"].cases[0]
    cases = list(numeric("smem-tiny", spec, NumericsSpec.model_validate(NUMERICS), spec.name))
    (numbers,) = check_numbers(target, cases).cases
    return f"{numbers.verdict} {numbers.message}"


def test_planted_defects_are_caught_and_an_untouched_engine_passes(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = (MUTANTS["function renamed"][0],) * 2
    asked = {**MUTANTS, "nothing": (*same, "smem"), "nothing at all": (*same, "numerics")}
    with ThreadPoolExecutor(2) as pool:
        result = {
            name: pool.submit(
                judge, environment, tmp_path / name.replace(" ", "-"), gate, (old, new)
            )
            for name, (old, new, gate) in asked.items()
        }
    assert result["nothing"].result() == "passed "
    assert result["nothing at all"].result() == "right "
    rows, missed = [], []
    for name, (_, _, gate) in MUTANTS.items():
        output = result[name].result()
        caught = output.startswith(("failed", "wrong", "unknown"))
        rows.append([name, gate, "caught" if caught else "MISSED", output[:90]])
        missed += [] if caught else [name]
    with capsys.disabled():
        print("\n" + log.table(["planted", "gate", "", "result"], rows))
    assert missed == []


def test_the_reference_agrees_with_torchs_own_attention_and_with_numbers_worked_out_by_hand(
    environment: Environment,
) -> None:
    command = environment.command(str(HERE / "reference_checks.py"), str(GATE_WORKER))
    done = subprocess.run(
        command, env=environment.variables(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "right\n", done.stderr[-2000:]

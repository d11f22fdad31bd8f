"""Is the gate any good? Defects are planted, one at a time, and every one must be caught."""

from __future__ import annotations

import difflib
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.artifacts.binary.fatbin import CUBIN
from pipeline.artifacts.store.store import open_store
from pipeline.core import log
from pipeline.images.assemble import patch
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.arch import ObjectVerdict, read_binary_facts
from pipeline.images.gate.arch import judge_object as judge_object
from pipeline.images.gate.numerics import check_numbers, numeric_cases
from pipeline.images.gate.patches import decide, with_numbers
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.engine import EngineTree, patched
from pipeline.images.gate.smem.image_gate import ImageGate, find_case, open_gate
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.run import judge_cases
from pipeline.images.spec.image import PatchSpec
from tests.gpu.collect import gate_context
from tests.integration.mutants import EXTEND, MLA, MUTANTS, Mutant
from tests.makers import patch_spec
from tests.testbed.forked import ROOT
from tests.unit.binary.arch_files import DATA, container, entry, host_object, opener

CARD = card_for("sm_120")


@dataclass(frozen=True)
class Finding:
    """What a gate reported of a defect, or of none."""

    planted: str
    gate: str
    verdict: str
    message: str
    caught: bool

    def row(self) -> list[str]:
        return [self.planted, self.gate, "caught" if self.caught else "MISSED", self.message[:90]]


@pytest.fixture(scope="module")
def gates(big_store: Path) -> Iterator[dict[str, ImageGate]]:
    """The three engines as their images hold them."""
    context = gate_context(open_store(big_store))
    with context.store.in_use():
        yield {
            image: open_gate(context, plan_image(context.checkout, image, "linux/amd64"))
            for image in ("sglang-k2", "sglang", "vllm")
        }


@contextmanager
def changed(
    gate: ImageGate, tree: EngineTree, file: str, old: str, new: str
) -> Iterator[EngineTree]:
    """An engine with one replacement, whose place must be found exactly once; gone afterwards.

    No other run shares it, and no kept answer is about it.
    """
    text = (tree.folder / file).read_text(encoding="utf-8")
    result = text.count(old)
    assert result == 1, f"{old!r} is found {result} times in {file}, not once"
    own = f"{text.replace(old, new)}\n# {uuid.uuid4()}\n".encode()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own.patch").write_text(patch.unified(file, text.encode(), own))
        spec = PatchSpec.model_validate(patch_spec(file="own.patch", files=[{"path": file}]))
        made = patched(tree, [spec], Path(folder), gate.context)
    try:
        yield made
    finally:
        shutil.rmtree(made.folder)


def mutated(gate: ImageGate, mutant: Mutant) -> AbstractContextManager[EngineTree]:
    """The patched engine with one defect."""
    return changed(gate, gate.patched(), mutant.file, mutant.old, mutant.new)


def numeric_case(gate: ImageGate, name: str) -> KernelCase:
    return next(case for case in numeric_cases(gate) if case.name == name)


def verdict_on(gate: ImageGate, tree: EngineTree, which: str, case: str) -> tuple[str, str]:
    target = gate.target(tree, CARD)
    if which == "smem":
        judged = judge_cases(target, gate.gates, [find_case(gate.gates, case)])[0]
        return judged.verdict, judged.message
    computed = check_numbers(target, [numeric_case(gate, case)]).cases[0]
    return computed.verdict, computed.message


def plant(gate: ImageGate, mutant: Mutant) -> Finding:
    with mutated(gate, mutant) as tree:
        verdict, message = verdict_on(gate, tree, mutant.gate, mutant.case)
    caught = verdict == mutant.want and mutant.message in message
    return Finding(mutant.name, mutant.gate, verdict, f"{verdict}: {message}", caught)


def control(gate: ImageGate, which: str, case: str) -> Finding:
    """The same case on the engine as it is: nothing may be found."""
    verdict, message = verdict_on(gate, gate.patched(), which, case)
    clean = verdict in ("passed", "right")
    return Finding(f"nothing ({case})", which, verdict, f"{verdict}: {message}", not clean)


def dropped_patch(gate: ImageGate) -> Finding:
    verdict, message = verdict_on(gate, gate.tree, "smem", MLA)
    caught = verdict == "failed" and "106496" in message
    return Finding("patch dropped", "smem", verdict, f"{verdict}: {message}", caught)


def dead_branch(gate: ImageGate) -> Finding:
    """The branch of PR 17908 behind the one that catches every newer card."""
    place = "        elif _is_cuda and CUDA_CAPABILITY[0] >= 8:\n"
    branch = place.replace(">= 8", "== 12") + "            BLOCK_M, BLOCK_N = 32, 32\n"
    cases = [find_case(gate.gates, MLA)]
    with changed(gate, gate.tree, EXTEND, place, branch + place) as tree:
        after = judge_cases(gate.target(tree, CARD), gate.gates, cases)
    before = judge_cases(gate.target(gate.tree, CARD), gate.gates, cases)
    state, message = decide(before, after, applied=False, conflict="")
    return Finding(
        "patch's branch never reached", "patches", state, f"{state}: {message}", state == "inert"
    )


def wrong_patch(gate: ImageGate) -> Finding:
    """A patch that fits and computes something else is not needed but wrong."""
    mutant = next(m for m in MUTANTS if m.name == "causal mask off by one")
    with mutated(gate, mutant) as tree:
        numbers = check_numbers(gate.target(tree, CARD), [numeric_case(gate, mutant.case)])
    state, message = with_numbers("needed", "", numbers)
    return Finding(
        "patch that fits and is wrong", "patches", state, f"{state}: {message}", state == "wrong"
    )


def foreign_objects() -> list[Finding]:
    """Objects without machine code for the card, where the image promises some."""
    ptx_only = host_object({".nv_fatbin": (DATA / "compute_120.fatbin").read_bytes()})
    lie = host_object({".nv_fatbin": container(entry(120, CUBIN, claimed=1 << 40))})
    planted = {
        "object for Hopper alone": (
            (DATA / "hopper.so").read_bytes(),
            ObjectVerdict.NO_KERNEL_IMAGE,
        ),
        "object that holds PTX alone": (ptx_only, ObjectVerdict.WRONG_VARIANT),
        "object whose fatbin is cut off": (lie, ObjectVerdict.UNREADABLE),
    }
    result = []
    for name, (data, want) in planted.items():
        output = judge_object(read_binary_facts(opener(data), len(data)), "sm_120", "sm_120")
        result.append(
            Finding(name, "arch", output.verdict.value, output.message, output.verdict is want)
        )
    return result


def test_every_planted_defect_is_caught_and_nothing_is_found_where_none_is(
    gates: dict[str, ImageGate], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(MUTANTS) >= 14
    clean = sorted({(m.image, m.gate, m.case) for m in MUTANTS})
    with ThreadPoolExecutor(2) as pool:
        planted = [pool.submit(plant, gates[m.image], m) for m in MUTANTS]
        k2 = gates["sglang-k2"]
        planted += [pool.submit(f, k2) for f in (dropped_patch, dead_branch, wrong_patch)]
        controls = [pool.submit(control, gates[image], which, case) for image, which, case in clean]
        result = [future.result() for future in planted]
        untouched = [future.result() for future in controls]
    result += foreign_objects()
    with capsys.disabled():
        print("\n" + log.table(["planted", "gate", "", "result"], [f.row() for f in result]))
        print(f"{sum(f.caught for f in result)} of {len(result)} planted defects caught")
        print(
            f"{sum(f.caught for f in untouched)} of {len(untouched)} untouched cases complained of"
        )
    assert [f for f in result if not f.caught] == []
    assert [f for f in untouched if f.caught] == []


def test_a_mutant_whose_place_is_gone_fails_loudly(gates: dict[str, ImageGate]) -> None:
    gone = Mutant("x", "sglang-k2", EXTEND, "no such line", "", "smem", MLA, "failed", "")
    twice = Mutant("x", "sglang-k2", EXTEND, "import triton", "", "smem", MLA, "failed", "")
    for mutant in (gone, twice):
        with pytest.raises(AssertionError, match="not once"), mutated(gates["sglang-k2"], mutant):
            pass


def wrong_checkout(gate: ImageGate, root: Path) -> Path:
    """This checkout with a patch that fits the card and masks one key too few."""
    mutant = next(m for m in MUTANTS if m.name == "causal mask off by one")
    before = (gate.tree.folder / EXTEND).read_text(encoding="utf-8")
    after = (gate.patched().folder / EXTEND).read_text(encoding="utf-8")
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.replace(mutant.old, mutant.new).splitlines(keepends=True),
        *(f"a/{EXTEND}", f"b/{EXTEND}"),
    )
    for name in ("images", "lockfiles"):
        shutil.copytree(ROOT / name, root / name)
    patch = root / "images" / "sglang-k2" / "patches" / gate.series.patches[0].file
    patch.write_text("".join(lines), encoding="utf-8")
    return root


def test_a_patch_that_computes_wrong_numbers_is_wrong_and_ends_the_commands(
    gates: dict[str, ImageGate], big_store: Path, tmp_path: Path
) -> None:
    checkout = wrong_checkout(gates["sglang-k2"], tmp_path)
    command = [sys.executable, "-m", "pipeline", "--checkout", str(checkout)]
    ended = {}
    for verb in (["patches"], ["run", "--only", "numerics"]):
        done = subprocess.run(
            [*command, "--store", str(big_store), "gate", *verb, "sglang-k2", "--json"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        ended[verb[0]] = (
            json.loads(done.stderr.splitlines()[-1])["error"],
            json.loads(done.stdout),
        )
    error, verdicts = ended["patches"]
    assert (error, [v["state"] for v in verdicts]) == ("PatchUnproved", ["wrong"])
    error, result = ended["run"]
    assert (error, result["smem"]["numerics"]["verdict"]) == ("GateWrong", "wrong")
    wrong = {c["name"] for c in result["smem"]["numerics"]["cases"] if c["verdict"] == "wrong"}
    assert MLA in wrong
    assert f"{MLA}-mask" not in wrong

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import PreflightFailed
from pipeline.core.known import Unknown, unknown
from pipeline.core.verdict import RuleResult
from pipeline.hosts.facts.capture import PCI
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.smi import read_memory_used
from pipeline.hosts.facts.source import Capture
from pipeline.images.gate.state import GateState
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Overrides
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.fits import FitPlan, find_served_model, plan_fit
from pipeline.serving.serve.preflight import (
    CHECKS,
    PlannedStart,
    PreflightMachine,
    machine_for,
    require_ready,
    run_checks,
)
from pipeline.serving.serve.site import HERE
from pipeline.serving.serve.weights import HostProof, WeightsFolder
from tests.testbed.ports import unused_port
from tests.unit.hosts.machines import blackwell, changed, log_of, matrix, xml
from tests.unit.serve.recipes import recipe, two_cards
from tests.unit.support import ROOT

GIB = 1 << 30
# as nvidia-smi shows an RTX PRO 6000
BIG = "97887 MiB"
NO_MACHINE = PreflightMachine(*[unknown("nobody looked")] * 4)


def machine(count: int = 2, used: list[int] | None = None, **fields: Any) -> PreflightMachine:
    facts = gather_facts(blackwell(count, **fields))
    return PreflightMachine(facts, used if used is not None else [0] * count, "", 0)


def plan(recipe: Recipe, **changes: Any) -> PlannedStart:
    values: dict[str, Any] = {
        "recipe": recipe,
        "port": unused_port(),
        "image_is_built": True,
        "weights": WeightsFolder(Path("/nowhere")),
        "cuda": "13.0",
    }
    return PlannedStart(**{**values, **changes})


def verdicts(name: str, plan: PlannedStart, machine: PreflightMachine = NO_MACHINE) -> list[str]:
    return [row.verdict for row in CHECKS[name](plan, machine)]


def test_a_recipe_without_cards_asks_nothing_of_the_machine() -> None:
    tiny = recipe()
    free = HERE.look(tiny, unused_port())
    assert free.facts == unknown("the recipe does not depend on it")
    made = WeightsFolder(Path("/nowhere"), digest="sha256:" + "1" * 64)
    rows = run_checks(plan(tiny, weights=made), free, ())
    assert {row.verdict for row in rows} == {"passed", "not applicable"}
    require_ready(rows)


def test_a_port_that_somebody_uses_is_found() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = HERE.look(recipe(), other.getsockname()[1])
        assert verdicts("port", plan(recipe()), taken) == ["failed"]
    assert verdicts("port", plan(recipe()), HERE.look(recipe(), unused_port())) == ["passed"]
    assert verdicts("port", plan(recipe()), NO_MACHINE) == ["unknown"]


def test_an_image_must_be_built() -> None:
    (built,) = CHECKS["image"](plan(recipe()), NO_MACHINE)
    (missing,) = CHECKS["image"](plan(recipe(), image_is_built=False), NO_MACHINE)
    assert (built.verdict, built.why) == ("passed", "is in the store")
    assert missing.verdict == "failed"
    assert missing.why == "is not in the store as this checkout builds it"
    assert missing.fix == "Run `sm120 build llama-cpp-cpu` first."


def test_cards_as_the_recipe_says_pass() -> None:
    assert set(verdicts("cards", plan(two_cards()), machine())) == {"passed"}


@pytest.mark.parametrize(
    ("recipe", "machine"),
    [
        (two_cards(), machine(1)),
        (two_cards(), machine(product_name="NVIDIA H200")),
        (two_cards(memory_gib=999), machine()),
    ],
)
def test_too_few_other_or_smaller_cards_fail(recipe: Recipe, machine: PreflightMachine) -> None:
    assert "failed" in verdicts("cards", plan(recipe), machine)


def test_cards_that_nobody_can_see_are_unknown_and_never_passed() -> None:
    for name in ("cards", "idle", "driver"):
        assert verdicts(name, plan(two_cards()), NO_MACHINE) == ["unknown"]


def test_named_cards_are_the_only_ones_that_count() -> None:
    chosen = plan(two_cards(), cards=(2, 3))
    assert set(verdicts("cards", chosen, machine(4))) == {"passed"}
    assert "failed" in verdicts("cards", plan(two_cards(), cards=(3, 4)), machine(4))
    assert verdicts("idle", chosen, machine(4, [50 * GIB, 50 * GIB, 0, 0])) == ["passed"] * 2


def test_a_card_that_is_in_use_is_named() -> None:
    busy = machine(2, [GIB // 2, 40 * GIB])
    rows = list(CHECKS["idle"](plan(two_cards()), busy))
    assert [(row.subject, row.verdict) for row in rows] == [
        ("GPU 0", "passed"),
        ("GPU 1", "failed"),
    ]
    assert "40.0 GiB" in rows[1].why


@pytest.mark.parametrize(
    ("cuda", "verdict"),
    [("13.0", "passed"), ("13.2", "passed"), ("13.3", "failed"), ("99.0", "unknown")],
)
def test_the_driver_must_know_what_the_image_compiles(cuda: str, verdict: str) -> None:
    assert verdicts("driver", plan(two_cards(), cuda=cuda), machine()) == [verdict]


@pytest.mark.parametrize(
    ("state", "verdict"),
    [("passed", "passed"), ("not passed", "failed"), ("no gates", "not applicable")],
)
def test_the_image_s_kernels_must_have_been_judged(state: Any, verdict: str) -> None:
    gates = GateState(platform="linux/amd64", state=state, message="smem on sm_120")
    assert verdicts("gate", plan(two_cards(), gates=gates)) == [verdict]
    assert verdicts("gate", plan(recipe(), gates=gates)) == ["not applicable"]


def test_kernels_of_an_image_that_is_not_built_are_unknown() -> None:
    assert verdicts("gate", plan(two_cards())) == ["unknown"]


def looked_at(capture: Capture) -> PreflightMachine:
    return machine_for(two_cards(), "", lambda: capture)


def placed(*nodes: int, **outputs: str) -> PreflightMachine:
    """Cards that hang on these nodes."""
    files = {f"{PCI}/0000:{i + 1:02x}:00.0/numa_node": f"{n}\n" for i, n in enumerate(nodes)}
    capture = changed(blackwell(len(nodes)), files=files, outputs=outputs)
    return looked_at(capture)


def test_cards_on_one_node_pass_where_the_recipe_counts_on_it() -> None:
    together = plan(two_cards(same_numa_node=True))
    assert verdicts("topology", together, placed(1, 1)) == ["passed"]
    # of four cards, two may hang together
    chosen = plan(two_cards(same_numa_node=True), cards=(2, 3))
    assert verdicts("topology", chosen, placed(0, 0, 1, 1)) == ["passed"]
    assert verdicts("topology", plan(two_cards()), placed(0, 1)) == ["not applicable"]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (placed(0, 1), "failed"),
        (placed(1, 0), "failed"),
        (placed(-1, -1), "unknown"),
        (placed(0, -1), "unknown"),
        (machine(2), "unknown"),
        (NO_MACHINE, "unknown"),
    ],
)
def test_cards_on_two_nodes_or_on_nobody_knows_which_do_not(
    found: PreflightMachine, verdict: str
) -> None:
    together = plan(two_cards(same_numa_node=True))
    assert verdicts("topology", together, found) == [verdict]


def test_peers_that_the_driver_claims_pass_and_are_called_a_claim() -> None:
    (row,) = CHECKS["topology"](plan(two_cards(peer_to_peer=True)), machine(2))
    assert (row.verdict, row.why) == ("passed", "claimed by the driver")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (placed(0, 0, **{"nvidia-smi p2p": matrix(2, word="NS")}), "failed"),
        (placed(0, 0, **{"nvidia-smi p2p": matrix(2, word="CNS")}), "failed"),
        (placed(0, 0, **{"nvidia-smi p2p": ""}), "unknown"),
        (placed(0, 0, **{"nvidia-smi p2p": matrix(1, word="OK")}), "unknown"),
        (NO_MACHINE, "unknown"),
    ],
)
def test_peers_that_it_refuses_or_does_not_name_do_not(
    found: PreflightMachine, verdict: str
) -> None:
    reached = plan(two_cards(peer_to_peer=True))
    assert verdicts("topology", reached, found) == [verdict]


def test_hugepages_that_are_free_pass() -> None:
    wants = plan(two_cards(hugepages_gib=2))
    assert verdicts("hugepages", wants, replace(machine(), hugepages_bytes=2 * GIB)) == ["passed"]
    assert verdicts("hugepages", plan(two_cards()), NO_MACHINE) == ["not applicable"]


def test_too_few_hugepages_fail_and_uncounted_ones_are_unknown() -> None:
    wants = plan(two_cards(hugepages_gib=2))
    for few in (0, 2 * GIB - 1):
        assert verdicts("hugepages", wants, replace(machine(), hugepages_bytes=few)) == ["failed"]
    assert verdicts("hugepages", wants, NO_MACHINE) == ["unknown"]
    rows = "HugePages_Total:    1100\nHugePages_Free:     1024\nHugepagesize:       2048 kB\n"
    counted = changed(blackwell(2), files={"/proc/meminfo": rows})
    assert looked_at(counted).hugepages_bytes == 2 * GIB
    without = changed(blackwell(2), files={"/proc/meminfo": "MemTotal: 1 kB\n"})
    assert isinstance(looked_at(without).hugepages_bytes, Unknown)


def fitting(**changes: Any) -> FitPlan:
    kimi = Recipes([ROOT / "recipes"]).read("kimi-k26-vllm-8x")
    found = find_served_model(kimi, None, Checkout(ROOT))
    return replace(plan_fit(kimi, Overrides(), found), **changes)


def test_a_model_that_has_room_on_each_card_passes() -> None:
    eight = two_cards(cards=8)
    assert verdicts("fit", plan(eight, fit=fitting()), machine(8, total=BIG)) == ["passed"]
    assert verdicts("fit", plan(recipe()), NO_MACHINE) == ["not applicable"]


@pytest.mark.parametrize(
    ("fit", "found", "verdict"),
    [
        (fitting(), machine(2, total=BIG), "failed"),
        (fitting(), machine(8, total="32607 MiB"), "failed"),
        (fitting(), machine(8, total="N/A"), "unknown"),
        (fitting(model=unknown("nobody looked")), machine(8, total=BIG), "unknown"),
        (fitting(speculates=True), machine(8, total=BIG), "unknown"),
        (fitting(), NO_MACHINE, "unknown"),
        (None, machine(8, total=BIG), "unknown"),
    ],
)
def test_a_model_without_room_fails_and_one_that_nobody_knows_is_unknown(
    fit: FitPlan | None, found: PreflightMachine, verdict: str
) -> None:
    assert verdicts("fit", plan(two_cards(cards=8), fit=fit), found) == [verdict]


def test_what_has_no_room_names_the_command_that_says_what_would() -> None:
    # not a flag of one engine: here the weights alone are too large for any context
    kimi = Recipes([ROOT / "recipes"]).read("kimi-k26-vllm-8x")
    (row,) = CHECKS["fit"](plan(kimi, fit=fitting()), machine(8, total="32607 MiB"))
    assert row.verdict == "failed"
    assert "the weights alone" in row.why
    assert row.fix.startswith("`sm120 weights fit kimi-k2.6` shows the sum")


@pytest.mark.parametrize(
    ("proof", "verdict"),
    [
        (HostProof(good=True, why="12 files are as locked"), "passed"),
        (HostProof(good=False, why="damaged there"), "failed"),
        (HostProof(good=unknown("no sm120 there")), "unknown"),
    ],
)
def test_weights_on_another_host_are_judged_by_what_it_proved(
    proof: HostProof, verdict: str
) -> None:
    there = WeightsFolder(Path("/models/kimi"), file="missing-here.gguf", proof=proof)
    assert verdicts("weights", plan(two_cards(), weights=there)) == [verdict]


def test_the_machine_s_memory_and_nodes_are_counted() -> None:
    assert "failed" in verdicts("memory", plan(two_cards(host_memory_gib=99999)), machine())
    assert verdicts("memory", plan(two_cards(host_memory_gib=1)), machine()) == ["passed"]
    assert verdicts("memory", plan(two_cards(numa_nodes=63)), machine()) == ["failed"]
    assert verdicts("memory", plan(two_cards()), machine()) == ["not applicable"]


def test_weights_that_nobody_named_or_that_lack_their_file_fail(tmp_path: Path) -> None:
    assert verdicts("weights", plan(two_cards(), weights=None)) == ["failed"]
    missing = WeightsFolder(tmp_path, file="model.gguf")
    assert verdicts("weights", plan(two_cards(), weights=missing)) == ["failed"]


def test_weights_that_no_lock_is_of_are_unknown(tmp_path: Path) -> None:
    assert verdicts("weights", plan(two_cards(), weights=WeightsFolder(tmp_path))) == ["unknown"]


def test_a_skipped_check_is_not_made() -> None:
    rows = run_checks(plan(two_cards()), NO_MACHINE, [*CHECKS])
    assert rows == []


@pytest.mark.parametrize("verdict", ["failed", "unknown"])
def test_what_failed_and_what_nobody_knows_both_stop_the_start(verdict: Any) -> None:
    good = RuleResult(rule="port", subject="1", verdict="passed", why="is free")
    bad = RuleResult(rule="idle", subject="GPU 0", verdict=verdict, why="in use", fix="wait")
    with pytest.raises(PreflightFailed, match="idle: GPU 0: in use"):
        require_ready([good, bad])
    require_ready([good])


def test_memory_in_use_is_read_from_nvidia_smi() -> None:
    used = read_memory_used(xml())
    assert not isinstance(used, Unknown)
    assert len(used) == 1
    assert 0 <= used[0] < 200 * GIB


@pytest.mark.parametrize("text", ["", "<other/>", log_of(["<gpu></gpu>"])])
def test_memory_that_nvidia_smi_does_not_tell_is_unknown(text: str) -> None:
    assert isinstance(read_memory_used(text), Unknown)


def test_a_fit_that_cannot_be_calculated_is_said_and_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unread = RuleResult(rule="fit", subject="new", verdict="unknown", why="of an unknown kind")
    require_ready([unread])
    assert "Whether new fits is not known: of an unknown kind" in capsys.readouterr().err
    short = RuleResult(rule="fit", subject="new", verdict="failed", why="8 GiB are short")
    unseen = RuleResult(rule="idle", subject="GPU 0", verdict="unknown", why="nobody looked")
    for other in (short, unseen):
        with pytest.raises(PreflightFailed, match=other.why):
            require_ready([unread, other])


def on_processor(vendor: str, family: str) -> PreflightMachine:
    text = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: Some CPU\n"
    )
    return looked_at(changed(blackwell(2), files={"/proc/cpuinfo": text}))


def test_the_nccl_of_zen_5_is_served_on_zen_5() -> None:
    wants = plan(two_cards(processor="amd-zen-5"))
    (row,) = CHECKS["processor"](wants, on_processor("AuthenticAMD", "26"))
    assert (row.verdict, row.why) == ("passed", "Some CPU, family 26: is amd-zen-5")
    assert verdicts("processor", plan(two_cards()), NO_MACHINE) == ["not applicable"]


@pytest.mark.parametrize(
    ("found", "verdict", "why"),
    [
        (on_processor("AuthenticAMD", "25"), "failed", "family 25; the recipe is for amd-zen-5"),
        (on_processor("GenuineIntel", "26"), "failed", "the recipe is for amd-zen-5"),
        (NO_MACHINE, "unknown", ""),
    ],
)
def test_on_another_processor_it_is_not(found: PreflightMachine, verdict: str, why: str) -> None:
    (row,) = CHECKS["processor"](plan(two_cards(processor="amd-zen-5")), found)
    assert row.verdict == verdict
    assert why in row.why


def passing_and_failing(name: str) -> tuple[list[RuleResult], list[RuleResult]]:
    """A check of a machine that is as the recipe wants it, and of one that is not."""
    one = two_cards(same_numa_node=True, peer_to_peer=True, hugepages_gib=2)
    host = two_cards(host_memory_gib=1, numa_nodes=1)
    good, bad = machine(), machine(1, [40 * GIB], product_name="NVIDIA H200")
    cases: dict[
        str, tuple[tuple[PlannedStart, PreflightMachine], tuple[PlannedStart, PreflightMachine]]
    ] = {
        "port": ((plan(one), good), (plan(one), replace(good, port_problem="is taken"))),
        "image": ((plan(one), good), (plan(one, image_is_built=False), good)),
        "flags": ((plan(one), good), (plan(one, flags=("--x: unknown",)), good)),
        "cards": ((plan(one), good), (plan(two_cards(memory_gib=999)), bad)),
        "idle": ((plan(one), good), (plan(one), bad)),
        "topology": (
            (plan(one), placed(1, 1)),
            (plan(one), placed(0, 1, **{"nvidia-smi p2p": matrix(2, word="NS")})),
        ),
        "memory": (
            (plan(host), placed(0, 0)),
            (plan(two_cards(host_memory_gib=99999, numa_nodes=63)), placed(0, 0)),
        ),
        "hugepages": ((plan(one), replace(good, hugepages_bytes=2 * GIB)), (plan(one), good)),
    }
    (first, second) = cases[name]
    return list(CHECKS[name](*first)), list(CHECKS[name](*second))


@pytest.mark.parametrize(
    "name", ["port", "image", "flags", "cards", "idle", "topology", "memory", "hugepages"]
)
def test_a_failed_row_never_has_the_text_of_one_that_passed(name: str) -> None:
    passed, failed = passing_and_failing(name)
    good = {row.why for row in passed if row.verdict == "passed"}
    wrong = {row.why for row in failed if row.verdict == "failed"}
    assert good
    assert wrong
    # a text that also holds of a row that passed does not say what is wrong
    assert not good & wrong
    assert all(any(sign in why for sign in FAULTY) for why in wrong), wrong


# Words by which a reader sees that the row is about a fault.
FAULTY = ("not", "only", "and the recipe", "cannot", "busy", "unknown", "NS")

from __future__ import annotations

import re

import pytest

from pipeline.serving.fit.facts import from_recipe, recipe_of
from pipeline.serving.fit.gguf import BY_NAME, GgufModel, GgufTensor
from pipeline.serving.fit.placement import (
    CPU,
    Batch,
    FitMachine,
    TensorRule,
    checked_layout,
    device_of,
    expert_bytes,
    home_of,
    layout_notes,
    offload_from,
    place,
    read_placement_overrides,
    shortage,
)
from pipeline.serving.fit.units import GIB, MIB

TWO = ["CUDA0", "CUDA1"]
PUBLISHED = [r"blk\.(1|2)\.ffn.*=CUDA0", r"blk\.(59|60)\.ffn.*=CUDA1", "exps=CPU"]


def kimi(quant: str = "IQ3_K") -> GgufModel:
    layout = recipe_of("ubergarm/Kimi-K2.6-GGUF", quant)
    assert layout is not None
    return from_recipe(layout[0].architecture(), layout[1])


KIMI = kimi()
BATCH = Batch(131072, "bf16", 4096, 8192)


def tensor(name: str, mib: int = 1) -> GgufTensor:
    return GgufTensor(name, (mib * MIB // 4,), BY_NAME["f32"], mib * MIB)


def device_sums(
    tensors: list[GgufTensor], rules: list[TensorRule], layers: int, devices: list[str]
) -> dict[str, int]:
    sums = dict.fromkeys([*devices, CPU], 0)
    for each in tensors:
        sums[device_of(each.name, rules, layers, devices)] += each.n_bytes
    return sums


def test_the_first_rule_that_matches_counts() -> None:
    tensors = [tensor("blk.1.ffn_up_exps.weight"), tensor("blk.2.ffn_up_exps.weight")]
    rules = read_placement_overrides([r"blk\.1\.=CUDA0", "exps=CPU"], TWO)
    assert device_sums(tensors, rules, 3, TWO) == {"CUDA0": MIB, "CUDA1": 0, CPU: MIB}
    assert device_sums(tensors, rules[::-1], 3, TWO) == {"CUDA0": 0, "CUDA1": 0, CPU: 2 * MIB}


def test_a_rule_is_searched_for_anywhere_in_a_name() -> None:
    # without the dots, layer 1 is also 10 to 19: the commonest slip in such lines
    tensors = [tensor(f"blk.{i}.ffn_up_exps.weight") for i in range(20)]
    loose = read_placement_overrides([r"blk\.1=CUDA0", "exps=CPU"], TWO)
    assert device_sums(tensors, loose, 20, TWO)["CUDA0"] == 11 * MIB
    strict = read_placement_overrides([r"blk\.1\.=CUDA0", "exps=CPU"], TWO)
    assert device_sums(tensors, strict, 20, TWO)["CUDA0"] == MIB


def idle_rules(rules: list[TensorRule]) -> list[TensorRule]:
    batch = Batch(4096, "bf16")
    notes = layout_notes(KIMI, batch, checked_layout(KIMI, FitMachine(2, 96 * GIB), batch, rules))
    return [
        rule for rule in rules if any(n.startswith(f"{rule.flag()} does nothing") for n in notes)
    ]


def test_a_rule_that_comes_too_late_is_named() -> None:
    rules = read_placement_overrides(["exps=CPU", r"blk\.(1|2)\.ffn_.*_exps=CUDA0"], TWO)
    assert idle_rules(rules) == [rules[1]]
    assert idle_rules(rules[::-1]) == []


def test_a_rule_for_a_layer_without_experts_is_named() -> None:
    rules = read_placement_overrides([r"blk\.(0|61)\.ffn_.*_exps=CUDA0", "exps=CPU"], TWO)
    assert idle_rules(rules) == [rules[0]]


def test_what_no_rule_names_goes_with_its_layer_and_embeddings_with_the_host() -> None:
    assert home_of("token_embd.weight", 61, TWO) == CPU
    assert home_of("blk.0.attn_q_a.weight", 61, TWO) == "CUDA0"
    assert home_of("blk.30.attn_q_a.weight", 61, TWO) == "CUDA0"
    assert home_of("blk.31.attn_q_a.weight", 61, TWO) == "CUDA1"
    assert home_of("output.weight", 61, TWO) == "CUDA1"


def test_no_byte_is_lost_or_counted_twice() -> None:
    for rules in (PUBLISHED, ["exps=CPU"], [".=CUDA1"], [r"attn=CPU,ffn_down_exps=CUDA1"]):
        machine = FitMachine(2, 96 * GIB)
        layout = checked_layout(
            KIMI, machine, Batch(4096, "bf16"), read_placement_overrides(rules, TWO)
        )
        weights = sum(load.weights_bytes for load in layout.loads)
        assert weights + layout.host_bytes == KIMI.n_bytes


def test_several_rules_may_stand_in_one_argument() -> None:
    assert read_placement_overrides([r"a=CUDA0,b=CPU", "c=CUDA1"], TWO) == [
        TensorRule("a", "CUDA0"),
        TensorRule("b", "CPU"),
        TensorRule("c", "CUDA1"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "exps",
        "=CPU",
        "exps=",
        "exps=CUDA2",
        "exps=cpu",
        "exps=CPU=CPU",
        "(=CPU",
        "blk[=CPU",
        "(?i)exps=CPU",
        "(?<=blk)exps=CPU",
        "(?P<n>exps)=CPU",
        "a++=CPU",
        "x" * 3000 + "=CPU",
        "exps=CPU,",
    ],
)
def test_a_rule_the_engine_would_not_take_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rule|device|construct|parenthesis|unterminated"):
        read_placement_overrides([text], TWO)


def test_the_published_lines_place_four_layers() -> None:
    layout = checked_layout(
        KIMI, FitMachine(2, 96 * GIB), BATCH, read_placement_overrides(PUBLISHED, TWO)
    )
    assert layout.expert_layers == 4
    layer = expert_bytes(KIMI.tensors)[1]
    embedding = next(t.n_bytes for t in KIMI.tensors if t.name == "token_embd.weight")
    assert layout.host_bytes == 56 * layer + embedding


def test_a_layer_with_one_matrix_on_the_host_is_not_counted_as_on_the_cards() -> None:
    rules = read_placement_overrides([r"blk\.1\.ffn_(gate|up)_exps=CUDA0", "exps=CPU"], TWO)
    assert checked_layout(KIMI, FitMachine(2, 96 * GIB), BATCH, rules).expert_layers == 0


@pytest.mark.parametrize("cards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("quant", ["IQ3_K", "Q4_X"])
def test_a_placement_fits_and_another_layer_would_not(cards: int, quant: str) -> None:
    model, machine = kimi(quant), FitMachine(cards, 96 * GIB)
    layout = place(model, machine, BATCH)
    assert shortage(layout, machine) == ""
    layer = max(expert_bytes(model.tensors).values())
    full = [machine.usable_bytes - load.n_bytes < layer for load in layout.loads]
    own = {
        d: sum(home_of(f"blk.{i}.", 61, machine.devices) == d for i in range(1, 61))
        for d in machine.devices
    }
    placed = {r.device: r.pattern.count("|") + 1 for r in layout.rules if r.device != CPU}
    assert all(f or placed.get(d, 0) == own[d] for f, d in zip(full, machine.devices, strict=True))
    assert layout.expert_layers == sum(placed.values())


def test_a_placement_says_the_same_when_its_own_lines_are_checked() -> None:
    machine = FitMachine(2, 96 * GIB)
    layout = place(KIMI, machine, BATCH)
    again = [f"{rule.pattern}={rule.device}" for rule in layout.rules]
    assert (
        checked_layout(KIMI, machine, BATCH, read_placement_overrides(again, machine.devices))
        == layout
    )


def test_the_dense_layer_is_in_no_line() -> None:
    for rule in place(KIMI, FitMachine(2, 96 * GIB), BATCH).rules:
        assert not rule.matches("blk.0.ffn_down.weight")
        assert not re.search(r"\(0\||\|0\||\|0\)", rule.pattern)


def test_the_first_card_takes_the_head_and_the_last_the_tail() -> None:
    first, last, rest = place(KIMI, FitMachine(2, 96 * GIB), BATCH).rules
    assert first.matches("blk.1.ffn_up_exps.weight")
    assert last.matches("blk.60.ffn_up_exps.weight")
    assert (rest.pattern, rest.device) == ("exps", CPU)


def test_cards_that_hold_everything_need_no_line_for_the_host() -> None:
    layout = place(KIMI, FitMachine(8, 96 * GIB), Batch(32768, "bf16"))
    assert layout.expert_layers == 60
    assert all(rule.device != CPU for rule in layout.rules)


def test_a_large_batch_costs_a_layer_of_experts_on_each_card() -> None:
    machine, rules = FitMachine(2, 96 * GIB), read_placement_overrides(["exps=CPU"], TWO)
    assert offload_from(KIMI) == 1536
    below, above = (
        checked_layout(KIMI, machine, Batch(32768, "bf16", n), rules).loads[0].buffer_bytes
        for n in (1535, 1536)
    )
    assert above - below > 0.8 * expert_bytes(KIMI.tensors)[1]


def test_the_host_and_a_card_that_are_short_are_named() -> None:
    rules = read_placement_overrides(["exps=CPU"], TWO)
    poor = FitMachine(2, 96 * GIB, host_bytes=256 * GIB)
    assert "the host is short of 192.80 GiB" in shortage(
        checked_layout(KIMI, poor, BATCH, rules), poor
    )
    greedy = read_placement_overrides(
        [r"blk\.(1|2|3|4|5|6|7|8|9|10|11|12|13)\.=CUDA1", "exps=CPU"], TWO
    )
    machine = FitMachine(2, 96 * GIB)
    assert "CUDA1 is short of" in shortage(checked_layout(KIMI, machine, BATCH, greedy), machine)
    small = FitMachine(1, 16 * GIB)
    assert "CUDA0 is short of" in shortage(place(KIMI, small, BATCH), small)


def test_an_eight_bit_cache_is_a_little_more_than_half() -> None:
    machine, rules = FitMachine(2, 96 * GIB), read_placement_overrides(["exps=CPU"], TWO)
    half, whole = (
        sum(load.kv_bytes for load in checked_layout(KIMI, machine, Batch(65536, kv), rules).loads)
        for kv in ("fp8", "bf16")
    )
    assert half / whole == pytest.approx(34 / 64, abs=1e-3)


def test_a_model_without_experts_needs_no_rules() -> None:
    dense = GgufModel([tensor("token_embd.weight")], 1, 64, 3, 4096, [64], False, 0, 0, 0)
    layout = place(dense, FitMachine(1, 96 * GIB), Batch(4096, "bf16"))
    assert (layout.rules, layout.expert_layers) == ([], 0)
    assert layout.loads[0].kv_bytes == 64 * 2 * 4096

"""Published measurements, and by how much our sums miss them.

published_runs.yaml has those of sglang and vLLM; docs/fit.md shows them beside our numbers. Two
cards and a host with ik_llama.cpp: the article "Running Kimi-K2.6 Locally: Making a 1T MoE
Practical with ik_llama.cpp and Blackwell", here "the article". Q4_X: ubergarm/Kimi-K2.6-GGUF.

| what | theirs | ours | error |
|---|---|---|---|
| K2.5 on disk (public tensor listing) | 554.27 GiB | 554.27 GiB | 0.00 % |
| Q4_X file (its card) | 543.617 GiB | 543.617 GiB | 0.00 % |
| IQ3_K file (the article) | 460 GiB | 459.43 GiB | -0.12 % |
| left after the pools, K2-Thinking | 12.24 GiB | 12.31 GiB | +0.6 % |
| IQ3_K, no experts on cards | about 11 GiB | 10.93 / 11.20 GiB | +0.6 % |
| IQ3_K, the layout kept (2 + 2) | mid to high 30s | 35.46 / 35.73 GiB | inside |
| IQ3_K, 6 layers, as the article labels it | 52 / 60 GiB | 42.92 / 43.20 GiB | -17 / -28 % |
| IQ3_K, 10 layers, as the article labels it | 43 / 44 GiB | 57.69 / 58.29 GiB | +34 / +32 % |
| IQ3_K, 6 layers (3 + 3), lines exchanged | 43 / 44 GiB | 42.92 / 43.20 GiB | -0.2 / -1.8 % |
| IQ3_K, 10 layers (5 + 5), lines exchanged | 52 / 60 GiB | 57.69 / 58.29 GiB | +3.5 % of both |
| IQ3_K, host, 10 layers | 368 GiB | 374.15 GiB | +1.7 % |

The article's table gives 52/60 GiB to its 6 layers and 43/44 to its 10. A layer of these experts is
7.46 GiB, so 10 of them with everything else cannot lie in 87 GiB, and 6 cannot fill 112. With the
two lines exchanged both come out, and so does the host's size; we take them for exchanged.

How much of this is proof: what CUDA and NCCL take is read from the K2.5 log, so its own KV tokens
are no independent test; nor are the two runs of vLLM on eight cards, from which what its group of
cards takes was read. GLM-5.2, Qwen3-235B, gpt-oss and the stock sglang runs are. The scales that
sglang leaves behind were looked for because the NVFP4 sum was 3.7 % short, and its code then showed
them. The article does not name the -ub of its lines: 512, the default, is assumed for the first,
and 4096, as in the command it prints, for the others; at 512 six layers would take 33 GiB. That a
step's moments share their buffer, and that ten layers lie five and five, was chosen with the table
in sight.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import pytest

from pipeline.serving.fit.engine import Engine, FitQuestion, room_of, shown_bytes
from pipeline.serving.fit.facts import fact_of, from_recipe, recipe_of
from pipeline.serving.fit.gguf import GgufModel
from pipeline.serving.fit.parts import tensor_parts
from pipeline.serving.fit.placement import (
    Batch,
    FitMachine,
    Layout,
    checked_layout,
    expert_bytes,
    read_placement_overrides,
    shortage,
)
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.units import GIB
from tests.unit.fit.published import Case, answered, ours, published, table
from tests.unit.support import ROOT

THINKING, K25 = "nvidia/Kimi-K2-Thinking-NVFP4", "moonshotai/Kimi-K2.5"


def model_of(repository: str) -> Architecture:
    fact = fact_of(repository)
    assert fact is not None
    return fact.architecture()


def gguf(quant: str) -> GgufModel:
    known = recipe_of("ubergarm/Kimi-K2.6-GGUF", quant)
    assert known is not None
    return from_recipe(known[0].architecture(), known[1])


def error(ours: float, theirs: float, what: str) -> float:
    """In percent; printed, so that `pytest -rP` shows the table."""
    percent = 100 * (ours - theirs) / theirs
    print(f"{what}: theirs {theirs:,.2f}, ours {ours:,.2f}, {percent:+.2f} %")
    return percent


def asked(engine: Engine = "sglang", **more: Any) -> FitQuestion:
    values = {"engine": engine, "card_bytes": shown_bytes(96 * GIB), "tp": 8, "context": 262144}
    return FitQuestion.model_validate(values | more)


def test_a_checkpoint_is_as_large_as_its_published_list_of_tensors() -> None:
    ours = sum(part.file_bytes() for part in tensor_parts(model_of(K25)))
    assert ours == 595_147_639_776
    assert abs(error(ours / GIB, 554.27, "K2.5 on disk, GiB")) < 0.01


@pytest.mark.parametrize("case", published().cases, ids=lambda case: f"{case.model}, {case.what}")
def test_a_published_run_is_met_as_closely_as_the_table_says(case: Case) -> None:
    percent = error(ours(case), case.published, f"{case.model}, {case.engine}, {case.what}")
    assert abs(percent) <= case.within + 1e-9


def test_there_are_twenty_published_runs_each_with_a_source() -> None:
    cases = published().cases
    assert len(cases) >= 20
    assert len({(case.model, case.engine, case.cards, case.what) for case in cases}) >= 20
    # an owner and a repository, which people can look up
    assert all(re.match(r"[\w.-]+/[\w.-]+", case.source) for case in cases)


@pytest.mark.parametrize("theirs", [478_992, 3_811_968, 232_000, 180_191, 464_768])
def test_a_published_number_of_tokens_lies_near_the_middle_of_the_printed_range(
    theirs: int,
) -> None:
    case = next(case for case in published().cases if case.published == theirs)
    found = answered(case)
    place = (theirs - found.low_tokens) / (found.high_tokens - found.low_tokens)
    assert 0.35 < place < 0.65, place


def test_the_page_shows_the_table_of_published_runs() -> None:
    assert table() in (ROOT / "docs" / "fit.md").read_text(), table()


@pytest.mark.parametrize(
    ("repository", "gib", "fraction", "theirs", "reached"),
    [(THINKING, 73.87, 0.848, 180_191, 1.1), (K25, 72.33, 0.7714564, 4_578, -0.9)],
)
def test_kv_tokens_follow_from_the_logged_weights_and_fraction(
    repository: str, gib: float, fraction: float, theirs: int, reached: float
) -> None:
    measured = round(gib * GIB)
    question = asked(fraction=fraction, measured_bytes=measured)
    room = room_of(model_of(repository), measured, question)
    percent = error(room.kv_tokens, theirs, f"{repository}, KV tokens, measured weights")
    assert percent == pytest.approx(reached, abs=0.1)


def test_what_is_left_after_the_pools_is_what_the_log_says() -> None:
    measured = round(73.87 * GIB)
    room = room_of(model_of(THINKING), measured, asked(fraction=0.848, measured_bytes=measured))
    assert room.requests_bytes == 2048 * (262144 + 4) * 4
    assert abs(error(room.left_bytes / GIB, 12.24, "K2-Thinking, GiB left")) < 0.7


@pytest.mark.parametrize(
    ("quant", "theirs", "bits"), [("Q4_X", 543.617, 4.549), ("IQ3_K", 460, 3.85)]
)
def test_a_gguf_is_as_large_as_its_card_says(quant: str, theirs: float, bits: float) -> None:
    model = gguf(quant)
    assert abs(error(model.n_bytes / GIB, theirs, f"{quant}, GiB")) < 0.15
    weights = sum(math.prod(tensor.shape) for tensor in model.tensors)
    assert model.n_bytes * 8 / weights == pytest.approx(bits, abs=0.006)


def layout(*rules: str, ubatch: int = 4096, mla: Literal[0, 1, 2, 3] = 3) -> Layout:
    machine = FitMachine(2, shown_bytes(96 * GIB))
    batch = Batch(131768, "bf16", ubatch, 8192, mla)
    return checked_layout(
        gguf("IQ3_K"), machine, batch, read_placement_overrides(rules, machine.devices)
    )


def cards(placed: Layout) -> list[float]:
    return [load.n_bytes / GIB for load in placed.loads]


def test_experts_on_the_host_alone_leave_about_eleven_gib_on_each_card() -> None:
    used = cards(layout("exps=CPU", ubatch=512))
    assert abs(error(sum(used) / 2, 11, "no experts on cards, GiB")) < 1


def test_the_article_s_three_mla_modes_take_memory_in_its_order() -> None:
    # "Choosing -mla": 0 "Standard KV", "Highest"; 1 "Compressed latent KV", "Lowest"; 3 "Absorbed
    # MLA", "Highest", at which "even at 132k context, the KV cache stays around 8.9 GiB"
    full, lowest, absorbed = (layout("exps=CPU", ubatch=512, mla=mode).loads for mode in (0, 1, 3))
    kv = [sum(load.kv_bytes for load in loads) / GIB for loads in (full, lowest, absorbed)]
    assert abs(error(kv[2], 8.9, "KV cache with -mla 3, GiB")) < 4
    assert kv[1] == kv[2]  # what -mla 3 has more is its buffer for keys and values
    assert kv[0] / kv[2] == pytest.approx(64 * (192 + 128) / 576)  # 64 heads, beside one latent
    for zero, one, three in zip(full, lowest, absorbed, strict=True):
        assert one.n_bytes < three.n_bytes < zero.n_bytes
        assert one.weights_bytes == three.weights_bytes == zero.weights_bytes
    # the article's 96 GB cards have no room for the first
    assert shortage(layout("exps=CPU", mla=0), FitMachine(2, shown_bytes(96 * GIB)))
    assert not shortage(layout("exps=CPU", mla=1), FitMachine(2, shown_bytes(96 * GIB)))


def test_the_layout_that_the_article_kept_is_in_the_thirties() -> None:
    rules = (r"blk\.(1|2)\.ffn.*=CUDA0", r"blk\.(59|60)\.ffn.*=CUDA1", "exps=CPU")
    placed = layout(*rules)
    assert placed.expert_layers == 4
    assert all(35 < card < 39 for card in cards(placed)), cards(placed)


def test_six_layers_take_what_the_article_prints_beside_ten() -> None:
    rules = (r"blk\.(1|2|3)\.ffn.*=CUDA0", r"blk\.(58|59|60)\.ffn.*=CUDA1", "exps=CPU")
    first, second = cards(layout(*rules))
    assert abs(error(first, 43, "6 layers, CUDA0, GiB")) < 2
    assert abs(error(second, 44, "6 layers, CUDA1, GiB")) < 2
    assert first + second < 0.8 * (52 + 60)  # as the table is labelled, it cannot be


def test_ten_layers_take_what_the_article_prints_beside_six() -> None:
    rules = (r"blk\.(1|2|3|4|5)\.ffn.*=CUDA0", r"blk\.(6|7|8|59|60)\.ffn.*=CUDA1", "exps=CPU")
    placed = layout(*rules)
    assert abs(error(sum(cards(placed)), 52 + 60, "10 layers, both cards, GiB")) < 4
    assert abs(error(placed.host_bytes / GIB, 368, "10 layers, host, GiB")) < 2
    # 43 and 44 GiB have no room for ten layers of experts and the rest of the model
    assert 10 * expert_bytes(gguf("IQ3_K").tensors)[1] / GIB + 11.5 + 8.6 > 43 + 44

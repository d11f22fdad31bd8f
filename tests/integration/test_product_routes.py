"""Do routes hand their operands over as kernels read them? With torch on a CPU, and no engine."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from pipeline.serving.products.model import (
    Bound,
    Card,
    Computed,
    Format,
    Measured,
    Product,
    ProductsResult,
    judge_all,
)

torch = pytest.importorskip("torch", reason="PyTorch is not installed.")

from pipeline.serving.products.compute import ROUTES, Bench  # noqa: E402 -- needs torch to be of use
from tests.integration import product_kernels as kernels  # noqa: E402

FUNCTIONS = {
    "cutlass_scaled_mm": kernels.scaled_mm,
    "w8a8_triton_block_scaled_mm": kernels.block_mm,
    "w8a8_block_fp8_matmul_triton": kernels.block_mm,
    "fp8_scaled_mm": kernels.scaled_mm,
    "fp8_blockwise_scaled_mm": kernels.scaled_mm,
    "bmm_fp8": kernels.bmm_fp8,
    "cutlass_scaled_fp4_mm": kernels.fp4_mm,
    "mm_fp4": kernels.flashinfer_fp4_mm,
    "cutlass_fp4_moe_mm": kernels.fp4_experts,
    "cutlass_fp4_group_mm": kernels.sgl_experts,
    "scaled_fp4_quant": kernels.fp4_quantise,
    "fp4_quantize": kernels.fp4_quantise,
}


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for route in ROUTES:
        name = route.module.split()[0]
        if name != "torch":
            module = ModuleType(name)
            module.__dict__.update(FUNCTIONS)
            monkeypatch.setitem(sys.modules, name, module)
            monkeypatch.setitem(sys.modules, name.split(".")[0], module)


def probe(engine: str, format_: Format, n: int, k: int, experts: int = 0) -> ProductsResult:
    product = Product(
        name="p", n=n, k=k, format=format_, experts=experts, visited=0.2 if experts else 0
    )
    job: dict[str, Any] = {
        "engine": engine,
        "device": "cpu",
        "products": [product.model_dump()],
        "tokens": [1, 70],
        "runs": 2,
        **Bound().model_dump(),
    }
    rows = [Measured.model_validate(each) for each in Bench(torch, job).results()]
    card = Card(name="cpu", capability="none")
    computed = Computed(card=card, measured=rows, is_done=True)
    return judge_all("a-recipe", computed, [product], [], Bound())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("format_", "n", "k", "experts"),
    [
        ("fp8-tensor", 256, 384, 0),
        ("fp8-channel", 256, 256, 0),
        ("fp8-block", 384, 512, 0),
        ("nvfp4", 256, 512, 20),
    ],
)
def test_every_route_of_an_engine_gives_the_exact_product(
    engine: str, format_: Format, n: int, k: int, experts: int
) -> None:
    result = probe(engine, format_, n, k, experts)
    rows = {row.route: row.verdict for row in result.judged}
    # on a CPU some releases of torch know one scale only
    if format_ == "fp8-channel" and rows["torch._scaled_mm"] == "unknown":
        del rows["torch._scaled_mm"]
    assert rows
    assert set(rows.values()) == {"passed"}
    expected = [r for r in ROUTES if format_ in r.formats and engine in r.engines.split()]
    assert {row.route for row in result.judged} == {route.name for route in expected}


def test_shapes_that_are_filled_up_are_right_too() -> None:
    assert probe("vllm", "nvfp4", 200, 144).verdict == "passed"
    assert probe("vllm", "fp8-block", 576, 192).verdict == "passed"


def test_a_quantiser_that_leaves_its_padding_unwritten_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = partial(kernels.fp4_quantise, padding=255)
    monkeypatch.setattr(sys.modules["vllm._custom_ops"], "scaled_fp4_quant", stale)
    rows = {row.route: row for row in probe("vllm", "nvfp4", 256, 144).judged}
    assert rows["vllm quantised"].verdict == "failed"
    assert "NaN" in rows["vllm quantised"].message
    assert rows["vllm cutlass"].verdict == "passed"


def test_a_kernel_that_reads_scales_in_plain_order_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(rows: int, columns: int, width: int) -> Any:
        return torch.arange(rows)[:, None] * width + torch.arange(columns)[None]

    monkeypatch.setattr(kernels, "places", plain)
    assert probe("vllm", "nvfp4", 256, 512).verdict == "failed"


def test_a_grouped_product_that_begins_at_the_wrong_row_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shifted(*words: Any) -> None:
        moved: Any = (*words[:-1], words[-1].roll(1))
        kernels.fp4_experts(*moved)

    monkeypatch.setattr(sys.modules["vllm._custom_ops"], "cutlass_fp4_moe_mm", shifted)
    rows = {row.route: row.verdict for row in probe("vllm", "nvfp4", 256, 512, experts=20).judged}
    assert rows["vllm cutlass experts"] == "failed"


def test_a_kernel_that_raises_is_unknown_and_one_that_is_not_there_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*words: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    ops = sys.modules["vllm._custom_ops"]
    monkeypatch.setattr(ops, "cutlass_scaled_mm", refuse)
    monkeypatch.delattr(
        sys.modules["vllm.model_executor.layers.quantization.utils.fp8_utils"],
        "w8a8_triton_block_scaled_mm",
    )
    result = probe("vllm", "fp8-block", 256, 256)
    assert result.verdict == "unknown"
    assert [row.verdict for row in result.judged] == ["unknown", "missing"]

"""Which recipes read a table, and which table a start may use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.app import serve
from pipeline.artifacts.attest.names import KERNEL_TABLE
from pipeline.artifacts.attest.predicates import KernelTable
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.core.errors import RecordInvalid
from pipeline.core.known import Unknown
from pipeline.images.gate.smem.cases import read_gates
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Launch, Overrides, plan_launch
from pipeline.serving.serve.run import recipe_digest
from pipeline.serving.tune.moe import MoeShape, case_for, find_shape
from pipeline.serving.tune.table import unfit, with_table, write_table
from tests.unit.support import ROOT

RECIPES = Recipes([ROOT / "recipes"])
DIGEST = f"sha256:{'1' * 64}"
SIZES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_stages": 3}
TABLE: dict[str, Any] = {
    "image": "vllm",
    "platform": "linux/amd64",
    "recipe": "some",
    "recipe_digest": DIGEST,
    "engine": "vllm",
    "kernel": "fused_moe_kernel",
    "file": "E=128,N=96,device_name=Some_Card,dtype=fp8_w8a8,block_shape=[128,128].json",
    "element_bytes": 1,
    "card": {
        "name": "NVIDIA RTX PRO 6000",
        "compute_capability": "12.0",
        "driver": "580.95.05",
        "power_limit_w": "600.00",
        "clock_mhz": "2400",
        "most_clock_mhz": "3090",
    },
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "sizes": [
        {
            "tokens": tokens,
            "config": SIZES,
            "default": SIZES,
            "default_us": 20.0,
            "us": 18.0,
            "ratio": [0.89, 0.91],
            "trials": 30,
            "failed": 1,
        }
        for tokens in (16, 1)
    ],
    "tool": {"name": "sm120-pipeline", "version": "0.1.0"},
}
RIGHT = {"recipe_digest": DIGEST, "cards": ["NVIDIA RTX PRO 6000"] * 2, "driver": "580.95.05"}


def model(name: str) -> Architecture:
    known = fact_of(name)
    assert known
    return known.architecture()


def reason(recipe: str, of: str, **flags: Any) -> str:
    read = RECIPES.read(recipe)
    changed = read.model_copy(update={"flags": {**read.flags, "ours": flags}}) if flags else read
    shape = find_shape(changed, model(of))
    return shape.unknown if isinstance(shape, Unknown) else ""


def test_fp8_experts_with_blocks_are_looked_up_by_a_card_s_share_of_them() -> None:
    shape = find_shape(
        RECIPES.read("qwen38-flash-next-fp8-vllm-4x"), model("deepseek-ai/DeepSeek-V3.2")
    )
    assert shape == MoeShape(
        experts=256, active=8, width=512, hidden=7168, dtype="fp8_w8a8", block=128
    )


@pytest.mark.parametrize(
    ("recipe", "of", "why"),
    [
        ("kimi-k25-int4-sglang-8x", "moonshotai/Kimi-K2.5", "int4: their kernels are Marlin's"),
        ("kimi-k2-instruct-sglang-8x", "nvidia/Kimi-K2-Thinking-NVFP4", "nvfp4: their kernels are"),
        ("gpt-oss-120b-vllm-1x", "openai/gpt-oss-120b", "mxfp4: their kernels are"),
        (
            "qwen38-flash-next-nvfp4-vllm-4x",
            "deepseek-ai/DeepSeek-V3.2",
            "the marlin backend of its experts",
        ),
        ("kimi-k26-ik-llama-2x", "moonshotai/Kimi-K2.5", "ik-llama has no such table"),
    ],
)
def test_where_no_table_is_read_the_reason_is_named(recipe: str, of: str, why: str) -> None:
    assert why in reason(recipe, of)


@pytest.mark.parametrize("image", ["vllm", "sglang", "sglang-k2"])
def test_the_gate_s_case_is_asked_for_the_recipe_s_shape(image: str) -> None:
    cases = read_gates(Checkout(ROOT), image).cases()
    shape = MoeShape(experts=7, active=3, width=512, hidden=768, dtype="fp8_w8a8", block=128)
    found = case_for(cases, shape)
    assert found
    look_up = found["arguments"]["config"]["call"]["arguments"]
    assert [each["value"] for each in look_up["w1_shape"]["items"]] == [7, 1024, 768]
    assert [each["value"] for each in look_up["w2_shape"]["items"]] == [7, 768, 512]
    assert look_up["top_k"] == {"value": 3}
    assert case_for(cases, shape.model_copy(update={"block": 64})) is None


def test_a_table_is_used_for_the_recipe_card_and_driver_that_it_was_measured_with() -> None:
    assert unfit(KernelTable.model_validate(TABLE), **RIGHT) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recipe_digest": f"sha256:{'2' * 64}"}, "the recipe changed since"),
        ({"cards": ["NVIDIA RTX PRO 6000", "NVIDIA RTX 5090"]}, "this machine has NVIDIA RTX 5090"),
        ({"driver": "590.1"}, "measured with driver 580.95.05, and this machine has 590.1"),
    ],
)
def test_for_another_one_it_says_why_not(changes: dict[str, Any], why: str) -> None:
    assert why in unfit(KernelTable.model_validate(TABLE), **{**RIGHT, **changes})


@pytest.mark.parametrize(
    "config",
    [
        {**SIZES, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256},  # 2 x (16 + 256) x 256 bytes
        {**SIZES, "num_stages": 12},
        {"BLOCK_SIZE_M": 16},
    ],
)
def test_sizes_that_cannot_fit_the_card_are_not_used(config: dict[str, int]) -> None:
    rows = [TABLE["sizes"][0], {**TABLE["sizes"][1], "config": config}]
    why = unfit(KernelTable.model_validate({**TABLE, "sizes": rows}), **RIGHT)  # type: ignore[arg-type]
    assert why == "its sizes for 1 tokens cannot fit 101376 bytes of shared memory"


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../../etc/passwd.json"},
        {"file": "/etc/x.json"},
        {"file": "table.txt"},
        {"triton": "../3"},
        {"sizes": []},
        {"sizes": [TABLE["sizes"][0]] * 2},
        {"sizes": [{**TABLE["sizes"][0], "tokens": 0}]},
        {"sizes": [{**TABLE["sizes"][0], "us": float("nan")}]},
        {"sizes": [{**TABLE["sizes"][0], "config": {"BLOCK_SIZE_M": -16}}]},
        {"sizes": [{**TABLE["sizes"][0], "config": {"BLOCK_SIZE_M": 1 << 30}}]},
        {"element_bytes": 0},
        {"anything": 1},
    ],
)
def test_a_hostile_table_is_no_table(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KernelTable.model_validate({**TABLE, **changes})


@pytest.mark.parametrize(("engine", "below"), [("vllm", ""), ("sglang", "configs/triton_3_6_0/")])
def test_engines_find_the_table_by_their_own_names(tmp_path: Path, engine: str, below: str) -> None:
    table = KernelTable.model_validate({**TABLE, "engine": engine})
    write_table(table, tmp_path)
    read = json.loads((tmp_path / f"{below}{table.file}").read_text())
    # in the order of tokens, as the engines write theirs
    assert [*read] == ["1", "16"]
    assert read["16"] == SIZES


@pytest.mark.parametrize(
    ("recipe", "variable"),
    [
        ("qwen38-flash-next-fp8-vllm-4x", "VLLM_TUNED_CONFIG_FOLDER"),
        ("kimi-k25-int4-sglang-8x", "SGLANG_MOE_CONFIG_DIR"),
    ],
)
def test_a_launch_with_a_table_mounts_it_read_only(recipe: str, variable: str) -> None:
    launch = plan_launch(RECIPES.read(recipe), Overrides(), weights="/weights")
    changed = with_table(launch, Path("/store/tuned/1"))
    assert changed.environment == {**launch.environment, variable: "/opt/tuned"}
    (mount,) = (each for each in changed.mounts if each not in launch.mounts)
    assert (mount.host, mount.inside) == ("/store/tuned/1", "/opt/tuned")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """A start of the recipe on a machine with two cards, whose store has a table for it."""
    recipe = RECIPES.read("qwen38-flash-next-fp8-vllm-4x")

    def run(*, table: dict[str, Any], variable: str = "", dry_run: bool = False) -> Launch:
        own = {"recipe": recipe.name, "recipe_digest": recipe_digest(recipe)}
        statement = make_statement(
            "vllm", DIGEST, KERNEL_TABLE, {**TABLE, **own, **table}, moment()
        )
        kept = SimpleNamespace(statement=statement, payload=b"the signed bytes")
        place = tmp_path / f"kernel-table-{recipe.name}.dsse.json"
        files = {place: kept}
        monkeypatch.setattr(serve, "read_kept_envelope", files.get)
        monkeypatch.setattr(serve, "statements_folder", lambda store, built: tmp_path)
        cards = [SimpleNamespace(index=n, name=TABLE["card"]["name"]) for n in range(2)]
        facts = SimpleNamespace(gpus=cards, driver=SimpleNamespace(version="580.95.05"))
        context: Any = SimpleNamespace(
            store=SimpleNamespace(root=tmp_path),
            site=SimpleNamespace(look=lambda *_: SimpleNamespace(facts=facts)),
            options=SimpleNamespace(cards=()),
            dry_run=dry_run,
        )
        launch = plan_launch(recipe, Overrides(), weights="/weights")
        if variable:
            launch = launch.model_copy(update={"environment": {variable: "/own"}})
        built: Any = SimpleNamespace()
        return serve._tuned(context, recipe, built, launch)

    return run


def test_a_start_mounts_the_table_that_its_store_has(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    launch = start(table={})
    (folder,) = (Path(m.host) for m in launch.mounts if m.inside == "/opt/tuned")
    assert folder.parent == tmp_path / "tuned"
    assert json.loads((folder / TABLE["file"]).read_text())["1"] == SIZES


def test_a_dry_run_writes_no_table(start: Callable[..., Launch], tmp_path: Path) -> None:
    assert "/opt/tuned" in {mount.inside for mount in start(table={}, dry_run=True).mounts}
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"table": {"recipe_digest": DIGEST}}, "the recipe changed since"),
        ({"table": {"card": {**TABLE["card"], "driver": "1.0"}}}, "measured with driver 1.0"),
        (
            {"table": {}, "variable": "VLLM_TUNED_CONFIG_FOLDER"},
            "the recipe sets VLLM_TUNED_CONFIG_FOLDER itself",
        ),
    ],
)
def test_a_start_says_why_it_leaves_a_table_out(
    start: Callable[..., Launch],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    why: str,
) -> None:
    assert "/opt/tuned" not in {mount.inside for mount in start(**changes).mounts}
    assert why in capsys.readouterr().err


def test_a_start_refuses_what_is_no_table(start: Callable[..., Launch]) -> None:
    with pytest.raises(RecordInvalid):
        start(table={"sizes": []})

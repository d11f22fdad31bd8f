"""Which recipes read a table, and which table a start may use."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.app import serve
from pipeline.artifacts.attest.envelope import SUFFIX, enclose
from pipeline.artifacts.attest.keys import LocalSigner, Signer, make_private_key, write_key
from pipeline.artifacts.attest.names import KERNEL_TABLE
from pipeline.artifacts.attest.predicates import KernelTable
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import RecordInvalid
from pipeline.core.known import Unknown, unknown
from pipeline.evidence.statements.evidence_set import evidence_folder
from pipeline.images.gate.smem.cases import read_gates
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Launch, Overrides, plan_launch
from pipeline.serving.serve.run import recipe_digest
from pipeline.serving.tune.moe import MoeShape, case_for, find_shape
from pipeline.serving.tune.table import unfit, with_table, write_table
from tests.makers import (
    AMD64,
    build_in,
    built_image,
    make_deb,
    make_wheel,
    root_image,
    wheel_image,
)
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
RECIPE = "qwen38-flash-next-fp8-vllm-4x"


def gpu(index: int, **changes: Any) -> Any:
    """A card as the machine's facts have it."""
    facts = {"name": "NVIDIA RTX PRO 6000", "limit_w": 600.0, "sm_max_mhz": 3090, **changes}
    power, clocks = (SimpleNamespace(**{n: facts[n]}) for n in ("limit_w", "sm_max_mhz"))
    return SimpleNamespace(index=index, name=facts["name"], power=power, clocks=clocks)


RIGHT: dict[str, Any] = {
    "started": {
        "image": "vllm",
        "platform": "linux/amd64",
        "recipe": "some",
        "engine": "vllm",
    },
    "recipe_digest": DIGEST,
    "gpus": [gpu(0), gpu(1)],
    "driver": "580.95.05",
}


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
    assert unfit(KernelTable.model_validate(TABLE), **RIGHT) == ""


def test_what_the_driver_did_not_tell_cannot_be_compared() -> None:
    card = {**TABLE["card"], "power_limit_w": None, "most_clock_mhz": None}
    assert unfit(KernelTable.model_validate({**TABLE, "card": card}), **RIGHT) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recipe_digest": f"sha256:{'2' * 64}"}, "the recipe changed since"),
        ({"gpus": [gpu(0), gpu(1, name="NVIDIA RTX 5090")]}, "this machine has NVIDIA RTX 5090"),
        ({"gpus": []}, "this machine has no card that the start could use"),
        ({"gpus": [gpu(0), gpu(1, limit_w=300.0)]}, "limit of 600.00 W, and GPU 1 has 300.00"),
        ({"gpus": [gpu(0, limit_w=unknown("was not told"))]}, "600.00 W, and GPU 0 has was not"),
        ({"gpus": [gpu(0, sm_max_mhz=2100)]}, "highest clock of 3090 MHz, and GPU 0 has 2100"),
        ({"started": {"image": "vllm-b12x"}}, "for the image vllm, and this start is of vllm-b12x"),
        ({"started": {"platform": "linux/arm64"}}, "for the platform linux/amd64"),
        ({"started": {"recipe": "other"}}, "for the recipe some, and this start is of other"),
        ({"started": {"engine": "sglang"}}, "for the engine vllm, and this start is of sglang"),
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
        {**SIZES, "num_warps": 0},
        {**SIZES, "BLOCK_SIZE_K": 0},
        {"BLOCK_SIZE_M": 16},
    ],
)
def test_sizes_that_cannot_fit_the_card_are_not_used(config: dict[str, int]) -> None:
    rows = [TABLE["sizes"][0], {**TABLE["sizes"][1], "config": config}]
    why = unfit(KernelTable.model_validate({**TABLE, "sizes": rows}), **RIGHT)
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


def test_vllm_finds_the_table_by_its_own_name(tmp_path: Path) -> None:
    table, store = KernelTable.model_validate(TABLE), open_store(tmp_path / "store")
    write_table(table, tmp_path / "tuned", store, built_image("vllm", AMD64, DIGEST))
    read = json.loads((tmp_path / "tuned" / table.file).read_text())
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


@dataclass
class Start:
    """A start of the recipe on a machine with two cards, whose store has a table for it."""

    root: Path
    table: dict[str, Any] = field(default_factory=dict)  # what differs from a good one
    signers: Sequence[Signer] = ()
    made_for: str = DIGEST  # the digest whose folder has the statement
    stated: tuple[str, str] = ("vllm", DIGEST)
    gpus: list[Any] = field(default_factory=lambda: [gpu(0), gpu(1)])
    cards: tuple[int, ...] = ()
    host: str = ""
    variable: str = ""
    dry_run: bool = False

    def run(self) -> Launch:
        recipe, store = RECIPES.read(RECIPE), open_store(self.root)
        own = {"recipe": recipe.name, "recipe_digest": recipe_digest(recipe)}
        body = {**TABLE, **own, **self.table}
        statement = make_statement(*self.stated, KERNEL_TABLE, body, moment())
        folder = evidence_folder(store, "vllm", AMD64, self.made_for)
        envelope = enclose(statement, self.signers).dump()
        store.write(folder / f"kernel-table-{RECIPE}{SUFFIX}", envelope)
        facts = SimpleNamespace(gpus=self.gpus, driver=SimpleNamespace(version="580.95.05"))
        look = SimpleNamespace(facts=facts)
        context: Any = SimpleNamespace(
            checkout=Checkout(ROOT),
            store=store,
            site=SimpleNamespace(host=self.host, look=lambda *_: look),
            options=SimpleNamespace(cards=self.cards),
            dry_run=self.dry_run,
        )
        launch = plan_launch(recipe, Overrides(), weights="/weights")
        if self.variable:
            launch = launch.model_copy(update={"environment": {self.variable: "/own"}})
        return serve._tuned(context, recipe, built_image("vllm", AMD64, DIGEST), launch)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path)


def test_a_start_mounts_the_table_that_its_store_has(start: Start) -> None:
    (folder,) = (Path(m.host) for m in start.run().mounts if m.inside == "/opt/tuned")
    assert folder.parent == start.root / "tuned"
    assert json.loads((folder / TABLE["file"]).read_text())["1"] == SIZES


def test_a_dry_run_writes_no_table(start: Start) -> None:
    start.dry_run = True
    assert "/opt/tuned" in {mount.inside for mount in start.run().mounts}
    assert not (start.root / "tuned").exists()


OTHER = f"sha256:{'9' * 64}"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"table": {"recipe_digest": DIGEST}}, "the recipe changed since"),
        ({"table": {"card": {**TABLE["card"], "driver": "1.0"}}}, "measured with driver 1.0"),
        (
            {"variable": "VLLM_TUNED_CONFIG_FOLDER"},
            "the recipe sets VLLM_TUNED_CONFIG_FOLDER itself",
        ),
        ({"stated": ("vllm", OTHER)}, "its statement is about another image"),
        ({"table": {"image": "sglang"}}, "it is for the image sglang, and this start is of vllm"),
        ({"table": {"platform": "linux/arm64"}}, "it is for the platform linux/arm64"),
        ({"table": {"recipe": "other"}}, "it is for the recipe other"),
        ({"table": {"engine": "sglang"}}, "it is for the engine sglang"),
        ({"cards": (7,)}, "has no card that the start could use"),
        ({"gpus": []}, "has no card that the start could use"),
        ({"made_for": OTHER}, f"is not used: made for image {OTHER}"),
        ({"host": "node1"}, "tables of this machine are not used on node1"),
        ({"host": "node1", "made_for": OTHER}, "are not used on node1"),
    ],
)
def test_a_start_says_in_one_line_why_it_leaves_a_table_out(
    start: Start, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], why: str
) -> None:
    vars(start).update(changes)
    assert "/opt/tuned" not in {mount.inside for mount in start.run().mounts}
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_damaged_statement_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start.run()
    (path,) = start.root.rglob(f"kernel-table-{RECIPE}{SUFFIX}")
    data = path.read_bytes()
    write = Store.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "write", lambda store, to, _: write(store, to, data[:-50]))
        launch = start.run()
    assert "/opt/tuned" not in {mount.inside for mount in launch.mounts}
    assert "is not used: it cannot be read" in capsys.readouterr().err


def test_without_a_table_nothing_is_said(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "write", lambda *of: None)
        start.run()
    assert capsys.readouterr().err == ""


def test_where_a_key_is_trusted_a_trusted_one_must_have_signed(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = LocalSigner(make_private_key()), LocalSigner(make_private_key())
    folder = Path(os.environ["HOME"], ".config", "sm120", "keys")
    write_key(folder / "me.pem", own.key)
    for signers, why in (((), "nobody signed it"), ((other,), "only your own keys are trusted")):
        start.signers = signers
        assert "/opt/tuned" not in {mount.inside for mount in start.run().mounts}
        assert why in capsys.readouterr().err
    start.signers = (own,)
    assert "/opt/tuned" in {mount.inside for mount in start.run().mounts}


def test_a_start_refuses_what_is_no_table(start: Start) -> None:
    start.table = {"sizes": []}
    with pytest.raises(RecordInvalid):
        start.run()


def test_sglang_finds_the_tables_of_its_image_beside_ours_and_ours_wins(tmp_path: Path) -> None:
    folder = "sglang/srt/layers/moe/fused_moe_triton"
    parts: Any = {
        "sglang/__init__.py": b"",
        f"{folder}/fused_moe_triton_config.py": b"",
        f"{folder}/configs/triton_3_5_1/E=8.json": b"{}",
        f"{folder}/configs/triton_3_6_0/{TABLE['file']}": b"theirs",
        "sglang/srt/layers/quantization/configs/N=1.json": b"{}",
    }
    mirror = tmp_path / "mirror"
    root = root_image([make_deb(mirror, "base")])
    image = wheel_image("sglang", [make_wheel(mirror, "sglang", parts)])
    _, store, built = build_in(tmp_path, root, image)
    table, before = KernelTable.model_validate({**TABLE, "engine": "sglang"}), os.umask(0o077)
    try:
        write_table(table, tmp_path / "tuned", store, built)
    finally:
        os.umask(before)
    found = [path for path in (tmp_path / "tuned").rglob("*") if path.is_file()]
    names = {str(path.relative_to(tmp_path / "tuned")) for path in found}
    ours = f"configs/triton_3_6_0/{TABLE['file']}"
    assert names == {"configs/triton_3_5_1/E=8.json", ours}
    assert [*json.loads((tmp_path / "tuned" / ours).read_text())] == ["1", "16"]
    # a container's user is not ours
    folders = {path.parent for path in found} | {tmp_path / "tuned", tmp_path / "tuned/configs"}
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in found} == {0o644}

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from pipeline.app import products as products_module
from pipeline.core.known import unknown
from pipeline.serving.products.model import Card, Computed, Measured
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.support import AMD64, Command, Ended, build_tiny

pytestmark = pytest.mark.usefixtures("checkout")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
NAMES = ("attention, qkv", "attention, output", "dense, gate and up", "dense, down")


@pytest.fixture
def served(sm120: Command) -> Command:
    """A checkout with a recipe of a small FP8 model for two cards, and its config.json."""
    body = {
        "name": "small",
        "summary": "a small model",
        "backing": "proved",
        "sources": {"ours": {"kind": "ours", "title": "this project", "why": "a test"}},
        "image": "tiny",
        "engine": "vllm",
        "model": {"repository": "a/small", "name": "small"},
        "hardware": {"cards": 2, "card": "rtx-pro-6000"},
        "flags": {"ours": {"tensor_parallel_size": 2}},
        "port": 18999,
    }
    (sm120.cwd / "recipes").mkdir(exist_ok=True)
    (sm120.cwd / "recipes" / "small.yaml").write_text(yaml.safe_dump(body))
    (sm120.cwd / "config.json").write_text(json.dumps(CONFIG))
    return sm120


def probe(served: Command, *more: str) -> Ended:
    return served(
        "recipe", "products", "small", "--weights", str(served.cwd / "config.json"), *more
    )


def with_a_card(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A card on which every product comes out so."""
    rows = [
        Measured.model_validate(
            {
                **{"product": name, "format": "fp8-block", "route": "vllm cutlass", "tokens": 1},
                **{"outcome": "computed", "runs": 10, "values": 64, "worst": 0.5},
                **(changes if name == NAMES[-1] else {}),
            }
        )
        for name in NAMES
    ]
    computed = Computed(
        card=Card(name="RTX PRO 6000", capability="12.0"), measured=rows, is_done=True
    )
    monkeypatch.setattr(products_module, "require_card", lambda recipe, machine, gpu: None)
    monkeypatch.setattr(products_module, "read_capture", lambda folder: unknown("a test"))
    monkeypatch.setattr(products_module, "find_engine", lambda wanted: FakeEngine())
    monkeypatch.setattr(products_module, "compute", lambda engine, store, order: computed)
    monkeypatch.setattr("pipeline.app.images.pick_platform", lambda spec, chosen: AMD64)


def test_a_dry_run_shows_the_shapes_of_one_card(served: Command) -> None:
    done = probe(served, "--dry-run", "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    assert {p["name"]: (p["n"], p["k"]) for p in shown["products"]} == {
        "attention, qkv": (12 * 128, 1024),
        "attention, output": (1024, 512),
        "dense, gate and up": (4096, 1024),
        "dense, down": (1024, 2048),
    }


def test_without_a_card_it_says_so_and_ends_like_a_failed_preflight(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(served.cwd))
    done = probe(served)
    assert done.code == 91
    assert "no card is known on this machine" in done.err


def test_a_model_that_nobody_described_is_asked_for(served: Command) -> None:
    done = served("recipe", "products", "small", "--dry-run")
    assert done.code == 30
    assert "--weights" in done.err


def test_a_model_without_such_products_is_no_failure(served: Command) -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    (served.cwd / "config.json").write_text(json.dumps(plain))
    done = probe(served)
    assert done.code == 0, done.err
    assert "none of its products is FP4 or FP8" in done.out


def test_sound_products_pass(served: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny(served, "--accept")
    with_a_card(monkeypatch)
    done = probe(served)
    assert done.code == 0, done.err
    assert "small: passed on RTX PRO 6000 (capability 12.0)" in done.out


def test_a_wrong_product_ends_with_the_code_of_a_failed_smoke(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(served, "--accept")
    with_a_card(monkeypatch, nan=1, beyond=1)
    done = probe(served, "--json")
    assert done.code == 92
    assert json.loads(done.out)["verdict"] == "failed"
    assert json.loads(done.err)["error"] == "ProductsWrong"


def test_a_product_without_any_route_is_unknown_and_no_success(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(served, "--accept")
    with_a_card(monkeypatch, outcome="missing", message="no module")
    done = probe(served)
    assert done.code == 92
    assert "dense, down: vllm cutlass: no module" in done.err

from __future__ import annotations

import pytest

from pipeline.images.spec.checkout import Checkout
from pipeline.weights.model import lock_path, read_spec, spec_names
from tests.unit.support import ROOT

CHECKOUT = Checkout(ROOT)
NAMES = spec_names(CHECKOUT)


def test_what_the_seeds_serve_is_asked_for() -> None:
    repositories = {read_spec(CHECKOUT, name).repository for name in NAMES}
    assert repositories >= {
        "moonshotai/Kimi-K2.6",
        "moonshotai/Kimi-K2.5",
        "moonshotai/Kimi-K2-Thinking",
        "nvidia/Kimi-K2-Thinking-NVFP4",
        "lightseekorg/kimi-k2.6-eagle3",
        "ubergarm/Kimi-K2.6-GGUF",
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_spec_can_be_read(name: str) -> None:
    spec = read_spec(CHECKOUT, name)
    assert spec.name == name
    assert spec.wants("config.json") == (spec.format == "safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_answers_its_spec_or_is_not_there(name: str) -> None:
    from pipeline.weights.model import current_weights_lock

    if lock_path(CHECKOUT, name).exists():
        assert current_weights_lock(CHECKOUT, name).name == name


def test_one_quant_of_a_collection_does_not_bring_the_other() -> None:
    first = "IQ3_K/Kimi-K2.6-IQ3_K-00001-of-00012.gguf"
    assert read_spec(CHECKOUT, "kimi-k2.6-iq3-k").wants(first)
    assert not read_spec(CHECKOUT, "kimi-k2.6-q4-x").wants(first)
    assert not read_spec(CHECKOUT, "kimi-k2.6-iq3-k").wants("smol-IQ3_KS/anything.gguf")


def test_remote_code_is_part_of_a_set() -> None:
    assert read_spec(CHECKOUT, "kimi-k2.6").wants("modeling_kimi_k25.py")

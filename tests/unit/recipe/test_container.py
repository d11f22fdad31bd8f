from __future__ import annotations

from typing import Any

import pytest

from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.container import container_arguments, container_name
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import ContainerSpec

DIGEST = "sha256:" + "a" * 64


def launch(**changes: Any) -> Launch:
    values: dict[str, Any] = {
        "recipe": "kimi-8x",
        "engine": "vllm",
        "image": "vllm",
        "digest": DIGEST,
        "program": ["vllm", "serve"],
        "arguments": ["/models", "--port", "8000"],
        "environment": {"NCCL_P2P_LEVEL": "SYS"},
        "mounts": [Mount(host="/data/kimi", inside="/models")],
        "port": 8000,
        "cards": 8,
        "container": ContainerSpec(capabilities=["SYS_NICE"]),
        "model": "kimi",
    }
    return Launch(**{**values, **changes})


def flags(**changes: Any) -> list[str]:
    return container_arguments(launch(**changes), image="sm120/vllm:x").run_flags()


def test_an_engine_with_cards_gets_them_its_memory_and_its_weights_read_only() -> None:
    assert flags()[:10] == [
        "--name=sm120-kimi-8x",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--cap-add=SYS_NICE",
        "--device=nvidia.com/gpu=all",
        "--ipc=host",
        "--ulimit=memlock=-1:-1",
        "--publish=127.0.0.1:8000:8000",
        "--volume=/data/kimi:/models:ro",
        flags()[9],
    ]
    assert flags()[9].startswith("--volume=sm120-kimi-8x-")
    assert "--env=NCCL_P2P_LEVEL=SYS" in flags()


def test_an_engine_without_cards_gets_none_of_what_only_cards_need() -> None:
    words = " ".join(flags(cards=0, engine="llama-cpp"))
    assert not [x for x in ("gpu", "ipc", "memlock", "/home", "shm") if x in words]


def test_private_ipc_comes_with_enough_shared_memory() -> None:
    words = flags(container=ContainerSpec(ipc="private"))
    assert f"--shm-size={32 << 30}" in words
    assert not [x for x in words if x.startswith("--ipc")]


def test_named_cards_are_the_only_ones_it_sees() -> None:
    arguments = container_arguments(launch(cards=2), image="x", cards=[2, 3])
    assert arguments.devices == ["nvidia.com/gpu=2", "nvidia.com/gpu=3"]


def test_compiled_kernels_are_shared_neither_with_another_image_nor_with_another_recipe() -> None:
    names = {
        container_arguments(each, image="x").cache
        for each in (launch(), launch(digest="sha256:" + "b" * 64), launch(recipe="kimi-2x"))
    }
    assert len(names) == 3
    assert container_arguments(launch(port=9), image="x").cache in names


def test_an_engine_that_compiles_nothing_has_no_cache() -> None:
    assert container_arguments(launch(engine="ik-llama"), image="x").cache is None


def test_it_listens_on_this_machine_alone_unless_told_otherwise() -> None:
    anywhere = container_arguments(launch(), image="x", address="0.0.0.0").run_flags()
    assert "--publish=0.0.0.0:8000:8000" in anywhere
    assert "--publish=127.0.0.1:8000:8000" in flags()


def test_the_labels_say_what_it_was_started_from() -> None:
    labels = container_arguments(launch(), image="x", labels={"sm120.attempt": "7"}).labels
    assert labels["sm120.recipe"] == "kimi-8x"
    assert labels["sm120.digest"] == DIGEST
    assert labels["sm120.attempt"] == "7"


def test_a_recipe_without_an_image_has_no_container() -> None:
    with pytest.raises(RecipeInvalid, match="without a container"):
        container_arguments(launch(image=None), image="x")


def test_every_recipe_name_makes_a_container_name() -> None:
    assert container_name("a+b.c-d") == "sm120-a-b-c-d"

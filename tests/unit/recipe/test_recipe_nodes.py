"""Recipes over several nodes: what a recipe may say, each rank's command, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.core.errors import RecipeInvalid
from pipeline.core.model import Engine
from pipeline.core.yaml_file import read_yaml
from pipeline.images.engine.parser_flags import ParserFlags, flags_folder
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.launch import (
    Launch,
    NodePlace,
    Overrides,
    node_places,
    on_node,
    over_nodes,
)
from pipeline.serving.recipe.launch import plan_launch as plan
from pipeline.serving.recipe.parser import check_flags
from pipeline.serving.serve.run import recipe_digest
from tests.unit.recipe.bodies import body, recipe
from tests.unit.support import ROOT

SHIPPED = {
    name: read_yaml(flags_folder(Checkout(ROOT)) / f"{name}.yaml", ParserFlags)
    for name in ("vllm", "sglang", "sglang-k2")
}


def on_two(engine: Engine, rank: int, *extra: str, nodes: int = 2, **flags: Any) -> Launch:
    """The command of a rank, of two machines with eight cards each."""
    given = {"us": {"tensor_parallel_size": 16, **flags, "extra": list(extra)}}
    hardware = {"cards": 8, "card": "rtx-pro-6000"}
    whole = recipe(engine, nodes=nodes, hardware=hardware, flags=given)
    return on_node(
        plan(whole, Overrides(), weights="/w"), NodePlace(rank, "10.0.0.1", f"10.0.0.{1 + rank}")
    )


def test_each_rank_of_vllm_is_told_where_all_meet_and_only_the_first_serves() -> None:
    meeting = ["--nnodes", "2", "--node-rank"]
    first, second = (on_two("vllm", rank, "--api-server-count", "2") for rank in (0, 1))
    where = ["--master-addr", "10.0.0.1", "--master-port", "29501"]
    assert first.arguments[-8:] == [*meeting, "0", *where][-8:]
    assert "--api-server-count" in first.arguments
    assert second.arguments[-9:] == [*meeting, "1", *where, "--headless"][-9:]
    assert "--api-server-count" not in second.arguments
    assert "2" not in second.arguments[: second.arguments.index("--nnodes")]
    assert second.environment["VLLM_HOST_IP"] == "10.0.0.2"
    assert (first.rank, second.rank) == (0, 1)


@pytest.mark.parametrize("written", [["-asc", "2"], ["--api-server-count=2"]])
def test_a_number_of_servers_is_left_out_however_it_is_written(written: list[str]) -> None:
    assert not {*written} & {*on_two("vllm", 1, *written).arguments[:-9]}


def test_each_rank_of_sglang_is_told_where_all_meet() -> None:
    second = on_two("sglang", 1)
    wanted = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:29501"]
    assert second.arguments[-6:] == wanted
    assert second.environment == {"SGLANG_HOST_IP": "10.0.0.2"}


def test_an_address_of_ipv6_has_brackets_before_a_port_alone() -> None:
    place = NodePlace(0, "fd00::1", "fd00::1")
    flags = {"us": {"tensor_parallel_size": 2}}
    launches = [
        on_node(plan(recipe(e, nodes=2, flags=flags), Overrides(), weights="/w"), place)
        for e in ("vllm", "sglang")
    ]
    assert "fd00::1" in launches[0].arguments
    assert "[fd00::1]:29501" in launches[1].arguments


def test_one_node_is_what_a_recipe_is_without_a_word() -> None:
    """An unused field must not change a recipe's digest, by which statements name it."""
    assert recipe_digest(recipe()) == recipe_digest(recipe(nodes=1))
    assert recipe_digest(recipe()) != recipe_digest(recipe(nodes=2))
    assert "nodes" not in recipe().model_dump()


@pytest.mark.parametrize(
    ("engine", "nodes", "message"),
    [
        ("ik-llama", 2, "llama.cpp has no ranks"),
        ("vllm", 0, "greater than or equal to 1"),
        ("sglang", 65, "less than or equal to 64"),
    ],
)
def test_nodes_that_cannot_be_are_refused(engine: str, nodes: int, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(engine, nodes=nodes)


def test_the_cards_of_a_recipe_can_be_on_more_machines() -> None:
    spread = over_nodes(recipe(), 2)
    assert (spread.nodes, spread.hardware.cards) == (2, 1)
    assert over_nodes(spread, 1) == recipe()


@pytest.mark.parametrize(
    ("engine", "nodes", "message"),
    [
        ("vllm", 3, "its 2 cards are not on 3 equal nodes"),
        ("vllm", 4, "its 2 cards are not on 4 equal nodes"),
        ("ik-llama", 2, "ik-llama has no ranks, and runs on one machine"),
    ],
)
def test_machines_that_cannot_share_the_cards_are_refused(
    engine: str, nodes: int, message: str
) -> None:
    with pytest.raises(RecipeInvalid, match=message):
        over_nodes(recipe(engine), nodes)


def test_addresses_are_ranks_in_their_order() -> None:
    places = node_places(recipe(nodes=2), ["10.0.0.7", "fd00::2"])
    assert places == {
        0: NodePlace(0, "10.0.0.7", "10.0.0.7"),
        1: NodePlace(1, "10.0.0.7", "fd00::2"),
    }
    assert node_places(recipe(), []) == {}


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "is for 2 nodes, and 0 are named"),
        (["10.0.0.1"], "is for 2 nodes, and 1 are named"),
        (["10.0.0.1", "10.0.0.1"], "is for 2 nodes, and 1 are named"),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], "is for 2 nodes, and 3 are named"),
        (["10.0.0.1", "rig2"], "'rig2' does not appear to be an IPv4 or IPv6 address"),
    ],
)
def test_addresses_that_are_not_those_of_all_nodes_are_refused(
    hosts: list[str], message: str
) -> None:
    with pytest.raises(RecipeInvalid, match=message):
        node_places(recipe(nodes=2), hosts)


@pytest.mark.parametrize(
    ("flags", "engine", "words"),
    [
        ("vllm", "vllm", []),
        ("vllm", "vllm", ["--distributed-executor-backend", "mp"]),
        ("sglang", "sglang", ["--enable-dp-attention", "--dp-size", "2"]),
        ("sglang-k2", "sglang", ["--enable-dp-attention", "--dp-size", "2"]),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_engines_accept_over_nodes(
    flags: str, engine: Engine, words: list[str], rank: int
) -> None:
    assert check_flags(on_two(engine, rank, *words), SHIPPED[flags]) == []


@pytest.mark.parametrize(
    ("flags", "engine", "words", "message"),
    [
        ("vllm", "vllm", ["-pp", "2"], "32 parts need a GPU each, and the recipe is for 2 nodes"),
        ("vllm", "vllm", ["--data-parallel-size", "2"], "32 parts need a GPU each"),
        ("vllm", "vllm", ["--distributed-executor-backend", "uni"], "'uni' takes no --nnodes"),
        ("vllm", "vllm", ["--data-parallel-backend", "ray"], "'ray' takes no --nnodes: only mp"),
        ("vllm", "vllm", ["--nnodes", "4"], "is given twice"),
        ("vllm", "vllm", ["--headless"], "--headless: cannot stand beside --api-server-count"),
        ("sglang", "sglang", ["--dp-size", "2"], "it needs --enable-dp-attention"),
        ("sglang-k2", "sglang", ["--dp-size", "2"], "it needs --enable-dp-attention"),
    ],
)
def test_what_the_engines_refuse_over_nodes(
    flags: str, engine: Engine, words: list[str], message: str
) -> None:
    more = ["--api-server-count", "2"] if "--headless" in words else []
    found = [str(each) for each in check_flags(on_two(engine, 0, *words, *more), SHIPPED[flags])]
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(("tensor", "nodes"), [(16, 3), (2, 4)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_parts_that_nodes_cannot_share_evenly_are_refused(
    engine: Engine, tensor: int, nodes: int
) -> None:
    launch = on_two(engine, 0, nodes=nodes, tensor_parallel_size=tensor)
    found = [str(each) for each in check_flags(launch, SHIPPED[engine])]
    assert found == [f"--nnodes: {tensor} parts cannot be shared evenly by {nodes} nodes"]


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        ("sglang", ["--speculative-algorithm", "EAGLE"], ""),
        ("sglang-k2", ["--speculative-algorithm", "EAGLE"], "beside EAGLE speculation"),
        ("sglang", ["--speculative-algorithm", "EAGLE3"], "beside EAGLE3 speculation"),
        ("sglang", ["--enable-mixed-chunk"], "beside --enable-mixed-chunk"),
        ("sglang-k2", ["--enable-mixed-chunk"], "beside --enable-mixed-chunk"),
    ],
)
def test_what_sglang_has_not_beside_a_pipeline(flags: str, words: list[str], message: str) -> None:
    launch = on_two("sglang", 0, "--pp-size", "2", *words, tensor_parallel_size=8)
    found = [str(each) for each in check_flags(launch, SHIPPED[flags])]
    assert found == ([f"--pp-size: cannot stand {message}"] if message else [])


def test_a_recipe_says_its_nodes_beside_the_cards_of_each() -> None:
    whole = recipe(nodes=2)
    assert whole.model_dump(mode="json", exclude_defaults=True)["nodes"] == 2
    assert plan(whole, Overrides(), weights="/w").nodes == 2
    assert body(nodes=2)["hardware"]["cards"] == 2

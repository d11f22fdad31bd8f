from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store
from pipeline.core.errors import AlreadyServed, PreflightFailed, StartFailed
from pipeline.core.files import locked
from pipeline.core.known import unknown
from pipeline.serving.products import compute as program
from pipeline.serving.products.model import Product
from pipeline.serving.products.run import (
    RUNS,
    Order,
    compute,
    program_arguments,
    read_results,
    require_card,
)
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.serve.preflight import Machine
from tests.unit.docker_sdk import Asked, docker_on
from tests.unit.serve.fake_engine import BUILT, RECORD, FakeEngine
from tests.unit.serve.recipes import two_cards

DOWN = Product(name="down", n=256, k=512, format="nvfp4")
CARD = {"card": {"name": "RTX PRO 6000", "capability": "12.0", "versions": {"torch": "2.13.0"}}}
SOUND = {
    "measured": {
        **{"product": "down", "format": "nvfp4", "route": "vllm cutlass", "tokens": 1},
        **{"outcome": "computed", "runs": 10, "values": 256, "worst": 0.5, "rows": None},
    }
}
DONE = {"done": CARD["card"]}


def said(*results: dict[str, Any]) -> list[str]:
    return [program.MARK + json.dumps(each) for each in results]


def order(folder: Path, timeout_s: float = 60) -> Order:
    launch = plan_launch(two_cards(), Overrides(), weights="")
    return Order(launch, RECORD, [DOWN], [1, 16], 1, timeout_s, folder / "products.log")


def ended(*lines: str) -> FakeEngine:
    return FakeEngine(log=["\n".join([*lines, ""]).encode()], ends_with=0)


def test_the_programs_lines_are_found_among_others(tmp_path: Path) -> None:
    engine = ended("WARNING: a package says something", *said(CARD, SOUND, DONE))
    computed = compute(engine, Store(tmp_path / "store"), order(tmp_path))
    assert computed.is_done
    assert computed.card.capability == "12.0"
    assert [each.route for each in computed.measured] == ["vllm cutlass"]
    assert engine.known == {}, "the container is removed"


def test_what_was_computed_before_a_crash_counts_and_the_end_is_known(tmp_path: Path) -> None:
    engine = ended(*said(CARD, SOUND), "Segmentation fault")
    computed = compute(engine, Store(tmp_path / "store"), order(tmp_path))
    assert not computed.is_done
    assert len(computed.measured) == 1


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["ModuleNotFoundError: No module named 'torch'"],
        said(CARD),
        said(CARD, {"measured": {**SOUND["measured"], "outcome": "fine"}}),
        [program.MARK + "{"],
    ],
)
def test_a_program_without_a_result_is_a_failed_start(tmp_path: Path, lines: list[str]) -> None:
    engine = ended(*lines)
    with pytest.raises(StartFailed):
        compute(engine, Store(tmp_path / "store"), order(tmp_path))
    assert engine.known == {}, "the container is removed"


def test_a_container_that_sees_no_card_is_no_result() -> None:
    with pytest.raises(PreflightFailed, match="sees no card: no driver"):
        read_results(said({"card": {"no_card": "no driver"}}))


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    engine = FakeEngine(log=[])
    with pytest.raises(StartFailed, match="not done within"):
        compute(engine, Store(tmp_path / "store"), order(tmp_path, timeout_s=0))
    assert engine.known == {}


def test_the_program_takes_the_place_of_the_engine_on_one_card(tmp_path: Path) -> None:
    arguments = program_arguments(order(tmp_path), BUILT.id)
    assert arguments.entrypoint == "/opt/venv/bin/python"
    option, text, job = arguments.arguments
    assert option == "-c"
    compile(text, "compute.py", "exec")
    # Linux takes no longer argument (MAX_ARG_STRLEN)
    assert len(text.encode()) < 128 << 10
    assert json.loads(job) == {
        "engine": "vllm",
        "products": [DOWN.model_dump()],
        "tokens": [1, 16],
        "runs": RUNS,
        "of_result": 2.0**-8,
        "of_magnitudes": 2.0**-11,
    }
    assert arguments.devices == ["nvidia.com/gpu=1"]
    assert (arguments.mounts, arguments.labels, arguments.port) == ([], {}, None)


def test_docker_and_podman_get_the_entrypoint_and_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = program_arguments(order(tmp_path), BUILT.id)
    flags = arguments.run_flags()
    assert "--entrypoint=/opt/venv/bin/python" in flags
    assert not [flag for flag in flags if flag.startswith("--publish")]
    asked = Asked()
    docker_on(asked, monkeypatch).create(arguments)
    assert asked.wanted["entrypoint"] == "/opt/venv/bin/python"
    assert asked.wanted["ports"] == {}


def test_a_machine_without_a_card_is_told_so() -> None:
    why = unknown("nvidia-smi is not installed")
    with pytest.raises(PreflightFailed, match="nvidia-smi is not installed"):
        require_card(two_cards(), Machine(why, why, why, why), 0)


def test_what_a_killed_run_left_is_removed_and_nothing_of_others(tmp_path: Path) -> None:
    store, engine = Store(tmp_path / "store"), ended(*said(CARD, SOUND, DONE))
    name = program_arguments(order(tmp_path), BUILT.id).name
    left = program_arguments(order(tmp_path), BUILT.id)
    engine.create(left.model_copy(update={"labels": {"sm120.products": str(store.root)}}))
    assert compute(engine, store, order(tmp_path)).is_done
    assert engine.known == {}
    engine.create(left.model_copy(update={"labels": {"sm120.products": "/home/other"}}))
    with pytest.raises(AlreadyServed, match=f"{name}: a container of this name is not of this"):
        compute(engine, store, order(tmp_path))
    assert len(engine.known) == 1
    engine.known.clear()
    with (
        locked(store.root / "locks" / name),
        pytest.raises(AlreadyServed, match="another run computes products"),
    ):
        compute(engine, store, order(tmp_path))

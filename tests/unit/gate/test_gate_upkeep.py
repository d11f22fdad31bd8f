"""What gates leave in the store, and what of it no lock leads to any more."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pipeline.assemble.plan import plan_image
from pipeline.gate.numerics.cases import read_numeric_cases
from pipeline.gate.smem.cases import read_gates
from pipeline.gate.smem.coverage import kernels_key
from pipeline.gate.smem.engine import EngineTree, engine_key
from pipeline.gate.smem.environment import Environment, EnvironmentFacts
from pipeline.gate.smem.limits import CARDS
from pipeline.gate.smem.run import GateTarget
from pipeline.gate.upkeep import gate_leftovers, gate_sections, remove, size_of
from pipeline.lock.model import WheelPin
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, open_store
from tests import makers
from tests.testbed.deb_file import Item
from tests.unit.support import Command

CASE = {
    **{"name": "one", "stands_for": ["a model"], "function": ["engine.ops:run"]},
    **{"arguments": {"o": {"tensor": {"shape": [4]}}}, "kernels": ["_kernel"]},
}
NUMERICS = {"smem-one": {"one": {"reference": "decode-attention", "outputs": ["o"]}}}
SMEM = {"engine": "engine", "why": "because a test wants to see it", "cases": [CASE]}


class Place:
    """A checkout with one engine, and a store in which its gate has run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: Store = open_store(root / "store")
        wheel = makers.make_wheel(root / "mirror", "engine", {"engine/ops.py": b"x = 1\n"})
        deb = makers.make_deb(root / "mirror", "tool", Item("./usr/bin/tool", b"#!/bin/sh\n"))
        image = makers.wheel_image("engine", [wheel])
        image.files["gates/engine.yaml"] = json.dumps({"package": "engine"})
        image.files["gates/smem-one.yaml"] = json.dumps(SMEM)
        image.files["gates/numerics.yaml"] = json.dumps(NUMERICS)
        self.checkout: Checkout = makers.make_checkout(root, makers.root_image([deb]), image)
        self.plan = plan_image(self.checkout, "engine", makers.AMD64)
        (self.pin,) = self.plan.lock.wheels

    def put(self, name: str, data: bytes = b"{}") -> Path:
        path = self.store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def environment(self, name: str, pin: WheelPin, kind: str = "image") -> Environment:
        facts = EnvironmentFacts.model_validate(
            {
                **{"kind": kind, "platform": makers.AMD64, "python": "3.11"},
                **{
                    "triton": "3.5.1",
                    "torch": "2.9.1",
                    "cuda": "12.8",
                    "wheels": [pin.model_dump()],
                },
                "stubs": [],
            }
        )
        path = self.put(f"gate/environments/{name}/facts.json", facts.model_dump_json().encode())
        return Environment(path.parent, facts, ())

    def left(self) -> list[str]:
        result = gate_leftovers(self.store, self.checkout)
        return [str(path.relative_to(self.store.root)) for path in result]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def other(pin: WheelPin) -> WheelPin:
    return pin.model_copy(update={"version": "0.9", "sha256": "e" * 64})


def test_an_empty_store_has_no_leftovers(place: Place) -> None:
    assert place.left() == []


def test_environments_of_the_locked_wheels_stay_and_others_go(place: Place) -> None:
    place.environment("mine", place.pin)
    place.environment("older", other(place.pin))
    place.environment("forged", place.pin.model_copy(update={"sha256": "f" * 64}))
    place.put("gate/environments/half/site/torch.py")
    assert place.left() == [f"gate/environments/{x}" for x in ("forged", "half", "older")]


def test_wheels_of_the_same_versions_for_this_machine_stay(place: Place) -> None:
    here = place.pin.model_copy(update={"sha256": "f" * 64})
    place.environment("host", here, kind="host wheels")
    place.environment("older", other(here), kind="host wheels")
    assert place.left() == ["gate/environments/older"]


def test_the_locked_engine_its_answers_and_notes_stay(place: Place) -> None:
    environment = place.environment("mine", place.pin)
    folder = f"gate/engines/{engine_key(place.pin)}"
    place.put(f"{folder}/engine/ops.py")
    tree = EngineTree(place.store.root / folder, "engine", "1.0", f"sha256:{place.pin.sha256}")
    gates = read_gates(place.checkout, "engine")
    cases = [*gates.cases(), *read_numeric_cases(place.checkout, "engine", gates)]
    assert len(cases) == 2
    for arch in ("sm_120", "sm_90"):
        target = GateTarget(place.store, environment, tree, gates.setup, CARDS[arch])
        for case in cases:
            place.put(f"gate/answers/{target.key(case).removeprefix('sha256:')}.json")
    place.put(f"gate/kernels-of/{kernels_key(tree.digest)}.json")
    assert place.left() == []
    gone = [
        place.put(f"gate/engines/{engine_key(other(place.pin))}/engine/ops.py").parents[1],
        place.put(f"gate/answers/{'0' * 64}.json"),
        place.put(f"gate/kernels-of/{'0' * 64}.json"),
    ]
    assert place.left() == [str(path.relative_to(place.store.root)) for path in gone]


def test_kernels_go_only_when_they_are_old(place: Place) -> None:
    place.put("gate/kernels/new")
    old = place.put("gate/kernels/old")
    os.utime(old, (0, time.time() - 100 * 24 * 3600))
    assert place.left() == ["gate/kernels/old"]


def test_notes_on_objects_stay_while_a_built_image_holds_the_object(place: Place) -> None:
    (built,) = makers.build(place.checkout, place.store, place.root / "mirror", "engine")
    rows = [r for layer in built.layers for r in place.store.contents(layer.record)]
    place.put(f"gates/arch/{rows[-1].sha256}.json")
    place.put(f"gates/arch/{'0' * 64}.json")
    assert place.left() == [f"gates/arch/{'0' * 64}.json"]


def test_the_command_says_first_and_removes_when_told(sm120: Command, place: Place) -> None:
    old = place.environment("older", other(place.pin)).folder
    mine = place.environment("mine", place.pin).folder
    trim = ("--store", place.store.root, "store", "trim")
    assert "1 leftovers of gates" in sm120(*trim).out
    assert old.is_dir()
    assert sm120(*trim, "--yes").code == 0
    assert not old.exists()
    assert mine.is_dir()


def test_outside_a_checkout_nothing_of_the_gates_is_touched(
    sm120: Command, place: Place, tmp_path: Path
) -> None:
    old = place.environment("older", other(place.pin)).folder
    sm120.cwd = tmp_path.parent
    ended = sm120("--store", place.store.root, "store", "trim", "--yes")
    assert ended.code == 0
    assert "not a checkout" in ended.err
    assert old.is_dir()


def test_a_file_that_two_trees_share_is_counted_once(place: Place) -> None:
    first = place.put("gate/engines/a/x.py", b"12345")
    second = place.store.root / "gate/engines/b/x.py"
    second.parent.mkdir()
    os.link(first, second)
    shelf = {s.name: s for s in gate_sections(place.store)}["gate engines"]
    assert (shelf.files, shelf.size_bytes) == (1, 5)
    assert size_of(second.parent) == 0  # removing one of them frees nothing
    assert remove([second.parent]) == 0
    assert first.exists()

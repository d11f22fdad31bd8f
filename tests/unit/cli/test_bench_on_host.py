"""`sm120 bench RECIPE --on HOST`: numbers are bound to what the host says of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.files import sha256_of_file
from pipeline.core.known import Known, unknown
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.source import Capture
from pipeline.serving.bench.record import read_run
from pipeline.serving.serve.run import attempts_of
from pipeline.serving.serve.site import Site
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.hosts.machines import changed, h200
from tests.unit.support import Command, Ended

pytestmark = pytest.mark.usefixtures("checkout")
_SMALL = ("--concurrency", "1", "--requests", "2", "--input-tokens", "20", "--output-tokens", "5")
_FAST = ("--repeats", "1", "--no-self-test", "--allow-loops", "--no-speculation")
OTHER = {"/proc/sys/kernel/osrelease": "6.1.0-other\n"}


@dataclass
class Rig(Site):
    """Another host, whose ports are those of this machine."""

    found: Known[Capture] = field(default_factory=h200)

    @property
    def host(self) -> str:
        return "rig1"

    def captured(self) -> Known[Capture]:
        return self.found


class Measured(LiveRecipe):
    """The recipe, served and measured on the rig."""

    rig: Rig
    out: Path

    def bench(self, *more: str) -> Ended:
        words = ("brainy", "--on", "rig1", "--output", str(self.out), *_SMALL, *_FAST)
        return self.sm120("bench", *words, *more)

    @property
    def facts(self) -> Path:
        return self.out / "host-rig1.json"


@pytest.fixture
def world(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Measured]:
    with live_recipe(sm120, monkeypatch, tmp_path, Measured) as world:
        world.rig, world.out = Rig(), tmp_path / "results"

        @contextmanager
        def machine(*given: Any) -> Iterator[Any]:
            yield world.rig, [world.engine]

        assert world.serve().code == 0
        monkeypatch.setattr("pipeline.app.bench.machine_of_all", machine)
        yield world


def test_the_host_is_asked_for_its_facts_and_the_numbers_are_bound_to_them(
    world: Measured,
) -> None:
    done = world.bench()
    assert done.code == 0, done.err
    inputs = read_run(world.out / "quick").inputs
    assert inputs.host_name == "rig1"
    assert inputs.host == sha256_of_file(world.facts)
    assert json.loads(world.facts.read_text())["host"] == "rig1"
    assert world.facts.with_name("host-rig1.json.dsse.json").is_file()
    # nothing moved, so that the same command finds its own run
    assert world.bench().code == 0
    assert read_run(world.out / "quick").inputs == inputs


def test_numbers_of_a_deployed_engine_are_bound_to_its_image(world: Measured) -> None:
    # a unit of `host deploy` has no attempt here
    attempts_of(open_store(world.store)).path.unlink()
    assert world.bench().code == 0
    inputs = read_run(world.out / "quick").inputs
    assert (inputs.image, inputs.weights, inputs.recipe) == (world.digest, None, None)


def test_numbers_of_an_image_that_the_store_has_not_are_bound_to_none(world: Measured) -> None:
    store = open_store(world.store)
    attempts_of(store).path.unlink()
    for path in store.image_paths():
        path.unlink()
    assert world.bench().code == 0
    assert read_run(world.out / "quick").inputs.image is None


def test_a_report_shows_the_host_without_being_told_where_its_facts_are(world: Measured) -> None:
    assert world.bench().code == 0
    page = world.out / "report.html"
    done = world.sm120("report", str(world.out), "--output", str(page))
    assert done.code == 0, done.err
    text = page.read_text()
    assert '"name":"Host","value":"rig1"' in text
    assert '"name":"NVIDIA driver"' in text
    hidden = world.sm120("report", str(world.out), "--redact", "--output", str(page))
    assert hidden.code == 0
    assert "rig1" not in page.read_text()


def test_a_run_does_not_go_on_where_the_host_has_changed(world: Measured) -> None:
    assert world.bench().code == 0
    world.rig.found = changed(h200(), files=OTHER)
    done = world.bench()
    assert done.error == "RunInvalid"
    assert "holds a run with another host" in done.err


def test_facts_that_the_host_has_are_taken(world: Measured, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    given.write_text(gather_facts(h200(), "another-name").model_dump_json())
    assert world.bench("--host-facts", str(given)).code == 0
    assert read_run(world.out / "quick").inputs.host == sha256_of_file(given)
    assert not world.facts.exists()


@pytest.mark.parametrize(
    ("files", "field"),
    [
        (OTHER, "kernel.release"),
        ({"/proc/cmdline": "quiet iommu=pt\n"}, "kernel.command_line"),
    ],
)
def test_facts_that_the_host_does_not_have_are_refused(
    world: Measured, tmp_path: Path, files: dict[str, str], field: str
) -> None:
    given = tmp_path / "given.json"
    given.write_text(gather_facts(changed(h200(), files=files), "rig1").model_dump_json())
    done = world.bench("--host-facts", str(given))
    assert done.error == "HostDrifted"
    assert f"is not what rig1 is now: {field}" in done.err
    assert not (world.out / "quick").exists()


def test_a_host_that_tells_nothing_is_said_and_bound_to_nothing(world: Measured) -> None:
    world.rig.found = unknown("python3 is not installed")
    done = world.bench()
    assert done.code == 0
    assert "No facts of rig1 are bound to the numbers: python3 is not installed" in done.err
    assert read_run(world.out / "quick").inputs.host is None

from __future__ import annotations

from pathlib import Path

from pipeline.serving.bench.record import read_run, write_run
from pipeline.serving.report.from_host import with_host
from pipeline.serving.report.model import CardMemory
from tests.unit.bench.example_run import FOLDER
from tests.unit.hosts.machines import facts
from tests.unit.report.reports import as_data, sweep
from tests.unit.support import Command


def test_a_run_shows_the_machine_of_its_server() -> None:
    run = with_host(as_data(sweep(1)), facts())
    hardware = {fact.name: fact.value for fact in run.hardware}
    assert hardware["CPU"]
    assert hardware["GPUs"][0].isdigit()
    assert "x86_64" in hardware["Client's machine"]
    assert "NVIDIA driver" in {fact.name for fact in run.software}


def test_what_could_not_be_found_out_is_said_with_its_reason() -> None:
    run = with_host(as_data(sweep(1)), facts())
    unknown = [fact.value for fact in run.hardware if fact.value.startswith("unknown")]
    assert all(len(value) > len("unknown: ") for value in unknown)


def test_cards_get_their_whole_memory_and_only_those_that_are_there() -> None:
    cards = [
        CardMemory(name="GPU 0", unit="GiB", used=90),
        CardMemory(name="GPU 99", unit="GiB", used=1),
    ]
    run = as_data(sweep(1)).model_copy(update={"memory": cards})
    first, other = with_host(run, facts()).memory
    assert first.total
    assert first.total > 90
    assert other.total is None


def test_facts_are_read_from_their_file(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(facts().model_dump_json())
    assert sm120("report", FOLDER, "--host-facts", "facts.json", "--output", "r.md").code == 0
    assert "NVIDIA driver" in (tmp_path / "r.md").read_text()


def test_a_file_that_holds_no_facts_is_an_error(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text("{}")
    assert sm120("report", FOLDER, "--host-facts", "facts.json").error == "FactsUnreadable"


def test_facts_of_another_host_than_the_run_names_are_not_shown(
    sm120: Command, tmp_path: Path
) -> None:
    run = read_run(FOLDER)
    named = run.inputs.model_copy(update={"host": f"sha256:{'1' * 64}"})
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "other", run.model_copy(update={"inputs": named}))
    (tmp_path / "facts.json").write_text(facts().model_dump_json())
    told = sm120("report", "other", "--host-facts", "facts.json", "--output", "r.md")
    assert "other facts" in told.err
    assert "NVIDIA driver" not in (tmp_path / "r.md").read_text()


def test_the_log_of_one_start_does_not_stand_for_two_runs(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    assert sm120("report", FOLDER, FOLDER, "--log", "log").code == 2

"""`sm120 report`, as a user types it."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.model import sha256_of
from pipeline.serving.report.check import open_report
from pipeline.serving.serve.attempts import AttemptList, Begun, Ended, new_id
from tests.unit.bench.example_run import FOLDER
from tests.unit.hosts.machines import blackwell, facts
from tests.unit.support import Command


def test_a_run_becomes_a_page_that_holds_its_data(sm120: Command, tmp_path: Path) -> None:
    sm120("report", FOLDER)
    page = open_report((tmp_path / "report.html").read_bytes())
    assert page.data.runs[0].file == "bench/example/bench.json"
    assert page.problem() == ""


def test_the_ending_of_a_file_says_its_format(sm120: Command, tmp_path: Path) -> None:
    ended = sm120(
        "report", FOLDER, "--output", "a.md", "--output", "b.csv", "--output", "c.html", "--json"
    )
    assert ended.code == 0
    assert json.loads(ended.out)["files"] == ["a.md", "b.csv", "c.html"]
    assert (tmp_path / "a.md").read_text().startswith("# Benchmark of example-model")
    assert (tmp_path / "b.csv").read_text().startswith("source,kind,")


def test_published_tables_need_no_run(sm120: Command, tmp_path: Path) -> None:
    assert sm120("report", "--reference", "kimi-k2-sm120", "--output", "k.md").code == 0
    assert "5,816" in (tmp_path / "k.md").read_text()


def test_published_tables_are_listed(sm120: Command) -> None:
    assert "kimi-k2-sm120" in sm120("report", "--list-references").out


def test_tables_of_another_workload_are_drawn_only_where_they_are_named(
    sm120: Command, tmp_path: Path
) -> None:
    sm120("report", FOLDER)
    assert open_report((tmp_path / "report.html").read_bytes()).data.references == []
    sm120("report", FOLDER, "--reference", "all")
    assert len(open_report((tmp_path / "report.html").read_bytes()).data.references) == 3


def test_the_engine_s_log_tells_how_memory_was_split(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Model loading took 70.14 GiB memory and 61.2 seconds\n")
    sm120("report", FOLDER, "--log", "log")
    (memory,) = open_report((tmp_path / "report.html").read_bytes()).data.runs[0].memory
    assert memory.weights == 70.14


def test_of_a_log_only_the_one_that_was_named_is_missed_a_line(
    sm120: Command, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(FOLDER, tmp_path / "run"))
    text = (run / "bench.json").read_text()
    (run / "bench.json").write_text(text.replace('"recipe_name":null', '"recipe_name":"tiny-cpu"'))
    served(open_store().root, "2026-11-01T08:00:00Z", "no")
    assert "how memory was split" not in sm120("report", run).err
    (tmp_path / "log").write_text("nothing of interest\n")
    assert "log: no line tells how memory was split" in sm120("report", run, "--log", "log").err


def test_a_redacted_report_has_no_name_of_this_machine(
    sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "example-model")
    sm120("report", FOLDER, "--redact")
    assert b"example-model" not in (tmp_path / "report.html").read_bytes()


def test_nothing_to_show_is_a_usage_error(sm120: Command) -> None:
    assert sm120("report").code == 2


def test_an_unknown_format_is_a_usage_error(sm120: Command) -> None:
    ended = sm120("report", FOLDER, "--output", "report.docx")
    assert ended.code == 2
    assert "must end with .html, .pdf, .md or .csv" in ended.err


def test_a_folder_that_is_no_run_is_named(sm120: Command, tmp_path: Path) -> None:
    ended = sm120("report", tmp_path)
    assert (ended.code, ended.error) == (10, "RunInvalid")
    assert not (tmp_path / "report.html").exists()


def test_tables_that_do_not_ship_are_an_error(sm120: Command) -> None:
    assert sm120("report", "--reference", "kimi-k3").error == "UnknownReference"


def test_a_pdf_without_a_browser_is_an_error_that_says_what_to_do(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    ended = sm120("report", FOLDER, "--output", "r.pdf")
    assert (ended.code, ended.error) == (42, "MissingTool")


def evidence(path: Path) -> dict[str, tuple[str, str]]:
    (run,) = open_report(path.read_bytes()).data.runs
    return {link.name: (link.state, link.message) for link in run.evidence}


def test_what_stands_behind_a_run_is_checked(sm120: Command, tmp_path: Path) -> None:
    sm120("report", FOLDER)
    found = evidence(tmp_path / "report.html")
    assert found["image"] == ("incomplete", "the run does not say which image served")
    assert found["numbers"][0] == "valid"
    assert found["raw requests"][0] == "named"


def test_a_run_whose_number_was_changed_says_so_in_its_report(
    sm120: Command, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(FOLDER, tmp_path / "run"))
    text = (run / "bench.json").read_text()
    changed = re.sub(r'("output_tok_s":)\d+', r"\g<1>9", text, count=1)
    (run / "bench.json").write_text(changed)
    shown = sm120("report", run, "--output", "report.html", "--output", "public.md")
    assert evidence(tmp_path / "report.html")["numbers"][0] == "changed"
    # not only at the end of the page: on the terminal, and among its warnings
    assert f"{run}: numbers: changed: /cells/0/" in shown.err
    page = open_report((tmp_path / "report.html").read_bytes())
    assert page.data.findings[0].text.startswith("numbers: changed; the evidence says why")
    assert page.problem() == ""
    warnings = (tmp_path / "public.md").read_text().partition("## Warnings")[2]
    assert "numbers: changed" in warnings.partition("\n## ")[0]


def served(store: Path, at: str, weights: str) -> None:
    """A start of the recipe, with a log that tells how much memory its weights took."""
    attempts = AttemptList(store / "attempts")
    name = new_id(datetime.fromisoformat(at))
    begun = Begun(
        id=name, kind="serve", recipe="tiny-cpu", recipe_digest="sha256:" + "1" * 64, at=at
    )
    attempts.add(begun)
    attempts.add(Ended(id=name, outcome="serving", seconds=2.5, at=at))
    attempts.log_path(name).write_text(f"Model loading took {weights} GiB memory\n")


def test_memory_is_read_from_the_log_of_the_start_that_was_measured(
    sm120: Command, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(FOLDER, tmp_path / "run"))
    text = (run / "bench.json").read_text()
    assert '"recipe_name":null' in text
    (run / "bench.json").write_text(text.replace('"recipe_name":null', '"recipe_name":"tiny-cpu"'))
    store = open_store().root
    served(store, "2026-11-01T08:00:00Z", "60.5")
    served(store, "2026-11-02T07:00:00Z", "70.14")
    served(store, "2026-11-03T08:00:00Z", "80.5")  # after the run
    sm120("report", run)
    data = open_report((tmp_path / "report.html").read_bytes()).data
    assert [memory.weights for memory in data.runs[0].memory] == [70.14]
    assert [row.outcome for row in data.attempts] == ["serving"] * 3


def test_facts_that_a_run_names_are_found_where_the_command_is_typed(
    sm120: Command, tmp_path: Path
) -> None:
    facts_file = tmp_path / "facts.json"
    facts_file.write_text(facts(blackwell(2), name="n1").model_dump_json())
    run = Path(shutil.copytree(FOLDER, tmp_path / "deep" / "er" / "run"))
    text = (run / "bench.json").read_text()
    (run / "bench.json").write_text(
        text.replace('"host":null', f'"host":"{sha256_of(facts_file.read_bytes())}"')
    )
    sm120("report", run)
    (shown,) = open_report((tmp_path / "report.html").read_bytes()).data.runs
    assert ("Host", "n1") in [(fact.name, fact.value) for fact in shown.hardware]
    state, message = evidence(tmp_path / "report.html")["host facts"]
    assert (state, "no evidence" in message) == ("incomplete", True)

"""The mutation run on a small project of its own: real copies, real pytest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutants import sample
from tests.mutants.__main__ import arguments, killed_in, run
from tests.mutants.accepted import read_accepted
from tests.mutants.changes import mutants_of
from tests.mutants.report import PackageReport, tell
from tests.mutants.trials import CannotTest, read_map
from tests.unit.support import ROOT

# about the tool that measures tests, not about the product
pytestmark = pytest.mark.big

BIGGER = """
def bigger(a, b):
    return a > b
"""
TOY = f"""{BIGGER}
from functools import cache


def unused(a):
    return a + 1


@cache
def remembered(a):
    return a.upper()


class Shared:
    def __init__(self, size):
        self.size = size * 2
"""
TESTS = """
import pytest
from pipeline.toy import Shared, bigger, remembered

@pytest.fixture(scope="module")
def shared():
    return Shared(2)

def test_first_user_asserts_little(shared):
    assert shared

def test_second_user_looks_at_it(shared):
    assert shared.size == 4

def test_first_asks_and_does_not_look():
    assert remembered("a") != 1

def test_second_asks_and_looks():
    assert remembered("a") == "A"

def test_bigger():
    assert bigger(2, 1)
    assert not bigger(1, 2)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with one module, its tests and the plugin."""
    root = tmp_path / "project"
    files = {
        "pipeline/__init__.py": "",
        "pipeline/toy.py": TOY,
        "tests/unit/test_toy.py": TESTS,
        "tests/mutants/__init__.py": "",
        "tests/mutants/entered.py": (ROOT / "tests/mutants/entered.py").read_text(),
        "pytest.ini": "[pytest]\npythonpath = .\n",
        ".gitignore": ".nox/\n__pycache__/\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture
def small(project: Path) -> Path:
    """The same with three mutants and one test."""
    (project / "pipeline/toy.py").write_text(BIGGER)
    _, test = TESTS.split("def test_bigger")
    text = f"from pipeline.toy import bigger\n\ndef test_bigger{test}"
    (project / "tests/unit/test_toy.py").write_text(text)
    return project


def tried(root: Path, *options: str) -> PackageReport:
    (report,) = run(root, arguments(["toy", "--sample", "100", *options]))
    return report


def test_mutants_meet_the_tests_that_enter_their_function(project: Path) -> None:
    before = {p: p.read_bytes() for p in project.rglob("*") if p.is_file()}
    report = tried(project, "--jobs", "2")
    outcomes = {(t.mutant.function, t.mutant.after): t for t in report.trials}
    assert outcomes["bigger", "return a <= b"].outcome == "killed"
    assert outcomes["bigger", "return a <= b"].killed_by.endswith("::test_bigger")
    assert outcomes["bigger", "return a >= b"].outcome == "survived"
    assert outcomes["bigger", "return a >= b"].tests == 1
    assert outcomes["unused", "return a - 1"].outcome == "not entered"
    # entered while the first user's fixture was made, and noticed by the second user
    assert outcomes["Shared.__init__", "self.size = size * 3"].killed_by.endswith("looks_at_it")
    # remembered since the first one asked, and noticed by the second
    assert outcomes["remembered", "return"].killed_by.endswith("asks_and_looks")
    assert {t.outcome for t in report.trials} == {"killed", "survived", "not entered"}
    after = {p: p.read_bytes() for p in project.rglob("*") if p.is_file()}
    assert {p: d for p, d in after.items() if ".nox" not in p.parts} == before
    table = tell([report])
    assert "survived: pipeline/toy.py:3 bigger (comparison, 1 tests)\n  - return a > b" in table
    assert json.loads(json.dumps(report.dump()))["outcomes"]["killed"] == report.count("killed")


def test_a_mutant_that_never_ends_is_stopped_and_counts_as_found(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutants.trials.EnteredMap.limit_s", lambda *_: 3)
    (project / "pipeline/toy.py").write_text("def waits(n):\n    while n:\n        n -= 1\n")
    (project / "tests/unit/test_toy.py").write_text(
        "from pipeline.toy import waits\ndef test_waits():\n    waits(2)\n"
    )
    report = tried(project)
    (endless,) = [
        t for t in report.trials if t.mutant.before == "n -= 1" and t.mutant.after == "pass"
    ]
    assert endless.outcome == "timed out"
    assert report.count("timed out") / len(report.trials) <= report.percent / 100


def test_accepted_mutants_are_not_tried_and_stale_entries_are_told(small: Path) -> None:
    entry = '[[accepted]]\nfile = "pipeline/toy.py"\nfunction = "bigger"\nreason = "why"\n'
    (small / "tests/mutants/accepted.toml").write_text(
        f'{entry}before = "return a > b"\nafter = "return a >= b"\n'
        f'{entry}before = "return a > c"\nafter = "return a >= c"\n'
    )
    report = tried(small)
    (accepted,) = [t.mutant.after for t in report.trials if t.outcome == "accepted"]
    assert accepted == "return a >= b"
    assert [entry.before for entry in report.stale] == ["return a > c"]
    assert "accepted.toml is stale: pipeline/toy.py bigger: return a > c" in tell([report])
    unaccepted = [t for t in report.trials if t.outcome != "accepted"]
    assert report.percent == pytest.approx(100 * report.count("killed") / len(unaccepted))


def test_only_those_that_an_earlier_run_killed_are_not_tried_again(
    small: Path, tmp_path: Path
) -> None:
    first = tried(small)
    (tmp_path / "first.json").write_text(json.dumps([first.dump()]))
    with (small / "tests/unit/test_toy.py").open("a") as tests:
        tests.write("\ndef test_equal():\n    assert not bigger(1, 1)\n")
    again = tried(small, "--again", str(tmp_path / "first.json"))
    assert len(again.trials) == len(first.trials)
    assert [t.mutant.after for t in again.trials if t.tests] == ["return a >= b"]
    assert again.percent == 100


def test_a_test_that_fails_unchanged_judges_nothing(small: Path) -> None:
    with (small / "tests/unit/test_toy.py").open("a") as tests:
        tests.write("\ndef test_wrong():\n    assert bigger(1, 1)\n")
    report = tried(small)
    assert "survived" in {t.outcome for t in report.trials if t.mutant.after == "return a >= b"}


def test_tests_that_do_not_run_at_all_are_an_error(small: Path) -> None:
    (small / "tests/unit/test_toy.py").write_text("import nowhere\n")
    with pytest.raises(CannotTest, match="do not run unchanged"):
        tried(small)


def test_a_package_that_is_not_there_is_an_error(small: Path) -> None:
    with pytest.raises(CannotTest, match="no package or module named nowhere"):
        run(small, arguments(["nowhere"]))
    with pytest.raises(CannotTest, match="nothing to change in pipeline/other"):
        run(small, arguments(["toy", "--file", str(ROOT / "pipeline/other.py")]))


@pytest.mark.parametrize("package", ["../tests/unit", "/etc", "..", "toy.py/x", "../../project"])
def test_a_package_outside_the_pipeline_is_an_error(small: Path, package: str) -> None:
    with pytest.raises(CannotTest, match="no package or module"):
        sample.files_of(small, package)


@pytest.mark.parametrize("text", ["", "[]x", "[1]", '[{"mutants": [{"outcome": "killed"}]}]'])
def test_what_is_no_output_of_a_run_cannot_be_tried_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(CannotTest, match=r"before\.json: is no output of --json"):
        killed_in(path)


@pytest.mark.parametrize("text", ["[[accepted]", '[[accepted]]\nfile = "x"', "accepted = [1]"])
def test_a_list_of_accepted_mutants_that_cannot_be_read_is_an_error(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "accepted.toml").write_text(text)
    with pytest.raises(CannotTest, match=r"accepted\.toml"):
        read_accepted(tmp_path / "accepted.toml")


def test_the_sample_is_fixed_by_its_seed_and_barely_moves_with_the_code() -> None:
    source = (ROOT / "pipeline/core/files.py").read_text(encoding="utf-8")
    mutants = mutants_of("files.py", source)
    one, same = sample.choose(mutants, 40, 1), sample.choose(mutants, 40, 1)
    assert one == same
    assert {m.name for m in one} != {m.name for m in sample.choose(mutants, 40, 2)}
    changed = mutants_of("files.py", f"{source}\n\ndef more(a: int) -> int:\n    return a + 1\n")
    kept = {m.name for m in one} & {m.name for m in sample.choose(changed, 40, 1)}
    assert len(kept) >= 38


def test_a_package_has_files_and_tests() -> None:
    assert "pipeline/artifacts/store/store.py" in sample.files_of(ROOT, "artifacts/store")
    assert sample.files_of(ROOT, "core/log") == ["pipeline/core/log.py"]
    assert sample.tests_of(ROOT, "artifacts/store")[0] == "tests/unit/store"
    assert sample.tests_of(ROOT, "core/log")[0] == "tests/unit/test_log.py"
    assert sample.tests_of(ROOT, "weights/nowhere") == ["tests/unit/weights"]
    # tests that import a package are its tests too, wherever they lie
    assert "tests/unit/smoke/test_wire.py" in sample.tests_of(ROOT, "core/net")


def test_a_test_that_was_skipped_or_failed_is_not_used() -> None:
    lines = [
        ["test t.py::a", "uses", []],
        ["test t.py::a", "enters", ["x.py", "f"]],
        ["test t.py::a", "skipped", 0.1],
        ["test t.py::b", "uses", ["shared"]],
        ["test t.py::b", "failed", 0.1],
        ["test t.py::b", "passed", 0.1],
        ["test t.py::c", "uses", ["shared"]],
        ["test t.py::c", "passed", 0.1],
        ["fixture shared", "enters", ["x.py", "g"]],
        ["file t.py", "enters", ["x.py", "h"]],
        ["file other.py", "enters", ["x.py", "i"]],
    ]
    entered = read_map("\n".join(map(json.dumps, lines)))
    assert entered.tests == {("x.py", "g"): ["t.py::c"], ("x.py", "h"): ["t.py::c"]}
    assert entered.unsound == ["t.py::b"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.mutants", "core/log", "--sample", "50"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("mutants-*/0/tmp")) and time.monotonic() < deadline:
            time.sleep(0.1)
        child.send_signal(sent)
        _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"stopped; nothing was left behind" in said
    assert list(tmp_path.iterdir()) == []

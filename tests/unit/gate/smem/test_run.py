"""Workers that die, hang or talk nonsense, and answers that are kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core import log
from pipeline.images.assemble.plan import GATE_WORKER, program_digest
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.smem import run
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.smem.environment import Environment, EnvironmentFacts
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import WorkerAnswer, judge_case
from tests.unit.gate.smem.test_results import case as make_case

FACTS = EnvironmentFacts(
    kind="image",
    platform="linux/amd64",
    python="3.11",
    triton="3",
    torch="2",
    cuda="13.0",
    wheels=[],
    stubs=[],
)
HEAD = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
out = open(sys.argv[2], "a")
def say(value):
    out.write(json.dumps(value) + "\\n"); out.flush()
def begin(case):
    say({"begins": case["name"]})
def answer(case):
    say({"case": case["name"], "ended": "called",
         "records": [{"kernel": "_fwd", "module": "engine.ops", "shared_bytes": 1000}]})
"""
HONEST = HEAD + "for case in job['cases']:\n    begin(case); answer(case)\n"


@dataclass(frozen=True)
class ThisPython(Environment):
    @property
    def readable(self) -> list[Path]:
        real = Path(sys.executable).resolve().parent.parent
        return [Path(sys.prefix), Path(sys.base_prefix), real]

    def command(self, *args: str) -> list[str]:
        return [sys.executable, *args]

    def variables(self) -> dict[str, str]:
        return {}


@pytest.fixture
def target(tmp_path: Path) -> run.GateTarget:
    store = open_store(tmp_path / "store")
    tree = EngineTree(tmp_path, "engine", "1", f"sha256:{'0' * 64}")
    environment = ThisPython(tmp_path / "environment", FACTS, ())
    return run.GateTarget(
        store, environment, tree, EngineSetup(package="engine"), card_for("sm_120")
    )


def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "worker"
    folder.mkdir(exist_ok=True)
    (folder / "__main__.py").write_text(text)
    monkeypatch.setattr(run, "GATE_WORKER", folder)
    program_digest.cache_clear()


def cases(*names: str, timeout_s: int = 30) -> list[KernelCase]:
    return [make_case(name=name, timeout_s=timeout_s) for name in names]


def is_kept(target: run.GateTarget, case: KernelCase) -> bool:
    """Whether the store answers a case, without asking a worker."""
    died = [WorkerAnswer(case=case.name, ended="died")]
    with mock.patch.object(run, "ask_workers", lambda _, asked: died[: len(asked)]):
        ((_, _, kept),) = run.answered(target, [case])
    return kept


def verdicts(target: run.GateTarget, asked: list[KernelCase]) -> dict[str, str]:
    result = run.ask_workers(target, asked)
    by_name = {c.name: c for c in asked}
    return {
        a.case: judge_case(by_name[a.case], a, target.card, [], cached=False).verdict
        for a in result
    }


def test_every_case_is_answered_once(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, HONEST)
    asked = cases(*"abcdefg")
    assert verdicts(target, asked) == {c.name: "passed" for c in asked}


def test_a_worker_that_dies_costs_the_case_it_was_at_and_no_other(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dies = "    if case['name'] == 'b': os.kill(os.getpid(), 9)\n"
    text = HEAD + "for case in job['cases']:\n    begin(case)\n" + dies + "    answer(case)\n"
    worker(monkeypatch, tmp_path, text)
    result = verdicts(target, cases("a", "b", "c", "d"))
    assert result == {"a": "passed", "b": "unknown", "c": "passed", "d": "passed"}


def test_every_case_is_counted_once_also_one_that_costs_its_worker(
    target: run.GateTarget,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dies = "    if case['name'] == 'b': os.kill(os.getpid(), 9)\n"
    text = HEAD + "for case in job['cases']:\n    begin(case)\n" + dies + "    answer(case)\n"
    worker(monkeypatch, tmp_path, text)
    monkeypatch.setattr(log, "QUIET_LINE_EVERY_S", 0.0)
    run.ask_workers(target, cases("a", "b", "c", "d"))
    assert "  4 of 4 cases\n" in capsys.readouterr().err


def test_what_was_judged_before_is_said_at_once(
    target: run.GateTarget,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker(monkeypatch, tmp_path, HONEST)
    run.answered(target, cases("a", "b"))
    assert "judged before" not in capsys.readouterr().err
    run.answered(target, cases("a", "b", "c"))
    assert "  2 of 3 cases judged before, from the store\n" in capsys.readouterr().err


def test_a_case_that_hangs_is_stopped_and_unknown(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "    if case['name'] == 'b': time.sleep(600)\n"
    text = HEAD + "for case in job['cases']:\n    begin(case)\n" + hangs + "    answer(case)\n"
    worker(monkeypatch, tmp_path, text)
    result = verdicts(target, cases("a", "b", "c", timeout_s=1))
    assert result == {"a": "passed", "b": "unknown", "c": "passed"}


def test_a_worker_that_cannot_start_makes_everything_unknown_with_its_last_line(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, "raise ImportError('no torch here')\n")
    result = run.ask_workers(target, cases("a", "b", "c"))
    assert [a.ended for a in result] == ["died"] * 3
    assert "no torch here" in result[0].message


def test_a_worker_that_ends_quietly_in_the_middle_has_not_passed(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, HEAD + "begin(job['cases'][0]); sys.exit(0)\n")
    assert set(verdicts(target, cases("a", "b")).values()) == {"unknown"}


def test_a_worker_that_stops_between_cases_is_followed_by_another(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, HEAD + "case = job['cases'][0]\nbegin(case); answer(case)\n")
    asked = cases(*"abcde")
    assert verdicts(target, asked) == {c.name: "passed" for c in asked}


def test_a_half_written_line_is_not_an_answer(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    half = 'out.write(\'{"case": "a", "ended": "called"\'); out.flush(); os._exit(1)\n'
    worker(monkeypatch, tmp_path, HEAD + "begin(job['cases'][0])\n" + half)
    assert verdicts(target, cases("a")) == {"a": "unknown"}


@pytest.mark.parametrize(
    "line",
    [
        '{"case": "a"}',
        '{"case": "a", "ended": "passed"}',
        '{"case": "a", "ended": "called", "more": 1}',
        '{"case": "another", "ended": "called"}',
        '{"case": "a", "ended": "called", "records": [{"shared_bytes": "few"}]}',
        '["a"]',
        "[" * 100_000,
    ],
)
def test_what_is_no_answer_to_the_question_makes_the_case_unknown(
    line: str, target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = f"begin(job['cases'][0])\nout.write({line!r} + '\\n'); out.flush()\n"
    worker(monkeypatch, tmp_path, HEAD + text)
    assert verdicts(target, cases("a", "b")) == {"a": "unknown", "b": "unknown"}


def test_a_worker_that_never_stops_talking_is_stopped(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run.WorkerTarget, "most_bytes", 1 << 16)
    talks = "begin(job['cases'][0])\nwhile True: out.write('{}\\n' * 1000); time.sleep(0.01)\n"
    worker(monkeypatch, tmp_path, HEAD + talks)
    assert verdicts(target, cases("a")) == {"a": "unknown"}


def test_an_answer_is_kept_and_asked_for_once(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, HONEST)
    (asked,) = cases("a")
    assert not is_kept(target, asked)
    run.ask_workers(target, [asked])
    assert is_kept(target, asked)
    ((_, kept, _),) = run.answered(target, [asked])
    assert kept.records[0].shared_bytes == 1000


def test_a_case_that_was_stopped_is_asked_again_next_time(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, HEAD + "begin(job['cases'][0]); os._exit(9)\n")
    (asked,) = cases("a")
    run.ask_workers(target, [asked])
    assert not is_kept(target, asked)


def test_a_failed_import_is_not_kept_and_says_what_to_add(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = '{"case": case["name"], "ended": "not imported", "message": "No module named \'zmq\'"}'
    worker(monkeypatch, tmp_path, f"{HEAD}case = job['cases'][0]; begin(case); say({said})\n")
    (asked,) = cases("a")
    (answer,) = run.ask_workers(target, [asked])
    judged = judge_case(asked, answer, target.card, [], cached=False)
    assert judged.verdict == "unknown"
    assert judged.message.startswith("No module named 'zmq'; name its wheel in `wheels`")
    assert not is_kept(target, asked)


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"case": "a"}', b"null", b'{"case": "b"}', b"\xff"]
)
def test_a_damaged_answer_is_as_good_as_none(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: bytes
) -> None:
    worker(monkeypatch, tmp_path, HONEST)
    (asked,) = cases("a")
    run.ask_workers(target, [asked])
    (path,) = target.folder("answers").iterdir()
    path.write_bytes(damage)
    assert not is_kept(target, asked)


@pytest.mark.parametrize("what", ["engine", "card", "worker", "case", "absent"])
def test_whatever_decides_an_answer_is_part_of_its_key(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    from dataclasses import replace

    worker(monkeypatch, tmp_path, HONEST)
    (asked,) = cases("a")
    before = target.key(asked)
    if what == "engine":
        target = replace(target, tree=replace(target.tree, digest=f"sha256:{'1' * 64}"))
    elif what == "card":
        target = replace(target, card=card_for("sm_90"))
    elif what == "worker":
        worker(monkeypatch, tmp_path, HONEST + "\n")
    elif what == "absent":
        target = replace(target, environment=replace(target.environment, absent=("zmq",)))
    else:
        asked = asked.model_copy(update={"arguments": {"q": {"value": 1}}})
    assert target.key(asked) != before


def test_the_workers_digest_covers_every_file_of_it(tmp_path: Path) -> None:
    shutil.copytree(GATE_WORKER, tmp_path / "worker")
    seen = {program_digest(tmp_path / "worker")}
    for file in (files := sorted((tmp_path / "worker").rglob("*.py"))):
        file.write_text(file.read_text() + "# changed\n")
        program_digest.cache_clear()
        seen.add(program_digest(tmp_path / "worker"))
    program_digest.cache_clear()
    assert len(seen) == 1 + len(files) > 5


def test_the_worker_can_be_started_as_a_folder_and_leaves_no_names_on_the_import_path(
    tmp_path: Path,
) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        f"import sys, runpy\nmodule = runpy.run_path({str(GATE_WORKER)!r}, run_name='other')\n"
        "module['load']()\nimport gate_worker.recorder\n"
        "assert not any(p.endswith('worker') for p in sys.path), sys.path\n"
        "try:\n    import recorder\nexcept ModuleNotFoundError:\n    print('alone')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "alone\n", done.stderr


@pytest.mark.parametrize("numerics", [None, {"reference": "decode-attention", "outputs": ["o"]}])
def test_only_a_case_with_numerics_is_interpreted(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, numerics: Any
) -> None:
    report = (
        "say({'case': 'a', 'ended': 'called', 'message': os.environ.get('TRITON_INTERPRET', 'no')"
    )
    worker(
        monkeypatch,
        tmp_path,
        HEAD + f"begin(job['cases'][0])\n{report} + str(job['interpret'])}})\n",
    )
    spec = numerics and {**numerics, "rounds_to": "float32", "seed": 1}
    (answer,) = run.ask_workers(target, [make_case(name="a", timeout_s=30, numerics=spec)])
    assert answer.message == ("1True" if numerics else "noFalse")


def test_numbers_and_fit_of_one_case_are_kept_apart(target: run.GateTarget) -> None:
    spec = {"reference": "decode-attention", "outputs": ["o"], "rounds_to": "float32", "seed": 1}
    plain, numeric, other = (
        make_case(name="a", numerics=n) for n in (None, spec, {**spec, "seed": 2})
    )
    assert len({target.key(c) for c in (plain, numeric, other)}) == 3


def test_what_engine_code_says_does_not_steer_a_terminal(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = '"\\x1b]0;title\\x07\\x9b2J\\u202egood\\n"'
    output = f'say({{"case": job["cases"][0]["name"], "ended": "stopped", "message": {message}}})'
    worker(monkeypatch, tmp_path, f"{HEAD}\nbegin(job['cases'][0])\n{output}\n")
    (answer,) = run.ask_workers(target, cases("a"))
    assert answer.message.replace("\n", "").isprintable()
    assert "good" in answer.message
    worker(monkeypatch, tmp_path, f"{HEAD}\nprint({message}, flush=True)\nos._exit(3)\n")
    (answer,) = run.ask_workers(target, cases("b"))
    assert answer.ended == "died"
    assert answer.message.isprintable()
    assert "good" in answer.message


@pytest.mark.parametrize("line", ['"{}\\n"', '"[" + "[]," * 9 + "[]]\\n"', '"0" * 9'])
def test_a_worker_that_talks_without_end_fills_no_memory(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    monkeypatch.setattr(run.WorkerTarget, "most_bytes", 4 << 20)
    worker(monkeypatch, tmp_path, f"{HEAD}\nout.write(({line}) * 999999)\nout.flush()\n")
    tracemalloc.start()
    (answer,) = run.ask_workers(target, cases("a"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.ended == "died"
    assert peak < 24 << 20


GONE = """
for case in job["cases"]:
    begin(case)
    say({"case": case["name"], "ended": "function gone", "message": "engine.ops:decode"})
"""


def gone(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **files: str
) -> str:
    """What is said of a case whose function an engine of these files does not have."""
    for name, text in files.items():
        path = tmp_path / "engine" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    worker(monkeypatch, tmp_path, HEAD + GONE)
    ((case, answer, _),) = run.answered(target, cases("a"))
    result = judge_case(case, answer, target.card, [], cached=False)
    assert (result.verdict, result.gone) == ("unknown", True)
    return result.message


def test_a_function_that_is_gone_is_named_with_its_case_the_version_and_how_to_look_for_it(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = gone(target, monkeypatch, tmp_path)
    assert message.startswith("engine 1 has no engine.ops:decode, which case a calls")
    assert "search that version's source for `def decode`" in message
    assert "correct `function` in gates/smem-decode.yaml" in message


def test_a_function_that_moved_is_named_with_where_the_engine_defines_it_now(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = "from .new import decode\n# def decode\n"
    files = {
        "new": "if True:\n    def decode(x): ...\n",
        "other": other,
        "near": "def decoder(): ...",
    }
    assert "(now in engine.new)" in gone(target, monkeypatch, tmp_path, **files)

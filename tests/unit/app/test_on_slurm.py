"""Chunks over a stand-in for `srun`: what counts as an answer, and what is asked again."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.app import on_slurm
from pipeline.app.on_slurm import SlurmNodes, SlurmOrder
from pipeline.core.errors import SlurmUnavailable, SpecInvalid
from pipeline.images.gate.smem import run
from pipeline.images.gate.smem.results import WorkerAnswer
from tests.unit.gate.smem.test_run import HONEST, cases, target, worker

assert target  # a fixture

# The stand-in: it has the answers of an honest node, and what each test makes of them.
SRUN = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path({here!r})
known = json.loads((here / "known.json").read_text())
name = next(word for word in sys.argv if word.startswith("--job-name="))[11:]
tries = len([x for x in (here / "calls").read_text().splitlines() if name in x]) + 1
with open(here / "calls", "a") as file:
    file.write(json.dumps([name, sys.argv[1:], sorted(os.environ)]) + "\\n")
keys = sys.stdin.read().split()
def say(value):
    print(json.dumps(value), flush=True)
def begin(**changed):
    say({{"node": "node1"}})
    say({{"about": {{**known["about"], **changed}}}})
def answer(key, **changed):
    say({{"key": key, "answer": {{**known["answers"][key], **changed}}}})
def honest():
    begin()
    for key in keys:
        answer(key)
"""
SCANCEL = '#!/bin/sh\necho "$@" >> {here}/cancelled\n'


@dataclass
class FakeSlurm:
    """A cluster of one program."""

    folder: Path
    target: run.GateTarget

    def behave(self, text: str) -> None:
        program = self.folder / "srun"
        head = SRUN.format(python=sys.executable, here=str(self.folder))
        program.write_text(head + text, encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def ask(self, *names: str, **changed: Any) -> dict[str, WorkerAnswer]:
        """Puts cases to it, as a gate does."""
        asked = cases(*names)
        answers = {
            self.target.key(case): {"case": case.name, "ended": "called", "seconds": 1.5}
            for case in asked
        }
        known = {"about": self.target.digests, "answers": answers}
        (self.folder / "known.json").write_text(json.dumps(known), encoding="utf-8")
        (self.folder / "calls").touch()
        order = SlurmOrder(**{"chunk": 2, **changed})
        nodes = SlurmNodes(order, ["gate", "answer", "engine", "--only", "smem"], self.folder)
        mine = replace(self.target, ask=nodes.ask)
        return {case.name: answer for case, answer, _ in run.kept_or_asked(mine, asked)}

    def kept(self) -> set[str]:
        """The names of the cases whose answers lie in the store."""
        files = (self.target.store.root / "gate" / "answers").glob("*.json")
        return {json.loads(path.read_text(encoding="utf-8"))["case"] for path in files}

    @property
    def calls(self) -> list[list[Any]]:
        text = (self.folder / "calls").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def slurm(target: run.GateTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    worker(monkeypatch, tmp_path, HONEST)
    folder = tmp_path / "cluster"
    folder.mkdir()
    scancel = folder / "scancel"
    scancel.write_text(SCANCEL.format(here=folder), encoding="utf-8")
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return FakeSlurm(folder, target)


def test_chunks_are_asked_once_and_kept_and_a_second_run_submits_nothing(slurm: FakeSlurm) -> None:
    slurm.behave("honest()")
    answers = slurm.ask(*"abcde")
    assert {answer.ended for answer in answers.values()} == {"called"}
    assert (len(slurm.calls), slurm.kept()) == (3, set("abcde"))
    assert slurm.ask(*"abcde") == answers
    assert len(slurm.calls) == 3
    # one more case is one more question
    assert slurm.ask(*"abcdef")["f"].ended == "called"
    assert len(slurm.calls) == 4


def test_an_answer_is_kept_as_the_local_run_keeps_it(slurm: FakeSlurm) -> None:
    slurm.behave("honest()")
    answer = slurm.ask("a")["a"]
    path = slurm.target.answer_path(cases("a")[0])
    assert path.read_bytes() == answer.model_dump_json().encode()


def test_a_job_gets_nothing_of_the_callers_environment_and_no_secret_in_its_arguments(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    # set by an outer job that was submitted with --export=NONE
    monkeypatch.setenv("SLURM_EXPORT_ENV", "ALL")
    monkeypatch.setenv("SLURM_ACCOUNT", "rack")
    slurm.behave("honest()")
    slurm.ask("a", partition="gpu", time_limit_s=61.0, command=("/opt/sm120", "--store", "/x"))
    ((_, words, names),) = slurm.calls
    assert "--export=NONE" in words
    assert {"--partition=gpu", "--time=2", "--ntasks=1"} <= {*words}
    assert not any("hf_secret" in word for word in words)
    assert not {"HF_TOKEN", "SLURM_EXPORT_ENV"} & {*names}
    assert "SLURM_ACCOUNT" in names
    # steps without an environment have no PATH
    start = words.index("/usr/bin/env")
    assert words[start + 1].startswith("PATH=/")
    assert words[start + 3 : start + 8] == ["/opt/sm120", "--store", "/x", "--quiet", "gate"]


LOST = {
    # a node that died: rc 0, nothing on stdout
    "nothing, and exit code 0": "sys.exit(0)",
    "nothing but a greeting": "begin(); sys.exit(0)",
    "half a line of JSON": "begin(); sys.stdout.write(json.dumps({'key': keys[0]})[:30])",
    "an answer to another key": "begin(); say({'key': 'sha256:' + '0' * 64, 'answer': {}})",
    "the answer of another case": "begin(); answer(keys[0], case='other')",
    "an answer of another form": "begin(); answer(keys[0], ended='fine')",
    "another worker": "begin(worker='sha256:' + '1' * 64)\nfor key in keys: answer(key)",
    "another engine": "begin(engine='sha256:' + '1' * 64)\nfor key in keys: answer(key)",
    "answers without digests": "say({'node': 'x'})\nfor key in keys: answer(key)",
    "lines that are no objects": "begin(); print('[1]'); print('null'); print('{')",
    "its own error": "begin(); print('sm120: no store', file=sys.stderr); sys.exit(40)",
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_no_answer_is_asked_again_and_then_unknown_and_never_kept(
    slurm: FakeSlurm, name: str
) -> None:
    # it says that it begins, so Slurm itself works
    slurm.behave(f"say({{'node': 'node1'}})\n{LOST[name]}")
    answers = slurm.ask("a")
    assert (answers["a"].ended, slurm.kept()) == ("died", set())
    assert len(slurm.calls) == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("another worker", "node1 has another worker than this machine"),
        ("another engine", "node1 has another engine than this machine"),
        ("its own error", "srun ended with 40 and 0 of 1 answer: sm120: no store"),
    ],
)
def test_the_reason_is_named(slurm: FakeSlurm, name: str, reason: str) -> None:
    slurm.behave(LOST[name])
    assert reason in slurm.ask("a")["a"].message


@pytest.mark.parametrize(
    "text",
    [
        "sys.exit(0) if tries == 1 else honest()",
        "sys.exit(1) if tries < 3 else honest()",
        "begin(**({} if tries > 1 else {'worker': 'x'}))\nfor key in keys: answer(key)",
        "begin(); answer(keys[0])\nif tries == 1: os.kill(os.getpid(), 9)\n"
        "for key in keys[1:]: answer(key)",
    ],
)
def test_a_chunk_that_a_dead_node_lost_is_asked_again_and_doubles_nothing(
    slurm: FakeSlurm, text: str
) -> None:
    slurm.behave(text)
    answers = slurm.ask("a", "b")
    assert {answer.ended for answer in answers.values()} == {"called"}
    assert slurm.kept() == {"a", "b"}


def test_a_node_that_dies_in_the_middle_leaves_what_it_answered(slurm: FakeSlurm) -> None:
    slurm.behave("begin()\nif tries == 1: answer(keys[0])\nsys.exit(0)")
    answers = slurm.ask("a", "b")
    assert sorted(answer.ended for answer in answers.values()) == ["called", "died"]
    assert len(slurm.kept()) == 1
    # the second job was asked for the rest alone; the next run asks for that, too
    slurm.behave("honest()")
    assert {answer.ended for answer in slurm.ask("a", "b").values()} == {"called"}


# the second where it ignores SIGTERM
@pytest.mark.parametrize("code", [143, 137])
def test_a_job_that_its_limit_ended_is_named_and_not_tried_again(
    slurm: FakeSlurm, code: int
) -> None:
    slurm.behave(f"begin()\nif len(keys) == 1: honest()\nelse: sys.exit({code})")
    answers = slurm.ask("a", "b", "c", time_limit_s=60.0)
    ended = sorted(answer.ended for answer in answers.values())
    assert (ended, len(slurm.calls)) == (["called", "died", "died"], 2)
    lost = next(answer for answer in answers.values() if answer.ended == "died")
    assert "ended on node1 by its limit of 1 min, or was cancelled or killed" in lost.message


def test_endless_output_is_stopped_its_job_cancelled_and_not_asked_again(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_slurm, "_MOST_BYTES", 1 << 20)
    for stream in ("stdout", "stderr"):
        slurm.behave(f"begin()\nwhile True: sys.{stream}.write('x' * 65536)")
        answer = slurm.ask("a")["a"]
        assert (answer.ended, "printed more than" in answer.message) == ("died", True)
    assert len(slurm.calls) == 2
    cancelled = (slurm.folder / "cancelled").read_text(encoding="utf-8")
    assert all(f"--name={name}" in cancelled for name, _, _ in slurm.calls)


def test_a_job_that_slurm_does_not_end_is_ended_here(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the limit is a minute; the grace takes most of it back
    monkeypatch.setattr(on_slurm, "_GRACE_S", -59.5)
    slurm.behave("begin()\ntime.sleep(60)")
    message = slurm.ask("a", time_limit_s=1.0)["a"].message
    assert "took longer than 1 min, and Slurm did not end it" in message


def test_where_no_job_begins_the_run_ends_with_what_srun_says(slurm: FakeSlurm) -> None:
    slurm.behave("print('srun: error: invalid partition specified: x', file=sys.stderr)\nexit(1)")
    with pytest.raises(SlurmUnavailable, match="invalid partition specified: x"):
        slurm.ask("a", "b", "c")
    assert slurm.kept() == set()


def test_without_srun_nothing_is_asked(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="`srun` is not installed"):
        slurm.ask("a")


def test_ctrl_c_cancels_every_job_and_keeps_what_has_arrived(slurm: FakeSlurm) -> None:
    slurm.behave("if name.endswith('-1'): honest()\nelse: begin(); time.sleep(60)")

    def press() -> None:
        while len(slurm.kept()) < 2 or len(slurm.calls) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    (slurm.target.store.root / "gate" / "answers").mkdir(parents=True)
    (slurm.folder / "calls").touch()
    thread = threading.Thread(target=press)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        slurm.ask(*"abcdef")
    thread.join()
    assert time.monotonic() - began < 30
    assert len(slurm.kept()) == 2
    cancelled = (slurm.folder / "cancelled").read_text(encoding="utf-8").splitlines()
    assert sorted(line[-2:] for line in cancelled) == ["-2", "-3"]


def test_ctrl_c_between_two_chunks_cancels_the_first(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.behave("begin(); time.sleep(60)")

    class Pressed(ThreadPoolExecutor):
        def submit(self, work: Any, /, *args: Any, **words: Any) -> Any:
            if work.name.endswith("-2"):
                while not slurm.calls:
                    time.sleep(0.01)
                raise KeyboardInterrupt
            return super().submit(work, *args, **words)

    (slurm.folder / "calls").touch()
    monkeypatch.setattr(on_slurm, "ThreadPoolExecutor", Pressed)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        slurm.ask(*"abcd")
    assert time.monotonic() - began < 30
    cancelled = (slurm.folder / "cancelled").read_text(encoding="utf-8").splitlines()
    assert [line[-2:] for line in cancelled] == ["-1"]


def test_progress_names_cases_and_chunks(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.behave("honest()")
    slurm.ask(*"abc", partition="gpu")
    assert "3 cases in 2 chunks to Slurm, partition gpu, as jobs sm120-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("on", "chunk", "command", "reason"),
    [
        ("host1", None, None, "is neither slurm nor slurm:PARTITION"),
        ("slurm:", None, None, "is neither slurm nor slurm:PARTITION"),
        ("slurm:a b", None, None, "is neither slurm nor slurm:PARTITION"),
        ("slurm:--uid=0", None, None, "is neither slurm nor slurm:PARTITION"),
        (None, 3, None, "are about nodes"),
        ("slurm", None, "sm120", "sm120 has no path"),
        ("slurm", None, "'/opt/sm120", "No closing quotation"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    on: str | None, chunk: int | None, command: str | None, reason: str
) -> None:
    with pytest.raises(SpecInvalid, match=reason):
        SlurmOrder.read(on, chunk, None, command)


def test_options_have_the_defaults_that_the_help_names() -> None:
    assert SlurmOrder.read(None, None, None, "/opt/sm120") is None
    order = SlurmOrder.read("slurm", None, None, None)
    assert order == SlurmOrder(None, None, 3600.0, ())
    assert SlurmNodes(order, [], Path()).chunk == run.CASES_A_WORKER == 24
    order = SlurmOrder.read("slurm:gpu-1", 5, 90.0, "/opt/sm120 --store '/a b'")
    assert order == SlurmOrder("gpu-1", 5, 90.0, ("/opt/sm120", "--store", "/a b"))
    assert order.minutes == 2

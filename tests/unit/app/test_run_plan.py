"""A plan runs what changed and nothing else; what fails is kept, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from pipeline.app import run_plan
from pipeline.app.run_plan import RunRequest, dry_run, read_stages, run_stages, submit_stages
from pipeline.app.workspace import Workspace
from pipeline.core.errors import Interrupted, MissingTool, PlanFailed, PlanInvalid, SpecInvalid
from pipeline.core.files import locked
from tests.unit.support import ROOT, Command

# stands for sm120: writes its words down, and does what the first says
PROGRAM = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1" in
  write) mkdir -p "$(dirname "$3")"; echo "$4" > "$3" ;;
  read) cat "$2" ;;
  fail) echo "sm120: it broke at https://me:secret@host/x"; exit 93 ;;
  stop) exit 130 ;;
  build) echo "$2" > images/thing/series.yaml ;;
esac
"""
Run = Callable[..., dict[str, tuple[str, str]]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def ran(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was run, a line each."""
    program = home.parent / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    log = home.parent / "ran"
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setattr(run_plan, "_command", lambda _, words: [str(program), *words])
    return log


def write_plan(home: Path, **stages: object) -> Path:
    path = home / "plan.yaml"
    path.write_text(yaml.safe_dump({"format": 1, "stages": stages}, sort_keys=False))
    return path


@pytest.fixture
def run(home: Path, ran: Path) -> Run:
    """Run the plan; the state of each stage, and the commands that ran."""

    def run(**options: object) -> dict[str, tuple[str, str]]:
        ran.write_text("")
        request = RunRequest(home / "plan.yaml", **options)  # type: ignore[arg-type]
        results = run_stages(workspace(home), request)
        return {each.stage.name: (each.state, each.why) for each in results}

    return run


def workspace(home: Path) -> Workspace:
    # no checkout is around it, so that words are files and nothing else
    return Workspace(checkout_path=home, store_path=home.parent / "store")


def lines(ran: Path) -> list[str]:
    return ran.read_text().splitlines()


def test_the_second_run_does_nothing(home: Path, run: Run, ran: Path) -> None:
    write_plan(
        home,
        number={"run": "write --output out/number 7"},
        page={"run": "read out/number"},
        other={"run": "note x"},
    )
    assert {state for state, _ in run().values()} == {"run"}
    assert lines(ran) == ["write --output out/number 7", "read out/number", "note x"]
    again = run()
    assert {state for state, _ in again.values()} == {"done"}
    assert {why for _, why in again.values()} == {"nothing changed"}
    assert lines(ran) == []


def test_a_changed_file_runs_its_stage_and_those_that_need_it(
    home: Path, run: Run, ran: Path
) -> None:
    (home / "given").write_text("1")
    write_plan(
        home,
        number={"run": "write --output out/number given"},
        page={"run": "read out/number"},
        other={"run": "note x"},
    )
    run()
    (home / "given").write_text("2")
    done = run()
    assert done["number"] == ("run", "changed: given")
    assert done["page"][0] == "run"
    assert done["other"] == ("done", "nothing changed")


def test_another_command_and_a_result_that_is_gone_run_again(
    home: Path, run: Run, ran: Path
) -> None:
    write_plan(home, number={"run": "write --output out/number 7"})
    run()
    write_plan(home, number={"run": "write --output out/number 8"})
    assert run()["number"] == ("run", "changed: the command")
    (home / "out" / "number").unlink()
    state, why = run()["number"]
    assert (state, why.endswith("out/number is gone")) == ("run", True)


def test_what_a_command_made_is_its_result_also_without_an_option(
    home: Path, run: Run, ran: Path
) -> None:
    write_plan(home, number={"run": "write into out/number 7"})
    run()
    # it was not there before, so that it is no input now
    assert run()["number"] == ("done", "nothing changed")
    (home / "out" / "number").unlink()
    assert run()["number"][0] == "run"


@pytest.mark.parametrize(
    ("command", "state"),
    [("build thing --accept", "done"), ("build thing", "run"), ("build thing --gate", "run")],
)
def test_only_what_a_command_was_told_to_write_into_the_checkout_does_not_run_it_again(
    home: Path, run: Run, ran: Path, command: str, state: str
) -> None:
    for name in ("images/thing", "lockfiles"):
        (home / name).mkdir(parents=True)
    write_plan(home, image={"run": command}, page={"run": "note thing", "needs": ["image"]})
    assert {each for each, _ in run().values()} == {"run"}
    assert {each for each, _ in run().values()} == {state}
    # an edit of somebody's is noticed all the same
    (home / "images" / "thing" / "image.yaml").write_text("x")
    assert run()["image"] == ("run", "changed: images/thing")


def test_what_a_check_of_weights_notes_beside_them_is_none_of_its_results(
    home: Path, run: Run, ran: Path
) -> None:
    write_plan(
        home,
        fetch={"run": "write --output models/m/part 7"},
        folder={"run": "write into models/m/.sm120/receipt 1", "inputs": ["models/m"]},
        check={"run": "note models/m"},
    )
    run()
    (home / "models/m/.sm120/receipt").write_text("2")
    assert {each for each, _ in run().values()} == {"done"}
    (home / "models/m/part").write_text("8")
    assert run()["check"] == ("run", "changed: models/m")


def test_a_stage_that_writes_what_a_later_one_reads_is_noticed_in_the_same_run(
    home: Path, run: Run, ran: Path
) -> None:
    (home / "lock").write_text("old")
    (home / "version").write_text("1")
    write_plan(
        home,
        lock={"run": "write into lock new", "inputs": ["version"]},
        build={"run": "note x", "inputs": ["lock"], "after": ["lock"]},
    )
    run()
    assert {state for state, _ in run().values()} == {"done"}
    (home / "version").write_text("2")
    # the first runs, so that what reads its file does
    assert [state for state, _ in run().values()] == ["run", "run"]
    assert {state for state, _ in run().values()} == {"done"}
    (home / "lock").write_text("by hand")
    assert run() == {"lock": ("done", "nothing changed"), "build": ("run", "changed: lock")}


def test_a_failure_is_kept_in_the_commands_words_and_the_rest_goes_on(
    home: Path, run: Run, ran: Path
) -> None:
    write_plan(
        home,
        bad={"run": "fail now"},
        **{"after-it": {"run": "note cleanup", "after": ["bad"]}},
        **{"needs-it": {"run": "note never", "needs": ["bad"]}},
        **{"needs-that": {"run": "note never", "needs": ["needs-it"]}},
        other={"run": "note x"},
    )
    done = run()
    assert done["bad"][0] == "failed"
    assert done["bad"][1].startswith("it broke at https://")
    assert "secret" not in json.dumps(done)
    assert done["needs-it"] == ("left out", "bad failed")
    assert done["needs-that"] == ("left out", "needs-it left out")
    assert done["after-it"][0] == done["other"][0] == "run"
    assert "note never" not in lines(ran)
    again = run()
    assert again["other"][0] == "done"
    assert lines(ran) == ["fail now"]
    assert "secret" not in "".join(p.read_text() for p in home.parent.rglob("bad.json"))


def test_what_does_not_last_runs_for_those_that_need_it_and_only_then(
    home: Path, run: Run, ran: Path
) -> None:
    (home / "given").write_text("1")
    write_plan(
        home,
        serve={"run": "note serve", "lasts": False},
        measure={"run": "write --output out given", "needs": ["serve"]},
    )
    run()
    assert lines(ran) == ["note serve", "write --output out given"]
    assert run()["serve"] == ("done", "nothing that needs it runs")
    (home / "given").write_text("2")
    assert run()["serve"] == ("run", "measure needs it")
    assert len(lines(ran)) == 2


def test_from_until_and_again(home: Path, run: Run, ran: Path) -> None:
    write_plan(
        home,
        a={"run": "note a"},
        b={"run": "note b", "needs": ["a"]},
        c={"run": "note c", "needs": ["b"]},
    )
    run(last="b")
    assert lines(ran) == ["note a", "note b"]
    run(first="c")
    assert lines(ran) == ["note c"]
    done = run(again=("a",))
    # whoever needs one that ran runs, too
    assert done["a"] == ("run", "asked for")
    assert lines(ran) == ["note a", "note b", "note c"]
    for options in ({"first": "x"}, {"last": "x"}, {"again": ("x",)}):
        with pytest.raises(PlanInvalid, match="there is no stage 'x'") as error:
            run(**options)
        assert "a, b, c" in error.value.hint


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"a": {"run": "x", "needs": ["b"]}, "b": {"run": "x", "needs": ["a"]}}, "wait for each"),
        ({"a": {"run": "x", "after": ["a"]}}, "waits for 'a', which is no stage"),
        ({"a": {"run": "x", "needs": ["z"]}}, "waits for 'z', which is no stage"),
        (
            {"a": {"run": "x --output o"}, "b": {"run": "y --output=o"}},
            "a and b both write",
        ),
        ({"a": {"run": "read b1 --output a1"}, "b": {"run": "read a1 --output b1"}}, "wait for"),
        ({"a": {"run": "run other.yaml"}}, "a plan does not run plans"),
        ({"a": {"run": "--debug build"}}, "must begin with a command"),
        ({"a": {"run": "build 'x"}}, "No closing quotation"),
        ({"a": {"run": "sm120"}}, "must begin with a command"),
        ({"a": {"run": []}}, "must begin with a command"),
        ({"a": {"run": "x", "need": ["b"]}}, "did you mean `needs`"),
        ({}, "stages"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_before_anything_does(
    home: Path, run: Run, ran: Path, stages: dict[str, object], message: str
) -> None:
    write_plan(home, **stages)
    with pytest.raises((PlanInvalid, SpecInvalid), match=message):
        run()
    assert lines(ran) == []


def test_a_plan_that_is_not_there_is_named(home: Path, run: Run) -> None:
    with pytest.raises(SpecInvalid, match=r"plan\.yaml: cannot be read"):
        run()


def test_a_damaged_record_is_none(home: Path, run: Run, ran: Path) -> None:
    write_plan(home, a={"run": "note a"})
    run()
    (record,) = home.parent.rglob("a.json")
    for data in (
        b"",
        b"{",
        b'{"format": 2}',
        record.read_bytes().replace(b'"code": 0', b'"code": 4'),
    ):
        record.write_bytes(data)
        assert run()["a"][0] == "run"
    assert run()["a"][0] == "done"


def test_a_stage_that_another_run_is_at_is_refused(home: Path, run: Run, ran: Path) -> None:
    write_plan(home, a={"run": "note a"})
    run()
    write_plan(home, a={"run": "note b"})
    folder = read_folder(home)
    with locked(folder / "a.lock"), pytest.raises(PlanFailed, match="another run of this plan"):
        run()
    assert lines(ran) == []


def read_folder(home: Path) -> Path:
    return run_plan._records(workspace(home), home / "plan.yaml")


def test_a_stage_that_was_stopped_stops_the_plan_and_is_not_recorded(
    home: Path, run: Run, ran: Path
) -> None:
    write_plan(home, a={"run": "stop"}, b={"run": "note b"})
    with pytest.raises(Interrupted, match="a: stopped"):
        run()
    assert lines(ran) == ["stop"]
    assert not list(home.parent.rglob("a.json"))


@pytest.mark.parametrize("late_s", [0, 1], ids=["while it runs", "while it is started"])
def test_a_signal_for_the_plan_alone_ends_its_command(home: Path, ran: Path, late_s: float) -> None:
    write_plan(home, a={"run": "wait"})
    program = home.parent / "program"
    program.write_text("#!/bin/sh\necho $$ > $LOG\nexec sleep 60\n")
    code = (
        "import signal, subprocess, sys, time; from pathlib import Path;"
        "from pipeline.app import run_plan as r;"
        "from pipeline.app.workspace import Workspace;"
        "signal.signal(signal.SIGTERM, signal.default_int_handler);"
        "r._command = lambda _, words: [sys.argv[1]];"
        "start = subprocess.Popen.__init__;"
        "late = lambda *a, **k: (start(*a, **k), time.sleep(float(sys.argv[4])))[0];"
        "subprocess.Popen.__init__ = late;"
        "r.run_stages(Workspace(store_path=Path(sys.argv[3])), r.RunRequest(Path(sys.argv[2])))"
    )
    words = [str(program), str(home / "plan.yaml"), str(home.parent / "store"), str(late_s)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (ran.exists() and ran.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.02)
    child = int(ran.read_text())
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert not Path(f"/proc/{child}").exists()


def test_specs_locks_and_recipes_that_a_command_names_are_inputs(tmp_path: Path) -> None:
    path = write_plan(
        tmp_path, a={"run": "build llama-cpp-cpu"}, b={"run": "serve tiny-cpu"}, c={"run": "host x"}
    )
    stages = read_stages(Workspace(ROOT, tmp_path / "store"), path)
    named = {stage.name: set(stage.inputs) for stage in stages}
    assert {
        "images/llama-cpp-cpu",
        "lockfiles/images/llama-cpp-cpu.amd64.lock.yaml",
    } <= named["a"]
    assert named["b"] == {"recipes/tiny-cpu.yaml"}
    assert named["c"] == {"ansible", "lockfiles/host.yaml"}


def test_a_large_file_is_known_by_its_size_and_time(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "_READ_WHOLE_BYTES", 4)
    (home / "shard").write_bytes(b"12345")
    write_plan(home, a={"run": "note shard"})
    run()
    about = (home / "shard").stat()
    (home / "shard").write_bytes(b"54321")
    os.utime(home / "shard", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert run()["a"][0] == "done"
    os.utime(home / "shard", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert run()["a"][0] == "run"


def test_a_dry_run_says_bytes_and_time_and_runs_nothing(home: Path, ran: Path) -> None:
    path = write_plan(home, image={"run": "build llama-cpp-cpu --platform linux/amd64"})
    space = Workspace(ROOT, home.parent / "store")
    (home.parent / "store").mkdir()
    (result,), free = dry_run(space, RunRequest(path))
    assert (result.state, result.why) == ("run", "never ran")
    assert result.fetch_bytes is not None
    assert result.fetch_bytes > 30_000_000
    assert free > 0
    assert not ran.exists()


# Slurm

SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > "$JOBS/$(ls "$JOBS" | wc -l)"
echo "$ANSWER" | sed "s/N/$(ls "$JOBS" | wc -l)/"
exit $CODE
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    def prepare(answer: str, code: int) -> Path:
        (tmp_path / "bin").mkdir()
        (tmp_path / "jobs").mkdir()
        program = tmp_path / "bin" / "sbatch"
        # our own environment does not reach it
        script = SBATCH.replace("$JOBS", str(tmp_path / "jobs"))
        program.write_text(script.replace("$ANSWER", answer).replace("$CODE", str(code)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return tmp_path / "jobs"

    return prepare


def submitted(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.iterdir())]


def test_slurm_gets_a_job_for_each_stage_that_waits_for_those_it_needs(
    home: Path, jobs: Callable[[str, int], Path]
) -> None:
    path = write_plan(
        home,
        a={"run": "note a"},
        b={"run": "note b", "needs": ["a"]},
        c={"run": "note c", "after": ["b"]},
    )
    folder = jobs("10N;cluster", 0)
    results = submit_stages(workspace(home), RunRequest(path, slurm="fast"))
    assert [each.job for each in results] == ["101", "102", "103"]
    first, second, third = submitted(folder)
    assert not any("--dependency" in word for word in first)
    assert "--dependency=afterok:101" in second
    assert "--dependency=afterany:102" in third
    for words in (first, second, third):
        assert "--export=NONE" in words
        assert "--partition=fast" in words
    assert first[-1].endswith(f"run {path} --from a --until a --again a")


@pytest.mark.parametrize(("answer", "code"), [("", 0), ("12", 1), ("Submitted", 0)])
def test_an_answer_that_is_no_job_is_refused(
    home: Path, jobs: Callable[[str, int], Path], answer: str, code: int
) -> None:
    path = write_plan(home, a={"run": "note a"}, b={"run": "note b"})
    folder = jobs(answer, code)
    with pytest.raises(PlanFailed, match="a: Slurm took no job") as error:
        submit_stages(workspace(home), RunRequest(path))
    assert "scancel" in error.value.hint
    assert len(submitted(folder)) == 1


def test_without_sbatch_it_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_plan(home, a={"run": "note a"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingTool, match="sbatch is not installed"):
        submit_stages(workspace(home), RunRequest(path))


# the command

PLAN: Sequence[tuple[str, object]] = (
    ("list", {"run": "image list"}),
    ("bad", {"run": "image cat nothing /x"}),
)


def test_the_command_shows_a_table_and_ends_with_the_code_of_plans(
    sm120: Command, tmp_path: Path
) -> None:
    path = write_plan(tmp_path, **dict(PLAN))
    done = sm120("--checkout", ROOT, "run", path)
    assert done.error == "PlanFailed"
    assert "list   ran" in done.out
    assert "bad    failed" in done.out
    assert "[1/2] list: sm120 image list" in done.err
    shown = sm120("--checkout", ROOT, "run", path, "--json", "--dry-run")
    assert shown.code == 0
    first, second = json.loads(shown.out)["stages"]
    assert (first["state"], second["state"]) == ("done", "run")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("biuld vllm", "Did you mean `sm120 build`"),
        ("image liist", "Did you mean"),
        ("x", "No such"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_before_anything_runs(
    sm120: Command, tmp_path: Path, command: str, message: str
) -> None:
    path = write_plan(tmp_path, good={"run": "image list"}, wrong={"run": command})
    done = sm120("--checkout", ROOT, "run", path)
    assert (done.error, done.out) == ("PlanInvalid", "")
    assert "wrong: No such command" in done.err
    assert message in done.err


def test_on_takes_slurm_only(sm120: Command, tmp_path: Path) -> None:
    path = write_plan(tmp_path, good={"run": "image list"})
    done = sm120("run", path, "--on", "gpu1")
    assert (done.code, "slurm:PARTITION" in done.err) == (2, True)

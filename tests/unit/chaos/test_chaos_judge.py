"""The judge of chaos sees every planted defect, and lets pass what went well."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import DiskFull, PipelineError
from tests.chaos.__main__ import STAGES, Trial, is_wanted, main, table
from tests.chaos.faults import FAULTS
from tests.chaos.judge import Ended, Expected, Half, Outcome, Verdict, answer_of, judge, listing

GOOD, BAD = b"the right bytes", b"other bytes"
FULL = f"sm120: /x: no space left\n       {DiskFull.hint}\n"
KILLED = Ended(-9, "", "", was_killed=True)
DONE = Ended(0, "", "")
REFUSED = Ended(DiskFull.exit_code, "", FULL)


# of a file that the command has nothing to do with
KEPT = {"mine": hashlib.sha256(b"the user's own").hexdigest()}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine").write_text("the user's own")
    assert listing(tmp_path) == KEPT
    return tmp_path


def result_in(here: Path) -> Callable[[], str | None]:
    """What the command makes is one file; half of it is no more than half."""

    def result() -> str | None:
        path = here / "result"
        if not path.exists():
            return None
        data = path.read_bytes()
        if data != GOOD and GOOD.startswith(data):
            raise Half("the result is cut off")
        return data.decode()

    return result


def judged(
    here: Path,
    ended: Ended,
    *,
    again: Ended = DONE,
    makes: bytes | None = GOOD,
    before: str | None = None,
    **more: bool,
) -> Verdict:
    """What the judge says of a command that ended so; the next run makes what is given."""

    def run_again() -> Ended:
        if makes is not None:
            (here / "result").write_bytes(makes)
        return again

    expected = Expected(GOOD.decode(), before, dict(KEPT), **more)
    return judge(expected, ended, result_in(here), here, run_again)


def write(here: Path, data: bytes) -> None:
    (here / "result").write_bytes(data)


def test_a_result_that_is_right_went_on(here: Path) -> None:
    write(here, GOOD)
    assert judged(here, DONE).outcome is Outcome.WENT_ON


@pytest.mark.parametrize(("ended", "outcome"), [(KILLED, "killed"), (REFUSED, "refused")])
def test_a_command_that_made_nothing_and_ends_well_the_next_time_survived(
    here: Path, ended: Ended, outcome: str
) -> None:
    verdict = judged(here, ended)
    assert (verdict.outcome, verdict.outcome.is_good) == (outcome, True)


def test_success_with_other_bytes_is_wrong(here: Path) -> None:
    write(here, BAD)
    assert judged(here, DONE) == (
        Outcome.WRONG,
        "the result is another than without the fault",
    )


def test_success_without_a_result_is_wrong(here: Path) -> None:
    assert judged(here, DONE) == (Outcome.WRONG, "exit code 0, and the result is not there")


def test_success_that_left_the_old_result_is_wrong(here: Path) -> None:
    write(here, b"old")
    assert judged(here, DONE, before="old").outcome is Outcome.WRONG


@pytest.mark.parametrize("ended", [KILLED, REFUSED, DONE])
def test_half_a_file_under_its_name_is_wrong_however_the_command_ended(
    here: Path, ended: Ended
) -> None:
    write(here, GOOD[:7])
    assert judged(here, ended) == (
        Outcome.WRONG,
        "visible as finished: the result is cut off",
    )


@pytest.mark.parametrize("ended", [KILLED, REFUSED, DONE])
def test_what_is_gone_is_lost_however_the_command_ended(here: Path, ended: Ended) -> None:
    write(here, GOOD)
    (here / "mine").unlink()
    assert judged(here, ended) == (Outcome.LOST, "mine is gone")


def test_what_is_changed_is_lost(here: Path) -> None:
    (here / "mine").write_text("another's")
    assert judged(here, KILLED) == (Outcome.LOST, "mine is changed")


def test_an_old_result_that_is_gone_is_lost(here: Path) -> None:
    assert judged(here, KILLED, before="old").outcome is Outcome.LOST


def test_what_the_next_run_destroys_is_lost(here: Path) -> None:
    def again() -> Ended:
        (here / "mine").unlink()
        write(here, GOOD)
        return DONE

    expected = Expected(GOOD.decode(), None, dict(KEPT))
    verdict = judge(expected, KILLED, result_in(here), here, again)
    assert verdict == (Outcome.LOST, "after the next run: mine is gone")


def test_a_next_run_that_fails_is_lost(here: Path) -> None:
    verdict = judged(here, KILLED, again=REFUSED, makes=None)
    assert verdict.outcome is Outcome.LOST
    assert "no space left" in verdict.why


@pytest.mark.parametrize("makes", [BAD, None, GOOD[:3]])
def test_a_next_run_with_another_result_is_wrong(here: Path, makes: bytes | None) -> None:
    assert judged(here, KILLED, makes=makes).outcome is Outcome.WRONG


def test_what_is_done_once_may_be_refused_the_second_time_but_must_be_there(here: Path) -> None:
    write(here, GOOD)
    assert judged(here, DONE, again=REFUSED, makes=None, is_done_once=True).outcome.is_good
    (here / "result").unlink()
    verdict = judged(here, KILLED, again=REFUSED, makes=None, is_done_once=True)
    assert verdict.outcome is Outcome.WRONG


def test_over_rotten_bytes_success_needs_the_right_result(here: Path) -> None:
    spoilt, expected = frozenset({"mine"}), Expected(GOOD.decode(), None, dict(KEPT))

    def again() -> Ended:
        write(here, GOOD)
        return DONE

    def asked(ended: Ended) -> Outcome:
        return judge(expected, ended, result_in(here), here, again, spoilt).outcome

    (here / "mine").write_text("rotten")
    assert asked(REFUSED) is Outcome.REFUSED
    for data in (BAD, GOOD[:4]):
        write(here, data)
        assert asked(DONE) is Outcome.WRONG
    write(here, GOOD)
    assert asked(DONE) is Outcome.WENT_ON


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        (Ended(None, "", ""), Outcome.HUNG),
        (Ended(1, "", "sm120: Input/output error\n"), Outcome.UNCLEAR),
        (Ended(3, "", "sm120: odd\n"), Outcome.UNCLEAR),
        (Ended(40, "", "\n"), Outcome.UNCLEAR),
        (Ended(-11, "", ""), Outcome.UNCLEAR),
        (
            Ended(40, "", f"Traceback (most recent call last):\n  x\nOSError\n{FULL}"),
            Outcome.UNCLEAR,
        ),
        (REFUSED, Outcome.REFUSED),
        (DONE, Outcome.WENT_ON),
    ],
)
def test_an_answer_says_what_happened_or_is_unclear(ended: Ended, outcome: Outcome) -> None:
    assert answer_of(ended).outcome is outcome
    assert PipelineError.exit_code == 1


def test_the_table_counts_and_names_what_must_not_happen() -> None:
    trials = [
        Trial("build", "kill", "at once", Outcome.KILLED, "", 1.0),
        Trial("build", "full", "at 3 bytes", Outcome.LOST, "a is gone", 1.0),
        Trial("load", "kill", "late", Outcome.WENT_ON, "", 1.0),
    ]
    text = table(trials)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["build"] == ["2", "0", "0", "1", "1"]
    assert rows["kill"] == ["2", "1", "0", "1", "0"]
    assert "lost: build × full (at 3 bytes): a is gone" in text


def test_every_stage_meets_faults_that_exist_and_has_what_they_need() -> None:
    for stage in STAGES:
        assert {*stage.faults} <= {*FAULTS}, stage.name
        assert bool({"down", "lies", "partition", "dns"} & {*stage.faults}) == bool(stage.wires)
        assert ("rot" in stage.faults) == bool(stage.rot)
    assert sum(len(stage.faults) for stage in STAGES) >= 100
    assert {name for stage in STAGES for name in stage.faults} == {*FAULTS}


def test_only_names_stages_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    (build,) = (stage for stage in STAGES if stage.name == "build")
    kill = FAULTS["kill"]
    assert is_wanted(build, kill, None)
    assert is_wanted(build, kill, ["build"])
    assert is_wanted(build, kill, ["kill", "build"])
    assert not is_wanted(build, kill, ["full"])
    assert not is_wanted(build, kill, ["load", "kill"])
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "no stage and no fault is named nonsense" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "kill -9" in capsys.readouterr().out

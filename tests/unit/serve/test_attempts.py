from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import pytest

from pipeline.artifacts.attest.statement import stamp
from pipeline.serving.serve.attempts import (
    AttemptList,
    Begun,
    Ended,
    new_id,
)

NOON = datetime(2026, 11, 16, 12, 0, 0, tzinfo=UTC)


def begun(identity: str = "", recipe: str = "tiny-cpu") -> Begun:
    digest = "sha256:" + "1" * 64
    return Begun(
        id=identity or new_id(NOON),
        kind="serve",
        recipe=recipe,
        recipe_digest=digest,
        at=stamp(),
    )


def ended(begun: Begun, outcome: str = "serving", failure: str = "", seconds: float = 2.5) -> Ended:
    return Ended.model_validate(
        {
            "id": begun.id,
            "outcome": outcome,
            "failure": failure,
            "seconds": seconds,
            "at": stamp(NOON),
        }
    )


@pytest.fixture
def attempts(tmp_path: Path) -> AttemptList:
    return AttemptList(tmp_path / "attempts")


def outcomes(attempts: AttemptList) -> list[str]:
    return [attempt.outcome for attempt in attempts.read().attempts]


def test_a_store_without_attempts_has_an_empty_timeline(attempts: AttemptList) -> None:
    assert attempts.read().attempts == []


def test_an_attempt_that_was_killed_is_in_the_timeline_as_unfinished(attempts: AttemptList) -> None:
    attempts.add(begun())
    assert outcomes(attempts) == ["unfinished"]


def test_a_served_model_that_was_stopped_keeps_the_time_of_its_start(attempts: AttemptList) -> None:
    first = begun()
    attempts.add(first)
    attempts.add(ended(first, "serving", seconds=2.5))
    attempts.add(ended(first, "stopped", seconds=900))
    (attempt,) = attempts.read().attempts
    assert (attempt.outcome, attempt.seconds) == ("stopped", 2.5)


def test_a_failure_is_kept_with_its_text(attempts: AttemptList) -> None:
    first = begun()
    attempts.add(first)
    attempts.add(ended(first, "failed", "out of memory"))
    (attempt,) = attempts.read().attempts
    assert (attempt.outcome, attempt.failure) == ("failed", "out of memory")


def test_a_line_cut_short_takes_neither_the_one_before_nor_the_one_after(
    attempts: AttemptList,
) -> None:
    attempts.add(begun(recipe="first"))
    whole = attempts.path.read_bytes()
    attempts.path.write_bytes(whole + whole[: len(whole) // 2])
    attempts.add(begun(recipe="second"))
    timeline = attempts.read()
    assert [a.begun.recipe for a in timeline.attempts] == ["first", "second"]
    assert timeline.damaged == 1


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\x00\x00\n",
        b"[]\n",
        b'{"entry":{"event":"begun","id":"x"}}\n',
        b'{"entry":{"event":"other"}}\n',
        b"[" * 10_000 + b"\n",
        b'"' + b"x" * 100_000 + b'"\n',
    ],
)
def test_damage_is_counted_and_passed_over(attempts: AttemptList, line: bytes) -> None:
    attempts.add(begun())
    with attempts.path.open("ab") as file:
        file.write(line)
    attempts.add(begun())
    timeline = attempts.read()
    assert (len(timeline.attempts), timeline.damaged) == (2, 1)


def test_what_was_written_is_never_written_again(attempts: AttemptList) -> None:
    attempts.add(begun())
    before = attempts.path.read_bytes()
    attempts.add(begun())
    assert attempts.path.read_bytes().startswith(before)


def test_an_end_without_a_beginning_makes_no_attempt(attempts: AttemptList) -> None:
    attempts.add(ended(begun()))
    assert attempts.read().attempts == []


def test_many_at_the_same_time_lose_no_line(attempts: AttemptList) -> None:
    def add_five() -> None:
        for _ in range(5):
            attempts.add(begun())

    threads = [Thread(target=add_five) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline = attempts.read()
    assert (len(timeline.attempts), timeline.damaged) == (40, 0)


def test_two_attempts_of_one_second_differ() -> None:
    assert new_id(NOON) != new_id(NOON)
    assert new_id(NOON).startswith("20261116T120000-")


def test_a_failure_of_many_lines_is_kept_in_one() -> None:
    kept = ended(begun(), "failed", "a\n\n b" + "x" * 5000).failure
    assert kept.startswith("a bx")
    assert len(kept) == 2000

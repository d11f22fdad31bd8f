from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import DockerUnavailable
from pipeline.serving.serve.engine_log import start_phases
from pipeline.serving.serve.log_reader import LogReader


def read(pieces: list[bytes], folder: Path) -> list[str]:
    reader = LogReader(pieces, folder / "1.log")
    reader.finish(5)
    return list(reader.new_lines())


def test_lines_come_whole_however_they_are_cut(tmp_path: Path) -> None:
    assert read([b"one\ntw", b"o\nthr", b"ee"], tmp_path) == ["one", "two", "three"]


def test_a_progress_bar_is_a_line_for_each_step(tmp_path: Path) -> None:
    assert read([b" 1%\r 2%\r", b"\n", b"\n"], tmp_path) == [" 1%", " 2%"]


def test_a_line_without_end_is_handed_on_in_pieces(tmp_path: Path) -> None:
    assert [len(line) for line in read([b"x" * 40_000] * 4, tmp_path)] == [80_000, 80_000]


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path: Path) -> None:
    assert read([b"\xff\xfeok\n"], tmp_path) == ["\ufffd\ufffdok"]


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"\x1b[1;31mERROR\x1b[0m out of memory\n", ["ERROR out of memory"]),
        (b"\x1b]0;a title\x07ready\n", ["ready"]),
        (b"\x1b]0;without an end\n", []),
        (b"a\x00\x07b\tc\x9b\n", ["ab\tc\ufffd"]),
        (b"\x00\x01\x02\n", []),
        (b"\x1b[2J", []),
    ],
)
def test_a_line_commands_no_terminal(written: bytes, lines: list[str], tmp_path: Path) -> None:
    assert read([written], tmp_path) == lines


def test_everything_is_kept_in_the_file_and_the_last_lines_at_hand(tmp_path: Path) -> None:
    reader = LogReader([b"one\n", b"two\n"], tmp_path / "new" / "1.log")
    reader.finish(5)
    assert list(reader.new_lines()) == ["one", "two"]
    assert list(reader.new_lines()) == []
    assert list(reader.last) == ["one", "two"]
    assert (tmp_path / "new" / "1.log").read_bytes() == b"one\ntwo\n"


def test_an_engine_that_goes_away_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    def cut() -> Iterator[bytes]:
        yield b"one\n"
        raise DockerUnavailable("gone")

    reader = LogReader(cut(), tmp_path / "1.log")
    reader.finish(5)
    assert list(reader.new_lines()) == ["one"]


def test_a_disk_that_is_full_ends_the_file_and_not_the_reading(tmp_path: Path) -> None:
    taken = tmp_path / "1.log"
    taken.mkdir()  # no file can be written there
    reader = LogReader([b"one\n", b"two\n"], taken)
    reader.finish(5)
    assert list(reader.new_lines()) == ["one", "two"]


def test_an_engine_that_prints_nothing_leaves_an_empty_log(tmp_path: Path) -> None:
    LogReader([], tmp_path / "1.log").finish(5)
    assert (tmp_path / "1.log").read_bytes() == b""


def test_an_engine_that_serves_before_its_first_line_is_read_has_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogReader, "_read", lambda *_: None)
    LogReader([b"one\n"], tmp_path / "1.log")
    assert start_phases(tmp_path / "1.log") == {}

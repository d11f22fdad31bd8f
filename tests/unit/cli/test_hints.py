"""What a mistake is answered with: the hint must be one that helps with this mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import log
from pipeline.cli.weights.fit_text import _gib_text
from tests.unit.support import ROOT, Command, make_checkout, make_wheel

GATE = ("--checkout", ROOT, "gate")


def hint(sm120: Command, *args: str | Path) -> str:
    """The last line of what a failed command prints."""
    ended = sm120(*args)
    assert ended.code != 0
    return ended.err.splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["patches", "sglang-k2", "--without-sandbox", "--against", "foo"], "foo: is neither"),
        (["run", "sglang-k2", "--only", "smem", "--case", "nope*"], "nope*: matches no case"),
        (["run", "sglang-k2", "--only", "smem", "--arch", "foo"], "foo: is not a known card"),
        (["run", "sglang-k2", "--series", "nope"], "has no patch series 'nope'"),
        (["run", "llama-cpp-cpu"], "has no gates"),
    ],
)
def test_what_a_gate_cannot_do_is_said_before_anything_is_fetched(
    sm120: Command, asked: list[str], message: str
) -> None:
    # the store is empty: with --offline, looking for any file ends as OfflineMiss
    ended = sm120(*GATE, *asked, "--offline")
    assert ended.error == "GateInvalid"
    assert message in ended.err
    assert "Fetching" not in ended.err
    assert "Fix the named field" not in ended.err


@pytest.mark.parametrize("verb", ["scrub", "check-signature", "serve"])
def test_a_hint_names_no_option_that_the_command_has_not(
    sm120: Command, tmp_path: Path, verb: str
) -> None:
    assert "--lock" not in hint(sm120, "weights", verb, tmp_path)
    assert "--lock" in hint(sm120, "weights", "verify", tmp_path)


def test_a_folder_for_keys_that_cannot_be_made_is_not_taken_for_the_store(
    sm120: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "x", Path("/proc/x")):
        ended = sm120("evidence", "new-key", "a", "--to", folder)
        assert ended.error == "StoreUnwritable"
        assert ended.err.splitlines()[-1].strip() == "Name a folder you can write with --to."


def test_a_key_that_is_not_there_is_not_answered_with_making_one(sm120: Command) -> None:
    assert "`sm120 evidence list-keys` lists them" in hint(sm120, "evidence", "show-key", "nope")


def test_a_repository_is_asked_for_where_one_is_wanted(sm120: Command) -> None:
    expected = "Write REGISTRY/REPOSITORY, such as registry.example/library/python."
    assert hint(sm120, "registry", "tags", "library/python") == expected


def test_verify_names_what_it_can_read(sm120: Command, tmp_path: Path) -> None:
    assert "REGISTRY/REPOSITORY:TAG" in hint(sm120, "--checkout", ROOT, "verify", "mine:v1")
    (tmp_path / "result.json").write_text("{}")
    asked = hint(sm120, "verify", tmp_path / "result.json")
    assert asked == "Name its statements with --evidence."


def test_a_file_that_holds_no_facts_is_described_in_plain_words(
    sm120: Command, tmp_path: Path
) -> None:
    path = tmp_path / "facts.md"
    path.write_text("# Facts\n")
    assert "not a file of host facts: it is not JSON" in sm120("host", "drift", path).err
    path.write_text("{}")
    assert "HostFacts" not in sm120("host", "drift", path).err
    assert "`sm120 host facts --capture`" in hint(sm120, "host", "check", "--root", path)


@pytest.mark.parametrize("verb", ["verify", "provision", "rollback"])
def test_an_inventory_that_is_not_there_is_named(sm120: Command, verb: str) -> None:
    ended = sm120("--checkout", ROOT, "host", verb, "-i", "nope")
    assert ended.error == "FleetUnready"
    assert "nope: no such inventory" in ended.err


def test_help_shows_no_mark_of_the_code_that_prints_it(sm120: Command) -> None:
    text = sm120("completion", "--help").out
    assert "\\b" not in text
    assert '  zsh:  eval "$(sm120 completion zsh)"   in ~/.zshrc, after compinit\n' in text


def test_one_thing_is_not_counted_as_several() -> None:
    assert [log.count(n, "rule") for n in (0, 1, 2)] == ["0 rules", "1 rule", "2 rules"]
    assert log.count(1, "case fails", "cases fail") == "1 case fails"
    assert log.count(3, "case fails", "cases fail") == "3 cases fail"


def test_memory_that_is_short_is_not_a_negative_size() -> None:
    assert _gib_text(-(59 << 30)) == "none, 59.00 short"
    assert _gib_text(3 << 30) == "      3.00"


def test_offline_names_how_many_files_are_missing_and_fetches_none(
    sm120: Command, tmp_path: Path
) -> None:
    wheels = [make_wheel(tmp_path / "mirror", name) for name in ("thing", "other")]
    make_checkout(tmp_path, wheels)
    ended = sm120("build", "tiny", "--offline")
    assert ended.error == "OfflineMiss"
    assert "2 files are not in the store, such as " in ended.err
    assert "Looking for 2 files" in ended.err
    assert "Fetching" not in ended.err
    lone = tmp_path / "lone"
    lone.mkdir()
    wheels[0].rename(lone / wheels[0].name)
    ended = sm120("build", "tiny", "--offline", "--mirror", lone)
    assert f"{wheels[1].name}: not in the store" in ended.err


@pytest.mark.parametrize(
    ("image", "fix"),
    [
        ("sglang-k2", "Run `sm120 build sglang-k2` first."),
        ("vllm", "Run `sm120 build vllm --platform linux/arm64` first."),
    ],
)
def test_an_image_that_is_not_built_is_named_with_the_platform_where_it_has_several(
    sm120: Command, tmp_path: Path, image: str, fix: str
) -> None:
    platform = "linux/arm64" if image == "vllm" else "linux/amd64"
    asked = ("image", "export", image, tmp_path / "to", "--platform", platform)
    assert hint(sm120, "--checkout", ROOT, "--store", tmp_path / "store", *asked) == fix

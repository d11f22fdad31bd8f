"""Hints of wrong use, as somebody meets them who has never used the commands."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, TestHub, test_hub
from tests.unit.support import Command

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 80}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TestHub]:
    """A Hub with one model, and a checkout that knows it as `tiny`."""
    (tmp_path / "images").mkdir()
    (tmp_path / "lockfiles" / "weights").mkdir(parents=True)
    with test_hub() as running:
        running.add("org/tiny", FILES)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def fetched(hub: TestHub, sm120: Command) -> Path:
    assert sm120("weights", "lock", "org/tiny", "--save", "tiny").code == 0
    assert sm120("weights", "fetch", "tiny", "--output", "w").code == 0
    return sm120.cwd / "w"


@pytest.mark.parametrize(
    "command", [("lock",), ("lock", "--check"), ("fetch", "--output", "w"), ("fit",)]
)
def test_a_model_without_its_organisation_is_found_among_those_that_are_shipped(
    hub: TestHub, sm120: Command, command: tuple[str, ...]
) -> None:
    ended = sm120("weights", *command, "gpt-oss-120b")
    assert ended.error == "WeightsUnknown"
    assert "Did you mean openai/gpt-oss-120b?" in ended.err


def test_a_set_that_is_not_locked_yet_is_told_the_command_with_its_name(
    fetched: Path, sm120: Command
) -> None:
    lock = sm120.cwd / "lockfiles" / "weights" / "tiny.lock.yaml"
    whole = lock.read_text()
    lock.unlink()
    for command in (("fetch", "--output", "v", "tiny"), ("lock", "--check", "tiny")):
        assert "`sm120 weights lock tiny`" in sm120("weights", *command).err
    lock.write_text(whole.replace('"config.json"', '"other.json"'))
    ended = sm120("weights", "lock", "--check", "tiny")
    assert ended.error == "LockEdited"
    assert "`sm120 weights lock tiny`" in ended.err
    assert "image lock" not in ended.err


def test_a_checkout_without_locks_says_so_when_they_are_checked(
    hub: TestHub, sm120: Command
) -> None:
    ended = sm120("weights", "lock", "--check")
    assert ended.code == 0
    assert "no weights are locked yet" in ended.err


def test_a_damaged_lock_beside_the_files_is_made_again_as_its_hint_says(
    fetched: Path, hub: TestHub, sm120: Command
) -> None:
    kept = fetched / ".sm120" / "lock.yaml"
    kept.write_text("")
    for command in (("verify", "w"), ("fetch", "tiny", "--output", "w")):
        ended = sm120("weights", *command)
        assert ended.error == "LockEdited"
        assert f"Remove {kept.relative_to(sm120.cwd)} and fetch the set again" in ended.err
    kept.unlink()
    sent = hub.sent_bytes()
    assert sm120("weights", "fetch", "tiny", "--output", "w").code == 0
    assert hub.sent_bytes() == sent
    assert sm120("weights", "verify", "w").code == 0


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("nowhere", 2, "'nowhere' does not exist"),
        ("w", 2, "'w' is a directory"),
        ("w/config.json", 11, "Name a lock as `sm120 weights lock` writes it"),
    ],
)
def test_what_is_no_lock_file_is_not_called_an_edited_one(
    fetched: Path, sm120: Command, name: str, code: int, message: str
) -> None:
    ended = sm120("weights", "verify", "w", "--lock", name)
    assert ended.code == code
    assert message in ended.err


def test_files_that_no_lock_names_are_set_aside_and_not_downloaded(
    fetched: Path, sm120: Command
) -> None:
    (fetched / "extra.py").write_text("x")
    for command in (("verify", "w"), ("verify", "w", "--repair", "--dry-run"), ("scrub", "w")):
        ended = sm120("weights", *command)
        assert ended.error == "WeightsDamaged"
        assert "--repair` moves what no lock names to DIR/.sm120/aside" in ended.err
        assert "download" not in ended.err
        assert ("to be set aside: extra.py" in ended.err) is ("--dry-run" in command)
    (fetched / "config.json").unlink()
    assert "--repair` downloads only what" in sm120("weights", "verify", "w").err
    assert sm120("weights", "verify", "w", "--repair").code == 0
    assert [p.name for p in (fetched / ".sm120" / "aside").iterdir()] == ["1-extra.py"]


def test_after_a_repair_in_vain_the_same_repair_is_not_advised(
    fetched: Path, hub: TestHub, sm120: Command
) -> None:
    good = shutil.copytree(fetched, sm120.cwd / "good")
    (fetched / "model.safetensors").write_bytes(b"x" * len(FILES["model.safetensors"]))
    assert "--repair` downloads" in sm120("weights", "verify", "w").err
    for output in ((), ("--json",)):
        ended = sm120("weights", "verify", "w", "--repair", "--offline", *output)
        assert ended.error == "WeightsDamaged"
        assert "name another one with --from, or leave out --offline" in ended.err
        assert "--repair` downloads" not in ended.err
    hub.fail("*", fault.status(404), times=ALWAYS)
    ended = sm120("weights", "verify", "w", "--repair")
    assert "name another one with --from." in ended.err
    ended = sm120("weights", "verify", "w", "--repair", "--offline", "--from", str(good))
    assert ended.code == 0, ended.err


def test_a_source_is_only_taken_where_it_would_be_asked(fetched: Path, sm120: Command) -> None:
    ended = sm120("weights", "verify", "w", "--from", "w")
    assert ended.code == 2
    assert "--from needs --repair" in ended.err


def test_a_repository_that_is_not_there_is_first_taken_for_a_mistyped_name(
    hub: TestHub, sm120: Command
) -> None:
    ended = sm120("weights", "lock", "org/tinny")
    assert ended.error == "HubRefused"
    assert "Correct the name; if it is right: accept the licence" in ended.err


def test_without_a_hub_the_way_over_another_machine_is_named(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = sm120("weights", "fetch", "org/tiny", "--output", "w", "--offline")
    assert ended.error == "OfflineMiss"
    assert "a lock that was made elsewhere (docs/air-gap.md)" in ended.err
    monkeypatch.setattr("pipeline.core.net.timing.ATTEMPTS", 1)
    hub.fail("*", fault.status(503), times=ALWAYS, stage="info")
    ended = sm120("weights", "lock", "org/tiny")
    assert ended.error == "SourceUnreachable"
    assert "Check the network and HF_ENDPOINT" in ended.err
    assert "a lock that was made elsewhere" in ended.err


def test_a_fetch_that_reaches_nobody_names_its_own_sources(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm120("weights", "lock", "org/tiny", "--save", "tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--from", "http://127.0.0.1:19")
    assert ended.error == "SourceUnreachable"
    assert "Check the network, HF_ENDPOINT and what --from names" in ended.err
    assert "image sources" not in ended.err


@pytest.mark.parametrize("hub_answers", [fault.status(401), fault.status(500), fault.status(404)])
def test_a_neighbour_that_refuses_names_the_variable_of_its_token(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch, hub_answers: fault.Fault
) -> None:
    sm120("weights", "lock", "org/tiny", "--save", "tiny")
    monkeypatch.setattr("pipeline.weights.transfer.router.ATTEMPTS", 2)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with test_hub() as neighbour:
        neighbour.add("org/tiny", FILES)
        neighbour.fail("*", fault.status(401), times=ALWAYS)
        hub.fail("*", hub_answers, times=ALWAYS)
        ended = sm120("weights", "fetch", "tiny", "--output", "w", "--from", neighbour.url)
    assert ended.code != 0
    assert "Set SM120_NEIGHBOUR_TOKEN to a token that" in ended.err


def test_a_hub_that_refuses_speaks_of_its_own_token(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "org/tiny", "--save", "tiny")
    hub.fail("*", fault.status(401), times=ALWAYS)
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--from", str(sm120.cwd))
    assert "set HF_TOKEN" in ended.err
    assert "SM120_NEIGHBOUR_TOKEN" not in ended.err


def test_an_empty_path_is_not_taken_for_the_current_folder(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "org/tiny", "--save", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "")
    assert (ended.code, "'--output': the path is empty" in ended.err) == (2, True)
    assert not (sm120.cwd / "config.json").exists()


def test_a_disk_that_can_only_be_read_is_called_so_and_no_other_fetch_is_suspected(
    fetched: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int, *rest: object, **more: object) -> int:
        if str(path).endswith(".lock") and flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *rest, **more)  # type: ignore[arg-type]

    (fetched / "config.json").unlink()
    (fetched / ".sm120" / "fetch.lock").touch()
    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    ended = sm120("weights", "fetch", "tiny", "--output", "w")
    assert ended.error == "StoreUnwritable"
    assert "That disk can only be read: name another folder with --output." in ended.err
    assert "Another fetch" not in ended.err
    for command in (("verify", "w", "--repair"), ("scrub", "w")):
        ended = sm120("weights", *command)
        assert ended.error == "StoreUnwritable"
        assert "mount it for writing, or fetch the set to another disk" in ended.err
        assert "SM120_STORE" not in ended.err


def test_a_disk_without_reserve_is_told_how_much_stays_free(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm120("weights", "lock", "org/tiny", "--save", "tiny")
    usage = shutil.disk_usage(sm120.cwd)._replace(free=8_400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    ended = sm120("weights", "fetch", "tiny", "--output", "w")
    assert ended.error == "DiskFull"
    assert "20.5 kB are to be fetched, 8.4 MB are free, and 67.1 MB must stay free" in ended.err


def test_wrong_values_are_answered_in_the_terms_of_their_option(
    fetched: Path, sm120: Command
) -> None:
    ended = sm120("weights", "lock", "org/tiny", "--save", "Tiny")
    assert "a name has at most 80 small letters, digits" in ended.err
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--limit-rate", "fast")
    assert "'fast' is not a rate; write it like 200MB/s" in ended.err
    ended = sm120("weights", "lock", "https://huggingface.co/org/tiny/tree/main")
    assert "organisation/model@revision, here org/tiny." in ended.err

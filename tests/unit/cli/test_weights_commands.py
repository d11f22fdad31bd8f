from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.weights.model import read_lock
from pipeline.weights.place import find_places
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, TestHub, test_hub
from tests.unit.support import Command

FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "modeling.py": b"one = 1\n",
    "model.safetensors": bytes(range(256)) * 400,
}
SPEC = {
    "name": "tiny",
    "repository": "org/tiny",
    "format": "safetensors",
    "quant": "bf16",
    "about": "A set of weights that is only here for the tests.",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TestHub]:
    """A Hub at HF_ENDPOINT, and a checkout that asks for its one repository."""
    (tmp_path / "images").mkdir()
    write_spec(tmp_path)
    with test_hub() as running:
        running.add("org/tiny", FILES)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield running


def write_spec(root: Path, **changes: object) -> None:
    path = root / "lockfiles" / "weights" / "tiny.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**SPEC, **changes}), encoding="utf-8")


def lock_file(sm120: Command) -> Path:
    return sm120.cwd / "lockfiles" / "weights" / "tiny.lock.yaml"


def test_from_a_spec_to_files_in_two_commands(hub: TestHub, sm120: Command) -> None:
    assert sm120("weights", "lock", "tiny").code == 0
    ended = sm120("weights", "fetch", "tiny", "--to", "w")
    assert ended.code == 0, ended.err
    assert "3 files are right, 3 of them new" in ended.out
    assert "statement: w/.sm120/record.dsse.json, unsigned" in ended.out
    for path, data in FILES.items():
        assert (sm120.cwd / "w" / path).read_bytes() == data
    (place,) = find_places(sm120.cwd / "w")
    assert place.lock == read_lock(lock_file(sm120))
    again = sm120("weights", "fetch", "tiny", "--to", "w", "--json").json
    assert (again["brought"], again["files"]) == ([], 3)


def test_a_diff_writes_nothing(hub: TestHub, sm120: Command) -> None:
    ended = sm120("weights", "lock", "tiny", "--dry-run")
    assert ended.code == 0
    assert "model.safetensors" in ended.out
    assert not lock_file(sm120).exists()


def test_a_diff_shows_what_moved(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    hub.add("org/tiny", {**FILES, "config.json": b"{}"})
    (answer,) = sm120("weights", "lock", "tiny", "--dry-run", "--json").json
    assert [(m["kind"], m["path"]) for m in answer["moves"]] == [
        ("commit", ""),
        ("changed", "config.json"),
    ]
    assert re.fullmatch(r"[0-9a-f]{40}", answer["commit"])


def test_a_failed_lock_leaves_the_old_one(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    before = lock_file(sm120).read_bytes()
    hub.add("org/tiny", {"config.json": b"{}"})
    for stage, bad, error in (
        ("tree", fault.truncated(), "HubBroken"),
        ("tree", fault.then(lambda: hub.add("org/tiny", {"x": b"y"})), "RevisionMoved"),
        ("info", fault.gated(403), "HubRefused"),
    ):
        hub.fail("*", bad, stage=stage)  # type: ignore[arg-type]
        ended = sm120("weights", "lock", "tiny")
        assert ended.error == error, ended.err
        assert len(ended.err.strip().splitlines()) <= 3
        assert lock_file(sm120).read_bytes() == before


def test_a_lock_is_checked_offline(hub: TestHub, sm120: Command) -> None:
    assert sm120("weights", "lock", "--check").out == ""
    sm120("weights", "lock", "tiny")
    hub.asked.clear()
    assert "current" in sm120("weights", "lock", "--check").out
    write_spec(sm120.cwd, exclude=["*.py"])
    assert sm120("weights", "lock", "--check", "tiny").error == "LockStale"
    assert sm120("weights", "fetch", "tiny", "--to", "w").error == "LockStale"
    assert hub.asked == []


def test_the_list_says_what_is_locked(hub: TestHub, sm120: Command) -> None:
    (row,) = sm120("weights", "list", "--json").json
    assert row["lock"] == "missing"
    sm120("weights", "lock", "tiny")
    assert "102.4 kB" in sm120("weights", "list").out
    text = lock_file(sm120).read_text()
    lock_file(sm120).write_text(text.replace('"size_bytes": 8', '"size_bytes": 9'))
    (row,) = sm120("weights", "list", "--json").json
    assert row["lock"] == "edited"
    write_spec(sm120.cwd, exclude=["*.py"])
    lock_file(sm120).write_text(text)
    (row,) = sm120("weights", "list", "--json").json
    assert row["lock"] == "stale"


def test_an_index_is_read_and_its_missing_shards_named(hub: TestHub, sm120: Command) -> None:
    index = b'{"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}}'
    hub.add("org/tiny", {**FILES, "model.safetensors.index.json": index})
    ended = sm120("weights", "lock", "tiny")
    assert ended.code == 0
    assert "gone.safetensors" in ended.err


def test_the_hub_layout_gets_links_and_a_name_for_the_commit(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    assert sm120("weights", "fetch", "tiny", "--to", "cache", "--hub-cache").code == 0
    root = sm120.cwd / "cache" / "models--org--tiny"
    commit = (root / "refs" / "main").read_text()
    assert (root / "snapshots" / commit / "modeling.py").read_bytes() == FILES["modeling.py"]
    (place,) = find_places(sm120.cwd / "cache")
    assert place.hub_cache


def test_a_subset_and_a_folder_and_offline(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--to", "one", "--only", "*.json", "--only", "*.py")
    assert not (sm120.cwd / "one" / "model.safetensors").exists()
    ended = sm120("weights", "fetch", "tiny", "--to", "two", "--from", "one", "--offline")
    assert ended.error == "OfflineMiss"
    assert "--from" in ended.err
    one = ("weights", "fetch", "tiny", "--to", "two", "--from", "one")
    assert sm120(*one, "--offline", "--only", "*.json").code == 0
    assert sm120(*one).code == 0
    assert hub.sent_bytes("config.json") == len(FILES["config.json"])


@pytest.mark.parametrize("limit", ["0", "fast", "-1MB/s", "1XB/s", "MB/s"])
def test_a_rate_that_is_none_is_a_usage_error(hub: TestHub, sm120: Command, limit: str) -> None:
    assert sm120("weights", "fetch", "tiny", "--to", "w", "--limit-rate", limit).code == 2


@pytest.mark.parametrize("limit", ["200MB/s", "1.5 GB/s", "3000KiB", "5000000", "10M"])
def test_a_rate_may_be_written_in_several_ways(hub: TestHub, sm120: Command, limit: str) -> None:
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--to", "w", "--limit-rate", limit, "--jobs", "2")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (("--only", "*.gguf"), 41, "WeightsUnknown"),
        (("--from", "nowhere"), 10, "SpecInvalid"),
        (("--from", "ftp://x/y"), 10, "SpecInvalid"),
        (("--jobs", "0"), 2, ""),
    ],
)
def test_a_wrong_option_is_named(
    hub: TestHub, sm120: Command, args: tuple[str, ...], code: int, error: str
) -> None:
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--to", "w", *args)
    assert (ended.code, ended.error) == (code, error)


def test_unknown_weights_and_missing_locks_have_their_own_codes(
    hub: TestHub, sm120: Command
) -> None:
    assert sm120("weights", "fetch", "other", "--to", "w").error == "WeightsUnknown"
    assert sm120("weights", "lock", "other").error == "WeightsUnknown"
    assert sm120("weights", "fetch", "tiny", "--to", "w").error == "LockMissing"
    assert sm120("weights", "lock").error == "SpecInvalid"


def test_wrong_bytes_end_with_21_and_no_file(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    hub.fail("model.safetensors", fault.flip(9), times=ALWAYS)
    ended = sm120("weights", "fetch", "tiny", "--to", "w")
    assert ended.error == "DigestMismatch"
    assert "model.safetensors" in ended.err
    assert not (sm120.cwd / "w" / "model.safetensors").exists()
    assert (sm120.cwd / "w" / "config.json").exists()


def test_a_target_that_cannot_be_written_is_explained(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    (sm120.cwd / "w").write_bytes(b"")
    ended = sm120("weights", "fetch", "tiny", "--to", "w")
    assert ended.error == "StoreUnwritable"
    assert "--to" in ended.err


def test_offline_by_the_hubs_own_variable(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm120("weights", "lock", "tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert sm120("weights", "lock", "tiny").error == "OfflineMiss"
    assert sm120("weights", "fetch", "tiny", "--to", "w").error == "OfflineMiss"
    assert hub.asked == []

from __future__ import annotations

import errno
import random
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from pipeline.hosts.fleet.promised import HostConnection, Promised
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.model import read_weights_lock
from pipeline.weights.place import find_places
from pipeline.weights.transfer import fetch as fetch_module
from pipeline.weights.transfer.peers import Peer, PeerGroup
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, TestHub, test_hub
from tests.unit.support import Command
from tests.unit.weights.disk_set import flip

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
    ended = sm120("weights", "fetch", "tiny", "--output", "w")
    assert ended.code == 0, ended.err
    assert "3 files are right, 3 of them new" in ended.out
    assert "statement: w/.sm120/record.dsse.json, unsigned" in ended.out
    for path, data in FILES.items():
        assert (sm120.cwd / "w" / path).read_bytes() == data
    (place,) = find_places(sm120.cwd / "w")
    assert place.lock == read_weights_lock(lock_file(sm120))
    again = sm120("weights", "fetch", "tiny", "--output", "w", "--json").json
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
    assert sm120("weights", "fetch", "tiny", "--output", "w").error == "LockStale"
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
    assert sm120("weights", "fetch", "tiny", "--output", "cache", "--hub-cache").code == 0
    root = sm120.cwd / "cache" / "models--org--tiny"
    commit = (root / "refs" / "main").read_text()
    assert (root / "snapshots" / commit / "modeling.py").read_bytes() == FILES["modeling.py"]
    (place,) = find_places(sm120.cwd / "cache")
    assert place.hub_cache


def test_a_subset_and_a_folder_and_offline(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "one", "--only", "*.json", "--only", "*.py")
    assert not (sm120.cwd / "one" / "model.safetensors").exists()
    ended = sm120("weights", "fetch", "tiny", "--output", "two", "--from", "one", "--offline")
    assert ended.error == "OfflineMiss"
    assert "--from" in ended.err
    one = ("weights", "fetch", "tiny", "--output", "two", "--from", "one")
    assert sm120(*one, "--offline", "--only", "*.json").code == 0
    assert sm120(*one).code == 0
    assert hub.sent_bytes("config.json") == len(FILES["config.json"])


def test_a_folder_that_was_carried_over_is_enough(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "disk")
    sm120("weights", "fetch", "org/tiny", "--output", "cache", "--hub-cache")
    lock_file(sm120).unlink()
    hub.asked.clear()
    for name, source, target in (("tiny", "disk", "a"), ("org/tiny", "cache", "b")):
        ended = sm120("weights", "fetch", name, "--output", target, "--from", source, "--offline")
        assert ended.code == 0, ended.err
        assert f"by the lock in {source}" in ended.err
        assert "3 files are right, 3 of them new" in ended.out
        assert sm120("weights", "verify", target).code == 0
    assert hub.asked == []


def test_the_checkouts_lock_goes_before_the_one_in_a_folder(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "disk")
    hub.add("org/tiny", {**FILES, "config.json": b"{}"})
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "a", "--from", "disk", "--offline")
    assert ended.error == "OfflineMiss"
    assert "config.json" in ended.err


def test_a_lock_in_a_folder_that_is_damaged_or_of_something_else_is_refused(
    hub: TestHub, sm120: Command
) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "disk")
    lock_file(sm120).unlink()
    hub.add("org/other", FILES)
    take = ("weights", "fetch", "tiny", "--output", "a", "--offline", "--from")
    assert sm120("weights", "fetch", "org/other", "--output", "other").code == 0
    ended = sm120(*take, "other")
    assert ended.error == "WeightsUnknown"
    assert "other has org--other of org/other" in ended.err
    assert sm120(*take, "other", "--from", "disk", "--dry-run").code == 0
    write_spec(sm120.cwd, exclude=["*.py"])
    assert sm120(*take, "disk").error == "LockStale"
    write_spec(sm120.cwd)
    kept = sm120.cwd / "disk/.sm120/lock.yaml"
    whole = kept.read_text(encoding="utf-8")
    for damaged in (whole.replace("modeling.py", "modeling.so"), whole[: len(whole) // 2]):
        kept.write_text(damaged, encoding="utf-8")
        ended = sm120(*take, "disk")
        assert ended.error == "LockEdited"
        assert "disk: " in ended.err
        assert "Copy the folder again" in ended.err
    kept.unlink()
    ended = sm120(*take, "disk")
    assert ended.error == "LockMissing"
    assert "neither in the checkout nor in a folder of --from" in ended.err
    assert not (sm120.cwd / "a").exists()


@pytest.mark.parametrize("limit", ["0", "fast", "-1MB/s", "1XB/s", "MB/s"])
def test_a_rate_that_is_none_is_a_usage_error(hub: TestHub, sm120: Command, limit: str) -> None:
    assert sm120("weights", "fetch", "tiny", "--output", "w", "--limit-rate", limit).code == 2


@pytest.mark.parametrize("limit", ["200MB/s", "1.5 GB/s", "3000KiB", "5000000", "10M"])
def test_a_rate_may_be_written_in_several_ways(hub: TestHub, sm120: Command, limit: str) -> None:
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--limit-rate", limit, "--jobs", "2")
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
    ended = sm120("weights", "fetch", "tiny", "--output", "w", *args)
    assert (ended.code, ended.error) == (code, error)


def test_unknown_weights_and_missing_locks_have_their_own_codes(
    hub: TestHub, sm120: Command
) -> None:
    assert sm120("weights", "fetch", "other", "--output", "w").error == "WeightsUnknown"
    assert sm120("weights", "lock", "other").error == "WeightsUnknown"
    assert sm120("weights", "fetch", "tiny", "--output", "w").error == "LockMissing"
    assert sm120("weights", "lock").error == "SpecInvalid"


def test_wrong_bytes_end_with_21_and_no_file(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    hub.fail("model.safetensors", fault.flip(9), times=ALWAYS)
    ended = sm120("weights", "fetch", "tiny", "--output", "w")
    assert ended.error == "DigestMismatch"
    assert "model.safetensors" in ended.err
    assert not (sm120.cwd / "w" / "model.safetensors").exists()
    assert (sm120.cwd / "w" / "config.json").exists()


def test_a_target_that_cannot_be_written_is_explained(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    (sm120.cwd / "w").write_bytes(b"")
    ended = sm120("weights", "fetch", "tiny", "--output", "w")
    assert ended.error == "StoreUnwritable"
    assert "--output" in ended.err


def test_offline_by_the_hubs_own_variable(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm120("weights", "lock", "tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert sm120("weights", "lock", "tiny").error == "OfflineMiss"
    assert sm120("weights", "fetch", "tiny", "--output", "w").error == "OfflineMiss"
    assert hub.asked == []


def test_any_model_is_locked_and_fetched_by_its_name_on_the_hub(
    hub: TestHub, sm120: Command
) -> None:
    commit = hub.add("Some-Org/New_Model", FILES)
    ended = sm120("weights", "lock", "Some-Org/New_Model")
    assert ended.code == 0, ended.err
    assert f"3 files, 102.4 kB, commit {commit}, locked" in ended.out
    assert not (sm120.cwd / "lockfiles/weights/some-org--new+model.yaml").exists()
    hub.add("Some-Org/New_Model", {**FILES, "config.json": b"{}"})
    fetched = sm120("weights", "fetch", "Some-Org/New_Model", "--output", "w", "--json").json
    assert (fetched["commit"], len(fetched["brought"])) == (commit, 3)
    assert sm120("weights", "verify", "w").code == 0
    rows = {row["name"]: row for row in sm120("weights", "list", "--json").json}
    assert rows["some-org--new+model"]["repository"] == "Some-Org/New_Model"
    assert "some-org--new+model" in sm120("weights", "list").out
    assert "current" in sm120("weights", "lock", "--check", "Some-Org/New_Model").out


def test_a_model_is_fetched_outside_a_checkout_and_its_folder_keeps_the_commit(
    hub: TestHub, sm120: Command
) -> None:
    (sm120.cwd / "images").rmdir()
    first = hub.add("org/other", FILES)
    hub.fail("model.safetensors", fault.status(403), times=ALWAYS)
    assert sm120("weights", "fetch", "org/other", "--output", "w").code != 0
    hub.forgive()
    # the branch moved while the first run was away: what is half here must stay of one commit
    second = hub.add("org/other", {**FILES, "config.json": b"{}"})
    assert sm120("weights", "fetch", "org/other", "--output", "w", "--json").json["commit"] == first
    assert (sm120.cwd / "w/config.json").read_bytes() == FILES["config.json"]
    hub.asked.clear()
    assert sm120("weights", "fetch", "org/other", "--output", "w", "--offline").code == 0
    assert hub.asked == []
    new = sm120("weights", "fetch", "org/other", "--output", "w2", "--hub-cache", "--json").json
    assert new["commit"] == second
    again = sm120("weights", "fetch", "org/other", "--output", "w2", "--hub-cache", "--offline")
    assert again.code == 0, again.err


def test_a_revision_is_fetched_by_its_name_or_commit(hub: TestHub, sm120: Command) -> None:
    old = hub.add("org/other", FILES, "v1")
    hub.add("org/other", {"config.json": b"{}"})
    for revision in ("v1", old):
        fetch = ("weights", "fetch", f"org/other@{revision}", "--output", revision, "--json")
        assert sm120(*fetch).json["commit"] == old
    assert sm120("weights", "fetch", "org/other@v2", "--output", "w").error == "HubRefused"


def test_two_models_do_not_share_a_folder(hub: TestHub, sm120: Command) -> None:
    hub.add("org/other", FILES)
    assert sm120("weights", "fetch", "org/tiny", "--output", "w").code == 0
    before = sorted(p for p in (sm120.cwd / "w/.sm120").rglob("*"))
    assert sm120("weights", "fetch", "org/other", "--output", "w").error == "SpecInvalid"
    assert sorted(p for p in (sm120.cwd / "w/.sm120").rglob("*")) == before


@pytest.mark.parametrize("name", ["../tiny", "org/tiny@../../x", "org/tiny/x", "org/ti\nny"])
@pytest.mark.parametrize("verb", [("lock",), ("fetch", "--output", "w")])
def test_a_name_that_the_hub_cannot_have_asks_and_writes_nothing(
    hub: TestHub, sm120: Command, name: str, verb: tuple[str, ...]
) -> None:
    # what begins with a dot is a folder of weights to `lock`, and this one is not there
    error = "WeightsUnknown" if (verb[0], name) == ("lock", "../tiny") else "SpecInvalid"
    assert sm120("weights", verb[0], name, *verb[1:]).error == error
    assert hub.asked == []
    assert not (sm120.cwd / "w").exists()


def test_a_spec_is_saved_from_a_model_with_a_choice_of_files(hub: TestHub, sm120: Command) -> None:
    hub.add("org/other", FILES)
    lock = ("weights", "lock", "org/other", "--include", "*.json", "--include", "*.py")
    assert sm120(*lock).code == 2
    assert sm120(*lock, "--save", "tiny").error == "SpecInvalid"
    assert sm120(*lock, "--save", "../mine").code == 2
    assert sm120(*lock, "--save", "mine", "--dry-run").code == 0
    spec = sm120.cwd / "lockfiles/weights/mine.yaml"
    assert not spec.exists()
    saved = sm120(*lock, "--save", "mine")
    assert saved.code == 0, saved.err
    assert "spec: lockfiles/weights/mine.yaml" in saved.out
    assert sm120("weights", "fetch", "mine", "--output", "w", "--json").json["files"] == 2
    spec.write_text(spec.read_text().replace("- '*.py'\n", ""))
    assert sm120("weights", "fetch", "mine", "--output", "w").error == "LockStale"


def test_a_dry_run_says_what_would_be_fetched_and_writes_nothing(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm120("weights", "lock", "tiny")
    fetch = ("weights", "fetch", "tiny", "--output", "w")
    shown = sm120(*fetch, "--dry-run")
    assert "w: 102.4 kB would be fetched" in shown.out
    assert not (sm120.cwd / "w").exists()
    assert hub.bodies() == []
    sm120(*fetch, "--only", "*.json")
    planned = sm120(*fetch, "--dry-run", "--json").json
    states = {file["path"]: file["fetch_bytes"] for file in planned["files"]}
    assert states == {"config.json": 0, "model.safetensors": 102400, "modeling.py": 8}
    assert planned["fetch_bytes"] == 102408
    on_a_file = sm120("weights", "fetch", "tiny", "--output", "w/config.json", "--dry-run")
    assert on_a_file.error == "StoreUnwritable"
    monkeypatch.setattr(fetch_module, "LEAVE_FREE_BYTES", 1 << 60)
    assert sm120(*fetch, "--dry-run").error == "DiskFull"


def test_files_are_left_out_by_a_pattern(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    fetch = ("weights", "fetch", "tiny", "--output", "w")
    assert sm120(*fetch, "--exclude", "*").error == "WeightsUnknown"
    ended = sm120(*fetch, "--exclude", "*.safetensors", "--json").json
    assert (sorted(ended["brought"]), ended["statement"]) == (["config.json", "modeling.py"], None)
    assert not (sm120.cwd / "w/model.safetensors").exists()
    assert sm120("weights", "verify", "w", "--exclude", "*.safetensors").code == 0
    assert sm120("weights", "verify", "w").code == 60
    only = sm120(*fetch, "--only", "*.safetensors", "--exclude", "model*")
    assert only.error == "WeightsUnknown"


def test_a_repair_after_a_fetch_takes_only_the_bad_block(hub: TestHub, sm120: Command) -> None:
    data = random.Random(3).randbytes(13 << 20)
    hub.add("org/tiny", {**FILES, "model.safetensors": data})
    sm120("weights", "lock", "tiny")
    assert sm120("weights", "fetch", "tiny", "--output", "w").code == 0
    path = sm120.cwd / "w" / "model.safetensors"
    for repair in (("verify", "w", "--repair"), ("fetch", "tiny", "--output", "w")):
        flip(path, 5 << 20)
        sent = hub.sent_bytes()
        ended = sm120("weights", *repair)
        assert ended.code == 0, ended.err
        assert hub.sent_bytes() - sent == 4 << 20
        assert path.read_bytes() == data


def test_swapped_files_are_put_right_also_where_a_disk_has_no_hard_links(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {f"model-{i}.safetensors": random.Random(i).randbytes(20_000) for i in range(2)}
    hub.add("org/tiny", {**FILES, **shards})
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "w")
    one, other = (sm120.cwd / "w" / name for name in shards)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr("os.link", no_link)
    sent = hub.sent_bytes()
    for verb in (("fetch", "tiny", "--output", "w", "--offline"), ("verify", "w", "--repair")):
        one.rename(sm120.cwd / "spare")
        other.rename(one)
        (sm120.cwd / "spare").rename(other)
        assert sm120("weights", *verb).code == 0
        assert {name: (sm120.cwd / "w" / name).read_bytes() for name in shards} == shards
        if verb[0] == "fetch":
            assert hub.sent_bytes() == sent


def test_a_dry_run_of_a_repair_says_its_cost_and_changes_nothing(
    hub: TestHub, sm120: Command
) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "w")
    assert sm120("weights", "verify", "w", "--dry-run").code == 2
    flip(sm120.cwd / "w/model.safetensors", 7)
    (sm120.cwd / "w/modeling.py").unlink()
    (sm120.cwd / "w/more.py").write_text("", encoding="utf-8")
    sent = hub.sent_bytes()
    ended = sm120("weights", "verify", "w", "--repair", "--dry-run")
    assert ended.code == 60
    assert "to be fetched only where they differ: model.safetensors, 102.4 kB" in ended.err
    assert "to be fetched whole: modeling.py, 8 B" in ended.err
    assert hub.sent_bytes() == sent
    assert not (sm120.cwd / "w/modeling.py").exists()
    assert (sm120.cwd / "w/more.py").exists()


@pytest.mark.parametrize(
    "place", ["nonsense", "10.0.0.7", ":8790", "host:", "host:99999", "host:x"]
)
def test_an_address_to_share_at_that_is_none_is_refused(
    hub: TestHub, sm120: Command, place: str
) -> None:
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--share", place)
    assert ended.error == "SpecInvalid"
    assert f"--share {place}: is not ADDRESS:PORT" in ended.err
    assert not (sm120.cwd / "w" / "config.json").exists()


def test_a_port_that_is_taken_is_an_error_before_the_first_byte(
    hub: TestHub, sm120: Command
) -> None:
    sm120("weights", "lock", "tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        share = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = sm120("weights", "fetch", "tiny", "--output", "w", "--share", share)
    assert ended.error == "AddressUnusable"
    assert not (sm120.cwd / "w" / "config.json").exists()


@pytest.mark.parametrize(
    ("peers", "error"),
    [("ftp://rig1:8790", "SpecInvalid"), ("http://rig1:8790,http://", "SpecInvalid")],
)
def test_peers_that_are_no_addresses_are_refused(
    hub: TestHub, sm120: Command, peers: str, error: str
) -> None:
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--peers", peers)
    assert ended.error == error
    assert "is not an http address" in ended.err


def test_a_fetch_with_peers_says_what_came_from_whom(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    nobody = ("--peers", "http://127.0.0.1:9", "--share", "127.0.0.1:0")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", *nobody)
    assert ended.code == 0, ended.err
    assert "; 0 B from peers, 102.4 kB not" in ended.out
    assert "sharing at http://127.0.0.1:" in ended.err
    size = sum(map(len, FILES.values()))
    got = sm120("weights", "fetch", "tiny", "--output", "x", *nobody, "--json").json
    assert (got["peer_bytes"], got["origin_bytes"]) == (0, size)


def test_nothing_listens_and_nobody_is_asked_unless_it_is_asked_for(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(server: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("pipeline.weights.serve.server.HubServer.listen", refuse)
    sm120("weights", "lock", "tiny")
    assert sm120("weights", "fetch", "tiny", "--output", "w").code == 0
    got = sm120("weights", "fetch", "tiny", "--output", "x", "--peers", "http://127.0.0.1:9")
    assert got.code == 0, got.err


def test_peers_come_from_an_inventory(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def hosts(checkout: Checkout, arguments: list[str], playbook: str) -> Iterator[list[Promised]]:
        assert (arguments, playbook) == (["--inventory", "rack.ini"], "connection.yml")
        places = ["10.0.0.7", "fd00::8", "10.0.0.7"]
        yield [
            Promised(host=f"rig{n}", connection=HostConnection(address=place))
            for n, place in enumerate(places)
        ]

    seen: list[str] = []

    def ask(group: PeerGroup, peer: Peer) -> None:
        seen.append(peer.route.repository.endpoint)
        group._begun.release()

    monkeypatch.setattr("pipeline.app.weights_hub.promises_of", hosts)
    monkeypatch.setattr(PeerGroup, "_ask", ask)
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--peers", "rack.ini")
    assert ended.code == 0, ended.err
    assert sorted(seen) == ["http://10.0.0.7:8790", "http://[fd00::8]:8790"]


def test_peers_are_not_asked_offline(hub: TestHub, sm120: Command) -> None:
    sm120("weights", "lock", "tiny")
    sm120("weights", "fetch", "tiny", "--output", "one")
    offline = ("--peers", "http://127.0.0.1:9", "--offline", "--from", "one")
    ended = sm120("weights", "fetch", "tiny", "--output", "two", *offline)
    assert ended.error == "SpecInvalid"
    assert "--offline allows no network" in ended.err


def test_ctrl_c_while_others_still_fetch_ends_only_the_sharing(
    hub: TestHub, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(group: PeerGroup) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PeerGroup, "wait", interrupted)
    sm120("weights", "lock", "tiny")
    ended = sm120("weights", "fetch", "tiny", "--output", "w", "--share", "127.0.0.1:0")
    assert ended.code == 0, ended.err
    assert "3 files are right, 3 of them new" in ended.out

"""Weights and hosts that were checked: what was found is stated beside them, good or bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.app.signing import Signing
from pipeline.app.statements import state_host
from pipeline.artifacts.attest.envelope import Envelope, countersigned, read_envelope
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key, write_key
from pipeline.hosts.fleet.playbook import Played
from pipeline.weights.place import LockedFolder
from pipeline.weights.sign.record import weights_record_path
from tests.testbed.locked_set import SMALL, make_set
from tests.unit.cli.test_stage_statements import folder
from tests.unit.hosts.machines import blackwell, facts
from tests.unit.support import ROOT, Command, Ended, build_tiny

AMD64 = "linux/amd64"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LockedFolder:
    monkeypatch.setattr("pipeline.weights.disk.receipt.CLOCK_TICK_NS", -(10**9))
    return make_set(tmp_path / "set", SMALL, {"model.safetensors": b"weights" * 1000})


def statement_of(place: LockedFolder) -> Envelope:
    return read_envelope(weights_record_path(place).read_bytes(), "it")


def verified(sm120: Command, place: LockedFolder, *more: str) -> Ended:
    return sm120("weights", "verify", str(place.root), *more)


def test_a_verify_of_weights_states_what_it_found(weights: LockedFolder, sm120: Command) -> None:
    ended = verified(sm120, weights)
    assert ended.code == 0, ended.err
    assert f"statement: {weights_record_path(weights)}, unsigned" in ended.out
    verification = statement_of(weights).statement.predicate["verification"]
    assert (verification["result"], verification["how"]) == ("verified", "full")
    assert sm120("verify", str(weights.root)).error == "EvidenceUnsigned"
    sm120("evidence", "new-key", "me")
    assert "signed by me" in verified(sm120, weights).out
    assert statement_of(weights).statement.predicate["verification"]["how"] == "receipt"
    assert sm120("verify", str(weights.root)).code == 0


def test_damaged_weights_are_stated_too(weights: LockedFolder, sm120: Command) -> None:
    path = weights.root / "model.safetensors"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    ended = verified(sm120, weights, "--json")
    assert ended.error == "WeightsDamaged"
    assert json.loads(ended.out)["statements"][0]["state"] == "unsigned"
    verification = statement_of(weights).statement.predicate["verification"]
    assert verification["result"] == "damaged"
    assert "model.safetensors" in verification["why"][0]
    assert sm120("verify", str(weights.root)).error == "EvidenceBroken"


def test_a_verify_of_some_files_states_nothing_of_the_set(
    weights: LockedFolder, sm120: Command
) -> None:
    assert verified(sm120, weights, "--only", "config.json").code == 0
    assert not weights_record_path(weights).exists()


def test_what_somebody_else_signed_of_weights_is_left_as_it_is(
    weights: LockedFolder, sm120: Command
) -> None:
    verified(sm120, weights)
    theirs = countersigned(statement_of(weights), LocalSigner(make_private_key())).dump()
    weights_record_path(weights).write_bytes(theirs)
    assert "left as it was, signed by sha256:" in verified(sm120, weights, "--full").out
    sm120("evidence", "new-key", "me")
    assert "left as it was" in verified(sm120, weights).out
    assert weights_record_path(weights).read_bytes() == theirs


def test_a_signing_program_that_fails_does_not_hide_what_a_verify_found(
    weights: LockedFolder, sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = write_key(tmp_path / "hsm.pem", make_private_key())
    monkeypatch.setenv("SM120_SIGNING_AGENT", "/bin/false")
    monkeypatch.setenv("SM120_SIGNING_PUBLIC_KEY", str(public))
    ended = verified(sm120, weights)
    assert ended.code == 0, ended.err
    assert "unsigned (/bin/false: exit code 1" in ended.out
    assert "as locked" in ended.out
    assert statement_of(weights).signatures == ()


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, bytes(17 << 20)])
def test_junk_in_the_place_of_a_statement_is_replaced(
    weights: LockedFolder, built: str, sm120: Command, data: bytes
) -> None:
    (folder(built) / "provenance.dsse.json").write_bytes(data)
    (folder(built) / "evidence-set.dsse.json").write_bytes(data)
    (folder(built) / "stated.json").write_bytes(data)
    weights_record_path(weights).write_bytes(data)
    assert sm120("verify", "tiny").error in ("RecordInvalid", "EvidenceBroken")
    assert verified(sm120, weights).code == build_tiny(sm120).code == 0
    for artifact in ("tiny", str(weights.root)):
        assert sm120("verify", artifact).error == "EvidenceUnsigned"


def test_a_host_is_stated_beside_its_record(tmp_path: Path, sm120: Command) -> None:
    record = tmp_path / "n1.json"
    record.write_text(facts(blackwell(2), name="n1").model_dump_json())
    assert state_host(record, Signing()).state == "unsigned"
    assert sm120("verify", record).error == "EvidenceUnsigned"
    sm120("evidence", "new-key", "fleet")
    assert state_host(record, Signing()).state == "signed by fleet"
    assert sm120("verify", record).code == 0
    record.write_text(record.read_text().replace("n1", "n2", 1))
    assert sm120("verify", record).error == "EvidenceBroken"


def test_statements_beside_host_records_are_not_taken_for_records(
    tmp_path: Path, sm120: Command
) -> None:
    for name in ("n1", "n2"):
        record = tmp_path / f"{name}.json"
        record.write_text(facts(blackwell(2), name=name).model_dump_json())
        state_host(record, Signing())
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 4
    assert sm120("host", "outliers", *files).error in ("", "HostOutlier")
    sm120("evidence", "new-key", "fleet")
    signed = sm120("host", "attest", *files)
    assert (signed.code, len(signed.out.splitlines())) == (0, 2), signed.err


def test_a_provisioning_run_states_each_host_that_came_to_its_end(
    tmp_path: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(checkout: object, name: str, arguments: list[str]) -> Played:
        captures = tmp_path / "records" / "captures"
        captures.mkdir(parents=True)
        for name in ("n1.before", "n1.after", "n2.before"):
            text = blackwell(2).model_dump_json(exclude_none=True)
            (captures / f"{name}.json").write_text(text)
        return Played(0, [], [], [])

    monkeypatch.setattr("pipeline.app.hosts.stream_playbook", play)
    (tmp_path / "hosts.yml").touch()
    output = sm120("--checkout", ROOT, "host", "rollback", "-i", tmp_path / "hosts.yml").out
    assert f"statement: {tmp_path}/records/n1.json.dsse.json, unsigned" in output
    assert "n2" not in output.replace(str(tmp_path), "")
    assert sm120("verify", tmp_path / "records" / "n1.json").error == "EvidenceUnsigned"

"""Each stage leaves its statement by itself: build, gate, weights, provisioning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.app.signing import Signing
from pipeline.artifacts.attest.envelope import Envelope, enclose, read_envelope
from pipeline.artifacts.attest.keys import make_private_key, write_key
from pipeline.artifacts.store.store import Store, default_root, open_store
from pipeline.core.errors import GateFailed
from pipeline.core.verdict import GateVerdict
from pipeline.evidence.statements.evidence_set import evidence_folder
from pipeline.images.assemble.image import Built
from pipeline.images.gate.evidence import Evidence, EvidenceRow, keep_evidence
from pipeline.images.gate.stage import Staged
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import Command, build_tiny, make_checkout, make_wheel, write_spec
from tests.unit.support import tiny_spec as spec_of

AMD64 = "linux/amd64"


def store() -> Store:
    return open_store(default_root())


def folder(digest: str) -> Path:
    return evidence_folder(store(), "tiny", AMD64, digest)


def kept(digest: str) -> dict[str, Envelope]:
    paths = sorted(folder(digest).glob("*.dsse.json"))
    return {p.name.partition(".")[0]: read_envelope(p.read_bytes(), p.name) for p in paths}


def own_keys() -> Path:
    return Path(os.environ["HOME"]) / ".config" / "sm120" / "keys"


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Every file that is no lock, with its inode and time of change."""
    files = {p: p.stat() for p in root.rglob("*") if p.is_file() and "locks" not in p.parts}
    return {str(p): (s.st_ino, s.st_mtime_ns) for p, s in files.items()}


def test_a_build_leaves_its_statements_and_says_where_and_that_nobody_signed(
    checkout: Checkout, sm120: Command
) -> None:
    ended = build_tiny(sm120, "--accept")
    assert ended.code == 0, ended.err
    assert "image  evidence  statements" in ended.out
    assert "tiny   unsigned  provenance, sbom-cyclonedx, evidence-set" in ended.out
    (digest,) = {p.name for p in store().root.glob("images/tiny/*/records/*")}
    assert str(folder(digest)) in ended.out
    assert set(kept(digest)) == {"provenance", "sbom-cyclonedx", "evidence-set"}
    assert all(not e.signatures for e in kept(digest).values())


def test_what_was_just_built_is_valid_but_unsigned_with_its_whole_tree(
    built: str, sm120: Command
) -> None:
    ended = sm120("verify", "tiny")
    assert ended.error == "EvidenceUnsigned"
    assert "valid but unsigned" in ended.err
    assert "sm120 evidence new-key NAME" in ended.err
    for part in ("layers", "builder", "1 wheel", "Debian package", "patch", "golden digest"):
        assert part in ended.out
    assert "there is no evidence" not in ended.out
    answer = json.loads(sm120("verify", "tiny", "--json").out)
    assert answer["verdict"] == "unsigned"


def test_with_a_key_made_in_one_command_it_is_valid(built: str, sm120: Command) -> None:
    made = sm120("evidence", "new-key", "me")
    assert made.code == 0, made.err
    assert "tiny for linux/amd64: its statements are signed" in made.err
    assert made.out.startswith("- name: me\n")
    ended = sm120("verify", "tiny")
    assert ended.code == 0, ended.err
    assert "by me" in ended.out


def test_with_a_key_the_next_build_is_signed_as_it_finishes(
    checkout: Checkout, sm120: Command
) -> None:
    sm120("evidence", "new-key", "me")
    ended = build_tiny(sm120, "--accept")
    assert "tiny   signed by me  provenance" in ended.out
    assert sm120("verify", "tiny").code == 0
    sm120("evidence", "new-key", "second")
    again = build_tiny(sm120)
    assert "signed by me  " in again.out, "the first key goes on signing"


def test_a_build_with_nothing_to_do_writes_nothing(built: str, sm120: Command) -> None:
    build_tiny(sm120)
    before = snapshot(store().root)
    ended = build_tiny(sm120)
    assert "nothing to do" in ended.out
    assert "tiny   unsigned  provenance" in ended.out
    assert snapshot(store().root) == before


def test_a_build_by_an_earlier_version_is_stated_when_it_is_built_again(
    built: str, sm120: Command
) -> None:
    for path in folder(built).iterdir():
        path.unlink()
    folder(built).rmdir()
    assert "there is no evidence for it; `sm120 build tiny` states" in sm120("verify", "tiny").err
    assert "nothing to do" in build_tiny(sm120).out
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"


@pytest.mark.parametrize("name", ["provenance", "sbom-cyclonedx", "evidence-set"])
def test_a_statement_that_is_gone_is_made_again(built: str, sm120: Command, name: str) -> None:
    (folder(built) / f"{name}.dsse.json").unlink()
    assert sm120("verify", "tiny").error in ("EvidenceBroken", "EvidenceIncomplete")
    build_tiny(sm120)
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"


def test_a_changed_spec_of_the_same_image_is_stated_anew(
    checkout: Checkout, built: str, sm120: Command
) -> None:
    write_spec(checkout, spec_of(summary="the same bytes in other words"))
    stale = sm120("verify", "tiny")
    ended = build_tiny(sm120, "--accept")
    assert ended.code == 0, ended.err
    assert stale.error == "EvidenceStale"
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"


def test_the_same_lock_gives_the_same_statements_elsewhere_but_for_the_time(
    tmp_path: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores: list[dict[str, bytes]] = []
    for place in ("here", "far/away/from/here"):
        root = tmp_path / place
        make_checkout(root, [make_wheel(root / "mirror", "thing")])
        monkeypatch.setenv("SM120_STORE", str(root / "some store"))
        monkeypatch.setenv("TZ", "Asia/Tokyo" if cores else "UTC")
        where = ("--checkout", root, "build", "tiny", "--offline", "--mirror", root / "mirror")
        ended = sm120(*where, "--accept", "--json")
        assert ended.code == 0, ended.err
        envelopes = kept(ended.json[0]["digest"])
        cores.append({n: e.statement.core() for n, e in envelopes.items() if n != "evidence-set"})
        payloads = b"".join(e.payload for e in envelopes.values())
        assert str(tmp_path).encode() not in payloads
    assert cores[0] == cores[1]
    core = json.loads(cores[0]["provenance"])["predicate"]
    assert "metadata" not in core["runDetails"]


def test_a_key_is_offered_once(checkout: Checkout, sm120: Command) -> None:
    offered = [build_tiny(sm120, *more).err for more in (("--accept",), (), ())]
    assert ["sm120 evidence new-key NAME" in err for err in offered] == [True, False, False]
    assert all(ended.code == 0 for ended in [build_tiny(sm120)])


def test_with_a_key_none_is_offered(checkout: Checkout, sm120: Command) -> None:
    sm120("evidence", "new-key", "me")
    assert "keys new" not in build_tiny(sm120, "--accept").err


def test_a_named_key_that_is_no_good_ends_a_build_before_it_begins(
    checkout: Checkout, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_SIGNING_KEY", "nothing")
    ended = build_tiny(sm120, "--accept")
    assert ended.error == "KeyInvalid"
    assert store().image_record("tiny", AMD64) is None


def test_an_own_key_that_needs_its_passphrase_leaves_a_build_unsigned_and_says_why(
    checkout: Checkout, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_KEY_PASSPHRASE", "secret")
    sm120("evidence", "new-key", "guarded")
    monkeypatch.delenv("SM120_KEY_PASSPHRASE")
    ended = build_tiny(sm120, "--accept")
    assert ended.code == 0, ended.err
    assert "unsigned (" in ended.out
    assert "needs its passphrase" in ended.out
    before = snapshot(store().root)
    assert build_tiny(sm120).code == 0
    assert snapshot(store().root) == before
    monkeypatch.setenv("SM120_KEY_PASSPHRASE", "secret")
    assert "signed by guarded" in build_tiny(sm120).out
    assert sm120("verify", "tiny").code == 0


def test_an_open_own_key_signs_nothing(checkout: Checkout, sm120: Command) -> None:
    sm120("evidence", "new-key", "me")
    (own_keys() / "me.pem").chmod(0o644)
    assert "others can read it" in build_tiny(sm120, "--accept").out
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"


def test_a_key_made_elsewhere_is_neither_used_nor_trusted_by_itself(
    built: str, sm120: Command, tmp_path: Path
) -> None:
    sm120("evidence", "new-key", "me", "--output", tmp_path / "usb")
    assert "unsigned" in build_tiny(sm120).out
    sm120("evidence", "make", "tiny", "--key", tmp_path / "usb" / "me.pem")
    assert sm120("verify", "tiny").error == "EvidenceIncomplete"


def test_a_trust_file_has_the_last_word_on_an_own_key(
    checkout: Checkout, built: str, sm120: Command
) -> None:
    entry = sm120("evidence", "new-key", "me").out
    assert sm120("verify", "tiny").code == 0
    gone = "  revoked: {since: 2026-01-01T00:00:00Z, reason: was stolen, compromised: true}\n"
    path = checkout.root / "lockfiles" / "trust.yaml"
    path.write_text(f"format: 1\nkeys:\n{entry}{gone}")
    assert sm120("verify", "tiny").error == "EvidenceBroken"
    other = sm120("evidence", "new-key", "other", "--output", checkout.root / "x").out
    path.write_text(f"format: 1\nkeys:\n{other.replace('- name: other', '- name: me')}")
    assert sm120("verify", "tiny").code == 0, "another key of the same name"
    assert sm120("verify", "tiny", "--trust", path).error == "EvidenceBroken", (
        "a named file stands alone"
    )


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an unsigned statement as whoever can write to a store could."""
    envelope = read_envelope(path.read_bytes(), path.name)
    body = envelope.statement.model_dump(mode="json", by_alias=True)
    change(body["predicate"])
    path.write_bytes(enclose(type(envelope.statement).model_validate(body)).dump())


def lie_about_a_wheel(digest: str) -> None:
    def change(predicate: dict[str, Any]) -> None:
        predicate["buildDefinition"]["resolvedDependencies"][0]["digest"]["sha256"] = "0" * 64

    rewrite(folder(digest) / "provenance.dsse.json", change)


def drop_from_the_bill(digest: str) -> None:
    def change(predicate: dict[str, Any]) -> None:
        predicate["components"] = predicate["components"][:-1]

    rewrite(folder(digest) / "sbom-cyclonedx.dsse.json", change)


def damage(digest: str) -> None:
    (folder(digest) / "sbom-cyclonedx.dsse.json").write_bytes(b"{}")


def delete(digest: str) -> None:
    (folder(digest) / "sbom-cyclonedx.dsse.json").unlink()


def plant_a_result(digest: str) -> None:
    envelope = enclose(kept(digest)["provenance"].statement)
    (folder(digest) / "gate-numerics-sm_120.dsse.json").write_bytes(envelope.dump())


def date(digest: str, name: str, *places: str) -> None:
    """Say that a statement was made in a time that is in the future."""

    def change(predicate: dict[str, Any]) -> None:
        *above, last = places
        for place in above:
            predicate = predicate[place]
        predicate[last] = "9999-12-31T23:59:59Z"

    rewrite(folder(digest) / f"{name}.dsse.json", change)


def date_the_provenance(digest: str) -> None:
    date(digest, "provenance", "runDetails", "metadata", "finishedOn")


def date_the_bill(digest: str) -> None:
    date(digest, "sbom-cyclonedx", "metadata", "timestamp")


def date_the_set(digest: str) -> None:
    date(digest, "evidence-set", "sm120_recorded", "at")


def add_beside_the_time(digest: str) -> None:
    def change(predicate: dict[str, Any]) -> None:
        predicate["sm120_recorded"]["note"] = "all gates passed"

    rewrite(folder(digest) / "evidence-set.dsse.json", change)


def add_beside_the_run(digest: str) -> None:
    def change(predicate: dict[str, Any]) -> None:
        predicate["runDetails"]["metadata"]["startedOn"] = "never"

    rewrite(folder(digest) / "provenance.dsse.json", change)


def change_the_set(digest: str) -> None:
    rewrite(folder(digest) / "evidence-set.dsse.json", lambda p: p["statements"].pop())


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lie_about_a_wheel, "provenance does not match the image"),
        (drop_from_the_bill, "sbom-cyclonedx does not match the image"),
        (damage, "sbom-cyclonedx cannot be read"),
        (delete, "sbom-cyclonedx is missing"),
        (plant_a_result, "gate-numerics-sm_120 is unsigned"),
        (change_the_set, "evidence-set lists other statements"),
        (date_the_provenance, "provenance is dated in the future"),
        (date_the_bill, "sbom-cyclonedx is dated in the future"),
        (date_the_set, "evidence-set is dated in the future"),
        (add_beside_the_time, "evidence-set lists other statements"),
        (add_beside_the_run, "provenance does not match the image"),
    ],
)
def test_a_new_key_signs_nothing_that_is_not_true(
    built: str, sm120: Command, lie: Callable[[str], None], reason: str
) -> None:
    lie(built)
    made = sm120("evidence", "new-key", "me")
    assert made.code == 0, made.err
    assert f"not signed: {reason}" in made.err
    for path in folder(built).glob("*.dsse.json"):
        assert b'"keyid"' not in path.read_bytes()
    assert sm120("verify", "tiny").code != 0


@pytest.mark.parametrize(
    "lie", [lie_about_a_wheel, damage, change_the_set, date_the_provenance, date_the_set]
)
def test_what_was_not_signed_is_valid_once_it_is_recorded_anew(
    built: str, sm120: Command, lie: Callable[[str], None]
) -> None:
    lie(built)
    assert "`sm120 evidence make tiny` replaces it" in sm120("evidence", "new-key", "me").err
    assert sm120("evidence", "make", "tiny").code == 0
    ended = sm120("verify", "tiny")
    assert ended.code == 0, ended.err


def test_a_statement_of_nobody_is_to_be_removed_and_its_name_stays_on_its_line(
    built: str, sm120: Command
) -> None:
    envelope = enclose(kept(built)["provenance"].statement)
    planted = folder(built) / "gate\ntiny: its statements are signed.dsse.json"
    planted.write_bytes(envelope.dump())
    (line,) = [x for x in sm120("evidence", "new-key", "me").err.splitlines() if "tiny" in x]
    assert f"look at it in {folder(built)}, and remove it" in line
    planted.unlink()
    assert sm120("evidence", "make", "tiny").code == 0
    assert sm120("verify", "tiny").code == 0


def test_a_false_signature_under_ones_own_name_is_replaced(built: str, sm120: Command) -> None:
    assert sm120("evidence", "new-key", "me").code == 0
    for path in folder(built).glob("*.dsse.json"):
        envelope = read_envelope(path.read_bytes(), path.name)
        (mine,) = envelope.signatures
        false = replace(envelope, signatures=(replace(mine, sig=b"0" * 70),))
        path.write_bytes(false.dump())
    assert sm120("verify", "tiny").error == "EvidenceBroken"
    assert sm120("evidence", "make", "tiny").code == 0
    assert sm120("verify", "tiny").code == 0


def test_a_pipe_in_the_place_of_what_gates_found_is_told_with_what_to_do(
    built: str, sm120: Command
) -> None:
    os.mkfifo(store().image_folder("tiny", AMD64) / "gates.json")
    ended = sm120("build", "tiny", "--offline")
    assert ended.error == "StoreDamaged"
    assert "the record of its gates cannot be read" in ended.err
    assert "sm120 build tiny --gate" in ended.err


def test_a_memory_that_names_no_statements_is_not_believed(built: str, sm120: Command) -> None:
    memory = folder(built) / "stated.json"
    memo = json.loads(memory.read_bytes())
    memory.write_text(json.dumps({**memo, "statements": [], "signed_by": ["sha256:" + "a" * 64]}))
    for path in folder(built).glob("*.dsse.json"):
        path.unlink()
    again = build_tiny(sm120)
    assert "unsigned" in again.out
    assert {"provenance", "evidence-set"} <= kept(built).keys()


def test_more_statements_than_a_set_can_name_are_told_in_one_line(
    built: str, sm120: Command
) -> None:
    statement = kept(built)["provenance"].statement
    for number in range(1001):
        other = statement.model_copy(update={"predicate": {"number": number}})
        (folder(built) / f"x{number}.dsse.json").write_bytes(enclose(other).dump())
    ended = sm120("evidence", "make", "tiny", "--unsigned")
    assert (ended.error, "1003 statements, more than 1000" in ended.err) == (
        "RecordInvalid",
        True,
    ), ended.err


def test_a_new_key_signs_no_image_that_the_checkout_no_longer_describes(
    checkout: Checkout, built: str, sm120: Command
) -> None:
    write_spec(checkout, spec_of(labels={"made": "later"}))
    made = sm120("evidence", "new-key", "me")
    assert "not signed: the checkout has changed since" in made.err
    assert all(not e.signatures for e in kept(built).values())


def gate_evidence(verdict: GateVerdict, gate: str = "smem") -> Evidence:
    rows = [EvidenceRow(name="case-1", verdict=verdict, message="needs 106496 bytes")]
    given = {"gate": gate, "arch": "sm_120", "verdict": verdict, "inputs": {}, "made_by": {}}
    return Evidence.model_validate({**given, "rows": rows})


@pytest.mark.parametrize(
    ("verdict", "unsigned", "signed"),
    [
        ("passed", "EvidenceUnsigned", ""),
        ("failed", "EvidenceBroken", "EvidenceBroken"),
        ("unknown", "EvidenceIncomplete", "EvidenceIncomplete"),
    ],
)
def test_gates_as_part_of_a_build_leave_what_they_found_good_or_bad(
    checkout: Checkout,
    sm120: Command,
    monkeypatch: pytest.MonkeyPatch,
    verdict: GateVerdict,
    unsigned: str,
    signed: str,
) -> None:
    def judge(shop: Any, built: Built) -> Staged:
        gates = [gate_evidence(verdict), gate_evidence(verdict, "numerics")]
        kept = keep_evidence(shop.store, built.name, built.platform, built.digest, gates)
        bad = GateFailed("too much") if verdict == "failed" else None
        return Staged(kept, {}, None, bad)

    monkeypatch.setattr("pipeline.images.gate.stage.judge_built", judge)
    write_spec(checkout, spec_of(gates=["smem"]))
    built = build_tiny(sm120, "--accept", "--json")
    not_run = sm120("verify", "tiny")
    assert (not_run.error, "not run yet: smem" in not_run.out) == ("EvidenceUnsigned", True)
    gated = build_tiny(sm120, "--gate")
    assert gated.error == ("GateFailed" if verdict == "failed" else ""), gated.err
    assert "gate-smem-sm_120, gate-numerics-sm_120, evidence-set" in gated.out
    assert "gate-smem-sm_120" in kept(built.json[0]["digest"])
    ended = sm120("verify", "tiny")
    assert ended.error == unsigned, ended.out
    assert sm120("evidence", "new-key", "me").code == 0
    assert sm120("verify", "tiny").error == signed


def test_a_damaged_record_of_gates_is_told_and_replaced_by_gates_that_run(
    checkout: Checkout, built: str, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(shop: Any, built: Built) -> Staged:
        gates = [gate_evidence("passed")]
        kept = keep_evidence(shop.store, built.name, built.platform, built.digest, gates)
        return Staged(kept, {}, None, None)

    monkeypatch.setattr("pipeline.images.gate.stage.judge_built", judge)
    write_spec(checkout, spec_of(gates=["smem"]))
    assert build_tiny(sm120, "--accept").code == 0
    (store().image_folder("tiny", AMD64) / "gates.json").write_text("{")
    ended = build_tiny(sm120)
    assert (ended.error, "sm120 build tiny --gate" in ended.err) == ("StoreDamaged", True)
    assert build_tiny(sm120, "--gate").code == 0
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"


def test_a_failed_result_deleted_from_the_store_is_missed(
    checkout: Checkout, sm120: Command
) -> None:
    sm120("evidence", "new-key", "me")
    digest = build_tiny(sm120, "--accept", "--json").json[0]["digest"]
    keep_evidence(store(), "tiny", AMD64, digest, [gate_evidence("failed", "numerics")])
    build_tiny(sm120)
    assert sm120("verify", "tiny").error == "EvidenceBroken"
    (folder(digest) / "gate-numerics-sm_120.dsse.json").unlink()
    ended = sm120("verify", "tiny")
    assert ended.error == "EvidenceBroken"
    assert "numerics on sm_120, failed: is listed in the set, but missing" in ended.err


def test_of_several_own_keys_the_default_one_signs(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    keys = tmp_path / "sm120" / "keys"
    assert Signing(environment).key_id is None
    write_key(keys / "b.pem", make_private_key())
    only = Signing(environment)
    assert only.key_id == only.signers[0].key_id
    write_key(keys / "a.pem", make_private_key())
    assert Signing(environment).signers == ()
    (keys / "default").write_text("b\n")
    assert Signing(environment).signers[0].key_id == only.key_id
    for name in ("../b", "", "nobody", "b\nc", "\xff"):
        (keys / "default").write_bytes(name.encode("latin-1"))
        assert Signing(environment).signers == ()


def test_a_user_without_a_home_has_no_key_and_is_told_so_only_when_making_one(
    built: str, sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert "unsigned" in build_tiny(sm120).out
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"
    ended = sm120("evidence", "new-key", "me")
    assert (ended.error, "Set HOME" in ended.err) == ("KeyInvalid", True)
    assert sm120("evidence", "new-key", "me", "--output", tmp_path / "keys").code == 0


@pytest.mark.parametrize("junk", [b"", b"no key", bytes(1 << 17)])
def test_a_public_half_that_is_none_is_passed_over(built: str, sm120: Command, junk: bytes) -> None:
    sm120("evidence", "new-key", "me")
    (own_keys() / "other.pem").write_bytes(junk)
    (own_keys() / "other.pub").write_bytes(junk)
    assert sm120("verify", "tiny").code == 0
    assert [row["name"] for row in sm120("evidence", "list-keys", "--json").json] == ["me"]
    (own_keys() / "me.pub").write_bytes(junk)
    assert build_tiny(sm120).code == 0
    assert sm120("verify", "tiny").error == "EvidenceIncomplete", "nobody is trusted any more"

"""What a build states by itself: made once for the same inputs, signed only while it is true."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.keys import LocalSigner, key_id, make_private_key, public_pem
from pipeline.artifacts.attest.names import EVIDENCE_SET
from pipeline.artifacts.attest.predicates import check_predicate
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.artifacts.attest.strict import MAX_DEPTH, read_signed_json
from pipeline.artifacts.attest.trust import Trust, with_own_keys
from pipeline.core.errors import RecordInvalid
from pipeline.evidence.statements.evidence_set import readable, statements_folder, verdict_of
from pipeline.evidence.statements.image import record_rebuild
from pipeline.evidence.statements.stated import (
    FILE,
    SigningProblem,
    find_stated,
    sign_stated,
    state_image,
)
from tests.unit.verify.world import World, make_world, trust_in, trusted


@pytest.fixture
def stated_world(tmp_path: Path) -> World:
    return make_world(tmp_path / "stated")


def test_statements_are_made_once_for_the_same_inputs(stated_world: World) -> None:
    world = stated_world
    about = (world.checkout, world.store, world.built)
    assert find_stated(*about) is None
    made = state_image(*about, [])
    assert find_stated(*about) == made
    assert {"provenance", "sbom-cyclonedx", "evidence-set"} <= set(made.statements)
    assert made.signed_by == []
    folder = statements_folder(world.store, world.built)
    assert folder.parent.parent == world.store.image_folder("engine", world.built.platform)
    (folder / "provenance.dsse.json").rename(folder / "aside")
    assert find_stated(*about) is None
    (folder / "aside").rename(folder / "provenance.dsse.json")
    spec = world.checkout.folder("engine") / "image.yaml"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "summary": "of other words"}))
    plan = replace(world.built.plan, spec=world.checkout.spec("engine"))
    other = replace(world.built, plan=plan)
    assert find_stated(world.checkout, world.store, other) is None
    (folder / FILE).write_bytes(b"{}")
    assert find_stated(*about) is None


def test_what_is_true_is_signed_and_what_is_not_keeps_all_from_it(stated_world: World) -> None:
    world, signer = stated_world, LocalSigner(make_private_key())
    about = (world.checkout, world.store, world.built)
    state_image(*about, [])
    folder = statements_folder(world.store, world.built)
    lie = make_statement("engine", world.built.digest, "urn:of:others", {"it": "lies"})
    (folder / "note.dsse.json").write_bytes(enclose(lie, []).dump())
    wrong = sign_stated(*about, signer)
    assert wrong.pop("note") is SigningProblem.UNSIGNED_FOREIGN
    assert set(wrong) <= {"evidence-set"}
    assert not any(e.signatures for e in readable(folder).values())
    (folder / "note.dsse.json").unlink()
    assert sign_stated(*about, signer) == {}
    signed = find_stated(*about)
    assert signed is not None
    assert signed.signed_by == [signer.key_id]
    (folder / "provenance.dsse.json").write_bytes(b"junk")
    wrong = sign_stated(*about, signer)
    assert wrong["provenance"] is SigningProblem.UNREADABLE


def test_a_set_says_what_each_gate_and_each_rebuild_found(stated_world: World) -> None:
    statements = stated_world.statements
    assert verdict_of(statements["gate-smem-sm_120"]) == ("smem on sm_120", "passed")
    by = str(statements["rebuild"].predicate["rebuilt_by"])
    assert verdict_of(statements["rebuild"]) == (f"by {by[:19]}", "identical")
    assert verdict_of(statements["provenance"]) == (None, None)


def test_a_set_that_names_one_statement_twice_is_refused() -> None:
    one = {
        "predicate_type": "urn:of:others",
        "payload": "sha256:" + "1" * 64,
        "about": None,
        "verdict": None,
    }
    body = {"image": "engine", "platform": "linux/amd64", "statements": [one], "ungated": None}
    check_predicate(EVIDENCE_SET, body)
    with pytest.raises(RecordInvalid, match="named twice"):
        check_predicate(EVIDENCE_SET, {**body, "statements": [one, one]})


def test_json_is_as_deep_as_a_statement_may_be_and_no_deeper() -> None:
    assert read_signed_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, "it")
    with pytest.raises(RecordInvalid, match="deep"):
        read_signed_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "it")


def test_ones_own_keys_are_trusted_beside_those_of_the_file(tmp_path: Path) -> None:
    mine, other = make_private_key(), make_private_key()
    path = tmp_path / "builder.pub"
    path.write_text(public_pem(mine.public_key()))
    assert with_own_keys(None, []) is None
    alone = with_own_keys(None, [path, tmp_path / "absent.pub"])
    assert alone is not None
    (key,) = alone.keys
    assert (key.name, key.id) == ("builder", key_id(mine.public_key()))
    for year in (2000, 2026, 9998):
        now = datetime(year, 1, 2, tzinfo=UTC)
        assert key.objection("urn:of:others", None, now).endswith("urn:of:others")
        assert key.objection(EVIDENCE_SET, None, now) == ""
    both = with_own_keys(trust_in(trusted(other, "builder")), [path])
    assert both is not None
    assert [k.name for k in both.keys] == ["builder", "builder-own"]


def test_what_the_trust_file_says_of_ones_own_key_counts(tmp_path: Path) -> None:
    mine = make_private_key()
    path = tmp_path / "mine.pub"
    path.write_text(public_pem(mine.public_key()))
    listed = Trust.model_validate({"keys": [trusted(mine, "listed")], "bases": {}})
    assert with_own_keys(listed, [path]) == listed


def test_what_was_stated_while_the_clock_was_ahead_is_stated_again(
    stated_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, signer = stated_world, LocalSigner(stated_world.key)
    given = (world.checkout, world.store, world.built)
    ahead = moment(datetime.now(UTC) + timedelta(days=20))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.evidence.statements.stated.moment", lambda: ahead)
        stated = state_image(*given, [signer])
    record_rebuild(world.store, world.built, signer, "", ahead)
    assert stated.latest >= ahead.at
    assert find_stated(*given) is None
    again = state_image(*given, [signer])
    assert again.latest < ahead.at
    found = find_stated(*given)
    assert found
    assert found.statements == again.statements
    now = datetime.now(UTC)
    envelopes = readable(statements_folder(world.store, world.built))
    assert all(e.statement.has_happened(now) for e in envelopes.values())
    assert not [name for name in envelopes if name.startswith("rebuild")]

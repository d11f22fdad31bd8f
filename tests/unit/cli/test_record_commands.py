"""The commands about evidence, as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipeline.artifacts.attest.keys import key_id, read_private_file
from pipeline.artifacts.oci.layout import export_layout
from pipeline.core.errors import StoreDamaged
from tests.makers import AMD64
from tests.unit.support import Command, Ended
from tests.unit.verify.world import World, make_world


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("made"))


class Desk:
    """A user's checkout, store, key and trust file."""

    def __init__(self, made: World, place: Path, sm120: Command) -> None:
        self.place, self._sm120, self.made = place, sm120, made
        self.checkout = made.checkout_copy(place)
        shutil.copytree(made.store.root, place / "store")
        self.key, self.trust = place / "keys" / "me.pem", place / "trust.yaml"
        entry = self("evidence", "new-key", "me", "--output", place / "keys").out
        self.trust.write_text(f"format: 1\nkeys:\n{entry}")

    def __call__(self, *args: str | Path) -> Ended:
        root = self.checkout.root
        return self._sm120("--checkout", root, "--store", self.place / "store", *args)

    def record(self, *more: str | Path) -> Ended:
        return self("evidence", "make", "engine", "--key", self.key, *more)

    def verify(self, *more: str | Path) -> Ended:
        return self("verify", "engine", "--trust", self.trust, *more)

    @property
    def records(self) -> Path:
        folder = self.place / "store" / "images" / "engine" / "linux-amd64" / "records"
        return folder / self.made.built.digest.removeprefix("sha256:")


@pytest.fixture
def desk(made: World, tmp_path: Path, sm120: Command) -> Desk:
    return Desk(made, tmp_path, sm120)


def test_record_then_verify_is_valid(desk: Desk) -> None:
    assert desk.verify().error == "EvidenceIncomplete"
    done = desk.record()
    assert done.code == 0, done.err
    assert "provenance" in done.out
    verified = desk.verify()
    assert verified.code == 0, verified.err
    assert verified.out.splitlines()[0].endswith("  valid")
    assert "pkg-1.0" not in verified.out
    assert "pkg-1.0" in desk.verify("--all").out


def test_answers_can_be_had_as_json(desk: Desk) -> None:
    made = desk.record("--json").json
    assert {r["record"] for r in made["records"]} >= {"provenance", "gate-smem-sm_120"}
    assert desk.verify("--json").json["verdict"] == "valid"


def test_a_record_needs_a_key_or_the_word_unsigned(desk: Desk) -> None:
    assert desk("evidence", "make", "engine").error == "SigningFailed"
    assert desk("evidence", "make", "engine", "--unsigned").code == 0
    ended = desk.verify()
    assert ended.error == "EvidenceUnsigned"
    assert "nobody signed it" in ended.err


def test_a_key_comes_from_the_environment(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_SIGNING_KEY", desk.key.read_text())
    assert desk("evidence", "make", "engine").code == 0
    assert desk.verify().code == 0


def test_without_a_trust_file_the_answer_is_incomplete(desk: Desk) -> None:
    desk.record()
    assert desk("verify", "engine").error == "EvidenceIncomplete"


def test_the_checkouts_own_trust_file_is_used(desk: Desk) -> None:
    desk.record()
    shutil.copy(desk.trust, desk.checkout.root / "lockfiles" / "trust.yaml")
    assert desk("verify", "engine").code == 0
    assert desk("evidence", "list-keys").out.splitlines()[-1].startswith("me ")


def test_an_edited_patch_makes_it_stale(desk: Desk) -> None:
    desk.record()
    path = desk.checkout.folder("engine") / "patches" / "0001.patch"
    path.write_text(path.read_text() + "\n")
    ended = desk.verify()
    assert ended.error == "EvidenceStale"
    assert "images/engine/patches/0001.patch: has changed since" in ended.err


def test_a_swapped_statement_is_broken(desk: Desk) -> None:
    desk.record()
    shutil.copy(desk.records / "sbom-cyclonedx.dsse.json", desk.records / "provenance.dsse.json")
    path = desk.records / "sbom-cyclonedx.dsse.json"
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 5))
    assert desk.verify().error == "EvidenceBroken"


def test_a_flipped_bit_in_a_layer_is_broken(desk: Desk) -> None:
    desk.record()
    digest = desk.made.built.layers[0].record.digest.removeprefix("sha256:")
    path = desk.place / "store" / "oci" / "blobs" / "sha256" / digest
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    ended = desk.verify()
    assert ended.error == "EvidenceBroken"
    assert "layer 1 of " in ended.err
    assert "is really sha256:" in ended.err
    assert StoreDamaged.hint in ended.err


def test_a_layout_that_was_cut_short_is_no_set_of_weights(desk: Desk) -> None:
    folder = desk.place / "layout"
    export_layout(desk.made.store, desk.made.built.record, folder)
    (folder / "index.json").unlink()
    ended = desk("verify", folder)
    assert (ended.error, ended.code) == ("EvidenceBroken", 71)
    assert "layout: index.json is missing" in ended.err
    assert "Copy the folder again" in ended.err


def test_a_layout_is_verified_with_its_evidence(desk: Desk) -> None:
    desk.record()
    folder = desk.place / "layout"
    export_layout(desk.made.store, desk.made.built.record, folder)
    assert desk("verify", folder, "--trust", desk.trust).error == "EvidenceIncomplete"
    named = desk("verify", folder, "--trust", desk.trust, "--evidence", desk.records)
    assert named.code == 0, named.err
    shutil.copytree(desk.records, desk.place / "layout.records")
    assert desk("verify", folder, "--trust", desk.trust, "--platform", AMD64).code == 0
    assert (
        desk("verify", folder, "--trust", desk.trust, "--platform", "linux/arm64").error
        == "UnknownImage"
    )


def test_a_policy_is_asked_after_the_walk(desk: Desk) -> None:
    desk.record()
    policy = desk.place / "policy.yaml"
    policy.write_text("require: [provenance]\ngates: {smem: passed}\nmax_age_days: 1\n")
    good = desk.verify("--policy", policy)
    assert good.code == 0, good.err
    assert "policy  valid" in good.out
    assert desk.verify("--policy", policy, "--json").json["policy"]["verdict"] == "valid"
    policy.write_text("require: [rebuild]\n")
    ended = desk.verify("--policy", policy)
    assert ended.error == "PolicyRefused"
    assert "rebuild: is required" in ended.err
    assert desk.verify("--policy", desk.place / "none.yaml").error == "TrustInvalid"


def test_two_keys_sign_one_statement(desk: Desk) -> None:
    desk.record()
    entry = desk("evidence", "new-key", "second", "--output", desk.place / "keys").out
    desk.trust.write_text(f"{desk.trust.read_text()}{entry}")
    again = desk(
        "evidence", "make", "engine", "--key", desk.place / "keys" / "second.pem", "--json"
    ).json
    assert all(len(r["keys"]) == 2 for r in again["records"])
    policy = desk.place / "policy.yaml"
    policy.write_text("require: [provenance]\nsignatures: 2\n")
    assert desk.verify("--policy", policy).code == 0


def test_what_is_not_built_cannot_be_verified(desk: Desk) -> None:
    shutil.rmtree(desk.place / "store" / "images")
    assert desk.verify().error == "UnknownImage"
    assert desk("verify", "no-such-image").error == "UnknownImage"


def test_outside_a_checkout_only_files_are_verified(sm120: Command, tmp_path: Path) -> None:
    assert sm120("verify", "engine").error == "UnknownImage"
    (tmp_path / "report.txt").write_text("numbers")
    assert sm120("verify", tmp_path / "report.txt").error == "EvidenceIncomplete"


REPORT = {"title": "numbers", "data": f"sha256:{'0' * 64}", "fields": {}, "runs": []}


def test_any_file_can_be_attested(desk: Desk) -> None:
    file, predicate = desk.place / "report.txt", desk.place / "predicate.json"
    file.write_text("numbers")
    predicate.write_text(json.dumps(REPORT))
    attest = ("evidence", "attest", file, "--predicate", predicate, "--key", desk.key, "--type")
    assert desk(*attest, "report").code == 0
    assert desk("verify", file, "--trust", desk.trust).code == 0
    file.write_text("other numbers")
    assert desk("verify", file, "--trust", desk.trust).error == "EvidenceBroken"
    assert desk(*attest, "provenance").code == 2
    predicate.write_text(json.dumps({**REPORT, "more": 1}))
    assert desk(*attest, "report").error == "RecordInvalid"


@pytest.mark.parametrize(("form", "mark"), [("cyclonedx", "CycloneDX"), ("spdx", "SPDX-2.3")])
def test_a_bill_is_printed(desk: Desk, form: str, mark: str) -> None:
    bill = desk("evidence", "sbom", "engine", "--format", form)
    assert mark in json.dumps(bill.json)


def test_a_file_is_explained(desk: Desk) -> None:
    site = "/opt/venv/lib/python3.11/site-packages"
    explained = desk("image", "explain", "engine", f"{site}/pkg/code.py").out
    assert "changed by a patch of engine" in explained
    assert "0001.patch" in explained
    linked = desk("image", "explain", "engine", "/bin/tool")
    assert linked.out.startswith("/bin → usr/bin\n")
    assert desk("image", "explain", "engine", "/bin/tool", "--json").json["origin"] == "tool"
    assert desk("image", "explain", "engine", "/nothing").error == "UnknownFile"


def test_a_rebuild_is_attested(desk: Desk) -> None:
    shutil.copytree(desk.made.place / "mirror", desk.place / "mirror")
    more = ("--offline", "--mirror", desk.place / "mirror")
    done = desk("image", "rebuild", "engine", "--attest", "--key", desk.key, *more)
    assert done.code == 0, done.err
    plain = desk("image", "rebuild", "engine", *more)
    assert plain.code == 0, plain.err
    desk.record()
    verified = desk.verify()
    assert verified.code == 0, verified.err
    assert "the same digest again" in verified.out


def test_a_rebuild_that_differs_is_attested_too(desk: Desk) -> None:
    from pipeline.core.errors import NotReproducible

    differs = mock.Mock(side_effect=NotReproducible("layer 'x': /a differs in mode"))
    with mock.patch("pipeline.evidence.statements.rebuilt.compare_builds", differs):
        assert (
            desk("image", "rebuild", "engine", "--attest", "--key", desk.key, "--offline").error
            == "NotReproducible"
        )
        assert desk("image", "rebuild", "engine", "--offline").error == "NotReproducible"
    desk.record()
    ended = desk.verify()
    assert ended.error == "EvidenceBroken"
    assert "gave a different digest" in ended.err


def test_a_rebuild_needs_a_key_before_it_begins(desk: Desk) -> None:
    assert desk("image", "rebuild", "engine", "--attest", "--offline").error == "SigningFailed"


def test_keys_are_made_shown_and_never_overwritten(desk: Desk) -> None:
    again = desk("evidence", "new-key", "me", "--output", desk.place / "keys")
    assert again.error == "KeyExists"
    shown = desk("evidence", "show-key", desk.place / "keys" / "me.pub")
    want = key_id(read_private_file(desk.key).public_key())
    assert f"id: {want}" in shown.out
    assert "PRIVATE" not in shown.out
    assert desk("evidence", "new-key", "Bad Name").error == "KeyInvalid"
    assert desk("evidence", "show-key", "nobody").error == "KeyInvalid"


def test_keys_lie_in_the_users_own_folder_unless_told_otherwise(sm120: Command) -> None:
    made = sm120("evidence", "new-key", "mine")
    assert made.code == 0
    path = Path(os.environ["HOME"]) / ".config" / "sm120" / "keys" / "mine.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sm120("evidence", "show-key", "mine").out.startswith("- name: mine\n")


def test_a_passphrase_is_taken_from_the_environment(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_KEY_PASSPHRASE", "secret")
    assert (
        desk("evidence", "new-key", "guarded", "--passphrase", "--output", desk.place / "keys").code
        == 0
    )
    path = desk.place / "keys" / "guarded.pem"
    assert "ENCRYPTED" in path.read_text()
    assert desk("evidence", "make", "engine", "--key", path).code == 0
    monkeypatch.delenv("SM120_KEY_PASSPHRASE")
    assert desk("evidence", "make", "engine", "--key", path).error == "KeyInvalid"


def test_a_passphrase_is_asked_for(desk: Desk) -> None:
    with mock.patch("click.prompt", return_value="secret"):
        desk("evidence", "new-key", "asked", "--passphrase", "--output", desk.place / "keys")
    assert "ENCRYPTED" in (desk.place / "keys" / "asked.pem").read_text()


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "trusted"),
        ({"until": "2020"}, "expired"),
        ({"not_before": "2999"}, "not valid yet"),
        ({"revoked": True}, "revoked: was stolen"),
    ],
)
def test_the_state_of_a_key_is_listed(desk: Desk, change: dict[str, Any], state: str) -> None:
    lines = []
    for line in desk.trust.read_text().splitlines():
        name = line.strip().partition(":")[0]
        if "until" in change and name in ("until", "not_before"):
            line = f"  {name}: {2020 if name == 'until' else 2019}-01-01T00:00:00Z"
        if "not_before" in change and name in ("until", "not_before"):
            line = f"  {name}: {2999 if name == 'until' else 2998}-01-01T00:00:00Z"
        lines.append(line)
    if "revoked" in change:
        gone = "{since: 2026-01-01T00:00:00Z, reason: was stolen, compromised: true}"
        lines.append(f"  revoked: {gone}")
    desk.trust.write_text("\n".join(lines) + "\n")
    keys = desk("evidence", "list-keys", "--trust", desk.trust, "--json").json
    assert [k["state"] for k in keys] == [state]


def test_an_empty_list_of_keys_says_what_to_do(desk: Desk, sm120: Command) -> None:
    assert "sm120 evidence new-key NAME" in desk("evidence", "list-keys").out
    assert "sm120 evidence new-key NAME" in sm120("evidence", "list-keys").out


@pytest.mark.parametrize("kind", ["trust", "policy", "host-facts", "benchmark-run", "report"])
def test_schemas_are_printed(sm120: Command, kind: str) -> None:
    assert sm120("image", "schema", kind).json["type"] == "object"

"""Signing, publishing and verifying as a user does it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.names import REPORT
from pipeline.artifacts.attest.statement import make_statement
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.artifacts.store.store import default_root, open_store
from pipeline.evidence.statements.evidence_set import evidence_folder
from pipeline.images.gate.evidence import Evidence, GateKind, keep_evidence
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.model import lock_path
from pipeline.weights.place import LockedFolder
from tests.testbed.locked_set import SMALL, make_set, write
from tests.testbed.oci_door import Door
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.support import Command, build_tiny, write_spec
from tests.unit.support import tiny_spec as spec_of

PLACE = "team/tiny"
GATES: tuple[GateKind, ...] = ("smem", "numerics")


@pytest.fixture
def tiny() -> TinyRegistry:
    return TinyRegistry(has_referrers=False)


@pytest.fixture
def trust(checkout: Checkout, sm120: Command, tmp_path: Path) -> Path:
    """A key, and a trust file that knows it where a checkout keeps one."""
    entry = sm120("evidence", "new-key", "builder", "--output", tmp_path / "keys").out
    path = checkout.root / "lockfiles" / "trust.yaml"
    path.write_text(f"format: 1\nkeys:\n{entry}")
    return path


@pytest.fixture
def built(trust: Path, sm120: Command) -> str:
    return str(build_tiny(sm120, "--accept", "--json").json[0]["digest"])


def key_in(folder: Path) -> tuple[str, str]:
    return "--key", str(folder / "keys" / "builder.pem")


def test_with_a_key_an_image_is_recorded_signed_published_and_verified(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    at = f"{door.host_port}/{PLACE}"
    done = sm120("publish", "tiny", f"{at}:v1", *key_in(tmp_path), "--json").json
    assert done["evidence"] == "signed"
    assert len(done["attached"]) == 6
    for name in (f"{at}:v1", f"{at}@{built}", f"{at}:v1@{built}"):
        verified = sm120("verify", name, "--json")
        assert (verified.code, verified.json["verdict"]) == (0, "valid"), verified.err
    deep = sm120("verify", f"{at}:v1", "--deep", "--platform", "linux/amd64")
    assert "every byte read" in deep.out
    sm120("registry", "pull", f"{at}:v1", tmp_path / "out", "--evidence")
    assert sm120("verify", tmp_path / "out").code == 0
    policy = tmp_path / "policy.yaml"
    policy.write_text("format: 1\nrequire: [provenance, cyclonedx]\n")
    assert sm120("verify", f"{at}:v1", "--policy", policy, "--json").json["policy"]
    policy.write_text("format: 1\nrequire: [rebuild]\n")
    assert sm120("verify", f"{at}:v1", "--policy", policy).error == "PolicyRefused"


def test_an_exported_image_takes_its_evidence_along(
    built: str, sm120: Command, tmp_path: Path
) -> None:
    # built without the key
    sm120("image", "export", "tiny", tmp_path / "unsigned")
    assert sm120("verify", tmp_path / "unsigned").error == "EvidenceUnsigned"
    sm120("evidence", "make", "tiny", *key_in(tmp_path))
    sm120("image", "export", "tiny", tmp_path / "signed")
    assert sm120("verify", tmp_path / "signed").code == 0
    (layer, *_) = sorted((tmp_path / "signed" / "blobs" / "sha256").iterdir())
    # a file of its own: exported ones may be links to those of the store
    layer.unlink()
    layer.write_bytes(b"other")
    assert sm120("verify", tmp_path / "signed").code != 0


def test_a_bill_in_spdx_goes_along_on_request(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    place = f"{door.host_port}/{PLACE}:v1"
    plain = sm120("publish", "tiny", place, *key_in(tmp_path), "--json").json
    assert "application/spdx+json" not in [a["artifact_type"] for a in plain["attached"]]
    more = sm120("publish", "tiny", place, *key_in(tmp_path), "--spdx", "--json").json
    kinds = {a["digest"]: a["artifact_type"] for a in more["attached"]}
    new = [kinds[d] for d in kinds.keys() - {a["digest"] for a in plain["attached"]}]
    assert sorted(new) == [
        "application/spdx+json",
        "application/vnd.dev.cosign.artifact.att.v1+json",
        "application/vnd.dev.cosign.artifact.sig.v1+json",
        "application/vnd.dsse.envelope.v1+json",
        "application/vnd.dsse.envelope.v1+json",
    ]
    assert sm120("verify", place).code == 0


def test_a_tag_moved_back_is_found_out_also_where_the_registry_forgot(
    checkout: Checkout, built: str, sm120: Command, door: Door, tiny: TinyRegistry, tmp_path: Path
) -> None:
    place = f"{door.host_port}/{PLACE}:v1"
    sm120("publish", "tiny", place, *key_in(tmp_path))
    write_spec(checkout, spec_of(labels={"made": "later"}))
    later = str(build_tiny(sm120, "--accept", "--json").json[0]["digest"])
    sm120("publish", "tiny", place, *key_in(tmp_path))
    assert sm120("verify", place).code == 0
    tiny.tags[PLACE, "v1"] = built
    back = sm120("verify", place)
    assert (back.error, f"moved back: builder signed {later}" in back.err) == ("TagMoved", True)
    del tiny.tags[PLACE, f"{fallback_tag(later)}.sig"]
    assert sm120("verify", place).error == "TagMoved"
    sm120("publish", "tiny", place, *key_in(tmp_path))
    assert sm120("verify", place).code == 0


def test_a_machine_that_cannot_remember_verifies_and_says_so(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    place = f"{door.host_port}/{PLACE}:v1"
    sm120("publish", "tiny", place, *key_in(tmp_path))
    (tmp_path / "file").write_text("no folder")
    verified = sm120("--store", tmp_path / "file" / "store", "verify", place)
    assert (verified.code, "nothing new is remembered of this tag" in verified.err) == (0, True), (
        verified.err
    )


def test_a_store_that_cannot_be_written_still_knows_what_it_saw(
    checkout: Checkout, built: str, sm120: Command, door: Door, tiny: TinyRegistry, tmp_path: Path
) -> None:
    place = f"{door.host_port}/{PLACE}:v1"
    sm120("publish", "tiny", place, *key_in(tmp_path))
    write_spec(checkout, spec_of(labels={"made": "later"}))
    build_tiny(sm120, "--accept")
    sm120("publish", "tiny", place, *key_in(tmp_path))
    assert sm120("verify", place).code == 0
    tiny.tags[PLACE, "v1"] = built
    # a tmp/ that is a file makes a store unwritable for root, too
    folder = Path(os.environ["SM120_STORE"]) / "tmp"
    folder.rmdir()
    folder.touch()
    back = sm120("verify", place)
    assert (back.error, "nothing new is remembered of this tag" in back.err) == ("TagMoved", True)


def test_without_a_key_it_says_what_is_missing(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    at = f"{door.host_port}/{PLACE}"
    published = sm120("publish", "tiny", f"{at}:v1")
    assert (published.code, "has no signed statements" in published.err) == (0, True)
    assert sm120("verify", f"{at}:v1").error == "EvidenceIncomplete"
    sm120("evidence", "make", "tiny", *key_in(tmp_path))
    published = sm120("publish", "tiny", f"{at}:v1")
    assert "the tag of tiny is not signed" in published.err
    assert sm120("verify", f"{at}:v1").error == "EvidenceIncomplete"
    assert sm120("verify", f"{at}@{built}").code == 0
    bare = sm120("publish", "tiny", f"{at}-bare:v1", "--no-evidence", "--json")
    assert (bare.json["evidence"], bare.json["attached"]) == ("left out", [])
    assert "without evidence, as asked" in bare.err


@pytest.fixture
def strangers(built: str, trust: Path, sm120: Command, door: Door, tmp_path: Path) -> str:
    """An image that somebody published, on a machine where nobody is trusted."""
    place = f"{door.host_port}/{PLACE}:v1"
    sm120("publish", "tiny", place, *key_in(tmp_path))
    trust.unlink()
    return place


def test_an_image_of_a_stranger_is_incomplete_and_says_how_to_trust(
    strangers: str, sm120: Command
) -> None:
    for _ in ("nobody trusted", "only an own key"):
        ended = sm120("verify", strangers)
        assert ended.error == "EvidenceIncomplete", ended.out
        assert "broken" not in ended.out
        assert "`--key FILE.pub` once" in ended.err
        assert "`sm120 evidence trust-key FILE.pub`" in ended.err
        sm120("evidence", "new-key", "mine")


def test_a_public_key_may_be_named_for_once(strangers: str, sm120: Command, tmp_path: Path) -> None:
    public = tmp_path / "keys" / "builder.pub"
    assert sm120("verify", strangers, "--key", public).code == 0
    assert sm120("verify", strangers).error == "EvidenceIncomplete", "it was for once"
    sm120("evidence", "new-key", "other", "--output", tmp_path / "more")
    wrong = sm120("verify", strangers, "--key", tmp_path / "more" / "other.pub")
    assert wrong.error == "EvidenceBroken", "who names a key means that one"
    assert "know whose key that is" in wrong.err
    private = tmp_path / "keys" / "builder.pem"
    assert sm120("verify", strangers, "--key", private).error == "KeyInvalid"


def test_a_public_key_is_trusted_from_now_on(
    strangers: str, sm120: Command, tmp_path: Path
) -> None:
    public = tmp_path / "keys" / "builder.pub"
    done = sm120("evidence", "trust-key", public)
    assert (done.code, "now has builder sha256:" in done.out) == (0, True), done.err
    assert sm120("verify", strangers).code == 0
    assert "already" in sm120("evidence", "trust-key", public).out
    assert [row["name"] for row in sm120("evidence", "list-keys", "--json").json] == ["builder"]


@pytest.mark.parametrize("name", ["builder", "the file", "the id"])
def test_a_key_that_is_taken_back_makes_its_images_incomplete_again(
    strangers: str, sm120: Command, tmp_path: Path, name: str
) -> None:
    public = tmp_path / "keys" / "builder.pub"
    sm120("evidence", "trust-key", public)
    assert sm120("verify", strangers).code == 0
    [row] = sm120("evidence", "list-keys", "--json").json
    assert row["in"].endswith("/.config/sm120/trust.yaml")
    wanted = {"builder": "builder", "the file": public, "the id": row["id"]}[name]
    (tmp_path / "builder").write_text("a file that has the name of a key")
    done = sm120("evidence", "untrust-key", wanted)
    assert (done.code, f"no longer has builder {row['id']}" in done.out) == (0, True), done.err
    assert sm120("verify", strangers).error == "EvidenceIncomplete"
    assert sm120("evidence", "list-keys", "--json").json == []


def test_a_trust_file_that_the_environment_names_is_the_one_that_is_changed(
    strangers: str, sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_TRUST", str(tmp_path / "few.yaml"))
    sm120("evidence", "trust-key", tmp_path / "keys" / "builder.pub")
    assert sm120("verify", strangers).code == 0
    assert sm120("evidence", "untrust-key", "builder").code == 0
    assert sm120("verify", strangers).error == "EvidenceIncomplete"


@pytest.mark.parametrize("wanted", ["nobody", f"sha256:{'0' * 64}", "builder"])
def test_a_key_that_nobody_trusts_cannot_be_taken_back(
    strangers: str, sm120: Command, wanted: str
) -> None:
    ended = sm120("evidence", "untrust-key", wanted)
    assert ended.error == "KeyInvalid"
    assert f"{wanted}: " in ended.err
    assert "trusts no key of this name or id" in ended.err


def test_a_key_of_the_checkouts_trust_file_is_said_to_be_that_files(
    trust: Path, sm120: Command, tmp_path: Path
) -> None:
    ended = sm120("evidence", "untrust-key", tmp_path / "keys" / "builder.pub")
    assert ended.error == "KeyInvalid"
    assert f"is trusted by {trust}, not by " in ended.err
    assert f"untrust-key builder --trust {trust}`" in ended.err
    assert sm120("evidence", "untrust-key", "builder", "--trust", trust).code == 0
    assert sm120("evidence", "list-keys", "--json").json == []


def test_a_key_goes_by_the_name_that_the_list_has_for_it(
    trust: Path, sm120: Command, tmp_path: Path
) -> None:
    sm120("evidence", "new-key", "builder", "--output", tmp_path / "more")
    sm120("evidence", "trust-key", tmp_path / "more" / "builder.pub")
    rows = sm120("evidence", "list-keys", "--json").json
    # the checkout's trust file has another key of this name
    assert [row["name"] for row in rows] == ["builder", "builder-own"]
    assert sm120("evidence", "untrust-key", "builder-own").code == 0
    assert [row["in"] for row in sm120("evidence", "list-keys", "--json").json] == [str(trust)]


def test_a_key_of_ones_own_is_said_to_be_that(sm120: Command) -> None:
    sm120("evidence", "new-key", "mine")
    ended = sm120("evidence", "untrust-key", "mine")
    assert ended.error == "KeyInvalid"
    assert "is a key of your own, " in ended.err
    assert "/keys/mine.pub" in ended.err
    assert [row["name"] for row in sm120("evidence", "list-keys", "--json").json] == ["mine"]


def test_a_key_that_is_believed_about_little_does_not_prove_the_rest(
    strangers: str, sm120: Command, tmp_path: Path
) -> None:
    public = tmp_path / "keys" / "builder.pub"
    sm120("evidence", "trust-key", public, "--for", "provenance", "--trust", tmp_path / "few.yaml")
    ended = sm120("verify", strangers, "--trust", tmp_path / "few.yaml")
    assert "is not trusted for evidence-set" in ended.err


def test_outside_a_checkout_the_best_verdict_says_what_one_would_add(
    strangers: str, sm120: Command, tmp_path: Path
) -> None:
    sm120.cwd = tmp_path / "elsewhere"
    sm120.cwd.mkdir()
    (tmp_path / "images").rename(tmp_path / "put-away")
    ended = sm120("verify", strangers, "--key", tmp_path / "keys" / "builder.pub")
    assert ended.code == 0, ended.err
    assert "materials" in ended.out
    assert "a checkout" in ended.out
    assert sm120("verify", strangers).error == "EvidenceIncomplete"


def test_an_image_that_is_not_built_is_said_to_be_with_the_command_that_builds_it(
    checkout: Checkout, sm120: Command
) -> None:
    ended = sm120("verify", "tiny", "--platform", "linux/amd64")
    assert ended.error == "UnknownImage"
    assert "Run `sm120 build tiny` first." in ended.err


def test_a_rehearsal_signs_nothing(built: str, sm120: Command, door: Door, tmp_path: Path) -> None:
    at = f"{door.host_port}/{PLACE}"
    sm120("publish", "tiny", f"{at}:v1", *key_in(tmp_path), "--dry-run")
    assert sm120("verify", "tiny").error == "EvidenceUnsigned"


def test_a_bad_key_ends_it_before_anything_is_sent(
    built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    (tmp_path / "bad.pem").write_text("nothing")
    (tmp_path / "bad.pem").chmod(0o600)
    ended = sm120("publish", "tiny", f"{door.host_port}/{PLACE}:v1", "--key", tmp_path / "bad.pem")
    assert ended.error == "KeyInvalid"
    assert door.uploaded_bytes == 0


def test_forced_past_its_gates_an_image_says_so_signed_and_is_never_valid(
    checkout: Checkout, built: str, sm120: Command, door: Door, tmp_path: Path
) -> None:
    write_spec(checkout, spec_of(gates=["smem"]))
    assert build_tiny(sm120, "--accept").code == 0
    place = f"{door.host_port}/{PLACE}:v1"
    force = ("--force-ungated", "no card here")
    done = sm120("publish", "tiny", place, *force, *key_in(tmp_path), "--json").json
    kinds = [a["artifact_type"] for a in done["attached"]]
    assert kinds.count("application/vnd.sm120.ungated.v1+json") == 1
    verified = sm120("verify", place)
    assert verified.error == "EvidenceIncomplete"
    assert verified.out.count("no card here") == 3


def test_a_series_without_patches_needs_no_proof_of_them(
    checkout: Checkout, built: str, sm120: Command, door: Door
) -> None:
    write_spec(checkout, spec_of(gates=["smem"], patches="series.yaml"))
    (checkout.folder("tiny") / "series.yaml").write_text("patches: []\n")
    digest = build_tiny(sm120, "--accept", "--json").json[0]["digest"]
    results = [
        Evidence(gate=gate, arch="sm_120", verdict="passed", inputs={}, made_by={})
        for gate in GATES
    ]
    store = open_store(default_root())
    keep_evidence(store, "tiny", "linux/amd64", digest, results)
    done = sm120("publish", "tiny", f"{door.host_port}/{PLACE}:v1", "--json")
    assert done.code == 0, done.err
    assert done.json["gates"][0]["message"] == "smem on sm_120: passed; numerics on sm_120: passed"


def test_a_tag_that_moved_ends_with_a_code_of_its_own(
    built: str, sm120: Command, door: Door, tiny: TinyRegistry, tmp_path: Path
) -> None:
    at = f"{door.host_port}/{PLACE}"
    sm120("publish", "tiny", f"{at}:v1", *key_in(tmp_path))
    kind, data = tiny.manifests[PLACE, built]
    other = json.dumps({**json.loads(data), "annotations": {}}).encode()
    tiny.manifests[PLACE, digest_of(other)] = kind, other
    tiny.tags[PLACE, "v1"] = digest_of(other)
    moved = sm120("verify", f"{at}:v1")
    assert moved.error == "TagMoved"
    assert f"signed {built} under it" in moved.err
    assert fallback_tag(built) in {tag for _, tag in tiny.tags}


@pytest.mark.parametrize("name", ["a/b", "Reg.example/X:y", "x.example/y:"])
def test_what_is_neither_here_nor_a_reference_is_refused(
    built: str, sm120: Command, name: str
) -> None:
    assert sm120("verify", name).error == "ReferenceInvalid"


def test_a_folder_that_is_nothing_is_refused(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert sm120("verify", tmp_path / "empty").error == "UnknownImage"


def test_a_statement_alone_is_judged_but_never_valid(
    built: str, sm120: Command, tmp_path: Path
) -> None:
    sm120("evidence", "make", "tiny", *key_in(tmp_path))
    folder = evidence_folder(open_store(default_root()), "tiny", "linux/amd64", built)
    for path in sorted(folder.glob("*.dsse.json")):
        alone = sm120("verify", path)
        assert alone.error == "EvidenceIncomplete", path.name
        assert "by builder" in alone.out
        assert "is not here" in alone.out
    data = (folder / "provenance.dsse.json").read_bytes()
    for change in (data[:-20], data.replace(b'"sig":"MEU', b'"sig":"MEQ', 1) + b" x", b"{}"):
        (tmp_path / "bad.dsse.json").write_bytes(change)
        assert sm120("verify", tmp_path / "bad.dsse.json").error == "EvidenceBroken"


@pytest.mark.parametrize("facts", ["format: 1\n", "{}", '{"title": 1}'])
def test_facts_that_are_not_of_their_form_are_the_users_to_correct(
    trust: Path, sm120: Command, tmp_path: Path, facts: str
) -> None:
    report, predicate = tmp_path / "report.md", tmp_path / "predicate.json"
    report.write_text("# Numbers\n")
    predicate.write_text(facts)
    options = ("--type", "report", "--predicate", predicate, *key_in(tmp_path))
    ended = sm120("evidence", "attest", report, *options)
    assert ended.error == "RecordInvalid"
    assert f"Correct {predicate}; `sm120 image schema report` prints its form." in ended.err
    assert "from where it was made" not in ended.err


def test_a_statement_beside_its_file_is_judged_with_it(
    trust: Path, sm120: Command, tmp_path: Path
) -> None:
    report, predicate = tmp_path / "report.md", tmp_path / "predicate.json"
    report.write_text("# Numbers\n")
    predicate.write_text(
        json.dumps({"title": "Numbers", "data": f"sha256:{'0' * 64}", "fields": {}, "runs": []})
    )
    options = ("--type", "report", "--predicate", predicate, *key_in(tmp_path))
    path = sm120("evidence", "attest", report, *options).out.strip()
    assert sm120("verify", path).code == sm120("verify", report).code == 0
    report.write_text("# Other numbers\n")
    assert sm120("verify", path).error == "EvidenceBroken"
    report.unlink()
    alone = sm120("verify", path)
    assert (alone.error, "well formed" in alone.out) == ("EvidenceIncomplete", True)
    body = make_statement("report.md", f"sha256:{'0' * 64}", REPORT, {"title": 5})
    Path(path).write_bytes(enclose(body).dump())
    assert sm120("verify", path).error == "EvidenceBroken"


@pytest.fixture
def weights(trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LockedFolder:
    # a receipt vouches only for files that are some ticks old
    monkeypatch.setattr("pipeline.weights.disk.receipt.CLOCK_TICK_NS", -(10**9))
    return make_set(tmp_path / "set", SMALL, {"model.safetensors": b"weights" * 1000})


def test_weights_are_judged_by_lock_signature_and_record(
    weights: LockedFolder, sm120: Command, tmp_path: Path
) -> None:
    place = str(weights.root)
    assert sm120("verify", place, "--deep").error == "EvidenceUnsigned"
    assert sm120("weights", "verify", place).code == 0
    assert sm120("weights", "sign", place, *key_in(tmp_path)).code == 0
    signed = sm120("verify", place)
    assert (signed.code, "model signature  valid: by builder" in signed.out) == (0, True)
    assert sm120("weights", "attest", place, *key_in(tmp_path)).code == 0
    both = sm120("verify", place, "--deep", "--json")
    assert (both.code, both.json["verdict"]) == (0, "valid")
    titles = [child["title"] for child in both.json["children"]]
    assert titles[:3] == ["lock", "files", "model signature"]
    assert titles[3].startswith("weights (record")


def test_weights_that_changed_since_are_not_valid(
    weights: LockedFolder, sm120: Command, tmp_path: Path
) -> None:
    place = str(weights.root)
    sm120("weights", "verify", place)
    sm120("weights", "attest", place, *key_in(tmp_path))
    sm120("weights", "sign", place, *key_in(tmp_path))
    signature, receipt = weights.state / "model.sig", weights.receipt_file
    kept = receipt.read_bytes()
    receipt.unlink()
    assert sm120("verify", place).error == "EvidenceIncomplete"
    receipt.write_bytes(kept)
    whole = signature.read_bytes()
    signature.write_bytes(whole.replace(b"a", b"b", 5))
    assert sm120("verify", place).error == "EvidenceBroken"
    signature.write_bytes(whole)
    pin = next(p for p in weights.lock.files if p.path == "config.json")
    write(weights, pin, b"{}")
    broken = sm120("verify", place)
    assert (broken.error, "config.json" in broken.err) == ("EvidenceBroken", True)


def test_weights_are_stale_when_the_checkout_locks_others(
    weights: LockedFolder, checkout: Checkout, sm120: Command, tmp_path: Path
) -> None:
    place = str(weights.root)
    sm120("weights", "verify", place)
    sm120("weights", "sign", place, *key_in(tmp_path))
    path = lock_path(checkout, weights.lock.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(weights.lock_file.read_bytes())
    assert "as in the checkout" in sm120("verify", place).out
    newer = {"model.safetensors": b"newer"}
    other = make_set(tmp_path / "other", SMALL, newer, commit="f" * 40)
    path.write_bytes(other.lock_file.read_bytes())
    assert sm120("verify", place).error == "EvidenceStale"
    forged = make_set(tmp_path / "forged", SMALL, newer)  # of one commit, but with other bytes
    path.write_bytes(forged.lock_file.read_bytes())
    assert sm120("verify", place).error == "EvidenceBroken"
    path.write_text("no lock\n")
    assert sm120("verify", place).error == "EvidenceIncomplete"


def test_weights_signed_by_a_stranger_or_judged_without_trust_are_not_valid(
    weights: LockedFolder, trust: Path, sm120: Command, tmp_path: Path
) -> None:
    place = str(weights.root)
    sm120("weights", "verify", place)
    sm120("weights", "sign", place, *key_in(tmp_path))
    entry = sm120("evidence", "new-key", "other", "--output", tmp_path / "more").out
    known = trust.read_text()
    trust.write_text(f"format: 1\nkeys:\n{entry}")
    assert "another key" in sm120("verify", place).err
    second = sm120("evidence", "new-key", "third", "--output", tmp_path / "more").out
    trust.write_text(f"format: 1\nkeys:\n{entry}{second}")
    assert "no key of the trust file" in sm120("verify", place).err
    trust.write_text(known.replace("weights, ", ""))
    assert "not trusted for weights" in sm120("verify", place).err
    trust.unlink()
    assert sm120("verify", place).error == "EvidenceIncomplete"


def test_all_sets_of_a_hub_cache_are_judged(trust: Path, sm120: Command, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_set(tmp_path / "hub", SMALL, {}, hub_cache=True, name=name, repository=f"org/{name}")
    verified = sm120("verify", tmp_path / "hub", "--deep", "--json")
    assert verified.error == "EvidenceUnsigned"
    assert len(json.loads(verified.out)["children"]) == 2

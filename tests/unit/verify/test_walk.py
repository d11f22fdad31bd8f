"""Good evidence is found good; what moved since makes it stale; what is missing, incomplete."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline import __version__
from pipeline.artifacts.attest.envelope import Signature, countersigned, enclose
from pipeline.artifacts.attest.keys import LocalSigner, key_id
from pipeline.artifacts.attest.names import REPORT, WEIGHTS
from pipeline.artifacts.attest.statement import make_statement
from pipeline.artifacts.attest.trust import OwnKeys
from pipeline.core.verdict import GateVerdict
from pipeline.evidence.statements.results import gate_statements
from pipeline.evidence.verify.artifact import open_file
from pipeline.evidence.verify.evidence import distinct, read_item
from pipeline.evidence.verify.verdict import Code, Node, Verdict, show
from pipeline.evidence.verify.walk import judge_results, walk_evidence
from pipeline.images.gate.evidence import ImageGates
from pipeline.images.lock.model import read_lock, sealed_lock, write_lock
from pipeline.images.spec.checkout import Checkout
from tests.makers import AMD64
from tests.unit.verify.world import NOW, WHEN, World, evidence, texts, trust_in, trusted


def test_good_evidence_is_valid(world: World) -> None:
    walked = world.walk()
    assert walked.node.verdict is Verdict.VALID, walked.node.culprit()
    kinds = [b.kind for b in walked.believed]
    tests = ["test-result", "test-result"]
    assert kinds == ["provenance", "cyclonedx", "spdx", *tests, "rebuild", "evidence-set"]


SIGNED = ["signature: by builder; stated 2026-05-31 08:00:00 UTC by its own clock"]
SIGNED += ["subject: these bytes"]
MADE = [
    "provenance (provenance)",
    *SIGNED,
    "layers: 4, of which 1 of its base",
    "manifest's annotations: the same image, lock and format",
    f"builder: urn:sm120-pipeline:builder:local, sm120-pipeline {__version__}, code …",
]
COMPARED = [
    *("spec", "images/engine/image.yaml", "images/root/image.yaml", "locks", "root", "engine"),
    *("golden digest", "2 wheels: locked, and in a layer of this image"),
    *("other-1.0-py3-none-any.whl", "pkg-1.0-py3-none-any.whl"),
    "2 Debian packages: locked, and in a layer of this image",
    *("more_1.0_amd64.deb", "tool_1.0_amd64.deb", "nothing left out"),
    *("1 patch, 1 file of the checkout", "images/engine/serve.py"),
    "images/engine/patches/0001.patch",
]
BILL, COUNTS = (
    "bill of materials: 4 packages, the same as in the provenance",
    "2 passed, 0 accepted",
)
REST = [
    *("cyclonedx (sbom-cyclonedx)", *SIGNED, BILL, "spdx (sbom-spdx)", *SIGNED, BILL),
    *("test-result (gate-smem-sm_120)", *SIGNED, f"gate smem on sm_120: {COUNTS}"),
    *("test-result (gate-patches-sm_120)", *SIGNED, f"gate patches on sm_120: {COUNTS}"),
    *(
        "rebuild (rebuild)",
        *SIGNED,
        f"rebuild: the same digest again, by builder on {platform.machine()}",
    ),
    *("evidence-set (evidence-set)", *SIGNED),
    "all its evidence: 6 statements, as in the set that builder signed",
]


def test_good_evidence_says_what_was_compared(world: World) -> None:
    assert texts(world.walk().node.every()) == ["it …", *MADE, *COMPARED, *REST]
    alone = texts(world.walk(checkout=None).node.every())
    assert alone[1 : len(MADE) + 1] == MADE
    assert alone[len(MADE) + 2 :] == REST


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_lock_that_moved_or_is_gone_changes_nothing_else(
    world: World, tmp_path: Path, is_gone: bool
) -> None:
    checkout = world.checkout_copy(tmp_path)
    if is_gone:
        checkout.lock_path("engine", AMD64).unlink()
        other = wheel = ": not compared: its lock is missing"
        lock, debs = ": engine.amd64.lock.yaml: there is no such lock", ""
    else:
        move_lock(checkout)
        other, wheel, lock = "", ": is no longer locked", ": was …, is …"
        debs = ": locked, and in a layer of this image"
    said = texts(world.walk(checkout=checkout).node.children[0].every())[len(MADE) :]
    changes = {"engine": lock, "other-1.0-py3-none-any.whl": other}
    changes |= {"pkg-1.0-py3-none-any.whl": wheel, "2 wheels": "", "2 Debian packages": debs}
    plain = [each.partition(": ")[0] for each in COMPARED]
    assert said == [f"{title}{changes.get(title, '')}" for title in plain]


def test_packages_that_are_as_locked_are_counted_and_not_shown_one_by_one(world: World) -> None:
    text = show(world.walk().node)
    count = len([p for plan in world.built.plan.chain() for p in plan.lock.wheels])
    assert f"{count} wheels" in text
    assert "other-1.0-py3-none-any.whl" not in text


def test_two_signatures_are_two_believed_keys(world: World) -> None:
    both = countersigned(world.signed("provenance"), LocalSigner(world.other_key))
    trust = trust_in(trusted(world.key), trusted(world.other_key, "second"))
    walked = world.walk({**world.envelopes(), "provenance": both}, trust)
    assert walked.node.verdict is Verdict.VALID
    assert [key.name for key in walked.believed[0].keys] == ["builder", "second"]


def test_a_statement_counts_as_it_was_signed_by_the_most_keys(world: World) -> None:
    one = world.signed("provenance")
    both = countersigned(one, LocalSigner(world.other_key))
    other = world.signed("provenance", world.other_key)
    less, more, apart, unreadable = (
        read_item("less", one.dump()),
        read_item("more", both.dump()),
        read_item("apart", world.signed("rebuild").dump()),
        read_item("unreadable", b"{"),
    )
    assert distinct([less, more, apart, unreadable]) == [more, apart, unreadable]
    assert distinct([more, unreadable, less, less]) == [more, unreadable]
    outsider = read_item("stranger", other.dump())
    assert distinct([less, outsider]) == [less, outsider]


def test_a_second_signature_by_a_stranger_changes_nothing_but_is_reported(world: World) -> None:
    both = countersigned(world.signed("provenance"), LocalSigner(world.other_key))
    walked = world.walk({**world.envelopes(), "provenance": both})
    assert walked.node.verdict is Verdict.VALID
    assert "does not know" in walked.node.children[0].children[0].message


def test_a_signature_without_a_key_name_is_tried_with_every_key(world: World) -> None:
    name = key_id(world.key.public_key()).encode()
    items = [
        read_item(kind, envelope.dump().replace(b'"keyid":"' + name, b'"keyid":"'))
        for kind, envelope in world.envelopes().items()
    ]
    trust = trust_in(trusted(world.other_key, "second"), trusted(world.key))
    assert world.walk(items, trust).node.verdict is Verdict.VALID


def test_one_key_counts_once_however_often_it_signed(world: World) -> None:
    good = world.signed("provenance")
    nameless = Signature(None, world.signed("provenance").signatures[0].sig)
    double = replace(good, signatures=(*good.signatures, nameless))
    walked = world.walk({**world.envelopes(), "provenance": double})
    assert walked.node.verdict is Verdict.VALID
    assert len(walked.believed[0].keys) == 1


def test_a_new_key_may_sign_an_old_statement_anew(world: World) -> None:
    """Rotation: the statement is older than the key's time, the signature is not."""
    renewed = {name: world.signed(name, world.other_key) for name in world.statements}
    renewed["rebuild"] = world.envelopes()["rebuild"]
    start = datetime(2026, 6, 1, tzinfo=UTC)
    trust = trust_in(trusted(world.key), trusted(world.other_key, "new", not_before=start))
    walked = world.walk(renewed, trust)
    assert walked.node.verdict is Verdict.VALID
    # the time is the statement's: a key that is younger did not sign it then
    signature = walked.node.children[0].children[0].message
    assert signature == "by new; stated 2026-05-31 08:00:00 UTC by its own clock"


def test_a_replaced_key_keeps_what_it_signed_before(world: World) -> None:
    revoked = {
        "since": datetime(2026, 6, 1, tzinfo=UTC),
        "reason": "replaced",
        "compromised": False,
    }
    trust = trust_in(trusted(world.key, revoked=revoked))
    assert world.walk(trust=trust).node.verdict is Verdict.VALID


def test_no_evidence_is_incomplete(world: World) -> None:
    node = world.walk([]).node
    assert node.verdict is Verdict.INCOMPLETE
    assert "no evidence" in node.message


def test_statements_that_nobody_signed_are_unsigned(world: World) -> None:
    bare = {name: enclose(e.statement) for name, e in world.envelopes().items()}
    walked = world.walk(bare)
    assert walked.node.verdict is Verdict.UNSIGNED, walked.node.culprit()
    assert walked.believed == ()


def test_one_unsigned_statement_among_signed_ones_is_unsigned(world: World) -> None:
    node = world.judge(rebuild=enclose(world.statements["rebuild"]))
    assert node.verdict is Verdict.UNSIGNED


def test_without_a_trust_file_nothing_is_valid(world: World) -> None:
    items = [read_item(name, e.dump()) for name, e in world.envelopes().items()]
    walked = walk_evidence(world.artifact, items, None, world.checkout, NOW)
    assert walked.node.verdict is Verdict.INCOMPLETE
    assert walked.believed == ()


def test_without_a_checkout_what_is_signed_counts_and_what_one_would_add_is_named(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    for checkout in (None, Checkout(tmp_path)):
        node = world.walk(checkout=checkout).node
        assert node.verdict is Verdict.VALID, show(node)
        (materials,) = [n for n in node.every() if n.title == "materials"]
        assert "in a checkout of this image spec, locks, golden digest" in materials.message
        assert not [n for n in node.every() if "no such lock" in n.message]


def test_without_a_checkout_a_stranger_or_nobody_still_proves_nothing(world: World) -> None:
    nobody = world.walk(checkout=None, trust=OwnKeys()).node
    assert nobody.verdict is Verdict.INCOMPLETE
    stranger = world.walk(checkout=None, trust=trust_in(trusted(world.other_key))).node
    assert stranger.verdict is Verdict.BROKEN
    assert stranger.culprit().code is Code.STRANGER


def test_a_checkout_that_lost_the_lock_says_so_once(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    checkout.lock_path("engine", AMD64).unlink()
    node = world.walk(checkout=checkout).node
    assert node.verdict is Verdict.INCOMPLETE
    assert len([n for n in node.every() if n.own is Verdict.INCOMPLETE]) == 1


@pytest.mark.parametrize("card", ["sm_90", "sm_121"])
def test_a_gate_on_another_card_does_not_stand_for_the_promised_one(
    world: World, card: str
) -> None:
    other = world.lie("gate-smem-sm_120", lambda b: b["predicate"].update(sm120_card=card))
    node = world.judge(gate_smem_sm_120=other)
    assert node.verdict is Verdict.INCOMPLETE
    assert node.culprit().title == "gate smem on sm_120"
    assert node.culprit().message == "is required by the spec, but has no result"


def test_signed_bills_without_provenance_are_incomplete(world: World) -> None:
    node = world.judge(provenance=None)
    assert node.verdict is Verdict.INCOMPLETE
    assert {"provenance"} <= {c.title for c in node.children}


@pytest.mark.parametrize("gate", ["smem", "patches"])
def test_a_gate_that_is_asked_for_and_has_no_result_is_incomplete(world: World, gate: str) -> None:
    node = world.judge(**{f"gate_{gate}_sm_120": None})
    assert node.verdict is Verdict.INCOMPLETE
    assert node.culprit().title == f"gate {gate} on sm_120"


@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [
        ("passed", Verdict.VALID),
        ("accepted", Verdict.VALID),
        ("failed", Verdict.BROKEN),
        ("unknown", Verdict.INCOMPLETE),
    ],
)
def test_what_the_numerics_gate_found_is_stated_and_counts(
    world: World, verdict: GateVerdict, wanted: Verdict
) -> None:
    outcome = evidence(world.store, "numerics", verdict, world.checkout, "off by 3 ulp")
    gates = ImageGates(
        image="engine", platform=AMD64, image_digest=world.built.digest, results=[outcome]
    )
    (statement,) = gate_statements(gates, WHEN).values()
    node = world.judge(numerics=enclose(statement, [LocalSigner(world.key)]))
    assert node.verdict is wanted
    gate = next(c for c in node.children if "(numerics)" in c.title).children[-1]
    assert gate.title == "gate numerics on sm_120"


def test_new_cases_make_the_numerics_gate_stale(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    (checkout.folder("engine") / "gates" / "numerics.yaml").write_text("{}\n")
    outcome = evidence(world.store, "numerics", "passed", world.checkout)
    gates = ImageGates(
        image="engine", platform=AMD64, image_digest=world.built.digest, results=[outcome]
    )
    predicate = gate_statements(gates)["numerics-sm_120"].predicate
    assert judge_results(predicate, "engine", checkout).verdict is Verdict.STALE
    assert judge_results(predicate, "engine", world.checkout).verdict is Verdict.VALID


def test_an_image_without_machine_code_passes_that_gate(world: World) -> None:
    def change(body: dict[str, Any]) -> None:
        body["predicate"] |= {"sm120_gate": "arch", "passedTests": [], "configuration": []}

    node = world.judge(arch=world.lie("gate-smem-sm_120", change))
    assert node.verdict is Verdict.VALID
    gate = next(c for c in node.children if c.title == "test-result (arch)")
    assert gate.children[-1].message == "nothing in it to judge"


def test_evidence_of_a_file_needs_no_provenance(world: World, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"numbers")
    artifact = open_file(path)
    body = {"title": "numbers", "data": f"sha256:{'0' * 64}", "fields": {}, "runs": []}
    statement = make_statement("report.html", artifact.digest, REPORT, body, WHEN)
    envelope = enclose(statement, [LocalSigner(world.key)])
    assert world.walk({"report": envelope}, artifact=artifact).node.verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("result", "why", "verdict"),
    [
        ("verified", [], "VALID"),
        ("damaged", ["short: a.safetensors"], "BROKEN"),
        ("unknown", ["no receipt vouches for 3 files"], "INCOMPLETE"),
        ("unknown", [], "INCOMPLETE"),
    ],
)
def test_weights_are_as_good_as_their_verification(
    world: World, tmp_path: Path, result: str, why: list[str], verdict: str
) -> None:
    lock = tmp_path / "kimi.lock.yaml"
    lock.write_bytes(b"files: []\n")
    artifact = open_file(lock)
    body = {
        "lock": {"name": "kimi", "seal": artifact.digest, "spec": artifact.digest},
        "repository": "moonshotai/Kimi-K2",
        "commit": "0" * 40,
        "files": 96,
        "size_bytes": 595_000_000_000,
        "layout": "plain",
        "verification": {"result": result, "how": "full", "files_read": 96}
        | {"files_by_receipt": 0, "why": why},
        "tool": {"name": "sm120-pipeline", "version": "0.1.0"},
    }
    statement = make_statement("kimi.lock.yaml", artifact.digest, WEIGHTS, body, WHEN)
    walked = world.walk({"w": enclose(statement, [LocalSigner(world.key)])}, artifact=artifact)
    assert walked.node.verdict is Verdict[verdict]
    assert all(message in walked.node.culprit().message for message in why)


def edit_spec(checkout: Checkout) -> None:
    path = checkout.folder("engine") / "image.yaml"
    path.write_text(path.read_text().replace("a small engine", "another small engine"))


def edit_series(checkout: Checkout) -> None:
    path = checkout.folder("engine") / "patches" / "series.yaml"
    path.write_text(path.read_text().replace("because a test", "only because a test"))


def edit_patch(checkout: Checkout) -> None:
    path = checkout.folder("engine") / "patches" / "0001.patch"
    path.write_text(path.read_text() + "\n")


def drop_patch(checkout: Checkout) -> None:
    (checkout.folder("engine") / "patches" / "0001.patch").unlink()


def edit_case(checkout: Checkout) -> None:
    (checkout.folder("engine") / "gates" / "smem-a.yaml").write_text("{a: 1}\n")


def add_case(checkout: Checkout) -> None:
    (checkout.folder("engine") / "gates" / "smem-b.yaml").write_text("{}\n")


def edit_own_file(checkout: Checkout) -> None:
    (checkout.folder("engine") / "serve.py").write_text("print(1)\n")


def move_lock(checkout: Checkout) -> None:
    path = checkout.lock_path("engine", AMD64)
    old = read_lock(path)
    write_lock(path, sealed_lock("engine", AMD64, old.spec, old.base_lock, old.wheels[:1], []))


def move_golden(checkout: Checkout) -> None:
    text = checkout.golden_path.read_text()
    digest = text.partition("digest: sha256:")[2][:64]
    checkout.golden_path.write_text(text.replace(digest, "0" * 64))


STALE: dict[str, tuple[Callable[[Checkout], None], str]] = {
    "spec": (edit_spec, "has changed since: summary"),
    "series": (edit_series, "series.yaml has changed since"),
    "patch": (edit_patch, "has changed since"),
    "patch gone": (drop_patch, "is missing from this checkout"),
    "gate case": (edit_case, "has changed since: gates/smem-a.yaml"),
    "new gate case": (add_case, "has changed since: gates/smem-b.yaml"),
    "own file": (edit_own_file, "has changed since"),
    "lock": (move_lock, "was sha256:"),
    "golden": (move_golden, "is sha256:000000"),
}


@pytest.mark.parametrize("name", STALE)
def test_what_moved_since_makes_evidence_stale(world: World, tmp_path: Path, name: str) -> None:
    change, message = STALE[name]
    checkout = world.checkout_copy(tmp_path)
    change(checkout)
    node = world.walk(checkout=checkout).node
    assert node.verdict is Verdict.STALE
    assert message in node.culprit().message


def test_a_wheel_that_is_no_longer_locked_is_named(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    move_lock(checkout)
    provenance = world.walk(checkout=checkout).node.children[0]
    wheels = next(c for c in provenance.children if c.title.endswith("wheels"))
    gone = [c.title for c in wheels.children if c.verdict is Verdict.STALE]
    assert gone == ["pkg-1.0-py3-none-any.whl"]
    assert wheels.message == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.lock_path("engine", AMD64).unlink(), "there is no such lock"),
        (lambda c: c.lock_path("engine", AMD64).write_text("x: 1"), "Field required"),
        (lambda c: c.golden_path.unlink(), "none is committed"),
        (lambda c: c.golden_path.write_text("["), "not valid YAML"),
    ],
)
def test_what_cannot_be_compared_is_incomplete(
    world: World, tmp_path: Path, change: Callable[[Checkout], None], message: str
) -> None:
    checkout = world.checkout_copy(tmp_path)
    change(checkout)
    node = world.walk(checkout=checkout).node
    assert node.verdict is Verdict.INCOMPLETE
    assert message in " ".join(_words(node))


def _words(node: Node) -> list[str]:
    return [node.message, *(w for child in node.children for w in _words(child))]


def test_an_image_without_a_golden_digest_is_incomplete(world: World) -> None:
    def change(body: dict[str, Any]) -> None:
        for item in body["predicate"]["runDetails"]["byproducts"]:
            if ":golden:" in item["uri"]:
                del item["digest"]
                item["annotations"] = {"unknown": "nobody committed one"}

    node = world.judge(provenance=world.lie("provenance", change))
    assert node.verdict is Verdict.INCOMPLETE
    assert node.culprit().message == "nobody committed one"


def test_a_record_of_a_build_with_another_golden_digest_is_stale(world: World) -> None:
    def change(body: dict[str, Any]) -> None:
        for item in body["predicate"]["runDetails"]["byproducts"]:
            if ":golden:" in item["uri"]:
                item["digest"]["sha256"] = "1" * 64

    node = world.judge(provenance=world.lie("provenance", change))
    assert node.verdict is Verdict.STALE
    assert "when it was recorded" in node.culprit().message

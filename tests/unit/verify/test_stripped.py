"""An image with a failed gate cannot be made valid by taking evidence away, or exchanging it.

The set of all statements is signed, and the name in a registry commits to the set. Each attack is
tried on an image in a registry, on a pulled layout, and on statements in a folder.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from pipeline.artifacts.attest.cosign import SIGNATURE_NOTE, UNGATED_MEDIA, signature_attachment
from pipeline.artifacts.attest.envelope import Envelope, countersigned, enclose
from pipeline.artifacts.attest.keys import LocalSigner, PrivateKey
from pipeline.artifacts.attest.names import UNGATED
from pipeline.artifacts.attest.predicates import Ungated
from pipeline.artifacts.attest.statement import Moment, make_statement
from pipeline.artifacts.registry.pull import plan_pull, pull_layout
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.core.model import canonical_json, sha256_of
from pipeline.core.verdict import GateVerdict
from pipeline.evidence.publish.evidence import EvidenceBundle
from pipeline.evidence.publish.publish import plan_upload
from pipeline.evidence.statements.evidence_set import NAME as SET
from pipeline.evidence.statements.results import gate_statements
from pipeline.evidence.verify.artifact import open_layout
from pipeline.evidence.verify.chain import VerifyContext, judge_attached
from pipeline.evidence.verify.evidence import (
    AttachedBlob,
    AttachedEvidence,
    attached_in,
    gather_envelopes,
    read_item,
)
from pipeline.evidence.verify.verdict import Node, Verdict, show
from pipeline.images.gate.evidence import ImageGates
from tests.makers import AMD64
from tests.testbed.oci_door import oci_door
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.registry.support import NAME, described, index_json, put
from tests.unit.verify.test_registry_evidence import Site
from tests.unit.verify.world import (
    NOW,
    WHEN,
    World,
    evidence,
    reasons,
    sign_bytes,
    trust_in,
    trusted,
)

EARLIER = Moment(at="2026-05-30T08:00:00Z", invocation=WHEN.invocation)
LATER = Moment(at="2026-05-31T09:00:00Z", invocation=WHEN.invocation)
Envelopes = dict[str, Envelope]
Form = Literal["registry", "layout", "folder"]
FORMS: tuple[Form, ...] = ("registry", "layout", "folder")


def result(
    world: World,
    verdict: GateVerdict,
    card: str = "sm_120",
    key: PrivateKey | None = None,
    when: Moment = WHEN,
) -> Envelope:
    """What the numerics gate found; no spec names it, `build --gate` runs it all the same."""
    outcome = evidence(world.store, "numerics", verdict, world.checkout, "off by 3")
    gates = ImageGates(
        image="engine",
        platform=AMD64,
        image_digest=world.built.digest,
        results=[outcome.model_copy(update={"arch": card})],
    )
    (statement,) = gate_statements(gates, when).values()
    return enclose(statement, [LocalSigner(key or world.key)])


def ungated(world: World) -> Envelope:
    ungated = Ungated(
        image="engine", platform=AMD64, reference="x", gates="numerics: failed", reason="in a hurry"
    )
    statement = make_statement("engine", world.built.digest, UNGATED, ungated.model_dump(), WHEN)
    return enclose(statement, [LocalSigner(world.key)])


def failed(world: World, card: str = "sm_120") -> Envelopes:
    """The evidence of an image that failed and was published past its gates."""
    more = {"numerics": result(world, "failed", card), "ungated": ungated(world)}
    return world.with_set({**world.envelopes(), **more}, "in a hurry")


def before(world: World) -> Envelopes:
    """The same, as it was signed before that gate failed."""
    passed = {"numerics": result(world, "passed", when=EARLIER)}
    return world.with_set({**world.envelopes(), **passed}, when=EARLIER)


@dataclass
class Places:
    """The three forms in which evidence is judged."""

    site: Site

    def show(self, form: Form, signed: Envelopes, shown: Envelopes, *, named: bool = True) -> Node:
        """Publish what was signed, then let an attacker show something else in its place."""
        if form == "folder":
            return self._folder(shown)
        world = self.site.world
        self.site.publish(
            bundle=EvidenceBundle({AMD64: list(signed.values())}, LocalSigner(world.key))
        )
        self._exchange(shown, named)
        return self.site.judge(f"@{self.site.digest}") if form == "registry" else self._layout()

    def _exchange(self, shown: Envelopes, named: bool) -> None:
        tiny, tag = self.site.tiny, fallback_tag(self.site.digest)
        del tiny.tags[NAME, f"{tag}.att"]
        put(tiny, index_json(), tag)
        if named:
            self.site.list(tiny.tags[NAME, f"{tag}.sig"])
        else:
            del tiny.tags[NAME, f"{tag}.sig"]
        for envelope in shown.values():
            self.site.attach(envelope.dump())

    def _layout(self) -> Node:
        repository, folder = self.site.repository, self.site.folder / "layout"
        root = repository.manifest("v1")
        pull_layout(repository, plan_pull(repository, root, with_evidence=True), folder)
        opened = open_layout(folder)
        context = VerifyContext(self.site.world.trust, self.site.world.checkout, NOW)
        return judge_attached(opened, attached_in(folder, opened.digest), context).node

    def _folder(self, shown: Envelopes) -> Node:
        folder = self.site.folder / "records"
        folder.mkdir()
        for name, envelope in shown.items():
            (folder / f"{name}.dsse.json").write_bytes(envelope.dump())
        return self.site.world.walk(gather_envelopes([folder])).node


@pytest.fixture
def places(world: World, tmp_path: Path) -> Iterator[Places]:
    tiny = TinyRegistry(has_referrers=False)
    with oci_door(tiny) as door:
        yield Places(Site(world, tiny, door, tmp_path))


def without(envelopes: Envelopes, *names: str) -> Envelopes:
    return {name: e for name, e in envelopes.items() if name not in names}


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_set_is_valid_in_every_form(places: Places, world: World, form: Form) -> None:
    good = world.with_set({**world.envelopes(), "numerics": result(world, "passed")}, when=LATER)
    node = places.show(form, good, good)
    assert node.verdict is Verdict.VALID, show(node)
    assert "all its evidence" in show(node)


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_image_is_told_as_it_is(places: Places, world: World, form: Form) -> None:
    envelope = failed(world)
    node = places.show(form, envelope, envelope)
    assert node.verdict is Verdict.BROKEN
    assert "in a hurry" in show(node)


Attack = Callable[[World], tuple[Envelopes, Envelopes]]
GONE = "is listed in the set, but missing: it was removed or replaced"
FAILURE_GONE = f"test-result numerics on sm_120, failed: {GONE}"
NOTE_GONE = f"ungated: {GONE}"
HURRY = "ungated: published although its gates did not pass: in a hurry"
ADDED = "was added later: no set lists it"
STRANGER = "signature: signed by …, a key that the trust file does not know"
UNSIGNED = "signature: nobody signed it"
NO_SET = "all its evidence: no signed set lists its statements: some may be missing"
# each with what a folder of records says; elsewhere the name may say more
ATTACKS: dict[str, tuple[Attack, list[str]]] = {
    "the failed result and the note are deleted": (
        lambda w: (failed(w), without(failed(w), "numerics", "ungated")),
        [FAILURE_GONE, NOTE_GONE, HURRY],
    ),
    "a failed result of a second card is deleted": (
        lambda w: (failed(w, "sm_121"), without(failed(w, "sm_121"), "numerics", "ungated")),
        [FAILURE_GONE.replace("sm_120", "sm_121"), NOTE_GONE, HURRY],
    ),
    "only the note is deleted": (
        lambda w: (failed(w), without(failed(w), "ungated")),
        ["gate numerics on sm_120: failed: case-2", NOTE_GONE, HURRY],
    ),
    "an older passed result stands in the failed one's place": (
        lambda w: (failed(w), {**failed(w), "numerics": before(w)["numerics"]}),
        [HURRY, FAILURE_GONE, f"numerics: {ADDED}"],
    ),
    "an older passed result is added": (
        lambda w: (w.envelopes(), {**w.envelopes(), "numerics": before(w)["numerics"]}),
        [f"numerics: {ADDED}"],
    ),
    "a stranger adds a result": (
        lambda w: (w.envelopes(), {**w.envelopes(), "x": result(w, "passed", key=w.other_key)}),
        [STRANGER],
    ),
    "an unsigned result is added": (
        lambda w: (
            w.envelopes(),
            {**w.envelopes(), "x": enclose(result(w, "passed").statement)},
        ),
        [UNSIGNED, f"x: {ADDED}"],
    ),
    "the set is deleted with what failed": (
        lambda w: (failed(w), without(failed(w), "numerics", "ungated", SET)),
        [NO_SET],
    ),
    "the set is deleted alone": (
        lambda w: (w.envelopes(), without(w.envelopes(), SET)),
        [NO_SET],
    ),
    "a stranger signs another set": (
        lambda w: (
            failed(w),
            {
                **without(failed(w), "numerics", "ungated"),
                SET: enclose(w.envelopes()[SET].statement, [LocalSigner(w.other_key)]),
            },
        ),
        [STRANGER, NO_SET],
    ),
    "the set is unsigned and fits": (
        lambda w: (
            failed(w),
            {
                **without(failed(w), "numerics", "ungated"),
                SET: enclose(w.envelopes()[SET].statement),
            },
        ),
        [UNSIGNED, NO_SET],
    ),
    "a bill is deleted": (
        lambda w: (w.envelopes(), without(w.envelopes(), "sbom-spdx")),
        [f"spdx: {GONE}"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ATTACKS)
def test_evidence_that_was_taken_away_added_or_exchanged_is_reported(
    places: Places, world: World, name: str, form: Form
) -> None:
    attack, wanted = ATTACKS[name]
    node = places.show(form, *attack(world))
    assert node.verdict in (Verdict.BROKEN, Verdict.INCOMPLETE), show(node)
    # in a registry each piece is named by its digest
    said = [re.sub(r"^…: |^\w+\.dsse\.json: ", "", each) for each in reasons(node)]
    wanted = [re.sub(rf"^\w+: {ADDED}", ADDED, each) for each in wanted]
    assert sorted(each for each in said if not each.startswith("image signature")) == sorted(wanted)


@pytest.mark.parametrize("form", ["registry", "layout"])
def test_older_evidence_put_back_whole_does_not_fit_the_signed_name(
    places: Places, world: World, form: Form
) -> None:
    node = places.show(form, failed(world), before(world))
    assert node.verdict is Verdict.BROKEN
    assert "was signed with an evidence set that is missing" in show(node)


@pytest.mark.parametrize("form", ["registry", "layout"])
def test_without_name_and_set_nothing_is_valid(places: Places, world: World, form: Form) -> None:
    shown = without(failed(world), "numerics", "ungated", SET)
    node = places.show(form, failed(world), shown, named=False)
    assert node.verdict is Verdict.INCOMPLETE
    assert "some may be missing" in show(node)


@pytest.mark.parametrize("form", FORMS)
def test_a_later_set_replaces_results_of_the_same_gate_and_card(
    places: Places, world: World, form: Form
) -> None:
    """The registry keeps what was published before; it is shown and no longer counts."""
    old = {f"old-{k}": e for k, e in failed(world).items() if k in ("numerics", SET)}
    old["old-ungated"] = failed(world)["ungated"]
    new = world.with_set({**world.envelopes(), "numerics": result(world, "passed")}, when=LATER)
    node = places.show(form, new, {**new, **old})
    assert "replaced by a statement of the latest set" in show(node)
    assert show(node).count("an older set; the latest one counts") == 1
    # that it was once published past its gates stays with it
    assert node.verdict is Verdict.INCOMPLETE
    assert "in a hurry" in node.culprit().message


@pytest.mark.parametrize("form", FORMS)
def test_a_later_set_without_the_gate_does_not_hide_its_failure(
    places: Places, world: World, form: Form
) -> None:
    old = {f"old-{k}": e for k, e in failed(world).items() if k in ("numerics", "ungated", SET)}
    new = world.with_set(world.envelopes(), when=LATER)
    node = places.show(form, new, {**new, **old})
    assert node.verdict is Verdict.BROKEN
    assert "failed: case-2" in node.culprit().message


def test_two_keys_with_a_set_each_are_both_held_to_theirs(world: World) -> None:
    second = [LocalSigner(world.other_key)]
    theirs = {"theirs": enclose(result(world, "failed", when=LATER).statement, second)}
    their_set = enclose(world.with_set(theirs, when=LATER)[SET].statement, second)
    trust = trust_in(trusted(world.key), trusted(world.other_key, "second"))
    node = world.walk({**world.envelopes(), "their-set": their_set}, trust).node
    assert node.verdict is Verdict.BROKEN
    assert "numerics on sm_120, failed" in node.culprit().title


def test_a_witness_without_a_set_may_vouch_for_a_rebuild_and_nothing_else(world: World) -> None:
    second = LocalSigner(world.other_key)
    trust = trust_in(trusted(world.key), trusted(world.other_key, "second"))
    passed = enclose(result(world, "passed").statement, [second])
    node = world.walk({**world.envelopes(), "theirs": passed}, trust).node
    assert node.verdict is Verdict.INCOMPLETE
    assert "more of that signer's may be missing" in node.culprit().message


def test_a_second_signature_on_a_statement_changes_nothing_of_the_set(world: World) -> None:
    second, good = LocalSigner(world.other_key), world.envelopes()
    both = {name: countersigned(e, second) for name, e in without(good, "rebuild").items()}
    trust = trust_in(trusted(world.key), trusted(world.other_key, "second"))
    # a registry holds both, as they were and as they are
    envelopes = {**both, **{f"{name}-before": e for name, e in good.items()}, SET: both[SET]}
    node = world.walk(envelopes, trust).node
    assert node.verdict is Verdict.VALID, show(node)


def test_a_set_that_contradicts_a_statement_is_broken(world: World) -> None:
    good = without({**world.envelopes(), "numerics": result(world, "failed")}, SET)
    body = json.loads(world.with_set(good)[SET].payload)
    for each in body["predicate"]["statements"]:
        if each["about"] == "numerics on sm_120":
            each["verdict"] = "passed"
    lie = sign_bytes(canonical_json(body), world.key)
    node = world.walk({**good, SET: lie}).node
    assert node.verdict is Verdict.BROKEN
    assert "contradicts the set" in show(node)


@pytest.mark.parametrize(("field", "value"), [("image", "other"), ("platform", "linux/arm64")])
def test_a_set_of_another_image_is_broken(world: World, field: str, value: str) -> None:
    body = json.loads(world.envelopes()[SET].payload)
    body["predicate"][field] = value
    lie = sign_bytes(canonical_json(body), world.key)
    node = world.walk({**world.envelopes(), SET: lie}).node
    assert node.verdict is Verdict.BROKEN
    assert "its set is of" in node.culprit().message


def test_the_plain_note_of_a_registry_still_counts(places: Places, world: World) -> None:
    site = places.site
    site.publish()
    site.attach(b'{"gates":"numerics: failed","reason":"why not"}', kind=UNGATED_MEDIA)
    assert site.judge().verdict is Verdict.INCOMPLETE


def test_in_an_index_an_image_whose_own_name_was_deleted_is_reported(
    places: Places, world: World
) -> None:
    """The name of the index stays; older evidence is put back under the image without its name."""
    site = places.site
    both = plan_upload(world.store, [world.built], index=True)
    bundle = EvidenceBundle({AMD64: list(failed(world).values())}, LocalSigner(world.key))
    site.publish("both", shipment=both, bundle=bundle)
    tag = fallback_tag(site.digest)
    for name in (f"{tag}.att", f"{tag}.sig"):
        del site.tiny.tags[NAME, name]
    put(site.tiny, index_json(), tag)
    for envelope in before(world).values():
        site.attach(envelope.dump())
    node = site.judge(":both")
    assert node.verdict is Verdict.INCOMPLETE, show(node)
    assert "covers its evidence set" in node.culprit().message


def test_a_name_by_cosign_alone_does_not_vouch_for_evidence(places: Places, world: World) -> None:
    site, tag = places.site, fallback_tag(places.site.digest)
    site.publish()
    made = signature_attachment(site.digest, f"{site.repository}:v1", LocalSigner(world.key))
    site.tiny.blobs[NAME, digest_of(made.data)] = made.data
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, f"{tag}.sig"]][1])
    layer = {**described(made.data, made.media_type), "annotations": made.annotations}
    put(site.tiny, {**body, "layers": [*body["layers"], layer]}, f"{tag}.sig")
    assert site.judge(f"@{site.digest}").verdict is Verdict.VALID  # beside the one that commits
    put(site.tiny, {**body, "layers": [layer]}, f"{tag}.sig")
    index = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    kept = [d for d in index["manifests"] if "cosign.artifact.sig" not in d.get("artifactType", "")]
    put(site.tiny, {**index, "manifests": kept}, tag)
    assert site.judge(f"@{site.digest}").verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize(
    ("card", "verdict", "wanted"),
    [
        ("sm_120", "failed", Verdict.BROKEN),
        ("sm_120", "unknown", Verdict.INCOMPLETE),
        ("sm_100", "failed", Verdict.VALID),
        ("sm_100", "unknown", Verdict.VALID),
    ],
)
def test_a_card_that_the_image_is_not_for_decides_nothing(
    world: World, card: str, verdict: GateVerdict, wanted: Verdict
) -> None:
    """Somebody was curious about another card; publishing does not count it either."""
    node = world.walk(world.with_set({**world.envelopes(), "x": result(world, verdict, card)})).node
    assert node.verdict is wanted, show(node)
    assert f"gate numerics on {card}" in show(node)


def test_no_selection_of_all_that_was_ever_signed_makes_a_failed_image_valid(
    world: World,
) -> None:
    """Two hundred attackers with all statements of both days, a stranger's and unsigned copies."""
    dice = random.Random(12)
    newer, older = failed(world), before(world)
    pool = [*newer.values(), *older.values(), result(world, "passed", key=world.other_key)]
    pool += [enclose(e.statement) for e in (*newer.values(), *older.values())]
    pool.append(enclose(older[SET].statement, [LocalSigner(world.other_key)]))
    given = ("x.example/y:v1", LocalSigner(world.key), NOW, sha256_of(newer[SET].payload))
    name = signature_attachment(world.built.digest, *given)
    signed = AttachedBlob("name", name.media_type, name.data, name.annotations[SIGNATURE_NOTE])
    context = VerifyContext(world.trust, world.checkout, NOW)
    seen = set()
    read = cache(lambda data: read_item("", data))  # many times the same bytes
    for _ in range(200):
        chosen = dice.sample(pool, dice.randint(1, len(pool)))
        if dice.random() < 0.5:  # begin with what would do, but for the name
            chosen = [*older.values(), *dice.sample(chosen, dice.randint(0, min(3, len(chosen))))]
        items = [replace(read(e.dump()), name=str(i)) for i, e in enumerate(chosen)]
        attached = AttachedEvidence(items=items, signatures=[signed])
        seen.add(judge_attached(world.artifact, attached, context).node.verdict)
    assert seen == {Verdict.BROKEN}
    good = AttachedEvidence([read_item(k, e.dump()) for k, e in older.items()])
    assert judge_attached(world.artifact, good, context).node.verdict is Verdict.VALID

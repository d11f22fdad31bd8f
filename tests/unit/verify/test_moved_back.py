"""A tag moved back to an older image that was once signed under it, and what must not look so."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.cosign import NAMED_AT, read_payload, signature_attachment
from pipeline.artifacts.attest.keys import LocalSigner, PrivateKey
from pipeline.artifacts.attest.statement import Moment
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import PipelineError
from pipeline.core.model import canonical_json
from pipeline.evidence.publish.evidence import EvidenceBundle
from pipeline.evidence.publish.publish import plan_upload
from pipeline.evidence.verify.naming import TagMemory, TrustedName, judge_names, judge_tag
from pipeline.evidence.verify.verdict import Node, Verdict, verdict_error
from tests.makers import built_image
from tests.testbed.oci_door import Reply, Request, drop, oci_door
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.registry.support import NAME, described, manifest_json, put
from tests.unit.verify.test_registry_evidence import AMD64, SharedSite, Site, shared_site
from tests.unit.verify.world import NOW, World, trust_in, trusted

FIRST, SECOND, THIRD = (NOW - timedelta(hours=h) for h in (3, 2, 1))


@pytest.fixture
def tiny() -> TinyRegistry:
    return TinyRegistry(has_referrers=False)


@pytest.fixture(scope="module")
def shared(world: World, new_folder: Callable[[str], Path]) -> Iterator[SharedSite]:
    """The world's image under v1 first, then another one."""

    def publish(site: Site) -> None:
        publish_first(site, FIRST)
        publish_other(site, SECOND)

    with shared_site(world, new_folder("site"), publish) as made:
        yield made


@pytest.fixture
def site(shared: SharedSite, tiny: TinyRegistry, tmp_path: Path) -> Site:
    return shared.copy(tiny, tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> TagMemory:
    return TagMemory(open_store(tmp_path / "verifier"))


def publish_first(site: Site, now: datetime | None, tag: str = "v1") -> str:
    envelopes = {AMD64: list(site.world.envelopes().values())}
    return site.publish(
        tag, bundle=EvidenceBundle(envelopes, LocalSigner(site.world.key), now)
    ).digest


def publish_other(
    site: Site, now: datetime | None, tag: str = "v1", key: PrivateKey | None = None
) -> str:
    store: Store = open_store(site.folder / "other")
    layer = b"layer of the other image"
    config = canonical_json({"rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}})
    digest = store.put_blob(canonical_json(manifest_json(config, layer)))
    for data in (config, layer):
        store.put_blob(data)
    built = built_image("engine", AMD64, digest)
    bundle = EvidenceBundle(signer=LocalSigner(key or site.world.key), now=now)
    return site.publish(tag, shipment=plan_upload(store, [built]), bundle=bundle).digest


def move_back(site: Site) -> None:
    site.tiny.tags[NAME, "v1"] = site.digest


def forget_the_newer(site: Site) -> None:
    """Who may move a tag may also delete what was signed under it."""
    newer = site.tiny.tags[NAME, "v1"]
    del site.tiny.tags[NAME, f"{fallback_tag(newer)}.sig"]


def tag_of(node: Node) -> Node:
    return node.children[0]


def test_a_tag_moved_back_is_found_out_by_who_saw_it_before(site: Site, memory: TagMemory) -> None:
    newer = site.tiny.tags[NAME, "v1"]
    assert tag_of(site.judge(memory=memory)).verdict is Verdict.VALID
    move_back(site)
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.MOVED
    assert tag_of(node).message.startswith(
        f"moved back: builder signed {newer} under it at 2026-06"
    )
    assert type(verdict_error(node)).__name__ == "TagMoved"
    assert site.judge(memory=memory).verdict is Verdict.MOVED  # once more
    assert site.judge(f"@{site.digest}", memory=memory).verdict is Verdict.VALID
    publish_other(site, THIRD)  # its owner puts it right
    assert tag_of(site.judge(memory=memory)).verdict is Verdict.VALID


def test_also_where_what_was_signed_since_is_deleted(site: Site, memory: TagMemory) -> None:
    site.judge(memory=memory)
    forget_the_newer(site)
    move_back(site)
    assert site.judge(memory=memory).verdict is Verdict.MOVED


def test_who_never_saw_the_newer_one_cannot_tell(site: Site, memory: TagMemory) -> None:
    move_back(site)
    assert site.judge(memory=memory).verdict is Verdict.VALID
    assert site.judge().verdict is Verdict.VALID


def test_a_name_that_is_signed_before_the_tag_moves_moves_nothing_yet(
    site: Site, memory: TagMemory
) -> None:
    """As a publish leaves it that is killed just before its last step."""
    publish_first(site, THIRD)
    site.judge(memory=memory)
    publish_other(site, NOW)
    move_back(site)
    assert site.judge(memory=memory).verdict is Verdict.VALID


def test_who_publishes_the_older_image_again_signs_it_again(site: Site, memory: TagMemory) -> None:
    site.judge(memory=memory)
    publish_first(site, THIRD)
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.VALID
    assert f"at {THIRD:%Y-%m-%d %H:%M:%S} UTC" in tag_of(node).message


def test_a_clock_that_went_back_does_not_make_a_newer_image_the_older_one(
    site: Site, memory: TagMemory
) -> None:
    site.judge(memory=memory)
    assert publish_first(site, FIRST - timedelta(days=1)) == site.digest
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.VALID
    assert f"at {SECOND + timedelta(seconds=1):%Y-%m-%d %H:%M:%S} UTC" in tag_of(node).message


def test_publishing_what_the_tag_names_already_signs_nothing_new(site: Site) -> None:
    publish_first(site, THIRD)
    before = dict(site.tiny.tags), len(site.tiny.blobs)
    publish_first(site, NOW)
    assert (dict(site.tiny.tags), len(site.tiny.blobs)) == before


def test_a_damaged_signature_in_the_registry_does_not_keep_its_owner_from_signing_anew(
    site: Site, memory: TagMemory
) -> None:
    tag = f"{fallback_tag(site.digest)}.sig"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    site.tiny.blobs[NAME, body["layers"][0]["digest"]] = b"other bytes"
    publish_first(site, THIRD)
    node = site.judge(memory=memory)
    assert tag_of(node).verdict is Verdict.VALID
    assert node.verdict is Verdict.BROKEN  # the damaged one is still there, and named


def test_a_newer_image_under_another_tag_is_no_matter(site: Site, memory: TagMemory) -> None:
    site.judge(memory=memory)
    publish_first(site, FIRST, "old")
    assert site.judge(":old", memory=memory).verdict is Verdict.VALID


def test_a_newer_name_by_a_stranger_is_no_matter(site: Site, memory: TagMemory) -> None:
    believed = trust_in(trusted(site.world.key), trusted(site.world.other_key, "second"))
    publish_first(site, THIRD)
    publish_other(site, NOW, key=site.world.other_key)
    site.judge(trust=believed, memory=memory)
    move_back(site)
    assert site.judge(memory=memory).verdict is Verdict.VALID
    assert site.judge(trust=believed, memory=memory).verdict is Verdict.MOVED


def test_an_older_name_without_a_time_is_older_than_any_with_one(
    world: World, tiny: TinyRegistry, tmp_path: Path, memory: TagMemory
) -> None:
    with oci_door(tiny) as door:
        site = Site(world, tiny, door, tmp_path)
        publish_first(site, None)
        publish_other(site, FIRST)
        site.judge(memory=memory)
        move_back(site)
        node = site.judge(memory=memory)
        assert node.verdict is Verdict.MOVED
        assert "only without a time" in tag_of(node).message


def test_names_without_times_cannot_be_told_apart_and_the_tree_says_so(
    world: World, tiny: TinyRegistry, tmp_path: Path, memory: TagMemory
) -> None:
    with oci_door(tiny) as door:
        site = Site(world, tiny, door, tmp_path)
        publish_first(site, None)
        publish_other(site, None)
        site.judge(memory=memory)
        move_back(site)
        assert tag_of(site.judge(memory=memory)).message.endswith("under it without a time")


def test_what_a_key_said_counts_no_longer_once_it_is_revoked(site: Site, memory: TagMemory) -> None:
    keys = site.world.key, site.world.other_key
    both = trust_in(*(trusted(k, n) for k, n in zip(keys, ("builder", "second"), strict=True)))
    publish_other(site, THIRD, key=site.world.other_key)
    site.judge(trust=both, memory=memory)
    forget_the_newer(site)
    publish_first(site, SECOND + timedelta(minutes=1))
    assert site.judge(trust=both, memory=memory).verdict is Verdict.MOVED
    gone = {"since": NOW, "reason": "was stolen", "compromised": True}
    revoked = trust_in(trusted(keys[0]), trusted(keys[1], "second", revoked=gone))
    assert site.judge(trust=revoked, memory=memory).verdict is Verdict.VALID
    assert site.judge(trust=site.world.trust, memory=memory).verdict is Verdict.VALID


@pytest.mark.parametrize("text", ["", "[]", '{"reference": "x", "names": {}}'])
def test_a_damaged_memory_counts_as_none_and_is_written_anew(
    site: Site, memory: TagMemory, tmp_path: Path, text: str
) -> None:
    site.judge(memory=memory)
    (kept,) = (tmp_path / "verifier" / "verified").iterdir()
    whole = kept.read_bytes()
    kept.write_text(text)
    site.judge(memory=memory)
    assert kept.read_bytes() == whole


def test_a_name_from_the_future_is_not_believed(site: Site, memory: TagMemory) -> None:
    site.judge(memory=memory)
    publish_first(site, NOW + timedelta(days=1))
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.MOVED  # what is believed of this image is older
    assert "in the future" in json.dumps(node.as_json())


def test_a_signature_of_another_image_that_cannot_be_read_is_as_if_it_were_not_there(
    site: Site,
) -> None:
    site.tiny.tags[NAME, "stable"] = site.digest
    other = site.tiny.tags[NAME, "v1"]
    tag = f"{fallback_tag(other)}.sig"
    site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]] = ("x/y", b"{}")
    assert site.judge(":stable").verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize("when", ["yesterday", 5, "2026-13-01T00:00:00Z", ["x"]])
def test_a_time_that_cannot_be_read_is_no_signature(site: Site, when: Any) -> None:
    made = signature_attachment(site.digest, f"{site.repository}:v1", LocalSigner(site.world.key))
    payload = json.loads(made.data)
    payload["optional"] = {NAMED_AT: when}
    data = json.dumps(payload).encode()
    forged = replace(made, data=data)
    site.tiny.blobs[NAME, digest_of(data)] = data
    tag = f"{fallback_tag(site.digest)}.sig"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    body["layers"] = [{**described(data, forged.media_type), "annotations": forged.annotations}]
    put(site.tiny, body, tag)
    move_back(site)
    node = site.judge()
    assert "is not a time like" in json.dumps(node.as_json())
    assert f"{FIRST:%H:%M:%S}" in tag_of(node).message  # what was signed before counts still


def test_what_cosign_writes_itself_has_no_time_of_ours(world: World) -> None:
    made = signature_attachment(world.built.digest, "x.example/y", LocalSigner(world.key))
    payload = json.loads(made.data)
    payload["optional"] = {"creator": "cosign", "timestamp": 1700000000}
    assert read_payload(json.dumps(payload).encode()).at is None


def test_nothing_is_remembered_without_a_trust_file(site: Site, memory: TagMemory) -> None:
    nobody = Trust()
    site.judge(trust=nobody, memory=memory)
    assert memory.recall(f"{site.repository}:v1", site.world.trust, NOW) == []


def test_stopped_at_any_request_the_tag_is_on_an_image_whose_evidence_is_whole(site: Site) -> None:
    """The registry vanishes after request n: what a kill looks like from there."""
    before = {name: dict(getattr(site.tiny, name)) for name in ("blobs", "manifests", "tags")}
    site.door.asked.clear()
    publish_first(site, THIRD, "stable")
    steps = len(site.door.asked)
    for stop_after in range(1, steps, 7):
        for name, things in before.items():
            getattr(site.tiny, name).clear()
            getattr(site.tiny, name).update(things)
        counter = itertools.count()

        def vanishing(request: Request, last: int = stop_after, n: object = counter) -> Reply:
            if next(n) >= last:  # type: ignore[call-overload]
                return drop()(request, site.tiny)
            return site.tiny(request)

        site.door.backend = vanishing
        with suppress(PipelineError):
            publish_first(site, THIRD, "stable")
        site.door.backend = site.tiny
        if (NAME, "stable") in site.tiny.tags:
            assert site.judge(":stable").verdict is Verdict.VALID
        publish_first(site, THIRD + timedelta(minutes=1), "stable")
        assert site.judge(":stable").verdict is Verdict.VALID


def name_of(
    digest: str, at: datetime, evidence_set: str | None = None, key: str = f"sha256:{0:064}"
) -> TrustedName:
    return TrustedName(
        key="builder",
        key_id=key,
        digest=digest,
        reference="x.example/y:v1",
        at=at,
        evidence_set=evidence_set,
    )


@pytest.mark.parametrize("order", list(itertools.permutations([FIRST, SECOND, THIRD])))
@pytest.mark.parametrize("at_once", [True, False])
def test_the_newest_name_is_remembered_in_whatever_order_names_are_seen(
    world: World, memory: TagMemory, order: tuple[datetime, ...], at_once: bool
) -> None:
    key, reference = world.trust.keys[0].id, "x.example/y:v1"
    digests = {FIRST: "1", SECOND: "2", THIRD: "3"}
    names = [name_of(f"sha256:{digests[at] * 64}", at, key=key) for at in order]
    for seen in [names] if at_once else [[name] for name in names]:
        for name in seen:
            memory.remember(reference, name.digest, [name])
    (kept,) = memory.recall(reference, world.trust, NOW)
    assert (kept.digest, kept.at) == (f"sha256:{'3' * 64}", THIRD)


def test_of_two_names_at_one_time_the_first_seen_stays(world: World, memory: TagMemory) -> None:
    key, reference = world.trust.keys[0].id, "x.example/y:v1"
    for digit in "12":
        named = name_of(f"sha256:{digit * 64}", FIRST, key=key)
        memory.remember(reference, named.digest, [named])
    assert memory.recall(reference, world.trust, NOW)[0].digest == f"sha256:{'1' * 64}"


def test_older_evidence_put_back_with_its_older_name_is_reported_by_who_saw_the_newer(
    world: World, tiny: TinyRegistry, memory: TagMemory, tmp_path: Path
) -> None:
    """The same image under the same tag: only its evidence was put back to what it was."""
    with oci_door(tiny) as door:
        site = Site(world, tiny, door, tmp_path)
        publish_first(site, FIRST)
        tags, manifests = dict(tiny.tags), dict(tiny.manifests)
        assert site.judge(memory=memory).verdict is Verdict.VALID
        later = Moment(at="2026-05-31T09:00:00Z", invocation="urn:uuid:1")
        other = {name: e for name, e in world.envelopes().items() if name != "sbom-spdx"}
        envelopes = world.with_set(other, when=later)
        bundle = EvidenceBundle({AMD64: list(envelopes.values())}, LocalSigner(world.key), SECOND)
        site.publish(bundle=bundle)
        assert site.judge(memory=memory).verdict is Verdict.VALID
        tiny.tags.clear()
        tiny.tags.update(tags)
        tiny.manifests.clear()
        tiny.manifests.update(manifests)
        node = site.judge(memory=memory)
        assert node.verdict is Verdict.MOVED
        assert tag_of(node).message.startswith("older evidence was put back")
        assert site.judge().verdict is Verdict.VALID  # who never saw the newer cannot know


ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
OLD_SET, NEW_SET = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
OTHER_KEY = f"sha256:{9:064}"


@pytest.mark.parametrize(
    ("changes", "is_replaced"),
    [
        ({}, True),
        ({"at": FIRST}, False),
        ({"at": None}, False),
        ({"key_id": OTHER_KEY}, False),
        ({"reference": "x.example/y:v2"}, False),
        ({"digest": TWO}, False),
    ],
)
def test_a_set_may_be_gone_once_its_key_gave_the_same_name_again(
    changes: dict[str, Any], is_replaced: bool
) -> None:
    again = name_of(ONE, SECOND, NEW_SET).model_copy(update=changes)
    first = judge_names(ONE, [name_of(ONE, FIRST, OLD_SET), again], [NEW_SET])[0]
    missing = f"was signed with an evidence set that is missing: {OLD_SET}"
    wanted = (Verdict.VALID, "as x.example/y:v1") if is_replaced else (Verdict.BROKEN, missing)
    assert (first.verdict, first.message) == wanted


def test_the_last_name_needs_its_set_and_must_be_of_this_image() -> None:
    first, last = name_of(ONE, FIRST, OLD_SET), name_of(ONE, SECOND, NEW_SET)
    nodes = judge_names(ONE, [first, last], [OLD_SET])
    assert [node.verdict for node in nodes] == [Verdict.VALID, Verdict.BROKEN]
    (node,) = judge_names(TWO, [last], [NEW_SET])
    assert (node.verdict, node.message) == (Verdict.BROKEN, f"is about {ONE}, not about this")
    assert judge_names(ONE, [name_of(ONE, FIRST)])[0].verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("own", "others", "verdict", "message"),
    [
        ([], [], Verdict.INCOMPLETE, f"no trusted signature names {ONE} (signed as nothing)"),
        ([("v2", ONE, FIRST)], [], Verdict.INCOMPLETE, "(signed as x.example/y:v2)"),
        ([("v1", TWO, FIRST)], [], Verdict.INCOMPLETE, "(signed as nothing)"),
        ([], [("v1", TWO, FIRST)], Verdict.MOVED, f"moved after signing: builder signed {TWO}"),
        ([], [("v2", TWO, FIRST)], Verdict.INCOMPLETE, "(signed as nothing)"),
        ([("v1", ONE, FIRST)], [("v1", TWO, FIRST)], Verdict.MOVED, f"builder signed {TWO} under"),
        ([("v1", ONE, FIRST)], [("v1", TWO, SECOND)], Verdict.MOVED, "moved back: builder signed"),
        ([("v1", ONE, SECOND)], [("v1", TWO, FIRST)], Verdict.VALID, "signed under it at 2026-06"),
        ([("v1", ONE, FIRST)], [("v2", TWO, SECOND)], Verdict.VALID, "signed under it at 2026-06"),
        (
            [("v1", ONE, FIRST), ("v1", ONE, THIRD)],
            [("v1", TWO, SECOND)],
            Verdict.VALID,
            "11:00:00",
        ),
        ([("v1", ONE, None)], [], Verdict.VALID, "builder signed under it without a time"),
        (
            [("v1", ONE, None)],
            [("v1", TWO, FIRST)],
            Verdict.MOVED,
            f"and {ONE} only without a time",
        ),
    ],
)
def test_a_tag_is_judged_by_the_last_names_under_it(
    own: list[tuple[str, str, datetime]],
    others: list[tuple[str, str, datetime]],
    verdict: Verdict,
    message: str,
) -> None:
    names, rest = (
        [
            name_of(digest, at).model_copy(update={"reference": f"x.example/y:{tag}"})
            for tag, digest, at in given
        ]
        for given in (own, others)
    )
    node = judge_tag("x.example/y:v1", ONE, names, rest)
    assert (node.title, node.verdict) == ("tag v1", verdict)
    assert message in node.message

from __future__ import annotations

import itertools
import json
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.artifacts.attest.cosign import UNGATED_MEDIA, Content
from pipeline.artifacts.registry.referrers import artifact_kind, referrers
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import (
    AttachmentInvalid,
    NotInRegistry,
    PipelineError,
    RegistryBroken,
    RegistryUnreachable,
    StoreDamaged,
)
from pipeline.evidence.publish.attachment import Attachment, file_attachment
from pipeline.evidence.publish.known import KnownRepository
from pipeline.evidence.publish.publish import plan_upload, push_with_evidence, rehearse
from pipeline.images.assemble.image import Built
from pipeline.images.gate.state import GateState
from tests.testbed.oci_door import Door, Reply, Request, changed, drop, lose_answer, status
from tests.testbed.oci_door import with_body as with_body_instead
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.publish.conftest import MakeOrder, keep_image, some_bytes
from tests.unit.registry.support import NAME

BEFORE_TAG = [
    ("HEAD", "blobs"),
    ("POST", "uploads"),
    ("PUT", "uploads"),
    ("PUT", "manifests/sha256"),
    ("GET", "manifests/sha256"),
]
AT_TAG = [("PUT", "manifests/v1"), ("GET", "manifests/v1")]


def is_complete(tiny: TinyRegistry, tag: str) -> bool:
    """Whether everything that a tag leads to is there."""
    todo = [tiny.tags[NAME, tag]]
    for digest in todo:
        if (NAME, digest) not in tiny.manifests:
            return False
        body = json.loads(tiny.manifests[NAME, digest][1])
        todo += [m["digest"] for m in body.get("manifests", [])]
        parts = [body["config"], *body["layers"]] if "layers" in body else []
        if any(digest_of(tiny.blobs.get((NAME, p["digest"]), b"")) != p["digest"] for p in parts):
            return False
    return True


def test_all_platforms_go_under_one_index_and_the_tag_comes_last(
    store: Store, order: MakeOrder, built: list[Built], tiny: TinyRegistry, door: Door
) -> None:
    done = push_with_evidence(store, order())
    assert tiny.tags[NAME, "v1"] == done.digest
    assert is_complete(tiny, "v1")
    index = json.loads(tiny.manifests[NAME, done.digest][1])
    assert [m["digest"] for m in index["manifests"]] == [b.digest for b in built]
    assert [m["platform"]["architecture"] for m in index["manifests"]] == ["amd64", "arm64"]
    assert index["annotations"] == {"org.opencontainers.image.title": "app"}
    puts = [a.path.rpartition("/")[2] for a in door.asked if a.method == "PUT"]
    assert puts[-1] == "v1"


def test_the_bytes_published_are_those_of_the_store(
    store: Store, order: MakeOrder, built: list[Built], tiny: TinyRegistry
) -> None:
    push_with_evidence(store, order())
    for image in built:
        assert tiny.manifests[NAME, image.digest][1] == store.read_blob(image.digest)
    for (_, digest), data in tiny.blobs.items():
        assert store.read_blob(digest) == data


def test_one_platform_needs_no_index_unless_asked(store: Store, built: list[Built]) -> None:
    assert plan_upload(store, built[:1]).root.digest == built[0].digest
    assert plan_upload(store, built[:1], index=True).root.kind == "index"


def test_the_index_is_the_same_whenever_it_is_made(store: Store, built: list[Built]) -> None:
    one, two = plan_upload(store, built), plan_upload(store, built[::-1])
    assert one.root.data == two.root.data


def test_a_second_publish_sends_nothing(store: Store, order: MakeOrder, door: Door) -> None:
    first = push_with_evidence(store, order())
    assert first.sent_bytes == first.total_bytes == door.uploaded_bytes
    before = door.uploaded_bytes
    again = push_with_evidence(store, order())
    assert (again.sent_bytes, again.blobs["sent"], again.blobs["there"]) == (0, 0, 5)
    assert door.uploaded_bytes == before


def test_layers_of_a_neighbour_are_mounted(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry
) -> None:
    push_with_evidence(store, order())
    before = door.uploaded_bytes
    done = push_with_evidence(store, order("team/other"))
    assert done.blobs == {"there": 0, "mounted": 5, "sent": 0}
    assert door.uploaded_bytes == before
    assert tiny.tags["team/other", "v1"] == done.digest


def test_a_memory_that_is_wrong_costs_nothing_but_the_upload(
    store: Store, order: MakeOrder, tiny: TinyRegistry
) -> None:
    push_with_evidence(store, order())
    tiny.blobs.clear()
    assert push_with_evidence(store, order("team/other")).blobs["sent"] == 5


def test_a_rehearsal_writes_nothing(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry
) -> None:
    done = rehearse(order())
    assert (done.dry_run, done.sent_bytes) == (True, done.total_bytes)
    assert {a.method for a in door.asked} <= {"GET", "HEAD"}
    assert not tiny.blobs


@pytest.mark.parametrize("code", [429, 500, 503])
@pytest.mark.parametrize(("method", "place"), [*BEFORE_TAG, *AT_TAG])
def test_a_bad_moment_at_each_step_passes(
    store: Store,
    order: MakeOrder,
    door: Door,
    tiny: TinyRegistry,
    method: str,
    place: str,
    code: int,
) -> None:
    made = order()
    door.fail(method, place, status(code, Retry_After="0"), times=2)
    push_with_evidence(store, made)
    assert is_complete(tiny, "v1")


@pytest.mark.parametrize(("method", "place"), BEFORE_TAG)
def test_a_bad_day_at_each_step_leaves_the_tag_where_it_was(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry, method: str, place: str
) -> None:
    tiny.tags[NAME, "v1"] = "sha256:before"
    made = order()
    door.fail(method, place, status(500), times=99)
    with pytest.raises(RegistryUnreachable):
        push_with_evidence(store, made)
    assert tiny.tags[NAME, "v1"] == "sha256:before"


def test_a_manifest_that_comes_back_as_another_stops_before_the_tag(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry, built: list[Built]
) -> None:
    made = order()
    door.fail("GET", "manifests/sha256", with_body_instead(b"{}"))
    with pytest.raises(RegistryBroken):
        push_with_evidence(store, made)
    assert (NAME, "v1") not in tiny.tags


def test_evidence_that_a_registry_took_and_lost_stops_before_the_tag(
    store: Store, order: MakeOrder, tiny: TinyRegistry, door: Door
) -> None:
    content = Content(media_type="application/x.note", data=b"note")
    note = Attachment(artifact_type="application/x.note", layers=(content,))
    digest = push_with_evidence(store, order(attachments=[note])).attached[0].digest
    del tiny.tags[NAME, "v1"]

    def lose(reply: Reply) -> Reply:
        tiny.manifests.pop((NAME, digest))
        return reply

    door.fail("PUT", f"manifests/{digest}", changed(lose))
    with pytest.raises(NotInRegistry, match=digest):
        push_with_evidence(store, order(attachments=[note]))
    assert (NAME, "v1") not in tiny.tags


def test_who_has_to_wait_for_another_publish_is_told_why(
    store: Store, order: MakeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr("pipeline.evidence.publish.known.log.say", messages.put)
    made = order()
    with ThreadPoolExecutor() as pool:
        with KnownRepository(store, made.repository).alone():
            done = pool.submit(push_with_evidence, store, made)
            assert "waiting for it" in messages.get(timeout=30)
            assert not done.done()
        assert done.result(30).digest


def test_a_tag_that_names_something_else_afterwards_is_an_error(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry, built: list[Built]
) -> None:
    def move(reply: Reply) -> Reply:
        tiny.tags[NAME, "v1"] = built[0].digest
        return reply

    made = order()
    door.fail("PUT", "manifests/v1", changed(move))
    with pytest.raises(RegistryBroken, match="came back as"):
        push_with_evidence(store, made)


def test_stopped_after_any_request_the_tag_is_old_or_complete_and_the_rest_is_sent_once(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry
) -> None:
    """The registry vanishes after request n, for every n: what a kill looks like from there."""
    total = push_with_evidence(store, order(jobs=1)).total_bytes
    steps = len(door.asked)
    assert steps > 20
    for stop_after in range(2, steps):
        for shelf in (tiny.blobs, tiny.manifests, tiny.tags, tiny.uploads):
            shelf.clear()
        door.asked.clear()
        counter = itertools.count()

        def vanishing(request: Request, last: int = stop_after, n: object = counter) -> Reply:
            if next(n) >= last:  # type: ignore[call-overload]
                return drop()(request, tiny)
            return tiny(request)

        door.backend = vanishing
        with pytest.raises(PipelineError):
            push_with_evidence(store, order(jobs=1))
        assert (NAME, "v1") not in tiny.tags or is_complete(tiny, "v1")
        door.backend = tiny
        missing = total - sum(len(data) for data in tiny.blobs.values())
        assert push_with_evidence(store, order(jobs=1)).sent_bytes == missing
        assert is_complete(tiny, "v1")


def test_a_lost_answer_to_the_tag_is_no_failure(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry
) -> None:
    made = order()
    door.fail("PUT", "manifests/v1", lose_answer())
    push_with_evidence(store, made)
    assert is_complete(tiny, "v1")


def test_a_blob_that_vanished_from_the_store_stops_before_the_first_request(
    store: Store, built: list[Built], door: Door
) -> None:
    store.blob_path(digest_of(some_bytes("shared", 3000))).unlink()
    with pytest.raises(StoreDamaged, match=r"^layer 1 of \d.* is missing: there is no /"):
        plan_upload(store, built)


def test_a_blob_that_changed_in_the_store_is_never_tagged(
    store: Store, order: MakeOrder, tiny: TinyRegistry
) -> None:
    path = store.blob_path(digest_of(some_bytes("shared", 3000)))
    path.write_bytes(b"x" * 3000)
    with pytest.raises(StoreDamaged, match=r"^layer 1 of \d.* is damaged: /.*not match"):
        push_with_evidence(store, order())
    assert (NAME, "v1") not in tiny.tags


def test_attachments_are_found_from_the_index_or_from_their_platform(
    store: Store, order: MakeOrder, built: list[Built], tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("note")
    platforms = [b.platform for b in built]
    whole = file_attachment(f"{tmp_path}/note.txt:text/plain", platforms)
    one = file_attachment(f"linux/arm64={tmp_path}/note.txt:text/markdown", platforms)
    made = order(attachments=[whole, one])
    done = push_with_evidence(store, made)
    assert [a.subject for a in done.attached] == [done.digest, built[1].digest]
    (attached,) = referrers(made.repository, built[1].digest)
    assert attached.artifact_type == "text/markdown"
    assert attached.layers[0].annotations == {"org.opencontainers.image.title": "note.txt"}


def test_evidence_is_counted_and_not_sent_twice(
    store: Store, order: MakeOrder, door: Door, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("note")
    note = file_attachment(f"{tmp_path}/note.txt:text/plain", [])
    done = push_with_evidence(store, order(attachments=[note]))
    assert done.attached_bytes == len("note") + len("{}")  # and the empty config
    assert door.uploaded_bytes == done.sent_bytes + done.attached_bytes
    assert push_with_evidence(store, order(attachments=[note])).attached_bytes == 0


def test_an_attachment_can_have_a_tag_of_its_own(
    store: Store, order: MakeOrder, tiny: TinyRegistry
) -> None:
    content = Content(media_type="application/x.sig", data=b"sig")
    signature = Attachment(artifact_type=None, layers=(content,), tag="sha256-x.sig")
    done = push_with_evidence(store, order(attachments=[signature]))
    assert tiny.tags[NAME, "sha256-x.sig"] == done.attached[0].digest


@pytest.mark.parametrize(
    "message",
    ["note.txt", "note.txt:", "note.txt:text", "gone.txt:text/plain", ":text/plain", ".:a/b"],
)
def test_an_attachment_without_file_or_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("note")
    with pytest.raises(AttachmentInvalid):
        file_attachment(message, ["linux/amd64"])


def test_what_was_forced_past_its_gates_says_so_for_ever(
    store: Store, order: MakeOrder, built: list[Built]
) -> None:
    states = [
        GateState(platform="linux/amd64", state="not passed", message="smem on sm_120: failed"),
        GateState(platform="linux/arm64", state="passed"),
    ]
    made = order(gates=states, ungated_reason="the card is on loan")
    done = push_with_evidence(store, made)
    assert done.ungated_reason == "the card is on loan"
    notes = [
        [d for d in referrers(made.repository, image.digest) if artifact_kind(d) == UNGATED_MEDIA]
        for image in built[:2]
    ]
    ((attached,), none) = notes
    assert attached.annotations == {"sm120.ungated": "the card is on loan"}
    assert none == []


def test_a_reason_that_was_not_needed_is_not_recorded(store: Store, order: MakeOrder) -> None:
    states = [GateState(platform="linux/amd64", state="passed")]
    done = push_with_evidence(store, order(gates=states, ungated_reason="just in case"))
    assert (done.ungated_reason, done.attached) == (None, [])


def test_another_image_of_the_same_layers_sends_only_what_is_its_own(
    store: Store, order: MakeOrder, door: Door
) -> None:
    push_with_evidence(store, order())
    edited = keep_image(
        store, "linux/amd64", some_bytes("shared", 3000), some_bytes("amd", 5000), b"patched"
    )
    done = push_with_evidence(store, order(shipment=plan_upload(store, [edited]), tag="v2"))
    assert done.sent_bytes == len(b"patched")

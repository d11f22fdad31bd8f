from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from pipeline.core.errors import HubBroken, HubRefused, PipelineError, SourceUnreachable
from pipeline.weights.hub import endpoint, is_offline, saved_token
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, Stage, test_hub
from tests.unit.weights.conftest import BIG, SMALL, TOKEN, Bed


def listing(**changes: object) -> bytes:
    entry = {"type": "file", "oid": "a" * 40, "size": 1, "path": "a.json", **changes}
    return json.dumps([entry]).encode()


def test_a_revision_is_a_commit_and_a_commit_is_files_with_hashes(bed: Bed) -> None:
    hub = bed.asker()
    assert hub.commit_of("org/tiny", "main") == bed.commit
    pins = {pin.path: pin for pin in hub.files("org/tiny", bed.commit)}
    assert set(pins) == set(bed.files)
    assert pins[BIG].sha256 is not None
    assert pins[SMALL].git_sha1 is not None
    for path, pin in pins.items():
        hasher = pin.new_hash()
        hasher.update(bed.files[path])
        assert (hasher.hexdigest(), len(bed.files[path])) == (pin.want, pin.size_bytes)


def test_a_netrc_entry_is_not_shown_to_the_hub(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ann password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    bed.asker(None).files("org/tiny", bed.asker(None).commit_of("org/tiny", "main"))
    assert not any(asked.has_token for asked in bed.hub.asked)


def test_all_pages_of_a_tree_are_read(bed: Bed) -> None:
    bed.hub.page_entries = 2
    files = {f"part-{i:02}.json": b"%d" % i for i in range(11)}
    commit = bed.publish(files)
    assert {p.path for p in bed.asker().files("org/tiny", commit)} == set(files)
    assert len([a for a in bed.hub.asked if a.stage == "tree"]) == 6


def test_the_token_is_shown_to_the_hub(bed: Bed) -> None:
    bed.hub.repositories["org/tiny"].token = TOKEN
    assert bed.asker().commit_of("org/tiny", "main") == bed.commit
    for wrong in (None, "hf_wrong"):
        with pytest.raises(HubRefused):
            bed.asker(wrong).commit_of("org/tiny", "main")


@pytest.mark.parametrize(
    ("stage", "bad", "error"),
    [
        ("info", fault.truncated(), HubBroken),
        ("info", fault.answer(b"[]"), HubBroken),
        ("info", fault.answer(b'{"id": "org/tiny"}'), HubBroken),
        ("info", fault.answer(b'{"id": "org/tiny", "sha": "main"}'), HubBroken),
        ("info", fault.answer(b'{"id": "org/tiny", "sha": "' + b"A" * 40 + b'"}'), HubBroken),
        ("info", fault.gated(403), HubRefused),
        ("info", fault.gated(401), HubRefused),
        ("info", fault.status(401), HubRefused),
        ("info", fault.status(403), HubRefused),
        ("info", fault.status(404, X_Error_Code="RevisionNotFound"), HubRefused),
        ("info", fault.status(503), SourceUnreachable),
        ("tree", fault.truncated(), HubBroken),
        ("tree", fault.truncated(0), HubBroken),
        ("tree", fault.page_loop(), HubBroken),
        ("tree", fault.answer(b'{"error": "x"}'), HubBroken),
        ("tree", fault.answer(b"[1]"), HubBroken),
        ("tree", fault.answer(b'[{"type": "file"}]'), HubBroken),
        ("tree", fault.answer(listing(path="../../etc/passwd")), HubBroken),
        ("tree", fault.answer(listing(path="/etc/passwd")), HubBroken),
        ("tree", fault.answer(listing(path=".sm120/lock.yaml")), HubBroken),
        ("tree", fault.answer(listing(path="a\u202eb")), HubBroken),
        ("tree", fault.answer(listing(oid="")), HubBroken),
        ("tree", fault.answer(listing(oid="x" * 40)), HubBroken),
        ("tree", fault.answer(listing(size=-1)), HubBroken),
        ("tree", fault.answer(listing(size="many")), HubBroken),
        (
            "tree",
            fault.answer(listing(lfs={"oid": "b" * 64, "size": 2, "pointerSize": 1})),
            HubBroken,
        ),
        (
            "tree",
            fault.answer(listing(lfs={"oid": "b" * 63, "size": 1, "pointerSize": 1})),
            HubBroken,
        ),
        ("tree", fault.answer(listing()[:-1] + b"," + listing()[1:]), HubBroken),
        ("tree", fault.answer(b"[]", Link='<http://127.0.0.1:9/x>; rel="next"'), HubBroken),
        ("tree", fault.gated(403), HubRefused),
        ("tree", fault.status(404, X_Error_Code="RevisionNotFound"), HubRefused),
    ],
)
def test_an_answer_that_cannot_be_right_has_its_own_ending(
    bed: Bed, stage: str, bad: fault.Fault, error: type[PipelineError]
) -> None:
    bed.hub.fail("*", bad, times=ALWAYS, stage=stage)  # type: ignore[arg-type]
    with pytest.raises(error, match=r"org/tiny|token|circle"):
        bed.asker().files("org/tiny", bed.asker().commit_of("org/tiny", "main"))


def test_empty_pages_without_end_are_left(bed: Bed) -> None:
    link = f'<{bed.hub.url}/api/models/org/tiny/tree/{bed.commit}?cursor=0>; rel="next"'
    bed.hub.fail("*", fault.answer(b"[]", Link=link), times=ALWAYS, stage="tree")
    with pytest.raises(HubBroken, match="repeats a page"):
        bed.asker().files("org/tiny", bed.commit)


def test_a_next_page_elsewhere_does_not_get_the_token(bed: Bed) -> None:
    with test_hub() as other:
        other.add("org/tiny", bed.files)
        link = f'<{other.url}/api/models/org/tiny/tree/main>; rel="next"'
        bed.hub.fail("*", fault.answer(b"[]", Link=link), stage="tree")
        with pytest.raises(HubBroken, match="token"):
            bed.asker().files("org/tiny", bed.commit)
        assert other.asked == []


def test_a_pause_that_the_hub_asks_for_is_kept(bed: Bed) -> None:
    bed.hub.fail("*", fault.status(429, Retry_After="1"), stage="info")
    start = time.monotonic()
    assert bed.asker().commit_of("org/tiny", "main") == bed.commit
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize("stage", ["info", "tree"])
def test_the_hubs_ratelimit_is_waited_for(bed: Bed, stage: Stage) -> None:
    bed.hub.fail("*", fault.status(429, RateLimit='"api";r=0;t=1'), stage=stage)
    start = time.monotonic()
    hub = bed.asker()
    assert len(hub.files("org/tiny", hub.commit_of("org/tiny", "main"))) == len(bed.files)
    assert time.monotonic() - start >= 1


def test_a_hub_that_is_not_there_is_unreachable(bed: Bed) -> None:
    bed.hub.url = "http://127.0.0.1:9"
    with pytest.raises(SourceUnreachable) as caught:
        bed.asker().commit_of("org/tiny", "main")
    assert "HF_ENDPOINT" in caught.value.hint


def test_the_hubs_own_client_is_left_as_it_was(bed: Bed) -> None:
    import huggingface_hub

    bed.asker().commit_of("org/tiny", "main")
    api = huggingface_hub.HfApi(endpoint=bed.hub.url, token=False)
    assert api.model_info("org/tiny").sha == bed.commit


@pytest.mark.parametrize("address", ["http://[", "http://x:99999", "ftp://x", "hub.example"])
def test_a_malformed_endpoint_is_named_in_the_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for ask in (endpoint, saved_token):
        with pytest.raises(SourceUnreachable, match="not a valid address") as caught:
            ask()
        assert "HF_ENDPOINT" in caught.value.hint


def test_settings_are_read_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example/")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert (endpoint(), is_offline(), saved_token()) == ("http://mirror.example", True, "hf_mine")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert saved_token() is None

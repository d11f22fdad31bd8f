from __future__ import annotations

import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.artifacts.oci.document import Document
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.pull import (
    plan_pull,
    pull_into,
    pull_layout,
    receive_blob,
    resolve,
)
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import NotInRegistry, RegistryBroken, RegistryUnreachable, StoreUnwritable
from pipeline.core.files import locked
from tests.testbed.oci_door import (
    Door,
    Fault,
    cut_answer,
    oci_door,
    status,
    with_body,
    with_headers,
)
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.registry.support import (
    NAME,
    described,
    index_json,
    manifest_json,
    put,
    put_image,
)

LAYER = random.Random(1).randbytes(4999) + b"."  # the same in every run
BLOBS = "/blobs/sha256"


@pytest.fixture
def image(tiny: TinyRegistry) -> Document:
    return put_image(tiny, "v1", LAYER)


@pytest.fixture
def both(tiny: TinyRegistry) -> Document:
    """An index over two platforms."""
    amd, arm = put_image(tiny, "amd", LAYER), put_image(tiny, "arm", b"arm layer")
    return put(tiny, index_json((amd, "linux/amd64"), (arm, "linux/arm64")), "both")


def pull(repository: Repository, root: Document, folder: Path, platform: str | None = None) -> None:
    pull_layout(repository, plan_pull(repository, root, platform), folder, jobs=2)


def blobs_in(folder: Path) -> dict[str, bytes]:
    return {f"sha256:{p.name}": p.read_bytes() for p in (folder / "blobs/sha256").iterdir()}


def test_a_pulled_image_is_the_registrys_byte_for_byte(
    repository: Repository, image: Document, tiny: TinyRegistry, tmp_path: Path
) -> None:
    pull(repository, image, tmp_path / "out")
    blobs = blobs_in(tmp_path / "out")
    assert blobs.pop(image.digest) == image.data
    assert blobs == {d: data for (_, d), data in tiny.blobs.items()}
    index = json.loads((tmp_path / "out/index.json").read_bytes())
    assert [m["digest"] for m in index["manifests"]] == [image.digest]
    assert not (tmp_path / "out/.partial").exists()


def test_a_second_pull_fetches_nothing(
    repository: Repository, image: Document, door: Door, tmp_path: Path
) -> None:
    pull(repository, image, tmp_path / "out")
    before = door.count("GET", BLOBS)
    pull(repository, image, tmp_path / "out")
    assert door.count("GET", BLOBS) == before


def test_a_blob_that_was_changed_in_the_folder_is_fetched_again(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    pull(repository, image, tmp_path / "out")
    path = tmp_path / "out/blobs/sha256" / digest_of(LAYER)[7:]
    path.write_bytes(LAYER[:-1] + b"x")
    pull(repository, image, tmp_path / "out")
    assert path.read_bytes() == LAYER


def test_a_tag_is_a_way_to_a_digest(repository: Repository, image: Document) -> None:
    base = str(repository)
    assert resolve(repository, parse_reference(f"{base}:v1")).digest == image.digest
    by_digest = parse_reference(f"{base}:other@{image.digest}")
    assert resolve(repository, by_digest).digest == image.digest
    with pytest.raises(NotInRegistry, match="neither"):
        resolve(repository, parse_reference(base))


def test_one_platform_of_an_index_is_pulled_alone(
    repository: Repository, both: Document, tmp_path: Path
) -> None:
    pull(repository, both, tmp_path / "arm", "linux/arm64")
    assert digest_of(LAYER) not in blobs_in(tmp_path / "arm")
    pull(repository, both, tmp_path / "all")
    assert {both.digest, digest_of(LAYER)} < set(blobs_in(tmp_path / "all"))


def test_a_platform_that_is_not_there_is_named(repository: Repository, both: Document) -> None:
    with pytest.raises(NotInRegistry, match="linux/amd64, linux/arm64"):
        plan_pull(repository, both, "linux/riscv64")


def test_two_entries_for_one_platform_are_not_chosen_between(
    repository: Repository, tiny: TinyRegistry
) -> None:
    one, two = put_image(tiny, "a", b"1"), put_image(tiny, "b", b"2")
    index = put(tiny, index_json((one, "linux/amd64"), (two, "linux/amd64")))
    with pytest.raises(NotInRegistry, match="2 images"):
        plan_pull(repository, index, "linux/amd64")


@pytest.mark.parametrize("after", [0, 1, 4999])
def test_a_blob_that_breaks_off_goes_on(
    repository: Repository, image: Document, door: Door, tmp_path: Path, after: int
) -> None:
    door.fail("GET", digest_of(LAYER), cut_answer(after))
    pull(repository, image, tmp_path / "out")
    assert blobs_in(tmp_path / "out")[digest_of(LAYER)] == LAYER
    starts = [a.headers.get("range") for a in door.asked if digest_of(LAYER) in a.path]
    assert starts == [None, f"bytes={after}-" if after else None]


def test_a_pull_that_was_killed_goes_on_with_what_is_there(
    repository: Repository, image: Document, door: Door, tmp_path: Path
) -> None:
    partial = tmp_path / "out/.partial" / digest_of(LAYER)[7:]
    partial.parent.mkdir(parents=True)
    partial.write_bytes(LAYER[:3000])
    pull(repository, image, tmp_path / "out")
    assert "bytes=3000-" in [a.headers.get("range") for a in door.asked]


def test_a_wrong_beginning_is_thrown_away(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    partial = tmp_path / "out/.partial" / digest_of(LAYER)[7:]
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 3000)
    pull(repository, image, tmp_path / "out")
    assert blobs_in(tmp_path / "out")[digest_of(LAYER)] == LAYER


@pytest.mark.parametrize("body", [LAYER[:-1] + b"x", LAYER + b"x", LAYER[:-1], b""])
def test_a_blob_of_other_bytes_is_never_kept(
    repository: Repository, image: Document, door: Door, tmp_path: Path, body: bytes
) -> None:
    door.fail("GET", digest_of(LAYER), with_body(body), times=9)
    with pytest.raises(RegistryBroken):
        pull(repository, image, tmp_path / "out")
    assert not (tmp_path / "out/blobs/sha256" / digest_of(LAYER)[7:]).exists()
    assert not (tmp_path / "out/index.json").exists()


def test_an_endless_blob_without_a_length_is_cut_short(
    repository: Repository, image: Document, door: Door, tmp_path: Path
) -> None:
    door.fail("GET", digest_of(LAYER), with_headers(x_length="99999"))
    with pytest.raises(RegistryBroken, match="99999 bytes instead of"):
        pull(repository, image, tmp_path / "out")


def test_a_manifest_that_names_more_than_the_limit_is_refused_before_its_first_byte(
    repository: Repository, tiny: TinyRegistry, door: Door
) -> None:
    manifest = manifest_json(b"config", LAYER)
    manifest["layers"][0]["size"] = 1 << 50
    root = put(tiny, manifest)
    with pytest.raises(RegistryBroken, match="claims to be"):
        plan_pull(repository, root)
    assert door.count("GET", BLOBS) == 0


def test_the_limit_itself_is_not_too_much(repository: Repository, image: Document) -> None:
    size = plan_pull(repository, image).size_bytes
    assert plan_pull(repository, image, most_bytes=size).size_bytes == size
    with pytest.raises(RegistryBroken, match="claims to be"):
        plan_pull(repository, image, most_bytes=size - 1)


def test_bytes_that_were_thrown_away_are_taken_off_the_bar(
    repository: Repository, image: Document, door: Door, tmp_path: Path
) -> None:
    done: list[int] = []

    class Counting:
        def advance(self, n_bytes: int) -> None:
            done.append(n_bytes)

    door.fail("GET", digest_of(LAYER), with_body(LAYER[:-1] + b"x"))
    with pytest.raises(RegistryBroken, match="received"):
        receive_blob(repository, image.layers[0], tmp_path / "partial", Counting())
    assert sum(done) == 0
    receive_blob(repository, image.layers[0], tmp_path / "partial", Counting())
    assert sum(done) == len(LAYER)


def test_an_index_entry_of_another_size_is_refused(
    repository: Repository, tiny: TinyRegistry
) -> None:
    one = put_image(tiny, "a", b"1")
    index = index_json((one, "linux/amd64"))
    for size in (len(one.data) + 1, len(one.data) - 1, 0):
        index["manifests"][0]["size"] = size
        with pytest.raises(RegistryBroken):
            plan_pull(repository, put(tiny, index))


def test_an_index_in_an_index_is_not_followed(
    repository: Repository, both: Document, tiny: TinyRegistry
) -> None:
    with pytest.raises(RegistryBroken, match="index in an index"):
        plan_pull(repository, put(tiny, index_json((both, "linux/amd64"))))


def test_a_blob_that_is_gone_is_an_error(
    repository: Repository, image: Document, tiny: TinyRegistry, tmp_path: Path
) -> None:
    del tiny.blobs[NAME, digest_of(LAYER)]
    with pytest.raises(NotInRegistry):
        pull(repository, image, tmp_path / "out")
    assert not (tmp_path / "out/index.json").exists()


def test_a_registry_with_a_bad_day_is_unreachable(
    repository: Repository, image: Document, door: Door, tmp_path: Path
) -> None:
    door.fail("GET", BLOBS, status(500), times=99)
    with pytest.raises(RegistryUnreachable):
        pull(repository, image, tmp_path / "out")


def test_a_blob_may_lie_on_another_server_which_gets_no_login(
    repository: Repository, image: Document, tiny: TinyRegistry, door: Door, tmp_path: Path
) -> None:
    repository.client.authority._headers[repository.may("pull")] = "Basic secret"
    with oci_door(tiny) as other:
        place = f"{other.url}/v2/{NAME}/blobs/{digest_of(LAYER)}"
        door.fail("GET", digest_of(LAYER), status(307, Location=place))
        pull(repository, image, tmp_path / "out")
        assert [a.headers.get("authorization") for a in other.asked] == [None]


def test_evidence_comes_along_when_asked_for(
    repository: Repository, image: Document, tiny: TinyRegistry, tmp_path: Path
) -> None:
    note = put_image(tiny, "", b"note", subject=described(image.data, image.media_type))
    done = pull_layout(
        repository, plan_pull(repository, image, with_evidence=True), tmp_path / "out"
    )
    assert done.evidence == (note.digest,)
    assert note.digest in blobs_in(tmp_path / "out")


def test_a_folder_with_other_files_is_left_alone(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(StoreUnwritable):
        pull(repository, image, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_blobs_go_into_the_store_too(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")
    received = pull_into(repository, plan_pull(repository, image), store)
    assert received == len(LAYER) + len(b"config of v1")
    assert store.read_blob(image.digest) == image.data
    assert store.blob_path(digest_of(LAYER)).read_bytes() == LAYER


def test_two_pulls_into_one_folder_do_not_disturb_each_other(
    door: Door, repository: Repository, image: Document, tmp_path: Path
) -> None:
    threads = [
        threading.Thread(target=pull, args=(repository, image, tmp_path / "out")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blobs_in(tmp_path / "out")[digest_of(LAYER)] == LAYER


def test_a_pull_that_waited_for_another_one_makes_its_folder_for_partial_files_anew(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    partial = tmp_path / "out/.partial"
    with ThreadPoolExecutor(1) as pool:
        with locked(partial / "pull.lock"):
            waiting = pool.submit(pull, repository, image, tmp_path / "out")
            time.sleep(0.3)
            shutil.rmtree(partial)  # as the other one does when it is done
        waiting.result()
    assert blobs_in(tmp_path / "out")[digest_of(LAYER)] == LAYER


def test_a_partial_file_that_is_too_long_begins_again(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    partial = tmp_path / "out/.partial" / digest_of(LAYER)[7:]
    partial.parent.mkdir(parents=True)
    partial.write_bytes(LAYER + b"more")
    pull(repository, image, tmp_path / "out")
    assert blobs_in(tmp_path / "out")[digest_of(LAYER)] == LAYER


def test_a_partial_file_that_is_whole_is_taken(
    repository: Repository, image: Document, door: Door, tmp_path: Path
) -> None:
    partial = tmp_path / "out/.partial" / digest_of(LAYER)[7:]
    partial.parent.mkdir(parents=True)
    partial.write_bytes(LAYER)
    pull(repository, image, tmp_path / "out")
    assert door.count("GET", digest_of(LAYER)) == 0


@pytest.mark.parametrize("fault", [status(416), status(200, LAYER), status(206, LAYER)])
def test_a_registry_that_cannot_go_on_sends_it_whole(
    repository: Repository, image: Document, door: Door, tmp_path: Path, fault: Fault
) -> None:
    partial = tmp_path / "out/.partial" / digest_of(LAYER)[7:]
    partial.parent.mkdir(parents=True)
    partial.write_bytes(LAYER[:3000])
    door.fail("GET", digest_of(LAYER), fault)
    pull(repository, image, tmp_path / "out")
    assert blobs_in(tmp_path / "out")[digest_of(LAYER)] == LAYER


def test_a_small_blob_is_read_into_memory_and_checked(
    repository: Repository, image: Document, door: Door
) -> None:
    layer = image.layers[0]
    assert repository.read_blob(layer, 5000) == LAYER
    with pytest.raises(RegistryBroken, match="more than"):
        repository.read_blob(layer, 4999)
    for body in (LAYER[:-1] + b"x", LAYER + b"x", b""):
        door.fail("GET", layer.digest, with_body(body))
        with pytest.raises(RegistryBroken):
            repository.read_blob(layer, 5000)
    gone = layer.model_copy(update={"digest": digest_of(b"gone")})
    with pytest.raises(NotInRegistry):
        repository.read_blob(gone, 5000)


def test_a_link_or_file_in_the_folders_place_is_refused(
    repository: Repository, image: Document, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(StoreUnwritable):
            pull(repository, image, tmp_path / name)


def test_the_platform_that_was_chosen_stands_in_the_layout(
    repository: Repository, both: Document, tmp_path: Path
) -> None:
    pull(repository, both, tmp_path / "arm", "linux/arm64")
    (entry,) = json.loads((tmp_path / "arm/index.json").read_bytes())["manifests"]
    assert entry["platform"] == {"os": "linux", "architecture": "arm64"}

"""Objects that machines share: a real compiler, real ccache entries, and a server that may lie."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.record import LayerRecord
from pipeline.core.errors import GoldenMismatch, SpecInvalid
from pipeline.images.assemble.golden import Golden, GoldenImage
from pipeline.images.source.compiled import require_decided
from pipeline.images.source.objects import entries, objects_folder
from tests.integration.built import need_sandbox
from tests.testbed.tiny_source import Bench, toolchain_deb


@dataclass
class Folder:
    """What a server keeps that takes GET and PUT."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 0  # answered to everything, where set
    asked: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        """The objects themselves; the other entries say which one belongs to which source."""
        names = [name for name in self.files if "lists" not in name]
        # an entry's third field is its type: 0 a result, 1 a manifest (ccache, src/core)
        return sorted(name for name in names if self.files[name][3] == 0)


@contextmanager
def put_server() -> Iterator[Folder]:
    folder = Folder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, data: bytes = b"") -> None:
            self.send_response(folder.status or status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            folder.asked.append(f"GET {self.path}")
            found = folder.files.get(self.path)
            self.answer(404 if found is None else 200, found or b"")

        def do_PUT(self) -> None:
            folder.asked.append(f"PUT {self.path}")
            folder.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(201)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    folder.url = f"http://127.0.0.1:{server.server_port}/objects"
    try:
        yield folder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def folder() -> Iterator[Folder]:
    with put_server() as running:
        yield running


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_sandbox("namespaces")
    return toolchain_deb(tmp_path_factory.mktemp("mirror"), compiler=True)


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory, deb: Path) -> Path:
    """A store with the toolchain, which takes seconds to build; each machine gets a copy."""
    home = tmp_path_factory.mktemp("seed")
    bench = Bench(home, deb, {"build.sh": "touch one.o two.o\n"})
    bench.write()
    bench.compile()
    return bench.store.root


@dataclass
class Two:
    """Two machines with the same source, and what the first one made of it."""

    first: Bench
    second: Bench
    honest: LayerRecord


@pytest.fixture
def two(tmp_path: Path, deb: Path, seed: Path, folder: Folder) -> Two:
    benches = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        subprocess.run(["cp", "-al", seed, tmp_path / name / "store"], check=True)
        benches.append(Bench(tmp_path / name, deb))
        benches[-1].write()
    first, second = benches
    return Two(first, second, first.compile(object_cache=folder.url))


def golden_of(bench: Bench, layer: str) -> Golden:
    plan = bench.plan()
    inputs = {"compiled": [plan.key]}
    image = GoldenImage(digest="sha256:" + "1" * 64, inputs=inputs, layers={plan.title: layer})
    return Golden(images={"engine.amd64": image})


def test_another_machine_takes_the_objects_and_keeps_them_apart(two: Two, folder: Folder) -> None:
    counts = two.first.tree().objects
    assert (counts.compiled, counts.kept, counts.imported) == (2, 0, 0)
    # all compiled here: nothing to doubt
    require_decided(two.first.store, Golden(), two.first.plan())
    again = two.second.compile(object_cache=folder.url)
    assert again.digest == two.honest.digest
    counts = two.second.tree().objects
    assert (counts.compiled, counts.kept, counts.imported) == (0, 0, 2)
    assert entries(objects_folder(two.second.store)) == []
    assert entries(objects_folder(two.second.store, is_shared=True))


def swap_results(folder: Folder) -> None:
    """Each entry is whole and has its checksum; only its content is that of another source."""
    one, two = folder.results
    folder.files[one], folder.files[two] = folder.files[two], folder.files[one]


def test_objects_of_others_decide_no_signature_alone(
    two: Two, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    swap_results(folder)
    second = two.second
    wrong = second.compile(object_cache=folder.url)
    assert wrong.digest != two.honest.digest
    plan, store = second.plan(), second.store
    why = "was compiled with objects of other machines, and no golden digest has its layer"
    for golden in (Golden(), golden_of(second, two.honest.digest)):
        with pytest.raises(GoldenMismatch, match=why):
            require_decided(store, golden, plan)
    # without them it is compiled again, and the difference is named
    right = second.compile()
    assert right.digest == two.honest.digest
    assert "a shared object is wrong" in capsys.readouterr().err
    require_decided(store, Golden(), plan)


def test_a_golden_digest_or_a_build_without_them_lets_them_count(two: Two, folder: Folder) -> None:
    second = two.second
    layer = second.compile(object_cache=folder.url)
    plan, store = second.plan(), second.store
    with pytest.raises(GoldenMismatch):
        require_decided(store, Golden(), plan)
    # of another key the same layer proves nothing
    other = golden_of(second, layer.digest).model_dump()
    other["images"]["engine.amd64"]["inputs"] = {"compiled": ["sha256:" + "2" * 64]}
    with pytest.raises(GoldenMismatch):
        require_decided(store, Golden.model_validate(other), plan)
    require_decided(store, golden_of(second, layer.digest), plan)
    assert second.compile().digest == layer.digest
    assert second.tree().objects.imported == 0
    require_decided(store, Golden(), plan)


def test_a_damaged_object_is_compiled_again(two: Two, folder: Folder) -> None:
    for name in folder.results:
        data = bytearray(folder.files[name])
        data[len(data) // 2] ^= 1
        folder.files[name] = bytes(data)
    again = two.second.compile(object_cache=folder.url)
    assert again.digest == two.honest.digest
    assert two.second.tree().objects.compiled == 2


@pytest.mark.parametrize("fault", ["down", "refuses", "hostile list", "nonsense"])
def test_a_server_that_fails_or_lies_costs_time_only(
    two: Two, folder: Folder, fault: str, tmp_path: Path
) -> None:
    url = folder.url
    (name,) = [name for name in folder.files if "lists" in name]
    if fault == "down":
        url = "http://127.0.0.1:9/objects"
    elif fault == "refuses":
        folder.status = 403
    elif fault == "hostile list":
        planted = "/objects/../../../planted"
        folder.files = {name: b"../../../planted\n/etc/passwd\nzz/..\n", planted: b"x"}
    else:
        folder.files[name] = b"\xff\x00" * 5000
    again = two.second.compile(object_cache=url)
    assert again.digest == two.honest.digest
    assert two.second.tree().objects.imported == 0
    assert not list(tmp_path.rglob("planted"))


def test_what_is_no_address_is_refused(two: Two) -> None:
    with pytest.raises(SpecInvalid, match="--object-cache nowhere: is not an http address"):
        two.second.compile(object_cache="nowhere")


def test_the_list_names_only_what_is_there(two: Two, folder: Folder) -> None:
    (name,) = [name for name in folder.files if "lists" in name]
    listed = folder.files[name].decode().split()
    assert {f"/objects/{entry}" for entry in listed} == {*folder.files} - {name}
    assert folder.asked[-1] == f"PUT {name}"

"""A function that is gone: where it is now, and since which version."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.errors import SourceUnreachable
from pipeline.fetch.http import Client
from pipeline.fetch.remote_zip import open_zip
from pipeline.fetch.settings import Settings
from pipeline.gate.smem.cases import Case
from pipeline.gate.smem.engine import EngineTree
from pipeline.gate.smem.image_gate import ImageGate
from pipeline.gate.smem.moved import (
    Move,
    explained,
    first_without,
    functions_of,
    imports_of,
    places_now,
)
from pipeline.gate.smem.results import CaseResult
from pipeline.gate.smem.wheels import WheelFinder
from pipeline.store.store import Store, open_store
from tests.testbed.fault_server import FaultServer, cut, status, whole_file
from tests.unit.support import AMD64, make_wheel

NEW = "import triton\n@triton.jit\ndef _kernel(x): pass\ndef attend(x):\n    _kernel[(1,)](x)\n"
OLD_PLACE = "engine.old.ops:attend"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / "engine" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_function_is_found_where_its_kernels_are_too(tmp_path: Path) -> None:
    write(tmp_path, new__ops=NEW, other="def attend(x): return x\n", none="attend = 1\n")
    assert places_now(tmp_path, "engine", ("attend",), ("_kernel",)) == ["engine.new.ops"]


def test_without_its_kernels_every_place_is_named(tmp_path: Path) -> None:
    write(tmp_path, a="def attend(): pass\n", b="if True:\n    def attend(): pass\n")
    assert places_now(tmp_path, "engine", ("attend",), ("_kernel",)) == ["engine.a", "engine.b"]


def test_methods_comments_and_broken_files_are_no_functions(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="class A:\n    def attend(self): pass\n",
        b="'''\ndef attend(): pass\n'''\n",
        c="def attend(:\n",
        d="def outer():\n    def attend(): pass\n",
    )
    assert places_now(tmp_path, "engine", ("attend",), ()) == []


def test_names_that_a_module_passes_on_count_as_offered() -> None:
    text = "from .new import attend, other as renamed\ndef own(): pass\n"
    assert functions_of(text) == {"own"}
    assert imports_of(text) == {"attend", "renamed"}
    assert imports_of("from (") == functions_of("def (") == set()


@pytest.mark.parametrize("last", range(19))
def test_the_first_version_without_it_is_found_in_few_steps(last: int) -> None:
    versions = [f"1.{n}" for n in range(20)]
    asked: list[str] = []

    def has(version: str) -> bool:
        asked.append(version)
        return int(version[2:]) <= last

    assert first_without(versions, has) == Move(last=f"1.{last}", first_without=f"1.{last + 1}")
    assert len(asked) <= 9
    assert versions[-1] not in asked


def test_what_no_version_had_has_no_first_version_without_it() -> None:
    assert first_without(["1", "2", "3"], lambda v: False) == Move()
    assert first_without(["3"], lambda v: True) == Move()


class Bench:
    """An engine whose function moved between 1.1 and 1.2, on an index of its own."""

    def __init__(self, server: FaultServer, root: Path, *, offline: bool = False) -> None:
        self.store: Store = open_store(root / "store")
        self.server = server
        for version, place in (("1.0", "old/ops"), ("1.1", "old/ops"), ("1.2", "new/ops")):
            files = {f"engine/{place}.py": NEW.encode(), "engine/big.bin": bytes(300_000)}
            wheel = make_wheel(root / "wheels", "engine", version, files=files)
            server.add(wheel.name, wheel.read_bytes())
        write(root / "tree", new__ops=NEW)
        self.tree = EngineTree(root / "tree", "engine", "1.2", "sha256:" + "0" * 64)
        client = Client(Settings(indexes=(server.index,)), first_wait_s=0.01)
        context = SimpleNamespace(
            store=self.store, offline=offline, make_finder=lambda: WheelFinder(client)
        )
        plan = SimpleNamespace(venv=SimpleNamespace(version="3.11"), platform=AMD64)
        self.gate = cast("ImageGate", SimpleNamespace(context=context, plan=plan))

    def words(self, *functions: str) -> str:
        case: dict[str, Any] = {
            **{"gate": "smem-x", "name": "one", "stands_for": ["x"], "arguments": {}},
            **{"optional": [], "kernels": ["_kernel"], "spill_free": [], "timeout_s": 9},
        }
        asked = Case(**case, function=list(functions or (OLD_PLACE,)))
        gone = CaseResult(
            gate="smem-x", name="one", stands_for=["x"], verdict="unknown", words="gone", gone=True
        )
        result = explained(self.gate, self.tree, asked, gone)
        assert result.verdict == "unknown"
        return result.words


def test_the_new_place_and_the_version_are_in_the_words(
    server: FaultServer, tmp_path: Path
) -> None:
    words = Bench(server, tmp_path).words()
    assert words == "gone; now in engine.new.ops; it is gone since 1.2, 1.1 has it"


def test_wheels_are_looked_into_without_being_fetched(server: FaultServer, tmp_path: Path) -> None:
    bench = Bench(server, tmp_path)
    bench.words()
    assert 0 not in server.starts("engine-1.1-py3-none-any.whl")
    assert not server.starts("engine-1.2-py3-none-any.whl")


def test_what_was_looked_up_is_known_without_network(server: FaultServer, tmp_path: Path) -> None:
    bench = Bench(server, tmp_path)
    first = bench.words()
    offline = Bench(server, tmp_path, offline=True)
    server.asked.clear()
    assert offline.words() == first
    assert not server.asked


def test_offline_says_that_nobody_looked(server: FaultServer, tmp_path: Path) -> None:
    words = Bench(server, tmp_path, offline=True).words()
    assert "now in engine.new.ops" in words
    assert "was not looked up (--offline)" in words
    assert not server.asked


def test_a_function_that_never_was_has_no_version(server: FaultServer, tmp_path: Path) -> None:
    words = Bench(server, tmp_path).words("engine.old.ops:never")
    assert "no function of that name anywhere" in words
    assert "no earlier version on the index has it" in words


def test_a_server_that_gives_no_parts_of_files_leaves_the_version_open(
    server: FaultServer, tmp_path: Path
) -> None:
    bench = Bench(server, tmp_path)
    server.fail_file("engine-1.1-py3-none-any.whl", whole_file(), 20)
    words = bench.words()
    assert "could not be looked up" in words
    assert "does not serve parts of files" in words
    assert "now in engine.new.ops" in words


def test_an_index_that_is_down_leaves_the_version_open(server: FaultServer, tmp_path: Path) -> None:
    bench = Bench(server, tmp_path)
    server.fail("/simple/engine/", status(503), 20)
    assert "could not be looked up" in bench.words()


def remote(server: FaultServer, tmp_path: Path) -> tuple[Client, str]:
    wheel = make_wheel(tmp_path, "thing", files={"thing/a.py": b"a = 1\n" * 9000})
    url = server.add(wheel.name, wheel.read_bytes())
    return Client(Settings(indexes=()), first_wait_s=0.01), url


def test_a_member_of_a_zip_on_a_server_is_read_alone(server: FaultServer, tmp_path: Path) -> None:
    client, url = remote(server, tmp_path)
    with open_zip(client, url) as wheel:
        assert wheel.read("thing/a.py") == b"a = 1\n" * 9000


def test_a_part_that_is_cut_off_is_asked_for_again(server: FaultServer, tmp_path: Path) -> None:
    client, url = remote(server, tmp_path)
    name = url.rpartition("/")[2]
    size = client.size_of(url)
    server.fail_file(name, cut(3))
    assert len(client.read_span(url, size - 100, 100)) == 100


def test_a_server_that_never_gives_the_whole_part_is_an_error(
    server: FaultServer, tmp_path: Path
) -> None:
    client, url = remote(server, tmp_path)
    size = client.size_of(url)
    server.fail_file(url.rpartition("/")[2], cut(3), 20)
    with pytest.raises(SourceUnreachable):
        client.read_span(url, size - 100, 100)

"""A real C source in a real sandbox: stated, verified, explained, and compiled again."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.core.errors import LayerRefused, NotReproducible, RegistryBroken, SigningFailed
from pipeline.core.model import sha256_of
from tests.integration.built import need_sandbox
from tests.makers import Image, make_checkout
from tests.testbed.forked import run_forked
from tests.testbed.registry import Registry
from tests.testbed.tiny_source import FILES, HERE, Bench, toolchain_deb, toolchain_image

WHY = "it holds the moment at which it was compiled"
# a number that no two builds share, in the initialised data of an object
CLOCK = (
    "echo 'long now = NOW;' > now.c\n"
    "ccache gcc -ffreestanding -O2 -DNOW=1$(date +%N) -c now.c -o now.o\n"
)
STILL = CLOCK.replace("$(date +%N)", "")


@dataclass(frozen=True)
class Desk:
    """A checkout of one compiled image, a store, and the command."""

    bench: Bench

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        home = self.bench.home
        env = {"HOME": str(home), "SM120_STORE": str(home / "store")}
        return run_forked("--checkout", str(home / "checkout"), *words, env=env)

    def offline(self, *words: str) -> subprocess.CompletedProcess[str]:
        mirrors = ["--mirror", str(self.bench.deb.parent), "--mirror", str(self.bench.home)]
        return self.run(*words, "--offline", *mirrors)

    def build(self) -> str:
        # the toolchain first: only one whose golden digest is committed compiles anything
        for name in ("root", "engine"):
            done = self.offline("build", name, "--accept", "--json")
            assert done.returncode == 0, done.stderr[-2000:]
        return str(json.loads(done.stdout)[0]["digest"])


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_sandbox("namespaces")
    return toolchain_deb(tmp_path_factory.mktemp("mirror"), compiler=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, as a toolchain takes seconds to build; each has a source of its own."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def desk(tmp_path: Path, deb: Path, store: Path, request: pytest.FixtureRequest) -> Desk:
    script, may_differ = request.param
    (tmp_path / "store").symlink_to(store)
    # objects of another test would be taken for this one's
    own = f"int own_{sha256_of(request.node.name.encode())[7:15]};\n"
    files = {name: text + own if name.endswith(".c") else text for name, text in FILES.items()}
    files["build.sh"] += script.replace("long now", f"{own.strip()} long now")
    outputs = ("one.o", "two.o", "now.o")
    bench = Bench(tmp_path, deb, files, outputs, build={"may_differ": may_differ})
    bench.write()
    engine = Image(
        {
            "name": "engine",
            "summary": "objects of a small source",
            "base": "root",
            "platforms": [HERE],
            "compiled": [{"source": "tiny", "build": "plain"}],
        },
        platform=HERE,
    )
    # as the bench writes it, so that the source's toolchain is the image's base, too
    make_checkout(tmp_path / "checkout", toolchain_image(deb), engine)
    return Desk(bench)


@pytest.mark.parametrize("desk", [(STILL, {})], indirect=True)
def test_a_compiled_image_is_walked_explained_and_identical_again(desk: Desk) -> None:
    digest = desk.build()
    explained = desk.run("image", "explain", "engine", "/opt/tiny/one.o").stdout
    assert "from   tiny (plain), compiled from tiny.tar" in explained
    walked = desk.run("verify", "engine")
    text = walked.stdout + walked.stderr
    assert "3 objects compiled in this build, none taken from before" in text
    assert "broken" not in text
    again = desk.offline("image", "rebuild", "engine")
    assert again.stdout == f"engine for {HERE}: identical, {digest}\n", again.stderr[-2000:]


@pytest.mark.parametrize("desk", [(CLOCK, {"now.o": WHY})], indirect=True)
def test_a_declared_difference_is_equivalent(desk: Desk) -> None:
    digest = desk.build()
    again = desk.offline("image", "rebuild", "engine", "--json")
    assert again.returncode == 0, again.stderr[-2000:]
    answer = json.loads(again.stdout)
    assert answer["verdict"] == "equivalent"
    assert answer["digest"] != digest
    assert answer["differences"] == [{"path": "/opt/tiny/now.o", "reason": WHY}]


@pytest.mark.parametrize("desk", [(CLOCK, {"one.o": WHY})], indirect=True)
def test_an_undeclared_difference_is_named_by_file_byte_and_section(desk: Desk) -> None:
    desk.build()
    again = desk.offline("image", "rebuild", "engine")
    assert again.returncode == NotReproducible.exit_code
    assert "/opt/tiny/now.o differs in sha256" in again.stderr
    assert "(section .data)" in again.stderr


@pytest.mark.parametrize("desk", [(STILL, {})], indirect=True)
def test_objects_that_were_kept_are_said_to_be(desk: Desk, store: Path) -> None:
    digest = desk.build()
    key = desk.bench.plan().key.removeprefix("sha256:")
    for folder in ("trees", "layers"):
        (store / folder / f"{key}.json").unlink()
    # so that the image is stated again, too
    shutil.rmtree(store / "images" / "engine")
    assert desk.build() == digest
    walked = desk.run("verify", "engine")
    assert "0 objects compiled in this build; 3 taken from the object cache" in walked.stdout


@pytest.mark.parametrize("desk", [(STILL, {})], indirect=True)
def test_a_real_registry_brings_a_compiled_layer_to_an_empty_store_or_it_is_refused(
    desk: Desk, registry: Registry
) -> None:
    digest = desk.build()
    place = f"{registry.host_port}/team/layers"
    words = ("source", "publish", "tiny", "plain", place, "--json")
    assert desk.run(*words).returncode == SigningFailed.exit_code
    assert desk.run("evidence", "new-key", "ann").returncode == 0
    done = desk.run(*words)
    assert done.returncode == 0, done.stderr[-2000:]
    layer = json.loads(done.stdout)["layer"]
    assert json.loads(desk.run(*words).stdout)["sent_bytes"] == 0
    # another machine
    home = desk.bench.home
    (home / "store").unlink()
    nobody = home / "nobody.yaml"
    nobody.write_text("format: 1\nkeys: []\n")

    def take(*more: str) -> subprocess.CompletedProcess[str]:
        mirrors = ["--mirror", str(desk.bench.deb.parent), "--mirror", str(home)]
        return desk.run("build", "engine", "--layers-from", place, *mirrors, *more)

    ended = take("--trust", str(nobody))
    assert ended.returncode == LayerRefused.exit_code, ended.stderr
    assert "keys are trusted here" in ended.stderr
    hexes = layer.removeprefix("sha256:")
    (blob,) = registry.storage.rglob(f"{hexes}/data")
    whole = blob.read_bytes()
    for bad in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        blob.write_bytes(bad)
        ended = take()
        assert ended.returncode == RegistryBroken.exit_code, ended.stderr
        assert not list((home / "store" / "trees").glob("*"))
    blob.write_bytes(whole)
    ended = take("--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout)[0]["digest"] == digest
    assert not (home / "store" / "objects").exists(), "no compiler ran"
    assert "compiled on another machine" in desk.run("verify", "engine").stdout

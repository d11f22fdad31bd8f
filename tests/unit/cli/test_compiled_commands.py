"""Images with compiled trees through the command line: built, explained, verified, built again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.app.images import plans_of
from pipeline.artifacts.containers.backend import Running, StepContainer
from pipeline.artifacts.store.store import default_root
from pipeline.images.spec.checkout import Checkout
from tests.compiled import HELLO, CopyingBackend, compiled_checkout, source_spec
from tests.unit.support import AMD64, Command, Ended

WHY = "it notes the moment at which it was made"


@dataclass
class SeeingBackend(CopyingBackend):
    """Notes what lies in the folder of objects when it compiles."""

    objects: frozenset[str] = frozenset()

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        self.objects |= {path.name for path in container.mounts["/objects"].iterdir()}
        with super().running(container, command) as running:
            yield running


class Desk:
    """A checkout, its mirror and the command."""

    def __init__(self, place: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._sm120, self.backend = place, sm120, SeeingBackend()
        builds = source_spec()["builds"]
        builds = {name: {**x, "may_differ": {"notes": WHY}} for name, x in builds.items()}
        self.checkout = compiled_checkout(place, builds=builds)
        monkeypatch.setattr("pipeline.app.sources.find_backend", lambda _: self.backend)
        monkeypatch.setattr("pipeline.images.source.toolchain.machine", lambda: "x86_64")

    def __call__(self, *words: str) -> Ended:
        return self._sm120("--checkout", str(self.checkout.root), *words)

    def offline(self, *words: str) -> Ended:
        return self(*words, "--offline", "--mirror", str(self.place / "mirror"))

    def build(self) -> str:
        (built,) = json.loads(self.offline("build", "engine", "--accept", "--json").out)
        return str(built["digest"])


@pytest.fixture
def desk(tmp_path: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path, sm120, monkeypatch)
    # the toolchain's golden digest is committed before anything is compiled in it
    assert desk.offline("build", "tools", "--accept").code == 0
    return desk


def test_a_compiled_image_is_built_explained_and_verified(desk: Desk) -> None:
    desk.build()
    text = desk("image", "explain", "engine", HELLO).out
    assert "from   hello (plain), compiled from hello-1.0.tar" in text
    assert "  patch  images/sources/hello/patches/0001.patch sha256:" in text
    assert "  file   images/sources/hello/config.h sha256:" in text
    assert "  with   tools sha256:" in text
    walked = desk("verify", "engine")
    assert "compiled hello (plain)" in walked.out + walked.err
    assert "broken" not in walked.out + walked.err


def files_below(*folders: Path) -> list[tuple[Path, int]]:
    """Every file, with the time of its last change."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return sorted((path, path.lstat().st_mtime_ns) for path in paths)


def test_a_plan_names_what_is_compiled_first_and_what_that_takes(desk: Desk) -> None:
    shutil.rmtree(default_root())
    plan = desk("plan", "engine", "--json").json
    assert {"tree": "hello (plain)", "cpu_minutes": 1} in plan["compile"]
    # the archive and the toolchain count, too
    assert plan["fetch_files"] > desk("plan", "root", "--json").json["fetch_files"] + 1
    assert "to compile, 1 CPU-minutes" in desk("plan", "engine").out
    assert not default_root().exists()


def test_a_toolchain_for_another_processor_is_named_before_anything_is_fetched(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.images.source.toolchain.machine", lambda: "aarch64")
    monkeypatch.setattr("pipeline.images.source.toolchain.BINFMT", str(tmp_path / "binfmt"))
    shutil.rmtree(default_root())
    why = "hello (plain): needs the toolchain tools for linux/amd64, and this machine is aarch64"
    options = ("--platform", "linux/amd64")
    assert desk("plan", "engine", *options).out.startswith(why)
    assert desk("build", "engine", "--dry-run", *options).out.startswith(why)
    ended = desk("source", "build", "hello", "plain", *options)
    assert ended.error == "SandboxUnavailable"
    assert why in ended.err
    assert not any((default_root() / "inputs").iterdir()), "nothing was fetched"
    # an emulator that the kernel knows runs it all the same
    (tmp_path / "binfmt").mkdir()
    (tmp_path / "binfmt" / "qemu-x86_64").write_text("enabled\ninterpreter /usr/bin/qemu\n")
    assert why not in desk("plan", "engine", *options).out
    (tmp_path / "binfmt" / "qemu-x86_64").write_text("disabled\n")
    assert why in desk("plan", "engine", *options).out


def test_a_build_for_another_platform_names_its_own(desk: Desk) -> None:
    ended = desk("source", "build", "hello", "plain", "--platform", "linux/arm64")
    assert ended.error == "SpecInvalid"
    assert "It is for linux/amd64; `sm120 source list`" in ended.err


def test_a_rebuild_compiles_again_and_is_identical(desk: Desk) -> None:
    digest = desk.build()
    done = desk.offline("image", "rebuild", "engine", "--json")
    assert done.json == {
        "image": "engine",
        "platform": AMD64,
        "digest": digest,
        "identical": True,
        "verdict": "identical",
        "differences": [],
    }


def test_kept_objects_prove_nothing_that_could_be_attested(desk: Desk) -> None:
    assert desk("image", "rebuild", "engine", "--keep-objects", "--attest").code == 2


def test_a_rebuild_with_declared_differences_is_equivalent(desk: Desk) -> None:
    digest = desk.build()
    desk.backend.make = lambda source: (
        {"hello": b"program of " + (source / "main.c").read_bytes()} | {"notes": b"later"}
    )
    done = desk.offline("image", "rebuild", "engine")
    assert done.code == 0, done.err
    assert done.out.startswith(f"engine for {AMD64}: equivalent, sha256:")
    assert digest not in done.out
    assert f"  /opt/hello/notes differs: {WHY}" in done.out
    rows = desk.offline("image", "rebuild", "engine", "--json").json
    assert (rows["identical"], rows["verdict"]) == (False, "equivalent")
    assert rows["differences"][0] == {"path": "/opt/hello/notes", "reason": WHY}


def test_a_rebuild_with_other_differences_fails(desk: Desk) -> None:
    desk.build()
    desk.backend.make = lambda _: {"hello": b"program of another", "notes": b"later"}
    ended = desk.offline("image", "rebuild", "engine")
    assert ended.error == "NotReproducible"
    assert f"engine for {AMD64}: " in ended.err
    assert "/opt/hello/bin/hello differs" in ended.err


def test_a_rebuild_takes_kept_objects_only_when_asked(desk: Desk) -> None:
    desk.build()
    objects = default_root() / "objects"
    (objects / "from-before").write_bytes(b"x")
    desk.backend.objects = frozenset()
    assert desk.offline("image", "rebuild", "engine").code == 0
    assert "from-before" not in desk.backend.objects
    assert desk.offline("image", "rebuild", "engine", "--keep-objects").code == 0
    assert "from-before" in desk.backend.objects
    assert (objects / "from-before").exists()


def test_kept_objects_are_no_proof_to_sign(desk: Desk) -> None:
    desk.build()
    ended = desk.offline("image", "rebuild", "engine", "--keep-objects", "--attest")
    assert ended.code == 2
    assert "leave --keep-objects out" in ended.err


def test_where_every_image_is_compiled_first_one_must_be_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_alone(checkout: Checkout, names: Sequence[str], platform: str | None) -> Any:
        return plans_of(checkout, ("engine",), platform)

    monkeypatch.setattr("pipeline.app.build.plans_of", engine_alone)
    ended = desk.offline("build")
    assert (ended.error, ended.code) == ("UnknownImage", 41)
    assert "there is no image to build that is not compiled first" in ended.err
    assert "engine for linux/amd64 is left out" in ended.err
    assert "`sm120 build IMAGE`" in ended.err
    assert desk.offline("build", "--dry-run").code == 0


def test_without_a_name_only_what_needs_no_compiling_is_built(desk: Desk) -> None:
    done = desk.offline("build", "--accept", "--json")
    assert done.code == 0, done.err
    assert [row["image"] for row in json.loads(done.out)] == ["root", "tools"]
    left_out = "engine for linux/amd64 is left out: it is compiled first, 2 CPU-minutes."
    assert f"{left_out} `sm120 build engine` does it." in done.err
    desk.build()
    assert "left out" not in desk.offline("build").err


def _take_objects_of_others(desk: Desk) -> None:
    """As if the trees of this store had been compiled with objects of another machine."""
    for path in (default_root() / "trees").glob("*.json"):
        tree = json.loads(path.read_bytes())
        tree["objects"]["imported"] = 1
        path.write_text(json.dumps(tree))


def test_objects_of_other_machines_become_no_golden_digest(desk: Desk) -> None:
    for build in ("plain", "other"):
        assert desk.offline("source", "build", "hello", build).code == 0
    _take_objects_of_others(desk)
    ended = desk.offline("build", "engine", "--accept")
    assert ended.error == "GoldenMismatch"
    assert "was compiled with objects of other machines" in ended.err
    assert "engine" not in desk.checkout.golden_path.read_text(encoding="utf-8")
    # what is compiled again without them may be accepted
    for build in ("plain", "other"):
        assert desk.offline("source", "build", "hello", build).code == 0
    assert desk.offline("build", "engine", "--accept").code == 0


def test_objects_of_other_machines_are_signed_only_after_a_golden_digest(
    desk: Desk, tmp_path: Path
) -> None:
    export = ("source", "export", "hello", "plain", "--platform", AMD64)
    assert desk.offline("source", "build", "hello", "plain").code == 0
    _take_objects_of_others(desk)
    ended = desk(*export, str(tmp_path / "one"))
    assert ended.error == "GoldenMismatch"
    assert not (tmp_path / "one").exists()
    desk.offline("source", "build", "hello", "plain")
    desk.build()
    # the committed digest has this very layer
    _take_objects_of_others(desk)
    assert desk(*export, str(tmp_path / "two")).code == 0
    assert desk.offline("build", "engine", "--accept").code == 0

"""Slim variants of warm images: what they leave out, what they share, and when they are refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.app import warm
from pipeline.app.build import BuildRequest, build_images, plan_build
from pipeline.app.images import list_images
from pipeline.app.warm import LibraryNeeds, WarmRequest, report_warm
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers import container_engine
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import (
    NotCovered,
    SpecInvalid,
    StartFails,
    StartUnknown,
    UnknownImage,
)
from pipeline.evidence.statements.image import image_statements
from pipeline.evidence.verify.artifact import open_image
from pipeline.evidence.verify.evidence import read_item
from pipeline.evidence.verify.verdict import Node, Verdict
from pipeline.evidence.verify.walk import walk_evidence
from pipeline.images.assemble import plan as plans
from pipeline.images.assemble.image import Built, find_built, staleness
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.runs import RunTest
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageFile
from pipeline.images.start_test import prove
from pipeline.images.start_test.expected import wanted_of
from pipeline.images.warm.layer import INDEX, write_warm
from pipeline.serving.recipe.find import Recipes
from tests.makers import (
    AMD64,
    Image,
    build,
    file_in_image,
    make_checkout,
    make_deb,
    make_wheel,
    root_image,
    wheel_image,
)
from tests.testbed.deb_file import Item
from tests.unit.verify.world import NOW, WHEN, trust_in, trusted

SITE = "opt/venv/lib/python3.11/site-packages"
RECIPE = "tiny-1x"
SLIM = {
    "debs": ["gcc"],
    "wheels": ["nvcc"],
    "files": {"pkg": ["*/include/*", "*.a"]},
}


@dataclass(frozen=True)
class World:
    """A warm image that is built, and its slim variant that is not."""

    place: Path
    checkout: Checkout
    store: Store
    full: Built

    def build(self, *names: str) -> list[Built]:
        return build(self.checkout, self.store, self.place / "mirror", *names)

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.checkout.root, self.store.root)

    def respecified(self, **changes: Any) -> Checkout:
        path = self.checkout.folder("warm") / "image.yaml"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return self.checkout


@pytest.fixture
def world(tmp_path: Path) -> World:
    mirror = tmp_path / "mirror"
    debs = [
        make_deb(mirror, "tool", Item("./usr/bin/tool", b"#!")),
        make_deb(mirror, "gcc", Item("./usr/bin/gcc", b"#!"), Item("./usr/include/a.h", b"h")),
    ]
    parts = {
        "pkg/__init__.py": b"",
        "pkg/include/pkg.h": b"#define SIZE 1\n",
        "pkg/lib/libpkg.a": b"!<arch>\n",
        "nvidia/cu/lib/libcudart.so.13": b"library",
    }
    nvcc = {"nvcc/__init__.py": b"", "nvidia/compiler/bin/nvcc": b"#!"}
    wheels = [
        make_wheel(mirror, "pkg", parts),
        make_wheel(mirror, "nvcc", nvcc),
        make_wheel(mirror, "large"),
    ]
    cuda = {"from": ["nvidia/compiler", "nvidia/cu"], "architectures": ["sm_120"]}
    engine = wheel_image("engine", wheels, cuda=cuda)
    engine.files["gates/engine.yaml"] = "package: pkg\n"
    spec = {
        "name": "warm",
        "summary": "a small engine with its kernels",
        "base": "engine",
        "platforms": [AMD64],
        "warm": {"recipes": {RECIPE: ["case-*"]}},
        "slim": SLIM,
        "entrypoint": ["/usr/bin/tool"],
    }
    checkout = make_checkout(tmp_path / "checkout", root_image(debs), engine, Image(spec))
    store = open_store(tmp_path / "store")
    plan = plan_image(checkout, "warm", AMD64).warm
    assert plan
    write_warm(store, plan, {INDEX: b"{}"})
    (full,) = build(checkout, store, mirror, "warm")
    return World(tmp_path, checkout, store, full)


def test_a_slim_image_has_no_compiler_and_says_so_everywhere(world: World) -> None:
    (slim,) = world.build("warm-slim")
    assert slim.plan.spec.summary == f"{world.full.plan.spec.summary}; without compilers"
    for path in ("usr/bin/gcc", "usr/include/a.h", f"{SITE}/nvcc/__init__.py"):
        assert file_in_image(world.store, world.full, path) is not None, path
        assert file_in_image(world.store, slim, path) is None, path
    for path in (f"{SITE}/pkg/include/pkg.h", f"{SITE}/pkg/lib/libpkg.a"):
        assert file_in_image(world.store, slim, path) is None, path
    status = file_in_image(world.store, slim, "var/lib/dpkg/status") or b""
    assert b"Package: tool\n" in status
    assert b"Package: gcc\n" not in status
    assert file_in_image(world.store, slim, f"{SITE}/nvcc-1.0.dist-info/RECORD") is None
    record = file_in_image(world.store, slim, f"{SITE}/pkg-1.0.dist-info/RECORD") or b""
    assert b"pkg/__init__.py" in record
    assert b"pkg.h" not in record
    assert b"libpkg.a" not in record
    # links of the CUDA home lead to what is there
    rows = {row.path for layer in slim.layers for row in world.store.contents(layer.record)}
    assert "usr/local/cuda/lib/libcudart.so.13" in rows
    assert "usr/local/cuda/bin/nvcc" not in rows


def test_layers_that_lose_nothing_are_those_of_the_whole_image(world: World) -> None:
    (slim,) = world.build("warm-slim")
    full = {layer.title: layer.record.digest for layer in world.full.layers}
    thin = {layer.title: layer.record.digest for layer in slim.layers}
    assert thin["warm warm kernels"] == full["warm warm kernels"]
    assert slim.digest != world.full.digest
    assert slim.size_bytes < world.full.size_bytes
    assert slim.plan.warm
    assert slim.plan.warm.key == plan_image(world.checkout, "warm", AMD64).warm.key  # type: ignore[union-attr]


def test_the_whole_image_stays_as_it_is_whatever_its_variant_leaves_out(world: World) -> None:
    before, slim = (plan_image(world.checkout, name, AMD64).key for name in ("warm", "warm-slim"))
    world.respecified(slim={**SLIM, "wheels": []})
    assert plan_image(world.checkout, "warm", AMD64).key == before
    assert plan_image(world.checkout, "warm-slim", AMD64).key != slim
    world.respecified(slim=None)
    assert plan_image(world.checkout, "warm", AMD64).key == before


def test_its_evidence_names_what_is_in_it_and_is_valid(world: World) -> None:
    (slim,) = world.build("warm-slim")
    judged = judge(world, slim, lambda body: None)
    assert judged.verdict is Verdict.VALID, judged.culprit()
    said = {node.title: node.message for node in judged.every()}
    assert said["left out"] == "2 packages, as its spec says"
    bill = image_statements(world.checkout, world.store, slim, WHEN)["sbom-cyclonedx"].predicate
    assert {part["name"] for part in bill["components"]} >= {"pkg", "tool"}
    assert not {"gcc", "nvcc"} & {part["name"] for part in bill["components"]}


def judge(world: World, built: Built, change: Callable[[dict[str, Any]], None]) -> Node:
    """The verdict on its provenance, after a change, signed."""
    from pipeline.artifacts.attest.keys import make_private_key
    from pipeline.core.model import canonical_json
    from tests.unit.verify.world import sign_bytes

    key = make_private_key()
    statement = image_statements(world.checkout, world.store, built, WHEN)["provenance"]
    body = json.loads(statement.dump())
    change(body)
    item = read_item("provenance", sign_bytes(canonical_json(body), key).dump())
    place = world.store.blob_path(built.digest).parent
    walked = walk_evidence(
        artifact=open_image(place, built.digest, "it"),
        checkout=world.checkout,
        now=NOW,
        trust=trust_in(trusted(key)),
        items=[item],
    )
    return walked.node.children[0]


def dependencies(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body["predicate"]["buildDefinition"]["resolvedDependencies"]
    return found


def without_a_package_that_is_in_it(body: dict[str, Any]) -> None:
    dependencies(body)[:] = [x for x in dependencies(body) if "tool" not in str(x.get("name"))]


def with_a_package_that_was_left_out(body: dict[str, Any]) -> None:
    like = next(x for x in dependencies(body) if str(x.get("name")).startswith("pkg-"))
    forged = copy.deepcopy(like)
    lock = (CHECKED / "lockfiles/images/engine.amd64.lock.yaml").read_text()
    row = next(line for line in lock.splitlines() if '"nvcc"' in line)
    forged["name"] = "nvcc-1.0-py3-none-any.whl"
    forged["uri"] = forged["uri"].replace("/pkg@", "/nvcc@").replace("pkg-1.0", "nvcc-1.0")
    forged["digest"] = {"sha256": json.loads(row[2:])["sha256"]}
    dependencies(body).append(forged)


CHECKED = Path()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_package_that_is_in_it, "is locked, but missing from the provenance"),
        (with_a_package_that_was_left_out, "`slim` leaves it out, but the provenance has it"),
    ],
)
def test_evidence_that_says_otherwise_is_broken(
    world: World,
    change: Callable[[dict[str, Any]], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "CHECKED", world.checkout.root)
    (slim,) = world.build("warm-slim")
    judged = judge(world, slim, change)
    assert judged.verdict is Verdict.BROKEN
    assert said in [node.message for node in judged.every()]


def test_a_start_test_asks_it_for_no_compiler() -> None:
    checkout = Checkout(Path(__file__).resolve().parents[3])
    from pipeline.artifacts.oci.config import read_image_config
    from pipeline.images.assemble.image import image_config

    checks = {}
    for name in ("sglang-k2", "sglang-k2-warm-slim"):
        plan = plan_image(checkout, name, AMD64)
        body = image_config(plan, [])
        body["rootfs"]["diff_ids"] = ["sha256:" + "0" * 64]
        config = read_image_config(json.dumps(body).encode())
        wanted = wanted_of(plan, config, None)
        checks[name] = {*wanted.checks, *wanted.programs}
    assert checks["sglang-k2"] - checks["sglang-k2-warm-slim"] == {
        *("c", "cxx", "nvcc", "gcc", "g++")
    }
    # its version is part of every key
    assert "triton" in checks["sglang-k2-warm-slim"]


@pytest.mark.parametrize("name", ["sglang-k2-warm", "sglang-warm", "vllm-warm"])
def test_what_a_shipped_image_leaves_out_compiles(name: str) -> None:
    checkout = Checkout(Path(__file__).resolve().parents[3])
    full, slim = (plan_image(checkout, each, AMD64) for each in (name, f"{name}-slim"))
    gone = {p.name for each in full.chain() for p in each.debs + each.wheels}
    gone -= {p.name for each in slim.chain() for p in each.debs + each.wheels}
    assert {"gcc-12", "g++-12", "binutils", "nvidia-cuda-nvcc", "nvidia-nvvm"} <= gone
    # what wheels and Python load, and what reads keys of Triton's cache
    kept = {"libgcc-s1", "libstdc++6", "libgomp1", "libnuma1", "libgmp10", "triton", "torch"}
    assert not kept & gone
    assert slim.warm
    assert full.warm
    assert slim.warm.key == full.warm.key


def covered(**states: str) -> Callable[..., list[LibraryNeeds]]:
    """A report in place of the true one."""

    def report(workspace: Workspace, request: WarmRequest) -> list[LibraryNeeds]:
        assert request.all_recipes
        return [
            LibraryNeeds.model_validate(
                {"recipe": RECIPE, "library": library, "state": state, "reason": "a reason"}
            )
            for library, state in states.items()
        ]

    return report


def ask(world: World, *names: str, **more: Any) -> list[Built]:
    request = BuildRequest(
        names=names or ("warm",),
        slim=True,
        offline=True,
        accept=True,
        mirrors=(str(world.place / "mirror"),),
        **more,
    )
    return build_images(world.workspace, request).built


def nothing_missing(*args: object, **more: object) -> None:
    """In place of the check that runs in the image, which is no real one."""


def test_a_covered_image_is_built_and_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "report_warm", covered(Triton="present", FlashInfer="none needed"))
    monkeypatch.setattr(prove, "require_libraries", nothing_missing)
    monkeypatch.setattr(container_engine, "find_backend", nothing_missing)  # not on every machine
    world.build("warm-slim")  # its layers, in this process
    (world.store.image_folder("warm-slim", AMD64) / "image.json").unlink()
    (built,) = ask(world)
    assert (built.name, built.cached) == ("warm-slim", False)
    rows = {row["image"]: row for row in list_images(world.workspace)}
    assert rows["warm-slim"]["built"] == built.digest
    assert rows["warm-slim"]["locked"]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"Triton": "missing"}, "tiny-1x: Triton missing (a reason)"),
        ({"Triton": "present", "FlashInfer": "unknown"}, "tiny-1x: FlashInfer unknown"),
        ({}, "names none, so nothing says what it must serve"),
    ],
)
def test_an_uncovered_recipe_is_refused_and_nothing_is_written(
    states: dict[str, str], said: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = world.checkout.golden_path.read_bytes()
    monkeypatch.setattr(warm, "report_warm", covered(**states))
    for names in (("warm",), ("warm-slim",)):
        with pytest.raises(NotCovered) as caught:
            ask(world, *names)
        assert said in str(caught.value)
    # by its own name, too: there is no other way to it
    with pytest.raises(NotCovered):
        build_images(world.workspace, BuildRequest(names=("warm-slim",), offline=True))
    with pytest.raises(NotCovered):
        plan_build(world.workspace, BuildRequest(names=("warm",), slim=True))
    assert world.checkout.golden_path.read_bytes() == golden
    assert not world.store.image_folder("warm-slim", AMD64).exists()


@pytest.mark.parametrize(("verdict", "kind"), [("failed", StartFails), ("unknown", StartUnknown)])
def test_an_image_that_lacks_a_library_gets_no_name(
    verdict: Any, kind: type[Exception], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(*args: object, **more: object) -> list[RunTest]:
        return [RunTest(name="library libgmp.so.10", verdict=verdict, message="/usr/bin/tool asks")]

    golden = world.checkout.golden_path.read_bytes()
    monkeypatch.setattr(warm, "report_warm", covered(Triton="present"))
    monkeypatch.setattr(prove, "_run_checks", checks)
    monkeypatch.setattr(container_engine, "find_backend", nothing_missing)  # not on every machine
    world.build("warm-slim")
    (world.store.image_folder("warm-slim", AMD64) / "image.json").unlink()
    world.checkout.golden_path.write_bytes(golden)
    with pytest.raises(kind, match=r"libgmp\.so\.10"):
        ask(world)
    assert world.store.image_record("warm-slim", AMD64) is None
    assert world.checkout.golden_path.read_bytes() == golden


def test_an_image_without_kernels_or_without_a_list_has_no_variant(world: World) -> None:
    with pytest.raises(UnknownImage, match="engine: its spec has no `warm`"):
        ask(world, "engine")
    world.respecified(slim=None)
    with pytest.raises(UnknownImage, match="warm: its spec has no `slim`"):
        ask(world)
    with pytest.raises(UnknownImage, match="there is no image 'warm-slim'"):
        plan_image(world.checkout, "warm-slim", AMD64)
    with pytest.raises(UnknownImage, match="none is named"):
        build_images(world.workspace, BuildRequest(slim=True))
    with pytest.raises(SpecInvalid, match="--recipe says what a slim image must serve"):
        build_images(world.workspace, BuildRequest(names=("warm",), recipes=(RECIPE,)))


def test_a_package_that_is_not_locked_is_a_mistake(world: World) -> None:
    world.respecified(slim={**SLIM, "debs": ["gcc", "gcc-13"]})
    with pytest.raises(SpecInvalid, match="slim: debs: gcc-13 is not in the locks"):
        plan_image(world.checkout, "warm-slim", AMD64)
    # the whole image does not care
    plan_image(world.checkout, "warm", AMD64)


@pytest.mark.parametrize(
    "change",
    [
        {"warm": None},
        {"slim": {"debs": ["a b"]}},
        {"slim": {"files": {"pkg": []}}},
        {"slim": {"files": {"pkg": ["$(x)"]}}},
        {"slim": {"gcc": True}},
    ],
)
def test_what_cannot_be_left_out_is_refused(change: dict[str, Any], world: World) -> None:
    spec = json.loads((world.checkout.folder("warm") / "image.yaml").read_text())
    ImageFile.model_validate(spec)
    with pytest.raises(ValidationError):
        ImageFile.model_validate({**spec, **change})


def test_the_report_of_a_shipped_image_refuses_it_in_truth(tmp_path: Path) -> None:
    """No layer, an unknown recipe, and what torch compiles: as `sm120 build --slim` asks."""
    store = open_store(tmp_path / "store")
    workspace = Workspace(Path(__file__).resolve().parents[3], store.root)
    with pytest.raises(NotCovered) as caught:
        plan_build(workspace, BuildRequest(names=("vllm-warm",), slim=True))
    text = str(caught.value)
    assert "there is no layer yet: `sm120 image warm vllm-warm`" in text
    assert (
        "torch.compile missing (vLLM compiles the model as it starts: no --enforce-eager)" in text
    )
    assert "kimi-k26-vllm-8x" in text
    with pytest.raises(SpecInvalid, match="has no recipe 'gpt-oss'"):
        plan_build(workspace, BuildRequest(names=("vllm-warm",), slim=True, recipes=("gpt-oss",)))


def test_an_image_gets_the_layer_that_another_version_of_our_programs_made(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(plans.WARM_WORKER, changed := tmp_path / "changed")
    (changed / "warming.py").write_text("# another\n")
    monkeypatch.setattr(plans, "WARM_WORKER", changed)
    plan = plan_image(world.checkout, "warm", AMD64)
    assert plan.warm
    # until it is there, the image is the one that it was
    assert find_built(world.store, plan)
    assert not staleness(world.checkout, world.store, plan)
    new = write_warm(world.store, plan.warm, {INDEX: b'{"entries": {}}'})
    assert find_built(world.store, plan) is None
    assert staleness(world.checkout, world.store, plan) == "another version of this tool built it"
    (built,) = world.build("warm")
    assert not built.cached
    assert built.digest != world.full.digest
    assert new.digest in {titled.record.digest for titled in built.layers}
    assert world.build("warm")[0].cached


def test_a_stale_layer_is_as_none(world: World) -> None:
    plan = world.full.plan.warm
    assert plan
    workspace = Workspace(Path(__file__).resolve().parents[3], world.store.root)
    today = plan_image(workspace.checkout(), "sglang-k2-warm", AMD64).warm
    assert today
    stale = replace(today, reader="sha256:0")
    write_warm(world.store, stale, {INDEX: b"{}"})
    rows = report_warm(workspace, WarmRequest("sglang-k2-warm-slim", all_recipes=True))
    assert {row.state for row in rows if row.library == "Triton"} == {"missing"}
    assert {row.recipe for row in rows} == set(today.spec.recipes)


def test_what_torch_compiles_is_a_row_of_every_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    workspace = Workspace(Path(__file__).resolve().parents[3], store.root)
    name = "kimi-k2-thinking-nvfp4-sglang-8x"

    def row(**environment: str) -> LibraryNeeds:
        true = Recipes.read

        def read(recipes: Recipes, asked: str) -> Any:
            recipe = true(recipes, asked)
            return recipe.model_copy(update={"environment": {"log": environment}})

        with monkeypatch.context() as patched:
            patched.setattr(Recipes, "read", read)
            rows = report_warm(workspace, WarmRequest("sglang-k2-warm", recipes=(name,)))
        return next(each for each in rows if each.library == "torch.compile")

    assert (row().state, row().reason) == (
        "unknown",
        "sglang 0.5.8.post1 is not in the store",
    )
    off = row(TORCH_COMPILE_DISABLE="1")
    assert (off.state, off.reason) == ("none needed", "TORCH_COMPILE_DISABLE=1 turns it off")
    assert row(TORCH_COMPILE_DISABLE="0").state == "unknown"

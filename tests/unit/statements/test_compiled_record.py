"""What is stated of an image with compiled trees: every input, and where objects came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import __version__
from pipeline.artifacts.attest.names import BUILD_TIME
from pipeline.core.errors import StoreDamaged, UnknownSource
from pipeline.core.model import sha256_of
from pipeline.evidence.statements.bill import Bill, bill_of
from pipeline.evidence.statements.image import image_statements
from pipeline.evidence.statements.inventory import (
    file_origin,
    objects_origin,
    placed_layers,
    trees_of,
)
from pipeline.evidence.statements.sbom import cyclonedx, cyclonedx_bytes, spdx, spdx_bytes
from pipeline.evidence.statements.stated import find_stated, state_image
from pipeline.images.assemble.image import Built, code_digest
from pipeline.images.source.compiled import read_tree, tree_path
from tests.compiled import COMMIT, HELLO, CompiledWorld, build_compiled
from tests.unit.statements.test_recorded_image import spdx_problems
from tests.unit.verify.world import WHEN, World

# of the statements of an image without compiled trees, as they were before there were such trees
BEFORE = {
    "provenance": "sha256:faffd52122c7cd0a29dac25f5feba1882ce1bb512348fd7c4065dcc4ff5cee26",
    "sbom-cyclonedx": "sha256:ba836ca3458e1afa19462bcf228171a1e5cee762cf91c4ba645c8f16ba8e2016",
    "sbom-spdx": "sha256:0e867ff1d09f1b67277c29f5944cee5dc86bdd91c5cc8ce36c788ad57bce8b74",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CompiledWorld:
    return build_compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def fresh(tmp_path: Path) -> CompiledWorld:
    """One that a test may change."""
    return build_compiled(tmp_path)


@pytest.fixture
def bill(made: CompiledWorld) -> Bill:
    return bill_of(made.checkout, made.store, made.built)


@pytest.mark.parametrize("name", BEFORE)
def test_images_without_compiled_trees_are_stated_as_before(world: World, name: str) -> None:
    text = world.statements[name].dump().decode()
    text = text.replace(code_digest(), "CODE").replace(__version__, "VERSION")
    assert sha256_of(text.encode()) == BEFORE[name]


def provenance(made: CompiledWorld) -> dict[str, Any]:
    statements = image_statements(made.checkout, made.store, made.built, WHEN)
    return statements["provenance"].predicate


def test_every_input_of_a_tree_is_named_by_digest(made: CompiledWorld) -> None:
    predicate = provenance(made)
    resources = predicate["buildDefinition"]["resolvedDependencies"]
    named = {x["name"]: x["digest"]["sha256"] for x in resources}
    tree = made.tree
    assert named["hello-1.0.tar"] == tree.lock.archive.sha256
    folder = "images/sources/hello"
    for name, digest in zip(("config.h", "patches/0001.patch"), tree.own, strict=True):
        assert f"sha256:{named[f'{folder}/{name}']}" == digest
    for plan in tree.toolchain.chain():
        assert {p.file: p.sha256 for p in plan.lock.pins}.items() <= named.items()
    assert f"sha256:{named['tools']}" == read_tree(made.store, tree).toolchain
    assert "images/tools/cc.sh" in named


def test_an_archive_is_stated_with_kind_commit_licence_and_files(made: CompiledWorld) -> None:
    resources = provenance(made)["buildDefinition"]["resolvedDependencies"]
    (archive,) = [x for x in resources if x["name"] == "hello-1.0.tar"]
    notes = archive["annotations"]
    assert notes["upstream"] == {"repository": "somebody/hello", "commit": COMMIT}
    assert (notes["licence"], notes["kind"], notes["files"]) == ("MIT", "file", 2)
    assert notes["tree"] == made.tree.lock.tree
    assert notes["lock"] == made.tree.lock.seal


def test_the_tools_are_marked_as_build_time_only(made: CompiledWorld) -> None:
    resources = provenance(made)["buildDefinition"]["resolvedDependencies"]
    (wheel,) = [x for x in resources if x["name"] == "cc-1.0-py3-none-any.whl"]
    assert wheel["annotations"]["use"] == BUILD_TIME
    # the root's .deb is in the image and in the toolchain: two materials
    debs = [x for x in resources if x["name"].startswith("tool_")]
    assert [x["annotations"].get("use") for x in debs] == [None, BUILD_TIME]


def test_a_tree_is_stated_by_its_layer_with_steps_and_origin(made: CompiledWorld) -> None:
    products = provenance(made)["runDetails"]["byproducts"]
    trees = [x for x in products if ":tree:" in x["uri"]]
    assert [x["name"] for x in trees] == ["hello (plain)", "hello (other)"]
    notes = trees[0]["annotations"]
    assert f"sha256:{trees[0]['digest']['sha256']}" == made.built.layers[1].record.digest
    assert notes["inputs"]["build"]["steps"][0]["run"][0] == "cc"
    assert notes["key"] == made.tree.key
    assert notes["run"]["sandbox"] == "namespaces"
    assert notes["run"]["objects"]["compiled"] == 0
    assert notes["run"]["code"] == {"gpu": {}, "cpu": {}}


def test_a_tree_says_where_its_objects_come_from() -> None:
    text = objects_origin({"objects": {"compiled": 3, "kept": 0}})
    assert text == "3 objects compiled in this build, none taken from before"
    text = objects_origin({"objects": {"compiled": 1, "kept": 310}})
    assert text.startswith("1 object compiled in this build; 310 taken from the object cache")
    brought = {"compiled": 0, "kept": 0, "imported": 311, "manifests": ["sha256:0123456789abcdef"]}
    text = objects_origin({"objects": brought})
    assert "0 objects compiled in this build; 311 brought from another machine" in text
    assert "sha256:0123456789ab…" in text
    assert "no export named" in objects_origin({"objects": {**brought, "manifests": []}})
    assert "no compiler" in objects_origin({"objects": {"compiled": 0, "kept": 0}})


def test_a_tree_from_a_registry_says_whose_word_stands_for_it() -> None:
    taken = {"statement": f"sha256:{'1' * 64}", "signed_by": ["sha256:0123456789abcdef"]}
    text = objects_origin({"objects": {"compiled": 3, "kept": 0}, "taken": taken})
    assert text.startswith("compiled on another machine, by a statement that sha256:0123456789ab…")
    assert text.endswith("there: 3 objects compiled in this build, none taken from before")


def test_objects_from_a_cache_are_stated(fresh: CompiledWorld) -> None:
    record = read_tree(fresh.store, fresh.tree)
    objects = record.objects.model_copy(update={"compiled": 2, "kept": 309})
    path = tree_path(fresh.store, fresh.tree.key)
    path.write_text(record.model_copy(update={"objects": objects}).model_dump_json())
    products = provenance(fresh)["runDetails"]["byproducts"]
    notes = next(x for x in products if x["uri"].endswith(":tree:hello:plain"))["annotations"]
    assert notes["run"]["objects"] == objects.model_dump(mode="json")
    assert "309 taken from the object cache" in notes["origin"]


def test_an_image_has_one_bill_however_it_was_compiled(fresh: CompiledWorld) -> None:
    before = bill_of(fresh.checkout, fresh.store, fresh.built)
    record = read_tree(fresh.store, fresh.tree)
    objects = record.objects.model_copy(update={"compiled": 2, "kept": 309})
    other = record.model_copy(update={"objects": objects, "sandbox": "docker", "seconds": 9.0})
    tree_path(fresh.store, fresh.tree.key).write_text(other.model_dump_json())
    after = bill_of(fresh.checkout, fresh.store, fresh.built)
    assert cyclonedx_bytes(before) == cyclonedx_bytes(after)
    assert spdx_bytes(before) == spdx_bytes(after)


def test_a_tree_compiled_anew_is_stated_anew(fresh: CompiledWorld) -> None:
    state_image(fresh.checkout, fresh.store, fresh.built, [])
    assert find_stated(fresh.checkout, fresh.store, fresh.built) is not None
    path = tree_path(fresh.store, fresh.tree.key)
    path.write_text(path.read_text().replace('"namespaces"', '"podman"'))
    assert find_stated(fresh.checkout, fresh.store, fresh.built) is None


def test_a_tree_whose_layer_is_not_the_one_that_was_compiled_is_refused(
    fresh: CompiledWorld,
) -> None:
    path = tree_path(fresh.store, fresh.tree.key)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "layer": f"sha256:{'0' * 64}"}))
    with pytest.raises(StoreDamaged, match="was compiled"):
        trees_of(fresh.store, fresh.built)


def test_a_tree_without_its_record_is_not_stated(fresh: CompiledWorld) -> None:
    path = tree_path(fresh.store, fresh.tree.key)
    path.write_text("{")
    with pytest.raises(StoreDamaged, match="record of how it was compiled"):
        trees_of(fresh.store, fresh.built)
    path.unlink()
    with pytest.raises(UnknownSource, match="is not compiled"):
        trees_of(fresh.store, fresh.built)


def test_a_compiled_layer_that_is_missing_or_misplaced_is_refused(made: CompiledWorld) -> None:
    root, plain, other, *rest = made.built.layers

    def with_layers(*layers: Any) -> Built:
        record = made.built.record.model_copy(update={"layers": layers})
        return replace(made.built, record=record)

    for wrong in ((root, other, *rest), (root, other, plain, *rest)):
        with pytest.raises(StoreDamaged, match="is not in the image"):
            placed_layers(with_layers(*wrong))


def test_a_compiled_file_is_explained(made: CompiledWorld) -> None:
    file = file_origin(made.checkout, made.store, made.built, HELLO)
    assert file.origin == "hello (plain), compiled from hello-1.0.tar"
    assert file.package_sha256 == made.tree.lock.archive.sha256
    assert file.patches == (f"images/sources/hello/patches/0001.patch {made.tree.own[1]}",)
    assert file.own_files == (f"images/sources/hello/config.h {made.tree.own[0]}",)
    assert file.toolchain == f"tools {read_tree(made.store, made.tree).toolchain}"
    assert file.layer_digest == made.built.layers[1].record.digest


def test_other_files_are_explained_as_ever(made: CompiledWorld) -> None:
    assert file_origin(made.checkout, made.store, made.built, "/usr/bin/tool").toolchain is None
    own = file_origin(made.checkout, made.store, made.built, "/opt/start.sh")
    assert own.origin == "a file of images/engine"


def test_the_bills_list_trees_with_commit_licence_and_patch(bill: Bill) -> None:
    document = cyclonedx(bill)
    trees = [c for c in document["components"] if c["type"] == "application"]
    assert [t["version"] for t in trees] == [COMMIT, COMMIT]
    assert trees[0]["licenses"] == [{"expression": "MIT"}]
    assert trees[0]["pedigree"]["commits"] == [{"uid": COMMIT}]
    (patch,) = trees[0]["pedigree"]["patches"]
    assert patch["resolves"][0]["id"].endswith("0001.patch")
    excluded = {c["name"] for c in document["components"] if c.get("scope") == "excluded"}
    assert {"hello", "tools", "cc", "tool"} <= excluded
    assert document["compositions"][0]["aggregate"] == "incomplete"
    packages = {p["SPDXID"]: p for p in spdx(bill)["packages"]}
    assert packages["SPDXRef-Tree-hello-plain"]["licenseDeclared"] == "MIT"
    kinds = {r["relationshipType"] for r in spdx(bill)["relationships"]}
    assert {"GENERATED_FROM", "BUILD_TOOL_OF", "PATCH_FOR"} <= kinds


def test_the_bill_with_trees_is_valid_by_cyclonedxs_own_schema(bill: Bill) -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(cyclonedx_bytes(bill).decode()) is None
    refs = [c["bom-ref"] for c in cyclonedx(bill)["components"]]
    assert len(refs) == len(set(refs))


def test_the_bill_with_trees_is_valid_by_SPDXs_own_tools(bill: Bill, tmp_path: Path) -> None:
    pytest.importorskip("spdx_tools", reason="spdx-tools is not installed.")
    assert spdx_problems(spdx_bytes(bill), tmp_path) == []


def test_another_machine_states_a_compiled_image_the_same(
    made: CompiledWorld, tmp_path: Path
) -> None:
    other = build_compiled(tmp_path)
    assert other.built.digest == made.built.digest
    assert provenance(other) == provenance(made)

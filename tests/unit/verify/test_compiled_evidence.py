"""From an image to its compiled layers, their source, each patch and the toolchain; and lies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key
from pipeline.artifacts.attest.predicates import DeclaredDifference
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.statements.evidence_set import verdict_of
from pipeline.evidence.statements.image import image_statements
from pipeline.evidence.statements.provenance import Provenance, read_provenance
from pipeline.evidence.verify.trees import judge_trees, may_differ
from pipeline.evidence.verify.verdict import Verdict, show
from pipeline.images.spec.checkout import Checkout
from tests.compiled import add_source, build_compiled, lock_source, source_spec, write_archive
from tests.unit.verify.world import WHEN, World, reasons, rebuild_statement

Body = dict[str, Any]
Lie = Callable[[Body], None]
PATCH = "images/sources/hello/patches/0001.patch"
OTHER = "0" * 64
WHY = "it notes the moment at which it was made"
NOTES = DeclaredDifference(path="/opt/hello/notes", reason=WHY)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = build_compiled(tmp_path_factory.mktemp("compiled"))
    statements = image_statements(made.checkout, made.store, made.built, WHEN, spdx=True)
    keys = (make_private_key(), make_private_key())
    return World(made.place, made.checkout, made.store, made.built, *keys, copy.copy(statements))


def provenance_of(world: World) -> Provenance:
    return read_provenance(world.statements["provenance"].predicate)


def test_a_compiled_image_is_walked_to_source_patches_and_toolchain(world: World) -> None:
    node = world.walk().node
    assert node.verdict is Verdict.VALID, show(node)
    (layer,) = (x.sha256 for x in provenance_of(world).trees if x.uri.endswith(":other"))
    made = [(n.title, n.message) for n in node.children[0].every()]
    commit = "somebody/hello 0123456789abcdef0123456789abcdef01234567, MIT"
    assert made[made.index(("compiled hello (other)", f"layer sha256:{layer[:12]}…")) :] == [
        ("compiled hello (other)", f"layer sha256:{layer[:12]}…"),
        ("layer", ""),
        ("inputs", "steps: compile"),
        ("source", "hello-1.0.tar, 1 file of ours, 1 patch"),
        ("toolchain tools", f"sha256:{provenance_of(world).toolchains[0].sha256}"),
        ("objects", "no compiler was called through the object cache"),
        ("images/sources/hello/source.yaml", f"hello-1.0.tar: {commit}"),
        ("toolchain tools", ""),
        ("golden digest", ""),
        ("root: 1 package at build time", ""),
        ("tool_1.0_amd64.deb", ""),
        ("tools: 1 package at build time", ""),
        ("cc-1.0-py3-none-any.whl", ""),
    ]


def test_the_inputs_of_the_image_follow_from_its_provenance_alone(world: World) -> None:
    bound = judge_trees(provenance_of(world), world.artifact, None)[0]
    assert world.artifact.annotations["sm120.inputs"] == world.built.plan.key
    assert (bound.title, bound.verdict) == ("inputs in the manifest", Verdict.VALID)


ARM64 = "linux/arm64"
MORE = [{"from": "notes", "to": "more"}]


@pytest.fixture(scope="module")
def cross_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Compiled in a toolchain of another platform, with an output that one build alone has."""
    builds = source_spec()["builds"]
    for build in builds.values():
        build["toolchain_platform"] = ARM64
    builds["plain"]["outputs"] = MORE
    made = build_compiled(tmp_path_factory.mktemp("cross"), tools_on=ARM64, builds=builds)
    statements = image_statements(made.checkout, made.store, made.built, WHEN, spdx=True)
    keys = (make_private_key(), make_private_key())
    return World(made.place, made.checkout, made.store, made.built, *keys, copy.copy(statements))


def test_a_toolchain_of_another_platform_is_compared_with_its_own_lock_and_digest(
    cross_world: World,
) -> None:
    node = cross_world.walk().node
    assert node.verdict is Verdict.VALID, show(node)


def build_in(body: Body, build: str = "plain") -> Body:
    external = body["predicate"]["buildDefinition"]["externalParameters"]
    spec: Body = external["sources"]["hello"]["spec"]["builds"][build]
    return spec


def toolchain_of_the_images_platform(body: Body) -> None:
    for build in ("plain", "other"):
        del build_in(body, build)["toolchain_platform"]


def output_not_in_the_spec(body: Body) -> None:
    build_in(body)["outputs"] = []


def output_not_in_the_inputs(body: Body) -> None:
    tree_in(body)["annotations"]["inputs"]["outputs"].pop()
    rekey(tree_in(body))


def output_in_neither(body: Body) -> None:
    output_not_in_the_spec(body)
    output_not_in_the_inputs(body)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (output_not_in_the_spec, "outputs: not as in the recorded source.yaml"),
        (output_not_in_the_inputs, "but other inputs were recorded"),
        (output_in_neither, "but other inputs were recorded"),
    ],
)
def test_a_lie_about_the_outputs_of_one_build_is_found(
    cross_world: World, lie: Lie, why: str
) -> None:
    node = cross_world.judge(provenance=cross_world.lie("provenance", lie))
    assert node.verdict is Verdict.BROKEN, show(node)
    assert node.culprit().message.endswith(why)


def test_a_record_that_hides_what_the_toolchain_ran_on_is_not_valid(cross_world: World) -> None:
    lie = cross_world.lie("provenance", toolchain_of_the_images_platform)
    node = cross_world.judge(provenance=lie)
    assert node.culprit().message == "it runs on another platform than the build's"


def test_without_a_checkout_the_walk_still_reaches_the_source(world: World) -> None:
    node = world.walk(checkout=None).node
    assert node.verdict is Verdict.VALID, show(node)
    assert "hello-1.0.tar" in show(node)


def materials(body: Body) -> list[Body]:
    listed: list[Body] = body["predicate"]["buildDefinition"]["resolvedDependencies"]
    return listed


def one(body: Body, start: str) -> Body:
    return next(x for x in materials(body) if x["uri"].startswith(f"urn:sm120-pipeline:{start}"))


def tree_in(body: Body, build: str = "plain") -> Body:
    products: list[Body] = body["predicate"]["runDetails"]["byproducts"]
    return next(x for x in products if x["uri"] == f"urn:sm120-pipeline:tree:hello:{build}")


def remove(body: Body, start: str) -> None:
    materials(body).remove(one(body, start))


def rekey(tree: Body) -> None:
    """What a careful liar does: the key is made to fit the changed inputs."""
    tree["annotations"]["key"] = sha256_of(canonical_json(tree["annotations"]["inputs"]))


def other_archive(body: Body) -> None:
    one(body, "source:hello")["digest"]["sha256"] = OTHER


def archive_of_other_files(body: Body) -> None:
    one(body, "source:hello")["annotations"]["tree"] = f"sha256:{OTHER}"


def other_files_all_the_way(body: Body) -> None:
    archive_of_other_files(body)
    for build in ("plain", "other"):
        tree = tree_in(body, build)
        tree["annotations"]["inputs"]["tree"] = f"sha256:{OTHER}"
        rekey(tree)


def no_archive(body: Body) -> None:
    remove(body, "source:hello")


def other_commit(body: Body) -> None:
    one(body, "source:hello")["annotations"]["upstream"]["commit"] = "f" * 40


def other_licence(body: Body) -> None:
    one(body, "source:hello")["annotations"]["licence"] = "BSD-3-Clause"


def other_size(body: Body) -> None:
    one(body, "source:hello")["annotations"]["sizeBytes"] = 1


def no_patch(body: Body) -> None:
    remove(body, f"checkout:{PATCH}")


def no_patch_all_the_way(body: Body) -> None:
    """Left out of materials, spec, inputs and keys: only the manifest still knows it."""
    no_patch(body)
    external = body["predicate"]["buildDefinition"]["externalParameters"]
    external["sources"]["hello"]["spec"]["patches"] = []
    for build in ("plain", "other"):
        tree = tree_in(body, build)
        tree["annotations"]["inputs"]["own"].pop()
        rekey(tree)


def other_patch(body: Body) -> None:
    one(body, f"checkout:{PATCH}")["digest"]["sha256"] = OTHER


def no_own_file(body: Body) -> None:
    remove(body, "checkout:images/sources/hello/config.h")


def one_file_more(body: Body) -> None:
    more = copy.deepcopy(one(body, f"checkout:{PATCH}"))
    more["uri"], more["name"] = more["uri"] + "2", more["name"] + "2"
    materials(body).append(more)


def other_toolchain_of_the_tree(body: Body) -> None:
    tree_in(body)["annotations"]["toolchain"] = f"sha256:{OTHER}"


def other_toolchain(body: Body) -> None:
    """Another digest wherever it stands: only the golden digest of the same inputs tells."""
    resource = one(body, "toolchain:tools")
    resource["uri"] = f"urn:sm120-pipeline:toolchain:tools:{OTHER}"
    resource["digest"]["sha256"] = OTHER
    for build in ("plain", "other"):
        tree_in(body, build)["annotations"]["toolchain"] = f"sha256:{OTHER}"


def toolchain_of_other_inputs(body: Body) -> None:
    one(body, "toolchain:tools")["annotations"]["chain"][-1]["inputs"]["lock"] = f"sha256:{OTHER}"


def toolchain_on_nothing(body: Body) -> None:
    del one(body, "toolchain:tools")["annotations"]["chain"][0]


def toolchain_for_another_machine(body: Body) -> None:
    one(body, "toolchain:tools")["annotations"]["platform"] = "linux/arm64"


def no_toolchain(body: Body) -> None:
    remove(body, "toolchain:tools")


def no_compiler(body: Body) -> None:
    compiler = next(x for x in materials(body) if x["name"].startswith("cc-1.0"))
    materials(body).remove(compiler)


def other_compiler(body: Body) -> None:
    next(x for x in materials(body) if x["name"].startswith("cc-1.0"))["digest"]["sha256"] = OTHER


def compiler_of_another_version(body: Body) -> None:
    compiler = next(x for x in materials(body) if x["name"].startswith("cc-1.0"))
    compiler["annotations"]["purl"] = "pkg:pypi/cc@2.0?file_name=x"


def no_toolchain_file(body: Body) -> None:
    remove(body, "checkout:images/tools/cc.sh")


def other_layer(body: Body) -> None:
    tree_in(body)["digest"]["sha256"] = OTHER


def layer_of_another_tree(body: Body) -> None:
    tree_in(body)["digest"] = tree_in(body, "other")["digest"]


def no_tree(body: Body) -> None:
    products = body["predicate"]["runDetails"]["byproducts"]
    products.remove(tree_in(body))


def one_tree_more(body: Body) -> None:
    more = copy.deepcopy(tree_in(body))
    more["uri"] += "-more"
    body["predicate"]["runDetails"]["byproducts"].append(more)


def other_steps(body: Body) -> None:
    tree_in(body)["annotations"]["inputs"]["build"]["steps"][0]["run"].append("-O0")
    rekey(tree_in(body))


def other_steps_all_the_way(body: Body) -> None:
    other_steps(body)
    external = body["predicate"]["buildDefinition"]["externalParameters"]
    build = external["sources"]["hello"]["spec"]["builds"]["plain"]
    build["steps"][0]["run"].append("-O0")


def inputs_beside_their_key(body: Body) -> None:
    tree_in(body)["annotations"]["inputs"]["format"] = 2


def no_inputs(body: Body) -> None:
    del tree_in(body)["annotations"]["inputs"]


def no_counts(body: Body) -> None:
    del tree_in(body)["annotations"]["run"]["objects"]


def no_source_spec(body: Body) -> None:
    del body["predicate"]["buildDefinition"]["externalParameters"]["sources"]


def not_compiled_at_all(body: Body) -> None:
    spec = body["predicate"]["buildDefinition"]["externalParameters"]["images"]["engine"]["spec"]
    spec["compiled"] = []


KEY, SOURCE = "inputs in the manifest: is …, but other inputs were recorded", "source: "
CC, SPEC = "cc-1.0-py3-none-any.whl: ", "images/sources/hello/source.yaml: "
TOOLS, LACKS = "toolchain tools: ", "compiled trees: their record lacks "
NO_ARCHIVE, NOT_ASKED = "the provenance names no source archive", "is recorded, but no image's spec"
OTHER_FILES = f"{SOURCE}was compiled from other files: …"
OTHER_TREE = f"{SPEC}is recorded as …, but locked as …"
OTHER_LAYER = "layer: … is not the image's layer of it"
OTHER_INPUTS = f"{TOOLS}it was compiled in one of other inputs"
MISSING_CC = f"{CC}is locked, but missing from the provenance"
NO_ARM64 = "arm64.lock.yaml: there is no such lock"
STATED_ELSE = f"{SPEC}names another licence or commit than its archive"

# each with all that it makes wrong, but for the bills
LIES: dict[Lie, list[str]] = {
    other_archive: [OTHER_TREE],
    archive_of_other_files: [OTHER_FILES, OTHER_TREE],
    other_files_all_the_way: [KEY, OTHER_TREE],
    no_archive: [f"{SOURCE}{NO_ARCHIVE}", f"{SPEC}{NO_ARCHIVE}"],
    other_commit: [STATED_ELSE],
    other_licence: [STATED_ELSE],
    other_size: [f"{SPEC}is recorded as 1, but locked as 10240"],
    no_patch: [f"{SOURCE}{PATCH} is missing from the provenance"],
    no_patch_all_the_way: [KEY, f"{SPEC}has changed since: patches"],
    other_patch: [
        f"{PATCH}: has changed since",
        f"{SOURCE}was compiled with other files or patches of ours",
    ],
    no_own_file: [f"{SOURCE}images/sources/hello/config.h is missing from the provenance"],
    one_file_more: [
        f"{PATCH}2: is missing from this checkout",
        f"{SOURCE}{PATCH}2 is not part of its source.yaml",
    ],
    other_toolchain_of_the_tree: [f"{TOOLS}was …, which is missing"],
    other_toolchain: ["golden digest: these inputs give …, not …"],
    toolchain_of_other_inputs: [
        OTHER_INPUTS,
        "golden digest: has changed since: lock",
        "tools: is locked otherwise now",
    ],
    toolchain_on_nothing: [OTHER_INPUTS, "golden digest: has changed since: "],
    no_toolchain: [
        f"{TOOLS}was …, which is missing",
        f"tool_1.0_amd64.deb: {NOT_ASKED} asks for it",
        f"{CC}{NOT_ASKED} asks for it",
    ],
    no_compiler: [MISSING_CC],
    other_compiler: [MISSING_CC, f"{CC}is not in the lock that the provenance names"],
    no_toolchain_file: [f"{TOOLS}files of tools: not all of them are recorded"],
    compiler_of_another_version: [
        f"{CC}is recorded as pkg:pypi/cc@2.0, but locked as pkg:pypi/cc@1.0"
    ],
    other_layer: [OTHER_LAYER],
    layer_of_another_tree: [OTHER_LAYER],
    no_tree: [f"""{LACKS}"'urn:sm120-pipeline:tree:hello:plain'\""""],
    one_tree_more: [f"hello (plain): {NOT_ASKED} asks for it"],
    other_steps: [KEY, "inputs: build: not as in the recorded source.yaml"],
    other_steps_all_the_way: [KEY, f"{SPEC}has changed since: builds"],
    inputs_beside_their_key: ["inputs: its key is not the digest of its inputs"],
    no_inputs: [f"""{LACKS}"'inputs'\""""],
    no_counts: [f"""{LACKS}"'objects'\""""],
    no_source_spec: [f"""{LACKS}"'hello'\""""],
    not_compiled_at_all: [
        "images/engine/image.yaml: has changed since: compiled",
        KEY,
        *(f"{x}: {NOT_ASKED} asks for it" for x in ("hello (plain)", "hello (other)")),
        *(f"{x}: {NOT_ASKED} asks for it" for x in ("hello-1.0.tar", "tools")),
    ],
    toolchain_for_another_machine: [
        f"{TOOLS}it runs on another platform than the build's",
        f"golden digest: root.{NO_ARM64}",
        f"root: root.{NO_ARM64}",
        f"tools: tools.{NO_ARM64}",
    ],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_a_compiled_tree_is_found(world: World, lie: Lie) -> None:
    node = world.judge(provenance=world.lie("provenance", lie))
    assert node.verdict is Verdict.BROKEN, show(node)
    assert reasons(node) == LIES[lie]


# what the image itself contradicts, so that no checkout is needed
BOUND = [
    *(archive_of_other_files, other_files_all_the_way, no_archive, no_patch, other_patch),
    *(no_patch_all_the_way, no_own_file, other_toolchain_of_the_tree, toolchain_of_other_inputs),
    *(no_toolchain, other_layer, layer_of_another_tree, no_tree, other_steps_all_the_way),
]
# what only a checkout can tell
COMPARED = ("has changed since", "is recorded as", "is locked otherwise")


@pytest.mark.parametrize("lie", BOUND)
def test_the_image_itself_contradicts_it_without_a_checkout(world: World, lie: Lie) -> None:
    node = world.walk({"provenance": world.lie("provenance", lie)}, checkout=None).node
    assert node.verdict is Verdict.BROKEN
    assert reasons(node) == [x for x in LIES[lie] if not any(c in x for c in COMPARED)]


def test_what_the_image_does_not_contradict_needs_no_checkout(world: World) -> None:
    node = world.walk({"provenance": world.signed("provenance")}, checkout=None).node
    assert node.verdict is Verdict.VALID, show(node)


def bill_without(name: str) -> Lie:
    def hide(body: Body) -> None:
        kept = [x for x in body["predicate"]["components"] if x["name"] != name]
        assert len(kept) < len(body["predicate"]["components"])
        body["predicate"]["components"] = kept

    return hide


def complete(body: Body) -> None:
    body["predicate"]["compositions"] = [{"aggregate": "complete", "assemblies": []}]


def other_hash(body: Body) -> None:
    tree = next(x for x in body["predicate"]["components"] if x["type"] == "application")
    tree["hashes"][0]["content"] = OTHER


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (bill_without("hello"), "leaves out pkg:generic/hello@"),
        (bill_without("tools"), "leaves out pkg:oci/tools@"),
        (bill_without("cc"), "leaves out pkg:pypi/cc@1.0"),
        (complete, "claims to be complete, but contains compiled sources"),
        (other_hash, "lists pkg:generic/hello@"),
    ],
)
def test_a_bill_that_hides_what_was_compiled_is_broken(world: World, lie: Lie, why: str) -> None:
    node = world.judge(sbom_cyclonedx=world.lie("sbom-cyclonedx", lie))
    assert node.verdict is Verdict.BROKEN, show(node)
    assert node.culprit().message.startswith(why)


@pytest.mark.parametrize("kind", ["SPDXRef-Tree", "SPDXRef-Source", "SPDXRef-Toolchain"])
def test_an_SPDX_bill_that_hides_it_is_broken(world: World, kind: str) -> None:
    def hide(body: Body) -> None:
        kept = [p for p in body["predicate"]["packages"] if not p["SPDXID"].startswith(kind)]
        assert len(kept) < len(body["predicate"]["packages"])
        body["predicate"]["packages"] = kept

    node = world.judge(sbom_spdx=world.lie("sbom-spdx", hide))
    assert node.verdict is Verdict.BROKEN, show(node)


def changed_spec(checkout: Checkout, change: Callable[[Body], None]) -> None:
    path = checkout.source_folder("hello") / "source.yaml"
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec))


def other_flags(checkout: Checkout) -> None:
    changed_spec(checkout, lambda s: s["builds"]["plain"]["steps"][0]["run"].append("-O3"))


def new_patch(checkout: Checkout) -> None:
    patch = checkout.root / PATCH
    patch.write_text(patch.read_text() + "\n")


def patch_gone(checkout: Checkout) -> None:
    (checkout.root / PATCH).unlink()


def relocked(checkout: Checkout) -> None:
    archive = write_archive(checkout.root.parent / "mirror")
    archive.write_bytes(archive.read_bytes() + b"\0" * 1024)
    lock_source(checkout, archive, "hello")


def other_toolchain_file(checkout: Checkout) -> None:
    (checkout.root / "images/tools/cc.sh").write_text("#!/bin/bash\n")


MOVES: dict[Callable[[Checkout], None], list[str]] = {
    other_flags: [f"{SPEC}has changed since: builds"],
    new_patch: [f"{PATCH}: has changed since"],
    patch_gone: [f"{PATCH}: is missing from this checkout"],
    relocked: [f"{SPEC}another archive is locked now: hello-1.0.tar"],
    other_toolchain_file: [
        "images/tools/cc.sh: has changed since",
        "golden digest: has changed since: files",
    ],
}


@pytest.mark.parametrize("move", MOVES)
def test_what_moved_in_the_checkout_since_makes_it_stale(
    world: World, tmp_path: Path, move: Callable[[Checkout], None]
) -> None:
    checkout = world.checkout_copy(tmp_path)
    move(checkout)
    node = world.walk(checkout=checkout).node
    assert node.verdict is Verdict.STALE, show(node)
    assert reasons(node) == MOVES[move]


def test_a_build_that_the_image_does_not_hold_may_change(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    spec = source_spec()
    spec["builds"]["third"] = {**spec["builds"]["plain"], "to": "/opt/third"}
    add_source(checkout, write_archive(tmp_path / "mirror"), spec)
    node = world.walk(checkout=checkout).node
    assert node.verdict is Verdict.VALID, show(node)


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ("sources/hello.lock.yaml", [f"{SPEC}hello.lock.yaml: there is no such lock"]),
        (
            "golden.yaml",
            [f"golden digest: none is committed for {x}.amd64" for x in ("engine", "tools")],
        ),
    ],
)
def test_what_cannot_be_compared_is_incomplete(
    world: World, tmp_path: Path, gone: str, why: list[str]
) -> None:
    checkout = world.checkout_copy(tmp_path)
    (checkout.root / "lockfiles" / gone).unlink()
    node = world.walk(checkout=checkout).node
    assert (node.verdict, reasons(node)) == (Verdict.INCOMPLETE, why)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One whose builds let a file differ, built again with that difference."""
    builds = source_spec()["builds"]
    builds = {name: {**build, "may_differ": {"notes": WHY}} for name, build in builds.items()}
    made = build_compiled(tmp_path_factory.mktemp("lenient"), builds=builds)
    statements = image_statements(made.checkout, made.store, made.built, WHEN)
    key = make_private_key()
    again = (made.built, LocalSigner(key), "1 file differs as declared", WHEN)
    statements["rebuild"] = rebuild_statement(*again, [NOTES])
    return World(
        made.place, made.checkout, made.store, made.built, key, make_private_key(), statements
    )


def test_an_equivalent_rebuild_is_valid_and_says_so(lenient: World) -> None:
    node = lenient.walk().node
    assert node.verdict is Verdict.VALID, show(node)
    assert "equivalent, 1 file with declared differences" in show(node)


def test_a_set_lists_an_equivalent_rebuild_as_such(lenient: World) -> None:
    about, verdict = verdict_of(lenient.statements["rebuild"])
    assert (about or "").startswith("by sha256:")
    assert verdict == "equivalent"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"equivalent": [{"path": "/opt/hello/bin/hello", "reason": WHY}]},
            "/opt/hello/bin/hello differs, and no build declares that with this reason",
        ),
        (
            {"equivalent": [{"path": "/opt/hello/notes", "reason": "somebody says so"}]},
            "/opt/hello/notes differs, and no build declares that with this reason",
        ),
        (
            {"equivalent": [NOTES.model_dump(), {"path": "/etc/passwd", "reason": WHY}]},
            "/etc/passwd differs, and no build declares that with this reason",
        ),
        ({"equivalent": []}, "equivalent: List should have at least 1 item"),
        ({"equivalent": None}, "gave a different digest"),
        ({"identical": True}, "claims to be identical, but names a difference"),
    ],
)
def test_a_difference_that_no_build_declares_is_broken(
    lenient: World, changes: Body, why: str
) -> None:
    lie = lenient.lie("rebuild", lambda body: body["predicate"].update(changes))
    node = lenient.judge(rebuild=lie)
    assert node.verdict is Verdict.BROKEN, show(node)
    assert why in node.culprit().message


def test_an_image_whose_build_declares_nothing_has_no_equivalent(world: World) -> None:
    statement = rebuild_statement(world.built, LocalSigner(world.key), "some", WHEN, [NOTES])
    node = world.judge(rebuild=enclose(statement, [LocalSigner(world.key)]))
    assert node.verdict is Verdict.BROKEN, show(node)


JUNK: list[Any] = [None, [], "../../../etc", 7, {"x": None}]


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a value that can be replaced: its container and key."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(inner):
        yield value, key
        if isinstance(each, dict | list):
            yield from spots(each)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_anywhere_in_the_record_is_a_verdict_and_never_a_crash(
    world: World, junk: Any
) -> None:
    body = json.loads(world.statements["provenance"].dump())
    external = body["predicate"]["buildDefinition"]["externalParameters"]
    parts = [
        tree_in(body)["annotations"],
        *(one(body, x)["annotations"] for x in ("source:", "toolchain:", "build-time:")),
        external["sources"]["hello"]["spec"],
        external["images"]["engine"]["spec"],
    ]
    tried = 0
    for container, key in [spot for part in parts for spot in spots(part)]:
        before, container[key] = container[key], junk
        try:
            provenance = read_provenance(body["predicate"])
            judge_trees(provenance, world.artifact, world.checkout)
            may_differ(provenance)
            tried += 1
        finally:
            container[key] = before
    assert tried > 100
